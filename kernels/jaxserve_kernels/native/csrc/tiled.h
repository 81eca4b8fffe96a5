// Products on a processor's matrix unit: tiles of weights times tiles of inputs that were turned, so that they have
// rows side by side. Sums of 32 outputs x 32 rows fill half of its registers. Weights are taken apart while the block of
// inputs before is multiplied.
//
// The unit multiplies bfloat16, 16 times as many at once as the vector unit floats. A float is the exact sum of three
// bfloat16s, each with the next 8 bits of its mantissa: its planes. Of the nine products of two floats' planes the
// three smallest are about what a product of floats rounds away; the other six are as good as it in three eighths of
// its time (the scheme is that of XLA's BF16_BF16_F32_X6). Narrower weights have fewer planes.
//
// A row's sums have one order, whatever rows are beside it and however many.
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "parallel.h"
#include "products.h"
#include "tiles.h"

#if defined(JAXSERVE_TILES)
namespace jaxserve {

// How the operands of a product become tiles: float inputs.
template <typename P>
struct Tiling {
  static constexpr int kBlock = 32;  // inputs of a tile
  static constexpr int kInputPlanes = 3;
  static constexpr int kPlanes = sizeof(typename P::Stored) == 4 ? 3 : std::is_same_v<P, Float16> ? 2 : 1;

  static constexpr int kSteps = kPlanes * (7 - kPlanes) / 2;  // products of planes

  // Decomposes and transposes the inputs of up to 16 rows, k apart: tiles [plane].
  static void turn(const float* p, int64_t rows, int64_t k, int64_t left, char* to) {
    __m512i low[tiles::kSide], high[tiles::kSide];
    tiles::turn(p, rows, k, low);
    tiles::turn(p + kLanes, left > kLanes ? rows : 0, k, high);
    for (int l = 0; l < tiles::kSide; ++l, to += 64) {
      __m512i planes[kInputPlanes];
      split(reinterpret_cast<Floats>(low[l]), reinterpret_cast<Floats>(high[l]), planes, 0x8000);
      for (int i = 0; i < kInputPlanes; ++i) _mm512_store_si512(to + i * tiles::kBytes, planes[i]);
    }
  }
  static void weights(const typename P::Stored* p, int64_t left, __m512i (&planes)[kPlanes]) {
    split(P::weights(p), left > kLanes ? P::weights(p + kLanes) : Floats{}, planes, 0);
  }
  template <int Sums, int Left, int Right>
  static void add() {
    tiles::add_bfloat16<Sums, Left, Right>();
  }
  static __m512 floats(__m512i sums) { return _mm512_castsi512_ps(sums); }

 private:
  // `half` a unit of what is kept is added for inputs, so that rests have either sign and what is left out has no bias;
  // for weights there is no time.
  template <int Planes>
  static inline void split(Floats low, Floats high, __m512i (&planes)[Planes], int32_t half) {
    const __m512i upper = _mm512_set1_epi32(0xffff0000), added = _mm512_set1_epi32(half);
    for (int i = 0; i < Planes; ++i) {  // inputs j and j + 16 beside each other, in both operands alike
      auto a = reinterpret_cast<__m512i>(low), b = reinterpret_cast<__m512i>(high);
      if (half && i < 2) a = _mm512_add_epi32(a, added), b = _mm512_add_epi32(b, added);
      const __m512i a_upper = _mm512_and_si512(a, upper);
      const __m512i b_upper = i == 2 ? b : _mm512_and_si512(b, upper);  // no more than 8 bits are left for the third
      planes[i] = _mm512_or_si512(_mm512_srli_epi32(a, 16), b_upper);
      low -= reinterpret_cast<Floats>(a_upper);
      high -= reinterpret_cast<Floats>(b_upper);
    }
  }
};

// Int8 inputs, with exact sums.
template <>
struct Tiling<Int8Inputs> {
  static constexpr int kBlock = 64, kInputPlanes = 1, kPlanes = 1, kSteps = 1;

