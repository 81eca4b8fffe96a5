// Matmuls of many rows on the vector unit: y[M, N] = x[M, K] * w[N, K]^T with weights packed in panels of kPanel outputs.
//
// A panel is [K, kPanel]: the lanes of a vector are neighbouring outputs, and a tile of kPanelRows rows needs one broadcast for
// kPanelVectors products. All rows pass by a panel that was packed once, kPanelInputs inputs at a time: those of a panel stay in
// the caches, and so do the sums of its outputs. An output is the sum of the sums of these chunks, each in the order of its inputs,
// whatever surrounds a row; `outputs.h` adds in another order.
#pragma once

#include <algorithm>
#include <memory>

#include "parallel.h"
#include "products.h"
#include "transpose.h"

namespace jaxserve {

namespace ffi = xla::ffi;

constexpr int kPanelVectors = kRegisters == 32 ? 3 : 2;
constexpr int kPanelRows = kRegisters == 32 ? 8 : 6;
constexpr int kPanel = kPanelVectors * kLanes;  // outputs
constexpr int64_t kPanelInputs = 768;           // inputs of a chunk: 147 KB of a panel with AVX-512
constexpr int64_t kPieceRows = 256;             // least rows for which a task packs a panel

// Packs `count` inputs, from `start` on, of kPanel outputs from `out` on: [count, kPanel]. Outputs after the last one are zeros.
template <typename P>
void pack_panel(const Product<P>& product, int64_t out, int64_t start, int64_t count, float* to) {
  for (int v = 0; v < kPanelVectors; ++v, out += kLanes, to += kLanes) {
    const auto* w = product.w + out * product.k + start;
    for (int64_t i = 0; i < count; i += kLanes) {
      Floats columns[kLanes] = {};
      for (int64_t o = 0; o < std::min<int64_t>(kLanes, product.n - out); ++o) columns[o] = P::weights(w + o * product.k + i);
      transpose(columns);
      for (int l = 0; l < kLanes; ++l) store(to + (i + l) * kPanel, columns[l]);
    }
  }
}

// Adds a chunk's sums of Rows rows with a panel to those before, or without any stores them.
template <int Rows>
inline __attribute__((always_inline)) void panel_tile(const float* x, int64_t k, int64_t count, const float* panel, float* y,
                                                      int64_t stride, bool is_first) {
  Floats sums[Rows][kPanelVectors] = {};
  for (int64_t start = 0; start < count; start += kLanes, x += kLanes) {
    for (int r = 0; r < Rows; ++r) __builtin_prefetch(x + (Rows + r) * k, 0, 2);
    for (int i = 0; i < kLanes; ++i, panel += kPanel) {
      Floats weights[kPanelVectors];
      for (int v = 0; v < kPanelVectors; ++v) weights[v] = in_register(load(panel + v * kLanes));
      for (int r = 0; r < Rows; ++r) {
        const Floats input = in_register(broadcast(x[r * k + i]));
        for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = multiply_add(sums[r][v], input, weights[v]);
      }
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kPanelVectors; ++v) {
      float* to = y + r * stride + v * kLanes;
      store(to, is_first ? sums[r][v] : load(to) + sums[r][v]);
    }
  }
}

template <int Rows>
void panel_rows(int64_t rows, const float* x, int64_t k, int64_t count, const float* panel, float* y, int64_t stride,
                bool is_first) {
  if constexpr (Rows > 0) {
    if (rows == Rows) {
      panel_tile<Rows>(x, k, count, panel, y, stride, is_first);
    } else {
      panel_rows<Rows - 1>(rows, x, k, count, panel, y, stride, is_first);
    }
  }
}

// Computes the outputs of one panel, from `out` on, for rows from `begin` to `end`.
template <typename P>
void multiply_panel(const Product<P>& product, int64_t out, int64_t begin, int64_t end) {
  alignas(64) static thread_local float panel[kPanelInputs * kPanel];
  alignas(64) float last[kPanelRows * kPanel];
  const int64_t outputs = std::min<int64_t>(kPanel, product.n - out), k = product.k;
  for (int64_t start = 0; start < k; start += kPanelInputs) {
    const int64_t count = std::min(kPanelInputs, k - start);
    pack_panel(product, out, start, count, panel);
    for (int64_t row = begin; row < end; row += kPanelRows) {
      const int64_t rows = std::min<int64_t>(kPanelRows, end - row);
      const float* x = product.x + row * k + start;
      float* y = product.y + row * product.n + out;
      if (outputs == kPanel) {
        panel_rows<kPanelRows>(rows, x, k, count, panel, y, product.n, start == 0);
        continue;
      }
      panel_rows<kPanelRows>(rows, x, k, count, panel, last, kPanel, true);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t o = 0; o < outputs; ++o) {
          float* to = y + r * product.n + o;
          *to = start == 0 ? last[r * kPanel + o] : *to + last[r * kPanel + o];
        }
      }
    }
  }
}

template <typename P>
void multiply_panels(ffi::ThreadPool& pool, const Product<P>& product) {
  if (product.m == 0) return;
  const int64_t panels = (product.n + kPanel - 1) / kPanel, threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t most = (product.m + kPieceRows - 1) / kPieceRows;
  const int64_t pieces = std::clamp<int64_t>((4 * threads + panels - 1) / panels, 1, most);
  const int64_t rows = ((product.m + pieces - 1) / pieces + kPanelRows - 1) / kPanelRows * kPanelRows;
  parallel_for(pool, panels * pieces, [=](int64_t task) {
    const int64_t begin = task % pieces * rows, end = std::min(begin + rows, product.m);
    if (begin < end) multiply_panel(product, task / pieces * kPanel, begin, end);
  });
}

}  // namespace jaxserve
