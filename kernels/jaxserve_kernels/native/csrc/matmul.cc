// y[M, N] = x[M, K] * w[N, K]^T, times a scale per output for integer weights. Rows behind the first `count` are
// padding: they become zeros and cost nothing. Grouped, each row is multiplied with its expert's matrix (outputs.h).
#include <algorithm>
#include <cmath>
#include <vector>

#include "outputs.h"
#include "panels.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

struct Operands {
  const float* x;
  const void* w;
  float* y;
  int64_t m, k, n;
  const float* scales;
};

// The operands of a call, with what is padding already zero.
ffi::ErrorOr<Operands> operands(ffi::BufferR2<ffi::F32> x, ffi::AnyBuffer w, ffi::BufferR0<ffi::S32> count,
                                ffi::RemainingArgs rest, ffi::ResultBufferR2<ffi::F32> y, int step) {
  const int64_t k = x.dimensions()[1], n = w.dimensions()[0];
  if (k % step || w.dimensions()[1] != k) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("matmul: K is not a multiple of the inputs taken at once"));
  }
  const int64_t m = std::clamp<int64_t>(*count.typed_data(), 0, x.dimensions()[0]);
  const float* scales = rest.size() == 1 ? rest.get<ffi::BufferR1<ffi::F32>>(0)->typed_data() : nullptr;
  std::fill_n(y->typed_data() + m * n, (x.dimensions()[0] - m) * n, 0.0f);
  return Operands{x.typed_data(), w.untyped_data(), y->typed_data(), m, k, n, scales};
}

// The same with groups: as many of the rows are no padding as these have.
ffi::ErrorOr<Operands> operands(ffi::BufferR2<ffi::F32> x, ffi::AnyBuffer w, ffi::BufferR1<ffi::S32> sizes,
                                ffi::RemainingArgs rest, ffi::ResultBufferR2<ffi::F32> y, int step,
                                std::vector<Group>& groups) {
  const auto shape = w.dimensions();
  const int64_t k = x.dimensions()[1];
  if (shape.size() != 3 || shape[0] != sizes.dimensions()[0] || shape[2] != k || k % step) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("grouped matmul: shapes that do not go together"));
  }
  int64_t m = 0;
  for (int64_t expert = 0; expert < shape[0]; ++expert) {
    const int64_t rows = std::clamp<int64_t>(sizes.typed_data()[expert], 0, x.dimensions()[0] - m);
    if (rows) groups.push_back({expert, m, rows});
    m += rows;
  }
  const float* scales = rest.size() == 1 ? rest.get<ffi::BufferR2<ffi::F32>>(0)->typed_data() : nullptr;
  std::fill_n(y->typed_data() + m * shape[1], (x.dimensions()[0] - m) * shape[1], 0.0f);
  return Operands{x.typed_data(), w.untyped_data(), y->typed_data(), m, k, shape[1], scales};
}

template <typename P>
Product<P> product_of(const Operands& o, bool is_tiled = false) {
  const auto* w = static_cast<const typename P::Stored*>(o.w);
  return {o.x, w, o.y, o.m, o.k, o.n, o.scales, nullptr, is_tiled};
}

template <typename P, typename... Groups>
void multiply_floats(ffi::ThreadPool& pool, const Operands& o, bool is_tiled, const Groups&... groups) {
  multiply(pool, product_of<P>(o, is_tiled && tiles::allowed()), groups...);
}

template <typename... Groups>
ffi::Error multiply_stored(ffi::ThreadPool& pool, ffi::DataType type, const Operands& o, bool is_tiled,
                           const Groups&... groups) {
  switch (type) {
    case ffi::F32: multiply_floats<Float32>(pool, o, is_tiled, groups...); break;
    case ffi::F16: multiply_floats<Float16>(pool, o, is_tiled, groups...); break;
    case ffi::BF16: multiply_floats<BFloat16>(pool, o, is_tiled, groups...); break;
    case ffi::S8: multiply_floats<Int8>(pool, o, is_tiled, groups...); break;
    default: return ffi::Error::InvalidArgument("matmul: weights of this type are not supported");
  }
  return ffi::Error::Success();
}

// `is_tiled`: the matrix unit is asked for. One program has one answer, as the two add up in different orders.
ffi::Error matmul_handler(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::AnyBuffer w,
                          ffi::BufferR0<ffi::S32> count, ffi::RemainingArgs rest, ffi::ResultBufferR2<ffi::F32> y,
                          bool is_tiled) {
  const auto all = operands(x, w, count, rest, y, FloatInputs::kStep);
  return all.has_error() ? all.error() : multiply_stored(pool, w.element_type(), *all, is_tiled);
}

// Multiplies many rows with packed weights (panels.h), which adds up in another order than both units above.
ffi::Error panels_handler(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::AnyBuffer w,
                          ffi::BufferR0<ffi::S32> count, ffi::RemainingArgs rest, ffi::ResultBufferR2<ffi::F32> y) {
  const auto all = operands(x, w, count, rest, y, FloatInputs::kStep);
  if (all.has_error()) return all.error();
  if (all->scales) return ffi::Error::InvalidArgument("matmul in panels: weights with scales are not supported");
  switch (w.element_type()) {
    case ffi::F32: multiply_panels(pool, product_of<Float32>(*all)); break;
    case ffi::F16: multiply_panels(pool, product_of<Float16>(*all)); break;
    case ffi::BF16: multiply_panels(pool, product_of<BFloat16>(*all)); break;
    default: return ffi::Error::InvalidArgument("matmul in panels: weights of this type are not supported");
  }
  return ffi::Error::Success();
}

