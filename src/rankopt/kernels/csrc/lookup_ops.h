// The lookup operators, as C++ functions. lookup_op.cpp registers them.
//
// A plan is an int64 matrix, one row per lookup, its fields as below; rankopt/kernels/lookup.py
// writes it. A lookup reads its ids from one of `inputs`: a column of a matrix, several columns
// (`length`), or a list per row, with offsets or with the lengths of several features' lists.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace rankopt {

enum PlanField : int64_t {
  kMode,      // Mode
  kOffset,    // first byte of the table in the store
  kTableRows,
  kDim,
  kStorage,   // Storage
  kOut,       // first column of the result
  kSource,    // which of `inputs` holds the ids; of a copied piece, the piece
  kColumn,    // first column of the ids in it; of lists with lengths, which feature's
  kLength,    // ids per row; 0 where offsets or lengths say
  kOffsets,   // which of `inputs` holds the offsets of the lists, or their lengths, or -1
  kWeights,   // which of `inputs` holds one weight per id, or -1
  kGroups,    // features whose lists the ids hold one after the other, with lengths; 0 with offsets
  kNumPlanFields
};

enum Mode : int64_t { kSum, kMean, kCopy };

// Returns float32 [num_rows, width]: every lookup's row, pooled, in its columns.
at::Tensor lookup_rows(const at::Tensor& store, const at::Tensor& plan,
                       const std::vector<at::Tensor>& inputs, int64_t num_rows, int64_t width);

// Returns float32 [N, width]: one row per id, of all lookups behind each other. Lookup i reads all
// of inputs[i].
at::Tensor lookup_sequences(const at::Tensor& store, const at::Tensor& plan,
                            const std::vector<at::Tensor>& inputs, int64_t width);

}  // namespace rankopt
