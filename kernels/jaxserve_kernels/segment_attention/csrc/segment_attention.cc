// Attention of every token to the tokens of its own segment of a flat axis, in both directions: softmax(q k * scale + bias) v. A window
// leaves out those that are as many tokens away or more.
//
// Queries are those of some neighbouring tokens, perhaps of all. A task has some of one head of one segment, and packs the segment's keys and values for itself, in blocks as segment.h has
// them. Blocks are counted from the segment's first key: what a token gets does not depend on where its segment lies.
#include <algorithm>
#include <memory>
#include <vector>

#include "parallel.h"
#include "segment.h"
#include "thread_memory.h"
#include "transpose.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kGroupQueries = 96;  // queries that share a pass over the keys
constexpr float kLog2E = 1.44269504088896341f;  // scores are exponents of 2

// Keys and values are [T, N, H]; queries and outputs are [Q, N, H], those of token `first` first.
struct Heads {
  const float *query, *key, *value;
  float* out;
  int64_t first;
  int64_t num_heads, dim;
  float scale;
  int32_t window;     // a query sees the keys that are fewer tokens away
  const float* bias;  // [N, 2 * reach + 1], by distance of the key after its query, or null
  int64_t reach;

  int64_t stride() const { return num_heads * dim; }                        // from a token to the next
  int64_t width() const { return (dim + kLanes - 1) / kLanes * kLanes; }    // of a packed head
  int64_t block() const { return 2 * kBlockKeys * width(); }                // floats of a block: its keys, then its values
};

// Tokens of one segment.
struct Range {
  int64_t begin, end;
};

// The up to kLanes floats from `p` on, and zeros.
inline Floats load_first(const float* p, int64_t count) {
  if (count >= kLanes) return load(p);
  float whole[kLanes] = {};
  std::copy_n(p, std::max<int64_t>(count, 0), whole);
  return load(whole);
}

// Packs a block: keys [width, kBlockKeys], values [kBlockKeys, width]. Keys after the segment's last one, and numbers after those of
// a head, are zeros.
void pack_block(const Heads& heads, int64_t head, int64_t begin, int64_t end, float* to) {
  const int64_t stride = heads.stride(), width = heads.width(), from = begin * stride + head * heads.dim;
  for (int64_t d = 0; d < width; d += kLanes) {
    for (int64_t first = 0; first < kBlockKeys; first += kLanes) {
      Floats columns[kLanes] = {};
      for (int64_t i = 0; i < std::min<int64_t>(kLanes, end - begin - first); ++i) {
        columns[i] = load_first(heads.key + from + (first + i) * stride + d, heads.dim - d);
      }
      transpose(columns);
      for (int64_t i = 0; i < kLanes; ++i) store(to + (d + i) * kBlockKeys + first, columns[i]);
    }
  }
  to += kBlockKeys * width;
  for (int64_t i = 0; i < kBlockKeys; ++i, to += width) {
    for (int64_t d = 0; d < width; d += kLanes) {
      store(to + d, begin + i < end ? load_first(heads.value + from + i * stride + d, heads.dim - d) : Floats{});
    }
  }
}

// The keys of a segment that some of its queries see, from the first one of a block on.
struct Keys {
  int64_t length;       // tokens of the segment
  int64_t begin, end;   // counted from the segment's first token
  const float* packed;  // blocks
  const float* biases;  // of the keys at each distance from 1 - length on, as exponents of 2; or null

  Block<float> block_at(const Heads& heads, int64_t key) const {
    Block<float> block{static_cast<int32_t>(key), kBlockKeys, {}, {}};
    const float* keys = packed + (key - begin) / kBlockKeys * heads.block();
    const float* values = keys + kBlockKeys * heads.width();
    for (int v = 0; v < kBlockVectors; ++v) {
      block.keys[v] = keys + v * kLanes;
      block.values[v] = values + v * kLanes * heads.width();
    }
    return block;
  }
};

// The keys that the queries from number `begin` to `end` of a segment see, not packed yet.
Keys keys_of(const Heads& heads, int64_t length, int64_t begin, int64_t end) {
  const int64_t first = std::max<int64_t>(begin - heads.window + 1, 0);
  return {length, first / kBlockKeys * kBlockKeys, std::min(length, end + heads.window - 1), nullptr, nullptr};
}

const float* pack(const Heads& heads, int64_t head, int64_t segment_begin, const Keys& keys) {
  static thread_local Memory memory;
  float* packed = memory.hold((keys.end - keys.begin + kBlockKeys - 1) / kBlockKeys * heads.block());
  for (int64_t key = keys.begin; key < keys.end; key += kBlockKeys) {
    float* block = packed + (key - keys.begin) / kBlockKeys * heads.block();
    pack_block(heads, head, segment_begin + key, segment_begin + keys.end, block);
  }
  return packed;
}

const float* biases_of(const Heads& heads, int64_t head, int64_t length) {
  static thread_local std::vector<float> biases;
  if (heads.bias == nullptr) return nullptr;
  const float* own = heads.bias + head * (2 * heads.reach + 1) + heads.reach;
  biases.assign(2 * length - 1 + kBlockKeys, 0.0f);  // keys after the segment's last one are masked
  for (int64_t distance = 1 - length; distance < length; ++distance) {
    biases[distance + length - 1] = own[std::clamp(distance, -heads.reach, heads.reach)] * kLog2E;
  }
  return biases.data();
}

