// Matmuls of many rows on AMX. Weights are decomposed once for all rows of a piece, those of 32 outputs while the 32 before are multiplied.
//
// Inputs of a row are multiplied in chunks, so that the planes of both operands fit the second-level cache; sums wait in
// memory between chunks. A row's sums have the order of `tiled.h`.
#pragma once

#include "tiled.h"

#if defined(JAXSERVE_TILES)
namespace jaxserve {

constexpr int64_t kChunk = 768;                  // inputs of a chunk: 256 rows and twice 32 outputs have 1.5 MB of planes
constexpr int64_t kPairRows = 2 * tiles::kSide;  // rows whose sums fill half of the tiles, with as many outputs
constexpr int64_t kStreamedRows = 64;            // most rows for which weights are decomposed for 32 at a time
constexpr int64_t kHeldOutputs = 4096;           // outputs whose sums wait in memory: 4 MiB with 256 rows

// Bytes from one block of k to the next: a cache line more than its size, so that blocks are in different sets of the
// first-level cache.
template <int Planes>
constexpr int64_t kStride = Planes * 2 * tiles::kBytes + 64;

// Decomposes `count` weights of 32 outputs into tiles [block of k, plane, 2], a row of the outputs after the other. Outputs after the
// last one become zeros.
template <typename P>
class GroupSplitter {
 public:
  using T = Tiling<P>;

  GroupSplitter(const Product<P>& product, int64_t out, int64_t start, int64_t count, char* to)
      : w_(product.w + out * product.k + start), k_(product.k), count_(count), outputs_(product.n - out), to_(to), block_(to) {}

  bool is_done() const { return output_ >= std::min<int64_t>(outputs_, kOutputs); }

  // Goes on for Count blocks of a row.
  template <int Count>
  inline __attribute__((always_inline)) void run() {
    for (int i = 0; i < Count && !is_done(); ++i) {
      __m512i planes[T::kPlanes];
      T::weights(w_ + at_, count_ - at_, planes);
      for (size_t line = 0; line < T::kBlock * sizeof(*w_); line += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(w_ + k_ + at_) + line, 0, 2);
      }
      for (int p = 0; p < T::kPlanes; ++p) _mm512_store_si512(block_ + p * 2 * tiles::kBytes, planes[p]);
      block_ += kStride<T::kPlanes>;
      if ((at_ += T::kBlock) < count_) continue;
      at_ = 0;
      w_ += k_;
      block_ = to_ + ++output_ * 64;
    }
  }

  // Finishes the group.
  void finish() {
    while (!is_done()) run<1>();
    for (int output = std::max<int64_t>(outputs_, 0); output < kOutputs; ++output) {
      char* line = to_ + output * 64;
      for (int64_t i = 0; i < count_; i += T::kBlock, line += kStride<T::kPlanes>) {
        for (int p = 0; p < T::kPlanes; ++p) _mm512_store_si512(line + p * 2 * tiles::kBytes, __m512i{});
      }
    }
  }

 private:
  const typename P::Stored* w_;
  int64_t k_, count_, outputs_, at_ = 0, output_ = 0;
  char *to_, *block_;
};

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

// Brings the lines of 32 rows x 32 outputs into the cache, a row at a time: all at once, the loads of tiles would wait for them.
class OutputFetcher {
 public:
  template <typename P>
  OutputFetcher(const Product<P>& product, int64_t row, int64_t out)
      : line_(reinterpret_cast<const char*>(product.y + row * product.n + out)),
        row_bytes_(product.n * sizeof(*product.y)),
        rows_(std::min(product.m - row, kPairRows)) {}

  inline __attribute__((always_inline)) void run() {
    if (rows_ <= 0) return;
    __builtin_prefetch(line_, 1, 3);
    __builtin_prefetch(line_ + 64, 1, 3);
    line_ += row_bytes_;
    --rows_;
  }

 private:
  const char* line_;
  int64_t row_bytes_, rows_;
};

