// One lookup of a call with its ids found, as lookup.cpp reads it from the plan and lookup_run.cpp
// runs it.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace rankopt {

struct Entry {
  int64_t number;
  int64_t mode;
  const uint8_t* table;
  int64_t table_rows, row_bytes, dim, storage;
  int64_t out;
  const void* ids;
  at::ScalarType id_type;
  int64_t row_stride, id_stride;  // of the ids
  int64_t length;                 // ids per row; 0 where offsets say
  int64_t num_ids;                // in the input, with offsets
  int64_t num_read;               // of all rows
  const int64_t* offsets;
  int64_t num_offsets;
  const float* weights;

  int64_t table_bytes() const { return table_rows * row_bytes; }
  bool single() const { return length == 1 && weights == nullptr; }
  const void* ids_from(int64_t place) const {
    return static_cast<const uint8_t*>(ids) + place * (id_type == at::kLong ? 8 : 4);
  }
};

// A piece that is copied into the result beside the lookups.
struct Copy {
  const float* piece;
  int64_t row_stride, dim, out;
};

// Fills the columns of these in the rows [begin, end) of the result.
void run_lookups(c10::ArrayRef<Entry> entries, c10::ArrayRef<Copy> copies, int64_t begin,
                 int64_t end, float* out, int64_t width);

}  // namespace rankopt
