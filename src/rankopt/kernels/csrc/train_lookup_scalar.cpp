// The plain C++ version: what a CPU without AVX2 runs, and what the others are compared with.
#include "train_lookup.h"

#include <cmath>

namespace rankopt {
namespace {

#include "train_lookup_tile.h"

struct ScalarTrain {
  using Float = float;
  static constexpr int64_t kLanes = 1;

  static float load(const float* p) { return *p; }
  static void store(float* p, float value) { *p = value; }
  static float broadcast(float value) { return value; }
  static float add(float a, float b) { return a + b; }
  static float mul(float a, float b) { return a * b; }
  static float div(float a, float b) { return a / b; }
  static float sqrt(float a) { return std::sqrt(a); }
};

}  // namespace

const TrainLookup& train_lookup_scalar() {
  static const TrainLookup kernels = make_train_lookup<ScalarTrain>();
  return kernels;
}

}  // namespace rankopt
