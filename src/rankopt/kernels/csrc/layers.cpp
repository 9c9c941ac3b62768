// Checks, blocks of rows, threads.
//
// Many rows: threads share the rows, and each takes a block of its rows through all layers while it
// is in the cache. Few rows: threads share the outputs of each layer and wait for one another
// between two layers, which costs less than waking them again.
#include "layers.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>

#include "isa.h"
#include "launch.h"
#include "linear_fp16.h"

namespace rankopt {
namespace {

struct Kernels {
  const LinearInt8& int8;
  const LinearFp32& fp32;
  const LinearFp32& fp16;  // the same sums of fp16 weights
  // Multiply-adds of one core in a nanosecond, roughly: only for deciding how many threads to wake.
  double int8_rate, fp32_rate;
};

Kernels kernels() {
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx2:
      return {linear_int8_avx2(), linear_fp32_avx2(), linear_fp16_avx2(), 100, 40};
    case Isa::kAvx512:
      return {linear_int8_avx512(), linear_fp32_avx512(), linear_fp16_avx512(), 200, 80};
    case Isa::kAvx512Vnni:
      return {linear_int8_avx512_vnni(), linear_fp32_avx512(), linear_fp16_avx512(), 400, 80};
#endif
    default:
      return {linear_int8_scalar(), linear_fp32_scalar(), linear_fp16_scalar(), 2, 0.5};
  }
}

// Waking a thread and waiting for it costs a few microseconds: with less to do for each, one alone
// is faster.
constexpr double kThreadNs = 4000;
constexpr double kWeightBytesPerNs = 64;
// What reading a row and adding up its lanes costs in a narrow fp32 layer, in multiply-adds.
constexpr int64_t kNarrowRowWork = 64;
// What an int8 layer does for each row and each of its inputs beside multiplying: most of the time of
// a narrow one. 80-40-1 at batch 512 took two threads three quarters of what one did, and products
// alone would not have woken the second.
constexpr double kQuantiseRowNs = 6, kQuantiseInputNs = 0.035;
// A block of rows between two layers: it stays in the second-level cache beside the weights.
constexpr int64_t kBlockBytes = 384 << 10;
constexpr int64_t kMinBlockRows = 40, kMaxBlockRows = 640;

// A multiple of 64 bytes plus 64: rows a power of two apart would share cache sets.
constexpr int64_t row_stride(int64_t size_bytes) { return divide_up(size_bytes, 64) * 64 + 64; }

struct Layer {
  bool is_int8;
  bool is_fp16;    // its weights; sums are fp32
  bool is_fixed;   // its inputs are scaled by a fixed peak, not by each row's own
  RowScale fixed;
  int64_t num_inputs;
  int64_t num_outputs;
  int64_t num_tiles;
  GemmBlock int8;  // all but the rows
  Fp32Block fp32;  // all but the rows
};

using Layers = c10::SmallVector<Layer, 6>;

// Whether a layer's epilogue writes what the next one reads as levels.
bool hands_levels_on(const Layers& layers, size_t index) {
  return index + 1 < layers.size() && layers[index].is_int8 && layers[index + 1].is_fixed;
}

int64_t packed_fp32_size(int64_t num_outputs, int64_t num_inputs) {
  if (num_outputs <= kNarrowOutputs)
    return num_outputs * divide_up(num_inputs, kLaneInputs) * kLaneInputs;
  return divide_up(num_outputs, kTileOutputs) * kTileOutputs * num_inputs;
}

void check_int8(const char* op, const LayerTensors& tensors, int activation_bits, Layer& layer) {
  TORCH_CHECK(layer.num_inputs <= kMaxInputs, op, ": at most ", kMaxInputs,
              " inputs, or a 32-bit sum could overflow; got ", layer.num_inputs);
  const int64_t num_steps = divide_up(layer.num_inputs, kTileInputs);
  const int64_t tiles_bytes = layer.num_tiles * num_steps * kTileBytes;
  const int64_t packed_bytes = tiles_bytes + layer.num_tiles * kTileOutputs * 4;
  const at::Tensor& packed = *tensors.packed;
  TORCH_CHECK(packed.element_size() == 1 && packed.is_contiguous() && packed.numel() == packed_bytes,
              op, ": packed must be ", packed_bytes, " contiguous bytes for ", layer.num_inputs,
              " inputs and ", layer.num_outputs, " outputs; got ", packed.numel(), " of ",
              packed.scalar_type());
  GemmBlock& block = layer.int8;
  block.tiles = static_cast<const int8_t*>(packed.const_data_ptr());
  block.num_steps = num_steps;
  block.num_outputs = layer.num_outputs;
  block.column_sum = block.tiles + tiles_bytes;
  block.scale = float_vector(op, tensors.scale, "scale", layer.num_outputs, false);
  block.activation_bits = activation_bits;
  if (tensors.peak == nullptr) return;
  const float peak = *float_vector(op, tensors.peak, "peak", 1, true);
  uint32_t bits;
  std::memcpy(&bits, &peak, sizeof(bits));
  TORCH_CHECK(bits >= kTinyBits && bits < kInfinityBits, op,
              ": peak must be finite and at least 2^-100; got ", peak);
  layer.is_fixed = true;
  layer.fixed = row_scale(bits, levels_of(activation_bits));
}

void check_fp32(const char* op, const LayerTensors& tensors, Layer& layer) {
  const int64_t size = packed_fp32_size(layer.num_outputs, layer.num_inputs);
  const at::Tensor& packed = *tensors.packed;
  layer.is_fp16 = packed.scalar_type() == at::kHalf;
  TORCH_CHECK((layer.is_fp16 || packed.scalar_type() == at::kFloat) && packed.is_contiguous() &&
                  packed.numel() == size,
              op, ": packed must be ", size, " contiguous ",
              layer.is_fp16 ? "float16" : "float32", " values for ", layer.num_inputs,
              " inputs and ", layer.num_outputs, " outputs; got ", packed.numel(), " of ",
              packed.scalar_type());
  Fp32Block& block = layer.fp32;
  block.num_inputs = layer.num_inputs;
  block.weights = packed.const_data_ptr();
  block.num_outputs = layer.num_outputs;
}

Layer check_layer(const char* op, int64_t num_inputs, const LayerTensors& tensors,
                  int activation_bits) {
  TORCH_CHECK(tensors.num_outputs >= 1, op, ": num_outputs must be at least 1; got ",
              tensors.num_outputs);
  Layer layer{};
  layer.is_int8 = tensors.scale != nullptr;
  layer.num_inputs = num_inputs;
  layer.num_outputs = tensors.num_outputs;
  layer.num_tiles = divide_up(tensors.num_outputs, kTileOutputs);
  if (layer.is_int8)
    check_int8(op, tensors, activation_bits, layer);
  else
    check_fp32(op, tensors, layer);
  const float* bias = float_vector(op, tensors.bias, "bias", layer.num_outputs, false);
  const float* slope = float_vector(op, tensors.slope, "negative_slope", layer.num_outputs, true);
  TORCH_CHECK(tensors.activation == kNone || tensors.activation == kSigmoid ||
                  tensors.activation == kSilu,
              op, ": activation must be 0 (none), 2 (sigmoid) or 3 (silu); got ",
              tensors.activation);
  layer.int8.activation = layer.fp32.activation = static_cast<Activation>(tensors.activation);
  layer.int8.bias = layer.fp32.bias = bias;
  layer.int8.slope = layer.fp32.slope = slope;
  layer.int8.slope_per_output = layer.fp32.slope_per_output =
      slope != nullptr && tensors.slope->numel() == layer.num_outputs;
  return layer;
}

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

template <class T>
struct Matrix {
  T* data;
  int64_t stride;  // elements

