// Rotates queries and keys, writes a step's keys and values into their pages, then attends: in place, over ragged
// segments of a flat token axis (decode rows are segments of one token), causal on absolute positions.
//
// A page of keys is kept dimension-major, [H, S], so that scores of neighbouring keys are neighbouring lanes;
// nothing else reads the pool.
//
// A pool of 8-bit numbers (integers, or floats in e4m3) has a scale for each number of each head: keys and values are divided by
// them, limited and rounded to the nearest number as they are written; queries are multiplied by those of keys, and sums by those of values.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "segment.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

constexpr int kSegmentQueries = 96;   // at most, over the heads of one group: they share a pass over the keys
constexpr int kThreadTasks = 3;       // at least, unless their segments would be less than a tile
constexpr float kLog2E = 1.44269504088896341f;  // scores are exponents of 2
constexpr int64_t kWriteTokens = 16;  // tokens whose keys and values one task writes

struct Shape {
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, page_size, num_pages, table_width;
  int64_t page_numbers() const { return num_kv_heads * page_size * head_dim; }
  int64_t row_floats() const { return num_heads * head_dim; }
  int64_t group() const { return num_heads / num_kv_heads; }
};

// Number: float, int8_t or E4m3.
template <typename Number>
struct Pool {
  Number* keys;    // of one layer, [P, K, H, S]
  Number* values;  // of one layer, [P, K, S, H]
  const float* key_scales;    // [K, H], or null
  const float* value_scales;  // likewise
};

// What is no number becomes 0. Pages hold finite numbers only: keys that a window hides may be those of the null page, to which
// tokens of any request write, and their values are multiplied by zero.
inline float limited(float x, float least, float largest) { return x > largest ? largest : x < least ? least : x == x ? x : 0.0f; }

inline void put(float x, const float*, int64_t, float* to) { *to = limited(x, -FLT_MAX, FLT_MAX); }

inline void put(float x, const float* scales, int64_t i, int8_t* to) {
  *to = static_cast<int8_t>(std::lrint(limited(x / scales[i], -128.0f, 127.0f)));
}

// The bits of a single-precision number are rounded to a mantissa of three bits, to even if it lies between two. Numbers
// below the least exponent are multiples of 2^-9.
inline void put(float x, const float* scales, int64_t i, E4m3* to) {
  const float scaled = limited(x / scales[i], -448.0f, 448.0f);
  const float size = std::fabs(scaled);
  uint32_t bits, sign;
  std::memcpy(&sign, &scaled, sizeof(sign));
  std::memcpy(&bits, &size, sizeof(bits));
  const uint32_t rounded = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
  to->bits = (sign >> 31 << 7) | (size < 0x1p-6f ? static_cast<uint32_t>(std::lrint(size * 0x1p9f)) : rounded);
}

// Of every token, [T, H/2]; or null, which leaves vectors as they are.
struct Rotation {
  const float* cosines;
  const float* sines;

  void apply(int64_t h, int64_t token, const float* from, float scale, float* to) const {
    const int64_t half = h / 2;
    if (cosines == nullptr) {
      for (int64_t d = 0; d < h; ++d) to[d] = from[d] * scale;
      return;
    }
    const float *cosine = cosines + token * half, *sine = sines + token * half;
    for (int64_t d = 0; d < half; ++d) {
      const float first = from[d] * scale, second = from[half + d] * scale;
      to[d] = first * cosine[d] - second * sine[d];
      to[half + d] = second * cosine[d] + first * sine[d];
    }
  }
};

// Writes the keys and values of tokens [begin, end).
template <typename Number>
void write(const Shape& shape, const Pool<Number>& pool, const Rotation& rotation, const float* key, const float* value,
           const int32_t* pages, const int32_t* slots, int64_t begin, int64_t end) {
  const int64_t h = shape.head_dim, s = shape.page_size;
  std::vector<float> rotated(h);
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
      const int64_t page = pages[token] * shape.page_numbers() + head * s * h;
      const int64_t from = (token * shape.num_kv_heads + head) * h;
      rotation.apply(h, token, key + from, 1.0f, rotated.data());
      for (int64_t d = 0; d < h; ++d) {
        put(rotated[d], pool.key_scales, head * h + d, pool.keys + page + d * s + slots[token]);
      }
      Number* values = pool.values + page + slots[token] * h;
      for (int64_t d = 0; d < h; ++d) put(value[from + d], pool.value_scales, head * h + d, values + d);
    }
  }
}

// The keys that a query sees, its own included: the last `size`, or those from the last multiple of `size` on.
struct Window {
  int32_t size;
  bool is_chunked;

  int32_t keys(int32_t position) const { return is_chunked ? position % size + 1 : size; }
};

