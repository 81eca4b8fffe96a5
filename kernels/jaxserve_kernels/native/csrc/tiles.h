// A processor's matrix unit (AMX): eight registers of 16 rows x 64 bytes, and products of them.
#pragma once

#include "vector.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512VNNI__) && defined(__linux__)
#define JAXSERVE_TILES 1

#include <sys/syscall.h>
#include <unistd.h>

namespace jaxserve {
namespace tiles {

constexpr int kSide = 16;     // rows of a tile; also its columns of 4 bytes
constexpr int kBytes = 1024;  // of a tile

// Whether the system lets this process use them: it keeps their state for those that have asked.
inline bool allowed() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool is_allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_allowed;
}

// While it lives, this thread has eight whole tiles.
class Configured {
 public:
  Configured() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } whole;
    asm volatile("ldtilecfg %0" ::"m"(whole));
  }
  ~Configured() { asm volatile("tilerelease"); }
  Configured(const Configured&) = delete;
};

template <int Tile>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

template <int Tile>
inline void load(const void* rows) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(int64_t{64}), "i"(Tile) : "memory");
}

template <int Tile>
inline void store(void* rows) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(int64_t{64}), "i"(Tile) : "memory");
}

// sums[i][j] += left[i][2l] * right[l][2j] + left[i][2l + 1] * right[l][2j + 1], over l: bfloat16 to float32.
template <int Sums, int Left, int Right>
inline void add_bfloat16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Left), "i"(Right));
}

// The same of four neighbours in int8, to int32.
template <int Sums, int Left, int Right>
inline void add_int8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Left), "i"(Right));
}

// 16 rows of 16 columns of 4 bytes become columns.
inline void transpose(__m512i (&rows)[kSide]) {
  __m512i pairs[kSide];
  for (int i = 0; i < kSide; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < kSide; i += 4) {  // rows[i + c]: column c of each group of four, of rows i to i + 3
    for (int half = 0; half < 2; ++half) {
      rows[i + 2 * half] = _mm512_unpacklo_epi64(pairs[i + half], pairs[i + 2 + half]);
      rows[i + 2 * half + 1] = _mm512_unpackhi_epi64(pairs[i + half], pairs[i + 2 + half]);
    }
  }
  for (int c = 0; c < 4; ++c) {
    const __m512i even_low = _mm512_shuffle_i32x4(rows[c], rows[4 + c], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(rows[c], rows[4 + c], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(rows[8 + c], rows[12 + c], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(rows[8 + c], rows[12 + c], 0xdd);
    pairs[c] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    pairs[4 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    pairs[8 + c] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    pairs[12 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
  for (int i = 0; i < kSide; ++i) rows[i] = pairs[i];
}

// Transposes the first 64 bytes of up to 16 rows, `stride` numbers apart. Others are zeros.
template <typename Number>
inline __attribute__((always_inline)) void turn(const Number* p, int64_t rows, int64_t stride, __m512i (&lines)[kSide]) {
  if (rows == kSide) {  // then they are in registers
    for (int r = 0; r < kSide; ++r) lines[r] = _mm512_loadu_si512(p + r * stride);
  } else {
    for (int r = 0; r < kSide; ++r) lines[r] = r < rows ? _mm512_loadu_si512(p + r * stride) : __m512i{};
  }
  transpose(lines);
}

}  // namespace tiles
}  // namespace jaxserve
#else
namespace jaxserve {
namespace tiles {

inline bool allowed() { return false; }

}  // namespace tiles
}  // namespace jaxserve
#endif
