// Matmuls of many rows on the vector unit: y[M, N] = x[M, K] * w[N, K]^T with operands packed for it.
//
// `outputs.h` reads both operands along K: every product takes a vector of each, and every output ends as a sum over lanes.
// Here the lanes of a vector are neighbouring outputs, so one broadcast input meets kPanelVectors vectors of weights, and no sum
// over lanes is left. The order of every sum is that of `outputs.h`, so a row has the same bits in both: inputs i, i + kLanes, ...
// are one chain, the one that lane i has there, and chains are added as `sums_of_four` adds lanes.
//
// Weights are packed in panels [chain, step, kPanel], rows in tiles [chain, row, step]. All tiles of rows meet four chains of a
// panel, some kilobytes, before the next four, so they stay in the nearest cache that holds them; the sums of four that
// wait for others stay in the second. Weights of the panel to come are fetched meanwhile.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "parallel.h"
#include "products.h"
#include "thread_memory.h"
#include "transpose.h"

namespace jaxserve {

namespace ffi = xla::ffi;

constexpr int kPanelVectors = kRegisters == 32 ? 3 : 2;
constexpr int kPanelRows = kRegisters == 32 ? 8 : 6;  // of a tile
constexpr int kPanel = kPanelVectors * kLanes;        // outputs
constexpr int kTogether = 4;                          // chains of a tile: their sums need not wait elsewhere
constexpr int64_t kLeastRows = 48;                    // that a panel is packed for: with fewer it costs more than it saves
constexpr int64_t kMostRows = 256;                    // of a task, whose waiting sums fit the second-level cache
constexpr int64_t kBlockRows = 1024;                  // that are packed together

// Lanes in the order in which neighbours, then pairs of neighbours and so on are added: the tree of `sums_of_four`.
#if defined(__AVX512F__)
constexpr int kChains[kLanes] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};
constexpr int kLevels = 2;  // of sums that wait
#elif defined(__aarch64__)
constexpr int kChains[kLanes] = {0, 1, 2, 3};
constexpr int kLevels = 0;
#else
constexpr int kChains[kLanes] = {0, 2, 1, 3, 4, 6, 5, 7};
constexpr int kLevels = 1;
#endif

// Steps of a row's chain in memory: whole vectors.
inline int64_t padded_steps(int64_t k) { return (k / kLanes + kLanes - 1) / kLanes * kLanes; }

// Floats of a panel's chain. Without those behind its end the chains of many panels would compete for the same places of a cache.
inline int64_t chain_floats(int64_t k) { return k / kLanes * kPanel + kLanes; }

// Packs up to kPanelRows rows of K inputs. stride: floats from one chain to the next.
inline void pack_tile(const float* x, int64_t k, int64_t rows, int64_t stride, float* to) {
  const int64_t steps = k / kLanes, padded = padded_steps(k);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t step = 0; step < steps; step += kLanes) {
      Floats columns[kLanes] = {};
      const int64_t count = std::min<int64_t>(kLanes, steps - step);
      for (int64_t i = 0; i < count; ++i) columns[i] = load(x + row * k + (step + i) * kLanes);
      transpose(columns);
      for (int i = 0; i < kLanes; ++i) store(to + i * stride + row * padded + step, columns[kChains[i]]);
    }
  }
}

// Packs kPanel outputs from `out` on. Outputs after the last one are zeros.
template <typename P>
void pack_panel(const Product<P>& product, int64_t out, float* to) {
  const int64_t steps = product.k / kLanes, stride = chain_floats(product.k);
  for (int v = 0; v < kPanelVectors; ++v, out += kLanes, to += kLanes) {
    const auto* w = product.w + out * product.k;
    const int64_t count = std::clamp<int64_t>(product.n - out, 0, kLanes);
    for (int64_t step = 0; step < steps; ++step, w += kLanes) {
      Floats columns[kLanes] = {};
      for (int64_t o = 0; o < count; ++o) columns[o] = P::weights(w + o * product.k);
      transpose(columns);
      for (int i = 0; i < kLanes; ++i) store(to + i * stride + step * kPanel, columns[kChains[i]]);
    }
  }
}

// The part of a matmul that one thread has packed a panel for.
template <typename P>
struct PanelTask {
  const Product<P>& product;
  const float* tiles;  // of all rows, [kLanes, tiles, kPanelRows, padded steps]
  int64_t stride;      // floats of a chain of all tiles
  const float* panel;
  float* waiting;      // [kLevels, rows, kPanel]
  int64_t out, begin, end;  // first output, rows
};

