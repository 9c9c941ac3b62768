// The steps between the products of an attention, written once and compiled for each instruction
// set, by the rules of exact_exp.h, which stands in front of it.

// scores[j] -> silu(scores[j] * score_scale + bias[j]) * weight_scale
void weigh(float* __restrict scores, int64_t num_keys, const float* __restrict bias,
           float score_scale, float weight_scale) {
  if (bias == nullptr) {
    for (int64_t j = 0; j < num_keys; ++j)
      scores[j] = silu_of(scores[j] * score_scale) * weight_scale;
    return;
  }
  for (int64_t j = 0; j < num_keys; ++j)
    scores[j] = silu_of(scores[j] * score_scale + bias[j]) * weight_scale;
}

// One lane of a wide product: the same order of sums.
float dot(const float* a, const float* b, int64_t size) {
  float sum = 0.0f;
  for (int64_t d = 0; d < size; ++d) sum = __builtin_fmaf(a[d], b[d], sum);
  return sum;
}

void add_scaled(float weight, const float* __restrict row, int64_t size, float* __restrict out) {
  for (int64_t d = 0; d < size; ++d) out[d] = __builtin_fmaf(weight, row[d], out[d]);
}

// out[k][lane] = key[k][lane] + product[k][lane] * query[k]
void mix(const float* __restrict key, const float* __restrict product,
         const float* __restrict query, int64_t num_tiles, int64_t num_inputs,
         float* __restrict out) {
  for (int64_t tile = 0; tile < num_tiles; ++tile)
    for (int64_t k = 0; k < num_inputs; ++k) {
      const int64_t at = (tile * num_inputs + k) * 16;
      for (int64_t lane = 0; lane < 16; ++lane)
        out[at + lane] = __builtin_fmaf(product[at + lane], query[k], key[at + lane]);
    }
}

// Rows [num_rows, width] with a stride into tiles of sixteen rows, [ceil(num_rows / 16)][width][16],
// from row `first` of the tiles on.
void interleave(const float* rows, int64_t stride, int64_t num_rows, int64_t width, int64_t first,
                float* __restrict tiles) {
  for (int64_t r = 0; r < num_rows; ++r) {
    float* to = tiles + (first + r) / 16 * 16 * width + (first + r) % 16;
    const float* from = rows + r * stride;
    for (int64_t d = 0; d < width; ++d) to[d * 16] = from[d];
  }
}

// The same rows into tiles of sixteen columns, [ceil(width / 16)][total][16].
void columns(const float* rows, int64_t stride, int64_t num_rows, int64_t width, int64_t first,
             int64_t total, float* __restrict tiles) {
  for (int64_t r = 0; r < num_rows; ++r) {
    const float* from = rows + r * stride;
    float* to = tiles + (first + r) * 16;
    int64_t d = 0;
    for (; d + 16 <= width; d += 16, to += total * 16)
      for (int64_t lane = 0; lane < 16; ++lane) to[lane] = from[d + lane];
    if (d < width)
      for (int64_t lane = 0; lane < 16; ++lane) to[lane] = d + lane < width ? from[d + lane] : 0.0f;
  }
}
