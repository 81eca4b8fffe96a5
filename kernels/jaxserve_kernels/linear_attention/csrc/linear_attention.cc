// Linear attention with decay on states that stay in their pool: the tokens of a row one after the other, each with
//   S = decay * S, u = rate * (v - S^T k) or v, S = S + k u^T, out = S^T q.
// Queries and keys may have to be divided by their lengths first. S^T k, u and S^T q are multiplied with the factors instead.
//
// A column of a state depends on the values of this column alone, so a task has a few columns of one head of one row, which stay in
// the nearest cache from the row's first token to its last. Sums go over the key's channels in one order, whatever surrounds a
// column: a token gets the same bits in a decode step and in a prompt, however that is cut.
#include <algorithm>
#include <cmath>
#include <optional>

#include "parallel.h"
#include "thread_memory.h"
#include "vector.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

constexpr int kMostVectors = kRegisters / 8;  // of a task's columns: two sums of each, and what is added to it

struct Operands {
  const float *q, *k;      // [T, K, H]
  const float* v;          // [T, N, V]
  const float* decay;      // [T, N], or [T, N, H]
  const float* rate;       // [T, N], or null
  const int32_t *starts;   // [B + 1]
  const int32_t* reads;    // [B]
  const int32_t* writes;   // [B], or null: no state is written
  const float* before;     // [Y, N, H, V]: the pool of the layer
  float* after;            // the same pool, or null
  float* out;              // [T, N, V]
  int64_t num_rows, num_slots, key_heads, heads, key_dim, value_dim;
  bool is_decode;          // token i belongs to row i
  float norm_eps;          // added to the squared lengths of queries and keys; negative: they are taken as they are
};

// The columns of a state, or of a copy of them.
struct Columns {
  float* first;
  int64_t stride;  // from a channel of the key to the next
};

// What a token brings to one head, or to some columns of it.
struct Token {
  const float *q, *k, *v;
  const float* decay;  // one number, or one of each channel
  const float* rate;
  float* out;
  float query_factor, key_factor;
};

struct Factors {
  float query, key;
};

// What a query and a key are multiplied with: 1 over their lengths, of queries also over the root of their channels. Its sums have
// one order for all tokens.
__attribute__((noinline)) Factors factors(const float* q, const float* k, int64_t key_dim, float eps) {
  Floats query[2] = {}, key[2] = {};
  const auto add = [&](int64_t h, int part) {
    const Floats q_values = load(q + h), k_values = load(k + h);
    query[part] = multiply_add(query[part], q_values, q_values);
    key[part] = multiply_add(key[part], k_values, k_values);
  };
  int64_t h = 0;
  for (; h + 2 * kLanes <= key_dim; h += 2 * kLanes) add(h, 0), add(h + kLanes, 1);
  for (; h + kLanes <= key_dim; h += kLanes) add(h, 0);
  const FourFloats sums = sums_of_four(query[0], query[1], key[0], key[1]);
  float query_square = sums[0] + sums[1], key_square = sums[2] + sums[3];
  for (; h < key_dim; ++h) {
    query_square = std::fma(q[h], q[h], query_square);
    key_square = std::fma(k[h], k[h], key_square);
  }
  return {1.0f / std::sqrt((query_square + eps) * key_dim), 1.0f / std::sqrt(key_square + eps)};
}