  static void turn(const int8_t* p, int64_t rows, int64_t k, int64_t, char* to) {
    __m512i lines[tiles::kSide];
    tiles::turn(p, rows, k, lines);
    for (const __m512i& line : lines) {
      _mm512_store_si512(to, line);
      to += sizeof(line);
    }
  }
  static void weights(const int8_t* p, int64_t, __m512i (&planes)[1]) { planes[0] = _mm512_loadu_si512(p); }
  template <int Sums, int Left, int Right>
  static void add() {
    tiles::add_int8<Sums, Left, Right>();
  }
  static __m512 floats(__m512i sums) { return _mm512_cvtepi32_ps(sums); }
};

// Memory for tiles, of one thread.
class Tiles {
 public:
  char* hold(int64_t count) {
    if (count > count_) memory_.reset(static_cast<char*>(::operator new[](count * tiles::kBytes, kLine)));
    count_ = std::max(count, count_);
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(char* p) const { ::operator delete[](p, kLine); }
  };
  std::unique_ptr<char[], Free> memory_;
  int64_t count_ = 0;
};

constexpr int kOutputs = 2 * tiles::kSide;  // whose sums are held at once, with as many rows
constexpr int64_t kAheadBytes = 256;        // how far ahead of its use a row of weights is fetched

inline int64_t tiles_of(int64_t rows) { return (rows + tiles::kSide - 1) / tiles::kSide; }

template <typename P>
int64_t blocks_of(int64_t k) {
  return (k + Tiling<P>::kBlock - 1) / Tiling<P>::kBlock;
}

// Decomposes and transposes `count` inputs of up to 16 rows into tiles [block of k, plane]. Blocks are `block_bytes` apart.
template <typename P>
void turn_inputs(const typename P::Input* x, int64_t rows, int64_t k, int64_t count, char* to, int64_t block_bytes) {
  using T = Tiling<P>;
  rows = std::min<int64_t>(rows, tiles::kSide);
  for (int64_t i = 0; i < count; i += T::kBlock, to += block_bytes) T::turn(x + i, rows, k, count - i, to);
}

// Takes apart the weights of 32 outputs after another, each for so many pairs of tiles of rows, block by block of k:
// tiles [plane, 2]. Outputs that there are not become zeros.
template <typename P>
class Splitter {
 public:
  using T = Tiling<P>;
  static constexpr int kTiles = 2 * T::kPlanes;  // of a block; two blocks are held

  Splitter(const Product<P>& product, int64_t out, int64_t pairs, char* to)
      : w_(product.w + out * product.k), k_(product.k), pairs_(pairs), outputs_(product.n - out), to_(to) {}

  // Goes on for some outputs; to the end of the block, at most.
  template <int Count>
  inline __attribute__((always_inline)) void run() {
    const int end = std::min(output_ + Count, kOutputs);
    if (k_ - at_ >= T::kBlock && outputs_ >= kOutputs) {
      split<true>(end);
    } else {
      split<false>(end);
    }
  }

  // The block that was taken apart; the next one goes elsewhere.
  const char* take() {
    output_ = 0;
    if ((at_ += T::kBlock) >= k_) {
      at_ = 0;
      if (++pair_ == pairs_) {
        pair_ = 0;
        w_ += kOutputs * k_;
        outputs_ -= kOutputs;
      }
    }
    const char* block = to_ + side_;
    side_ ^= kTiles * tiles::kBytes;
    return block;
  }

 private:
  template <bool IsWhole>
  inline __attribute__((always_inline)) void split(int end) {
    constexpr int64_t kAhead = kAheadBytes / sizeof(*w_);
    const int64_t ahead = k_ - at_ > kAhead ? kAhead : kAhead + (kOutputs - 1) * k_;  // then it is of the next outputs
    const auto* w = w_ + output_ * k_ + at_;
    char* to = to_ + side_ + output_ * 64;
    for (; output_ < end; ++output_, w += k_, to += 64) {
      __m512i planes[T::kPlanes] = {};
      if (IsWhole || output_ < outputs_) T::weights(w, IsWhole ? T::kBlock : k_ - at_, planes);
      for (size_t line = 0; line < T::kBlock * sizeof(*w); line += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(w + ahead) + line, 0, 3);
      }
      for (int p = 0; p < T::kPlanes; ++p) _mm512_store_si512(to + p * 2 * tiles::kBytes, planes[p]);
    }
  }

  const typename P::Stored* w_;
  int64_t k_, pairs_, outputs_, at_ = 0, pair_ = 0;
  char* to_;
  int output_ = 0, side_ = 0;
};

// Adds the products of one plane of weights, in tiles 4 and 5, with one of inputs, in tiles 6 and 7.
template <typename P, int RowTiles>
inline __attribute__((always_inline)) void add_planes() {
  using T = Tiling<P>;
  T::template add<0, 4, 6>();
  T::template add<2, 5, 6>();
  if constexpr (RowTiles == 2) {
    T::template add<1, 4, 7>();
    T::template add<3, 5, 7>();
  }
}

// Adds a block of k. Tiles 0 and 1: sums of the first 16 outputs with one or two tiles of rows; 2 and 3: of the others. From one
// product of planes to the next, one of the operands stays in its tiles: 14 loads for 24 products.
template <typename P, int RowTiles, typename Meanwhile>
inline __attribute__((always_inline)) void add_block(const char* weights, const char* inputs, int64_t next_rows,
                                                     Meanwhile&& meanwhile) {
  using T = Tiling<P>;
  const auto load_weights = [&](int q) {
    tiles::load<4>(weights + q * 2 * tiles::kBytes);
    tiles::load<5>(weights + (q * 2 + 1) * tiles::kBytes);
  };
  const auto load_inputs = [&](int p) {
    tiles::load<6>(inputs + p * tiles::kBytes);
    if constexpr (RowTiles == 2) tiles::load<7>(inputs + next_rows + p * tiles::kBytes);
  };
  load_weights(0);
  for (int p = T::kInputPlanes - 1; p >= 0; --p) {
    meanwhile();
    load_inputs(p);
    add_planes<P, RowTiles>();
  }
  for (int q = T::kPlanes - 1; q > 0; --q) {
    meanwhile();
    load_weights(q);
    add_planes<P, RowTiles>();
  }
  if constexpr (T::kPlanes > 1) {
    meanwhile();
    load_inputs(1);
    add_planes<P, RowTiles>();
  }
}

