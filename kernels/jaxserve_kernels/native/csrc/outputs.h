// Matmuls on the vector unit, and where they are asked for on the matrix unit: y[M, N] = x[M, K] * w[N, K]^T.
//
// Both operands are read along K, so weights stay as checkpoints have them. One row, and a few more where vectors are short,
// reads them as plain streams. Otherwise a tile of kTileRows x kTileOutputs sums is held in registers. Of few rows a tile's
// weights, converted as they are loaded, stay in the first cache while all rows pass by; of many, a tile's rows stay there while
// the weights of a group of outputs pass by, out of the second cache. Weights to come are fetched meanwhile, line after line,
// into the second cache: the first holds no more, and has fewer misses under way than the memory can serve. With so many rows
// that it pays, float operands are packed (panels.h); the bits are the same.
//
// Where the processor has a matrix unit and it is asked for, it does all of this (tiled.h).
//
// Grouped, w is [E, N, K]: of rows sorted by expert, group by group, each is multiplied with its expert's matrix.
#pragma once

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <vector>

#include "panels.h"
#include "parallel.h"
#include "products.h"
#include "tiled_rows.h"

namespace jaxserve {

namespace ffi = xla::ffi;

constexpr int kTileRows = kRegisters == 32 ? 6 : 3;
constexpr int kTileOutputs = 4;
constexpr int kStreams = kRegisters == 32 ? 1 : 4;  // of weights: one sum of short vectors waits for itself, not for the memory
constexpr int64_t kGroupBytes = 128 << 10;  // of weights that all rows meet before the next ones: they fit the second cache
constexpr int64_t kSlowTiles = 8;          // of rows, whose arithmetic takes much longer than their weights
constexpr int64_t kTaskOutputs = 32;       // outputs of a task: a multiple of this
constexpr int64_t kFetchBytes = 24 << 10;  // further ahead than the memory's latency, well within the second cache

// Rows up to which weights are read as streams.
template <typename P>
constexpr int kStreamRows = kStreams == 1 || std::is_same_v<P, Int8> ? 1 : std::is_same_v<typename P::Sum, Ints> ? 2 : 4;

template <typename P>
FourFloats finish(const Product<P>&, int64_t, const Floats (&sums)[kTileOutputs]) {
  return sums_of_four(sums[0], sums[1], sums[2], sums[3]);
}

template <typename P>
float finish(const Product<P>&, int64_t, const Floats (&sums)[1]) {
  return sum(sums[0]);
}

template <typename P>
FourFloats finish(const Product<P>& product, int64_t row, const Ints (&sums)[kTileOutputs]) {
  const Quantized own = product.quantized[row];
  const FourInts exact = sums_of_four(sums[0], sums[1], sums[2], sums[3]) - P::kOffset * own.sum;
  return __builtin_convertvector(exact, FourFloats) * own.scale;
}

template <typename P>
float finish(const Product<P>& product, int64_t row, const Ints (&sums)[1]) {
  const Ints four[kTileOutputs] = {sums[0], sums[0], sums[0], sums[0]};
  return finish(product, row, four)[0];
}

template <typename P>
inline void store_sums(const Product<P>& product, int64_t row, int64_t out, FourFloats sums) {
  if (product.scales) sums *= *reinterpret_cast<const UnalignedFour*>(product.scales + out);
  *reinterpret_cast<UnalignedFour*>(product.y + row * product.n + out) = sums;
}

template <typename P>
inline void store_sums(const Product<P>& product, int64_t row, int64_t out, float sum) {
  product.y[row * product.n + out] = sum * (product.scales ? product.scales[out] : 1.0f);
}

// `Fetch`: rows of weights to bring into the cache meanwhile, from `later` rows after the tile's on.
template <typename P, int Rows, int Outputs, int Fetch>
inline __attribute__((always_inline)) void tile(const Product<P>& product, int64_t row, int64_t out, int64_t later) {
  const int64_t k = product.k;
  const auto* x = product.x + row * k;
  const auto* w = product.w + out * k;
  const auto* next = w + later * k;
  constexpr int kLine = 64 / sizeof(typename P::Stored);
  constexpr int kLines = (Fetch * P::kStep + kLine - 1) / kLine;
  typename P::Sum sums[Rows][Outputs] = {};
  for (int64_t i = 0; i < k; i += P::kStep) {
    typename P::Sum inputs[Rows];
    for (int r = 0; r < Rows; ++r) inputs[r] = in_register(P::inputs(x + r * k + i));
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(next + i * Fetch + line * kLine, 0, 2);
    for (int o = 0; o < Outputs; ++o) {
      const typename P::Sum weights = P::weights(w + o * k + i);
      for (int r = 0; r < Rows; ++r) P::add(sums[r][o], inputs[r], weights);
    }
  }
  for (int r = 0; r < Rows; ++r) store_sums(product, row + r, out, finish(product, row + r, sums[r]));
}

// What is left of a block's rows: between 1 and kTileRows - 1.
template <typename P, int Rows, int Outputs, int Fetch>
void last_rows(const Product<P>& product, int64_t count, int64_t row, int64_t out, int64_t later) {
  if constexpr (Rows > 0) {
    if (count == Rows) {
      tile<P, Rows, Outputs, Fetch>(product, row, out, later);
    } else {
      last_rows<P, Rows - 1, Outputs, Fetch>(product, count, row, out, later);
    }
  }
}

// Multiplies up to a tile of rows.
template <typename P>
void few_row_outputs(const Product<P>& product, int64_t begin, int64_t end) {
  constexpr int64_t kSteps = kFetchBytes / sizeof(typename P::Stored) / kTileOutputs;
  const int64_t ahead = (1 + kSteps / product.k) * kTileOutputs;  // outputs: weights are fetched so
  int64_t out = begin;
  for (; out + kTileOutputs <= end; out += kTileOutputs) {
    last_rows<P, kTileRows, kTileOutputs, kTileOutputs>(product, product.m, 0, out, ahead);
  }
  for (; out < end; ++out) last_rows<P, kTileRows, 1, 1>(product, product.m, 0, out, ahead);
}

// Multiplies more rows with a group of outputs after another, Outputs at a time. Some tiles of rows fetch weights of the next
// group, Fetch rows for each Outputs.
template <typename P, int Outputs, int Fetch>
void many_row_outputs(const Product<P>& product, int64_t begin, int64_t end) {
  const int64_t tiles = product.m / kTileRows, rest = product.m - tiles * kTileRows;
  const int64_t fetching = std::max<int64_t>(1, tiles * Fetch / Outputs);  // one tile in so many fetches
  const bool is_slow = tiles >= kSlowTiles;  // then the memory can bring weights of the next task, too, which another thread may do
  const int64_t most = kGroupBytes / (product.k * sizeof(*product.w));
  const int64_t own = is_slow ? most : std::min(most, (end - begin) / 2);
  const int64_t group = std::max<int64_t>(1, own / Outputs) * Outputs;
  for (int64_t first = begin; first < end; first += group) {
    const int64_t last = std::min(first + group, end);
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t row = i * kTileRows, fetch = i / fetching * Fetch;
      const bool fetches = (is_slow || last < end) && i % fetching == 0 && fetch < Outputs;
      for (int64_t out = first; out < last; out += Outputs) {
        if (fetches) {
          tile<P, kTileRows, Outputs, Fetch>(product, row, out, group + fetch);
        } else {
          tile<P, kTileRows, Outputs, 0>(product, row, out, 0);
        }
      }
    }
    for (int64_t out = first; out < last; out += Outputs) {
      last_rows<P, kTileRows - 1, Outputs, 0>(product, rest, tiles * kTileRows, out, 0);
    }
  }
}

