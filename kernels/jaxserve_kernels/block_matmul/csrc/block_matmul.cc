// y[M, N] = x[M, K] * w[E, N, K]^T of each row's expert, with w in the blocks of a GGUF file, 16 outputs beside each other.
// Several matrices in blocks of one type may share a call and its x.
// Rows are sorted by expert, `sizes` of each; a matrix without experts is that of one. Rows after these are padding: they
// become zeros and cost nothing.
//
// Lanes are outputs, so nothing is summed across lanes. Some rows of x pass by each group of 32 inputs while its codes
// are in registers: as floats, dequantised once for all of these rows, or as bytes that meet rows rounded to int8, 32
// inputs by a scale. Every sum has one order: over the inputs of a group, then over the groups. So a row has the same
// bits among any number of rows, and on every generation of processors.
#include <algorithm>
#include <cmath>
#include <vector>

#include "block_kinds.h"
#include "parallel.h"

namespace jaxserve {
namespace blocks {
namespace {

namespace ffi = xla::ffi;

constexpr int kTileRows = kRegisters == 32 ? 12 : 4;  // whose sums are in registers
constexpr int64_t kPartInputs = 512;              // of a tile that are dequantised at a time: 32 KiB
constexpr int64_t kFetchBytes = 4 << 10;          // ahead of their use, codes are fetched
constexpr int64_t kRoundRows = 16;                // rows one task rounds

// 32 inputs of a row, rounded.
struct Rounded {
  float scale;
  float sum;              // of the inputs, as they were rounded
  int32_t starts[2];      // of the dot products of each part: what codes are too large by
};

struct Call {
  const float* x;
  const int8_t* bytes;     // x in int8, or null
  const Rounded* rounded;  // [M, K / 32]
  const uint8_t* w;
  float* y;
  int64_t m, k, n;
};

inline __attribute__((always_inline)) void fetch(const uint8_t* codes, int bytes) {
  for (int at = 0; at < bytes; at += 64) __builtin_prefetch(codes + kFetchBytes + at, 0, 3);
}

template <typename Kind, int Rows>
inline __attribute__((always_inline)) void float_group(const float* x, int64_t k, const uint8_t* codes,
                                                       const Scales<Kind::kParts>& scales, Floats (&sums)[Rows]) {
#pragma GCC unroll 8
  for (int step = 0; step < kSteps; ++step) {
    const Floats d = scales.d[step * Kind::kParts / kSteps];
    const Floats added = Kind::kHasMinimum ? scales.added : d * float(-Kind::kZero);
    const Words four = codes_of<Kind::kBits>(codes, step);
#pragma GCC unroll 4
    for (int byte = 0; byte < 4; ++byte) {
      const Floats weights = multiply_add(added, d, code_of(four, byte));
      for (int r = 0; r < Rows; ++r) sums[r] = multiply_add(sums[r], broadcast(x[r * k + 4 * step + byte]), weights);
    }
  }
}

template <typename Kind, int Rows>
void float_tile(const Call& call, int64_t row, int64_t tile, int half) {
  const int64_t blocks = call.k / Kind::kInputs;
  const uint8_t* block = call.w + tile * blocks * Kind::kBytes;
  const float* x = call.x + row * call.k;
  Floats totals[Rows] = {};
  for (int64_t b = 0; b < blocks; ++b, block += Kind::kBytes) {
    for (int group = 0; group < Kind::kInputs / kGroup; ++group, x += kGroup) {
      const uint8_t* codes = block + group * Kind::kCodeBytes;
      fetch(codes, Kind::kCodeBytes);
      Floats sums[Rows] = {};
      float_group<Kind, Rows>(x, call.k, codes + half * 4 * kLanes, Kind::scales(block, group, half), sums);
      for (int r = 0; r < Rows; ++r) totals[r] += sums[r];
    }
  }
  for (int r = 0; r < Rows; ++r) store(call.y + (row + r) * call.n + tile * kTileOutputs + half * kLanes, totals[r]);
}

// The weights of some blocks of a tile, one vector for each input, as `float_group` multiplies with them.
template <typename Kind>
void dequantise(const uint8_t* block, int64_t blocks, int half, Floats* to) {
  for (int64_t b = 0; b < blocks; ++b, block += Kind::kBytes) {
    for (int group = 0; group < Kind::kInputs / kGroup; ++group, to += kGroup) {
      const uint8_t* codes = block + group * Kind::kCodeBytes;
      fetch(codes, Kind::kCodeBytes);
      const Scales<Kind::kParts> scales = Kind::scales(block, group, half);
#pragma GCC unroll 8
      for (int step = 0; step < kSteps; ++step) {
        const Floats d = scales.d[step * Kind::kParts / kSteps];
        const Floats added = Kind::kHasMinimum ? scales.added : d * float(-Kind::kZero);
        const Words four = codes_of<Kind::kBits>(codes + half * 4 * kLanes, step);
#pragma GCC unroll 4
        for (int byte = 0; byte < 4; ++byte) to[4 * step + byte] = multiply_add(added, d, code_of(four, byte));
      }
    }
  }
}

// Adds the products with `inputs` dequantised weights to the results, which are zeros at the first of a row's inputs.
template <int Rows>
void dequantised_tile(const float* x, int64_t k, const Floats* weights, int64_t inputs, float* y, int64_t n,
                      bool is_first) {
  Floats totals[Rows] = {};
  if (!is_first) {
    for (int r = 0; r < Rows; ++r) totals[r] = load(y + r * n);
  }
  for (int64_t start = 0; start < inputs; start += kGroup, x += kGroup, weights += kGroup) {
    Floats sums[Rows] = {};
#pragma GCC unroll 4
    for (int i = 0; i < kGroup; ++i) {
      const Floats each = weights[i];
      for (int r = 0; r < Rows; ++r) sums[r] = multiply_add(sums[r], broadcast(x[r * k + i]), each);
    }
    for (int r = 0; r < Rows; ++r) totals[r] += sums[r];
  }
  for (int r = 0; r < Rows; ++r) store(y + r * n, totals[r]);
}

template <int Rows>
void last_dequantised(int64_t rows, const float* x, int64_t k, const Floats* weights, int64_t inputs, float* y,
                      int64_t n, bool is_first) {
  if constexpr (Rows > 0) {
    if (rows == Rows) {
      dequantised_tile<Rows>(x, k, weights, inputs, y, n, is_first);
    } else {
      last_dequantised<Rows - 1>(rows, x, k, weights, inputs, y, n, is_first);
    }
  }
}

// Many rows: parts of a tile are dequantised once, and meet all rows. Every sum has the order that `float_tile` has.
template <typename Kind>
void many_rows(const Call& call, int64_t tile) {
  constexpr int64_t kPartBlocks = std::max<int64_t>(1, kPartInputs / Kind::kInputs);
  alignas(64) Floats weights[kPartBlocks * Kind::kInputs];
  const int64_t blocks = call.k / Kind::kInputs;
  const uint8_t* first = call.w + tile * blocks * Kind::kBytes;
  for (int half = 0; half < kHalves; ++half) {
    for (int64_t b = 0; b < blocks; b += kPartBlocks) {
      const int64_t count = std::min(kPartBlocks, blocks - b), inputs = count * Kind::kInputs;
      dequantise<Kind>(first + b * Kind::kBytes, count, half, weights);
      const float* x = call.x + b * Kind::kInputs;
      float* y = call.y + tile * kTileOutputs + half * kLanes;
      int64_t row = 0;
      for (; row + kTileRows <= call.m; row += kTileRows) {
        dequantised_tile<kTileRows>(x + row * call.k, call.k, weights, inputs, y + row * call.n, call.n, b == 0);
      }
      last_dequantised<kTileRows - 1>(call.m - row, x + row * call.k, call.k, weights, inputs, y + row * call.n,
                                      call.n, b == 0);
    }
  }
}

template <typename Kind, int Rows>
void byte_tile(const Call& call, int64_t row, int64_t tile, int half) {
  const int64_t blocks = call.k / Kind::kInputs, groups = call.k / kGroup;
  const uint8_t* block = call.w + tile * blocks * Kind::kBytes;
  const int8_t* x = call.bytes + row * call.k;
  const Rounded* rounded = call.rounded + row * groups;
  Floats totals[Rows] = {};
  for (int64_t b = 0; b < blocks; ++b, block += Kind::kBytes) {
    for (int group = 0; group < Kind::kInputs / kGroup; ++group, x += kGroup, ++rounded) {
      const uint8_t* codes = block + group * Kind::kCodeBytes + half * 4 * kLanes;
      fetch(codes, Kind::kCodeBytes);
      const Scales<Kind::kParts> scales = Kind::scales(block, group, half);
#pragma GCC unroll 2
      for (int part = 0; part < Kind::kParts; ++part) {
        Ints sums[Rows] = {};
        if constexpr (kByteZero<Kind> != 0) {
          for (int r = 0; r < Rows; ++r) sums[r] = rounded[r * groups].starts[part] - Ints{};
        }
        constexpr int kPartSteps = kSteps / Kind::kParts;
        add_steps<Kind::kBits, kPartSteps>(sums, codes, part * kPartSteps, x, call.k);
        for (int r = 0; r < Rows; ++r) {
          const Floats d = scales.d[part] * broadcast(rounded[r * groups].scale);
          totals[r] = multiply_add(totals[r], d, __builtin_convertvector(sums[r], Floats));
        }
      }
      if constexpr (Kind::kHasMinimum) {
        for (int r = 0; r < Rows; ++r) {
          totals[r] = multiply_add(totals[r], scales.added, broadcast(rounded[r * groups].sum));
        }
      }
    }
  }
  for (int r = 0; r < Rows; ++r) store(call.y + (row + r) * call.n + tile * kTileOutputs + half * kLanes, totals[r]);
}

template <typename Kind, bool IsRounded, int Rows>
void rows_of_tile(const Call& call, int64_t row, int64_t tile) {
  for (int half = 0; half < kHalves; ++half) {
    if constexpr (IsRounded) {
      byte_tile<Kind, Rows>(call, row, tile, half);
    } else {
      float_tile<Kind, Rows>(call, row, tile, half);
    }
  }
}

// The last rows: between 1 and kTileRows - 1.
template <typename Kind, bool IsRounded, int Rows>
void last_rows(const Call& call, int64_t row, int64_t tile) {
  if constexpr (Rows > 0) {
    if (call.m - row == Rows) {
      rows_of_tile<Kind, IsRounded, Rows>(call, row, tile);
    } else {
      last_rows<Kind, IsRounded, Rows - 1>(call, row, tile);
    }
  }
}

template <typename Kind, bool IsRounded>
void tiles_between(const Call& call, int64_t begin, int64_t end) {
  for (int64_t tile = begin; tile < end; ++tile) {
    if constexpr (!IsRounded) {
      if (call.m > kTileRows) {
        many_rows<Kind>(call, tile);
        continue;
      }
    }
    int64_t row = 0;
    for (; row + kTileRows <= call.m; row += kTileRows) rows_of_tile<Kind, IsRounded, kTileRows>(call, row, tile);
    last_rows<Kind, IsRounded, kTileRows - 1>(call, row, tile);
  }
}

// Rounds 32 inputs to int8 by the largest of them, to even.
Rounded round_group(const float* x, int8_t* to, int zero, int parts) {
  float largest = 1e-30f;
  for (int i = 0; i < kGroup; ++i) largest = std::max(largest, std::fabs(x[i]));
  Rounded found = {largest / 127, 0, {0, 0}};
  int32_t sums[2] = {0, 0};
  for (int i = 0; i < kGroup; ++i) {
    const float nearest = std::nearbyint(x[i] / found.scale);
    to[i] = static_cast<int8_t>(nearest);
    sums[i * 2 / kGroup] += to[i];
  }
  found.sum = found.scale * static_cast<float>(sums[0] + sums[1]);
  for (int part = 0; part < 2; ++part) found.starts[part] = -zero * (parts == 2 ? sums[part] : sums[0] + sums[1]);
  return found;
}

// Rows that are multiplied with one matrix.
struct Group {
  int64_t expert, start, rows;

