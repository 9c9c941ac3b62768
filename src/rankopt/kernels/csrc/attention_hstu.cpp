// HSTU attention: per sequence and head two products with the step between them.
#include <ATen/ops/empty.h>

#include "attention.h"
#include "attention_parts.h"

namespace rankopt {
namespace {

// Queries that share a pass over the keys: their scores stay in the first-level cache.
constexpr int64_t kBlockQueries = 24;

struct Sequences {
  const char* op;
  int64_t num_heads, head_width, num_context, max_length, num_lists;
  bool align_right;
  float score_scale, weight_scale;
  std::vector<float> bias;  // [heads, 2 S - 1] and room for a vector; empty: none
  Rows k, v;
  RaggedLists lists;

  int64_t num_positions() const { return num_context + max_length + 1; }
  int64_t num_keys(int64_t list) const { return num_context + lists.count[list]; }
  int64_t num_biases() const { return 2 * num_positions() - 1; }
  // Of the first id of a list that counts.
  int64_t first_position(int64_t list) const {
    return num_context + (align_right ? max_length - lists.count[list] : 0);
  }
  // Row of that id among the tokens.
  int64_t first_row(int64_t list) const { return num_lists * num_context + lists.first[list]; }
  int64_t head_at(int64_t head) const { return head * head_width; }
};

Sequences sequences_of(const char* op, const at::Tensor& q, const at::Tensor& k,
                       const at::Tensor& v, const at::Tensor& lengths,
                       const std::optional<at::Tensor>& bias, int64_t num_heads,
                       int64_t num_context, int64_t max_length, bool align_right,
                       double score_scale, double weight_scale) {
  TORCH_CHECK(q.dim() == 2 && num_heads >= 1 && q.size(1) % num_heads == 0, op,
              ": q must be [N, heads * K] with ", num_heads, " heads; got ", q.sizes());
  TORCH_CHECK(num_context >= 0, op, ": num_context must be at least 0; got ", num_context);
  const int64_t width = q.size(1);
  Sequences s{};
  s.op = op;
  s.num_heads = num_heads;
  s.head_width = width / num_heads;
  s.num_context = num_context;
  s.max_length = max_length;
  s.num_lists = lengths.numel();
  s.align_right = align_right;
  s.score_scale = static_cast<float>(score_scale);
  s.weight_scale = static_cast<float>(weight_scale);
  s.k = rows_of(op, k, "k", -1, width);
  s.v = rows_of(op, v, "v", k.size(0), width);
  s.lists = ragged_lists(op, lengths, k.size(0) - s.num_lists * num_context, max_length);
  if (bias.has_value() && bias->defined()) {
    TORCH_CHECK(bias->scalar_type() == at::kFloat && bias->is_contiguous() && bias->dim() == 2 &&
                    bias->size(0) == num_heads && bias->size(1) == s.num_biases(),
                op, ": bias must be contiguous float32 [", num_heads, ", ", s.num_biases(), "]; got ", bias->scalar_type(), " ", bias->sizes());
    s.bias.resize(bias->numel() + kTileOutputs);
    std::copy_n(bias->const_data_ptr<float>(), bias->numel(), s.bias.data());
  }
  return s;
}

struct Scratch {
  std::vector<float> keys, values, scores, bias;
  int64_t scores_stride = 0;
  int64_t list = -1, head = -1;

