// The operators around the lookup kernels: checks, threads.
#include "lookup.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <memory>

#include "launch.h"
#include "lookup_entry.h"
#include "lookup_ops.h"

namespace rankopt {
namespace {

// A thread is worth waking for so many bytes of rows and results.
constexpr int64_t kBytesPerThread = 192 << 10;

int64_t row_bytes_of(int64_t dim, int64_t storage) {
  constexpr int64_t kBits[] = {32, 16, 8, 4, 2};
  const bool quantised = storage >= static_cast<int64_t>(Storage::kInt8);
  return (dim * kBits[storage] + 7) / 8 + (quantised ? 4 : 0);
}

using Plan = c10::SmallVector<Entry, 32>;

class Reader {
 public:
  Reader(const at::Tensor& store, const at::Tensor& plan, const std::vector<at::Tensor>& inputs)
      : inputs_(inputs) {
    TORCH_CHECK(store.scalar_type() == at::kByte && store.is_contiguous(),
                "lookup: the store must be contiguous bytes; got ", store.scalar_type());
    TORCH_CHECK(plan.scalar_type() == at::kLong && plan.is_contiguous() && plan.dim() == 2 &&
                    plan.size(1) == kNumPlanFields,
                "lookup: the plan must be contiguous int64 [T, ", int64_t{kNumPlanFields},
                "]; got ", plan.scalar_type(), " ", plan.sizes());
    store_ = store.const_data_ptr<uint8_t>();
    store_bytes_ = store.numel();
    fields_ = plan.const_data_ptr<int64_t>();
    num_lookups = plan.size(0);
  }

  const int64_t* fields(int64_t number) const { return fields_ + number * kNumPlanFields; }

  // The table, without the ids.
  Entry table(int64_t number) const {
    const int64_t* field = fields(number);
    Entry entry{};
    entry.number = number;
    entry.mode = field[kMode];
    entry.table_rows = field[kTableRows];
    entry.dim = field[kDim];
    entry.storage = field[kStorage];
    entry.out = field[kOut];
    TORCH_CHECK(entry.storage >= 0 && entry.storage < kNumStorages && entry.dim > 0 &&
                    entry.table_rows >= 0 && field[kOffset] >= 0,
                "lookup: lookup ", number, " of the plan is damaged");
    entry.row_bytes = row_bytes_of(entry.dim, entry.storage);
    TORCH_CHECK(entry.table_rows <= (store_bytes_ - field[kOffset]) / entry.row_bytes,
                "lookup: the table of lookup ", number, " reaches past the store's ",
                store_bytes_, " bytes");
    entry.table = store_ + field[kOffset];
    return entry;
  }

  const at::Tensor& input(int64_t index) const {
    TORCH_CHECK(index >= 0 && index < static_cast<int64_t>(inputs_.size()),
                "lookup: the plan names input ", index, " of ", inputs_.size());
    return inputs_[index];
  }

  // A tensor that is not laid out as it must be is copied, and kept until the call ends.
  const at::Tensor& keep(at::Tensor copy) {
    kept_.push_back(std::move(copy));
    return kept_.back();
  }

  // Adds up the lengths in an input, once in a call: list i is ids [i] to [i + 1] of what it returns.
  const int64_t* edges_of(int64_t index, int64_t num_ids) {
    for (const Edges& found : edges_)
      if (found.input == index && found.num_ids == num_ids) return found.places.get();
    const at::Tensor* lengths = &input(index);
    if (lengths->scalar_type() != at::kLong || !lengths->is_contiguous())
      lengths = &keep(lengths->to(at::kLong).contiguous());
    const int64_t* length = lengths->const_data_ptr<int64_t>();
    const int64_t count = lengths->numel();
    std::unique_ptr<int64_t[]> places(new int64_t[count + 1]);
    // As unsigned numbers, a negative length is larger than any total.
    const uint64_t total = static_cast<uint64_t>(num_ids);
    uint64_t place = 0;
    bool good = true;
    for (int64_t i = 0; i < count; ++i) {
      places[i] = static_cast<int64_t>(place);
      place += static_cast<uint64_t>(length[i]);
      good &= static_cast<uint64_t>(length[i]) <= total && place <= total;
    }
    places[count] = num_ids;
    TORCH_CHECK(good && place == total, "lookup: the lengths in input ", index,
                " do not add up to the ", num_ids, " ids, or one is negative");
    edges_.push_back({index, num_ids, std::move(places)});
    return edges_.back().places.get();
  }