// One token. `from` and `to` may be the same.
template <int kVectors, bool kByChannel, bool kHasRate>
void step(const Token& token, int64_t key_dim, Columns from, Columns to) {
  Floats added[kVectors];
  for (int i = 0; i < kVectors; ++i) added[i] = load(token.v + i * kLanes);
  const Floats key_factor = broadcast(token.key_factor), query_factor = broadcast(token.query_factor);
  if (kHasRate) {
    Floats sums[2][kVectors] = {};
    const auto add = [&](int64_t h, int part) {
      const Floats key = broadcast(kByChannel ? token.k[h] * token.decay[h] : token.k[h]);
      const float* state = from.first + h * from.stride;
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) sums[part][i] = multiply_add(sums[part][i], key, load(state + i * kLanes));
    };
    int64_t h = 0;
    for (; h + 2 <= key_dim; h += 2) add(h, 0), add(h + 1, 1);
    if (h < key_dim) add(h, 0);
    const Floats factor = broadcast(kByChannel ? -1.0f : -*token.decay) * key_factor, rate = broadcast(*token.rate);
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) added[i] = rate * multiply_add(added[i], factor, sums[0][i] + sums[1][i]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) added[i] *= key_factor;
  Floats sums[2][kVectors] = {};
  const Floats whole = broadcast(*token.decay);
  const auto update = [&](int64_t h, int part) {
    const Floats key = broadcast(token.k[h]), query = broadcast(token.q[h]);
    const Floats decay = kByChannel ? broadcast(token.decay[h]) : whole;
    const float* before = from.first + h * from.stride;
    float* after = to.first + h * to.stride;
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      const Floats state = multiply_add(key * added[i], decay, load(before + i * kLanes));
      store(after + i * kLanes, state);
      sums[part][i] = multiply_add(sums[part][i], query, state);
    }
  };
  int64_t h = 0;
  for (; h + 2 <= key_dim; h += 2) update(h, 0), update(h + 1, 1);
  if (h < key_dim) update(h, 0);
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) store(token.out + i * kLanes, query_factor * (sums[0][i] + sums[1][i]));
}

struct Task {
  int64_t row, head, column, width;  // width: columns
};

void copy(Columns from, Columns to, int64_t width, int64_t key_dim) {
  for (int64_t h = 0; h < key_dim; ++h) std::copy_n(from.first + h * from.stride, width, to.first + h * to.stride);
}

template <int kVectors, bool kByChannel, bool kHasRate>
void attend(const Operands& o, const Task& task) {
  constexpr int64_t kWidth = kVectors * kLanes;
  const int64_t begin = o.is_decode ? task.row : o.starts[task.row];
  const int64_t end = begin + o.starts[task.row + 1] - o.starts[task.row];
  const int64_t head_size = o.key_dim * o.value_dim, key_head = task.head / (o.heads / o.key_heads);
  const auto slot = [&](int64_t slot) { return (slot * o.heads + task.head) * head_size + task.column; };
  const bool is_written = o.writes != nullptr && o.writes[task.row] >= 0 && o.writes[task.row] < o.num_slots;
  thread_local Memory memory;
  float* const own = memory.hold(o.key_dim * kWidth + 2 * kWidth);
  const Columns near{own + 2 * kWidth, kWidth};
  Columns first{const_cast<float*>(o.before) + slot(o.reads[task.row]), o.value_dim}, last = near;
  if (is_written) last = {o.after + slot(o.writes[task.row]), o.value_dim};
  const Columns pooled = last;
  const bool is_whole = task.width == kWidth;
  float *const values = own, *const outputs = own + kWidth;
  if (!is_whole) {  // vectors would reach into the next channel
    std::fill_n(own, (o.key_dim + 2) * kWidth, 0.0f);
    copy(first, near, task.width, o.key_dim);
    first = last = near;
  }
  for (int64_t t = begin; t < end; ++t) {
    const int64_t place = t * o.heads + task.head;
    const float* v = o.v + place * o.value_dim + task.column;
    float* out = o.out + place * o.value_dim + task.column;
    if (!is_whole) std::copy_n(v, task.width, values);
    const int64_t key = (t * o.key_heads + key_head) * o.key_dim;
    const Factors factor = o.norm_eps < 0 ? Factors{1, 1} : factors(o.q + key, o.k + key, o.key_dim, o.norm_eps);
    const Token token{o.q + key,
                      o.k + key,
                      is_whole ? v : values,
                      o.decay + (kByChannel ? place * o.key_dim : place),
                      kHasRate ? o.rate + place : nullptr,
                      is_whole ? out : outputs,
                      factor.query,
                      factor.key};
    step<kVectors, kByChannel, kHasRate>(token, o.key_dim, t == begin ? first : near, t + 1 == end ? last : near);
    if (!is_whole) std::copy_n(outputs, task.width, out);
  }
  if (!is_whole && is_written) copy(near, pooled, task.width, o.key_dim);
}

template <bool kByChannel, bool kHasRate>
void attend_columns(const Operands& o, const Task& task) {
  switch ((task.width + kLanes - 1) / kLanes) {
    case 1: return attend<1, kByChannel, kHasRate>(o, task);
    case 2: return attend<2, kByChannel, kHasRate>(o, task);
#if defined(__AVX512F__) || defined(__aarch64__)
    case 3: return attend<3, kByChannel, kHasRate>(o, task);
    default: return attend<4, kByChannel, kHasRate>(o, task);
#else
    default: return;
#endif
  }
}

