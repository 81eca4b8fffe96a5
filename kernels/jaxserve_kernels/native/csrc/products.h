// The products a tile can be made of: how weights of each stored type meet their inputs.
#pragma once

#include "vector.h"

namespace jaxserve {

// Float inputs: weights are widened to float lanes.
struct FloatInputs {
  using Input = float;
  using Sum = Floats;
  static constexpr int kStep = kLanes;  // inputs taken at once
  static inline Floats inputs(const float* p) { return load(p); }
  static inline void add(Floats& sum, Floats inputs, Floats weights) { sum = multiply_add(sum, inputs, weights); }
};

struct Float32 : FloatInputs {
  using Stored = float;
  static inline Floats weights(const float* p) { return load(p); }
};

struct Float16 : FloatInputs {
  using Stored = uint16_t;
  static inline Floats weights(const uint16_t* p) {
#if defined(__AVX512F__)
    return reinterpret_cast<Floats>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__aarch64__)
    return reinterpret_cast<Floats>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))));
#else
    return reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#endif
  }
};

struct BFloat16 : FloatInputs {
  using Stored = uint16_t;
  static inline Floats weights(const uint16_t* p) {
#if defined(__AVX512F__)
    auto wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return reinterpret_cast<Floats>(_mm512_slli_epi32(wide, 16));
#elif defined(__aarch64__)
    return reinterpret_cast<Floats>(vshll_n_u16(vld1_u16(p), 16));
#else
    auto wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return reinterpret_cast<Floats>(_mm256_slli_epi32(wide, 16));
#endif
  }
};

struct Int8 : FloatInputs {
  using Stored = int8_t;
  static inline Floats weights(const int8_t* p) { return load(p); }
};

