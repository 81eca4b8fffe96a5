// Rotates queries and keys, writes a step's keys and values into their pages, then attends: in place, over ragged
// segments of a flat token axis (decode rows are segments of one token), causal on absolute positions.
//
// A page of keys is kept dimension-major, [H, S], so that scores of neighbouring keys are neighbouring lanes;
// nothing else reads the pool. Online softmax (Milakov & Gimelshein, arXiv 1805.02867) over blocks of kBlockKeys
// keys counted from position 0: what a token gets does not depend on how its prompt was cut or who runs beside it.
//
// A pool of int8 has a scale for each number of each head: keys and values are divided by them, rounded to the nearest integer and
// limited as they are written; queries are multiplied by those of keys, and sums by those of values.
#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

constexpr int kTileQueries = kRegisters == 32 ? 6 : 2;
constexpr int kBlockVectors = 4;
constexpr int kBlockKeys = kBlockVectors * kLanes;
constexpr int kSegmentQueries = 48;  // queries, over the heads of one group, that share a pass over the keys
constexpr int64_t kWriteTokens = 16;  // tokens whose keys and values one task writes
constexpr float kMasked = -1e30f;
constexpr float kNothing = -1e29f;  // the maximum before any key: a masked score weighs nothing against it

struct Shape {
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, page_size, num_pages, table_width;
  int64_t page_numbers() const { return num_kv_heads * page_size * head_dim; }
  int64_t row_floats() const { return num_heads * head_dim; }
  int64_t group() const { return num_heads / num_kv_heads; }
};

// Number: float, or int8_t.
template <typename Number>
struct Pool {
  Number* keys;    // of one layer, [P, K, H, S]
  Number* values;  // of one layer, [P, K, S, H]
  const float* key_scales;    // [K, H], or null
  const float* value_scales;  // likewise
};

inline void put(float x, const float*, int64_t, float* to) { *to = x; }

