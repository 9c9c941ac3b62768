// Target attention: a small MLP over every pair of a candidate and an id of its list.
#include <ATen/ops/empty.h>

#include "attention.h"
#include "attention_parts.h"

namespace rankopt {
namespace {

// Pairs whose hidden units stay in the first-level cache.
constexpr int64_t kBlockPairs = 24;
constexpr int64_t kMaxBlockCandidates = 16;

// Candidates that a thread takes at a time: few rows are shared too.
int64_t block_candidates(int64_t num_rows) {
  return std::clamp<int64_t>(divide_up(num_rows, at::get_num_threads()), 1, kMaxBlockCandidates);
}

struct Layer {
  const float *packed, *bias, *slope, *scale, *shift;
  int64_t num_inputs, num_outputs;
  int64_t activation;
};

bool is_dice(int64_t activation) { return activation >= kDice; }

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

Network network_of(const char* op, const at::Tensor& weights, at::IntArrayRef widths,
                   at::IntArrayRef activations, int64_t dim) {
  TORCH_CHECK(weights.scalar_type() == at::kFloat && weights.dim() == 1 && weights.is_contiguous(),
              op, ": weights must be contiguous float32; got ", weights.scalar_type(), " ",
              weights.sizes());
  TORCH_CHECK(widths.size() >= 2 && widths.back() == 1 && activations.size() + 1 == widths.size(),
              op, ": widths must end with 1 and activations be one fewer; got ", widths, " and ",
              activations);
  for (const int64_t activation : activations)
    TORCH_CHECK(activation >= kNone && activation <= kRowDice, op, ": no such activation: ",
                activation);
  const auto activation_of = [&](size_t layer) {
    return layer < activations.size() ? activations[layer] : int64_t{kNone};
  };
  int64_t expected = 2 * wide_size(widths[0], dim);
  int64_t num_inputs = dim;
  for (size_t i = 0; i < widths.size(); num_inputs = widths[i++])
    expected += (i == 0 ? wide_size(widths[i], dim) : packed_size(widths[i], num_inputs)) +
                (is_dice(activation_of(i)) ? 4 : 2) * widths[i];
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
    layer.activation = activation_of(i);
    if (is_dice(layer.activation)) {
      layer.scale = take(widths[i]);
      layer.shift = take(widths[i]);
    }
    network.layers.push_back(layer);
    network.widest = std::max(network.widest, widths[i]);
  }
  return network;
}

struct Scratch {
  std::vector<float> bias, mixed, hidden, next, gathered, weight;
};

void apply(const AttentionSteps& steps, const Layer& layer, Fp32Block block, bool wide) {
  block.bias = layer.bias;
  if (layer.activation == kSlope) {
    block.slope = layer.slope;
    block.slope_per_output = true;
  }
  block.activation = static_cast<Activation>(layer.activation);
  (wide || layer.num_outputs > kNarrowOutputs ? steps.linear.wide : steps.linear.narrow)(block);
  switch (layer.activation) {
    case kDice:
      steps.dice(block.out, block.num_rows, layer.num_outputs, layer.slope, layer.scale,
                 layer.shift);
      break;
    case kRowDice:
      steps.row_dice(block.out, block.num_rows, layer.num_outputs, layer.slope, layer.shift);
      break;
    default:
      break;
  }
}

// Scores pairs of candidates with keys, a block of candidates at a time.
class Scorer {
 public:
  Scorer(const AttentionSteps& steps, const Network& network, const Rows& queries, int64_t dim,
         Scratch& scratch)
      : steps_(steps), network_(network), queries_(queries), dim_(dim), scratch_(scratch) {
    scratch_.bias.resize(kMaxBlockCandidates * width());
    scratch_.mixed.resize(num_tiles() * kTileOutputs * dim);
    scratch_.hidden.resize(kBlockPairs * network.widest);
    scratch_.next.resize(kBlockPairs * network.widest);
  }

  // Computes what the first layer makes of candidates alone.
  void begin(int64_t first, int64_t end) {
    first_ = first;
    Fp32Block shares = product(queries_.at(first), queries_.stride, end - first, dim_,
                               network_.of_query, width(), scratch_.bias.data(), width());
    shares.bias = network_.layers[0].bias;
    steps_.linear.wide(shares);
  }

