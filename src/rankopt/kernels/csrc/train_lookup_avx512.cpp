#include "train_lookup.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>

#include "target.h"

RANKOPT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")

namespace rankopt {
namespace {

#include "train_lookup_tile.h"

struct Avx512Train {
  using Float = __m512;
  static constexpr int64_t kLanes = 16;

  static Float load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Float value) { _mm512_storeu_ps(p, value); }
  static Float broadcast(float value) { return _mm512_set1_ps(value); }
  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
  static Float sqrt(Float a) { return _mm512_sqrt_ps(a); }
};

}  // namespace

const TrainLookup& train_lookup_avx512() {
  static const TrainLookup kernels = make_train_lookup<Avx512Train>();
  return kernels;
}

}  // namespace rankopt

RANKOPT_TARGET_END
#endif