// Stores the sums of up to 16 outputs from `out` on with up to 16 rows from `row` on.
template <int Tile, typename P>
void store_tile(const Product<P>& product, int64_t row, int64_t out) {
  const int64_t rows = std::min<int64_t>(product.m - row, tiles::kSide), outputs = product.n - out;
  if (outputs <= 0) return;
  alignas(64) __m512i sums[tiles::kSide];
  tiles::store<Tile>(sums);
  tiles::transpose(sums);
  const __mmask16 valid = outputs < tiles::kSide ? (1 << outputs) - 1 : 0xffff;
  const __m512 scales = product.scales ? _mm512_maskz_loadu_ps(valid, product.scales + out) : _mm512_set1_ps(1);
  for (int64_t r = 0; r < rows; ++r) {
    const __m512 own = _mm512_set1_ps(product.quantized ? product.quantized[row + r].scale : 1);
    _mm512_mask_storeu_ps(product.y + (row + r) * product.n + out, valid,
                          _mm512_mul_ps(_mm512_mul_ps(Tiling<P>::floats(sums[r]), own), scales));
  }
}

// Stores the sums of 32 outputs from `out` on with one or two tiles of rows from `row` on.
template <int RowTiles, typename P>
void store_tiles(const Product<P>& product, int64_t row, int64_t out) {
  store_tile<0>(product, row, out);
  store_tile<2>(product, row, out + tiles::kSide);
  if constexpr (RowTiles == 2) {
    store_tile<1>(product, row + tiles::kSide, out);
    store_tile<3>(product, row + tiles::kSide, out + tiles::kSide);
  }
}

// The sums of 32 outputs with one or two tiles of rows.
template <int RowTiles, typename P>
void tile_sums(const Product<P>& product, const char* inputs, int64_t row, int64_t out, Splitter<P>& weights) {
  using T = Tiling<P>;
  constexpr int64_t kBlockBytes = T::kInputPlanes * tiles::kBytes;
  const int64_t blocks = blocks_of<P>(product.k), next_rows = blocks * kBlockBytes;
  tiles::zero<0>();
  tiles::zero<1>();
  tiles::zero<2>();
  tiles::zero<3>();
  for (int64_t block = 0; block < blocks; ++block, inputs += kBlockBytes) {
    const char* ready = weights.take();
    add_block<P, RowTiles>(ready, inputs, next_rows, [&] {
      weights.template run<(kOutputs + T::kSteps - 1) / T::kSteps>();
    });
  }
  store_tiles<RowTiles>(product, row, out);
}

// This thread's own tiles of a piece's inputs: another's would have to come from that one's cache. `piece` is unlike
// all others, of this call and of those before.
template <typename P>
const char* tiled_inputs(const Product<P>& product, int64_t piece) {
  thread_local Tiles memory;
  thread_local int64_t held = -1;
  const int64_t size = blocks_of<P>(product.k) * Tiling<P>::kInputPlanes;
  char* to = memory.hold(tiles_of(product.m) * size);
  for (int64_t row = 0; piece != held && row < product.m; row += tiles::kSide) {
    const auto* x = product.x + row * product.k;
    char* tile = to + row / tiles::kSide * size * tiles::kBytes;
    turn_inputs<P>(x, product.m - row, product.k, product.k, tile, Tiling<P>::kInputPlanes * tiles::kBytes);
  }
  held = piece;
  return to;
}

// Outputs from `begin` to `end` of a piece of few rows.
template <typename P>
void few_rows(const Product<P>& product, int64_t piece, int64_t begin, int64_t end) {
  thread_local Tiles memory;
  const char* inputs = tiled_inputs(product, piece);
  const int64_t row_tiles = tiles_of(product.m);
  const int64_t size = blocks_of<P>(product.k) * Tiling<P>::kInputPlanes * tiles::kBytes;
  Splitter<P> weights(product, begin, (row_tiles + 1) / 2, memory.hold(2 * Splitter<P>::kTiles));
  weights.template run<kOutputs>();
  for (int64_t out = begin; out < end; out += kOutputs) {
    for (int64_t tile = 0; tile < row_tiles; tile += 2) {
      const auto& sums = tile + 1 < row_tiles ? tile_sums<2, P> : tile_sums<1, P>;
      sums(product, inputs + tile * size, tile * tiles::kSide, out, weights);
    }
  }
}

}  // namespace jaxserve
#endif
