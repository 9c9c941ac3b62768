// Target attention: a small MLP over every pair of a candidate and an id of its list.
#include <ATen/ops/empty.h>

#include "attention.h"
#include "attention_parts.h"

namespace rankopt {
namespace {

// Pairs whose hidden units stay in the first-level cache.
constexpr int64_t kBlockPairs = 24;
constexpr int64_t kBlockCandidates = 16;

struct Layer {
  const float *packed, *bias, *slope;
  int64_t num_inputs, num_outputs;
  int64_t activation;
};

int64_t wide_size(int64_t num_outputs, int64_t num_inputs) {
  return divide_up(num_outputs, kTileOutputs) * kTileOutputs * num_inputs;
}

int64_t packed_size(int64_t num_outputs, int64_t num_inputs) {
  if (num_outputs > kNarrowOutputs) return wide_size(num_outputs, num_inputs);
  return num_outputs * divide_up(num_inputs, kLaneInputs) * kLaneInputs;
}

struct Network {
  // Of the first layer: what the candidate, a key and their product are multiplied by.
  const float *of_query, *of_key, *of_product;
  std::vector<Layer> layers;
  int64_t widest = 1;
};

Network network_of(const at::Tensor& weights, at::IntArrayRef widths, at::IntArrayRef activations,
                   int64_t dim) {
  const char* op = "target_attention";
  TORCH_CHECK(weights.scalar_type() == at::kFloat && weights.dim() == 1 && weights.is_contiguous(),
              op, ": weights must be contiguous float32; got ", weights.scalar_type(), " ",
              weights.sizes());
  TORCH_CHECK(widths.size() >= 2 && widths.back() == 1 && activations.size() + 1 == widths.size(),
              op, ": widths must end with 1 and activations be one fewer; got ", widths, " and ",
              activations);
  int64_t expected = 2 * wide_size(widths[0], dim);
  int64_t num_inputs = dim;
  for (size_t i = 0; i < widths.size(); num_inputs = widths[i++])
    expected += (i == 0 ? wide_size(widths[i], dim) : packed_size(widths[i], num_inputs)) +
                2 * widths[i];
  TORCH_CHECK(weights.numel() == expected, op, ": weights must hold ", expected, " values; got ",
              weights.numel());
  const float* at = weights.const_data_ptr<float>();
  const auto take = [&at](int64_t size) { return (at += size) - size; };
  Network network;
  network.of_query = take(wide_size(widths[0], dim));
  network.of_key = take(wide_size(widths[0], dim));
  network.of_product = take(wide_size(widths[0], dim));
  num_inputs = dim;
  for (size_t i = 0; i < widths.size(); num_inputs = widths[i++]) {
    Layer layer{};
    layer.num_inputs = num_inputs;
    layer.num_outputs = widths[i];
    layer.packed = i == 0 ? nullptr : take(packed_size(widths[i], num_inputs));
    layer.bias = take(widths[i]);
    layer.slope = take(widths[i]);
    layer.activation = i < activations.size() ? activations[i] : int64_t{kNone};
    TORCH_CHECK(layer.activation >= kNone && layer.activation <= kSilu, op,
                ": no such activation: ", layer.activation);
    network.layers.push_back(layer);
    network.widest = std::max(network.widest, widths[i]);
  }
  return network;
}

struct Scratch {
  std::vector<float> bias, mixed, hidden, next;
};

void apply(const AttentionSteps& steps, const Layer& layer, Fp32Block block, bool wide) {
  block.bias = layer.bias;
  if (layer.activation == kSlope) {
    block.slope = layer.slope;
    block.slope_per_output = true;
  }
  block.activation = static_cast<Activation>(layer.activation);
  (wide || layer.num_outputs > kNarrowOutputs ? steps.linear.wide : steps.linear.narrow)(block);
}

}  // namespace

at::Tensor target_attention(const at::Tensor& query, const at::Tensor& keys,
                            const at::Tensor& lengths,
                            const std::optional<at::Tensor>& request_index,
                            const at::Tensor& weights, at::IntArrayRef widths,
                            at::IntArrayRef activations, int64_t max_length) {
  const char* op = "target_attention";
  TORCH_CHECK(query.dim() == 2, op, ": query must be [B, D]; got ", query.sizes());
  const int64_t num_rows = query.size(0), dim = query.size(1);
  const Rows queries = rows_of(op, query, "query", num_rows, dim);
  const Rows rows = rows_of(op, keys, "keys", -1, dim);
  const RaggedLists lists = ragged_lists(op, lengths, keys.size(0), max_length);
  const ListOf list_of(op, request_index, num_rows, lengths.size(0));
  const Network network = network_of(weights, widths, activations, dim);
  const int64_t first_width = widths[0];
  const int64_t num_tiles = divide_up(first_width, kTileOutputs);

  int64_t pair_work = dim;
  for (const Layer& layer : network.layers) pair_work += layer.num_inputs * layer.num_outputs;
  int64_t work = 0;
  for (int64_t b = 0; b < num_rows; ++b)
    work += lists.count[list_of[b]] * pair_work + 2 * dim * first_width;
  at::Tensor out =
      at::empty({num_rows, dim}, query.options().memory_format(at::MemoryFormat::Contiguous));
  float* to = out.mutable_data_ptr<float>();
  const AttentionSteps steps = attention_steps();
  over_units<Scratch>(divide_up(num_rows, kBlockCandidates), work, [&](int64_t unit, Scratch& s) {
    const int64_t begin = unit * kBlockCandidates;
    const int64_t end = std::min(begin + kBlockCandidates, num_rows);
    s.bias.resize(kBlockCandidates * first_width);
    s.mixed.resize(num_tiles * kTileOutputs * dim);
    s.hidden.resize(kBlockPairs * network.widest);
    s.next.resize(kBlockPairs * network.widest);
    Fp32Block shares = product(queries.at(begin), queries.stride, end - begin, dim,
                               network.of_query, first_width, s.bias.data(), first_width);
    shares.bias = network.layers[0].bias;
    steps.linear.wide(shares);
    for (int64_t b = begin; b < end; ++b) {
      float* sum = to + b * dim;
      std::fill_n(sum, dim, 0.0f);
      const int64_t list = list_of[b], first = lists.first[list], count = lists.count[list];
      if (count == 0) continue;
      steps.mix(network.of_key, network.of_product, queries.at(b), num_tiles, dim, s.mixed.data());
      Layer mixed = network.layers[0];
      mixed.bias = s.bias.data() + (b - begin) * first_width;
      for (int64_t i = first; i < first + count; i += kBlockPairs) {
        const int64_t num_pairs = std::min(kBlockPairs, first + count - i);
        apply(steps, mixed,
              product(rows.at(i), rows.stride, num_pairs, dim, s.mixed.data(), first_width,
                      s.hidden.data(), first_width),
              true);
        for (size_t l = 1; l < network.layers.size(); ++l) {
          const Layer& layer = network.layers[l];
          apply(steps, layer,
                product(s.hidden.data(), layer.num_inputs, num_pairs, layer.num_inputs,
                        layer.packed, layer.num_outputs, s.next.data(), layer.num_outputs),
                false);
          std::swap(s.hidden, s.next);
        }
        for (int64_t pair = 0; pair < num_pairs; ++pair)
          steps.add_scaled(s.hidden[pair], rows.at(i + pair), dim, sum);
      }
    }
  });
  return out;
}

}  // namespace rankopt