template <typename Number>
Block<Number> block_at(const Shape& shape, const Pool<Number>& pool, const int32_t* table, int64_t head, int32_t begin, int32_t end) {
  Block<Number> block{begin, shape.page_size, {}, {}};
  for (int v = 0; v < kBlockVectors; ++v) {
    const int64_t key = begin + v * kLanes;
    const int64_t page = key < end ? table[key / shape.page_size] : 0;  // the null page: masked, but there
    const int64_t start = page * shape.page_numbers() + head * shape.page_size * shape.head_dim;
    block.keys[v] = pool.keys + start + key % shape.page_size;
    block.values[v] = pool.values + start + key % shape.page_size * shape.head_dim;
  }
  return block;
}

// Tokens [begin, end) of one row, whose last token has `length` keys when `row_end` is where the row ends.
struct Task {
  int32_t row, begin, end, first_position;
};

template <typename Number>
void attend(const Shape& shape, const Pool<Number>& pool, const Rotation& rotation, const float* query, const int32_t* tables,
            const Task& task, int64_t head, const float* sinks, const int32_t* ends, float scale, Window window,
            float* out) {
  const int64_t group = shape.group(), h = shape.head_dim;
  const int64_t count = (task.end - task.begin) * group;
  thread_local Segment segment;
  segment.reset(count, h);
  const auto place = [&](int64_t q) { return ((task.begin + q / group) * shape.num_heads + head * group + q % group) * h; };
  int32_t end = 0;
  for (int64_t q = 0; q < count; ++q) {
    float* vector = &segment.vectors[q * h];
    rotation.apply(h, task.begin + q / group, query + place(q), scale * kLog2E, vector);
    for (int64_t d = 0; pool.key_scales != nullptr && d < h; ++d) vector[d] *= pool.key_scales[head * h + d];
    const int32_t position = task.first_position + q / group;
    const int32_t last = ends == nullptr ? position : ends[task.begin + q / group] - 1;
    const float maximum = sinks == nullptr ? kNothing : sinks[head * group + q % group] * kLog2E;
    const Floats total{sinks == nullptr ? 0.0f : 1.0f};  // a sink is a key without a value
    segment.queries[q] = {last, position - window.keys(position), maximum, total};
    end = std::max(end, last + 1);
  }
  const int32_t lowest = std::max(0, segment.queries[0].hidden + 1);
  const int32_t* table = tables + task.row * shape.table_width;
  int32_t begin = lowest / kBlockKeys * kBlockKeys;
  Block<Number> block = block_at(shape, pool, table, head, begin, end);
  for (; begin < end; begin += kBlockKeys) {
    const bool is_last = begin + kBlockKeys >= end;
    const Block<Number> next = is_last ? block : block_at(shape, pool, table, head, begin + kBlockKeys, end);
    fold_all(segment, block, is_last ? nullptr : &next);
    block = next;
  }
  for (int64_t q = 0; q < count; ++q) {
    float* to = out + place(q);
    const float inverse = 1.0f / sum(segment.queries[q].total);
    for (int64_t d = 0; d < h; d += kLanes) {
      const Floats sums = load(&segment.sums[q * h + d]) * inverse;
      store(to + d, pool.value_scales == nullptr ? sums : sums * load(pool.value_scales + head * h + d));
    }
  }
}

std::vector<Task> cut(const Shape& shape, int64_t num_rows, const int32_t* starts, const int32_t* lengths, int64_t threads) {
  const int64_t group = shape.group(), share = starts[num_rows] * shape.num_kv_heads / (kThreadTasks * threads);
  const int32_t tokens = std::clamp<int64_t>(share, std::max<int64_t>(1, kTileQueries / group), kSegmentQueries / group);
  std::vector<Task> tasks;
  for (int32_t row = 0; row < num_rows; ++row) {
    if (lengths[row] == 0) continue;  // padding, or a request that has ended
    for (int32_t begin = starts[row]; begin < starts[row + 1]; begin += tokens) {
      const int32_t end = std::min(begin + tokens, starts[row + 1]);
      tasks.push_back({row, begin, end, lengths[row] - (starts[row + 1] - begin)});
    }
  }
  return tasks;
}

using Floats3 = ffi::BufferR3<ffi::F32>;
using Ints1 = ffi::BufferR1<ffi::S32>;

template <ffi::DataType Type>
using PoolBuffer = ffi::Buffer<Type, 5>;