  int64_t num_lookups;

 private:
  struct Edges {
    int64_t input, num_ids;
    std::unique_ptr<int64_t[]> places;
  };

  const std::vector<at::Tensor>& inputs_;
  const uint8_t* store_;
  int64_t store_bytes_;
  const int64_t* fields_;
  c10::SmallVector<at::Tensor, 4> kept_;
  c10::SmallVector<Edges, 2> edges_;
};

void set_ids(Entry& entry, const at::Tensor& ids) {
  entry.id_type = ids.scalar_type();
  TORCH_CHECK(entry.id_type == at::kLong || entry.id_type == at::kInt || entry.id_type == at::kFloat,
              "lookup: ids must be int64, int32 or float32; got ", entry.id_type);
  entry.ids = ids.const_data_ptr();
}

void read_rectangle(Entry& entry, const int64_t* field, const at::Tensor& ids, int64_t num_rows) {
  const int64_t column = field[kColumn];
  const int64_t columns = ids.dim() == 2 ? ids.size(1) : 1;
  TORCH_CHECK((ids.dim() == 1 || ids.dim() == 2) && ids.size(0) == num_rows && column >= 0 &&
                  column + entry.length <= columns,
              "lookup: lookup ", entry.number, " takes columns ", column, " to ",
              column + entry.length, " of ", num_rows, " rows; got ids ", ids.sizes());
  entry.num_read = num_rows * entry.length;
  entry.row_stride = ids.stride(0);
  entry.id_stride = ids.dim() == 2 ? ids.stride(1) : 0;
  entry.ids = entry.ids_from(column * entry.id_stride);
}

// The lists of one feature among several: the lengths lie feature after feature, and so do the ids.
void read_lengths(Reader& reader, Entry& entry, const int64_t* field, int64_t num_rows) {
  const int64_t groups = field[kGroups], feature = field[kColumn];
  const at::Tensor& lengths = reader.input(field[kOffsets]);
  const int64_t count = lengths.numel();
  TORCH_CHECK(groups > 0 && feature >= 0 && feature < groups && lengths.dim() == 1 &&
                  count % groups == 0 && count / groups == num_rows,
              "lookup: lookup ", entry.number, " reads feature ", feature, " of ", groups, " times ",
              num_rows, " lengths; got ", lengths.sizes());
  entry.offsets = reader.edges_of(field[kOffsets], entry.num_ids) + feature * num_rows;
  entry.num_offsets = num_rows + 1;
  entry.num_read = entry.offsets[num_rows] - entry.offsets[0];
}

void read_lists(Reader& reader, Entry& entry, const int64_t* field, const at::Tensor& ids,
                int64_t num_rows) {
  TORCH_CHECK(ids.dim() == 1, "lookup: the ids of lists must be [L]; got ", ids.sizes());
  entry.row_stride = ids.numel() > 0 ? ids.stride(0) : 1;
  entry.num_ids = entry.num_read = ids.numel();
  if (field[kGroups] != 0) {
    read_lengths(reader, entry, field, num_rows);
    return;
  }
  const at::Tensor* offsets = &reader.input(field[kOffsets]);
  const int64_t count = offsets->numel();
  TORCH_CHECK(offsets->dim() == 1 && (count == num_rows || count == num_rows + 1),
              "lookup: lookup ", entry.number, " needs ", num_rows, " offsets, or one more; got ",
              offsets->sizes());
  if (offsets->scalar_type() != at::kLong || !offsets->is_contiguous())
    offsets = &reader.keep(offsets->to(at::kLong).contiguous());
  entry.offsets = offsets->const_data_ptr<int64_t>();
  entry.num_offsets = count;
}

Entry read_entry(Reader& reader, int64_t number, int64_t num_rows, int64_t width) {
  const int64_t* field = reader.fields(number);
  Entry entry = reader.table(number);
  TORCH_CHECK(entry.out >= 0 && entry.out + entry.dim <= width, "lookup: lookup ", number,
              " writes past the ", width, " columns of the result");
  const at::Tensor& ids = reader.input(field[kSource]);
  set_ids(entry, ids);
  entry.length = field[kLength];
  const bool lists = entry.length == 0;
  if (lists)
    read_lists(reader, entry, field, ids, num_rows);
  else
    read_rectangle(entry, field, ids, num_rows);
  if (field[kWeights] >= 0) {
    const at::Tensor* weights = &reader.input(field[kWeights]);
    const int64_t wanted = lists ? entry.num_ids : num_rows * entry.length;
    TORCH_CHECK(weights->scalar_type() == at::kFloat && weights->numel() == wanted,
                "lookup: lookup ", number, " needs ", wanted, " float32 weights; got ",
                weights->numel(), " of ", weights->scalar_type());
    if (!weights->is_contiguous()) weights = &reader.keep(weights->contiguous());
    entry.weights = weights->const_data_ptr<float>();
  }
  return entry;
}

Copy read_copy(Reader& reader, int64_t number, int64_t num_rows, int64_t width) {
  const int64_t* field = reader.fields(number);
  const at::Tensor* piece = &reader.input(field[kSource]);
  const int64_t dim = field[kDim], out = field[kOut];
  TORCH_CHECK(piece->scalar_type() == at::kFloat && piece->dim() >= 1 &&
                  piece->size(0) == num_rows && piece->numel() == num_rows * dim && dim > 0 &&
                  out >= 0 && out + dim <= width,
              "lookup: piece ", number, " of the result must be float32 [", num_rows, ", ", dim,
              "] in ", width, " columns; got ", piece->scalar_type(), " ", piece->sizes());
  const bool rows_lie_whole = piece->dim() == 2 && piece->stride(1) == 1;
  if (!rows_lie_whole) piece = &reader.keep(piece->contiguous());
  const int64_t stride = rows_lie_whole ? piece->stride(0) : dim;
  return {piece->const_data_ptr<float>(), stride, dim, out};
}

}  // namespace

at::Tensor lookup_rows(const at::Tensor& store, const at::Tensor& plan,
                       const std::vector<at::Tensor>& inputs, int64_t num_rows, int64_t width) {
  TORCH_CHECK(num_rows >= 0 && width >= 0, "lookup: sizes must not be negative");
  Reader reader(store, plan, inputs);
  Plan entries;
  c10::SmallVector<Copy, 4> copies;
  int64_t bytes = num_rows * width * int64_t{sizeof(float)};
  int64_t filled = 0;
  for (int64_t number = 0; number < reader.num_lookups; ++number) {
    if (reader.fields(number)[kMode] == kCopy) {
      copies.push_back(read_copy(reader, number, num_rows, width));
    } else {
      entries.push_back(read_entry(reader, number, num_rows, width));
      const Entry& entry = entries.back();
      bytes += entry.row_bytes * entry.num_read;
    }
    filled += reader.fields(number)[kDim];
  }
  TORCH_CHECK(filled == width, "lookup: the plan fills ", filled, " of ", width, " columns");
  at::Tensor result = at::empty({num_rows, width}, at::TensorOptions().dtype(at::kFloat));
  float* out = result.mutable_data_ptr<float>();
  if (num_rows == 0) return result;
  share_out(bytes / kBytesPerThread, num_rows, 1, [&](Range rows, Range) {
    run_lookups(entries, copies, rows.begin, rows.end, out, width);
  });
  return result;
}

at::Tensor lookup_sequences(const at::Tensor& store, const at::Tensor& plan,
                            const std::vector<at::Tensor>& inputs, int64_t width) {
  Reader reader(store, plan, inputs);
  TORCH_CHECK(reader.num_lookups == static_cast<int64_t>(inputs.size()),
              "lookup: the plan holds ", reader.num_lookups, " sequences; got ids of ",
              inputs.size());
  int64_t num_ids = 0;
  for (const at::Tensor& ids : inputs) num_ids += ids.numel();
  at::Tensor result = at::empty({num_ids, width}, at::TensorOptions().dtype(at::kFloat));
  float* out = result.mutable_data_ptr<float>();
  for (int64_t number = 0; number < reader.num_lookups; ++number) {
    Entry entry = reader.table(number);
    TORCH_CHECK(entry.dim == width, "lookup: lookup ", number, " has rows of ", entry.dim,
                " values; all must have ", width);
    const at::Tensor* ids = &inputs[number];
    if (!ids->is_contiguous()) ids = &reader.keep(ids->contiguous());
    set_ids(entry, *ids);
    entry.out = 0;
    entry.length = 1;
    entry.row_stride = 1;
    const int64_t count = ids->numel();
    const int64_t bytes = count * (entry.row_bytes + width * int64_t{sizeof(float)});
    if (count > 0) {
      share_out(bytes / kBytesPerThread, count, 1, [&](Range rows, Range) {
        run_lookups(entry, {}, rows.begin, rows.end, out, width);
      });
    }
    out += count * width;
  }
  return result;
}

}  // namespace rankopt
