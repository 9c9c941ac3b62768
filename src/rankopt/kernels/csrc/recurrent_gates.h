// The gates of one row, written once and compiled for each instruction set: no operation here may
// be fused or reordered, so a wider vector gives the same bits. Included inside a namespace, between
// RANKOPT_TARGET_BEGIN and RANKOPT_TARGET_END; calls no function of a standard header, since the
// linker could keep the copy compiled for the better CPU.

// By bits, not by ?:, which the compiler turns into a branch that stops it from vectorising.
inline float choose(bool condition, float yes, float no) {
  const int32_t mask = -static_cast<int32_t>(condition);
  return __builtin_bit_cast(float, (__builtin_bit_cast(int32_t, yes) & mask) |
                                       (__builtin_bit_cast(int32_t, no) & ~mask));
}

// Source of both polynomials: S. L. Moshier, Cephes, expf.c and tanhf.c; about 2 ulp.
inline float exp_of(float x) {
  x = choose(x < -87.0f, -87.0f, x);  // NaN passes both
  x = choose(x > 88.0f, 88.0f, x);
  constexpr float kRound = 12582912.0f;  // adding it rounds to a whole number
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float mantissa = (p * (r * r) + r) + 1.0f;
  const int32_t exponent =
      __builtin_bit_cast(int32_t, shifted) - __builtin_bit_cast(int32_t, kRound) + 127;
  return mantissa * __builtin_bit_cast(float, exponent << 23);
}

inline float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }

inline float tanh_of(float x) {
  const float size = __builtin_fabsf(x);
  const float square = x * x;
  float p = -5.70498872745e-3f;
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const float near_zero = (p * square) * x + x;
  const float far = __builtin_copysignf(1.0f - 2.0f / (exp_of(2.0f * size) + 1.0f), x);
  return choose(size < 0.625f, near_zero, far);
}

// state [H] becomes the next state and is written to out [H] as well. input and hidden are the
// projected gates of one step.
void next_gru(const float* __restrict input, const float* __restrict hidden, int64_t num_hidden,
              float* __restrict state, float*, float* __restrict out) {
  for (int64_t j = 0; j < num_hidden; ++j) {
    const float reset = sigmoid_of(input[j] + hidden[j]);
    const float update = sigmoid_of(input[num_hidden + j] + hidden[num_hidden + j]);
    const float fresh = tanh_of(input[2 * num_hidden + j] + reset * hidden[2 * num_hidden + j]);
    const float next = fresh + update * (state[j] - fresh);
    state[j] = next;
    out[j] = next;
  }
}

void next_lstm(const float* __restrict input, const float* __restrict hidden, int64_t num_hidden,
               float* __restrict state, float* __restrict memory, float* __restrict out) {
  for (int64_t j = 0; j < num_hidden; ++j) {
    const float write = sigmoid_of(input[j] + hidden[j]);
    const float keep = sigmoid_of(input[num_hidden + j] + hidden[num_hidden + j]);
    const float fresh = tanh_of(input[2 * num_hidden + j] + hidden[2 * num_hidden + j]);
    const float show = sigmoid_of(input[3 * num_hidden + j] + hidden[3 * num_hidden + j]);
    const float held = keep * memory[j] + write * fresh;
    const float next = show * tanh_of(held);
    memory[j] = held;
    state[j] = next;
    out[j] = next;
  }
}
