// Tokens of a loop on the device for a host that does not wait for the loop's end: written to a pipe, step by step.

#include <limits.h>
#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "xla/ffi/api/ffi.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

std::atomic<int> report_file{-1};

// Copies the tokens, and writes `about` and them in one piece: pipes do not mix writes up to PIPE_BUF bytes. A pipe that is full, or
// gone, gets nothing.
ffi::Error report_handler(ffi::BufferR1<ffi::S32> tokens, ffi::BufferR1<ffi::S32> about,
                          ffi::ResultBufferR1<ffi::S32> out) {
  std::memcpy(out->typed_data(), tokens.typed_data(), tokens.size_bytes());
  const int file = report_file.load(std::memory_order_relaxed);
  if (file >= 0 && about.size_bytes() + tokens.size_bytes() <= PIPE_BUF) {
    const iovec parts[] = {{about.typed_data(), about.size_bytes()}, {tokens.typed_data(), tokens.size_bytes()}};
    [[maybe_unused]] const auto written = writev(file, parts, 2);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

// The file that gets the reports of this process; -1: none does.
extern "C" void jaxserve_report_to(int file) { jaxserve::report_file.store(file); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_report, jaxserve::report_handler,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Ret<xla::ffi::BufferR1<xla::ffi::S32>>());
