// The operators around the interactions: checks, pieces, threads, registration with torch, and the
// C entry points that a compiled artifact calls.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "interaction.h"
#include "isa.h"
#include "launch.h"

namespace rankopt {
namespace {

const Interaction& kernels() {
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx2:
      return interaction_avx2();
    case Isa::kAvx512:
    case Isa::kAvx512Vnni:
      return interaction_avx512();
#endif
    default:
      return interaction_scalar();
  }
}

// Multiply-adds that pay for waking a thread, where the caller does not say how many rows do.
constexpr int64_t kWorkPerThread = 1 << 18;
// What a number read costs beside those multiply-adds.
constexpr int64_t kReadWork = 4;

// Fewer rows than these are multiplied one by one, which takes as long.
constexpr int64_t kMinGroupRows = 12;
// What a group of rows holds beside its fields; with more it would leave the second-level cache.
constexpr int64_t kMaxGroupBytes = 512 << 10;

// Columns that lie side by side in every row of one tensor.
struct Piece {
  const float* data;
  int64_t stride;
  int64_t width;
};
using Pieces = c10::SmallVector<Piece, 16>;

// The pieces of the tensors, and in `copies` those that had to be made contiguous.
Pieces pieces_of(const char* op, at::TensorList tensors, int64_t num_rows,
                 c10::SmallVectorImpl<at::Tensor>& copies) {
  Pieces pieces;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.dim() == 2 && tensor.scalar_type() == at::kFloat, op,
                ": every piece must be float32 [B, columns]; got ", tensor.scalar_type(), " ",
                tensor.sizes());
    TORCH_CHECK(tensor.size(0) == num_rows, op, ": every piece must have ", num_rows,
                " rows; got one with ", tensor.size(0));
    const int64_t width = tensor.size(1);
    const bool in_place = tensor.stride(1) == 1 || width <= 1;
    if (!in_place) copies.push_back(tensor.contiguous());
    const at::Tensor& held = in_place ? tensor : copies.back();
    pieces.push_back({held.const_data_ptr<float>(), held.stride(0), width});
  }
  return pieces;
}

int64_t count_fields(const char* op, const Pieces& pieces, int64_t dim) {
  TORCH_CHECK(dim >= 1, op, ": dim must be at least 1; got ", dim);
  int64_t num_fields = 0;
  for (const Piece& piece : pieces) {
    TORCH_CHECK(piece.width % dim == 0, op, ": fields of ", dim,
                " columns must fill a piece; got one of ", piece.width);
    num_fields += piece.width / dim;
  }
  return num_fields;
}

// Into fields[0], fields[stride] and so on.
void point_at_fields(const Pieces& pieces, int64_t row, int64_t dim, const float** fields,
                     int64_t stride = 1) {
  for (const Piece& piece : pieces)
    for (int64_t column = 0; column < piece.width; column += dim, fields += stride)
      *fields = piece.data + row * piece.stride + column;
}

int64_t threads_for(int64_t num_rows, int64_t row_work, int64_t rows_per_thread) {
  if (rows_per_thread > 0) return num_rows / rows_per_thread;
  return num_rows * row_work / kWorkPerThread;
}

struct Free {
  void operator()(float* memory) const { std::free(memory); }
};

// `size` floats at an address that a vector's load may ask for.
std::unique_ptr<float, Free> aligned_floats(int64_t size) {
  const size_t bytes = divide_up(std::max<int64_t>(size, 1), 16) * 64;
  auto* memory = static_cast<float*>(std::aligned_alloc(64, bytes));
  TORCH_CHECK(memory != nullptr, "dot_interaction: no memory for ", bytes, " bytes");
  return std::unique_ptr<float, Free>(memory);
}

// Rows of one call on one thread, with the memory they are laid out in.
class DotRows {
 public:
  DotRows(const Pieces& pieces, int64_t num_fields, int64_t dim, bool upper, bool diagonal)
      : kernel_(kernels()),
        pieces_(pieces),
        padded_(divide_up(num_fields, kFieldGroup) * kFieldGroup),
        row_{nullptr, num_fields, padded_, dim, upper, diagonal, nullptr, nullptr},
        group_{nullptr, num_fields, dim, upper, diagonal, 0, nullptr, nullptr, nullptr} {}

  bool takes_groups() const {
    return kernel_.dot_group != nullptr && group_floats() * int64_t{sizeof(float)} <= kMaxGroupBytes;
  }