// Returns this thread's own tiles of a piece's inputs: chunk after chunk, each of all rows, as tiles [block of k, 2, plane]. `piece` is
// as in `tiled_inputs`.
template <typename P>
const char* turned_piece(const Product<P>& product, int64_t piece, int64_t pairs, int64_t pair_bytes) {
  constexpr int64_t kTileBytes = Tiling<P>::kInputPlanes * tiles::kBytes;
  thread_local Tiles memory;
  thread_local int64_t held = -1;
  char* to = memory.hold((product.k + kChunk - 1) / kChunk * pairs * pair_bytes / tiles::kBytes + 1);
  if (piece == held) return to;
  char* tile = to;
  for (int64_t start = 0; start < product.k; start += kChunk) {
    const int64_t count = std::min(product.k - start, kChunk);
    for (int64_t row = 0; row < pairs * kPairRows; row += kPairRows, tile += pair_bytes) {
      for (int half = 0; half < 2; ++half) {
        const int64_t first = row + half * tiles::kSide;
        turn_inputs<P>(product.x + first * product.k + start, product.m - first, product.k, count, tile + half * kTileBytes,
                       kStride<Tiling<P>::kInputPlanes>);
      }
    }
  }
  held = piece;
  return to;
}

// Computes the outputs from `begin` to `end` of a piece of many rows. During each product of planes, Count blocks of a row of the next
// weights are decomposed.
template <typename P, int Count>
void many_rows(const Product<P>& product, int64_t piece, int64_t begin, int64_t end) {
  using T = Tiling<P>;
  constexpr int64_t kTileBytes = T::kInputPlanes * tiles::kBytes;
  thread_local Tiles weight_memory, sum_memory;
  const int64_t pairs = (product.m + kPairRows - 1) / kPairRows, groups = (end - begin + kOutputs - 1) / kOutputs;
  const int64_t most = blocks_of<P>(std::min(product.k, kChunk)), pair_bytes = most * kStride<T::kInputPlanes>;
  const int64_t weight_tiles = most * kStride<T::kPlanes> / tiles::kBytes + 1;
  const char* inputs = turned_piece(product, piece, pairs, pair_bytes);
  char* weights = weight_memory.hold(2 * weight_tiles);
  char* next_weights = weights + weight_tiles * tiles::kBytes;
  char* sums = sum_memory.hold(product.k > kChunk ? groups * pairs * 4 : 0);
  bool is_back = false;  // rows are passed there and back: the last ones are still in the cache
  GroupSplitter<P>(product, begin, 0, std::min(product.k, kChunk), weights).finish();
  for (int64_t start = 0; start < product.k; start += kChunk) {
    const int64_t blocks = blocks_of<P>(std::min(product.k - start, kChunk));
    const bool is_last = start + kChunk >= product.k;
    for (int64_t out = begin; out < end; out += kOutputs) {
      const bool is_end = out + kOutputs >= end;  // of a chunk
      const int64_t next_start = is_end ? start + kChunk : start, next_out = is_end ? begin : out + kOutputs;
      GroupSplitter<P> next(product, is_end && is_last ? product.n : next_out, next_start, std::min(product.k - next_start, kChunk),
                            next_weights);
      for (int64_t i = 0; i < pairs; ++i) {
        const int64_t pair = is_back ? pairs - 1 - i : i, row = pair * kPairRows;
        const char *left = weights, *right = inputs + pair * pair_bytes;
        char* held = sums + ((out - begin) / kOutputs * pairs + pair) * 4 * tiles::kBytes;
        OutputFetcher fetcher(product, is_last ? row : product.m, out);
        start == 0 ? zero_sums() : load_sums(held);
        for (int64_t block = 0; block < blocks; ++block, left += kStride<T::kPlanes>, right += kStride<T::kInputPlanes>) {
          add_block<P, 2>(left, right, kTileBytes, [&] {
            next.template run<Count>();
            fetcher.run();
          });
        }
        is_last ? store_tiles<2>(product, row, out) : store_sums(held);
      }
      is_back = !is_back;
      next.finish();
      std::swap(weights, next_weights);
    }
    inputs += pairs * pair_bytes;
  }
}

// Blocks of a row that are decomposed during a product of planes, so that all are during those of `Pairs` pairs of tiles of rows.
template <typename P, int Pairs>
constexpr int kCount = (kOutputs + Pairs * Tiling<P>::kSteps - 1) / (Pairs * Tiling<P>::kSteps);

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
  constexpr int kFew = kCount<P, 6>, kMany = kCount<P, 3>;
  const auto& rows = product.m > 5 * kPairRows ? many_rows<P, kFew> : many_rows<P, kMany>;
  for (int64_t out = begin; out < end; out += kHeldOutputs) rows(product, piece, out, std::min(out + kHeldOutputs, end));
}

}  // namespace jaxserve
#endif
