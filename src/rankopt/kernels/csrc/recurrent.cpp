// The operators around the recurrences: checks, order of rows, threads.
#include "recurrent.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "isa.h"
#include "launch.h"
#include "linear_fp32.h"
#include "target.h"

namespace rankopt {
namespace {

namespace plain {
#include "exact_exp.h"
#include "recurrent_gates.h"
}

#if defined(__x86_64__)
RANKOPT_TARGET_BEGIN("avx2")
namespace avx2 {
#include "exact_exp.h"
#include "recurrent_gates.h"
}
RANKOPT_TARGET_END
#endif

struct Kernels {
  const LinearFp32& linear;
  decltype(&plain::next_gru) next_gru;
  decltype(&plain::next_lstm) next_lstm;
};

Kernels kernels() {
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx2:
      return {linear_fp32_avx2(), avx2::next_gru, avx2::next_lstm};
    case Isa::kAvx512:
    case Isa::kAvx512Vnni:
      return {linear_fp32_avx512(), avx2::next_gru, avx2::next_lstm};
#endif
    default:
      return {linear_fp32_scalar(), plain::next_gru, plain::next_lstm};
  }
}

enum class Cell { kGru, kLstm };

// As in linear_fp32.cpp.
constexpr int64_t kWorkPerThread = 1 << 17;
// Projected inputs of the rows that one thread holds at a time: they stay in its second-level cache.
constexpr int64_t kProjectedBytes = 256 << 10;
constexpr int64_t kMostRows = 24;

// One matrix, laid out as linear_fp32.h says. A few microseconds for 64 hidden units.
struct Matrix {
  std::vector<float> packed;
  int64_t num_inputs, num_outputs;
  const float* bias;

  Matrix(const at::Tensor& weight, const float* given_bias)
      : num_inputs(weight.size(1)), num_outputs(weight.size(0)), bias(given_bias) {
    const float* from = weight.const_data_ptr<float>();
    const bool is_narrow = num_outputs <= kNarrowOutputs;
    const int64_t width = divide_up(num_inputs, kLaneInputs) * kLaneInputs;
    packed.resize(is_narrow ? num_outputs * width
                            : divide_up(num_outputs, kTileOutputs) * kTileOutputs * num_inputs);
    for (int64_t n = 0; n < num_outputs; ++n, from += num_inputs) {
      if (is_narrow) {
        std::copy(from, from + num_inputs, packed.data() + n * width);
        continue;
      }
      float* tile = packed.data() + n / kTileOutputs * kTileOutputs * num_inputs + n % kTileOutputs;
      for (int64_t k = 0; k < num_inputs; ++k) tile[k * kTileOutputs] = from[k];
    }
  }