  void row(int64_t index, float* out) {
    if (!columns_) {
      columns_ = aligned_floats(row_.dim * padded_);
      fields_.resize(padded_);
    }
    point_at_fields(pieces_, index, row_.dim, fields_.data());
    std::fill(fields_.begin() + row_.num_fields, fields_.end(), fields_[0]);
    row_.fields = fields_.data();
    row_.columns = columns_.get();
    row_.out = out;
    kernel_.dot(row_);
  }

  // `count` rows from `index` on.
  void group(int64_t index, int64_t count, float* const* out) {
    if (!group_memory_) {
      group_memory_ = aligned_floats(group_floats());
      group_fields_.resize(group_.num_fields * kRowGroup);
    }
    for (int64_t r = 0; r < kRowGroup; ++r)
      point_at_fields(pieces_, index + std::min(r, count - 1), group_.dim, group_fields_.data() + r,
                      kRowGroup);
    group_.fields = group_fields_.data();
    group_.num_rows = count;
    group_.columns = group_memory_.get();
    group_.sums = group_.columns + group_.num_fields * kDotChunk * kRowGroup;
    group_.out = out;
    kernel_.dot_group(group_);
  }

 private:
  int64_t group_floats() const {
    const int64_t num_fields = group_.num_fields;
    const int64_t num_pairs = num_fields * (num_fields + 1) / 2;
    return (num_fields * kDotChunk + divide_up(num_pairs, kRowGroup) * kRowGroup) * kRowGroup;
  }

  const Interaction& kernel_;
  const Pieces& pieces_;
  int64_t padded_;
  DotRow row_;
  DotGroup group_;
  std::unique_ptr<float, Free> columns_, group_memory_;
  c10::SmallVector<const float*, 64> fields_;
  c10::SmallVector<const float*, 512> group_fields_;
};

}  // namespace

at::Tensor dot_interaction(at::TensorList before, at::TensorList fields, int64_t dim, bool upper,
                           bool diagonal, int64_t rows_per_thread) {
  TORCH_CHECK(!fields.empty(), "dot_interaction: there are no fields");
  TORCH_CHECK(fields[0].dim() == 2, "dot_interaction: every piece must be float32 [B, columns]; got ",
              fields[0].scalar_type(), " ", fields[0].sizes());
  const int64_t num_rows = fields[0].size(0);
  c10::SmallVector<at::Tensor, 2> copies;
  copies.reserve(before.size() + fields.size());
  const Pieces lead = pieces_of("dot_interaction", before, num_rows, copies);
  const Pieces parts = pieces_of("dot_interaction", fields, num_rows, copies);
  const int64_t num_fields = count_fields("dot_interaction", parts, dim);
  int64_t lead_width = 0;
  for (const Piece& piece : lead) lead_width += piece.width;
  const int64_t width = lead_width + num_fields * (num_fields + (diagonal ? 1 : -1)) / 2;
  at::Tensor out = at::empty({num_rows, width}, fields[0].options());
  if (out.numel() == 0) return out;

  float* const first = out.mutable_data_ptr<float>();
  const int64_t row_work = dim * num_fields * (num_fields / 2 + kReadWork);
  const int64_t wanted = threads_for(num_rows, row_work, rows_per_thread);
  share_out(wanted, num_rows, 1, [&](Range rows, Range) {
    DotRows run(parts, num_fields, dim, upper, diagonal);
    // Past what is copied of the pieces before.
    const auto place = [&](int64_t index) {
      float* to = first + index * width;
      for (const Piece& piece : lead) {
        std::memcpy(to, piece.data + index * piece.stride, piece.width * sizeof(float));
        to += piece.width;
      }
      return to;
    };
    for (int64_t index = rows.begin; index < rows.end;) {
      const int64_t left = std::min(rows.end - index, kRowGroup);
      const int64_t count = run.takes_groups() && left >= kMinGroupRows ? left : 1;
      float* to[kRowGroup];
      for (int64_t r = 0; r < count; ++r) to[r] = place(index + r);
      if (count > 1)
        run.group(index, count, to);
      else
        run.row(index, to[0]);
      index += count;
    }
  });
  return out;
}