// Adds chain number `chain` of a tile of rows, whose inputs are at `x`, in registers.
template <int Rows>
inline __attribute__((always_inline)) void add_chain(const float* x, int64_t padded, const float* panel, int64_t steps,
                                                     Floats (&sums)[Rows][kPanelVectors]) {
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = Floats{};
  }
  for (int64_t step = 0; step < steps; ++step, panel += kPanel) {
    Floats weights[kPanelVectors];
    for (int v = 0; v < kPanelVectors; ++v) weights[v] = in_register(load(panel + v * kLanes));
    for (int r = 0; r < Rows; ++r) {
      const Floats input = in_register(broadcast(x[r * padded + step]));
      for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = multiply_add(sums[r][v], input, weights[v]);
    }
  }
}

template <int Rows>
inline __attribute__((always_inline)) void add_waiting(const float* waiting, Floats (&sums)[Rows][kPanelVectors]) {
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = load(waiting + r * kPanel + v * kLanes) + sums[r][v];
  }
}

template <int Rows>
inline __attribute__((always_inline)) void store_sums(const Floats (&sums)[Rows][kPanelVectors], float* to, int64_t stride) {
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kPanelVectors; ++v) store(to + r * stride + v * kLanes, sums[r][v]);
  }
}

// Stores a tile's outputs, some of which may be none of the matmul's, times their scales.
template <int Rows, typename P>
void store_outputs(const Product<P>& product, int64_t row, int64_t out, const Floats (&sums)[Rows][kPanelVectors]) {
  float* to = product.y + row * product.n + out;
  const int64_t count = std::min<int64_t>(kPanel, product.n - out);
  if (count == kPanel && product.scales == nullptr) return store_sums<Rows>(sums, to, product.n);
  float all[Rows * kPanel];
  store_sums<Rows>(sums, all, kPanel);
  for (int r = 0; r < Rows; ++r) {
    for (int64_t o = 0; o < count; ++o) {
      to[r * product.n + o] = all[r * kPanel + o] * (product.scales ? product.scales[out + o] : 1.0f);
    }
  }
}

// Adds four chains of a tile of rows, from number `chain` on, and those that wait for them.
template <int Rows, typename P>
void panel_tile(const PanelTask<P>& task, int chain, int64_t row) {
  const int64_t k = task.product.k, steps = k / kLanes, padded = padded_steps(k);
  const float *panel = task.panel + chain * chain_floats(k), *x = task.tiles + chain * task.stride + row * padded;
  alignas(64) float held[2][Rows * kPanel];
  Floats sums[Rows][kPanelVectors];
  for (int i = 0; i < kTogether; ++i, panel += chain_floats(k), x += task.stride) {
    add_chain<Rows>(x, padded, panel, steps, sums);
    if (i & 1) add_waiting<Rows>(held[0], sums);
    if (i < kTogether - 1) store_sums<Rows>(sums, held[i & 1], kPanel);
  }
  add_waiting<Rows>(held[1], sums);
  const int64_t level = (task.end - task.begin + kPanelRows - 1) / kPanelRows * kPanelRows * kPanel;
  float* waiting = task.waiting + (row - task.begin) * kPanel;
  for (int left = chain / kTogether; left & 1; left >>= 1, waiting += level) add_waiting<Rows>(waiting, sums);
  if (chain + kTogether < kLanes) {
    store_sums<Rows>(sums, waiting, kPanel);
  } else {
    store_outputs<Rows>(task.product, row, task.out, sums);
  }
}

template <int Rows, typename P>
void panel_rows(const PanelTask<P>& task, int chain, int64_t row, int64_t rows) {
  if constexpr (Rows > 0) {
    if (rows == Rows) {
      panel_tile<Rows>(task, chain, row);
    } else {
      panel_rows<Rows - 1>(task, chain, row, rows);
    }
  }
}

