// y[R, N] = x[R, K] * w[E, N, K]^T of each row's expert, with w in e2m1: MXFP4, and NVFP4 (mxfp4.py and nvfp4.py describe the
// arrays). Rows after those of all experts are padding: they become zeros and cost nothing.
//
// The weights of a few outputs are dequantised into a buffer that stays in a cache, and multiplied there as float32 weights
// are. So a result has the bits that the dequantised weights give, and a row has the same bits among any number of rows.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "outputs.h"

namespace jaxserve {
namespace float4 {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kLeastBlock = 8;  // inputs that share a scale

struct Weights {
  const uint8_t* numbers;  // [E, N, K / 2]
  const uint8_t* blocks;   // [E, G, N], the bits of scales
  const float* matrix;     // [E, 2, N]: factors and divisors of e4m3 scales, or null: the scales are e8m0
  int64_t k, n, groups;
};

// The float of each e4m3fn scale.
std::array<float, 256> e4m3_table() {
  std::array<float, 256> table{};
  for (int bits = 0; bits < 256; ++bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
    if (exponent == 15 && mantissa == 7) size = std::numeric_limits<float>::quiet_NaN();
    table[bits] = bits & 128 ? -size : size;
  }
  return table;
}

inline float e8m0(uint8_t exponent) {
  const uint32_t bits = exponent == 0 ? 0x00400000u : exponent == 255 ? 0x7fc00000u : uint32_t{exponent} << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof(scale));
  return scale;
}

#if defined(__aarch64__)
// Eight numbers times a scale. A number's bits choose the two bytes of its bfloat16.
inline __attribute__((always_inline)) void dequantise_eight(const uint8_t* p, float scale, float* to) {
  constexpr uint8_t kUpper[16] = {0, 63, 63, 63, 64, 64, 64, 64, 128, 191, 191, 191, 192, 192, 192, 192};
  constexpr uint8_t kLower[16] = {0, 0, 128, 192, 0, 64, 128, 192, 0, 0, 128, 192, 0, 64, 128, 192};
  const uint8x8_t pairs = vreinterpret_u8_u32(vld1_dup_u32(reinterpret_cast<const FourBytes*>(p)));
  const uint8x8_t bits = vzip1_u8(vand_u8(pairs, vdup_n_u8(15)), vshr_n_u8(pairs, 4));
  const uint8x8_t lower = vqtbl1_u8(vld1q_u8(kLower), bits), upper = vqtbl1_u8(vld1q_u8(kUpper), bits);
  const uint16x4_t first = vreinterpret_u16_u8(vzip1_u8(lower, upper));
  const uint16x4_t second = vreinterpret_u16_u8(vzip2_u8(lower, upper));
  vst1q_f32(to, vmulq_n_f32(vreinterpretq_f32_u32(vshll_n_u16(first, 16)), scale));
  vst1q_f32(to + 4, vmulq_n_f32(vreinterpretq_f32_u32(vshll_n_u16(second, 16)), scale));
}
#else
// The bytes of eight numbers' bits, from four bytes that have two each, the first in the low half.
inline __attribute__((always_inline)) __m128i unpacked(const uint8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof(four));
  const __m128i pairs = _mm_cvtsi32_si128(four), low = _mm_set1_epi8(15);
  return _mm_unpacklo_epi8(_mm_and_si128(pairs, low), _mm_and_si128(_mm_srli_epi16(pairs, 4), low));
}

// Eight numbers times a scale. The last three bits choose the size, the first one is the sign.
inline __attribute__((always_inline)) void dequantise_eight(const uint8_t* p, float scale, float* to) {
  const __m256 sizes = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
  const __m256i bits = _mm256_cvtepu8_epi32(unpacked(p));
  const __m256i signs = _mm256_slli_epi32(_mm256_srli_epi32(bits, 3), 31);
  const __m256 numbers = _mm256_xor_ps(_mm256_permutevar8x32_ps(sizes, bits), _mm256_castsi256_ps(signs));
  _mm256_storeu_ps(to, _mm256_mul_ps(numbers, _mm256_set1_ps(scale)));
}
#endif

