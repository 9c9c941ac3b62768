#include "linear_int8.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "target.h"

RANKOPT_TARGET_BEGIN("avx2")

namespace rankopt {
namespace {

#include "exact_exp.h"
#include "activation.h"
#include "linear_int8_avx2.h"
#include "linear_int8_tile.h"

// 7-bit activations: a pair sum is at most 2 * 127 * 127 = 32258, so the 16-bit adds of vpmaddubsw
// cannot saturate.
struct Avx2Bits7 : Avx2 {
  using Left = __m256i;
  using Right = __m256i;
  static constexpr int max_tiles = 1;
  static constexpr int max_rows(int) { return 4; }
  static Left load_left(const uint8_t* p) { return load_four(p); }
  static Right load_right(const int8_t* p) { return load_bytes(p); }
  static Int dot(Int sum, Left a, Right b) {
    const Int pairs = _mm256_maddubs_epi16(a, b);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static Int load_zero_correction(const int8_t* p) { return _mm256_slli_epi32(load_bytes(p), 6); }
};

// 8-bit activations: even and odd bytes widened to 16 bits, products summed in 32.
struct Avx2Bits8 : Avx2 {
  struct Left {
    __m256i even, odd;
  };
  struct Right {
    __m256i even, odd;
  };
  static constexpr int max_tiles = 1;
  static constexpr int max_rows(int) { return 4; }
  static Left load_left(const uint8_t* p) {
    const Int four = load_four(p);
    return {_mm256_and_si256(four, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(four, 8)};
  }
  static Right load_right(const int8_t* p) {
    const Int bytes = load_bytes(p);
    return {_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
  }
  static Int dot(Int sum, Left a, Right b) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a.even, b.even));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a.odd, b.odd));
  }
  static Int load_zero_correction(const int8_t* p) { return _mm256_slli_epi32(load_bytes(p), 7); }
};

inline __m256i magnitude_bits(const float* x) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
}

inline __m256i rounded(const float* x, __m256 inverse) {
  return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), inverse));
}

inline __m256i pack_32(const float* x, __m256 inverse, __m256i zero_point) {
  const __m256i low = _mm256_packs_epi32(rounded(x, inverse), rounded(x + 8, inverse));
  const __m256i high = _mm256_packs_epi32(rounded(x + 16, inverse), rounded(x + 24, inverse));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_packs_epi16(low, high);
  return _mm256_add_epi8(_mm256_permutevar8x32_epi32(bytes, order), zero_point);
}

inline __m256i magnitude_bits_below(const float* x, __m256i lanes) {
  const __m256i bits = _mm256_maskload_epi32(reinterpret_cast<const int*>(x), lanes);
  return _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
}

inline void store_8(uint8_t* out, __m256i levels, __m256i zero_point) {
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(levels), _mm256_extracti128_si256(levels, 1));
  const __m128i bytes =
      _mm_add_epi8(_mm_packs_epi16(words, words), _mm256_castsi256_si128(zero_point));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), bytes);
}

float quantize_row(const float* x, int64_t num_inputs, int activation_bits, uint8_t* out) {
  const int64_t whole = num_inputs & ~int64_t{31}, eights = num_inputs & ~int64_t{7};
  const __m256i last = Avx2::lanes_below(num_inputs - eights);

  __m256i peaks[4] = {};
  for (int64_t k = 0; k < whole; k += 32)
    for (int i = 0; i < 4; ++i) peaks[i] = _mm256_max_epu32(peaks[i], magnitude_bits(x + k + 8 * i));
  for (int64_t k = whole; k < eights; k += 8)
    peaks[0] = _mm256_max_epu32(peaks[0], magnitude_bits(x + k));
  if (eights < num_inputs)
    peaks[1] = _mm256_max_epu32(peaks[1], magnitude_bits_below(x + eights, last));
  const __m256i both = _mm256_max_epu32(_mm256_max_epu32(peaks[0], peaks[1]),
                                        _mm256_max_epu32(peaks[2], peaks[3]));
  __m128i half = _mm_max_epu32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1));
  const RowScale row = row_scale(static_cast<uint32_t>(_mm_cvtsi128_si32(half)),
                                 levels_of(activation_bits));

  const int zero_point = 1 << zero_shift_of(activation_bits);
  if (row.inverse == 0.0f) {
    std::memset(out, zero_point, static_cast<size_t>(divide_up(num_inputs, kTileInputs) * 4));
    return row.scale;
  }
  const __m256 inverse = _mm256_set1_ps(row.inverse);
  const __m256i offset = _mm256_set1_epi8(static_cast<char>(zero_point));
  for (int64_t k = 0; k < whole; k += 32)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + k), pack_32(x + k, inverse, offset));
  for (int64_t k = whole; k < eights; k += 8) store_8(out + k, rounded(x + k, inverse), offset);
  if (eights < num_inputs) {
    const __m256 values = _mm256_maskload_ps(x + eights, last);
    store_8(out + eights, _mm256_cvtps_epi32(_mm256_mul_ps(values, inverse)), offset);
  }
  return row.scale;
}

float quantize_row_fixed(const float* x, int64_t num_inputs, int activation_bits, RowScale fixed,
                         uint8_t* out) {
  const __m256 inverse = _mm256_set1_ps(fixed.inverse);
  const float largest = levels_of(activation_bits);
  const int zero_point = 1 << zero_shift_of(activation_bits);
  bool spoiled = false;
  for (int64_t k = 0; k < num_inputs; k += 8) {
    const __m256 values = Avx2::load(x + k, num_inputs - k);
    spoiled |= Avx2::any_not_finite(values);
    Avx2::store_levels(out + k, _mm256_mul_ps(values, inverse), largest, zero_point);
  }
  return spoiled ? __builtin_nanf("") : fixed.scale;
}

void quantize(const QuantizeBlock& block) {
  for (int64_t r = 0; r < block.num_rows; ++r)
    block.row_scales[r] = quantize_row(block.x + r * block.x_stride, block.num_inputs,
                                       block.activation_bits, block.rows + r * block.stride);
}

void quantize_fixed(const QuantizeBlock& block, RowScale fixed) {
  for (int64_t r = 0; r < block.num_rows; ++r)
    block.row_scales[r] =
        quantize_row_fixed(block.x + r * block.x_stride, block.num_inputs, block.activation_bits,
                           fixed, block.rows + r * block.stride);
}

}  // namespace

const LinearInt8& linear_int8_avx2() {
  static const LinearInt8 kernels{quantize, quantize_fixed, multiply<Avx2Bits7>,
                                  multiply<Avx2Bits8>};
  return kernels;
}

}  // namespace rankopt

RANKOPT_TARGET_END
#endif