  Matrix from(int64_t row) const { return {data + row * stride, stride}; }
};

// What the rows of a block need between two layers: quantised ones, with their scales, and floats.
struct Workspace {
  int64_t levels_stride = 0;  // bytes of a quantised row; 0 where no layer is int8
  int64_t num_levels = 0;     // buffers: a layer may write levels while it reads others
  int64_t hidden_stride = 0;  // floats of a row between two layers; 0 for one layer
  int64_t num_hidden = 0;     // buffers: an fp32 layer cannot write over what it reads

  Workspace(const Layers& layers, bool shared) {
    int64_t widest = -1, hidden = 0;
    for (size_t i = 0; i < layers.size(); ++i) {
      if (layers[i].is_int8) widest = std::max(widest, layers[i].num_inputs);
      if (i + 1 < layers.size()) hidden = std::max(hidden, layers[i].num_outputs);
      if (i > 0 && i + 1 < layers.size() && (shared || !layers[i].is_int8)) num_hidden = 2;
      if (i > 0 && hands_levels_on(layers, i - 1)) num_levels = 2;
    }
    if (widest >= 0) {
      levels_stride = row_stride(divide_up(widest, kTileInputs) * kTileInputs);
      num_levels = std::max<int64_t>(num_levels, 1);
    }
    if (hidden > 0) {
      hidden_stride = row_stride(hidden * int64_t{sizeof(float)}) / int64_t{sizeof(float)};
      num_hidden = std::max<int64_t>(num_hidden, 1);
    }
  }

