// Checks an artifact's inputs against its contract in one call: AOTInductor libraries do not check
// theirs, and a wrong shape or id would score garbage or kill the process (pytorch issue 141115).
// Answers only whether all is well; the caller words the error on a slow path of its own. Ids beyond
// a table are mapped into it where the card says so.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace rankopt {
namespace {

// One input as the spec tensor describes it; see rankopt/artifact/contract.py for the fields.
enum Role : int64_t { kDense = 0, kIds = 1, kValues = 2, kLengths = 3, kWeights = 4, kPacked = 5 };

// What becomes of an id that is out of range.
enum Policy : int64_t { kError = 0, kClamp = 1, kHash = 2 };

struct Spec {
  int64_t role, scalar_type, width, partner, groups;
  const int64_t* upper;    // one past the largest id, per column (ids, packed) or group (values)
  const int64_t* longest;  // longest list, per group (lengths)
  const int64_t* policy;   // as upper; null where all ids out of range are errors
};

constexpr int64_t kFixedFields = 5;

// A float holds an id when it is a whole number in range; NaN fails every comparison.
template <typename T>
bool is_id(T value, int64_t upper) {
  if constexpr (std::is_floating_point_v<T>) {
    return value >= 0 && value < static_cast<T>(upper) && value == std::trunc(value);
  }
  return value >= 0 && static_cast<int64_t>(value) < upper;
}

template <typename T>
bool ids_in_range(const at::Tensor& ids, const Spec& spec) {
  const T* data = ids.const_data_ptr<T>();
  const int64_t columns = spec.width > 0 ? spec.width : 1;
  const int64_t rows = ids.numel() / columns;
  for (int64_t row = 0; row < rows; ++row) {
    bool good = true;
    for (int64_t column = 0; column < columns; ++column) {
      good &= is_id(data[row * columns + column], spec.upper[column]);
    }
    if (!good) return false;
  }
  return true;
}

// Columns whose upper is 0 hold real numbers, of which every value goes.
bool matrix_in_range(const at::Tensor& matrix, const Spec& spec) {
  const float* data = matrix.const_data_ptr<float>();
  for (int64_t row = 0; row < matrix.size(0); ++row, data += spec.width) {
    bool good = true;
    for (int64_t column = 0; column < spec.width; ++column) {
      good &= spec.upper[column] == 0 || is_id(data[column], spec.upper[column]);
    }
    if (!good) return false;
  }
  return true;
}

// Values lie group by group; lengths say how many belong to each group and row.
template <typename T>
bool ragged_in_range(const at::Tensor& values, const at::Tensor& lengths, const Spec& values_spec,
                     const Spec& lengths_spec, int64_t batch) {
  const T* data = values.const_data_ptr<T>();
  const int64_t* length = lengths.const_data_ptr<int64_t>();
  int64_t position = 0;
  const int64_t total = values.numel();
  for (int64_t group = 0; group < lengths_spec.groups; ++group) {
    for (int64_t row = 0; row < batch; ++row) {
      const int64_t count = length[group * batch + row];
      if (count < 0 || count > lengths_spec.longest[group] || position + count > total) return false;
      bool good = true;
      for (int64_t end = position + count; position < end; ++position) {
        good &= is_id(data[position], values_spec.upper[group]);
      }
      if (!good) return false;
    }
  }
  return position == total;
}

// Calls `check` with a zero of the tensor's type, one of the three that ids may have.
template <typename Check>
bool of_type(const at::Tensor& ids, const Check& check) {
  if (ids.scalar_type() == at::kLong) return check(int64_t{0});
  if (ids.scalar_type() == at::kInt) return check(int32_t{0});
  return check(0.0f);
}

// A number as an id, in range or not; false for what is none, such as 0.5 or NaN.
bool read_id(int64_t value, int64_t* id) { return *id = value, true; }
bool read_id(int32_t value, int64_t* id) { return *id = value, true; }
bool read_id(float value, int64_t* id) {
  if (!(std::fabs(value) < 0x1p62f) || value != std::trunc(value)) return false;
  *id = static_cast<int64_t>(value);
  return true;
}

// splitmix64; rankopt/models/id_ranges.py does the same.
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

int64_t mapped(int64_t id, int64_t upper, int64_t policy) {
  if (policy == kClamp) return std::clamp<int64_t>(id, 0, upper - 1);
  return static_cast<int64_t>((mix(static_cast<uint64_t>(id)) >> 1) % static_cast<uint64_t>(upper));
}

// The ids of one input, copied before the first of them is replaced.
template <typename T>
class Ids {
 public:
  explicit Ids(at::Tensor& tensor) : tensor_(tensor), data_(tensor.const_data_ptr<T>()) {}

  // Returns whether the id is in range, or could be mapped into it.
  bool take(int64_t place, int64_t upper, int64_t policy) {
    int64_t id;
    if (is_id(data_[place], upper)) return true;
    if (policy == kError || !read_id(data_[place], &id)) return false;
    if (copy_ == nullptr) {
      tensor_ = tensor_.clone();
      data_ = copy_ = tensor_.mutable_data_ptr<T>();
    }
    copy_[place] = static_cast<T>(mapped(id, upper, policy));
    return true;
  }

