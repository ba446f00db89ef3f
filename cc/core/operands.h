// What a kernel is given: typed pointers and how each one is indexed by batch entry.
//
// A call has up to kMaxBatchRank leading batch dimensions. Each operand has every one of them
// either in full or with size 1 (shared), so that vmap over some operands never copies the others.
// `BatchMap` turns a flat batch index into the operand's own entry.
#pragma once

#include <cstdint>

#include "cc/core/types.h"

namespace jax_fmha {

struct BatchMap {
  int rank = 0;
  int64_t sizes[kMaxBatchRank] = {};    // the call's batch dimensions, outermost first
  int64_t strides[kMaxBatchRank] = {};  // entries of this operand per step; 0 where it is shared

  int64_t operator()(int64_t b) const {
    if (rank == 1) return b * strides[0];
    int64_t entry = 0;
    for (int d = rank - 1; d >= 0; --d) {
      entry += (b % sizes[d]) * strides[d];
      b /= sizes[d];
    }
    return entry;
  }
};

struct Operand {
  const void* data = nullptr;  // null when the operand is absent
  DType dtype = DType::kAbsent;
  BatchMap batch;

  explicit operator bool() const { return data != nullptr; }

  // The first element of batch entry b, for entries of `entry_size` elements.
  template <typename T>
  const T* Entry(int64_t b, int64_t entry_size) const {
    return static_cast<const T*>(data) + batch(b) * entry_size;
  }
  // Element i of batch entry b of an int32 or int64 operand.
  int64_t Int(int64_t b, int64_t entry_size, int64_t i) const {
    const int64_t at = batch(b) * entry_size + i;
    return dtype == DType::kS64 ? static_cast<const int64_t*>(data)[at]
                                : static_cast<const int32_t*>(data)[at];
  }
  // A float32 or float64 scalar per batch entry.
  double Float(int64_t b) const {
    return dtype == DType::kF64 ? static_cast<const double*>(data)[batch(b)]
                                : static_cast<const float*>(data)[batch(b)];
  }
};

struct Result {
  void* data = nullptr;
  DType dtype = DType::kAbsent;
  BatchMap batch;
  int64_t entries = 0;  // product of the result's own batch sizes

  explicit operator bool() const { return data != nullptr; }
  template <typename T>
  T* Entry(int64_t b, int64_t entry_size) const {
    return static_cast<T*>(data) + batch(b) * entry_size;
  }
};

// Strides in elements of a [N|1, T|1, S|1] operand inside one batch entry; 0 along a broadcast
// dimension.
struct ScoreStrides {
  int64_t head = 0, row = 0, col = 0;
  int64_t entry = 0;  // elements in one batch entry
};

// Shapes are those of one batch entry.
struct Operands {
  Operand q;                // [T, N, H]
  Operand k;                // [S, K, H]
  Operand v;                // [S, K, Hv]
  Operand bias;             // [N|1, T|1, S|1], any float dtype
  Operand mask;             // [N|1, T|1, S|1] bool, true keeps
  Operand mask_tiles;       // [N|1, tile rows, tile columns] int32: 0 empty, 1 full, 2 + p partial
  Operand mask_bits;        // [P, Problem::tile_rows, Problem::tile_cols / 8] uint8, low bit first
  Operand scale;            // [] accumulator dtype
  Operand logits_soft_cap;  // [] accumulator dtype
  Operand query_offset;     // []
  Operand q_positions;      // [T]
  Operand kv_positions;     // [S]
  Operand q_seq_lengths;    // []
  Operand kv_seq_lengths;   // []
  Operand q_segment_ids;    // [T]
  Operand kv_segment_ids;   // [S]
  Operand sinks;            // [N] accumulator dtype
  ScoreStrides bias_strides;
  ScoreStrides mask_strides;

  // Forward results, and residuals of the backward.
  Result out;  // [T, N, Hv]
  Result lse;  // [N, T] accumulator dtype

  // Backward only.
  Operand saved_out;  // [T, N, Hv]
  Operand saved_lse;  // [N, T] accumulator dtype
  Operand dout;       // [T, N, Hv]
  Operand dlse;       // [N, T] accumulator dtype
  Result dq;          // [T, N, H]
  Result dk;          // [S, K, H]
  Result dv;          // [S, K, Hv]
  Result dbias;  // [N|1, T|1, S|1] bias's dtype, bias's strides; shared batch dimensions are summed
  Result dsinks;  // [N] accumulator dtype; shared batch dimensions are summed
};

}  // namespace jax_fmha