// What is no number becomes 0.
inline void put(float x, const float* scales, int64_t i, int8_t* to) {
  const float scaled = x / scales[i];
  const float limited = scaled > 127.0f ? 127.0f : scaled < -128.0f ? -128.0f : scaled;
  *to = limited == limited ? static_cast<int8_t>(std::lrint(limited)) : 0;
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

// Up to kSegmentQueries queries of one row and one kv head, and their running softmax.
struct Segment {
  const float* queries;  // [queries, H], rotated and scaled
  int32_t position[kSegmentQueries];
  int32_t last[kSegmentQueries];  // key that a query sees: its own, or a later one
  float maximum[kSegmentQueries];
  Floats total[kSegmentQueries];  // by lane
  float* sums;           // [queries, H]
};

// Where the keys and values of one block are, kLanes of them each.
template <typename Number>
struct Block {
  int32_t begin;
  int32_t num_keys;  // that anybody may see
  const Number* keys[kBlockVectors];
  const Number* values[kBlockVectors];
};

// The keys that a query sees, its own included: the last `size`, or those from the last multiple of `size` on.
struct Window {
  int32_t size;
  bool is_chunked;

  int32_t keys(int32_t position) const { return is_chunked ? position % size + 1 : size; }
};

// Masks the keys after `last` and those up to `hidden`, both counted from the block's first.
inline void mask(Floats (&scores)[kBlockVectors], int32_t last, int32_t hidden) {
  Ints index;
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  for (int v = 0; v < kBlockVectors; ++v, index += kLanes) {
    scores[v] = (index <= last) & (index > hidden) ? scores[v] : broadcast(kMasked);
  }
}

// Lets what a query has so far count relative to a new maximum.
inline void rescale(const Shape& shape, Segment& segment, int query, float maximum) {
  const Floats decay = exponential(broadcast(segment.maximum[query] - maximum));
  segment.maximum[query] = maximum;
  segment.total[query] *= decay;
  float* sums = segment.sums + query * shape.head_dim;
  for (int64_t d = 0; d < shape.head_dim; d += kLanes) store(sums + d, load(sums + d) * decay);
}

// Scores of Queries queries; turns them into weights and folds them into the running softmax.
template <int Queries, typename Number>
void weigh(const Shape& shape, const Block<Number>& block, Segment& segment, int first, Window window,
           float (&weights)[kTileQueries][kBlockKeys]) {
  Floats scores[Queries][kBlockVectors] = {};
  const float* queries = segment.queries + first * shape.head_dim;
  for (int64_t d = 0; d < shape.head_dim; ++d) {
    Floats keys[kBlockVectors];
    for (int v = 0; v < kBlockVectors; ++v) keys[v] = in_register(load(block.keys[v] + d * shape.page_size));
    for (int q = 0; q < Queries; ++q) {
      Floats query = in_register(broadcast(queries[q * shape.head_dim + d]));
      for (int v = 0; v < kBlockVectors; ++v) scores[q][v] = multiply_add(scores[q][v], query, keys[v]);
    }
  }
  for (int q = 0; q < Queries; ++q) {
    const int32_t position = segment.position[first + q], last = segment.last[first + q];
    const int32_t hidden = position - window.keys(position);
    if (block.begin + kBlockKeys - 1 > last || block.begin <= hidden) {
      mask(scores[q], last - block.begin, hidden - block.begin);
    }
    Floats best = scores[q][0];
    for (int v = 1; v < kBlockVectors; ++v) best = best > scores[q][v] ? best : scores[q][v];
    if (any(best > segment.maximum[first + q])) rescale(shape, segment, first + q, maximum(best));
    for (int v = 0; v < kBlockVectors; ++v) {
      Floats weight = exponential(scores[q][v] - segment.maximum[first + q]);
      store(&weights[q][v * kLanes], weight);
      segment.total[first + q] += weight;
    }
  }
}

template <int Queries, int Vectors, typename Number>
void add_values(const Shape& shape, const Block<Number>& block, Segment& segment, int first, int64_t d,
                const float (&weights)[kTileQueries][kBlockKeys]) {
  Floats sums[Queries][Vectors];
  float* to = segment.sums + first * shape.head_dim + d;
  for (int q = 0; q < Queries; ++q) {
    for (int v = 0; v < Vectors; ++v) sums[q][v] = load(to + q * shape.head_dim + v * kLanes);
  }
  for (int key = 0; key < block.num_keys; ++key) {
    const Number* row = block.values[key / kLanes] + (key % kLanes) * shape.head_dim + d;
    Floats values[Vectors];
    for (int v = 0; v < Vectors; ++v) values[v] = in_register(load(row + v * kLanes));
    for (int q = 0; q < Queries; ++q) {
      Floats weight = in_register(broadcast(weights[q][key]));
      for (int v = 0; v < Vectors; ++v) sums[q][v] = multiply_add(sums[q][v], weight, values[v]);
    }
  }
  for (int q = 0; q < Queries; ++q) {
    for (int v = 0; v < Vectors; ++v) store(to + q * shape.head_dim + v * kLanes, sums[q][v]);
  }
}

template <int Queries, typename Number>
void fold(const Shape& shape, const Block<Number>& block, Segment& segment, int first, Window window) {
  float weights[kTileQueries][kBlockKeys];
  weigh<Queries>(shape, block, segment, first, window, weights);
  int64_t d = 0;
  for (; d + 4 * kLanes <= shape.head_dim; d += 4 * kLanes) {
    add_values<Queries, 4>(shape, block, segment, first, d, weights);
  }
  for (; d < shape.head_dim; d += kLanes) add_values<Queries, 1>(shape, block, segment, first, d, weights);
}

template <int Queries, typename Number>
void fold_rest(int count, const Shape& shape, const Block<Number>& block, Segment& segment, int first, Window window) {
  if constexpr (Queries > 0) {
    if (count == Queries) {
      fold<Queries>(shape, block, segment, first, window);
    } else {
      fold_rest<Queries - 1>(count, shape, block, segment, first, window);
    }
  }
}

template <typename Number>
Block<Number> block_at(const Shape& shape, const Pool<Number>& pool, const int32_t* table, int64_t head, int32_t begin, int32_t end) {
  Block<Number> block{begin, std::min(end - begin, kBlockKeys), {}, {}};
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
  const int count = static_cast<int>((task.end - task.begin) * group);
  std::vector<float> floats(2 * count * h, 0.0f);
  float* queries = floats.data() + count * h;
  Segment segment;
  segment.sums = floats.data();
  segment.queries = queries;
  const auto place = [&](int q) { return ((task.begin + q / group) * shape.num_heads + head * group + q % group) * h; };
  for (int q = 0; q < count; ++q) {
    rotation.apply(h, task.begin + q / group, query + place(q), scale, queries + q * h);
    for (int64_t d = 0; pool.key_scales != nullptr && d < h; ++d) queries[q * h + d] *= pool.key_scales[head * h + d];
    segment.position[q] = task.first_position + q / group;
    segment.last[q] = ends == nullptr ? segment.position[q] : ends[task.begin + q / group] - 1;
    segment.maximum[q] = sinks == nullptr ? kNothing : sinks[head * group + q % group];
    segment.total[q] = Floats{sinks == nullptr ? 0.0f : 1.0f};  // a sink is a key without a value
  }
  const int32_t end = *std::max_element(segment.last, segment.last + count) + 1;
  const int32_t lowest = std::max(0, task.first_position - window.keys(task.first_position) + 1);
  const int32_t* table = tables + task.row * shape.table_width;
  for (int32_t begin = lowest / kBlockKeys * kBlockKeys; begin < end; begin += kBlockKeys) {
    const Block<Number> block = block_at(shape, pool, table, head, begin, end);
    int first = 0;
    for (; first + kTileQueries <= count; first += kTileQueries) {
      fold<kTileQueries>(shape, block, segment, first, window);
    }
    fold_rest<kTileQueries - 1>(count - first, shape, block, segment, first, window);
  }
  for (int q = 0; q < count; ++q) {
    float* to = out + place(q);
    const float inverse = 1.0f / sum(segment.total[q]);
    for (int64_t d = 0; d < h; d += kLanes) {
      const Floats sums = load(segment.sums + q * h + d) * inverse;
      store(to + d, pool.value_scales == nullptr ? sums : sums * load(pool.value_scales + head * h + d));
    }
  }
}

std::vector<Task> cut(const Shape& shape, int64_t num_rows, const int32_t* starts, const int32_t* lengths) {
  const int32_t tokens = std::max<int32_t>(1, kSegmentQueries / shape.group());
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

// rest: for a pool of int8 the scales of keys and of values; then the end of the keys that each token sees, without which a token's own
// key is the last one that it sees.
template <ffi::DataType Type>
ffi::Error attention_handler(ffi::ThreadPool threads, Floats3 query, Floats3 key, Floats3 value, PoolBuffer<Type>,
                             PoolBuffer<Type>, ffi::BufferR0<ffi::S32> layer,
                             ffi::BufferR2<ffi::S32> tables, Ints1 lengths, Ints1 starts, Ints1 pages, Ints1 slots,
                             ffi::BufferR2<ffi::F32> cosines, ffi::BufferR2<ffi::F32> sines,
                             ffi::BufferR1<ffi::F32> sinks, ffi::RemainingArgs rest, ffi::ResultBufferR3<ffi::F32> out,
                             ffi::Result<PoolBuffer<Type>> keys, ffi::Result<PoolBuffer<Type>> values, float scale,
                             int32_t window, int32_t is_chunked) {
  using Number = ffi::NativeType<Type>;
  constexpr size_t kNumScales = Type == ffi::S8 ? 2 : 0;
  const auto scales = [&](size_t i) { return kNumScales ? rest.get<ffi::BufferR2<ffi::F32>>(i)->typed_data() : nullptr; };
  const int32_t* ends = rest.size() > kNumScales ? rest.get<Ints1>(kNumScales)->typed_data() : nullptr;
  const auto q = query.dimensions();
  const auto p = keys->dimensions();  // [L, P, K, S, H]
  const Shape shape{q[0], q[1], p[2], p[4], p[3], p[1], tables.dimensions()[1]};
  if (shape.head_dim % kLanes || shape.page_size % kLanes || shape.group() > kSegmentQueries) {
    return ffi::Error::InvalidArgument("attention: head dim and page size must be multiples of the lanes");
  }
  const int64_t offset = *layer.typed_data() * shape.num_pages * shape.page_numbers();
  const Pool<Number> pool{keys->typed_data() + offset, values->typed_data() + offset, scales(0), scales(1)};
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
      cut(shape, lengths.dimensions()[0], starts.typed_data(), lengths.typed_data()));
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_attention, jaxserve::attention_handler<xla::ffi::F32>,
                              jaxserve::binding<xla::ffi::F32>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_attention_int8, jaxserve::attention_handler<xla::ffi::S8>,
                              jaxserve::binding<xla::ffi::S8>());
