// The vector policy that the AVX2 files share. Included like linear_int8_tile.h.

struct Avx2 {
  using Int = __m256i;
  using Float = __m256;
  static constexpr int kLanes = 8;

  static Int zero() { return _mm256_setzero_si256(); }
  static Int subtract(Int a, Int b) { return _mm256_sub_epi32(a, b); }
  static Float to_float(Int a) { return _mm256_cvtepi32_ps(a); }
  static Float broadcast(float a) { return _mm256_set1_ps(a); }
  static Float multiply(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float scale_negative(Float y, Float slope) {
    const Float keep = _mm256_cmp_ps(y, _mm256_setzero_ps(), _CMP_GE_OQ);
    return _mm256_blendv_ps(_mm256_mul_ps(y, slope), y, keep);
  }
  static Int lanes_below(int64_t valid) {
    const Int index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(valid)), index);
  }
  static Float load(const float* p, int64_t valid) {
    return valid >= kLanes ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, lanes_below(valid));
  }
  // A masked store costs tens of cycles on AMD: only the last vector of a row pays it.
  static void store(float* p, Float y, int64_t valid) {
    if (valid >= kLanes)
      _mm256_storeu_ps(p, y);
    else
      _mm256_maskstore_ps(p, lanes_below(valid), y);
  }
  static Int load_bytes(const int8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static Int load_four(const uint8_t* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof(four));
    return _mm256_set1_epi32(four);
  }
};