  // Of one buffer, the rows' scales behind the rows.
  int64_t levels_bytes(int64_t rows) const {
    return divide_up(rows * (levels_stride + int64_t{sizeof(float)}), 64) * 64;
  }
  int64_t hidden_bytes(int64_t rows) const {
    return num_hidden * rows * hidden_stride * int64_t{sizeof(float)};
  }
  int64_t row_bytes() const { return num_levels * levels_bytes(64) / 64 + hidden_bytes(1); }
};

struct Call {
  Kernels kernels;
  Layers layers;
  int activation_bits;
  Matrix<const float> x;
  Matrix<float> out;
  int64_t num_rows;
};

// Quantised rows and their scales.
struct Levels {
  uint8_t* rows;
  float* scales;

  Levels(uint8_t* bytes, int64_t num_rows, int64_t stride)
      : rows(bytes), scales(reinterpret_cast<float*>(bytes + num_rows * stride)) {}
};

void quantize_rows(const Call& call, const Layer& layer, Matrix<const float> in, int64_t num_rows,
                   Levels levels, int64_t stride) {
  const QuantizeBlock block{in.data, in.stride, num_rows, layer.num_inputs, call.activation_bits,
                            levels.rows, stride, levels.scales};
  if (layer.is_fixed)
    call.kernels.int8.quantize_fixed(block, layer.fixed);
  else
    call.kernels.int8.quantize(block);
}

void multiply_fp32(const Call& call, const Layer& layer, Matrix<const float> in, Matrix<float> out,
                   int64_t num_rows, Range tiles) {
  Fp32Block block = layer.fp32;
  block.x = in.data;
  block.x_stride = in.stride;
  block.num_rows = num_rows;
  block.tile_begin = tiles.begin;
  block.tile_end = tiles.end;
  block.out = out.data;
  block.out_stride = out.stride;
  const LinearFp32& kernel = layer.is_fp16 ? call.kernels.fp16 : call.kernels.fp32;
  (layer.num_outputs <= kNarrowOutputs ? kernel.narrow : kernel.wide)(block);
}

// Into `next` where it is given, else into `out`.
void multiply_int8(const Call& call, const Layer& layer, Levels levels, int64_t stride,
                   Matrix<float> out, const Levels* next, float next_inverse, int64_t num_rows,
                   Range tiles) {
  GemmBlock block = layer.int8;
  block.rows = levels.rows;
  block.stride = stride;
  block.row_scales = levels.scales;
  block.num_rows = num_rows;
  block.tile_begin = tiles.begin;
  block.tile_end = tiles.end;
  block.out = out.data;
  block.out_stride = out.stride;
  if (next != nullptr) {
    block.levels = next->rows;
    block.levels_stride = stride;
    block.levels_inverse = next_inverse;
    block.next_scales = next->scales;
  }
  (call.activation_bits == 7 ? call.kernels.int8.gemm7 : call.kernels.int8.gemm8)(block);
}

// Rows that lie together through all layers, on this thread alone.
void run_block(const Call& call, const Workspace& space, uint8_t* bytes, int64_t row,
               int64_t num_rows) {
  const int64_t stride = space.levels_stride, levels_bytes = space.levels_bytes(num_rows);
  const Levels sides[2] = {{bytes, num_rows, stride}, {bytes + levels_bytes, num_rows, stride}};
  float* hidden = reinterpret_cast<float*>(bytes + space.num_levels * levels_bytes);
  float* free = hidden;
  Matrix<const float> in = call.x.from(row);
  bool quantized = false;
  int side = 0;
  for (size_t i = 0; i < call.layers.size(); ++i) {
    const Layer& layer = call.layers[i];
    const bool last = i + 1 == call.layers.size();
    // An int8 layer has read its input into levels before it writes: over the same buffer.
    if (i > 0 && !last && !layer.is_int8)
      free = in.data == hidden ? hidden + num_rows * space.hidden_stride : hidden;
    const Matrix<float> out = last ? call.out.from(row) : Matrix<float>{free, space.hidden_stride};
    const Range tiles{0, layer.num_tiles};
    if (!layer.is_int8) {
      multiply_fp32(call, layer, in, out, num_rows, tiles);
    } else {
      if (!quantized) quantize_rows(call, layer, in, num_rows, sides[side], stride);
      quantized = hands_levels_on(call.layers, i);
      const Levels* next = quantized ? &sides[1 - side] : nullptr;
      if (quantized) std::fill_n(next->scales, num_rows, call.layers[i + 1].fixed.scale);
      multiply_int8(call, layer, sides[side], stride, out, next,
                    quantized ? call.layers[i + 1].fixed.inverse : 0.0f, num_rows, tiles);
      if (quantized) side = 1 - side;
    }
    in = {out.data, out.stride};
  }
}

// Rows [begin, end) through all layers, block by block, on this thread alone.
void run_rows(const Call& call, Range rows) {
  thread_local Scratch scratch;
  const Workspace space(call.layers, false);
  const int64_t most = std::clamp(kBlockBytes / std::max<int64_t>(space.row_bytes(), 1),
                                  kMinBlockRows, kMaxBlockRows);
  // Even blocks: 650 rows at most 640 at a time are two of 325.
  const int64_t num_blocks = divide_up(rows.end - rows.begin, most);
  const int64_t block_rows = divide_up(rows.end - rows.begin, num_blocks);
  uint8_t* bytes = scratch.bytes(space.num_levels * space.levels_bytes(block_rows) +
                                 space.hidden_bytes(block_rows));
  for (int64_t row = rows.begin; row < rows.end; row += block_rows)
    run_block(call, space, bytes, row, std::min(block_rows, rows.end - row));
}

// Parts of a layer that wait for all parts before the next layer begins. It counts parts and not
// threads: a thread that was given several adds them all.
class Barrier {
 public:
  void pass(int64_t parts, int64_t target) {
    done_.fetch_add(parts, std::memory_order_acq_rel);
    for (int spins = 0; done_.load(std::memory_order_acquire) < target; ++spins) {
      if (spins > kSpins) std::this_thread::yield();
#if defined(__x86_64__)
      else __builtin_ia32_pause();
#endif
    }
  }

