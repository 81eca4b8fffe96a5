// SIMD for one host: 16 float lanes with AVX-512, 8 with AVX2, 4 with NEON.
//
// Sums have one fixed order whatever surrounds a row, so that a row's result never depends on its batch.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#include <cstdint>

namespace jaxserve {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
constexpr int kLanes = 8;
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kLanes = 4;
#else
#error "these kernels need AVX2, FMA and F16C, or NEON with dot products"
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;  // vectors
#else
constexpr int kRegisters = 16;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef float UnalignedFloats __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

typedef float FourFloats __attribute__((vector_size(16)));
typedef int32_t FourInts __attribute__((vector_size(16)));
typedef float UnalignedFour __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t FourBytes __attribute__((aligned(1), may_alias));

inline Floats load(const float* p) { return *reinterpret_cast<const UnalignedFloats*>(p); }
inline Floats load(const int8_t* p) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return reinterpret_cast<Floats>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
#elif defined(__aarch64__)
  const int8x8_t bytes = vreinterpret_s8_u32(vld1_dup_u32(reinterpret_cast<const FourBytes*>(p)));
  return reinterpret_cast<Floats>(vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes)))));
#else
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return reinterpret_cast<Floats>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
#endif
}

// An 8-bit float (e4m3) other than NaN.
struct E4m3 {
  uint8_t bits;
};

// Moved by seven bits the exponent and the mantissa are those of a half-precision number 2^-8 times as large. Denormal ones are
// converted, too: in single precision the processor may be set to take denormal numbers for zero.
inline Floats load(const E4m3* p) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i sign = _mm256_and_si256(wide, _mm256_set1_epi16(int16_t(0x8000)));
  const __m256i size = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3f80));
  return reinterpret_cast<Floats>(_mm512_cvtph_ps(_mm256_or_si256(sign, size))) * 256.0f;
#elif defined(__aarch64__)
  const int8x8_t bytes = vreinterpret_s8_u32(vld1_dup_u32(reinterpret_cast<const FourBytes*>(p)));
  const int16x4_t wide = vget_low_s16(vmovl_s8(bytes));
  const int16x4_t sign = vand_s16(wide, vdup_n_s16(int16_t(0x8000)));
  const int16x4_t size = vand_s16(vshl_n_s16(wide, 7), vdup_n_s16(0x3f80));
  return reinterpret_cast<Floats>(vcvt_f32_f16(vreinterpret_f16_s16(vorr_s16(sign, size)))) * 256.0f;
#else
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i sign = _mm_and_si128(wide, _mm_set1_epi16(int16_t(0x8000)));
  const __m128i size = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(0x3f80));
  return reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm_or_si128(sign, size))) * 256.0f;
#endif
}

inline void store(float* p, Floats v) { *reinterpret_cast<UnalignedFloats*>(p) = v; }

// Keeps the compiler from loading `v` again at each of its uses: loads would bound the product.
template <typename Vector>
inline Vector in_register(Vector v) {
#if defined(__aarch64__)
  asm("" : "+w"(v));
#else
  asm("" : "+v"(v));
#endif
  return v;
}

// sum + a * b, rounded once. As an expression it would be the compiler's choice in each instance of a template: tuned
// for AMD's Zen, GCC multiplies and adds apart where a sum is one chain, and a row alone would differ from the same row
// in a batch.
inline Floats multiply_add(Floats sum, Floats a, Floats b) {
#if defined(__AVX512F__)
  using Register = __m512;
  return reinterpret_cast<Floats>(
      _mm512_fmadd_ps(reinterpret_cast<Register>(a), reinterpret_cast<Register>(b), reinterpret_cast<Register>(sum)));
#elif defined(__aarch64__)
  using Register = float32x4_t;
  return reinterpret_cast<Floats>(
      vfmaq_f32(reinterpret_cast<Register>(sum), reinterpret_cast<Register>(a), reinterpret_cast<Register>(b)));
#else
  using Register = __m256;
  return reinterpret_cast<Floats>(
      _mm256_fmadd_ps(reinterpret_cast<Register>(a), reinterpret_cast<Register>(b), reinterpret_cast<Register>(sum)));
#endif
}

