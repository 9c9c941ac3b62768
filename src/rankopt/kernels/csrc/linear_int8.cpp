// The operator around the linear_int8 kernels: checks, blocks, threads.
#include "linear_int8.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>

#include "isa.h"
#include "launch.h"
#include "ops.h"

namespace rankopt {
namespace {

const LinearInt8& kernels() {
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx2:
      return linear_int8_avx2();
    case Isa::kAvx512:
      return linear_int8_avx512();
    case Isa::kAvx512Vnni:
      return linear_int8_avx512_vnni();
#endif
    default:
      return linear_int8_scalar();
  }
}

// Waking a second thread costs a few microseconds: below this many multiply-adds each, one thread
// is faster.
constexpr int64_t kWorkPerThread = 1 << 19;
// Quantised rows that stay in the second-level cache beside the weights they meet.
constexpr int64_t kRowBlockBytes = 128 << 10;

// Grows once per thread and stays: an allocation per call would cost more than a small layer.
class Scratch {
 public:
  uint8_t* bytes(int64_t size) {
    if (size > capacity_) {
      data_.reset(new (std::align_val_t{64}) uint8_t[static_cast<size_t>(size)]);
      capacity_ = size;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<uint8_t[], Free> data_;
  int64_t capacity_ = 0;
};

struct Problem {
  const float* x;
  int64_t x_stride;
  int64_t num_rows;
  int64_t num_inputs;
  int activation_bits;
  GemmBlock block;  // everything but the rows
};

// Rows [begin, end) against the tiles in problem.block.
void run_rows(const LinearInt8& kernel, const Problem& problem, int64_t begin, int64_t end) {
  thread_local Scratch scratch;
  // A multiple of 64 bytes plus 64: rows a power of two apart would share cache sets.
  const int64_t stride = divide_up(problem.block.num_steps * kTileInputs, 64) * 64 + 64;
  const int64_t block_rows =
      std::min(end - begin, std::clamp<int64_t>(kRowBlockBytes / stride, 40, 640));
  uint8_t* rows = scratch.bytes(block_rows * (stride + int64_t{sizeof(float)}));
  float* row_scales = reinterpret_cast<float*>(rows + block_rows * stride);

  GemmBlock block = problem.block;
  block.rows = rows;
  block.stride = stride;
  block.row_scales = row_scales;
  for (int64_t row = begin; row < end; row += block_rows) {
    block.num_rows = std::min(block_rows, end - row);
    for (int64_t r = 0; r < block.num_rows; ++r)
      row_scales[r] = kernel.quantize(problem.x + (row + r) * problem.x_stride, problem.num_inputs,
                                      problem.activation_bits, rows + r * stride);
    block.out = problem.block.out + row * block.out_stride;
    (problem.activation_bits == 7 ? kernel.gemm7 : kernel.gemm8)(block);
  }
}

// A thread that shares the outputs of a row quantises the row itself: cheaper than waiting for
// another.
void run(const Problem& problem) {
  const LinearInt8& kernel = kernels();
  const int64_t num_tiles = problem.block.tile_end;
  const int64_t work = problem.num_rows * problem.num_inputs * num_tiles * kTileOutputs;
  share_out(work / kWorkPerThread, problem.num_rows, num_tiles, [&](Range rows, Range tiles) {
    Problem mine = problem;
    mine.block.tile_begin = tiles.begin;
    mine.block.tile_end = tiles.end;
    run_rows(kernel, mine, rows.begin, rows.end);
  });
}

}  // namespace

at::Tensor linear_int8(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scale,
                       const std::optional<at::Tensor>& bias,
                       const std::optional<at::Tensor>& negative_slope, int64_t num_outputs,
                       int64_t activation_bits) {
  TORCH_CHECK(x.dim() >= 1 && x.scalar_type() == at::kFloat,
              "linear_int8: x must be float32 [..., K]; got ", x.scalar_type(), " ", x.sizes());
  TORCH_CHECK(activation_bits == 7 || activation_bits == 8,
              "linear_int8: activation_bits must be 7 or 8; got ", activation_bits);
  TORCH_CHECK(num_outputs >= 1, "linear_int8: num_outputs must be at least 1; got ", num_outputs);
  const int64_t num_inputs = x.size(-1);
  TORCH_CHECK(num_inputs <= kMaxInputs, "linear_int8: at most ", kMaxInputs,
              " inputs, or a 32-bit sum could overflow; got ", num_inputs);
  const int64_t num_tiles = divide_up(num_outputs, kTileOutputs);
  const int64_t num_steps = divide_up(num_inputs, kTileInputs);
  const int64_t tiles_bytes = num_tiles * num_steps * kTileBytes;
  const int64_t packed_bytes = tiles_bytes + num_tiles * kTileOutputs * 4;
  TORCH_CHECK(packed.element_size() == 1 && packed.is_contiguous() && packed.numel() == packed_bytes,
              "linear_int8: packed must be ", packed_bytes, " contiguous bytes for ", num_inputs,
              " inputs and ", num_outputs, " outputs; got ", packed.numel(), " of ",
              packed.scalar_type());

  // A row of a matrix may lie anywhere; anything else that is not contiguous is copied.
  const bool strided = x.dim() == 2 && (x.stride(1) == 1 || num_inputs <= 1);
  const at::Tensor rows = strided ? x : x.contiguous();
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = num_outputs;
  at::Tensor out = at::empty(shape, x.options().memory_format(at::MemoryFormat::Contiguous));
  const int64_t num_rows = out.numel() / num_outputs;
  if (num_rows == 0) return out;

  Problem problem{};
  problem.x = rows.const_data_ptr<float>();
  problem.x_stride = strided ? x.stride(0) : num_inputs;
  problem.num_rows = num_rows;
  problem.num_inputs = num_inputs;
  problem.activation_bits = static_cast<int>(activation_bits);
  GemmBlock& block = problem.block;
  block.tiles = static_cast<const int8_t*>(packed.const_data_ptr());
  block.num_steps = num_steps;
  block.tile_end = num_tiles;
  block.num_outputs = num_outputs;
  block.column_sum = block.tiles + tiles_bytes;
  block.scale = float_vector("linear_int8", scale, "scale", num_outputs, false);
  block.bias = float_vector("linear_int8", bias, "bias", num_outputs, false);
  block.slope = float_vector("linear_int8", negative_slope, "negative_slope", num_outputs, true);
  block.slope_per_output = block.slope != nullptr && negative_slope->numel() == num_outputs;
  block.out = out.mutable_data_ptr<float>();
  block.out_stride = num_outputs;
  run(problem);
  return out;
}

}  // namespace rankopt
