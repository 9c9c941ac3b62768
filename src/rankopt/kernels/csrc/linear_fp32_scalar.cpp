// The plain C++ version: what a CPU without AVX2 runs, and what the others are compared with.
#include "linear_fp32.h"

#include <algorithm>
#include <cmath>

namespace rankopt {
namespace {

#include "exact_exp.h"
#include "activation.h"
#include "linear_fp32_plain.h"

struct PlainFp32 {
  using Weight = float;
  static float widen(float weight) { return weight; }
};

}  // namespace

const LinearFp32& linear_fp32_scalar() {
  static const LinearFp32 kernels{wide<PlainFp32>, narrow<PlainFp32>};
  return kernels;
}

}  // namespace rankopt