  void multiply(const LinearFp32& linear, const float* x, int64_t num_rows, float* out) const {
    if (num_rows == 0) return;
    Fp32Block block{};
    block.x = x;
    block.x_stride = num_inputs;
    block.num_rows = num_rows;
    block.num_inputs = num_inputs;
    block.weights = packed.data();
    block.tile_end = divide_up(num_outputs, kTileOutputs);
    block.num_outputs = num_outputs;
    block.bias = bias;
    block.out = out;
    block.out_stride = num_outputs;
    (num_outputs <= kNarrowOutputs ? linear.narrow : linear.wide)(block);
  }
};

struct Job {
  Cell cell;
  const float* x;             // [B, T, I]
  const float* first;         // [B, H] or null
  const float* first_memory;  // the same, of an LSTM
  const int64_t* length;      // [B]
  int64_t num_steps, num_hidden, num_gates;
  bool reverse;
  const Matrix& input;
  const Matrix& hidden;
  float* out;          // [B, T, H]
  float* last;         // [B, H]
  float* last_memory;  // [B, H], or null but for an LSTM
};

struct Scratch {
  std::vector<float> projected, hidden, state, memory;
};

// Runs rows[0 .. num_rows), which come longest first: those still running are always the first.
void run_rows(const Job& job, const Kernels& kernel, const int64_t* rows, int64_t num_rows,
              Scratch& scratch) {
  const int64_t num_hidden = job.num_hidden, num_gates = job.num_gates;
  const auto next_state = job.cell == Cell::kGru ? kernel.next_gru : kernel.next_lstm;
  const int64_t row_size = job.num_steps * num_gates;
  const int64_t longest = std::max<int64_t>(job.length[rows[0]], 0);
  scratch.projected.resize(num_rows * row_size);
  scratch.hidden.resize(num_rows * num_gates);
  scratch.state.assign(num_rows * num_hidden, 0.0f);
  scratch.memory.assign(num_rows * num_hidden, 0.0f);
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t row = rows[r], length = std::max<int64_t>(job.length[row], 0);
    job.input.multiply(kernel.linear, job.x + row * job.num_steps * job.input.num_inputs, length,
                       scratch.projected.data() + r * row_size);
    float* out = job.out + row * job.num_steps * num_hidden;
    std::fill(out + length * num_hidden, out + job.num_steps * num_hidden, 0.0f);
    if (job.first != nullptr)
      std::copy_n(job.first + row * num_hidden, num_hidden, scratch.state.data() + r * num_hidden);
    if (job.first_memory != nullptr)
      std::copy_n(job.first_memory + row * num_hidden, num_hidden,
                  scratch.memory.data() + r * num_hidden);
  }
  int64_t running = num_rows;
  for (int64_t step = 0; step < longest; ++step) {
    while (job.length[rows[running - 1]] <= step) --running;
    job.hidden.multiply(kernel.linear, scratch.state.data(), running, scratch.hidden.data());
    for (int64_t r = 0; r < running; ++r) {
      const int64_t row = rows[r];
      const int64_t t = job.reverse ? job.length[row] - 1 - step : step;
      next_state(scratch.projected.data() + r * row_size + t * num_gates,
                 scratch.hidden.data() + r * num_gates, num_hidden,
                 scratch.state.data() + r * num_hidden, scratch.memory.data() + r * num_hidden,
                 job.out + (row * job.num_steps + t) * num_hidden);
    }
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    std::copy_n(scratch.state.data() + r * num_hidden, num_hidden, job.last + rows[r] * num_hidden);
    if (job.last_memory != nullptr)
      std::copy_n(scratch.memory.data() + r * num_hidden, num_hidden,
                  job.last_memory + rows[r] * num_hidden);
  }
}

void run(const Job& job, int64_t num_rows) {
  std::vector<int64_t> rows(num_rows);
  int64_t total_steps = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    rows[row] = row;
    total_steps += std::max<int64_t>(job.length[row], 0);
  }
  std::stable_sort(rows.begin(), rows.end(),
                   [&](int64_t a, int64_t b) { return job.length[a] > job.length[b]; });
  const Kernels kernel = kernels();
  const int64_t row_bytes =
      std::max<int64_t>(job.num_steps, 1) * job.num_gates * int64_t{sizeof(float)};
  const int64_t fitting = std::clamp<int64_t>(kProjectedBytes / row_bytes, 6, kMostRows);
  const int64_t work = total_steps * job.num_gates * (job.input.num_inputs + job.num_hidden);
  const int64_t num_threads =
      std::clamp<int64_t>(work / kWorkPerThread, 1, at::get_num_threads());
  const int64_t block_rows =
      std::max<int64_t>(1, std::min(fitting, divide_up(num_rows, num_threads)));
  const int64_t num_blocks = divide_up(num_rows, block_rows);
  // Every thread takes long and short blocks alike.
  at::parallel_for(0, num_threads, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    for (int64_t thread = begin; thread < end; ++thread)
      for (int64_t block = thread; block < num_blocks; block += num_threads)
        run_rows(job, kernel, rows.data() + block * block_rows,
                 std::min(block_rows, num_rows - block * block_rows), scratch);
  });
}

void check_shape(const char* op, const at::Tensor& tensor, const char* name,
                 at::IntArrayRef shape) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat && tensor.sizes() == shape, op, ": ", name,
              " must be float32 ", shape, "; got ", tensor.scalar_type(), " ", tensor.sizes());
}

// Contiguous [B, H], or undefined where there is none.
at::Tensor checked_state(const char* op, const std::optional<at::Tensor>& state, const char* name,
                         int64_t num_rows, int64_t num_hidden) {
  if (!state.has_value() || !state->defined()) return at::Tensor();
  check_shape(op, *state, name, {num_rows, num_hidden});
  return state->contiguous();
}

const float* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
}

