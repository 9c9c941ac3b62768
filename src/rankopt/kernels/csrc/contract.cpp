// Checks an artifact's inputs against its contract in one call: AOTInductor libraries do not check
// theirs, and a wrong shape or id would score garbage or kill the process (pytorch issue 141115).
// Answers only whether all is well; the caller words the error on a slow path of its own.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

namespace rankopt {
namespace {

// One input as the spec tensor describes it; see rankopt/artifact/contract.py for the fields.
enum Role : int64_t { kDense = 0, kIds = 1, kValues = 2, kLengths = 3, kWeights = 4, kPacked = 5 };

struct Spec {
  int64_t role, scalar_type, width, partner, groups;
  const int64_t* upper;    // one past the largest id, per column (ids, packed) or group (values)
  const int64_t* longest;  // longest list, per group (lengths)
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

bool inputs_fit(const std::vector<at::Tensor>& inputs, const at::Tensor& spec_tensor,
                int64_t max_batch, int64_t min_batch) {
  const int64_t* field = spec_tensor.const_data_ptr<int64_t>();
  std::vector<Spec> specs;
  specs.reserve(inputs.size());
  for (size_t index = 0; index < inputs.size(); ++index) {
    Spec spec{field[0], field[1], field[2], field[3], field[4], nullptr, nullptr};
    const int64_t num_upper = field[kFixedFields];
    spec.upper = field + kFixedFields + 1;
    const int64_t num_longest = spec.upper[num_upper];
    spec.longest = spec.upper + num_upper + 1;
    field = spec.longest + num_longest;
    specs.push_back(spec);
  }
  int64_t batch = -1;
  for (size_t index = 0; index < inputs.size(); ++index) {
    const at::Tensor& input = inputs[index];
    const Spec& spec = specs[index];
    const bool flat = spec.width == 0;
    if (!input.device().is_cpu() || !input.is_contiguous() || input.dim() != (flat ? 1 : 2) ||
        static_cast<int64_t>(input.scalar_type()) != spec.scalar_type ||
        (!flat && input.size(1) != spec.width)) {
      return false;
    }
    if (spec.role == kValues || spec.role == kWeights) continue;
    if (input.size(0) % spec.groups != 0) return false;
    const int64_t rows = input.size(0) / spec.groups;
    if (batch < 0) batch = rows;
    if (rows != batch) return false;
  }
  if (batch < min_batch || batch > max_batch) return false;
  for (size_t index = 0; index < inputs.size(); ++index) {
    const at::Tensor& input = inputs[index];
    const Spec& spec = specs[index];
    if (spec.role == kIds && !of_type(input, [&](auto zero) {
          return ids_in_range<decltype(zero)>(input, spec);
        })) {
      return false;
    }
    if (spec.role == kPacked && !matrix_in_range(input, spec)) return false;
    if (spec.role == kWeights && input.size(0) != inputs[spec.partner].size(0)) return false;
    if (spec.role == kValues) {
      const at::Tensor& lengths = inputs[spec.partner];
      const Spec& lengths_spec = specs[spec.partner];
      if (!of_type(input, [&](auto zero) {
            return ragged_in_range<decltype(zero)>(input, lengths, spec, lengths_spec, batch);
          })) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace
}  // namespace rankopt

TORCH_LIBRARY_FRAGMENT(rankopt, m) {
  m.def("inputs_fit(Tensor[] inputs, Tensor spec, int max_batch, int min_batch=1) -> bool",
        rankopt::inputs_fit);
}
