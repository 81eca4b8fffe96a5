// GGUF's block types in tiles of 16 outputs (the layout is described in block_kinds.py): codes and scales of some
// outputs side by side, one output in each lane.
#pragma once

#include <cstring>

#include "products.h"

namespace jaxserve {
namespace blocks {

constexpr int kTileOutputs = 16;
constexpr int kGroup = 32;                         // inputs whose codes lie together
constexpr int kSteps = kGroup / 4;                 // of four inputs each
constexpr int kHalves = kTileOutputs / kLanes;     // vectors of lanes in a tile: 1, 2 or 4
constexpr int kVectorBytes = 4 * kTileOutputs;     // four bytes of every output

typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UnalignedWords __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));

inline Words load_words(const uint8_t* p) { return *reinterpret_cast<const UnalignedWords*>(p); }

inline Floats load_halfs(const uint8_t* p) { return Float16::weights(reinterpret_cast<const uint16_t*>(p)); }

inline Floats load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  auto wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return reinterpret_cast<Floats>(_mm512_cvtepi32_ps(wide));
#elif defined(__aarch64__)
  const uint8x8_t bytes = vreinterpret_u8_u32(vld1_dup_u32(reinterpret_cast<const FourBytes*>(p)));
  return reinterpret_cast<Floats>(vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes)))));
#else
  auto wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return reinterpret_cast<Floats>(_mm256_cvtepi32_ps(wide));
#endif
}

// The codes of inputs 4 * step to 4 * step + 3, a byte each. `codes`: those of 32 inputs, from this half's lanes on.
template <int Bits>
inline __attribute__((always_inline)) Words codes_of(const uint8_t* codes, int step) {
  if constexpr (Bits == 8) {
    return load_words(codes + step * kVectorBytes);
  } else {
    const Words pairs = load_words(codes + step / 2 * kVectorBytes);
    Words found = (step % 2 ? pairs >> 4 : pairs) & 0x0f0f0f0fu;
    if constexpr (Bits == 5) {
      found |= (load_words(codes + 4 * kVectorBytes) >> step & 0x01010101u) << 4;
    } else if constexpr (Bits == 6) {
      found |= (load_words(codes + (4 + step / 4) * kVectorBytes) >> step % 4 * 2 & 0x03030303u) << 4;
    }
    return found;
  }
}

// The code of one input, as a float.
inline __attribute__((always_inline)) Floats code_of(Words codes, int byte) {
  return __builtin_convertvector(reinterpret_cast<Ints>(codes >> 8 * byte & 0xffu), Floats);
}

// Of one group: d of each part, and what is added to every weight: -m, or nothing.
template <int Parts>
struct Scales {
  Floats d[Parts];
  Floats added;
};

// Scales of one level.
template <int Bits, int Zero>
struct OneLevel {
  static constexpr int kBits = Bits, kZero = Zero, kInputs = kGroup, kParts = 1;
  static constexpr bool kHasMinimum = Zero == 0;
  static constexpr int kCodeBytes = kVectorBytes * Bits, kBytes = kCodeBytes + 2 * kTileOutputs * (1 + kHasMinimum);

  static inline Scales<1> scales(const uint8_t* block, int, int half) {
    const uint8_t* p = block + kCodeBytes + half * 2 * kLanes;
    Scales<1> found;
    found.d[0] = load_halfs(p);
    found.added = Floats{};
    if constexpr (kHasMinimum) found.added = load_halfs(p + 2 * kTileOutputs);
    return found;
  }
};

// Q4_K and Q5_K.
template <int Bits>
struct TwoLevels {
  static constexpr int kBits = Bits, kZero = 0, kInputs = 256, kParts = 1;
  static constexpr bool kHasMinimum = true;
  static constexpr int kCodeBytes = kVectorBytes * Bits, kGroups = kInputs / kGroup;
  static constexpr int kFactorBytes = kGroups * kTileOutputs;
  static constexpr int kBytes = kGroups * kCodeBytes + 2 * kFactorBytes + 4 * kTileOutputs;

  static inline Scales<1> scales(const uint8_t* block, int group, int half) {
    const uint8_t* factors = block + kGroups * kCodeBytes + group * kTileOutputs + half * kLanes;
    const uint8_t* p = block + kGroups * kCodeBytes + 2 * kFactorBytes + half * 2 * kLanes;
    const Floats m = load_halfs(p + 2 * kTileOutputs) * load_bytes(factors + kFactorBytes);
    Scales<1> found;
    found.d[0] = load_halfs(p) * load_bytes(factors);
    found.added = -m;
    return found;
  }
};

struct Q6K {
  static constexpr int kBits = 6, kZero = 32, kInputs = 256, kParts = 2;
  static constexpr bool kHasMinimum = false;
  static constexpr int kCodeBytes = kVectorBytes * kBits, kGroups = kInputs / kGroup;
  static constexpr int kFactorBytes = kGroups * kParts * kTileOutputs;
  static constexpr int kBytes = kGroups * kCodeBytes + kFactorBytes + 2 * kTileOutputs;

