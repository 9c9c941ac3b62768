// The AVX-512 policy of fp32 sums. Included behind linear_int8_avx512.h, like it.

struct Avx512Fp32 : Avx512 {
  using Weight = float;
  using Sixteen = __m512;
  // 24 sums, the weights of one step and one input fit the 32 registers. One row alone takes more
  // tiles instead, or each addition would wait for the one before.
  static constexpr int max_tiles(int64_t num_rows) { return num_rows == 1 ? 8 : 4; }
  static constexpr int max_rows(int tiles) {
    return tiles > 4 ? 1 : tiles == 4 ? 6 : tiles == 3 ? 8 : 12;
  }
  static constexpr int kNarrowRows = 8;

  using Avx512::load;
  static Float load(const float* p) { return _mm512_loadu_ps(p); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }

  static Sixteen zero_sixteen() { return _mm512_setzero_ps(); }
  static Sixteen load_sixteen(const float* p) { return load(p); }
  static Sixteen load_sixteen(const float* p, int64_t valid) { return load(p, valid); }
  static Sixteen fma_sixteen(Sixteen a, Sixteen b, Sixteen c) { return fma(a, b, c); }
  static __m256 fold(Sixteen a) {
    return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  }
};
