// AVX-512 with byte and word instructions, for CPUs without VNNI.
#include "linear_int8.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "target.h"

RANKOPT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")

namespace rankopt {
namespace {

#include "exact_exp.h"
#include "activation.h"
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

// The largest magnitudes of a row in sixteen lanes. `last` are the lanes of its last vector.
inline __m512i row_peaks(const float* x, int64_t num_inputs, __mmask16 last) {
  const __m512i zero = _mm512_setzero_si512();
  __m512i peaks[2] = {zero, zero};
  int64_t k = 0;
  for (; k + 64 < num_inputs; k += 64)
    for (int i = 0; i < 4; ++i)
      peaks[i % 2] =
          _mm512_max_epu32(peaks[i % 2], magnitude_bits(_mm512_loadu_si512(x + k + 16 * i)));
  for (; k + 16 < num_inputs; k += 16)
    peaks[0] = _mm512_max_epu32(peaks[0], magnitude_bits(_mm512_loadu_si512(x + k)));
  if (k < num_inputs)
    peaks[1] =
        _mm512_max_epu32(peaks[1], magnitude_bits(_mm512_maskz_loadu_epi32(last, x + k)));
  return _mm512_max_epu32(peaks[0], peaks[1]);
}

// The largest of each of sixteen rows, [16][4].
inline __m512i largest_of(const uint32_t* rows) {
  __m512i fours[4], pairs[2];
  for (int i = 0; i < 4; ++i) fours[i] = _mm512_load_si512(rows + 16 * i);
  for (int i = 0; i < 2; ++i)
    pairs[i] = _mm512_max_epu32(_mm512_unpacklo_epi32(fours[2 * i], fours[2 * i + 1]),
                                _mm512_unpackhi_epi32(fours[2 * i], fours[2 * i + 1]));
  // Lane 4 * i + j holds row 4 * j + i.
  const __m512i mixed = _mm512_max_epu32(_mm512_unpacklo_epi64(pairs[0], pairs[1]),
                                         _mm512_unpackhi_epi64(pairs[0], pairs[1]));
  const __m512i order =
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, mixed);
}

inline __m128i to_bytes(__m512 x, __m512 inverse, __m128i offset) {
  return _mm_add_epi8(_mm512_cvtepi32_epi8(rounded(x, inverse)), offset);
}

inline void round_row(const float* x, int64_t num_inputs, __mmask16 last, __m512 inverse,
                      __m512i offset, uint8_t* out) {
  const __m512i order =
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m128i low = _mm512_castsi512_si128(offset);
  int64_t k = 0;
  for (; k + 64 <= num_inputs; k += 64) {
    __m512i parts[4];
    for (int i = 0; i < 4; ++i) parts[i] = rounded(_mm512_loadu_ps(x + k + 16 * i), inverse);
    const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(parts[0], parts[1]),
                                             _mm512_packs_epi32(parts[2], parts[3]));
    const __m512i ordered = _mm512_permutexvar_epi32(order, bytes);
    _mm512_storeu_si512(out + k, _mm512_add_epi8(ordered, offset));
  }
  for (; k + 16 <= num_inputs; k += 16)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + k),
                     to_bytes(_mm512_loadu_ps(x + k), inverse, low));
  if (k < num_inputs)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + k),
                     to_bytes(_mm512_maskz_loadu_ps(last, x + k), inverse, low));
}

// The peaks of at most sixteen rows, each in four lanes.
[[gnu::noinline]] void fold_peaks(const QuantizeBlock& block, int64_t begin, __mmask16 last, uint32_t* peaks) {
  const int64_t end = begin + 16 < block.num_rows ? begin + 16 : block.num_rows;
  for (int64_t r = begin; r < end; ++r, peaks += 4) {
    const __m512i lanes = row_peaks(block.x + r * block.x_stride, block.num_inputs, last);
    const __m256i eight = _mm256_max_epu32(_mm512_castsi512_si256(lanes),
                                           _mm512_extracti64x4_epi64(lanes, 1));
    _mm_store_si128(reinterpret_cast<__m128i*>(peaks),
                    _mm_max_epu32(_mm256_castsi256_si128(eight),
                                  _mm256_extracti128_si256(eight, 1)));
  }
}

// Sixteen rows at a time, so that their scales are found together, by row_scale() in vectors; of
// short rows the next sixteen's peaks meanwhile, since a scale comes at the end of a long chain.
// Long ones would leave the first-level cache before they are rounded.
void quantize(const QuantizeBlock& block) {
  const __m512 levels = _mm512_set1_ps(levels_of(block.activation_bits));
  const __m512i offset =
      _mm512_set1_epi8(static_cast<char>(1 << zero_shift_of(block.activation_bits)));
  const __m512i infinity = _mm512_set1_epi32(static_cast<int>(kInfinityBits));
  const __m512i tiny = _mm512_set1_epi32(static_cast<int>(kTinyBits));
  const __mmask16 last = Avx512::lanes_below((block.num_inputs + 15) % 16 + 1);
  const bool ahead = block.num_inputs <= 192;
  alignas(64) uint32_t peaks[64] = {};
  alignas(64) float inverses[16];
  fold_peaks(block, 0, last, peaks);
  for (int64_t begin = 0; begin < block.num_rows; begin += 16) {
    const __m512i largest = largest_of(peaks);
    if (ahead) fold_peaks(block, begin + 16, last, peaks);
    const __m512 peak = _mm512_castsi512_ps(largest);
    const __mmask16 not_finite = _mm512_cmpge_epu32_mask(largest, infinity);
    const __mmask16 usable = _mm512_cmpge_epu32_mask(largest, tiny) & ~not_finite;
    _mm512_store_ps(inverses, _mm512_maskz_div_ps(usable, levels, peak));
    const __m512 scales = _mm512_mask_mov_ps(_mm512_maskz_div_ps(usable, peak, levels), not_finite,
                                             _mm512_set1_ps(__builtin_nanf("")));
    const int64_t count = block.num_rows - begin < 16 ? block.num_rows - begin : 16;
    _mm512_mask_storeu_ps(block.row_scales + begin, Avx512::lanes_below(count), scales);
    // A row that is not finite gets some levels here; its scale makes all of it NaN.
    for (int64_t r = 0; r < count; ++r)
      round_row(block.x + (begin + r) * block.x_stride, block.num_inputs, last,
                _mm512_set1_ps(inverses[r]), offset, block.rows + (begin + r) * block.stride);
    if (!ahead) fold_peaks(block, begin + 16, last, peaks);
  }
}

void quantize_fixed(const QuantizeBlock& block, RowScale fixed) {
  const __m512 inverse = _mm512_set1_ps(fixed.inverse);
  const float largest = levels_of(block.activation_bits);
  const int zero_point = 1 << zero_shift_of(block.activation_bits);
  for (int64_t r = 0; r < block.num_rows; ++r) {
    bool spoiled = false;
    for (int64_t k = 0; k < block.num_inputs; k += 16) {
      const __m512 values = Avx512::load(block.x + r * block.x_stride + k, block.num_inputs - k);
      spoiled |= Avx512::any_not_finite(values);
      Avx512::store_levels(block.rows + r * block.stride + k, _mm512_mul_ps(values, inverse),
                           largest, zero_point);
    }
    block.row_scales[r] = spoiled ? __builtin_nanf("") : fixed.scale;
  }
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
