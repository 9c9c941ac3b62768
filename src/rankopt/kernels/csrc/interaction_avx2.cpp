#include "interaction.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "target.h"

RANKOPT_TARGET_BEGIN("avx2,fma")

namespace rankopt {
namespace {

#include "linear_int8_avx2.h"
#include "interaction_tile.h"

struct Avx2Pairs : Avx2 {
  struct Sixteen {
    __m256 low, high;
  };
  // 12 sums, the others and one field fill the 16 registers.
  static constexpr int kMaxRows = 12;
  // 9 sums, three fields and one more.
  static constexpr int kRun = 3;

  static Float load(const float* p) { return _mm256_load_ps(p); }
  static void keep(float* p, Float y) { _mm256_store_ps(p, y); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static void store(float* p, Float y, int64_t begin, int64_t end) {
    if (begin == 0 && end == kLanes) return _mm256_storeu_ps(p, y);
    // A masked store costs tens of cycles on AMD.
    alignas(32) float lanes[kLanes];
    _mm256_store_ps(lanes, y);
    for (int64_t lane = begin; lane < end; ++lane) p[lane] = lanes[lane];
  }

  // Numbers k to k + 3 of fields 0 and 4, counted from `fields`.
  static Float four_of_two(const float* const* fields, int64_t k) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(fields[0] + k)),
                                _mm_loadu_ps(fields[4] + k), 1);
  }
  static void transpose_four(const float* const* fields, int64_t k, float* to, int64_t stride) {
    const Float a = four_of_two(fields, k), b = four_of_two(fields + 1, k);
    const Float c = four_of_two(fields + 2, k), d = four_of_two(fields + 3, k);
    const __m256d low = _mm256_castps_pd(_mm256_unpacklo_ps(a, b));
    const __m256d low_too = _mm256_castps_pd(_mm256_unpacklo_ps(c, d));
    const __m256d high = _mm256_castps_pd(_mm256_unpackhi_ps(a, b));
    const __m256d high_too = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
    _mm256_store_ps(to, _mm256_castpd_ps(_mm256_unpacklo_pd(low, low_too)));
    _mm256_store_ps(to + stride, _mm256_castpd_ps(_mm256_unpackhi_pd(low, low_too)));
    _mm256_store_ps(to + 2 * stride, _mm256_castpd_ps(_mm256_unpacklo_pd(high, high_too)));
    _mm256_store_ps(to + 3 * stride, _mm256_castpd_ps(_mm256_unpackhi_pd(high, high_too)));
  }

  static Sixteen zero_sixteen() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Sixteen load_sixteen(const float* p, int64_t valid) {
    if (valid == 16) return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
    if (valid <= 8) return {Avx2::load(p, valid), _mm256_setzero_ps()};
    return {_mm256_loadu_ps(p), Avx2::load(p + 8, valid - 8)};
  }
  static void store_sixteen(float* p, Sixteen y, int64_t valid) {
    Avx2::store(p, y.low, valid);
    if (valid > 8) Avx2::store(p + 8, y.high, valid - 8);
  }
  static Sixteen fma_sixteen(Sixteen a, Sixteen b, Sixteen c) {
    return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
  }
  static Sixteen add_sixteen(Sixteen a, Sixteen b) {
    return {add(a.low, b.low), add(a.high, b.high)};
  }
  static __m256 fold(Sixteen a) { return _mm256_add_ps(a.low, a.high); }
};

}  // namespace

const Interaction& interaction_avx2() {
  static const Interaction kernels{dot<Avx2Pairs>, dot_group<Avx2Pairs>, fm<Avx2Pairs>};
  return kernels;
}

}  // namespace rankopt

RANKOPT_TARGET_END
#endif