  template <typename Kind>
  Call of(Call all) const {
    all.m = rows;
    all.x += start * all.k;
    all.y += start * all.n;
    all.w += expert * (all.n / kTileOutputs) * (all.k / Kind::kInputs) * Kind::kBytes;
    if (all.bytes) {
      all.bytes += start * all.k;
      all.rounded += start * (all.k / kGroup);
    }
    return all;
  }
};

using Groups = std::vector<Group>;
using Calls = std::vector<Call>;  // of the same rows, with a matrix and results each

template <typename Kind, bool IsRounded>
void multiply_groups(ffi::ThreadPool& pool, const Calls& calls, const Groups& groups) {
  const int64_t threads = std::max<int64_t>(1, pool.num_threads()), count = groups.size();
  int64_t tiles = 0;
  for (const Call& call : calls) tiles += call.n / kTileOutputs;
  const Split split(tiles, count > 1 ? 4 * threads / count + 1 : threads, 1);
  const int64_t parts = split.count();
  parallel_for(pool, count * parts, [=, groups = groups.data(), call = calls.data(), num = calls.size()](int64_t task) {
    int64_t begin = split.begin(task % parts), end = split.begin(task % parts + 1);
    for (size_t i = 0; i < num && end > 0; ++i) {
      const int64_t own = call[i].n / kTileOutputs, first = std::max<int64_t>(begin, 0), last = std::min(end, own);
      if (first < last) tiles_between<Kind, IsRounded>(groups[task / parts].of<Kind>(call[i]), first, last);
      begin -= own;
      end -= own;
    }
  });
}

template <typename Kind>
void multiply_rounded(ffi::ThreadPool& pool, Calls calls, const Groups& groups) {
  const Call call = calls.front();
  const int64_t count = call.k / kGroup;
  std::vector<int8_t> bytes(call.m * call.k);
  std::vector<Rounded> rounded(call.m * count);
  parallel_for(pool, (call.m + kRoundRows - 1) / kRoundRows, [=, to = bytes.data(), info = rounded.data()](int64_t i) {
    const int64_t end = std::min((i + 1) * kRoundRows, call.m) * count;
    for (int64_t group = i * kRoundRows * count; group < end; ++group) {
      info[group] = round_group(call.x + group * kGroup, to + group * kGroup, kByteZero<Kind>, Kind::kParts);
    }
  });
  for (Call& each : calls) {
    each.bytes = bytes.data();
    each.rounded = rounded.data();
  }
  multiply_groups<Kind, true>(pool, calls, groups);
}

// `blocks`, `bytes`: blocks of an output and bytes of a block, of all matrices.
template <typename Kind>
ffi::Error multiply(ffi::ThreadPool& pool, const Calls& calls, int64_t blocks, int64_t bytes, const Groups& groups,
                    bool is_rounded) {
  if (bytes != Kind::kBytes || blocks * Kind::kInputs != calls.front().k) {
    return ffi::Error::InvalidArgument("block matmul: shapes that do not go together");
  }
  if (is_rounded) {
    multiply_rounded<Kind>(pool, calls, groups);
  } else {
    multiply_groups<Kind, false>(pool, calls, groups);
  }
  return ffi::Error::Success();
}

ffi::Error block_matmul_handler(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::BufferR1<ffi::S32> sizes,
                                ffi::RemainingArgs ws, ffi::RemainingRets ys, int64_t kind, bool is_rounded) {
  const int64_t all = x.dimensions()[0], k = x.dimensions()[1], num_experts = sizes.dimensions()[0];
  Groups groups;
  int64_t m = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const int64_t rows = std::clamp<int64_t>(sizes.typed_data()[expert], 0, all - m);
    if (rows) groups.push_back({expert, m, rows});
    m += rows;
  }
  if (ws.size() == 0 || ws.size() != ys.size()) {
    return ffi::Error::InvalidArgument("block matmul: tiles are missing");
  }
  Calls calls;
  int64_t blocks = 0, bytes = 0;
  for (size_t i = 0; i < ws.size(); ++i) {
    const auto found_w = ws.get<ffi::BufferR4<ffi::U8>>(i);
    const auto found_y = ys.get<ffi::BufferR2<ffi::F32>>(i);
    if (found_w.has_error()) return found_w.error();
    if (found_y.has_error()) return found_y.error();
    const auto w = *found_w;
    auto y = *found_y;
    const auto shape = w.dimensions();
    const int64_t n = y->dimensions()[1];
    if (n != shape[1] * kTileOutputs || shape[0] != num_experts || (i && (shape[2] != blocks || shape[3] != bytes))) {
      return ffi::Error::InvalidArgument("block matmul: outputs, experts or blocks that are not those of the tiles");
    }
    blocks = shape[2];
    bytes = shape[3];
    std::fill_n(y->typed_data() + m * n, (all - m) * n, 0.0f);
    calls.push_back({x.typed_data(), nullptr, nullptr, w.typed_data(), y->typed_data(), m, k, n});
  }
  switch (kind) {  // BlockKind.index
    case 0: return multiply<OneLevel<4, 8>>(pool, calls, blocks, bytes, groups, is_rounded);
    case 1: return multiply<OneLevel<4, 0>>(pool, calls, blocks, bytes, groups, is_rounded);
    case 2: return multiply<OneLevel<5, 16>>(pool, calls, blocks, bytes, groups, is_rounded);
    case 3: return multiply<OneLevel<5, 0>>(pool, calls, blocks, bytes, groups, is_rounded);
    case 4: return multiply<OneLevel<8, 128>>(pool, calls, blocks, bytes, groups, is_rounded);
    case 5: return multiply<TwoLevels<4>>(pool, calls, blocks, bytes, groups, is_rounded);
    case 6: return multiply<TwoLevels<5>>(pool, calls, blocks, bytes, groups, is_rounded);
    case 7: return multiply<Q6K>(pool, calls, blocks, bytes, groups, is_rounded);
    default: return ffi::Error::InvalidArgument("block matmul: no such block type");
  }
}

}  // namespace
}  // namespace blocks
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_block_matmul, jaxserve::blocks::block_matmul_handler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("kind")
                                  .Attr<bool>("dynamic"));