// Multiplies `Rows` rows as one stream of weights for each of `Streams` runs of outputs, which the memory serves side by side.
template <typename P, int Rows, int Streams>
void stream_outputs(const Product<P>& product, int64_t begin, int64_t end) {
  const int64_t k = product.k, run = (end - begin) / Streams;
  for (int64_t out = begin; out < begin + run; ++out) {
    const auto* w = product.w + out * k;
    typename P::Sum sums[Streams][Rows] = {};
    for (int64_t i = 0; i < k; i += P::kStep) {
      typename P::Sum inputs[Rows];
      for (int r = 0; r < Rows; ++r) inputs[r] = in_register(P::inputs(product.x + r * k + i));
      for (int s = 0; s < Streams; ++s) {
        const typename P::Sum weights = P::weights(w + s * run * k + i);
        for (int r = 0; r < Rows; ++r) P::add(sums[s][r], inputs[r], weights);
      }
    }
    for (int s = 0; s < Streams; ++s) {
      for (int r = 0; r < Rows; ++r) {
        const typename P::Sum one[1] = {sums[s][r]};
        store_sums(product, r, out + s * run, finish(product, r, one));
      }
    }
  }
  for (int64_t out = begin + run * Streams; out < end; ++out) tile<P, Rows, 1, 0>(product, 0, out, 0);
}

