// y[T, O] += (x[T, I] * down[A, I]^T of the row's own ranks) * up[A, O], in place, for each y of one x. The ranks of a row's adapter
// are neighbours; other ranks are neither read nor computed. Rows behind the first `count` are padding, and stay as they are.
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "products.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

constexpr int kTaskRows = 4;  // of one adapter: they share what is read of it

struct Ranks {
  int64_t first, count;
};

Ranks own_ranks(const bool* own, int64_t num_ranks) {
  const auto* first = static_cast<const bool*>(std::memchr(own, true, num_ranks));
  if (first == nullptr) return {0, 0};
  const int64_t rest = own + num_ranks - first;
  const auto* end = static_cast<const bool*>(std::memchr(first, false, rest));
  return {first - own, end == nullptr ? rest : end - first};
}

struct Task {
  Ranks ranks;
  int num_rows;
  int64_t rows[kTaskRows];
};

// Rows that have an adapter, up to four of one together.
std::vector<Task> tasks_of(const bool* own, int64_t num_rows, int64_t num_ranks) {
  std::vector<Task> tasks;
  for (int64_t row = 0; row < num_rows; ++row) {
    const Ranks ranks = own_ranks(own + row * num_ranks, num_ranks);
    if (ranks.count == 0) continue;
    const auto last = std::find_if(tasks.rbegin(), tasks.rend(), [&](const Task& task) {
      return task.ranks.first == ranks.first;  // all but the last one of an adapter are full
    });
    const bool is_open = last != tasks.rend() && last->num_rows < kTaskRows;
    Task& task = is_open ? *last : tasks.emplace_back(Task{ranks, 0, {}});
    task.rows[task.num_rows++] = row;
  }
  return tasks;
}

// Rounds to bfloat16, to even.
float rounded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

struct Operands {
  const float* x;
  const void *down, *up;
  float* y;
  int64_t inputs, ranks, outputs;
  bool rounds;
};

// The products of the rows of a task with their ranks. A row's sums have one order, however many rows there are.
template <typename P, int kRows>
void to_ranks(const Operands& o, const Task& task, float* values) {
  const auto* down = static_cast<const typename P::Stored*>(o.down) + task.ranks.first * o.inputs;
  for (int64_t rank = 0; rank < task.ranks.count; rank += 4, down += 4 * o.inputs) {
    Floats sums[kRows][4] = {};
    for (int64_t i = 0; i < o.inputs; i += kLanes) {
      Floats weights[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        __builtin_prefetch(down + (4 + j) * o.inputs + i, 0, 2);
        weights[j] = in_register(P::weights(down + j * o.inputs + i));
      }
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        const Floats inputs = in_register(load(o.x + task.rows[row] * o.inputs + i));
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sums[row][j] = multiply_add(sums[row][j], inputs, weights[j]);
      }
    }
    for (int row = 0; row < kRows; ++row) {
      const auto four = sums_of_four(sums[row][0], sums[row][1], sums[row][2], sums[row][3]);
      float* to = values + row * task.ranks.count + rank;
      for (int j = 0; j < 4; ++j) to[j] = o.rounds ? rounded(four[j]) : four[j];
    }
  }
}

// Adds to `kVectors` vectors of outputs of each row.
template <typename P, int kRows, int kVectors>
void to_vectors(const Operands& o, const Task& task, const float* values, const typename P::Stored* up, int64_t stride,
                float* const (&y)[kRows]) {
  Floats sums[kRows][kVectors] = {};
  for (int64_t rank = 0; rank < task.ranks.count; ++rank, up += stride) {
    Floats weights[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      __builtin_prefetch(up + (i + kVectors) * kLanes, 0, 2);
      weights[i] = in_register(P::weights(up + i * kLanes));
    }
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const Floats value = broadcast(values[row * task.ranks.count + rank]);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) sums[row][i] = multiply_add(sums[row][i], value, weights[i]);
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) store(y[row] + i * kLanes, load(y[row] + i * kLanes) + sums[row][i]);
  }
}

// The outputs behind the last whole vector, by way of one.
template <typename P, int kRows>
void to_last_outputs(const Operands& o, const Task& task, const float* values, int64_t output) {
  using Stored = typename P::Stored;
  const int64_t width = o.outputs - output;
  std::vector<Stored> up(task.ranks.count * kLanes);
  for (int64_t rank = 0; rank < task.ranks.count; ++rank) {
    const auto* from = static_cast<const Stored*>(o.up) + (task.ranks.first + rank) * o.outputs + output;
    std::copy_n(from, width, up.data() + rank * kLanes);
  }
  float ends[kRows][kLanes] = {}, *to[kRows];
  for (int row = 0; row < kRows; ++row) {
    to[row] = ends[row];
    std::copy_n(o.y + task.rows[row] * o.outputs + output, width, ends[row]);
  }
  to_vectors<P, kRows, 1>(o, task, values, up.data(), kLanes, to);
  for (int row = 0; row < kRows; ++row) std::copy_n(ends[row], width, o.y + task.rows[row] * o.outputs + output);
}