  static inline Scales<2> scales(const uint8_t* block, int group, int half) {
    const uint8_t* first = block + kGroups * kCodeBytes + 2 * group * kTileOutputs + half * kLanes;
    const auto* factors = reinterpret_cast<const int8_t*>(first);
    const Floats d = load_halfs(block + kGroups * kCodeBytes + kFactorBytes + half * 2 * kLanes);
    Scales<2> found;
    found.d[0] = d * Int8::weights(factors);
    found.d[1] = d * Int8::weights(factors + kTileOutputs);
    found.added = Floats{};
    return found;
  }
};

// Four neighbouring bytes in every lane.
inline Words broadcast_four(const int8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, sizeof(four));
  return four - Words{};
}

// What rounded inputs of a row are multiplied with has to be a byte: codes of 8 bits that are unsigned, or 128 smaller.
#if defined(__AVX512VNNI__)
constexpr bool kBytesAreSigned = false;
#else
constexpr bool kBytesAreSigned = true;
#endif
template <typename Kind>
constexpr int kByteZero = Kind::kBits == 8 && kBytesAreSigned ? 0 : Kind::kZero;

#if defined(__AVX512VNNI__) || defined(__aarch64__)
// Adds the products of four bytes in each lane.
template <int Bits>
inline __attribute__((always_inline)) Ints add_products(Ints sums, Words codes, Words inputs) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(codes),
                                                    reinterpret_cast<__m512i>(inputs)));
#else
  const auto bytes = reinterpret_cast<int8x16_t>(Bits == 8 ? codes ^ 0x80808080u : codes);
  return reinterpret_cast<Ints>(vdotq_s32(reinterpret_cast<int32x4_t>(sums), bytes, reinterpret_cast<int8x16_t>(inputs)));
#endif
}

// sums += codes of some steps times the inputs of each row, exact in every lane.
template <int Bits, int Steps, int Rows>
inline __attribute__((always_inline)) void add_steps(Ints (&sums)[Rows], const uint8_t* codes, int first, const int8_t* x,
                                                     int64_t k) {
#pragma GCC unroll 8
  for (int step = first; step < first + Steps; ++step) {
    const Words four = codes_of<Bits>(codes, step);
    for (int r = 0; r < Rows; ++r) sums[r] = add_products<Bits>(sums[r], four, broadcast_four(x + r * k + 4 * step));
  }
}
#else
typedef int16_t Pairs __attribute__((vector_size(kLanes * 4)));  // sums of two products each

// Products of four bytes in each lane, in pairs. `sizes`, and `signs` for codes of 8 bits: what `codes` are the product of.
template <int Bits>
inline __attribute__((always_inline)) Pairs pairs_of(Words sizes, Words signs, Words inputs) {
#if defined(__AVX512F__)
  auto x = reinterpret_cast<__m512i>(inputs);
  if constexpr (Bits == 8) {
    x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(reinterpret_cast<__m512i>(signs)), _mm512_setzero_si512(), x);
  }
  return reinterpret_cast<Pairs>(_mm512_maddubs_epi16(reinterpret_cast<__m512i>(sizes), x));
#else
  auto x = reinterpret_cast<__m256i>(inputs);
  if constexpr (Bits == 8) x = _mm256_sign_epi8(x, reinterpret_cast<__m256i>(signs));
  return reinterpret_cast<Pairs>(_mm256_maddubs_epi16(reinterpret_cast<__m256i>(sizes), x));
#endif
}

inline Ints wide_sums(Pairs pairs) {
#if defined(__AVX512F__)
  return reinterpret_cast<Ints>(_mm512_madd_epi16(reinterpret_cast<__m512i>(pairs), _mm512_set1_epi16(1)));
#else
  return reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(pairs), _mm256_set1_epi16(1)));
#endif
}

inline Words sizes_of(Words bytes) {
#if defined(__AVX512F__)
  return reinterpret_cast<Words>(_mm512_abs_epi8(reinterpret_cast<__m512i>(bytes)));
#else
  return reinterpret_cast<Words>(_mm256_abs_epi8(reinterpret_cast<__m256i>(bytes)));
#endif
}

// sums += codes of some steps times the inputs of each row, exact in every lane: inputs are at most 127, and pairs are widened before
// they could leave 16 bits.
template <int Bits, int Steps, int Rows>
inline __attribute__((always_inline)) void add_steps(Ints (&sums)[Rows], const uint8_t* codes, int first, const int8_t* x,
                                                     int64_t k) {
  constexpr int kLargest = Bits == 8 ? 128 : (1 << Bits) - 1, kFitting = 32767 / (2 * 127 * kLargest);
  constexpr int kBatch = kFitting < Steps ? kFitting : Steps;
#pragma GCC unroll 8
  for (int start = first; start < first + Steps; start += kBatch) {
    Pairs pairs[Rows] = {};
#pragma GCC unroll 8
    for (int step = start; step < start + kBatch; ++step) {
      const Words four = codes_of<Bits>(codes, step), bytes = Bits == 8 ? four ^ 0x80808080u : four;
      const Words sizes = Bits == 8 ? sizes_of(bytes) : four;
      for (int r = 0; r < Rows; ++r) pairs[r] += pairs_of<Bits>(sizes, bytes, broadcast_four(x + r * k + 4 * step));
    }
    for (int r = 0; r < Rows; ++r) sums[r] += wide_sums(pairs[r]);
  }
}
#endif

}  // namespace blocks
}  // namespace jaxserve
