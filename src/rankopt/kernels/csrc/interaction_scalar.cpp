// The plain C++ version: what a CPU without AVX2 runs, and what the others are compared with.
#include <algorithm>
#include <cmath>

#include "interaction.h"

namespace rankopt {
namespace {

void dot(const DotRow& row) {
  for (int64_t i = 0; i < row.num_fields; ++i) {
    const int64_t first = triangle_first(row, i);
    float* out = row.out + triangle_start(row, i);
    for (int64_t j = first; j < triangle_end(row, i); ++j) {
      float sum = 0.0f;
      for (int64_t k = 0; k < row.dim; ++k) sum = std::fma(row.fields[i][k], row.fields[j][k], sum);
      out[j - first] = sum;
    }
  }
}

void fm(const FmRow& row) {
  constexpr int64_t kLanes = 16;
  float total[kLanes] = {};
  for (int64_t d = 0; d < row.dim; ++d) {
    float before = row.num_fields > 0 ? row.fields[0][d] : 0.0f, sum = 0.0f;
    for (int64_t field = 1; field < row.num_fields; ++field) {
      const float x = row.fields[field][d];
      sum = std::fma(x, before, sum);
      before += x;
    }
    if (row.total)
      total[d % kLanes] += sum;
    else
      row.out[d] = sum;
  }
  if (!row.total) return;
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) total[lane] += total[lane + half];
  *row.out = total[0];
}

}  // namespace

const Interaction& interaction_scalar() {
  static const Interaction kernels{dot, nullptr, fm};
  return kernels;
}

}  // namespace rankopt
