// The operator around the linear_fp32 kernels: checks, blocks, threads.
#include "linear_fp32.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "isa.h"
#include "launch.h"
#include "ops.h"

namespace rankopt {
namespace {

const LinearFp32& kernels() {
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx2:
      return linear_fp32_avx2();
    case Isa::kAvx512:
    case Isa::kAvx512Vnni:
      return linear_fp32_avx512();
#endif
    default:
      return linear_fp32_scalar();
  }
}

// As in linear_int8.cpp; here a multiply-add costs about four times as much.
constexpr int64_t kWorkPerThread = 1 << 17;
// What reading a row and adding up its lanes costs in a narrow layer, in multiply-adds.
constexpr int64_t kNarrowRowWork = 64;
// Rows and their results that stay in the second-level cache beside the weights.
constexpr int64_t kRowBlockBytes = 256 << 10;

void run(const Fp32Block& whole) {
  const LinearFp32& kernel = kernels();
  const bool is_narrow = whole.num_outputs <= kNarrowOutputs;
  const int64_t row_work = is_narrow ? whole.num_outputs * (whole.num_inputs + kNarrowRowWork)
                                     : whole.tile_end * kTileOutputs * whole.num_inputs;
  const int64_t row_bytes = (whole.num_inputs + whole.num_outputs) * int64_t{sizeof(float)};
  const int64_t block_rows = std::max<int64_t>(48, kRowBlockBytes / row_bytes);
  const int64_t wanted = whole.num_rows * row_work / kWorkPerThread;
  share_out(wanted, whole.num_rows, whole.tile_end, [&](Range rows, Range tiles) {
    Fp32Block block = whole;
    block.tile_begin = tiles.begin;
    block.tile_end = tiles.end;
    for (int64_t row = rows.begin; row < rows.end; row += block_rows) {
      block.num_rows = std::min(block_rows, rows.end - row);
      block.x = whole.x + row * whole.x_stride;
      block.out = whole.out + row * whole.out_stride;
      (is_narrow ? kernel.narrow : kernel.wide)(block);
    }
  });
}

int64_t packed_size(int64_t num_outputs, int64_t num_inputs) {
  if (num_outputs <= kNarrowOutputs)
    return num_outputs * divide_up(num_inputs, kLaneInputs) * kLaneInputs;
  return divide_up(num_outputs, kTileOutputs) * kTileOutputs * num_inputs;
}

}  // namespace

at::Tensor linear_fp32(const at::Tensor& x, const at::Tensor& packed,
                       const std::optional<at::Tensor>& bias,
                       const std::optional<at::Tensor>& negative_slope, int64_t num_outputs) {
  TORCH_CHECK(x.dim() >= 1 && x.scalar_type() == at::kFloat,
              "linear_fp32: x must be float32 [..., K]; got ", x.scalar_type(), " ", x.sizes());
  TORCH_CHECK(num_outputs >= 1, "linear_fp32: num_outputs must be at least 1; got ", num_outputs);
  const int64_t num_inputs = x.size(-1);
  const int64_t size = packed_size(num_outputs, num_inputs);
  TORCH_CHECK(packed.scalar_type() == at::kFloat && packed.is_contiguous() && packed.numel() == size,
              "linear_fp32: packed must be ", size, " contiguous float32 values for ", num_inputs,
              " inputs and ", num_outputs, " outputs; got ", packed.numel(), " of ",
              packed.scalar_type());

  // A row of a matrix may lie anywhere; anything else that is not contiguous is copied.
  const bool strided = x.dim() == 2 && (x.stride(1) == 1 || num_inputs <= 1);
  const at::Tensor rows = strided ? x : x.contiguous();
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = num_outputs;
  at::Tensor out = at::empty(shape, x.options().memory_format(at::MemoryFormat::Contiguous));

  Fp32Block block{};
  block.x = rows.const_data_ptr<float>();
  block.x_stride = strided ? x.stride(0) : num_inputs;
  block.num_rows = out.numel() / num_outputs;
  block.num_inputs = num_inputs;
  block.weights = packed.const_data_ptr<float>();
  block.tile_end = divide_up(num_outputs, kTileOutputs);
  block.num_outputs = num_outputs;
  block.bias = float_vector("linear_fp32", bias, "bias", num_outputs, false);
  block.slope = float_vector("linear_fp32", negative_slope, "negative_slope", num_outputs, true);
  block.slope_per_output = block.slope != nullptr && negative_slope->numel() == num_outputs;
  block.out = out.mutable_data_ptr<float>();
  block.out_stride = num_outputs;
  if (block.num_rows > 0) run(block);
  return out;
}

}  // namespace rankopt
