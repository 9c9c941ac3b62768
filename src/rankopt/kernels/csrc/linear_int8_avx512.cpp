// AVX-512 with byte and word instructions, for CPUs without VNNI.
#include "linear_int8.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "target.h"

RANKOPT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq")

namespace rankopt {
namespace {

#include "linear_int8_avx512.h"
#include "linear_int8_tile.h"

// 7-bit activations: a pair sum is at most 2 * 127 * 127 = 32258, so the 16-bit adds of vpmaddubsw
// cannot saturate.
struct Avx512Bits7 : Avx512 {
  using Left = __m512i;
  using Right = __m512i;
  static constexpr int max_tiles = 4;
  static constexpr int max_rows(int tiles) { return tiles >= 3 ? 5 : 8; }
  static Left load_left(const uint8_t* p) { return load_four(p); }
  static Right load_right(const int8_t* p) { return load_bytes(p); }
  static Int dot(Int sum, Left a, Right b) {
    const Int pairs = _mm512_maddubs_epi16(a, b);
    return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
  }
  static Int load_zero_correction(const int8_t* p) { return _mm512_slli_epi32(load_bytes(p), 6); }
};

// 8-bit activations: even and odd bytes widened to 16 bits, products summed in 32.
struct Avx512Bits8 : Avx512 {
  struct Left {
    __m512i even, odd;
  };
  struct Right {
    __m512i even, odd;
  };
  static constexpr int max_tiles = 2;
  static constexpr int max_rows(int) { return 8; }
  static Left load_left(const uint8_t* p) {
    const Int four = load_four(p);
    return {_mm512_and_si512(four, _mm512_set1_epi16(0xff)), _mm512_srli_epi16(four, 8)};
  }
  static Right load_right(const int8_t* p) {
    const Int bytes = load_bytes(p);
    return {_mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8), _mm512_srai_epi16(bytes, 8)};
  }
  static Int dot(Int sum, Left a, Right b) {
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(a.even, b.even));
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a.odd, b.odd));
  }
  static Int load_zero_correction(const int8_t* p) { return _mm512_slli_epi32(load_bytes(p), 7); }
};

inline __m512i magnitude_bits(__m512i bits) {
  return _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
}

inline __m512i rounded(__m512 x, __m512 inverse) {
  return _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
}

float quantize(const float* x, int64_t num_inputs, int activation_bits, uint8_t* out) {
  const int64_t whole = num_inputs & ~int64_t{63};
  __m512i peaks[4];
  for (int i = 0; i < 4; ++i) peaks[i] = _mm512_setzero_si512();
  for (int64_t k = 0; k < whole; k += 64)
    for (int i = 0; i < 4; ++i)
      peaks[i] = _mm512_max_epu32(peaks[i], magnitude_bits(_mm512_loadu_si512(x + k + 16 * i)));
  for (int64_t k = whole; k < num_inputs; k += 16) {
    const __mmask16 valid = Avx512::lanes_below(num_inputs - k);
    peaks[0] = _mm512_max_epu32(peaks[0], magnitude_bits(_mm512_maskz_loadu_epi32(valid, x + k)));
  }
  const __m512i all = _mm512_max_epu32(_mm512_max_epu32(peaks[0], peaks[1]),
                                       _mm512_max_epu32(peaks[2], peaks[3]));
  const RowScale row = row_scale(_mm512_reduce_max_epu32(all), levels_of(activation_bits));

  const int zero_point = 1 << zero_shift_of(activation_bits);
  if (row.inverse == 0.0f) {
    std::memset(out, zero_point, static_cast<size_t>(divide_up(num_inputs, kTileInputs) * 4));
    return row.scale;
  }
  const __m512 inverse = _mm512_set1_ps(row.inverse);
  const __m512i offset = _mm512_set1_epi8(static_cast<char>(zero_point));
  const __m512i order =
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int64_t k = 0; k < whole; k += 64) {
    __m512i parts[4];
    for (int i = 0; i < 4; ++i) parts[i] = rounded(_mm512_loadu_ps(x + k + 16 * i), inverse);
    const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(parts[0], parts[1]),
                                             _mm512_packs_epi32(parts[2], parts[3]));
    const __m512i ordered = _mm512_permutexvar_epi32(order, bytes);
    _mm512_storeu_si512(out + k, _mm512_add_epi8(ordered, offset));
  }
  for (int64_t k = whole; k < num_inputs; k += 16) {
    const int64_t rest = num_inputs - k;
    const __m512 values = _mm512_maskz_loadu_ps(Avx512::lanes_below(rest), x + k);
    const __m128i bytes = _mm_add_epi8(_mm512_cvtepi32_epi8(rounded(values, inverse)),
                                       _mm512_castsi512_si128(offset));
    const __mmask16 padded = Avx512::lanes_below(divide_up(rest, kTileInputs) * kTileInputs);
    _mm_mask_storeu_epi8(out + k, padded, bytes);
  }
  return row.scale;
}

float quantize_fixed(const float* x, int64_t num_inputs, int activation_bits, RowScale fixed,
                     uint8_t* out) {
  const __m512 inverse = _mm512_set1_ps(fixed.inverse);
  const float largest = levels_of(activation_bits);
  const int zero_point = 1 << zero_shift_of(activation_bits);
  bool spoiled = false;
  for (int64_t k = 0; k < num_inputs; k += 16) {
    const int64_t rest = num_inputs - k;
    const __m512 values = Avx512::load(x + k, rest);
    spoiled |= Avx512::any_not_finite(values);
    const __m128i levels = Avx512::to_levels(_mm512_mul_ps(values, inverse), largest, zero_point);
    if (rest >= 16)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + k), levels);
    else
      _mm_mask_storeu_epi8(out + k, Avx512::lanes_below(divide_up(rest, 4) * 4), levels);
  }
  return spoiled ? __builtin_nanf("") : fixed.scale;
}

}  // namespace

const LinearInt8& linear_int8_avx512() {
  static const LinearInt8 kernels{quantize, quantize_fixed, multiply<Avx512Bits7>,
                                  multiply<Avx512Bits8>};
  return kernels;
}

}  // namespace rankopt

RANKOPT_TARGET_END
#endif
