// A square of floats becomes its columns.
#pragma once

#include "vector.h"

namespace jaxserve {

#if defined(__AVX512F__)
// 16 vectors become their columns.
inline void transpose(Floats (&rows)[kLanes]) {
  __m512i* r = reinterpret_cast<__m512i*>(rows);
  __m512i pairs[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < kLanes; i += 4) {  // r[i + c]: column c of each group of four, of rows i to i + 3
    for (int half = 0; half < 2; ++half) {
      r[i + 2 * half] = _mm512_unpacklo_epi64(pairs[i + half], pairs[i + 2 + half]);
      r[i + 2 * half + 1] = _mm512_unpackhi_epi64(pairs[i + half], pairs[i + 2 + half]);
    }
  }
  for (int c = 0; c < 4; ++c) {
    const __m512i even_low = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    pairs[c] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    pairs[4 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    pairs[8 + c] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    pairs[12 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
  for (int i = 0; i < kLanes; ++i) r[i] = pairs[i];
}
#elif defined(__aarch64__)
// 4 vectors become their columns.
inline void transpose(Floats (&rows)[kLanes]) {
  float32x4_t* r = reinterpret_cast<float32x4_t*>(rows);
  const auto low = vtrnq_f32(r[0], r[1]), high = vtrnq_f32(r[2], r[3]);  // columns 0 and 2 of each pair of rows, then 1 and 3
  r[0] = vcombine_f32(vget_low_f32(low.val[0]), vget_low_f32(high.val[0]));
  r[1] = vcombine_f32(vget_low_f32(low.val[1]), vget_low_f32(high.val[1]));
  r[2] = vcombine_f32(vget_high_f32(low.val[0]), vget_high_f32(high.val[0]));
  r[3] = vcombine_f32(vget_high_f32(low.val[1]), vget_high_f32(high.val[1]));
}
#else
// 8 vectors become their columns.
inline void transpose(Floats (&rows)[kLanes]) {
  __m256* r = reinterpret_cast<__m256*>(rows);
  __m256 pairs[kLanes], fours[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < kLanes; i += 4) {  // fours[i + c]: column c of each half, of rows i to i + 3
    for (int half = 0; half < 2; ++half) {
      fours[i + 2 * half] = _mm256_shuffle_ps(pairs[i + half], pairs[i + 2 + half], 0x44);
      fours[i + 2 * half + 1] = _mm256_shuffle_ps(pairs[i + half], pairs[i + 2 + half], 0xee);
    }
  }
  for (int c = 0; c < 4; ++c) {
    r[c] = _mm256_permute2f128_ps(fours[c], fours[4 + c], 0x20);
    r[4 + c] = _mm256_permute2f128_ps(fours[c], fours[4 + c], 0x31);
  }
}
#endif

}  // namespace jaxserve