// Multiplies rows from `begin` to `end` with the panel from `out` on. `next`: kPanel rows of weights to bring into the cache meanwhile, or null.
template <typename P>
void multiply_panel(const Product<P>& product, const float* tiles, int64_t stride, int64_t out, int64_t begin, int64_t end,
                    const typename P::Stored* next) {
  thread_local Memory panels, sums;
  float* panel = panels.hold(kLanes * chain_floats(product.k));
  const int64_t num_tiles = (end - begin + kPanelRows - 1) / kPanelRows;
  const PanelTask<P> task{product, tiles, stride, panel, sums.hold(std::max(1, kLevels) * num_tiles * kPanelRows * kPanel), out, begin, end};
  pack_panel(product, out, panel);
  const auto* line = reinterpret_cast<const char*>(next);
  const int64_t bytes = kPanel * product.k * sizeof(*next), share = bytes / (kLanes / kTogether * num_tiles) + 1;
  for (int chain = 0; chain < kLanes; chain += kTogether) {
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      if (next != nullptr) {
        const int64_t done = (chain / kTogether * num_tiles + tile) * share;
        for (int64_t at = (done + 63) / 64 * 64; at < std::min(done + share, bytes); at += 64) __builtin_prefetch(line + at, 0, 2);
      }
      const int64_t row = begin + tile * kPanelRows;
      panel_rows<kPanelRows>(task, chain, row, std::min<int64_t>(kPanelRows, end - row));
    }
  }
}

// How threads share the panels of matmuls of one x: each in pieces of rows.
struct PanelSplit {
  int64_t panels = 0, pieces, rows;

  template <typename P>
  PanelSplit(const std::vector<Product<P>>& products, int64_t m, int64_t threads) {
    for (const Product<P>& product : products) panels += (product.n + kPanel - 1) / kPanel;
    const int64_t least = (m + kMostRows - 1) / kMostRows;
    pieces = std::clamp((2 * threads + panels - 1) / panels, least, std::max(least, m / kLeastRows));
    rows = ((m + pieces - 1) / pieces + kPanelRows - 1) / kPanelRows * kPanelRows;
  }
};

// A panel's matmul, and its first output there.
template <typename P>
std::pair<const Product<P>*, int64_t> panel_at(const Product<P>* product, int64_t panel) {
  for (int64_t own; panel >= (own = (product->n + kPanel - 1) / kPanel); ++product) panel -= own;
  return {product, panel * kPanel};
}

// Multiplies rows from `first` to `end`, which are packed together.
template <typename P>
void multiply_block(ffi::ThreadPool& pool, const std::vector<Product<P>>& products, const PanelSplit& split, int64_t threads,
                    int64_t first, int64_t end) {
  thread_local Memory memory;
  const int64_t m = end - first, num_tiles = (m + kPanelRows - 1) / kPanelRows;
  const int64_t size = kPanelRows * padded_steps(products.front().k), stride = num_tiles * size;
  float* tiles = memory.hold(kLanes * stride);
  parallel_for(pool, num_tiles, [=, x = products.front().x, k = products.front().k](int64_t i) {
    const int64_t row = first + i * kPanelRows;
    pack_tile(x + row * k, k, std::min<int64_t>(kPanelRows, end - row), stride, tiles + i * size);
  });
  parallel_for(pool, split.panels * split.pieces, [=, products = products.data()](int64_t task) {
    const int64_t panel = task / split.pieces, next = (task + threads) / split.pieces;
    const int64_t begin = task % split.pieces * split.rows, stop = std::min(begin + split.rows, m);
    if (begin >= stop) return;
    const auto [own, out] = panel_at(products, panel);
    Product<P> product = *own;
    product.y += first * product.n;
    const typename P::Stored* weights = nullptr;
    if (next != panel && next < split.panels) {
      const auto [later, from] = panel_at(products, next);
      if (from + kPanel <= later->n) weights = later->w + from * later->k;
    }
    multiply_panel(product, tiles, stride, out, begin, stop, weights);
  });
}

// Multiplies the same rows with several matrices, if packing pays: returns false if `outputs.h` is to do it.
template <typename P>
bool multiply_packed(ffi::ThreadPool& pool, const std::vector<Product<P>>& products) {
  if constexpr (!std::is_same_v<typename P::Input, float>) {
    return false;
  } else {
    const int64_t m = products.front().m, threads = std::max<int64_t>(1, pool.num_threads());
    if (m < kLeastRows) return false;
    const int64_t blocks = (m + kBlockRows - 1) / kBlockRows, rows = (m + blocks - 1) / blocks;
    const PanelSplit split(products, rows, threads);
    if (split.panels * split.pieces < threads) return false;
    for (int64_t first = 0; first < m; first += rows) {
      multiply_block(pool, products, split, threads, first, std::min(first + rows, m));
    }
    return true;
  }
}

}  // namespace jaxserve