ffi::Error grouped_handler(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::AnyBuffer w,
                           ffi::BufferR1<ffi::S32> sizes, ffi::RemainingArgs rest, ffi::ResultBufferR2<ffi::F32> y,
                           bool is_tiled) {
  std::vector<Group> groups;
  const auto all = operands(x, w, sizes, rest, y, FloatInputs::kStep, groups);
  return all.has_error() ? all.error() : multiply_stored(pool, w.element_type(), *all, is_tiled, groups);
}

#if defined(JAXSERVE_INT8)
constexpr int64_t kQuantizeRows = 16;  // rows one task quantises
constexpr int64_t kFewRows = 4;        // of int8, which the vector unit serves as well: sums are exact on both

// Symmetric int8 by the row's largest value, rounded to even.
Quantized quantize(const float* x, int64_t k, int8_t* to) {
  Floats largest = {};
  for (int64_t i = 0; i < k; i += kLanes) {
    const Floats v = load(x + i), magnitude = v < 0.0f ? -v : v;
    largest = largest > magnitude ? largest : magnitude;
  }
  const float scale = std::max(maximum(largest), 1e-30f) / 127;
  Ints total = {};
  for (int64_t i = 0; i < k; i += kLanes) total += store_rounded(to + i, load(x + i) / scale);
  return {scale, sum(total)};
}

template <typename... Groups>
ffi::Error multiply_int8(ffi::ThreadPool& pool, ffi::DataType type, const Operands& o, const Groups&... groups) {
  if (type != ffi::S8) return ffi::Error::InvalidArgument("matmul: these weights are not int8");
  std::vector<int8_t> values(o.m * o.k);
  std::vector<Quantized> rows(o.m);
  parallel_for(pool, (o.m + kQuantizeRows - 1) / kQuantizeRows, [=, to = values.data(), info = rows.data()](int64_t i) {
    const int64_t end = std::min((i + 1) * kQuantizeRows, o.m);
    for (int64_t r = i * kQuantizeRows; r < end; ++r) info[r] = quantize(o.x + r * o.k, o.k, to + r * o.k);
  });
  const auto* stored = static_cast<const int8_t*>(o.w);
  const bool is_tiled = o.m > kFewRows && tiles::allowed();
  const Product<Int8Inputs> product{values.data(), stored, o.y, o.m, o.k, o.n, o.scales, rows.data(), is_tiled};
  multiply(pool, product, groups...);
  return ffi::Error::Success();
}

ffi::Error matmul_int8_handler(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::AnyBuffer w,
                               ffi::BufferR0<ffi::S32> count, ffi::RemainingArgs rest,
                               ffi::ResultBufferR2<ffi::F32> y) {
  const auto all = operands(x, w, count, rest, y, Int8Inputs::kStep);
  return all.has_error() ? all.error() : multiply_int8(pool, w.element_type(), *all);
}

ffi::Error grouped_int8_handler(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::AnyBuffer w,
                                ffi::BufferR1<ffi::S32> sizes, ffi::RemainingArgs rest,
                                ffi::ResultBufferR2<ffi::F32> y) {
  std::vector<Group> groups;
  const auto all = operands(x, w, sizes, rest, y, Int8Inputs::kStep, groups);
  return all.has_error() ? all.error() : multiply_int8(pool, w.element_type(), *all, groups);
}
#endif

}  // namespace
}  // namespace jaxserve

extern "C" bool jaxserve_has_matrix_unit() { return jaxserve::tiles::allowed(); }

// Rows: how many there are, or of each group. The rest: attributes.
#define JAXSERVE_MATMUL(name, handler, Rows, ...)                                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, jaxserve::handler,                                      \
                                xla::ffi::Ffi::Bind()                                         \
                                    .Ctx<xla::ffi::ThreadPool>()                              \
                                    .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()                 \
                                    .Arg<xla::ffi::AnyBuffer>()                               \
                                    .Arg<xla::ffi::Rows<xla::ffi::S32>>()                     \
                                    .RemainingArgs()                                          \
                                    .Ret<xla::ffi::BufferR2<xla::ffi::F32>>() __VA_ARGS__)

JAXSERVE_MATMUL(jaxserve_matmul, matmul_handler, BufferR0, .Attr<bool>("matrix_unit"));
JAXSERVE_MATMUL(jaxserve_matmul_panels, panels_handler, BufferR0, );
JAXSERVE_MATMUL(jaxserve_grouped_matmul, grouped_handler, BufferR1, .Attr<bool>("matrix_unit"));
#if defined(JAXSERVE_INT8)
JAXSERVE_MATMUL(jaxserve_matmul_int8, matmul_int8_handler, BufferR0, );
JAXSERVE_MATMUL(jaxserve_grouped_matmul_int8, grouped_int8_handler, BufferR1, );
#endif