at::Tensor fm_interaction(at::TensorList fields, int64_t dim, bool total, int64_t rows_per_thread) {
  TORCH_CHECK(!fields.empty(), "fm_interaction: there are no fields");
  TORCH_CHECK(fields[0].dim() == 2, "fm_interaction: every piece must be float32 [B, columns]; got ",
              fields[0].scalar_type(), " ", fields[0].sizes());
  const int64_t num_rows = fields[0].size(0);
  c10::SmallVector<at::Tensor, 2> copies;
  copies.reserve(fields.size());
  const Pieces parts = pieces_of("fm_interaction", fields, num_rows, copies);
  const int64_t num_fields = count_fields("fm_interaction", parts, dim);
  const int64_t width = total ? 1 : dim;
  at::Tensor out = total ? at::empty({num_rows}, fields[0].options())
                         : at::empty({num_rows, dim}, fields[0].options());
  if (num_rows == 0) return out;

  float* const first = out.mutable_data_ptr<float>();
  const auto fm = kernels().fm;
  const int64_t wanted = threads_for(num_rows, dim * num_fields * kReadWork, rows_per_thread);
  share_out(wanted, num_rows, 1, [&](Range rows, Range) {
    c10::SmallVector<const float*, 64> pointers(num_fields);
    FmRow row{pointers.data(), num_fields, dim, total, nullptr};
    for (int64_t index = rows.begin; index < rows.end; ++index) {
      point_at_fields(parts, index, dim, pointers.data());
      row.out = first + index * width;
      fm(row);
    }
  });
  return out;
}

namespace {

// The shape functions: what torch.export and the compiler run, with symbolic sizes.
c10::SymInt total_width(at::TensorList tensors) {
  c10::SymInt width = 0;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.dim() == 2, "a piece must be [B, columns]; got ", tensor.dim(), " dimensions");
    width += tensor.sym_size(1);
  }
  return width;
}

at::Tensor dot_interaction_shape(at::TensorList before, at::TensorList fields, int64_t dim, bool,
                                 bool diagonal, int64_t) {
  TORCH_CHECK(!fields.empty() && dim >= 1, "dot_interaction: there are no fields");
  const c10::SymInt num_fields = total_width(fields) / dim;
  const c10::SymInt num_pairs = num_fields * (num_fields + (diagonal ? 1 : -1)) / 2;
  return at::empty_symint({fields[0].sym_size(0), total_width(before) + num_pairs},
                          fields[0].options().memory_format(at::MemoryFormat::Contiguous));
}

at::Tensor fm_interaction_shape(at::TensorList fields, int64_t dim, bool total, int64_t) {
  TORCH_CHECK(!fields.empty() && dim >= 1, "fm_interaction: there are no fields");
  const auto options = fields[0].options().memory_format(at::MemoryFormat::Contiguous);
  const c10::SymInt num_rows = fields[0].sym_size(0);
  if (total) return at::empty_symint({num_rows}, options);
  return at::empty_symint({num_rows, dim}, options);
}

c10::SmallVector<at::Tensor, 16> tensors_of(const AtenTensorHandle* handles, int64_t count) {
  c10::SmallVector<at::Tensor, 16> tensors;
  for (int64_t index = 0; index < count; ++index)
    tensors.push_back(*torch::aot_inductor::tensor_handle_to_tensor_pointer(handles[index]));
  return tensors;
}

}  // namespace
}  // namespace rankopt

TORCH_LIBRARY_FRAGMENT(rankopt, m) {
  m.def(
      "dot_interaction(Tensor[] before, Tensor[] fields, int dim, bool upper, bool diagonal, "
      "int rows_per_thread) -> Tensor");
  m.def("fm_interaction(Tensor[] fields, int dim, bool total, int rows_per_thread) -> Tensor");
}

TORCH_LIBRARY_IMPL(rankopt, CPU, m) {
  m.impl("dot_interaction", rankopt::dot_interaction);
  m.impl("fm_interaction", rankopt::fm_interaction);
}

TORCH_LIBRARY_IMPL(rankopt, Meta, m) {
  m.impl("dot_interaction", rankopt::dot_interaction_shape);
  m.impl("fm_interaction", rankopt::fm_interaction_shape);
}

extern "C" {

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_dot_interaction(
    const AtenTensorHandle* before, int64_t num_before, const AtenTensorHandle* fields,
    int64_t num_fields, int64_t dim, int32_t upper, int32_t diagonal, int64_t rows_per_thread,
    AtenTensorHandle* result) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(rankopt::dot_interaction(
        rankopt::tensors_of(before, num_before), rankopt::tensors_of(fields, num_fields), dim,
        upper != 0, diagonal != 0, rows_per_thread));
  });
}

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_fm_interaction(const AtenTensorHandle* fields,
                                                               int64_t num_fields, int64_t dim,
                                                               int32_t total,
                                                               int64_t rows_per_thread,
                                                               AtenTensorHandle* result) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(rankopt::fm_interaction(rankopt::tensors_of(fields, num_fields), dim,
                                                        total != 0, rows_per_thread));
  });
}

}  // extern "C"
