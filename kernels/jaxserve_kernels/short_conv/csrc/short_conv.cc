// Causal convolution of each channel over its last tokens, whose inputs before a row's first token stay in their pool.
//
// A task has some channels of all rows: what it writes into a window, no other task reads. Sums go over the taps in one order, so a token
// gets the same bits in a decode step and in a prompt, however that is cut.
#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "parallel.h"
#include "thread_memory.h"
#include "vector.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

constexpr int kMostTaps = 8;
constexpr int64_t kTaskChannels = 128;        // of which a token has eight cache lines, one after the other
constexpr int64_t kSharedNumbers = 16 << 10;  // of a step that is worth a second thread

struct Operands {
  const float* x;        // [T, C]
  const float* weight;   // [C, W]
  const float* bias;     // [C], or null
  const int32_t *starts; // [B + 1]
  const int32_t* reads;  // [B]
  const int32_t* writes; // [B], or null: no window is written
  const float* before;   // [Y, W - 1, C]: the pool of the layer
  float* after;          // the same pool, or null
  int64_t num_rows, num_slots, num_tokens, channels, num_taps;
  bool is_decode;        // token i belongs to row i
};

// Neighbouring channels, and their places in the outputs.
struct Task {
  int64_t first, width;
  float* out;  // of the first token
  int64_t stride;
};

// x / (1 + e^-x), by an exponential of a number that is not above 0. Its argument is rounded whatever the compiler fuses.
inline Floats silu(Floats x) {
  const Floats power = exponential2(in_register(larger(x, -x) * -1.4426950409f));
  return x * ((x < 0.0f ? power : broadcast(1.0f)) / (broadcast(1.0f) + power));
}

// One token. `taps`: those of the task's channels, then the bias.
template <bool kIsSilu>
void convolve_token(const float* const* inputs, const float* taps, int64_t num_taps, int64_t width, float* out) {
  const auto add = [&](int64_t c, const auto& input) {
    Floats sum{};
    for (int64_t tap = 0; tap < num_taps; ++tap) {
      sum = multiply_add(sum, input(inputs[tap] + c), load(taps + tap * kTaskChannels + c));
    }
    sum += load(taps + num_taps * kTaskChannels + c);
    return kIsSilu ? silu(sum) : sum;
  };
  int64_t c = 0;
  for (; c + kLanes <= width; c += kLanes) store(out + c, add(c, [](const float* p) { return load(p); }));
  if (c == width) return;
  const size_t rest = (width - c) * sizeof(float);
  const Floats last = add(c, [rest](const float* p) {
    Floats some{};
    std::memcpy(&some, p, rest);
    return some;
  });
  std::memcpy(out + c, &last, rest);
}

template <bool kIsSilu>
void convolve(const Operands& o, const Task& task) {
  const int64_t kept = o.num_taps - 1;
  thread_local Memory memory;
  float* const taps = memory.hold((kMostTaps + 1) * kTaskChannels);
  std::fill_n(taps, (o.num_taps + 1) * kTaskChannels, 0.0f);
  for (int64_t c = 0; c < task.width; ++c) {
    for (int64_t tap = 0; tap < o.num_taps; ++tap) {
      taps[tap * kTaskChannels + c] = o.weight[(task.first + c) * o.num_taps + tap];
    }
    if (o.bias) taps[o.num_taps * kTaskChannels + c] = o.bias[task.first + c];
  }
  const auto clear = [&](int64_t token) { std::fill_n(task.out + token * task.stride, task.width, 0.0f); };
  for (int64_t row = 0; row < o.num_rows; ++row) {
    const int64_t count = o.starts[row + 1] - o.starts[row], begin = o.is_decode ? row : o.starts[row];
    if (count == 0) {
      if (o.is_decode) clear(row);
      continue;
    }
    const float* const own = o.x + begin * o.channels + task.first;
    const float* const window = o.before + o.reads[row] * kept * o.channels + task.first;
    // The input `place` tokens after the row's first; negative places are in its window.
    const auto input = [&](int64_t place) { return place < 0 ? window + (kept + place) * o.channels : own + place * o.channels; };
    for (int64_t t = 0; t < count; ++t) {
      const float* inputs[kMostTaps];
      for (int64_t tap = 0; tap < o.num_taps; ++tap) inputs[tap] = input(t - kept + tap);
      convolve_token<kIsSilu>(inputs, taps, o.num_taps, task.width, task.out + (begin + t) * task.stride);
    }
    if (o.writes == nullptr || o.writes[row] < 0 || o.writes[row] >= o.num_slots) continue;
    float* const next = o.after + o.writes[row] * kept * o.channels + task.first;
    for (int64_t i = 0; i < kept; ++i) std::copy_n(input(count - kept + i), task.width, next + i * o.channels);
  }
  if (o.is_decode) return;
  for (int64_t t = std::clamp<int64_t>(o.starts[o.num_rows], 0, o.num_tokens); t < o.num_tokens; ++t) clear(t);
}

