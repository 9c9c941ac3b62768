// Included into an anonymous namespace of each instruction set's file; `V` is its vector.

// Rows ahead of the one being added whose lines are asked for.
constexpr int64_t kAhead = 8;

inline void prefetch_row(const float* row, int64_t dim) {
  for (int64_t i = 0; i < dim; i += 16) __builtin_prefetch(row + i);
}

template <class V>
void add_scaled(float* sum, const float* row, float scale, int64_t dim) {
  const typename V::Float factor = V::broadcast(scale);
  int64_t i = 0;
  for (; i + V::kLanes <= dim; i += V::kLanes)
    V::store(sum + i, V::add(V::load(sum + i), V::mul(V::load(row + i), factor)));
  for (; i < dim; ++i) sum[i] = sum[i] + row[i] * scale;
}

template <class V>
void scaled(float* out, const float* row, float scale, int64_t dim) {
  const typename V::Float factor = V::broadcast(scale);
  int64_t i = 0;
  for (; i + V::kLanes <= dim; i += V::kLanes) V::store(out + i, V::mul(V::load(row + i), factor));
  for (; i < dim; ++i) out[i] = row[i] * scale;
}

template <class V>
void divide(float* out, float divisor, int64_t dim) {
  const typename V::Float by = V::broadcast(divisor);
  int64_t i = 0;
  for (; i + V::kLanes <= dim; i += V::kLanes) V::store(out + i, V::div(V::load(out + i), by));
  for (; i < dim; ++i) out[i] = out[i] / divisor;
}

template <class V>
void pool_bags(const PooledRows& job, int64_t first, int64_t last) {
  const Bags& bags = job.bags;
  for (int64_t bag = first; bag < last; ++bag) {
    if (bag + kAhead < last && bags.end(bag + kAhead) > bags.begin(bag + kAhead))
      prefetch_row(job.table + bags.ids[bags.begin(bag + kAhead)] * job.dim, job.dim);
    float* out = job.out + bag * job.out_stride;
    int64_t num_added = 0;
    for (int64_t at = bags.begin(bag); at < bags.end(bag); ++at) {
      const int64_t id = bags.ids[at];
      if (id == bags.padding) continue;
      const float scale = bags.weights == nullptr ? 1.0f : bags.weights[at];
      const float* row = job.table + id * job.dim;
      if (num_added++ == 0)
        scaled<V>(out, row, scale, job.dim);
      else
        add_scaled<V>(out, row, scale, job.dim);
    }
    if (num_added == 0)
      for (int64_t i = 0; i < job.dim; ++i) out[i] = 0.0f;
    else if (bags.is_mean && num_added > 1)
      divide<V>(out, static_cast<float>(num_added), job.dim);
  }
}

// As torch.optim.Adagrad over a coalesced gradient: s += g * g; w -= rate * g / (sqrt(s) + eps).
template <class V>
void adagrad_row(float* row, float* state, const float* grad, float rate, float eps, int64_t dim) {
  const typename V::Float minus_rate = V::broadcast(-rate), small = V::broadcast(eps);
  int64_t i = 0;
  for (; i + V::kLanes <= dim; i += V::kLanes) {
    const typename V::Float g = V::load(grad + i);
    const typename V::Float s = V::add(V::load(state + i), V::mul(g, g));
    V::store(state + i, s);
    const typename V::Float change = V::div(g, V::add(V::sqrt(s), small));
    V::store(row + i, V::add(V::load(row + i), V::mul(minus_rate, change)));
  }
  for (; i < dim; ++i) {
    const float g = grad[i], s = state[i] + g * g;
    state[i] = s;
    row[i] = row[i] + -rate * (g / (std::sqrt(s) + eps));
  }
}

// Sixteen partial sums, element i in sum i % 16, joined by halves: one order on every width.
template <class V>
float sum_of_squares(const float* grad, int64_t dim) {
  constexpr int64_t kParts = 16;
  float parts[kParts] = {};
  const int64_t whole = dim / kParts * kParts;
  for (int64_t lane = 0; lane < kParts; lane += V::kLanes) {
    typename V::Float sum = V::broadcast(0.0f);
    for (int64_t i = lane; i < whole; i += kParts) {
      const typename V::Float g = V::load(grad + i);
      sum = V::add(sum, V::mul(g, g));
    }
    V::store(parts + lane, sum);
  }
  for (int64_t i = whole; i < dim; ++i) parts[i - whole] = parts[i - whole] + grad[i] * grad[i];
  for (int64_t half = kParts / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) parts[i] = parts[i] + parts[i + half];
  return parts[0];
}

template <class V>
void update_row(const TableStep& job, int64_t id, const float* grad) {
  float* row = job.table + id * job.dim;
  switch (job.optimizer) {
    case TableOptimizer::kAdagrad:
      return adagrad_row<V>(row, job.state + id * job.dim, grad, job.learning_rate, job.eps,
                            job.dim);
    case TableOptimizer::kRowwiseAdagrad: {
      const float mean = sum_of_squares<V>(grad, job.dim) / static_cast<float>(job.dim);
      const float state = job.state[id] + mean;
      job.state[id] = state;
      return add_scaled<V>(row, grad, -job.learning_rate / (std::sqrt(state) + job.eps), job.dim);
    }
    case TableOptimizer::kSgd:
      return add_scaled<V>(row, grad, -job.learning_rate, job.dim);
  }
}

template <class V>
void step_rows(const TableStep& job, const StepScratch& scratch, float* sum) {
  const std::vector<uint64_t>& keys = scratch.keys;
  const int64_t count = static_cast<int64_t>(keys.size());
  for (int64_t at = 0; at < count;) {
    const uint64_t id = keys[at] >> 32;
    bool is_first = true;
    for (; at < count && keys[at] >> 32 == id; ++at) {
      if (at + kAhead < count) {
        const uint64_t ahead = keys[at + kAhead];
        prefetch_row(scratch.contributions[ahead & 0xffffffffu].grad, job.dim);
        const int64_t row = static_cast<int64_t>(ahead >> 32);
        prefetch_row(job.table + row * job.dim, job.dim);
        if (job.optimizer == TableOptimizer::kAdagrad)
          prefetch_row(job.state + row * job.dim, job.dim);
        else if (job.optimizer == TableOptimizer::kRowwiseAdagrad)
          __builtin_prefetch(job.state + row);
      }
      const Contribution& one = scratch.contributions[keys[at] & 0xffffffffu];
      if (is_first)
        scaled<V>(sum, one.grad, one.scale, job.dim);
      else
        add_scaled<V>(sum, one.grad, one.scale, job.dim);
      is_first = false;
    }
    update_row<V>(job, static_cast<int64_t>(id), sum);
  }
}

template <class V>
TrainLookup make_train_lookup() {
  return {pool_bags<V>, step_rows<V>};
}
