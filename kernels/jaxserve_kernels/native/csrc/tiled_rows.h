// Matmuls of many rows on AMX. Weights are decomposed and transposed once for all rows of a piece, inputs are only
// decomposed: the sums of 32 rows x 32 outputs are in row order, and are stored without a transposition.
//
// Inputs of a row are multiplied in chunks, so that the planes of both operands fit the second-level cache; sums wait in
// memory between chunks. A row's sums have the order of `tiled.h`: its products are the same with their operands exchanged.
#pragma once

#include "tiled.h"

#if defined(JAXSERVE_TILES)
namespace jaxserve {

constexpr int64_t kChunk = 768;                  // inputs of a chunk: 256 rows and 32 outputs have 1.3 MB of planes
constexpr int64_t kPairRows = 2 * tiles::kSide;  // rows whose sums fill half of the tiles, with as many outputs
constexpr int64_t kStreamedRows = 96;            // most rows for which weights are not transposed
constexpr int64_t kHeldOutputs = 4096;           // outputs whose sums wait in memory: 4 MiB with 256 rows

// Bytes from one block of k to the next: a cache line more than its size, so that blocks are in different sets of the
// first-level cache.
template <int Planes>
constexpr int64_t kStride = Planes * 2 * tiles::kBytes + 64;

// Decomposes `count` inputs of 32 rows into tiles [block of k, plane, 2]. Rows after the last one become zeros.
template <typename P>
void split_inputs(const Product<P>& product, int64_t row, int64_t start, int64_t count, char* to) {
  using T = Tiling<P>;
  const auto* x = product.x + row * product.k + start;
  for (int64_t r = 0; r < 2 * tiles::kSide; ++r, x += product.k, to += 64) {
    char* line = to;
    for (int64_t i = 0; i < count; i += T::kBlock, line += kStride<T::kInputPlanes>) {
      __m512i planes[T::kInputPlanes] = {};
      if (row + r < product.m) T::inputs(x + i, count - i, planes);
      for (int p = 0; p < T::kInputPlanes; ++p) _mm512_store_si512(line + p * 2 * tiles::kBytes, planes[p]);
    }
  }
}

// Decomposes and transposes `count` weights of 32 outputs into tiles as of `split_inputs`. Outputs after the last one become
// zeros.
template <typename P>
void transpose_weights(const Product<P>& product, int64_t out, int64_t start, int64_t count, char* to) {
  using T = Tiling<P>;
  for (int half = 0; half < 2; ++half, out += tiles::kSide, to += tiles::kBytes) {
    const int64_t outputs = std::min<int64_t>(product.n - out, tiles::kSide);
    const auto* w = product.w + out * product.k + start;
    char* block = to;
    for (int64_t i = 0; i < count; i += T::kBlock, block += kStride<T::kPlanes>) {
      __m512i planes[T::kPlanes][tiles::kSide] = {};
      for (int64_t o = 0; o < outputs; ++o) {
        __m512i own[T::kPlanes];
        T::weights(w + o * product.k + i, count - i, own);
        for (int p = 0; p < T::kPlanes; ++p) planes[p][o] = own[p];
      }
      char* line = block;
      for (auto& plane : planes) {
        tiles::transpose(plane);
        for (int l = 0; l < tiles::kSide; ++l) _mm512_store_si512(line + l * 64, plane[l]);
        line += 2 * tiles::kBytes;
      }
    }
  }
}

// Adds blocks of k to the sums in tiles 0 to 3: rows 0 to 15 with both halves of the outputs, then rows 16 to 31.
template <typename P>
inline void add_blocks(const char* inputs, const char* weights, int64_t blocks) {
  using T = Tiling<P>;
  for (; blocks > 0; --blocks, inputs += kStride<T::kInputPlanes>, weights += kStride<T::kPlanes>) {
    for (int q = 0; q < T::kPlanes; ++q) {
      tiles::load<6>(weights + q * 2 * tiles::kBytes);
      tiles::load<7>(weights + (q * 2 + 1) * tiles::kBytes);
      for (int p = 0; p < T::kInputPlanes && p + q < 3; ++p) {
        tiles::load<4>(inputs + p * 2 * tiles::kBytes);
        T::template add<0, 4, 6>();
        T::template add<1, 4, 7>();
        tiles::load<5>(inputs + (p * 2 + 1) * tiles::kBytes);
        T::template add<2, 5, 6>();
        T::template add<3, 5, 7>();
      }
    }
  }
}

inline void load_sums(const char* held) {
  tiles::load<0>(held);
  tiles::load<1>(held + tiles::kBytes);
  tiles::load<2>(held + 2 * tiles::kBytes);
  tiles::load<3>(held + 3 * tiles::kBytes);
}

inline void store_sums(char* held) {
  tiles::store<0>(held);
  tiles::store<1>(held + tiles::kBytes);
  tiles::store<2>(held + 2 * tiles::kBytes);
  tiles::store<3>(held + 3 * tiles::kBytes);
}

inline void zero_sums() {
  tiles::zero<0>();
  tiles::zero<1>();
  tiles::zero<2>();
  tiles::zero<3>();
}

// Brings the lines of 32 rows x 32 outputs into the cache.
template <typename P>
inline void fetch_outputs(const Product<P>& product, int64_t row, int64_t out) {
  const int64_t rows = std::min<int64_t>(product.m - row, 2 * tiles::kSide);
  for (int64_t r = 0; r < rows; ++r) {
    const char* line = reinterpret_cast<const char*>(product.y + (row + r) * product.n + out);
    __builtin_prefetch(line, 1, 3);
    __builtin_prefetch(line + 64, 1, 3);
  }
}

// Scales the sums of 32 rows x 32 outputs, and stores those of existing rows and outputs.
template <typename P>
void finish_sums(const Product<P>& product, int64_t row, int64_t out, const char* sums) {
  const int64_t rows = std::min<int64_t>(product.m - row, 2 * tiles::kSide);
  for (int half = 0; half < 2; ++half, out += tiles::kSide, sums += tiles::kBytes) {
    const int64_t outputs = product.n - out;
    if (outputs <= 0) return;
    const __mmask16 valid = outputs < tiles::kSide ? (1 << outputs) - 1 : 0xffff;
    const __m512 scales = product.scales ? _mm512_maskz_loadu_ps(valid, product.scales + out) : _mm512_set1_ps(1);
    for (int64_t r = 0; r < rows; ++r) {
      const char* line = sums + (r / tiles::kSide * 2 * tiles::kSide + r % tiles::kSide) * 64;
      const __m512 own = _mm512_set1_ps(product.quantized ? product.quantized[row + r].scale : 1);
      const __m512 sum = _mm512_mul_ps(Tiling<P>::floats(_mm512_load_si512(line)), own);
      _mm512_mask_storeu_ps(product.y + (row + r) * product.n + out, valid, _mm512_mul_ps(sum, scales));
    }
  }
}

// Returns this thread's own tiles of a piece's inputs: chunk after chunk, each of all rows. `piece` is as in `tiled_inputs`.
template <typename P>
const char* split_piece(const Product<P>& product, int64_t piece, int64_t pairs, int64_t chunk_bytes) {
  thread_local Tiles memory;
  thread_local int64_t held = -1;
  char* to = memory.hold((product.k + kChunk - 1) / kChunk * chunk_bytes / tiles::kBytes + 1);
  if (piece == held) return to;
  for (int64_t start = 0; start < product.k; start += kChunk) {
    char* chunk = to + start / kChunk * chunk_bytes;
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int64_t count = std::min(product.k - start, kChunk);
      split_inputs(product, pair * kPairRows, start, count, chunk + pair * (chunk_bytes / pairs));
    }
  }
  held = piece;
  return to;
}

