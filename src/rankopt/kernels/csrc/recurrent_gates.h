// The gates of one row, written once and compiled for each instruction set, by the rules of
// exact_exp.h, which stands in front of it.

// Source of the polynomial: Cephes, tanhf.c; about 2 ulp.
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