using Rows = ffi::BufferR1<ffi::S32>;
using Matrix = ffi::BufferR2<ffi::F32>;
using Pool = ffi::Buffer<ffi::F32, 4>;

// The results are the pool after, if there are `writes`, and then the outputs of some channels, and of the next ones.
ffi::Error handler(ffi::ThreadPool threads, Matrix x, Matrix weight, ffi::BufferR1<ffi::F32> bias, Rows starts, Rows reads,
                   ffi::BufferR0<ffi::S32> layer, Pool pool, std::optional<Rows> writes, ffi::RemainingRets results,
                   bool is_decode, bool is_silu) {
  const auto shape = pool.dimensions();
  const int64_t channels = x.dimensions()[1], num_taps = weight.dimensions()[1], place = *layer.typed_data();
  if (place < 0 || place >= shape[0]) return ffi::Error::InvalidArgument("short_conv: no such layer");
  if (num_taps > kMostTaps || shape[2] != num_taps - 1 || shape[3] != channels || weight.dimensions()[0] != channels) {
    return ffi::Error::InvalidArgument("short_conv: shapes that do not go together");
  }
  const float* before = pool.typed_data();
  float* after = nullptr;
  size_t result = 0;
  if (writes) {
    auto written = results.get<Pool>(result++);
    if (written.has_error()) return written.error();
    after = (*written)->typed_data();
    if (after != before) std::copy_n(before, pool.element_count(), after);
    before = after;
  }
  const int64_t first = place * shape[1] * shape[2] * shape[3];
  const Operands o{x.typed_data(),
                   weight.typed_data(),
                   bias.element_count() ? bias.typed_data() : nullptr,
                   starts.typed_data(),
                   reads.typed_data(),
                   writes ? writes->typed_data() : nullptr,
                   before + first,
                   after ? after + first : nullptr,
                   static_cast<int64_t>(reads.element_count()),
                   shape[1],
                   x.dimensions()[0],
                   channels,
                   num_taps,
                   is_decode};
  std::vector<Task> tasks;
  int64_t channel = 0;
  for (; result < results.size(); ++result) {
    auto out = results.get<Matrix>(result);
    if (out.has_error()) return out.error();
    const int64_t width = (*out)->dimensions()[1];
    for (int64_t c = 0; c < width; c += kTaskChannels) {
      tasks.push_back({channel + c, std::min(kTaskChannels, width - c), (*out)->typed_data() + c, width});
    }
    channel += width;
  }
  if (channel != channels) return ffi::Error::InvalidArgument("short_conv: not all channels have an output");
  const auto run = [=, tasks = tasks.data()](int64_t i) { is_silu ? convolve<true>(o, tasks[i]) : convolve<false>(o, tasks[i]); };
  const int64_t count = tasks.size();
  if (o.num_tokens * channels >= kSharedNumbers) {
    parallel_for(threads, count, run);
  } else {
    for (int64_t i = 0; i < count; ++i) run(i);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_short_conv, jaxserve::handler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jaxserve::Matrix>()
                                  .Arg<jaxserve::Matrix>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::F32>>()
                                  .Arg<jaxserve::Rows>()
                                  .Arg<jaxserve::Rows>()
                                  .Arg<xla::ffi::BufferR0<xla::ffi::S32>>()
                                  .Arg<jaxserve::Pool>()
                                  .OptionalArg<jaxserve::Rows>()
                                  .RemainingRets()
                                  .Attr<bool>("is_decode")
                                  .Attr<bool>("is_silu"));