template <bool kByChannel>
void attend_with_decay(const Operands& o, const Task& task) {
  o.rate ? attend_columns<kByChannel, true>(o, task) : attend_columns<kByChannel, false>(o, task);
}

using Rows = ffi::BufferR1<ffi::S32>;
using Heads = ffi::BufferR3<ffi::F32>;
using Pool = ffi::Buffer<ffi::F32, 5>;

// Without `writes`, and then without `after`, states are only read.
ffi::Error handler(ffi::ThreadPool threads, Heads q, Heads k, Heads v, ffi::AnyBuffer decay, ffi::BufferR2<ffi::F32> rate,
                   Rows starts, Rows reads, ffi::BufferR0<ffi::S32> layer, Pool pool, std::optional<Rows> writes,
                   ffi::Result<Heads> result, std::optional<ffi::Result<Pool>> after, bool is_decode, float norm_eps) {
  const auto shape = pool.dimensions();
  const int64_t layer_size = shape[1] * shape[2] * shape[3] * shape[4], place = *layer.typed_data();
  if (place < 0 || place >= shape[0]) return ffi::Error::InvalidArgument("linear_attention: no such layer");
  if (writes.has_value() != after.has_value()) return ffi::Error::InvalidArgument("linear_attention: no pool to write to");
  float* const written = after ? (*after)->typed_data() : nullptr;
  if (written && written != pool.typed_data()) std::copy_n(pool.typed_data(), pool.element_count(), written);
  const bool has_rate = rate.dimensions()[0] > 0, is_by_channel = decay.dimensions().size() == 3;
  float* const out = result->typed_data();
  const Operands o{q.typed_data(),
                   k.typed_data(),
                   v.typed_data(),
                   decay.typed_data<float>(),
                   has_rate ? rate.typed_data() : nullptr,
                   starts.typed_data(),
                   reads.typed_data(),
                   writes ? writes->typed_data() : nullptr,
                   (written ? written : pool.typed_data()) + place * layer_size,
                   written ? written + place * layer_size : nullptr,
                   out,
                   static_cast<int64_t>(reads.element_count()),
                   shape[1],
                   q.dimensions()[1],
                   shape[2],
                   shape[3],
                   shape[4],
                   is_decode,
                   norm_eps};
  constexpr int64_t kWidth = kMostVectors * kLanes;
  const int64_t parts = (o.value_dim + kWidth - 1) / kWidth, row_size = o.heads * o.value_dim;
  const int64_t num_tokens = v.dimensions()[0], rows = o.num_rows;
  if (is_decode) {
    for (int64_t row = 0; row < rows; ++row) {
      if (o.starts[row + 1] == o.starts[row]) std::fill_n(out + row * row_size, row_size, 0.0f);
    }
  } else {
    const int64_t computed = std::clamp<int64_t>(o.starts[rows], 0, num_tokens);
    std::fill_n(out + computed * row_size, (num_tokens - computed) * row_size, 0.0f);
  }
  const auto attend_part = is_by_channel ? attend_with_decay<true> : attend_with_decay<false>;
  parallel_for(threads, rows * o.heads * parts, [=](int64_t i) {
    const int64_t row = i / (o.heads * parts), column = i % parts * kWidth;
    if (o.starts[row + 1] == o.starts[row]) return;
    attend_part(o, {row, i / parts % o.heads, column, std::min(kWidth, o.value_dim - column)});
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_linear_attention, jaxserve::handler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jaxserve::Heads>()
                                  .Arg<jaxserve::Heads>()
                                  .Arg<jaxserve::Heads>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                                  .Arg<jaxserve::Rows>()
                                  .Arg<jaxserve::Rows>()
                                  .Arg<xla::ffi::BufferR0<xla::ffi::S32>>()
                                  .Arg<jaxserve::Pool>()
                                  .OptionalArg<jaxserve::Rows>()
                                  .Ret<jaxserve::Heads>()
                                  .OptionalRet<jaxserve::Pool>()
                                  .Attr<bool>("is_decode")
                                  .Attr<float>("norm_eps"));
