// y[M, N] = x[M, K] * w[N, K]^T, times a scale per output for integer weights. Rows behind the first `count` are
// padding: they become zeros and cost nothing.
//
// Both operands are read along K, so weights stay as checkpoints have them. A tile of kTileRows x kTileOutputs
// sums is held in registers; its weights, converted as they are loaded, stay in the first cache while all rows
// pass by, and the next tile's are fetched meanwhile.
#include <algorithm>

#include "parallel.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

constexpr int kTileRows = kLanes == 16 ? 6 : 3;
constexpr int kTileOutputs = 4;
constexpr int64_t kBlockRows = 96;      // rows that share a tile's weights: they fit the second cache
constexpr int64_t kTaskOutputs = 24;    // outputs of a task: a multiple of this
constexpr int64_t kTasksPerThread = 12;

inline void store_sums(const Floats (&sums)[1], float* y, const float* scales) {
  *y = sum(sums[0]) * (scales ? *scales : 1.0f);
}

inline void store_sums(const Floats (&sums)[kTileOutputs], float* y, const float* scales) {
  FourFloats four = sums_of_four(sums[0], sums[1], sums[2], sums[3]);
  if (scales) four *= *reinterpret_cast<const UnalignedFour*>(scales);
  *reinterpret_cast<UnalignedFour*>(y) = four;
}

// `Fetch`: rows of the next tile's weights, from row `fetch` on, to bring into the cache meanwhile.
template <typename W, int Rows, int Outputs, int Fetch>
inline __attribute__((always_inline)) void tile(const float* x, const typename W::Stored* w, float* y, int64_t k,
                                                int64_t n, const float* scales, int fetch) {
  Floats sums[Rows][Outputs] = {};
  const auto* next = w + (Outputs + fetch) * k;
  for (int64_t i = 0; i < k; i += kLanes) {
    Floats lanes[Rows];
    for (int row = 0; row < Rows; ++row) lanes[row] = in_register(load(x + row * k + i));
    for (int f = 0; f < Fetch; ++f) __builtin_prefetch(next + f * k + i);
    for (int out = 0; out < Outputs; ++out) {
      Floats weights = W::lanes(w + out * k + i);
      for (int row = 0; row < Rows; ++row) sums[row][out] += lanes[row] * weights;
    }
  }
  for (int row = 0; row < Rows; ++row) store_sums(sums[row], y + row * n, scales);
}

// What is left of a block's rows: between 1 and kTileRows - 1.
template <typename W, int Rows, int Outputs, int Fetch>
void last_rows(int64_t count, const float* x, const typename W::Stored* w, float* y, int64_t k, int64_t n,
               const float* scales, int fetch) {
  if constexpr (Rows > 0) {
    if (count == Rows) {
      tile<W, Rows, Outputs, Fetch>(x, w, y, k, n, scales, fetch);
    } else {
      last_rows<W, Rows - 1, Outputs, Fetch>(count, x, w, y, k, n, scales, fetch);
    }
  }
}

template <typename W, int Outputs, int Fetch>
void all_rows(int64_t m, const float* x, const typename W::Stored* w, float* y, int64_t k, int64_t n,
              const float* scales) {
  int fetch = 0;
  int64_t row = 0;
  for (; row + kTileRows <= m; row += kTileRows, fetch += Fetch) {
    if (fetch < Outputs) {
      tile<W, kTileRows, Outputs, Fetch>(x + row * k, w, y + row * n, k, n, scales, fetch);
    } else {
      tile<W, kTileRows, Outputs, 0>(x + row * k, w, y + row * n, k, n, scales, 0);
    }
  }
  last_rows<W, kTileRows - 1, Outputs, Fetch>(m - row, x + row * k, w, y + row * n, k, n, scales, fetch);
}

template <typename W>
void outputs(int64_t m, const float* x, const typename W::Stored* w, float* y, int64_t k, int64_t n, int64_t begin,
             int64_t end, const float* scales) {
  if (m == 1) {  // only the memory's speed counts: one plain stream of weights is what it serves best
    for (int64_t out = begin; out < end; ++out) {
      tile<W, 1, 1, 0>(x, w + out * k, y + out, k, n, scales ? scales + out : nullptr, 0);
    }
    return;
  }
  for (int64_t row = 0; row < m; row += kBlockRows) {
    const int64_t rows = std::min(kBlockRows, m - row);
    const float* block = x + row * k;
    float* to = y + row * n;
    int64_t out = begin;
    for (; out + kTileOutputs <= end; out += kTileOutputs) {
      const float* own = scales ? scales + out : nullptr;
      if (rows <= kTileRows) {
        all_rows<W, kTileOutputs, kTileOutputs>(rows, block, w + out * k, to + out, k, n, own);
      } else if (rows <= 3 * kTileRows) {
        all_rows<W, kTileOutputs, 2>(rows, block, w + out * k, to + out, k, n, own);
      } else {
        all_rows<W, kTileOutputs, 1>(rows, block, w + out * k, to + out, k, n, own);
      }
    }
    for (; out < end; ++out) {
      all_rows<W, 1, 1>(rows, block, w + out * k, to + out, k, n, scales ? scales + out : nullptr);
    }
  }
}

template <typename W>
void matmul(ffi::ThreadPool& pool, const float* x, const void* stored, float* y, int64_t m, int64_t k, int64_t n,
            const float* scales) {
  const auto* w = static_cast<const typename W::Stored*>(stored);
  const int64_t share = n / (kTasksPerThread * std::max<int64_t>(1, pool.num_threads()));
  const int64_t width = (share / kTaskOutputs + 1) * kTaskOutputs;
  parallel_for(pool, (n + width - 1) / width, [=](int64_t task) {
    outputs<W>(m, x, w, y, k, n, task * width, std::min(n, (task + 1) * width), scales);
  });
}

ffi::Error matmul_handler(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::AnyBuffer w,
                          ffi::BufferR0<ffi::S32> count, ffi::RemainingArgs rest, ffi::ResultBufferR2<ffi::F32> y) {
  const int64_t k = x.dimensions()[1], n = w.dimensions()[0];
  const int64_t m = std::clamp<int64_t>(*count.typed_data(), 0, x.dimensions()[0]);
  if (k % kLanes || w.dimensions()[1] != k) return ffi::Error::InvalidArgument("matmul: K is not a multiple of lanes");
  const float* scales = nullptr;
  if (rest.size() == 1) scales = rest.get<ffi::BufferR1<ffi::F32>>(0)->typed_data();
  const float* from = x.typed_data();
  float* to = y->typed_data();
  std::fill_n(to + m * n, (x.dimensions()[0] - m) * n, 0.0f);
  const void* weights = w.untyped_data();
  switch (w.element_type()) {
    case ffi::F32: matmul<Float32>(pool, from, weights, to, m, k, n, scales); break;
    case ffi::F16: matmul<Float16>(pool, from, weights, to, m, k, n, scales); break;
    case ffi::BF16: matmul<BFloat16>(pool, from, weights, to, m, k, n, scales); break;
    case ffi::S8: matmul<Int8>(pool, from, weights, to, m, k, n, scales); break;
    default: return ffi::Error::InvalidArgument("matmul: weights of this type are not supported");
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_matmul, jaxserve::matmul_handler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::BufferR0<xla::ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::BufferR2<xla::ffi::F32>>());
