// Activations of a layer's results, by the rules of exact_exp.h, which stands in front of it.

inline void activate(float* __restrict values, int64_t size, Activation activation) {
  if (activation == kSilu)
    for (int64_t i = 0; i < size; ++i) values[i] = silu_of(values[i]);
  else if (activation == kSigmoid)
    for (int64_t i = 0; i < size; ++i) values[i] = sigmoid_of(values[i]);
}
