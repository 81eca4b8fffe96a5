// Zeroed memory that the system provides page by page as it is touched, instead of all at once.

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "xla/ffi/api/ffi.h"

namespace jaxserve {

// Private memory whose pages were given back reads as zeros. What shares a page with others is cleared by hand.
void clear(char* begin, size_t size) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<uintptr_t>(begin);
  const uintptr_t first = (start + page - 1) / page * page, last = (start + size) / page * page;
  if (first >= last || madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED) != 0) {
    std::memset(begin, 0, size);
    return;
  }
  std::memset(begin, 0, first - start);
  std::memset(reinterpret_cast<void*>(last), 0, start + size - last);
}

xla::ffi::Error zeros_handler(xla::ffi::RemainingRets results) {
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<xla::ffi::AnyBuffer>(i);
    if (!result.has_value()) return result.error();
    clear(static_cast<char*>((*result)->untyped_data()), (*result)->size_bytes());
  }
  return xla::ffi::Error::Success();
}

}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_zeros, jaxserve::zeros_handler, xla::ffi::Ffi::Bind().RemainingRets());