  // Makes the matrix that one of these candidates multiplies its keys by.
  void choose(int64_t candidate) {
    steps_.mix(network_.of_key, network_.of_product, queries_.at(candidate), num_tiles(), dim_,
               scratch_.mixed.data());
    mixed_ = network_.layers[0];
    mixed_.bias = scratch_.bias.data() + (candidate - first_) * width();
  }

  // The scores of up to kBlockPairs keys with the chosen candidate.
  const float* score(const float* keys, int64_t stride, int64_t num_pairs) {
    Scratch& s = scratch_;
    apply(steps_, mixed_,
          product(keys, stride, num_pairs, dim_, s.mixed.data(), width(), s.hidden.data(), width()),
          true);
    for (size_t l = 1; l < network_.layers.size(); ++l) {
      const Layer& layer = network_.layers[l];
      apply(steps_, layer,
            product(s.hidden.data(), layer.num_inputs, num_pairs, layer.num_inputs, layer.packed,
                    layer.num_outputs, s.next.data(), layer.num_outputs),
            false);
      std::swap(s.hidden, s.next);
    }
    return s.hidden.data();
  }

 private:
  int64_t width() const { return network_.layers[0].num_outputs; }
  int64_t num_tiles() const { return divide_up(width(), kTileOutputs); }

  const AttentionSteps& steps_;
  const Network& network_;
  const Rows& queries_;
  int64_t dim_, first_ = 0;
  Layer mixed_{};
  Scratch& scratch_;
};

// Operations of a pair, and of a candidate alone.
int64_t pair_work(const Network& network, int64_t dim) {
  int64_t work = dim;
  for (const Layer& layer : network.layers) work += layer.num_inputs * layer.num_outputs;
  return work;
}

int64_t candidate_work(const Network& network, int64_t dim) {
  return 2 * dim * network.layers[0].num_outputs;
}

// The keys of one candidate: [H, D], and which of them are scored.
struct Places {
  const float* keys;
  int64_t stride;
  const bool* mask;
  int64_t num_places;