template <typename P>
void outputs(const Product<P>& product, int64_t begin, int64_t end) {
  if (product.m == 1) return stream_outputs<P, 1, kStreams>(product, begin, end);  // only the memory's speed counts
  if constexpr (kStreamRows<P> >= 2) {
    if (product.m == 2) return stream_outputs<P, 2, kStreams>(product, begin, end);
  }
  if constexpr (kStreamRows<P> >= 4) {
    if (product.m == 3) return stream_outputs<P, 3, kStreams>(product, begin, end);
    if (product.m == 4) return stream_outputs<P, 4, kStreams / 2>(product, begin, end);
  }
  const int64_t whole = begin + (end - begin) / kTileOutputs * kTileOutputs;
  if (product.m <= kTileRows) {
    few_row_outputs(product, begin, end);
  } else {
    if (product.m < 2 * kTileRows) {
      many_row_outputs<P, kTileOutputs, kTileOutputs>(product, begin, whole);
    } else if (product.m < 4 * kTileRows) {
      many_row_outputs<P, kTileOutputs, 2>(product, begin, whole);
    } else {
      many_row_outputs<P, kTileOutputs, 1>(product, begin, whole);
    }
    many_row_outputs<P, 1, 1>(product, whole, end);
  }
}

// Rows that are multiplied with one matrix.
struct Group {
  int64_t expert, start, rows;

  template <typename P>
  Product<P> of(Product<P> all) const {
    all.m = rows;
    all.x += start * all.k;
    all.w += expert * all.n * all.k;
    all.y += start * all.n;
    if (all.scales) all.scales += expert * all.n;
    if (all.quantized) all.quantized += start;
    return all;
  }
};

#if defined(JAXSERVE_TILES)
// Multiplies the same rows with several matrices. If they are one piece, a thread decomposes its inputs once for all of these.
template <typename P>
void multiply_tiled(ffi::ThreadPool& pool, const std::vector<Product<P>>& products, const std::vector<Group>& groups) {
  static std::atomic<int64_t> pieces_before{0};
  const int64_t threads = std::max<int64_t>(1, pool.num_threads()), most = piece_rows(products.front(), threads);
  std::vector<Group> pieces;
  for (const Group& group : groups) {
    for (int64_t row = 0; row < group.rows; row += most) {
      pieces.push_back({group.expert, group.start + row, std::min(most, group.rows - row)});
    }
  }
  if (pieces.empty()) return;
  const int64_t count = pieces.size(), first = pieces_before.fetch_add(count);
  std::vector<Split> splits;
  int64_t all = 0;
  for (const Product<P>& product : products) {
    splits.emplace_back(product.n, std::max<int64_t>(1, threads / count), kTaskOutputs);
    all += count * splits.back().count();
  }
  parallel_for(pool, all, [=, products = products.data(), splits = splits.data(), pieces = pieces.data()](int64_t task) {
    int64_t i = 0;
    for (; task >= count * splits[i].count(); ++i) task -= count * splits[i].count();
    const Split& split = splits[i];
    const int64_t tasks = split.count(), piece = task / tasks, begin = split.begin(task % tasks), end = split.begin(task % tasks + 1);
    if (begin < end) tiled_outputs(pieces[piece].of(products[i]), first + piece, begin, end);
  });
}
#endif

// Multiplies the same rows with several matrices, whose outputs threads share as if they were those of one: between two calls all
// threads wait for the last.
template <typename P>
void multiply(ffi::ThreadPool& pool, const std::vector<Product<P>>& products) {
#if defined(JAXSERVE_TILES)
  if (products.front().is_tiled) return multiply_tiled(pool, products, {{0, 0, products.front().m}});
#endif
  if (multiply_packed(pool, products)) return;
  int64_t n = 0;
  for (const Product<P>& product : products) n += product.n;
  const Split split(n, std::max<int64_t>(1, pool.num_threads()), kTaskOutputs);
  parallel_for(pool, split.count(), [=, product = products.data(), count = products.size()](int64_t task) {
    int64_t begin = split.begin(task), end = split.begin(task + 1);
    for (size_t i = 0; i < count && end > 0; begin -= product[i].n, end -= product[i].n, ++i) {
      const int64_t first = std::max<int64_t>(begin, 0), last = std::min(end, product[i].n);
      if (first < last) outputs(product[i], first, last);
    }
  });
}

// Outputs of a task such that there are several for each thread; those of one group follow each other.
template <typename P>
void multiply(ffi::ThreadPool& pool, const Product<P>& product, const std::vector<Group>& groups) {
#if defined(JAXSERVE_TILES)
  if (product.is_tiled) return multiply_tiled<P>(pool, {product}, groups);
#endif
  const int64_t count = groups.size(), threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t per_group = std::max<int64_t>(1, 4 * threads / std::max<int64_t>(1, count));
  const int64_t size = (product.n / per_group / kTaskOutputs + 1) * kTaskOutputs;
  const int64_t tasks = (product.n + size - 1) / size;
  parallel_for(pool, count * tasks, [=, groups = groups.data()](int64_t task) {
    const Product<P> own = groups[task / tasks].of(product);
    const int64_t begin = task % tasks * size;
    outputs(own, begin, std::min(begin + size, own.n));
  });
}

}  // namespace jaxserve