 private:
  at::Tensor& tensor_;
  const T* data_;
  T* copy_ = nullptr;
};

template <typename T>
bool map_columns(at::Tensor& matrix, const Spec& spec) {
  Ids<T> ids(matrix);
  const int64_t columns = spec.width > 0 ? spec.width : 1;
  const int64_t count = matrix.numel();
  for (int64_t place = 0; place < count; ++place) {
    const int64_t column = place % columns;
    const bool real_number = spec.role == kPacked && spec.upper[column] == 0;
    if (!real_number && !ids.take(place, spec.upper[column], spec.policy[column])) return false;
  }
  return true;
}

template <typename T>
bool map_lists(at::Tensor& values, const at::Tensor& lengths, const Spec& spec, int64_t batch) {
  const int64_t* length = lengths.const_data_ptr<int64_t>();
  const int64_t total = values.numel();
  Ids<T> ids(values);
  int64_t place = 0;
  for (int64_t group = 0; group < spec.groups; ++group) {
    for (int64_t row = 0; row < batch; ++row) {
      const int64_t count = length[group * batch + row];
      if (count < 0 || count > total - place) return false;
      for (const int64_t end = place + count; place < end; ++place)
        if (!ids.take(place, spec.upper[group], spec.policy[group])) return false;
    }
  }
  return place == total;
}

std::vector<Spec> read_specs(const at::Tensor& spec_tensor, size_t num_inputs) {
  const int64_t* field = spec_tensor.const_data_ptr<int64_t>();
  std::vector<Spec> specs;
  specs.reserve(num_inputs);
  for (size_t index = 0; index < num_inputs; ++index) {
    Spec spec{field[0], field[1], field[2], field[3], field[4], nullptr, nullptr, nullptr};
    const int64_t num_upper = field[kFixedFields];
    spec.upper = field + kFixedFields + 1;
    const int64_t num_longest = spec.upper[num_upper];
    spec.longest = spec.upper + num_upper + 1;
    const int64_t num_policies = spec.longest[num_longest];
    const int64_t* policy = spec.longest + num_longest + 1;
    if (num_policies > 0) spec.policy = policy;
    field = policy + num_policies;
    specs.push_back(spec);
  }
  return specs;
}

// Returns the number of rows; -1 when an input has the wrong form.
int64_t rows_of(const std::vector<at::Tensor>& inputs, const std::vector<Spec>& specs) {
  int64_t batch = -1;
  for (size_t index = 0; index < inputs.size(); ++index) {
    const at::Tensor& input = inputs[index];
    const Spec& spec = specs[index];
    const bool flat = spec.width == 0;
    if (!input.device().is_cpu() || !input.is_contiguous() || input.dim() != (flat ? 1 : 2) ||
        static_cast<int64_t>(input.scalar_type()) != spec.scalar_type ||
        (!flat && input.size(1) != spec.width)) {
      return -1;
    }
    if (spec.role == kValues || spec.role == kWeights) continue;
    if (input.size(0) % spec.groups != 0) return -1;
    const int64_t rows = input.size(0) / spec.groups;
    if (batch < 0) batch = rows;
    if (rows != batch) return -1;
  }
  return batch;
}

bool in_range(const std::vector<at::Tensor>& inputs, const std::vector<Spec>& specs, size_t index,
              int64_t batch) {
  const at::Tensor& input = inputs[index];
  const Spec& spec = specs[index];
  switch (spec.role) {
    case kIds:
      return of_type(input, [&](auto zero) { return ids_in_range<decltype(zero)>(input, spec); });
    case kPacked:
      return matrix_in_range(input, spec);
    case kWeights:
      return input.size(0) == inputs[spec.partner].size(0);
    case kValues:
      return of_type(input, [&](auto zero) {
        return ragged_in_range<decltype(zero)>(input, inputs[spec.partner], spec,
                                               specs[spec.partner], batch);
      });
    default:
      return true;
  }
}

bool map_ids(std::vector<at::Tensor>& inputs, const std::vector<Spec>& specs, size_t index,
             int64_t batch) {
  at::Tensor& input = inputs[index];
  const Spec& spec = specs[index];
  if (spec.policy == nullptr) return false;
  return of_type(input, [&](auto zero) {
    using T = decltype(zero);
    if (spec.role == kValues) return map_lists<T>(input, inputs[spec.partner], spec, batch);
    return map_columns<T>(input, spec);
  });
}

bool inputs_fit(const std::vector<at::Tensor>& inputs, const at::Tensor& spec_tensor,
                int64_t max_batch, int64_t min_batch) {
  const std::vector<Spec> specs = read_specs(spec_tensor, inputs.size());
  const int64_t batch = rows_of(inputs, specs);
  if (batch < min_batch || batch > max_batch) return false;
  for (size_t index = 0; index < inputs.size(); ++index)
    if (!in_range(inputs, specs, index, batch)) return false;
  return true;
}

// Returns the inputs with every id in range, the same tensors where it was; nothing when they break
// the contract. Ids are looked at one by one only where some are out of range.
std::vector<at::Tensor> fitted_inputs(std::vector<at::Tensor> inputs,
                                      const at::Tensor& spec_tensor, int64_t max_batch,
                                      int64_t min_batch) {
  const std::vector<Spec> specs = read_specs(spec_tensor, inputs.size());
  const int64_t batch = rows_of(inputs, specs);
  if (batch < min_batch || batch > max_batch) return {};
  for (size_t index = 0; index < inputs.size(); ++index) {
    if (in_range(inputs, specs, index, batch)) continue;
    // A second look also finds what was wrong with the lengths.
    if (!map_ids(inputs, specs, index, batch) || !in_range(inputs, specs, index, batch)) return {};
  }
  return inputs;
}

}  // namespace
}  // namespace rankopt

TORCH_LIBRARY_FRAGMENT(rankopt, m) {
  m.def("inputs_fit(Tensor[] inputs, Tensor spec, int max_batch, int min_batch=1) -> bool",
        rankopt::inputs_fit);
  m.def(
      "fitted_inputs(Tensor[] inputs, Tensor spec, int max_batch, int min_batch=1) -> Tensor[]",
      rankopt::fitted_inputs);
}