inline Floats broadcast(float x) { return x - Floats{}; }

// The sums of four vectors: within groups of four lanes first, then over the groups.
inline FourFloats sums_of_four(Floats a, Floats b, Floats c, Floats d) {
#if defined(__aarch64__)
  const auto ab = vpaddq_f32(reinterpret_cast<float32x4_t>(a), reinterpret_cast<float32x4_t>(b));
  const auto cd = vpaddq_f32(reinterpret_cast<float32x4_t>(c), reinterpret_cast<float32x4_t>(d));
  return reinterpret_cast<FourFloats>(vpaddq_f32(ab, cd));
#else
#if defined(__AVX512F__)
  auto w = reinterpret_cast<__m512>(a), x = reinterpret_cast<__m512>(b);
  auto y = reinterpret_cast<__m512>(c), z = reinterpret_cast<__m512>(d);
  auto ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(w, x), _mm512_unpackhi_ps(w, x)));
  auto cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(y, z), _mm512_unpackhi_ps(y, z)));
  auto all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
  auto upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1));
  auto half = _mm256_add_ps(_mm512_castps512_ps256(all), upper);
#else
  auto w = reinterpret_cast<__m256>(a), x = reinterpret_cast<__m256>(b);
  auto y = reinterpret_cast<__m256>(c), z = reinterpret_cast<__m256>(d);
  auto ab = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(w, x), _mm256_unpackhi_ps(w, x)));
  auto cd = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(y, z), _mm256_unpackhi_ps(y, z)));
  auto half = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
#endif
  auto quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  return reinterpret_cast<FourFloats>(quarter);
#endif
}

inline float sum(Floats v) { return sums_of_four(v, v, v, v)[0]; }

// Whether any lane is larger than `limit`.
inline bool any_above(Floats v, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(v), _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#elif defined(__aarch64__)
  return vmaxvq_u32(reinterpret_cast<uint32x4_t>(v > limit)) != 0;
#else
  return _mm256_movemask_ps(_mm256_cmp_ps(reinterpret_cast<__m256>(v), _mm256_set1_ps(limit), _CMP_GT_OQ)) != 0;
#endif
}

inline float maximum(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(v));
#elif defined(__aarch64__)
  return vmaxvq_f32(reinterpret_cast<float32x4_t>(v));
#else
  auto wide = reinterpret_cast<__m256>(v);
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(wide), _mm256_extractf128_ps(wide, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
#endif
}

// The larger of each two lanes; of `b` where one is no number.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__aarch64__)
  return a > b ? a : b;
#else
  return reinterpret_cast<Floats>(_mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#endif
}

// 2^x for x <= 0 within 1 ulp; below -126 it is 0. Adding 1.5 * 2^23 rounds x to an integer, whose lowest bits are then those of the
// sum; the polynomial is the best of its degree for the rest, between -1/2 and 1/2.
inline Floats exponential2(Floats x) {
  const Floats magic = broadcast(12582912.0f);
  const Floats rounded = x + magic, rest = x - (rounded - magic);
  Floats p = multiply_add(broadcast(1.3398874588e-3f), broadcast(1.5353362061e-4f), rest);
  p = multiply_add(broadcast(9.6184373585e-3f), p, rest);
  p = multiply_add(broadcast(5.5503324707e-2f), p, rest);
  p = multiply_add(broadcast(2.4022647914e-1f), p, rest);
  p = multiply_add(broadcast(6.9314720286e-1f), p, rest);
  p = multiply_add(broadcast(1.0f), p, rest);
#if defined(__AVX512F__)
  const __mmask16 is_large = _mm512_cmp_ps_mask(reinterpret_cast<__m512>(x), _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
  const auto power = reinterpret_cast<__m512>(rounded - magic);
  return reinterpret_cast<Floats>(_mm512_maskz_scalef_ps(is_large, reinterpret_cast<__m512>(p), power));
#else
  const Ints scaled = reinterpret_cast<Ints>(p) + (reinterpret_cast<Ints>(rounded) << 23);
  return x < -126.0f ? Floats{} : reinterpret_cast<Floats>(scaled);
#endif
}

}  // namespace jaxserve
