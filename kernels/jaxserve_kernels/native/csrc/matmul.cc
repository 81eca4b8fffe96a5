// y[M, N] = x[M, K] * w[N, K]^T, times a scale per output for integer weights; several weights may share a call and its x.
// Rows behind the first `count` are padding: they become zeros and cost nothing. Grouped, each row is multiplied with its expert's matrix (outputs.h).
#include <algorithm>
#include <cmath>
#include <vector>

#include "outputs.h"

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

// The operands of a matmul, with what is padding already zero.
ffi::ErrorOr<Operands> operands(ffi::BufferR2<ffi::F32> x, ffi::AnyBuffer w, ffi::BufferR0<ffi::S32> count,
                                const float* scales, ffi::ResultBufferR2<ffi::F32> y, int step) {
  const int64_t k = x.dimensions()[1], n = w.dimensions()[0];
  if (k == 0 || k % step || w.dimensions()[1] != k) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("matmul: K is zero, or not a multiple of the inputs taken at once"));
  }
  const int64_t m = std::clamp<int64_t>(*count.typed_data(), 0, x.dimensions()[0]);
  std::fill_n(y->typed_data() + m * n, (x.dimensions()[0] - m) * n, 0.0f);
  return Operands{x.typed_data(), w.untyped_data(), y->typed_data(), m, k, n, scales};
}

// Matmuls of one x. `rest`: weights for each result, all of one type, then scales for each or none at all.
struct Together {
  ffi::DataType type;
  std::vector<Operands> matmuls;
};

ffi::ErrorOr<Together> together(ffi::BufferR2<ffi::F32> x, ffi::BufferR0<ffi::S32> count, ffi::RemainingArgs rest,
                                ffi::RemainingRets ys, int step) {
  const size_t num = ys.size();
  if (num == 0 || (rest.size() != num && rest.size() != 2 * num)) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("matmul: weights or scales are missing"));
  }
  Together all{rest.get<ffi::AnyBuffer>(0)->element_type(), {}};
  for (size_t i = 0; i < num; ++i) {
    const auto w = *rest.get<ffi::AnyBuffer>(i);
    const auto y = ys.get<ffi::BufferR2<ffi::F32>>(i);
    if (y.has_error() || w.dimensions().size() != 2 || w.element_type() != all.type) {
      return ffi::Unexpected(ffi::Error::InvalidArgument("matmul: weights of one input have several types or shapes"));
    }
    const float* scales = nullptr;
    if (rest.size() > num) {
      const auto of_outputs = rest.get<ffi::BufferR1<ffi::F32>>(num + i);
      if (of_outputs.has_error()) return ffi::Unexpected(of_outputs.error());
      scales = of_outputs->typed_data();
    }
    const auto made = operands(x, w, count, scales, *y, step);
    if (made.has_error()) return ffi::Unexpected(made.error());
    all.matmuls.push_back(*made);
  }
  return all;
}

