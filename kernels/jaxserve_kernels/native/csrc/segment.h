// Attention of a segment: queries of one row, of the heads that share a kv head, over all of its keys, block by block.
//
// A block's keys and values stay in the first-level cache while all queries of the segment meet them. Those of the next block
// are fetched meanwhile, a line for some numbers of the head dimension: many at once would keep all other loads waiting. kTileQueries queries are taken at once, as a matmul takes rows: their scores with a vector of
// keys, then their sums of values, are held in registers.
//
// Online softmax (Milakov & Gimelshein, arXiv 1805.02867) over blocks of kBlockKeys keys counted from position 0. The result
// of a query depends only on its own keys: every sum has one order, and blocks without a key that it sees change nothing.
#pragma once

#include <algorithm>
#include <vector>

#include "vector.h"

namespace jaxserve {

constexpr int kTileQueries = 6;
constexpr int kTileVectors = kRegisters == 32 ? 4 : 2;  // beside each other in registers, with kTileQueries queries
constexpr int kBlockVectors = 4;
constexpr int kBlockKeys = kBlockVectors * kLanes;
constexpr float kMasked = -1e30f;
constexpr float kNothing = -1e29f;  // the maximum before any key: a masked score weighs nothing against it

// A query and its running softmax.
struct Query {
  int32_t last;    // key that it sees: its own, or a later one
  int32_t hidden;  // last key before its window, or a negative number
  float maximum;
  Floats total;  // of weights, by lane
  const float* bias = nullptr;  // added to the score of each key, or null
};

struct Segment {
  int64_t head_dim;
  std::vector<Query> queries;
  std::vector<float> vectors;  // of the queries, [queries, H], rotated and scaled
  std::vector<float> sums;     // of values, [queries, H]