// Computes the outputs from `begin` to `end` of a piece of many rows.
template <typename P>
void many_rows(const Product<P>& product, int64_t piece, int64_t begin, int64_t end) {
  using T = Tiling<P>;
  thread_local Tiles weight_memory, sum_memory;
  const int64_t pairs = (product.m + kPairRows - 1) / kPairRows, groups = (end - begin + kOutputs - 1) / kOutputs;
  const int64_t most = blocks_of<P>(std::min(product.k, kChunk)), pair_bytes = most * kStride<T::kInputPlanes>;
  const char* inputs = split_piece(product, piece, pairs, pairs * pair_bytes);
  char* weights = weight_memory.hold(most * kStride<T::kPlanes> / tiles::kBytes + 1);
  char* sums = sum_memory.hold(product.k > kChunk ? groups * pairs * 4 : 4);
  for (int64_t start = 0; start < product.k; start += kChunk, inputs += pairs * pair_bytes) {
    const int64_t count = std::min(product.k - start, kChunk);
    const bool is_last = start + count == product.k;
    char* own = sums;
    for (int64_t out = begin; out < end; out += kOutputs) {
      transpose_weights(product, out, start, count, weights);
      for (int64_t pair = 0; pair < pairs; ++pair) {
        if (is_last) fetch_outputs(product, pair * kPairRows, out);
        start == 0 ? zero_sums() : load_sums(own);
        add_blocks<P>(inputs + pair * pair_bytes, weights, blocks_of<P>(count));
        store_sums(own);
        if (is_last) finish_sums(product, pair * kPairRows, out, own);
        if (product.k > kChunk) own += 4 * tiles::kBytes;
      }
    }
  }
}

// Returns the most rows of a piece, which share weights: 256 if there are as many for every thread and their planes take no
// more than 8 MiB, otherwise 128.
template <typename P>
int64_t piece_rows(const Product<P>& product, int64_t threads) {
  constexpr int64_t kLeast = 128, kMost = 256, kMostBytes = 8 << 20;
  const int64_t bytes = kMost * blocks_of<P>(product.k) * Tiling<P>::kInputPlanes * 64;
  return product.m >= kMost * threads && bytes <= kMostBytes ? kMost : kLeast;
}

// Computes the outputs from `begin` to `end` of a piece.
template <typename P>
void tiled_outputs(const Product<P>& product, int64_t piece, int64_t begin, int64_t end) {
  const tiles::Configured configured;
  if (product.m <= kStreamedRows) return few_rows(product, piece, begin, end);
  for (int64_t out = begin; out < end; out += kHeldOutputs) {
    many_rows(product, piece, out, std::min(out + kHeldOutputs, end));
  }
}

}  // namespace jaxserve
#endif