  // Lays the keys and values of one head of a list out as the products read them.
  void pack(const Sequences& s, const AttentionSteps& steps, int64_t list, int64_t head) {
    const int64_t n = s.num_keys(list), width = s.head_width, context = s.num_context;
    keys.resize(divide_up(n, kTileOutputs) * kTileOutputs * width);
    values.resize(divide_up(width, kTileOutputs) * kTileOutputs * n);
    scores_stride = divide_up(n, kTileOutputs) * kTileOutputs;
    scores.resize(kBlockQueries * scores_stride);
    bias.resize(scores_stride);
    const int64_t first = s.first_row(list), at = s.head_at(head), count = n - context;
    steps.interleave(s.k.at(list * context) + at, s.k.stride, context, width, 0, keys.data());
    steps.interleave(s.k.at(first) + at, s.k.stride, count, width, context, keys.data());
    steps.columns(s.v.at(list * context) + at, s.v.stride, context, width, 0, n, values.data());
    steps.columns(s.v.at(first) + at, s.v.stride, count, width, context, n, values.data());
  }
};

// Query r of a block stands at `position` and sees the first num_keys of the list's keys.
void weigh_query(const Sequences& s, const AttentionSteps& steps, Scratch& scratch, int64_t list,
                 int64_t head, int64_t position, int64_t num_keys, int64_t r) {
  const float* bias = nullptr;
  if (!s.bias.empty()) {
    bias = s.bias.data() + (head * 2 + 1) * s.num_positions() - head - 1 - position;
    const int64_t first = s.first_position(list), context = s.num_context;
    // Ids that do not come right after the context.
    if (first != context && num_keys > context) {
      std::copy_n(bias, context, scratch.bias.data());
      std::copy_n(bias + first, num_keys - context, scratch.bias.data() + context);
      bias = scratch.bias.data();
    }
  }
  steps.weigh(scratch.scores.data() + r * scratch.scores_stride, num_keys, bias, s.score_scale,
              s.weight_scale);
}

// out[r] = sum over the first num_keys of weights[r][j] * v[j], one tile of columns at a time: a
// tile is as long as the list has keys, and a block of queries may need fewer.
void gather(const Sequences& s, const AttentionSteps& steps, const Scratch& scratch, int64_t list,
            int64_t num_queries, int64_t num_keys, float* out, int64_t out_stride) {
  const int64_t n = s.num_keys(list);
  for (int64_t d = 0; d < s.head_width; d += kTileOutputs) {
    const Fp32Block block = product(scratch.scores.data(), scratch.scores_stride, num_queries,
                                    num_keys,
                                    scratch.values.data() + d * n,
                                    std::min(kTileOutputs, s.head_width - d), out + d, out_stride);
    steps.linear.wide(block);
  }
}

// The queries [begin, end) of a list, by the number of the key they stand at; all in one run of
// rows, the first at `rows`, and of positions, the first at `position`.
void attend(const Sequences& s, const AttentionSteps& steps, Scratch& scratch, int64_t list,
            int64_t head, bool causal, const Rows& q, int64_t row, int64_t position, int64_t begin,
            int64_t end, float* out) {
  const int64_t n = s.num_keys(list), at = s.head_at(head), width = s.num_heads * s.head_width;
  for (int64_t i = begin; i < end; i += kBlockQueries) {
    const int64_t num_queries = std::min(kBlockQueries, end - i), from = row + i - begin;
    const int64_t num_keys = causal ? i + num_queries : n;
    float* scores = scratch.scores.data();
    steps.linear.wide(product(q.at(from) + at, q.stride, num_queries, s.head_width,
                              scratch.keys.data(), num_keys, scores, scratch.scores_stride));
    for (int64_t r = 0; r < num_queries; ++r, scores += scratch.scores_stride) {
      const int64_t seen = causal ? i + r + 1 : n;
      weigh_query(s, steps, scratch, list, head, position + i - begin + r, seen, r);
      std::fill(scores + seen, scores + num_keys, 0.0f);
    }
    gather(s, steps, scratch, list, num_queries, num_keys, out + from * width + at, width);
  }
}

}  // namespace

at::Tensor hstu_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& lengths, const std::optional<at::Tensor>& bias,
                          int64_t num_heads, int64_t num_context, int64_t max_length,
                          bool align_right, bool causal, double score_scale, double weight_scale) {
  const char* op = "hstu_attention";
  const Sequences s = sequences_of(op, q, k, v, lengths, bias, num_heads, num_context, max_length,
                                   align_right, score_scale, weight_scale);
  const int64_t width = q.size(1), num_rows = k.size(0);
  const Rows queries = rows_of(op, q, "q", num_rows, width);
  at::Tensor out =
      at::empty({num_rows, width}, q.options().memory_format(at::MemoryFormat::Contiguous));
  float* to = out.mutable_data_ptr<float>();
  int64_t work = 0, end = s.num_lists * num_context;
  for (int64_t r = 0; r < s.num_lists; ++r) {
    work += s.num_keys(r) * s.num_keys(r) * width;
    // Ids that do not count lie before those that do.
    std::fill(to + end * width, to + s.first_row(r) * width, 0.0f);
    end = s.first_row(r) + s.lists.count[r];
  }
  const AttentionSteps steps = attention_steps();
  over_units<Scratch>(s.num_lists * num_heads, work, [&](int64_t unit, Scratch& scratch) {
    const int64_t list = unit / num_heads, head = unit % num_heads;
    scratch.pack(s, steps, list, head);
    attend(s, steps, scratch, list, head, causal, queries, list * num_context, 0, 0, num_context,
           to);
    attend(s, steps, scratch, list, head, causal, queries, s.first_row(list),
           s.first_position(list), num_context, s.num_keys(list), to);
  });
  return out;
}

