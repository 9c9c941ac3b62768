// Checks an artifact's inputs against its contract in one call: AOTInductor libraries do not check
// theirs, and a wrong shape or id would score garbage or kill the process (pytorch issue 141115).
// Answers only whether all is well; the caller words the error on a slow path of its own.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cstdint>

namespace rankopt {
namespace {

// One input as the spec tensor describes it; see rankopt/artifact/contract.py for the fields.
enum Role : int64_t { kDense = 0, kIds = 1, kValues = 2, kLengths = 3, kWeights = 4 };

struct Spec {
  int64_t role, scalar_type, width, partner, groups;
  const int64_t* upper;    // one past the largest id, per column (ids) or group (values)
  const int64_t* longest;  // longest list, per group (lengths)
};

constexpr int64_t kFixedFields = 5;

template <typename T>
bool ids_in_range(const at::Tensor& ids, const Spec& spec) {
  const T* data = ids.const_data_ptr<T>();
  const int64_t columns = spec.width > 0 ? spec.width : 1;
  const int64_t rows = ids.numel() / columns;
  for (int64_t row = 0; row < rows; ++row) {
    bool good = true;
    for (int64_t column = 0; column < columns; ++column) {
      const int64_t id = data[row * columns + column];
      good &= id >= 0 && id < spec.upper[column];
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
        const int64_t id = data[position];
        good &= id >= 0 && id < values_spec.upper[group];
      }
      if (!good) return false;
    }
  }
  return position == total;
}

bool inputs_fit(const std::vector<at::Tensor>& inputs, const at::Tensor& spec_tensor,
                int64_t max_batch) {
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
  if (batch < 1 || batch > max_batch) return false;
  for (size_t index = 0; index < inputs.size(); ++index) {
    const at::Tensor& input = inputs[index];
    const Spec& spec = specs[index];
    const bool wide = input.scalar_type() == at::kLong;
    if (spec.role == kIds &&
        !(wide ? ids_in_range<int64_t>(input, spec) : ids_in_range<int32_t>(input, spec))) {
      return false;
    }
    if (spec.role == kWeights && input.size(0) != inputs[spec.partner].size(0)) return false;
    if (spec.role == kValues) {
      const at::Tensor& lengths = inputs[spec.partner];
      const Spec& lengths_spec = specs[spec.partner];
      if (!(wide ? ragged_in_range<int64_t>(input, lengths, spec, lengths_spec, batch)
                 : ragged_in_range<int32_t>(input, lengths, spec, lengths_spec, batch))) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace
}  // namespace rankopt

TORCH_LIBRARY_FRAGMENT(rankopt, m) {
  m.def("inputs_fit(Tensor[] inputs, Tensor spec, int max_batch) -> bool", rankopt::inputs_fit);
}
