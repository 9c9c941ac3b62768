// The steps between the products of an attention, written once and compiled for each instruction
// set, by the rules of exact_exp.h, which stands in front of it.

// scores[j] -> silu(scores[j] * score_scale + bias[j]) * weight_scale, without a bias where it is
// null. Up to fifteen scores past num_keys are written too, and as many biases read: of short lists
// the rest of a division by sixteen, one score after the other, took longer than all else.
void weigh(float* __restrict scores, int64_t num_keys, const float* __restrict bias,
           float score_scale, float weight_scale) {
  if (bias == nullptr) {
    for (int64_t j = 0; j < num_keys; j += 16)
      for (int64_t l = j; l < j + 16; ++l)
        scores[l] = silu_of(scores[l] * score_scale) * weight_scale;
    return;
  }
  for (int64_t j = 0; j < num_keys; j += 16)
    for (int64_t l = j; l < j + 16; ++l)
      scores[l] = silu_of(scores[l] * score_scale + bias[l]) * weight_scale;
}

// Dice (DIN, arXiv:1706.06978, eq. 3): y = x * (slope + (1 - slope) * p), here with
// p = sigmoid(x * scale + shift), batch normalisation written as two vectors.
void dice(float* __restrict values, int64_t num_rows, int64_t width, const float* __restrict slope,
          const float* __restrict scale, const float* __restrict shift) {
  for (int64_t r = 0; r < num_rows; ++r) {
    float* __restrict x = values + r * width;
    for (int64_t d = 0; d < width; ++d) {
      const float p = 1.0f / (1.0f + exp_of(-(x[d] * scale[d] + shift[d])));
      x[d] = x[d] * (slope[d] + (1.0f - slope[d]) * p);
    }
  }
}

// Sixteen sums, then those added up in halves: the same order on every instruction set.
inline float sum_of_lanes(float* __restrict lanes) {
  for (int64_t h = 8; h > 0; h /= 2)
    for (int64_t l = 0; l < h; ++l) lanes[l] += lanes[l + h];
  return lanes[0];
}

// Dice on a row's own mean m: p = sigmoid((x - m) / sqrt(sum of (x - m)^2 + shift over the row)).
void row_dice(float* __restrict values, int64_t num_rows, int64_t width,
              const float* __restrict slope, const float* __restrict shift) {
  for (int64_t r = 0; r < num_rows; ++r) {
    float* __restrict x = values + r * width;
    float lanes[16] = {};
    int64_t d = 0;
    for (; d + 16 <= width; d += 16)
      for (int64_t l = 0; l < 16; ++l) lanes[l] += x[d + l];
    for (; d < width; ++d) lanes[d % 16] += x[d];
    const float mean = sum_of_lanes(lanes) / static_cast<float>(width);
    for (int64_t l = 0; l < 16; ++l) lanes[l] = 0.0f;
    for (d = 0; d + 16 <= width; d += 16)
      for (int64_t l = 0; l < 16; ++l)
        lanes[l] += (x[d + l] - mean) * (x[d + l] - mean) + shift[d + l];
    for (; d < width; ++d) lanes[d % 16] += (x[d] - mean) * (x[d] - mean) + shift[d];
    const float deviation = __builtin_sqrtf(sum_of_lanes(lanes));
    for (d = 0; d < width; ++d) {
      const float p = 1.0f / (1.0f + exp_of(-((x[d] - mean) / deviation)));
      x[d] = x[d] * (slope[d] + (1.0f - slope[d]) * p);
    }
  }
}

// Scores to their shares, exp(score - largest) over the sum of these.
void shares(float* __restrict scores, int64_t size) {
  float largest = scores[0];
  for (int64_t i = 1; i < size; ++i) largest = choose(scores[i] > largest, scores[i], largest);
  for (int64_t i = 0; i < size; ++i) {
    const float below = scores[i] - largest;
    // There exp_of no longer follows; NaN goes through it.
    scores[i] = choose(below < -87.0f, 0.0f, exp_of(below));
  }
  float total = 0.0f;
  for (int64_t i = 0; i < size; ++i) total += scores[i];
  for (int64_t i = 0; i < size; ++i) scores[i] = scores[i] / total;
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