 private:
  static constexpr int kSpins = 2000;
  std::atomic<int64_t> done_{0};
};

// All rows at once; each layer's outputs are shared by `num_parts` threads. A part quantises the
// rows itself, cheaper than waiting for another; levels that an epilogue writes are shared.
void run_outputs(const Call& call, int64_t num_parts) {
  thread_local Scratch scratch;
  const Workspace space(call.layers, true);
  const int64_t num_rows = call.num_rows, stride = space.levels_stride;
  const int64_t levels_bytes = space.levels_bytes(num_rows);
  const int64_t num_layers = static_cast<int64_t>(call.layers.size());
  // One allocation here: nothing may throw while others wait at the barrier.
  const int64_t num_shared = space.num_levels > 1 ? num_layers : 0;
  uint8_t* bytes = scratch.bytes((num_parts + num_shared) * levels_bytes +
                                 space.hidden_bytes(num_rows));
  uint8_t* shared = bytes + num_parts * levels_bytes;
  float* hidden = reinterpret_cast<float*>(shared + num_shared * levels_bytes);
  // Before any part can find a row spoiled.
  for (int64_t i = 0; i < num_shared; ++i)
    if (call.layers[i].is_fixed)
      std::fill_n(Levels(shared + i * levels_bytes, num_rows, stride).scales, num_rows,
                  call.layers[i].fixed.scale);
  Barrier barrier;
  at::parallel_for(0, num_parts, 1, [&](int64_t first, int64_t end) {
    Matrix<const float> in = call.x;
    bool quantized = false;
    for (int64_t i = 0; i < num_layers; ++i) {
      const Layer& layer = call.layers[i];
      const bool last = i + 1 == num_layers;
      const Matrix<float> out =
          last ? call.out
               : Matrix<float>{hidden + i % 2 * num_rows * space.hidden_stride, space.hidden_stride};
      const Range tiles{layer.num_tiles * first / num_parts, layer.num_tiles * end / num_parts};
      const bool hands_on = hands_levels_on(call.layers, i);
      if (tiles.begin < tiles.end && !layer.is_int8) {
        multiply_fp32(call, layer, in, out, num_rows, tiles);
      } else if (tiles.begin < tiles.end) {
        const Levels own(bytes + first * levels_bytes, num_rows, stride);
        if (!quantized) quantize_rows(call, layer, in, num_rows, own, stride);
        const Levels levels = quantized ? Levels(shared + i * levels_bytes, num_rows, stride) : own;
        const Levels next(shared + (i + 1) * levels_bytes, num_rows, stride);
        multiply_int8(call, layer, levels, stride, out, hands_on ? &next : nullptr,
                      hands_on ? call.layers[i + 1].fixed.inverse : 0.0f, num_rows, tiles);
      }
      if (!last) barrier.pass(end - first, (i + 1) * num_parts);
      quantized = hands_on;
      in = {out.data, out.stride};
    }
  });
}

double estimated_ns(const Call& call) {
  double total = 0;
  for (const Layer& layer : call.layers) {
    const int64_t outputs = layer.num_tiles * kTileOutputs;
    double weights = static_cast<double>(outputs * layer.num_inputs), work = weights;
    if (!layer.is_int8) {
      weights *= layer.is_fp16 ? 2.0 : 4.0;
      if (layer.num_outputs <= kNarrowOutputs)
        work = static_cast<double>(layer.num_outputs * (layer.num_inputs + kNarrowRowWork));
    }
    double row_ns = work / (layer.is_int8 ? call.kernels.int8_rate : call.kernels.fp32_rate);
    if (layer.is_int8)
      row_ns += kQuantiseRowNs + kQuantiseInputNs * static_cast<double>(layer.num_inputs);
    total += std::max(weights / kWeightBytesPerNs, static_cast<double>(call.num_rows) * row_ns);
  }
  return total;
}

void run(const Call& call) {
  const int64_t wanted = static_cast<int64_t>(std::min(estimated_ns(call) / kThreadNs, 1e6));
  const int64_t num_threads = std::clamp<int64_t>(wanted, 1, at::get_num_threads());
  if (num_threads == 1 || at::in_parallel_region()) return run_rows(call, {0, call.num_rows});
  // With fewer than about eight rows each, reading all weights costs a thread more than waiting.
  if (divide_up(call.num_rows, 8) < num_threads) return run_outputs(call, num_threads);
  at::parallel_for(0, num_threads, 1, [&](int64_t first, int64_t end) {
    run_rows(call, {call.num_rows * first / num_threads, call.num_rows * end / num_threads});
  });
}

}  // namespace