// The same with groups: as many of the rows are no padding as these have.
ffi::ErrorOr<Operands> operands(ffi::BufferR2<ffi::F32> x, ffi::AnyBuffer w, ffi::BufferR1<ffi::S32> sizes,
                                ffi::RemainingArgs rest, ffi::ResultBufferR2<ffi::F32> y, int step,
                                std::vector<Group>& groups) {
  const auto shape = w.dimensions();
  const int64_t k = x.dimensions()[1];
  if (shape.size() != 3 || shape[0] != sizes.dimensions()[0] || shape[2] != k || k == 0 || k % step) {
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

template <typename P>
std::vector<Product<P>> product_of(const std::vector<Operands>& all, bool is_tiled = false) {
  std::vector<Product<P>> products;
  for (const Operands& o : all) products.push_back(product_of<P>(o, is_tiled));
  return products;
}

// `Matmul`: Operands, with the groups of its rows; or several Operands with the same rows.
template <typename P, typename Matmul, typename... Groups>
void multiply_floats(ffi::ThreadPool& pool, const Matmul& matmul, bool is_tiled, const Groups&... groups) {
  multiply(pool, product_of<P>(matmul, is_tiled && tiles::allowed()), groups...);
}

template <typename Matmul, typename... Groups>
ffi::Error multiply_stored(ffi::ThreadPool& pool, ffi::DataType type, const Matmul& matmul, bool is_tiled,
                           const Groups&... groups) {
  switch (type) {
    case ffi::F32: multiply_floats<Float32>(pool, matmul, is_tiled, groups...); break;
    case ffi::F16: multiply_floats<Float16>(pool, matmul, is_tiled, groups...); break;
    case ffi::BF16: multiply_floats<BFloat16>(pool, matmul, is_tiled, groups...); break;
    case ffi::S8: multiply_floats<Int8>(pool, matmul, is_tiled, groups...); break;
    default: return ffi::Error::InvalidArgument("matmul: weights of this type are not supported");
  }
  return ffi::Error::Success();
}

// `is_tiled`: the matrix unit is asked for. One program has one answer, as the two add up in different orders.
ffi::Error matmul_handler(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::BufferR0<ffi::S32> count,
                          ffi::RemainingArgs rest, ffi::RemainingRets ys, bool is_tiled) {
  const auto all = together(x, count, rest, ys, FloatInputs::kStep);
  return all.has_error() ? all.error() : multiply_stored(pool, all->type, all->matmuls, is_tiled);
}

ffi::Error grouped_handler(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::AnyBuffer w,
                           ffi::BufferR1<ffi::S32> sizes, ffi::RemainingArgs rest, ffi::ResultBufferR2<ffi::F32> y,
                           bool is_tiled) {
  std::vector<Group> groups;
  const auto all = operands(x, w, sizes, rest, y, FloatInputs::kStep, groups);
  return all.has_error() ? all.error() : multiply_stored(pool, w.element_type(), *all, is_tiled, groups);
}

constexpr int64_t kQuantizeRows = 16;  // rows one task quantises
constexpr int64_t kFewRows = 4;        // of int8, which the vector unit serves as well: sums are exact on both

// Symmetric int8 by the row's largest value, rounded to even.
Quantized quantize(const float* x, int64_t k, Int8Inputs::Input* to) {
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

// The rows of x in int8.
struct QuantizedRows {
  std::vector<Int8Inputs::Input> values;
  std::vector<Quantized> rows;

  QuantizedRows(ffi::ThreadPool& pool, const float* x, int64_t m, int64_t k) : values(m * k), rows(m) {
    parallel_for(pool, (m + kQuantizeRows - 1) / kQuantizeRows, [=, to = values.data(), info = rows.data()](int64_t i) {
      const int64_t end = std::min((i + 1) * kQuantizeRows, m);
      for (int64_t r = i * kQuantizeRows; r < end; ++r) info[r] = quantize(x + r * k, k, to + r * k);
    });
  }

  Product<Int8Inputs> product_of(const Operands& o) const {
    const bool is_tiled = o.m > kFewRows && tiles::allowed();
    return {values.data(), static_cast<const int8_t*>(o.w), o.y, o.m, o.k, o.n, o.scales, rows.data(), is_tiled};
  }
};

ffi::Error matmul_int8_handler(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::BufferR0<ffi::S32> count,
                               ffi::RemainingArgs rest, ffi::RemainingRets ys) {
  const auto all = together(x, count, rest, ys, Int8Inputs::kStep);
  if (all.has_error()) return all.error();
  if (all->type != ffi::S8) return ffi::Error::InvalidArgument("matmul: these weights are not int8");
  const Operands& first = all->matmuls.front();
  const QuantizedRows quantized(pool, first.x, first.m, first.k);
  std::vector<Product<Int8Inputs>> products;
  for (const Operands& o : all->matmuls) products.push_back(quantized.product_of(o));
  multiply(pool, products);
  return ffi::Error::Success();
}

ffi::Error grouped_int8_handler(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::AnyBuffer w,
                                ffi::BufferR1<ffi::S32> sizes, ffi::RemainingArgs rest,
                                ffi::ResultBufferR2<ffi::F32> y) {
  if (w.element_type() != ffi::S8) return ffi::Error::InvalidArgument("matmul: these weights are not int8");
  std::vector<Group> groups;
  const auto all = operands(x, w, sizes, rest, y, Int8Inputs::kStep, groups);
  if (all.has_error()) return all.error();
  const QuantizedRows quantized(pool, all->x, all->m, all->k);
  multiply(pool, quantized.product_of(*all), groups);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

extern "C" bool jaxserve_has_matrix_unit() { return jaxserve::tiles::allowed(); }

#define JAXSERVE_MATMUL(name, handler, ...)                                                                   \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, jaxserve::handler,                                                      \
                                xla::ffi::Ffi::Bind()                                                         \
                                    .Ctx<xla::ffi::ThreadPool>()                                              \
                                    .Arg<xla::ffi::BufferR2<xla::ffi::F32>>() __VA_ARGS__)
#define JAXSERVE_TOGETHER .Arg<xla::ffi::BufferR0<xla::ffi::S32>>().RemainingArgs().RemainingRets()
#define JAXSERVE_GROUPED                                                                                      \
  .Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::BufferR1<xla::ffi::S32>>().RemainingArgs().Ret<xla::ffi::BufferR2<xla::ffi::F32>>()

JAXSERVE_MATMUL(jaxserve_matmul, matmul_handler, JAXSERVE_TOGETHER.Attr<bool>("matrix_unit"));
JAXSERVE_MATMUL(jaxserve_grouped_matmul, grouped_handler, JAXSERVE_GROUPED.Attr<bool>("matrix_unit"));
JAXSERVE_MATMUL(jaxserve_matmul_int8, matmul_int8_handler, JAXSERVE_TOGETHER);
JAXSERVE_MATMUL(jaxserve_grouped_matmul_int8, grouped_int8_handler, JAXSERVE_GROUPED);