// Computes the outputs of the queries from number `begin` to `end` of the segment whose first token is `segment_begin`.
void attend_group(const Heads& heads, int64_t head, const Keys& keys, int64_t segment_begin, int64_t begin, int64_t end) {
  static thread_local Segment segment;
  const int64_t width = heads.width(), from = (segment_begin + begin - heads.first) * heads.stride() + head * heads.dim;
  segment.reset(end - begin, width);
  for (int64_t q = 0; q < end - begin; ++q) {
    const float* query = heads.query + from + q * heads.stride();
    float* vector = &segment.vectors[q * width];
    for (int64_t d = 0; d < width; ++d) vector[d] = d < heads.dim ? query[d] * (heads.scale * kLog2E) : 0.0f;
    const int64_t own = begin + q, last = std::min(own + heads.window, keys.length) - 1, hidden = own - heads.window;
    const float* bias = keys.biases == nullptr ? nullptr : keys.biases + keys.length - 1 - own;
    segment.queries[q] = {static_cast<int32_t>(last), static_cast<int32_t>(hidden), kNothing, Floats{}, bias};
  }
  const Keys seen = keys_of(heads, keys.length, begin, end);
  for (int64_t key = seen.begin; key < seen.end; key += kBlockKeys) {
    const bool is_last = key + kBlockKeys >= seen.end;
    const Block<float> next = keys.block_at(heads, is_last ? key : key + kBlockKeys);
    fold_all(segment, keys.block_at(heads, key), is_last ? nullptr : &next);
  }
  for (int64_t q = 0; q < end - begin; ++q) {
    const float inverse = 1.0f / sum(segment.queries[q].total);
    const float* sums = &segment.sums[q * width];
    float* out = heads.out + from + q * heads.stride();
    for (int64_t d = 0; d < heads.dim; ++d) out[d] = sums[d] * inverse;
  }
}

// Computes the outputs of tokens from `begin` to `end` of one head of a segment.
void attend(const Heads& heads, int64_t head, const Range& segment, int64_t begin, int64_t end) {
  begin -= segment.begin;
  end -= segment.begin;
  Keys keys = keys_of(heads, segment.end - segment.begin, begin, end);
  keys.packed = pack(heads, head, segment.begin, keys);
  keys.biases = biases_of(heads, head, keys.length);
  for (; begin < end; begin += kGroupQueries) {
    attend_group(heads, head, keys, segment.begin, begin, std::min(begin + kGroupQueries, end));
  }
}

// The segments of the first `count` tokens: neighbours of the same number.
std::vector<Range> segments_of(const int32_t* numbers, int64_t count) {
  std::vector<Range> segments;
  for (int64_t begin = 0, end; begin < count; begin = end) {
    for (end = begin + 1; end < count && numbers[end] == numbers[begin];) ++end;
    segments.push_back({begin, end});
  }
  return segments;
}

// Some queries of a segment, of all heads.
struct Piece {
  Range segment;
  int64_t begin, end;
};

// Cuts the queries of `range` such that there are several tasks for each thread, but no piece packs keys for less than two groups.
std::vector<Piece> pieces_of(const std::vector<Range>& segments, const Range& range, int64_t num_heads, int64_t threads) {
  const int64_t most = (range.end - range.begin) * num_heads / (4 * threads);
  const int64_t size = std::max(2 * kGroupQueries, (most + kGroupQueries - 1) / kGroupQueries * kGroupQueries);
  std::vector<Piece> pieces;
  for (const Range& segment : segments) {
    const int64_t end = std::min(segment.end, range.end);
    for (int64_t begin = std::max(segment.begin, range.begin); begin < end; begin += size) {
      pieces.push_back({segment, begin, std::min(begin + size, end)});
    }
  }
  return pieces;
}

using Floats3 = ffi::BufferR3<ffi::F32>;

ffi::Error segment_attention_handler(ffi::ThreadPool threads, Floats3 query, Floats3 key, Floats3 value,
                                     ffi::BufferR1<ffi::S32> numbers, ffi::BufferR0<ffi::S32> num_tokens,
                                     ffi::BufferR0<ffi::S32> first, ffi::BufferR2<ffi::F32> bias, ffi::Result<Floats3> out,
                                     float scale, int32_t window) {
  const auto shape = query.dimensions();
  const int64_t num_keys = key.dimensions()[0], begin = *first.typed_data();
  if (begin < 0 || begin + shape[0] > num_keys) return ffi::Error::InvalidArgument("queries of tokens that have no keys");
  const int64_t count = std::clamp<int64_t>(*num_tokens.typed_data(), 0, num_keys);
  const Range range{begin, std::clamp(count, begin, begin + static_cast<int64_t>(shape[0]))};
  const int64_t distances = bias.dimensions()[1];
  const Heads heads{query.typed_data(), key.typed_data(), value.typed_data(), out->typed_data(), begin, shape[1], shape[2], scale,
                    window, distances > 0 ? bias.typed_data() : nullptr, distances / 2};
  const int64_t computed = range.end - begin;
  std::fill_n(heads.out + computed * heads.stride(), (shape[0] - computed) * heads.stride(), 0.0f);
  const auto segments = segments_of(numbers.typed_data(), count);
  const auto pieces = std::make_shared<const std::vector<Piece>>(
      pieces_of(segments, range, heads.num_heads, std::max<int64_t>(1, threads.num_threads())));
  parallel_for(threads, pieces->size() * heads.num_heads, [=](int64_t task) {
    const Piece& piece = (*pieces)[task / heads.num_heads];
    attend(heads, task % heads.num_heads, piece.segment, piece.begin, piece.end);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_segment_attention, jaxserve::segment_attention_handler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jaxserve::Floats3>()
                                  .Arg<jaxserve::Floats3>()
                                  .Arg<jaxserve::Floats3>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR0<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR0<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                                  .Ret<jaxserve::Floats3>()
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("window"));