// The weights [count, K] of some outputs of an expert.
void dequantise(const Weights& w, int64_t expert, int64_t out, int count, float* to) {
  static const std::array<float, 256> e4m3 = e4m3_table();
  const int64_t size = w.k / w.groups;
  for (int o = 0; o < count; ++o) {
    const int64_t row = expert * w.n + out + o;
    const uint8_t* numbers = w.numbers + row * w.k / 2;
    const uint8_t* blocks = w.blocks + expert * w.groups * w.n + out + o;
    const float* matrix = w.matrix ? w.matrix + expert * 2 * w.n + out + o : nullptr;
    for (int64_t group = 0; group < w.groups; ++group) {
      const uint8_t bits = blocks[group * w.n];
      const float scale = matrix ? e4m3[bits] * matrix[0] / matrix[w.n] : e8m0(bits);
      for (int64_t i = 0; i < size; i += kLeastBlock, numbers += kLeastBlock / 2, to += kLeastBlock) {
        dequantise_eight(numbers, scale, to);
      }
    }
  }
}

template <int Outputs>
void multiply_some(const Weights& w, const Product<Float32>& rows, int64_t expert, int64_t out, float* buffer) {
  dequantise(w, expert, out, Outputs, buffer);
  Product<Float32> own = rows;
  own.w = buffer;
  own.y += out;
  int64_t row = 0;
  for (; row + kTileRows <= own.m; row += kTileRows) tile<Float32, kTileRows, Outputs, 0>(own, row, 0, 0);
  last_rows<Float32, kTileRows - 1, Outputs, 0>(own, own.m - row, row, 0, 0);
}

void multiply_group(const Weights& w, const Product<Float32>& rows, int64_t expert, int64_t begin, int64_t end) {
  std::vector<float> buffer(kTileOutputs * w.k);
  int64_t out = begin;
  for (; out + kTileOutputs <= end; out += kTileOutputs) {
    multiply_some<kTileOutputs>(w, rows, expert, out, buffer.data());
  }
  for (; out < end; ++out) multiply_some<1>(w, rows, expert, out, buffer.data());
}

ffi::Error handler(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::BufferR3<ffi::U8> numbers,
                   ffi::BufferR1<ffi::S32> sizes, ffi::AnyBuffer blocks, ffi::RemainingArgs rest,
                   ffi::ResultBufferR2<ffi::F32> y) {
  const auto shape = numbers.dimensions(), scales = blocks.dimensions();
  const int64_t num_rows = x.dimensions()[0], k = x.dimensions()[1], experts = shape[0], n = shape[1];
  const float* matrix = rest.size() == 1 ? rest.get<ffi::BufferR3<ffi::F32>>(0)->typed_data() : nullptr;
  if (blocks.element_type() != (matrix ? ffi::F8E4M3FN : ffi::U8)) {
    return ffi::Error::InvalidArgument("float4 matmul: scales of another type");
  }
  if (scales.size() != 3 || 2 * shape[2] != k || k % kLanes || scales[0] != experts || scales[2] != n || scales[1] == 0 ||
      k % (kLeastBlock * scales[1]) || sizes.dimensions()[0] != experts) {
    return ffi::Error::InvalidArgument("float4 matmul: shapes that do not go together");
  }
  const Weights w{numbers.typed_data(), static_cast<const uint8_t*>(blocks.untyped_data()), matrix, k, n, scales[1]};
  std::vector<Group> groups;
  int64_t m = 0;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int64_t rows = std::clamp<int64_t>(sizes.typed_data()[expert], 0, num_rows - m);
    if (rows) groups.push_back({expert, m, rows});
    m += rows;
  }
  std::fill_n(y->typed_data() + m * n, (num_rows - m) * n, 0.0f);
  const int64_t threads = std::max<int64_t>(1, pool.num_threads()), count = groups.size();
  const int64_t per_group = std::max<int64_t>(1, 4 * threads / std::max<int64_t>(1, count));
  const int64_t size = (n / per_group / kTaskOutputs + 1) * kTaskOutputs, tasks = (n + size - 1) / size;
  const Product<Float32> all{x.typed_data(), nullptr, y->typed_data(), m, k, n, nullptr, nullptr, false};
  parallel_for(pool, count * tasks, [=, groups = groups.data()](int64_t task) {
    const Group group = groups[task / tasks];
    Product<Float32> rows = all;
    rows.m = group.rows;
    rows.x += group.start * k;
    rows.y += group.start * n;
    const int64_t begin = task % tasks * size;
    multiply_group(w, rows, group.expert, begin, std::min(begin + size, n));
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace float4
}  // namespace jaxserve

// The rest: factors and divisors of the matrices, of NVFP4.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_float4_matmul, jaxserve::float4::handler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR3<xla::ffi::U8>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::BufferR2<xla::ffi::F32>>());