// Number: of the pool, whose elements have a type of the same size.
//
// rest: for a pool of 8-bit numbers the scales of keys and of values; then the end of the keys that each token sees, without which a token's own
// key is the last one that it sees.
template <ffi::DataType Type, typename Number>
ffi::Error attention_handler(ffi::ThreadPool threads, Floats3 query, Floats3 key, Floats3 value, PoolBuffer<Type>,
                             PoolBuffer<Type>, ffi::BufferR0<ffi::S32> layer,
                             ffi::BufferR2<ffi::S32> tables, Ints1 lengths, Ints1 starts, Ints1 pages, Ints1 slots,
                             ffi::BufferR2<ffi::F32> cosines, ffi::BufferR2<ffi::F32> sines,
                             ffi::BufferR1<ffi::F32> sinks, ffi::RemainingArgs rest, ffi::ResultBufferR3<ffi::F32> out,
                             ffi::Result<PoolBuffer<Type>> keys, ffi::Result<PoolBuffer<Type>> values, float scale,
                             int32_t window, int32_t is_chunked) {
  constexpr size_t kNumScales = std::is_same_v<Number, float> ? 0 : 2;
  const auto scales = [&](size_t i) { return kNumScales ? rest.get<ffi::BufferR2<ffi::F32>>(i)->typed_data() : nullptr; };
  const int32_t* ends = rest.size() > kNumScales ? rest.get<Ints1>(kNumScales)->typed_data() : nullptr;
  const auto q = query.dimensions();
  const auto p = keys->dimensions();  // [L, P, K, S, H]
  const Shape shape{q[0], q[1], p[2], p[4], p[3], p[1], tables.dimensions()[1]};
  if (shape.head_dim % kLanes || shape.page_size % kLanes || shape.group() > kSegmentQueries) {
    return ffi::Error::InvalidArgument("attention: head dim and page size must be multiples of the lanes");
  }
  const int64_t offset = *layer.typed_data() * shape.num_pages * shape.page_numbers();
  const auto numbers = [&](auto& pool) { return reinterpret_cast<Number*>(pool->untyped_data()) + offset; };
  const Pool<Number> pool{numbers(keys), numbers(values), scales(0), scales(1)};
  const bool rotates = cosines.dimensions()[0] > 0;
  const Rotation rotation{rotates ? cosines.typed_data() : nullptr, rotates ? sines.typed_data() : nullptr};
  float* to = out->typed_data();
  const float *new_keys = key.typed_data(), *new_values = value.typed_data();
  const int32_t *new_pages = pages.typed_data(), *new_slots = slots.typed_data();
  parallel_for(threads, (shape.num_tokens + kWriteTokens - 1) / kWriteTokens, [=](int64_t i) {
    const int64_t begin = i * kWriteTokens, end = std::min(begin + kWriteTokens, shape.num_tokens);
    std::fill(to + begin * shape.row_floats(), to + end * shape.row_floats(), 0.0f);  // what nobody attends stays so
    write(shape, pool, rotation, new_keys, new_values, new_pages, new_slots, begin, end);
  });
  const float* from = query.typed_data();
  const int32_t* table = tables.typed_data();
  const float* sink = sinks.dimensions()[0] > 0 ? sinks.typed_data() : nullptr;
  const auto tasks = std::make_shared<const std::vector<Task>>(
      cut(shape, lengths.dimensions()[0], starts.typed_data(), lengths.typed_data(), std::max<int64_t>(1, threads.num_threads())));
  const Window seen{window, is_chunked != 0};
  parallel_for(threads, tasks->size() * shape.num_kv_heads, [=](int64_t i) {
    const Task& task = (*tasks)[i / shape.num_kv_heads];
    attend(shape, pool, rotation, from, table, task, i % shape.num_kv_heads, sink, ends, scale, seen, to);
  });
  return ffi::Error::Success();
}

template <ffi::DataType Type>
auto binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Floats3>()
      .Arg<Floats3>()
      .Arg<Floats3>()
      .Arg<PoolBuffer<Type>>()
      .template Arg<PoolBuffer<Type>>()
      .template Arg<ffi::BufferR0<ffi::S32>>()
      .template Arg<ffi::BufferR2<ffi::S32>>()
      .template Arg<Ints1>()
      .template Arg<Ints1>()
      .template Arg<Ints1>()
      .template Arg<Ints1>()
      .template Arg<ffi::BufferR2<ffi::F32>>()
      .template Arg<ffi::BufferR2<ffi::F32>>()
      .template Arg<ffi::BufferR1<ffi::F32>>()
      .RemainingArgs()
      .template Ret<Floats3>()
      .template Ret<PoolBuffer<Type>>()
      .template Ret<PoolBuffer<Type>>()
      .template Attr<float>("scale")
      .template Attr<int32_t>("window")
      .template Attr<int32_t>("is_chunked");
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_attention, (jaxserve::attention_handler<xla::ffi::F32, float>),
                              jaxserve::binding<xla::ffi::F32>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_attention_int8, (jaxserve::attention_handler<xla::ffi::S8, int8_t>),
                              jaxserve::binding<xla::ffi::S8>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_attention_e4m3, (jaxserve::attention_handler<xla::ffi::U8, jaxserve::E4m3>),
                              jaxserve::binding<xla::ffi::U8>());
