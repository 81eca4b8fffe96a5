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

// sums += dot products of four unsigned codes with the four signed bytes in `inputs`, exact in every lane.
template <int Bits>
inline __attribute__((always_inline)) Ints add_products(Ints sums, Words codes, Words inputs) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(codes),
                                                    reinterpret_cast<__m512i>(inputs)));
#elif defined(__aarch64__)
  const auto x = reinterpret_cast<int8x16_t>(inputs);
  if constexpr (Bits < 8) {
    return reinterpret_cast<Ints>(vdotq_s32(reinterpret_cast<int32x4_t>(sums), reinterpret_cast<int8x16_t>(codes), x));
  } else {  // as signed bytes codes are 128 too small
    const auto low = reinterpret_cast<int8x16_t>(codes ^ 0x80808080u);
    const int32x4_t rest = vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(64), x);
    return reinterpret_cast<Ints>(vdotq_s32(reinterpret_cast<int32x4_t>(sums) + rest * 2, low, x));
  }
#elif defined(__AVX512F__)
  const auto u = reinterpret_cast<__m512i>(codes), x = reinterpret_cast<__m512i>(inputs);
  if constexpr (Bits < 8) {  // 2 * 63 * 127 fits 16 bits
    const auto pairs = _mm512_madd_epi16(_mm512_maddubs_epi16(u, x), _mm512_set1_epi16(1));
    return sums + reinterpret_cast<Ints>(pairs);
  } else {
    const auto even = _mm512_madd_epi16(_mm512_and_si512(u, _mm512_set1_epi16(255)),
                                        _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
    const auto odd = _mm512_madd_epi16(_mm512_srli_epi16(u, 8), _mm512_srai_epi16(x, 8));
    return sums + reinterpret_cast<Ints>(even) + reinterpret_cast<Ints>(odd);
  }
#else
  const auto u = reinterpret_cast<__m256i>(codes), x = reinterpret_cast<__m256i>(inputs);
  if constexpr (Bits < 8) {
    const auto pairs = _mm256_madd_epi16(_mm256_maddubs_epi16(u, x), _mm256_set1_epi16(1));
    return sums + reinterpret_cast<Ints>(pairs);
  } else {
    const auto even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)),
                                        _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    const auto odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(x, 8));
    return sums + reinterpret_cast<Ints>(even) + reinterpret_cast<Ints>(odd);
  }
#endif
}

// Four neighbouring bytes in every lane.
inline Words broadcast_four(const int8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, sizeof(four));
  return four - Words{};
}

}  // namespace blocks
}  // namespace jaxserve