struct Results {
  at::Tensor out, last, memory;
};

Results recur(Cell cell, const at::Tensor& x, const at::Tensor& lengths, const at::Tensor& w_ih,
              const at::Tensor& w_hh, const std::optional<at::Tensor>& b_ih,
              const std::optional<at::Tensor>& b_hh, const std::optional<at::Tensor>& first,
              const std::optional<at::Tensor>& memory, bool reverse) {
  const char* op = cell == Cell::kGru ? "gru" : "lstm";
  TORCH_CHECK(x.dim() == 3 && x.scalar_type() == at::kFloat, op,
              ": x must be float32 [B, T, I]; got ", x.scalar_type(), " ", x.sizes());
  TORCH_CHECK(w_hh.dim() == 2 && w_hh.size(1) >= 1, op,
              ": w_hh must be a matrix with a column per hidden unit; got ", w_hh.sizes());
  const int64_t num_rows = x.size(0), num_steps = x.size(1), num_hidden = w_hh.size(1);
  const int64_t num_gates = (cell == Cell::kGru ? 3 : 4) * num_hidden;
  check_shape(op, w_ih, "w_ih", {num_gates, x.size(2)});
  check_shape(op, w_hh, "w_hh", {num_gates, num_hidden});
  TORCH_CHECK(lengths.scalar_type() == at::kLong && lengths.dim() == 1 &&
                  lengths.size(0) == num_rows,
              op, ": lengths must be int64 [", num_rows, "]; got ", lengths.scalar_type(), " ",
              lengths.sizes());
  const at::Tensor given_length = lengths.contiguous();
  const int64_t* length = given_length.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < num_rows; ++row)
    TORCH_CHECK(length[row] <= num_steps, op, ": lengths[", row, "] must be at most ", num_steps,
                "; got ", length[row]);
  const at::Tensor given_first = checked_state(op, first, "first", num_rows, num_hidden);
  const at::Tensor given_memory = checked_state(op, memory, "memory", num_rows, num_hidden);

  const auto options = x.options().memory_format(at::MemoryFormat::Contiguous);
  Results results{at::empty({num_rows, num_steps, num_hidden}, options),
                  at::empty({num_rows, num_hidden}, options), at::Tensor()};
  if (cell == Cell::kLstm) results.memory = at::empty({num_rows, num_hidden}, options);
  if (num_rows == 0) return results;

  const at::Tensor given_x = x.contiguous();
  const at::Tensor input_weight = w_ih.contiguous(), hidden_weight = w_hh.contiguous();
  const Matrix input(input_weight, float_vector(op, b_ih, "b_ih", num_gates, false));
  const Matrix hidden(hidden_weight, float_vector(op, b_hh, "b_hh", num_gates, false));
  float* last_memory = cell == Cell::kLstm ? results.memory.mutable_data_ptr<float>() : nullptr;
  run(Job{cell, given_x.const_data_ptr<float>(), data_or_null(given_first),
          data_or_null(given_memory), length, num_steps, num_hidden, num_gates, reverse, input,
          hidden, results.out.mutable_data_ptr<float>(), results.last.mutable_data_ptr<float>(),
          last_memory},
      num_rows);
  return results;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> gru(const at::Tensor& x, const at::Tensor& lengths,
                                       const at::Tensor& w_ih, const at::Tensor& w_hh,
                                       const std::optional<at::Tensor>& b_ih,
                                       const std::optional<at::Tensor>& b_hh,
                                       const std::optional<at::Tensor>& first, bool reverse) {
  Results results = recur(Cell::kGru, x, lengths, w_ih, w_hh, b_ih, b_hh, first, {}, reverse);
  return {std::move(results.out), std::move(results.last)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm(
    const at::Tensor& x, const at::Tensor& lengths, const at::Tensor& w_ih, const at::Tensor& w_hh,
    const std::optional<at::Tensor>& b_ih, const std::optional<at::Tensor>& b_hh,
    const std::optional<at::Tensor>& first, const std::optional<at::Tensor>& memory,
    bool reverse) {
  Results results = recur(Cell::kLstm, x, lengths, w_ih, w_hh, b_ih, b_hh, first, memory, reverse);
  return {std::move(results.out), std::move(results.last), std::move(results.memory)};
}

}  // namespace rankopt