// Int8 inputs, with exact sums.
#if defined(__AVX512VNNI__)
// The instruction multiplies unsigned by signed bytes, so weights are taken 128 too large, which the sum of a row's inputs makes good in
// the end.
struct Int8Inputs {
  using Stored = int8_t;
  using Input = int8_t;
  using Sum = Ints;
  static constexpr int kStep = 4 * kLanes;
  static constexpr int32_t kOffset = 128;
  static inline Ints inputs(const int8_t* p) { return reinterpret_cast<Ints>(_mm512_loadu_si512(p)); }
  static inline Ints weights(const int8_t* p) {
    return reinterpret_cast<Ints>(_mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128)));
  }
  static inline void add(Ints& sum, Ints inputs, Ints weights) {
    sum = reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(weights),
                                                     reinterpret_cast<__m512i>(inputs)));
  }
};
#elif defined(__aarch64__)
struct Int8Inputs {
  using Stored = int8_t;
  using Input = int8_t;
  using Sum = Ints;
  static constexpr int kStep = 4 * kLanes;
  static constexpr int32_t kOffset = 0;
  static inline Ints inputs(const int8_t* p) { return reinterpret_cast<Ints>(vld1q_s8(p)); }
  static inline Ints weights(const int8_t* p) { return inputs(p); }
  static inline void add(Ints& sum, Ints inputs, Ints weights) {
    sum = reinterpret_cast<Ints>(vdotq_s32(reinterpret_cast<int32x4_t>(sum), reinterpret_cast<int8x16_t>(weights),
                                           reinterpret_cast<int8x16_t>(inputs)));
  }
};
#else
// Without an instruction for sums of four products of bytes: inputs are kept in 16 bits, weights widened as they are loaded, and
// products added in pairs.
struct Int8Inputs {
  using Stored = int8_t;
  using Input = int16_t;
  using Sum = Ints;
  static constexpr int kStep = 2 * kLanes;
  static constexpr int32_t kOffset = 0;
#if defined(__AVX512F__)
  static inline Ints inputs(const int16_t* p) { return reinterpret_cast<Ints>(_mm512_loadu_si512(p)); }
  static inline Ints weights(const int8_t* p) {
    return reinterpret_cast<Ints>(_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
  }
  static inline void add(Ints& sum, Ints inputs, Ints weights) {
    sum += reinterpret_cast<Ints>(_mm512_madd_epi16(reinterpret_cast<__m512i>(inputs), reinterpret_cast<__m512i>(weights)));
  }
#else
  static inline Ints inputs(const int16_t* p) {
    return reinterpret_cast<Ints>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static inline Ints weights(const int8_t* p) {
    return reinterpret_cast<Ints>(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static inline void add(Ints& sum, Ints inputs, Ints weights) {
    sum += reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(inputs), reinterpret_cast<__m256i>(weights)));
  }
#endif
};
#endif

// The sums of four vectors, the sum of one, and values rounded to the nearest integer, to even, which are stored as inputs.
#if defined(__AVX512F__)
inline FourInts sums_of_four(Ints a, Ints b, Ints c, Ints d) {
  auto w = reinterpret_cast<__m512i>(a), x = reinterpret_cast<__m512i>(b);
  auto y = reinterpret_cast<__m512i>(c), z = reinterpret_cast<__m512i>(d);
  auto ab = _mm512_add_epi32(_mm512_unpacklo_epi32(w, x), _mm512_unpackhi_epi32(w, x));
  auto cd = _mm512_add_epi32(_mm512_unpacklo_epi32(y, z), _mm512_unpackhi_epi32(y, z));
  auto all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  auto half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  auto quarter = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  return reinterpret_cast<FourInts>(quarter);
}

inline int32_t sum(Ints v) { return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(v)); }

inline Ints store_rounded(Int8Inputs::Input* p, Floats v) {
  const __m512i rounded = _mm512_cvtps_epi32(reinterpret_cast<__m512>(v));
#if defined(__AVX512VNNI__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(rounded));
#else
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
#endif
  return reinterpret_cast<Ints>(rounded);
}
#elif defined(__aarch64__)
inline FourInts sums_of_four(Ints a, Ints b, Ints c, Ints d) {
  const auto ab = vpaddq_s32(reinterpret_cast<int32x4_t>(a), reinterpret_cast<int32x4_t>(b));
  const auto cd = vpaddq_s32(reinterpret_cast<int32x4_t>(c), reinterpret_cast<int32x4_t>(d));
  return reinterpret_cast<FourInts>(vpaddq_s32(ab, cd));
}

inline int32_t sum(Ints v) { return vaddvq_s32(reinterpret_cast<int32x4_t>(v)); }

inline Ints store_rounded(Int8Inputs::Input* p, Floats v) {
  const int32x4_t rounded = vcvtnq_s32_f32(reinterpret_cast<float32x4_t>(v));
  const int16x4_t half = vmovn_s32(rounded);
  *reinterpret_cast<FourBytes*>(p) = vget_lane_u32(vreinterpret_u32_s8(vmovn_s16(vcombine_s16(half, half))), 0);
  return reinterpret_cast<Ints>(rounded);
}
#else
inline FourInts sums_of_four(Ints a, Ints b, Ints c, Ints d) {
  const auto ab = _mm256_hadd_epi32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b));
  const auto cd = _mm256_hadd_epi32(reinterpret_cast<__m256i>(c), reinterpret_cast<__m256i>(d));
  const auto all = _mm256_hadd_epi32(ab, cd);
  return reinterpret_cast<FourInts>(_mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
}

inline int32_t sum(Ints v) { return sums_of_four(v, v, v, v)[0]; }

inline Ints store_rounded(Int8Inputs::Input* p, Floats v) {
  const __m256i rounded = _mm256_cvtps_epi32(reinterpret_cast<__m256>(v));
  const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow);
  return reinterpret_cast<Ints>(rounded);
}
#endif

// Of a row of inputs in int8: what it was divided by, and its sum.
struct Quantized {
  float scale;
  int32_t sum;
};

template <typename P>
struct Product {
  const typename P::Input* x;
  const typename P::Stored* w;
  float* y;
  int64_t m, k, n;
  const float* scales;         // of the outputs, or null
  const Quantized* quantized;  // rows, or null
  bool is_tiled;               // on the matrix unit
};

}  // namespace jaxserve