at::Tensor hstu_candidate_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const at::Tensor& own_k, const at::Tensor& own_v,
                                    const at::Tensor& lengths,
                                    const std::optional<at::Tensor>& request_index,
                                    const std::optional<at::Tensor>& bias, int64_t num_heads,
                                    int64_t num_context, int64_t max_length, bool align_right,
                                    double score_scale, double weight_scale) {
  const char* op = "hstu_candidate_attention";
  const Sequences s = sequences_of(op, q, k, v, lengths, bias, num_heads, num_context, max_length,
                                   align_right, score_scale, weight_scale);
  const int64_t width = q.size(1), num_rows = q.size(0);
  const Rows queries = rows_of(op, q, "q", num_rows, width);
  const Rows own_keys = rows_of(op, own_k, "own_k", num_rows, width);
  const Rows own_values = rows_of(op, own_v, "own_v", num_rows, width);
  const ListOf list_of(op, request_index, num_rows, s.num_lists);
  // Runs of candidates that share a list, at most a block each.
  std::vector<int64_t> starts;
  int64_t work = 0;
  for (int64_t b = 0; b < num_rows; ++b) {
    if (starts.empty() || list_of[b] != list_of[b - 1] || b - starts.back() >= 4 * kBlockQueries)
      starts.push_back(b);
    work += s.num_keys(list_of[b]) * width;
  }
  const int64_t num_runs = static_cast<int64_t>(starts.size());
  starts.push_back(num_rows);
  at::Tensor out =
      at::empty({num_rows, width}, q.options().memory_format(at::MemoryFormat::Contiguous));
  float* to = out.mutable_data_ptr<float>();
  const AttentionSteps steps = attention_steps();
  const int64_t last = s.num_positions() - 1;
  over_units<Scratch>(num_runs * num_heads, work, [&](int64_t unit, Scratch& scratch) {
    const int64_t run = unit / num_heads, head = unit % num_heads, at = s.head_at(head);
    const int64_t list = list_of[starts[run]], n = s.num_keys(list);
    scratch.pack(s, steps, list, head);
    for (int64_t b = starts[run]; b < starts[run + 1]; b += kBlockQueries) {
      const int64_t num_queries = std::min(kBlockQueries, starts[run + 1] - b);
      steps.linear.wide(product(queries.at(b) + at, queries.stride, num_queries, s.head_width,
                                scratch.keys.data(), n, scratch.scores.data(),
                                scratch.scores_stride));
      for (int64_t r = 0; r < num_queries; ++r)
        weigh_query(s, steps, scratch, list, head, last, n, r);
      gather(s, steps, scratch, list, num_queries, n, to + b * width + at, width);
      for (int64_t r = b; r < b + num_queries; ++r) {
        float own[kTileOutputs] = {steps.dot(queries.at(r) + at, own_keys.at(r) + at, s.head_width)};
        const float* bias_at =
            s.bias.empty() ? nullptr : s.bias.data() + head * s.num_biases() + last;
        steps.weigh(own, 1, bias_at, s.score_scale, s.weight_scale);
        steps.add_scaled(own[0], own_values.at(r) + at, s.head_width, to + r * width + at);
      }
    }
  });
  return out;
}

}  // namespace rankopt