at::Tensor run_layers(const char* op, const at::Tensor& x, c10::ArrayRef<LayerTensors> layers,
                      int64_t activation_bits) {
  TORCH_CHECK(x.dim() >= 1 && x.scalar_type() == at::kFloat, op,
              ": x must be float32 [..., K]; got ", x.scalar_type(), " ", x.sizes());
  TORCH_CHECK(activation_bits == 7 || activation_bits == 8, op,
              ": activation_bits must be 7 or 8; got ", activation_bits);
  TORCH_CHECK(!layers.empty(), op, ": there must be at least one layer");
  Call call{kernels(), {}, static_cast<int>(activation_bits), {}, {}, 0};
  int64_t num_inputs = x.size(-1);
  for (const LayerTensors& tensors : layers) {
    call.layers.push_back(check_layer(op, num_inputs, tensors, call.activation_bits));
    num_inputs = tensors.num_outputs;
  }

  // A row of a matrix may lie anywhere; anything else that is not contiguous is copied.
  const bool strided = x.dim() == 2 && (x.stride(1) == 1 || x.size(1) <= 1);
  std::optional<at::Tensor> copy;
  if (!strided && !x.is_contiguous()) copy = x.contiguous();
  c10::SmallVector<int64_t, 5> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = num_inputs;
  // Past the dispatcher, which would take longer than a small layer.
  at::Tensor out = at::detail::empty_cpu(shape, at::kFloat);
  call.num_rows = out.numel() / num_inputs;
  if (call.num_rows == 0) return out;
  call.x = {(copy ? *copy : x).const_data_ptr<float>(), strided ? x.stride(0) : x.size(-1)};
  call.out = {out.mutable_data_ptr<float>(), num_inputs};
  run(call);
  return out;
}

}  // namespace rankopt
