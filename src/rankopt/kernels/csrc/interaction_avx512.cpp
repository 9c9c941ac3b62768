#include "interaction.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "target.h"

RANKOPT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq")

namespace rankopt {
namespace {

#include "linear_int8_avx512.h"
#include "interaction_tile.h"

struct Avx512Pairs : Avx512 {
  using Sixteen = __m512;
  // A load can be broadcast inside the multiply-add, so 14 sums and one vector are all it holds;
  // more sums would save few loads and no multiply-adds.
  static constexpr int kMaxRows = 14;
  // 25 sums, five fields and one more.
  static constexpr int kRun = 5;

  static Float load(const float* p) { return _mm512_load_ps(p); }
  static void keep(float* p, Float y) { _mm512_store_ps(p, y); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static void store(float* p, Float y, int64_t begin, int64_t end) {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>(lanes_below(end) & ~lanes_below(begin)), y);
  }

  // Numbers k to k + 3 of fields 0, 4, 8 and 12, counted from `fields`.
  static Float four_of_four(const float* const* fields, int64_t k) {
    Float x = _mm512_castps128_ps512(_mm_loadu_ps(fields[0] + k));
    x = _mm512_insertf32x4(x, _mm_loadu_ps(fields[4] + k), 1);
    x = _mm512_insertf32x4(x, _mm_loadu_ps(fields[8] + k), 2);
    return _mm512_insertf32x4(x, _mm_loadu_ps(fields[12] + k), 3);
  }
  static void transpose_four(const float* const* fields, int64_t k, float* to, int64_t stride) {
    const Float a = four_of_four(fields, k), b = four_of_four(fields + 1, k);
    const Float c = four_of_four(fields + 2, k), d = four_of_four(fields + 3, k);
    const __m512d low = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
    const __m512d low_too = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
    const __m512d high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
    const __m512d high_too = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
    _mm512_store_ps(to, _mm512_castpd_ps(_mm512_unpacklo_pd(low, low_too)));
    _mm512_store_ps(to + stride, _mm512_castpd_ps(_mm512_unpackhi_pd(low, low_too)));
    _mm512_store_ps(to + 2 * stride, _mm512_castpd_ps(_mm512_unpacklo_pd(high, high_too)));
    _mm512_store_ps(to + 3 * stride, _mm512_castpd_ps(_mm512_unpackhi_pd(high, high_too)));
  }

  static Sixteen zero_sixteen() { return _mm512_setzero_ps(); }
  static Sixteen load_sixteen(const float* p, int64_t valid) {
    return valid == kLanes ? _mm512_loadu_ps(p) : Avx512::load(p, valid);
  }
  static void store_sixteen(float* p, Sixteen y, int64_t valid) { Avx512::store(p, y, valid); }
  static Sixteen fma_sixteen(Sixteen a, Sixteen b, Sixteen c) { return fma(a, b, c); }
  static Sixteen add_sixteen(Sixteen a, Sixteen b) { return add(a, b); }
  static __m256 fold(Sixteen a) {
    return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  }
};

}  // namespace

const Interaction& interaction_avx512() {
  static const Interaction kernels{dot<Avx512Pairs>, dot_group<Avx512Pairs>, fm<Avx512Pairs>};
  return kernels;
}

}  // namespace rankopt

RANKOPT_TARGET_END
#endif