  void reset(int64_t count, int64_t dim) {
    head_dim = dim;
    queries.resize(count);
    vectors.resize(count * dim);
    sums.assign(count * dim, 0.0f);
  }
};

// Keys and values of one block, kLanes of them at each address.
template <typename Number>
struct Block {
  int32_t begin;
  int64_t stride;  // from one number of the keys to the next
  const Number* keys[kBlockVectors];    // [H, stride]
  const Number* values[kBlockVectors];  // [kLanes, H]
};

// Masks the keys after `last` and those up to `hidden`, both counted from the block's first.
inline void mask(Floats (&scores)[kBlockVectors], int32_t last, int32_t hidden) {
  Ints index;
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  for (int v = 0; v < kBlockVectors; ++v, index += kLanes) {
    scores[v] = (index <= last) & (index > hidden) ? scores[v] : broadcast(kMasked);
  }
}

// Lines to fetch while a tile's scores are computed: one, `step` numbers after the one before, for each 2^shift numbers of the head
// dimension.
template <typename Number>
struct Fetch {
  const Number* first;
  int64_t step;
  int shift;
};

// Scores of Queries queries and Vectors vectors of keys, [Queries, kBlockKeys]. They are stored here, and weighed elsewhere:
// in one function the compiler would store them after each number.
template <int Queries, int Vectors, typename Number>
void score(const float* queries, int64_t head_dim, const Number* const* keys, int64_t stride, const Fetch<Number>& fetch, float* scores) {
  Floats sums[Queries][Vectors] = {};
  for (int64_t d = 0; d < head_dim; ++d) {
    Floats own[Vectors];
    __builtin_prefetch(fetch.first + (d >> fetch.shift) * fetch.step, 0, 2);
    for (int v = 0; v < Vectors; ++v) own[v] = in_register(load(keys[v] + d * stride));
    for (int q = 0; q < Queries; ++q) {
      const Floats query = in_register(broadcast(queries[q * head_dim + d]));
      for (int v = 0; v < Vectors; ++v) sums[q][v] = multiply_add(sums[q][v], query, own[v]);
    }
  }
  for (int q = 0; q < Queries; ++q) {
    for (int v = 0; v < Vectors; ++v) store(scores + q * kBlockKeys + v * kLanes, sums[q][v]);
  }
}

// Lets what a query has so far count relative to a new maximum.
inline void rescale(Query& query, float* sums, int64_t head_dim, float maximum) {
  const Floats decay = exponential2(broadcast(query.maximum - maximum));
  query.maximum = maximum;
  query.total *= decay;
  for (int64_t d = 0; d < head_dim; d += kLanes) store(sums + d, load(sums + d) * decay);
}

// Turns a query's scores with a block into weights.
inline void weigh(Query& query, float* sums, int64_t head_dim, int32_t begin, float* scores) {
  Floats own[kBlockVectors];
  for (int v = 0; v < kBlockVectors; ++v) own[v] = load(scores + v * kLanes);
  for (int v = 0; query.bias != nullptr && v < kBlockVectors; ++v) own[v] += load(query.bias + begin + v * kLanes);
  if (begin + kBlockKeys - 1 > query.last || begin <= query.hidden) mask(own, query.last - begin, query.hidden - begin);
  Floats best = own[0];
  for (int v = 1; v < kBlockVectors; ++v) best = larger(best, own[v]);
  if (any_above(best, query.maximum)) rescale(query, sums, head_dim, maximum(best));
  for (int v = 0; v < kBlockVectors; ++v) {
    const Floats weight = exponential2(own[v] - query.maximum);
    store(scores + v * kLanes, weight);
    query.total += weight;
  }
}

// Adds the first `num_keys` values of a block, times their weights, to the sums of Queries queries.
template <int Queries, int Vectors, typename Number>
void add_values(const Block<Number>& block, int num_keys, const float* weights, int64_t head_dim, int64_t d, float* to) {
  Floats sums[Queries][Vectors];
  for (int q = 0; q < Queries; ++q) {
    for (int v = 0; v < Vectors; ++v) sums[q][v] = load(to + q * head_dim + d + v * kLanes);
  }
  for (int first = 0; first < num_keys; first += kLanes) {
    const Number* row = block.values[first / kLanes] + d;
    const int end = std::min(first + kLanes, num_keys);
    for (int key = first; key < end; ++key, row += head_dim) {
      Floats values[Vectors];
      for (int v = 0; v < Vectors; ++v) values[v] = in_register(load(row + v * kLanes));
      for (int q = 0; q < Queries; ++q) {
        const Floats weight = in_register(broadcast(weights[q * kBlockKeys + key]));
        for (int v = 0; v < Vectors; ++v) sums[q][v] = multiply_add(sums[q][v], weight, values[v]);
      }
    }
  }
  for (int q = 0; q < Queries; ++q) {
    for (int v = 0; v < Vectors; ++v) store(to + q * head_dim + d + v * kLanes, sums[q][v]);
  }
}

// Folds a block into the softmax of Queries queries, unless they see none of its keys.
template <int Queries, typename Number>
void fold(Segment& segment, int64_t first, const Block<Number>& block, const Fetch<Number>& fetch) {
  Query* queries = &segment.queries[first];
  int32_t last = queries[0].last, hidden = queries[0].hidden;
  for (int q = 1; q < Queries; ++q) last = std::max(last, queries[q].last), hidden = std::min(hidden, queries[q].hidden);
  if (block.begin > last || block.begin + kBlockKeys - 1 <= hidden) return;
  const int64_t h = segment.head_dim;
  float* sums = &segment.sums[first * h];
  float scores[Queries * kBlockKeys];
  for (int v = 0; v < kBlockVectors; v += kTileVectors) {
    score<Queries, kTileVectors>(&segment.vectors[first * h], h, block.keys + v, block.stride, fetch, scores + v * kLanes);
  }
  for (int q = 0; q < Queries; ++q) weigh(queries[q], sums + q * h, h, block.begin, scores + q * kBlockKeys);
  const int num_keys = std::min(last - block.begin + 1, kBlockKeys);
  int64_t d = 0;
  for (; d + kTileVectors * kLanes <= h; d += kTileVectors * kLanes) {
    add_values<Queries, kTileVectors>(block, num_keys, scores, h, d, sums);
  }
  for (; d < h; d += kLanes) add_values<Queries, 1>(block, num_keys, scores, h, d, sums);
}

// Folds a block into the softmax of the last `count` queries: less than a tile.
template <int Queries, typename Number>
void fold_rest(int64_t count, Segment& segment, int64_t first, const Block<Number>& block, const Fetch<Number>& fetch) {
  if constexpr (Queries > 0) {
    if (count == Queries) {
      fold<Queries>(segment, first, block, fetch);
    } else {
      fold_rest<Queries - 1>(count, segment, first, block, fetch);
    }
  }
}

// Brings a block into the second-level cache.
template <typename Number>
inline void fetch_all(const Block<Number>& block, int64_t head_dim) {
  constexpr int64_t kLine = 64 / sizeof(Number);
  for (int v = 0; v < kBlockVectors; ++v) {
    for (int64_t d = 0; d < head_dim; ++d) __builtin_prefetch(block.keys[v] + d * block.stride, 0, 2);
    for (int64_t i = 0; i < head_dim * kLanes; i += kLine) __builtin_prefetch(block.values[v] + i, 0, 2);
  }
}

// Returns the lines of the next block that one of `tiles` tiles fetches. Each vector of its keys or values is fetched by 2^shift tiles,
// and there are as many tiles as that takes.
template <typename Number>
inline Fetch<Number> share(const Block<Number>& next, int64_t head_dim, int64_t tile, int64_t tiles) {
  int shift = 0;
  while (2 * kBlockVectors << (shift + 1) <= tiles) ++shift;
  const int64_t vector = tile >> shift, part = tile - (vector << shift), first = part * head_dim >> shift;
  if (vector < kBlockVectors) return {next.keys[vector] + first * next.stride, next.stride, shift};
  if (vector < 2 * kBlockVectors) return {next.values[vector - kBlockVectors] + first * kLanes, kLanes, shift};
  return {next.keys[0], 0, shift};
}

// Folds a block into the softmax of all queries, and fetches the next one, if there is one.
template <typename Number>
void fold_all(Segment& segment, const Block<Number>& block, const Block<Number>* next) {
  const int64_t count = segment.queries.size(), tiles = (count + kTileQueries - 1) / kTileQueries;
  const bool shares = next != nullptr && tiles >= 2 * kBlockVectors;
  if (next != nullptr && !shares) fetch_all(*next, segment.head_dim);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const Fetch<Number> fetch = shares ? share(*next, segment.head_dim, tile, tiles) : Fetch<Number>{block.keys[0], 0, 0};
    const int64_t first = tile * kTileQueries;
    if (first + kTileQueries <= count) {
      fold<kTileQueries>(segment, first, block, fetch);
    } else {
      fold_rest<kTileQueries - 1>(count - first, segment, first, block, fetch);
    }
  }
}

}  // namespace jaxserve