  const float* at(int64_t place) const { return keys + place * stride; }
};

// Writes the scores of the masked places to `weight`.
void score_places(const Places& places, int64_t dim, Scorer& scorer, Scratch& s) {
  int64_t chosen[kBlockPairs];
  for (int64_t h = 0; h < places.num_places;) {
    int64_t count = 0;
    for (; h < places.num_places && count < kBlockPairs; ++h)
      if (places.mask[h]) chosen[count++] = h;
    if (count == 0) return;
    const float* keys = places.at(chosen[0]);
    int64_t stride = places.stride;
    if (chosen[count - 1] - chosen[0] != count - 1) {
      for (int64_t i = 0; i < count; ++i)
        std::copy_n(places.at(chosen[i]), dim, s.gathered.data() + i * dim);
      keys = s.gathered.data();
      stride = dim;
    }
    const float* scores = scorer.score(keys, stride, count);
    for (int64_t i = 0; i < count; ++i) s.weight[chosen[i]] = scores[i];
  }
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
  const Network network = network_of(op, weights, widths, activations, dim);

  int64_t num_pairs = 0;
  for (int64_t b = 0; b < num_rows; ++b) num_pairs += lists.count[list_of[b]];
  const int64_t work =
      num_pairs * pair_work(network, dim) + num_rows * candidate_work(network, dim);
  at::Tensor out =
      at::empty({num_rows, dim}, query.options().memory_format(at::MemoryFormat::Contiguous));
  float* to = out.mutable_data_ptr<float>();
  const AttentionSteps steps = attention_steps();
  const int64_t per_unit = block_candidates(num_rows);
  over_units<Scratch>(divide_up(num_rows, per_unit), work, [&](int64_t unit, Scratch& s) {
    const int64_t begin = unit * per_unit, end = std::min(begin + per_unit, num_rows);
    Scorer scorer(steps, network, queries, dim, s);
    scorer.begin(begin, end);
    for (int64_t b = begin; b < end; ++b) {
      float* sum = to + b * dim;
      std::fill_n(sum, dim, 0.0f);
      const int64_t list = list_of[b], first = lists.first[list], count = lists.count[list];
      if (count == 0) continue;
      scorer.choose(b);
      for (int64_t i = first; i < first + count; i += kBlockPairs) {
        const int64_t num_block = std::min(kBlockPairs, first + count - i);
        const float* scores = scorer.score(rows.at(i), rows.stride, num_block);
        for (int64_t pair = 0; pair < num_block; ++pair)
          steps.add_scaled(scores[pair], rows.at(i + pair), dim, sum);
      }
    }
  });
  return out;
}

at::Tensor masked_target_attention(const at::Tensor& query, const at::Tensor& keys,
                                   const at::Tensor& mask, const at::Tensor& weights,
                                   at::IntArrayRef widths, at::IntArrayRef activations,
                                   bool softmax, double fill) {
  const char* op = "masked_target_attention";
  TORCH_CHECK(query.dim() == 2, op, ": query must be [B, D]; got ", query.sizes());
  const int64_t num_rows = query.size(0), dim = query.size(1);
  const Rows queries = rows_of(op, query, "query", num_rows, dim);
  TORCH_CHECK(keys.scalar_type() == at::kFloat && keys.dim() == 3 && keys.size(0) == num_rows &&
                  keys.size(2) == dim,
              op, ": keys must be float32 [", num_rows, ", H, ", dim, "]; got ",
              keys.scalar_type(), " ", keys.sizes());
  const int64_t num_places = keys.size(1);
  TORCH_CHECK(mask.scalar_type() == at::kBool && mask.dim() == 2 && mask.size(0) == num_rows &&
                  mask.size(1) == num_places,
              op, ": mask must be bool [", num_rows, ", ", num_places, "]; got ",
              mask.scalar_type(), " ", mask.sizes());
  TORCH_CHECK(softmax || fill == 0.0, op, ": fill must be 0 without softmax; got ", fill);
  const at::Tensor held_keys = keys.stride(2) == 1 || dim <= 1 ? keys : keys.contiguous();
  const at::Tensor held_mask = mask.contiguous();
  const float* key = held_keys.const_data_ptr<float>();
  const bool* present = held_mask.const_data_ptr<bool>();
  const Network network = network_of(op, weights, widths, activations, dim);

  const int64_t num_pairs = std::count(present, present + num_rows * num_places, true);
  const int64_t work =
      num_pairs * pair_work(network, dim) + num_rows * candidate_work(network, dim);
  at::Tensor out =
      at::empty({num_rows, dim}, query.options().memory_format(at::MemoryFormat::Contiguous));
  float* to = out.mutable_data_ptr<float>();
  const AttentionSteps steps = attention_steps();
  const int64_t per_unit = block_candidates(num_rows);
  over_units<Scratch>(divide_up(num_rows, per_unit), work, [&](int64_t unit, Scratch& s) {
    const int64_t begin = unit * per_unit, end = std::min(begin + per_unit, num_rows);
    s.gathered.resize(kBlockPairs * dim);
    s.weight.resize(num_places);
    Scorer scorer(steps, network, queries, dim, s);
    scorer.begin(begin, end);
    for (int64_t b = begin; b < end; ++b) {
      float* sum = to + b * dim;
      std::fill_n(sum, dim, 0.0f);
      const Places places{key + b * held_keys.stride(0), held_keys.stride(1),
                          present + b * num_places, num_places};
      const bool any = std::find(places.mask, places.mask + num_places, true) !=
                       places.mask + num_places;
      if (num_places == 0 || (!any && !softmax)) continue;
      std::fill_n(s.weight.data(), num_places, static_cast<float>(fill));
      if (any) {
        scorer.choose(b);
        score_places(places, dim, scorer, s);
      }
      if (softmax) steps.shares(s.weight.data(), num_places);
      for (int64_t h = 0; h < num_places; ++h)
        if (places.mask[h] || s.weight[h] != 0.0f)
          steps.add_scaled(s.weight[h], places.at(h), dim, sum);
    }
  });
  return out;
}

}  // namespace rankopt
