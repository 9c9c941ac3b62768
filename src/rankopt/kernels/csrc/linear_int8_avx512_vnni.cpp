// AVX-512 with VNNI. A file of its own, so that no compiler can put VNNI into the version without.
#include "linear_int8.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "target.h"

RANKOPT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,prefer-vector-width=512")

namespace rankopt {
namespace {

#include "exact_exp.h"
#include "activation.h"
#include "linear_int8_avx512.h"
#include "linear_int8_tile.h"

// vpdpbusd sums four products in 32 bits: nothing can saturate at 8 bits either.
template <int kShift>
struct Avx512Vnni : Avx512 {
  using Left = __m512i;
  using Right = __m512i;
  static constexpr bool shares_vectors = true;
  // 24 or 25 sums, the weights of one step and one group of inputs fill the 32 registers.
  static constexpr int max_tiles = 5;
  static constexpr int max_rows(int tiles) {
    return tiles == 5 ? 5 : tiles == 4 ? 6 : tiles == 3 ? 8 : 10;
  }
  static Left load_left(const uint8_t* p) { return load_four(p); }
  static Right load_right(const int8_t* p) { return load_bytes(p); }
  static Int dot(Int sum, Left a, Right b) { return _mm512_dpbusd_epi32(sum, a, b); }
  static Int load_zero_correction(const int8_t* p) {
    return _mm512_slli_epi32(load_bytes(p), kShift);
  }
};

}  // namespace

const LinearInt8& linear_int8_avx512_vnni() {
  static const LinearInt8 kernels{linear_int8_avx512().quantize,
                                  linear_int8_avx512().quantize_fixed, multiply<Avx512Vnni<6>>,
                                  multiply<Avx512Vnni<7>>};
  return kernels;
}

}  // namespace rankopt

RANKOPT_TARGET_END
#endif