template <typename P, int kRows>
void to_outputs(const Operands& o, const Task& task, const float* values) {
  constexpr int kVectors = 4;
  const auto* up = static_cast<const typename P::Stored*>(o.up) + task.ranks.first * o.outputs;
  int64_t output = 0;
  const auto add = [&](auto vectors) {
    float* y[kRows];
    for (int row = 0; row < kRows; ++row) y[row] = o.y + task.rows[row] * o.outputs + output;
    to_vectors<P, kRows, vectors>(o, task, values, up + output, o.outputs, y);
    output += vectors * kLanes;
  };
  while (output + kVectors * kLanes <= o.outputs) add(std::integral_constant<int, kVectors>());
  while (output + kLanes <= o.outputs) add(std::integral_constant<int, 1>());
  if (output < o.outputs) to_last_outputs<P, kRows>(o, task, values, output);
}

template <typename P, int kRows>
void add_to_rows(const Operands& o, const Task& task) {
  std::vector<float> values(kRows * task.ranks.count);
  to_ranks<P, kRows>(o, task, values.data());
  to_outputs<P, kRows>(o, task, values.data());
}

template <typename P>
void add_task(const Operands& o, const Task& task) {
  switch (task.num_rows) {
    case 1: return add_to_rows<P, 1>(o, task);
    case 2: return add_to_rows<P, 2>(o, task);
    case 3: return add_to_rows<P, 3>(o, task);
    default: return add_to_rows<P, kTaskRows>(o, task);
  }
}

// Adds to one y after another, as far as threads share tasks in their order.
template <typename P>
void add(ffi::ThreadPool& pool, const std::vector<Operands>& all, const std::vector<Task>& tasks) {
  const int64_t count = tasks.size();
  parallel_for(pool, all.size() * count, [=, all = all.data(), tasks = tasks.data()](int64_t i) {
    add_task<P>(all[i / count], tasks[i % count]);
  });
}

// `rest`: each y before, then each down, then each up.
ffi::ErrorOr<std::vector<Operands>> operands(ffi::BufferR2<ffi::F32> x, int64_t ranks, ffi::RemainingArgs rest,
                                             ffi::RemainingRets ys, bool rounds) {
  const size_t num = ys.size();
  const auto invalid = [](const char* text) { return ffi::Unexpected(ffi::Error::InvalidArgument(text)); };
  if (num == 0 || rest.size() != 3 * num) return invalid("low_rank: matrices are missing");
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1];
  const auto type = rest.get<ffi::AnyBuffer>(num)->element_type();
  std::vector<Operands> all;
  for (size_t i = 0; i < num; ++i) {
    const auto before = rest.get<ffi::BufferR2<ffi::F32>>(i);
    const auto down = *rest.get<ffi::AnyBuffer>(num + i), up = *rest.get<ffi::AnyBuffer>(2 * num + i);
    auto y = ys.get<ffi::BufferR2<ffi::F32>>(i);
    if (before.has_error() || y.has_error()) return invalid("low_rank: results are floats");
    const int64_t outputs = (*y)->dimensions()[1];
    const auto has_shape = [](ffi::AnyBuffer matrix, int64_t height, int64_t width) {
      const auto shape = matrix.dimensions();
      return shape.size() == 2 && shape[0] == height && shape[1] == width;
    };
    if ((*y)->dimensions()[0] != rows || !has_shape(down, ranks, inputs) || !has_shape(up, ranks, outputs)) {
      return invalid("low_rank: shapes that do not go together");
    }
    if (down.element_type() != type || up.element_type() != type) return invalid("low_rank: matrices of several types");
    float* to = (*y)->typed_data();
    if (to != before->typed_data()) std::memcpy(to, before->typed_data(), before->size_bytes());
    all.push_back({x.typed_data(), down.untyped_data(), up.untyped_data(), to, inputs, ranks, outputs, rounds});
  }
  return all;
}

ffi::Error handler(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::BufferR2<ffi::PRED> own,
                   ffi::BufferR0<ffi::S32> count, ffi::RemainingArgs rest, ffi::RemainingRets ys, bool rounds) {
  const int64_t ranks = own.dimensions()[1], rows = std::clamp<int64_t>(*count.typed_data(), 0, x.dimensions()[0]);
  if (x.dimensions()[1] % kLanes) return ffi::Error::InvalidArgument("low_rank: inputs are no multiple of those taken at once");
  const auto all = operands(x, ranks, rest, ys, rounds);
  if (all.has_error()) return all.error();
  const auto tasks = tasks_of(own.typed_data(), rows, ranks);
  for (const Task& task : tasks) {
    if (task.ranks.count % 4) return ffi::Error::InvalidArgument("low_rank: the ranks of an adapter are no multiple of 4");
  }
  switch (rest.get<ffi::AnyBuffer>(ys.size())->element_type()) {
    case ffi::F32: add<Float32>(pool, *all, tasks); break;
    case ffi::F16: add<Float16>(pool, *all, tasks); break;
    case ffi::BF16: add<BFloat16>(pool, *all, tasks); break;
    default: return ffi::Error::InvalidArgument("low_rank: weights of this type are not supported");
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_add_low_rank, jaxserve::handler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::PRED>>()
                                  .Arg<xla::ffi::BufferR0<xla::ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("rounds"));
