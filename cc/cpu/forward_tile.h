// The hot loops of the forward, one table of functions per instruction set.
//
// Query columns: a tile holds `columns` of (row, head of the group) pairs, the head innermost, cut
// in panels. A panel is a matrix with one query column per vector lane, so that softmax statistics
// are plain vertical operations:
//   q [panel][head_dim][kPanel]    S^T, P^T [key][kPanel]    O^T [panel][head_dim_v][kPanel]    m,
//   l [panel][kPanel]
// Scores are in log2 units: log2(e) is folded into the scale, the bias and the soft cap.
//
// The decode's tables have the same functions for few columns, with every [..][kPanel] above turned
// into [kPanel][..]: a column's head dimension, or its scores, lie along the lanes, and rows of k
// and v are read where they are stored.
#pragma once

#include <cstdint>

#include "cc/core/types.h"
#include "cc/cpu/ahead.h"
#include "cc/cpu/isa.h"

namespace jax_fmha {
namespace cpu {

// float16, bfloat16, float32, float64
inline constexpr int kNumStorages = 4;
inline int StorageOf(DType dtype) {
  return static_cast<int>(dtype) - static_cast<int>(DType::kF16);
}

// The integer that fills a lane of T.
template <typename T>
struct LaneIntOf {
  using type = int32_t;
};
template <>
struct LaneIntOf<double> {
  using type = int64_t;
};
template <typename T>
using LaneInt = typename LaneIntOf<T>::type;

// Rows of a matrix, picked by number: index[i], or first + i without an index.
struct RowSet {
  const void* base;      // row 0
  int64_t stride;        // elements from one row to the next
  const int64_t* index;  // or null
  int64_t first;
};

// A panel's part of a bias or mask: columns [0, columns) against keys [0, keys).
struct ScoreOperand {
  const void* base;
  const int64_t* offsets;  // [columns] elements from base to the column's key 0
  bool same_offsets;       // the operand is broadcast over the panel's columns
  int64_t columns;
  const int64_t* key_index;  // key number, or null: first_key + j
  int64_t first_key;
  int64_t key_stride;  // elements from one key to the next; 0 when broadcast
  int64_t keys;
};

// The running softmax of one panel.
template <typename T>
struct PanelState {
  T* o;  // [head_dim_v][kPanel], not normalised
  T* m;  // [kPanel] largest score so far
  T* l;  // [kPanel] sum of exp2(score - m)
};

// One panel against one block of keys.
template <typename T>
struct PanelBlock {
  int64_t columns;  // in use, at most kPanel
  int64_t head_dim;
  int64_t head_dim_v;
  int64_t keys;
  const T* q;     // [head_dim][kPanel], times scale * log2(e)
  RowSet k_rows;  // as stored; for tables that do not stage
  RowSet v_rows;
  const T* k;  // staged [keys / strip][head_dim][strip]
  const T* v;  // staged [head_dim_v / strip][keys][strip], strips v_stride apart
  int64_t v_stride;
  const T* bias;                   // [keys][kPanel], times log2(e), or null
  const LaneInt<T>* mask;          // [keys][kPanel] all bits set to keep, or null
  const LaneInt<T>* key_position;  // [keys], or null when all pairs are within the band
  const LaneInt<T>*
      lowest;  // [kPanel] key positions that the column may attend, both ends included
  const LaneInt<T>* highest;
  bool has_soft_cap;
  T soft_cap;            // times log2(e)
  T* scores;             // scratch [keys][kPanel]
  Ahead next_k, next_v;  // rows to fetch meanwhile, for the next block
};

enum class MaskKind { kNone, kSome, kAll };  // how much of a panel a mask keeps

template <typename T>
struct ForwardTile {
  int panel;  // kPanel: columns of a full panel
  int strip;  // keys, or features of a value, that are staged side by side; a panel's keys begin at
              // a multiple

  // Query columns to panels, times `factor`. Column c is element (c % group) * head_dim of row c /
  // group.
  void (*pack_q[kNumStorages])(const RowSet& rows, int64_t group, int64_t columns, int64_t head_dim,
                               T factor, T* panels);
  // Keys to T, in strips; may write a vector past the last. Null where attend reads rows as they
  // are stored.
  void (*stage_keys[kNumStorages])(const RowSet& rows, int64_t count, int64_t width, T* to);
  // Values to T, cut into strips as the blocks of the product are; likewise, in every strip.
  void (*stage_values[kNumStorages])(const RowSet& rows, int64_t count, int64_t width, T* to,
                                     int64_t to_stride);
  // bias * log2(e) as [keys][kPanel]; columns past the last are 0. `scratch` holds kLanes * keys
  // elements.
  void (*stage_bias[kNumStorages])(const ScoreOperand& bias, T* scratch, T* to);
  // Writes the mask as lanes [keys][kPanel] when it keeps some.
  MaskKind (*stage_mask)(const ScoreOperand& mask, LaneInt<T>* to);
  void (*attend[kNumStorages])(const PanelBlock<T>& block, const PanelState<T>& state);
  // Adds to the first `columns` of `state` what `other` gathered over other keys.
  void (*merge)(const PanelState<T>& other, int64_t head_dim_v, int64_t columns,
                const PanelState<T>& state);
  // Takes the sinks in (one per column, times log2(e), or null), leaves the final m and l in
  // `state` and writes the normalised columns [0, columns); column `c` is column `first_column + c`
  // of the rows.
  void (*finish[kNumStorages])(const PanelState<T>& state, const T* sinks, int64_t head_dim_v,
                               const RowSet& out, int64_t group, int64_t first_column,
                               int64_t columns);
};

#define JAX_FMHA_DECLARE(Name, space)           \
  namespace space {                             \
  extern const ForwardTile<float> kForwardF32;  \
  extern const ForwardTile<double> kForwardF64; \
  extern const ForwardTile<float> kDecodeF32;   \
  extern const ForwardTile<double> kDecodeF64;  \
  }
JAX_FMHA_FOR_EACH_ISA(JAX_FMHA_DECLARE)
#undef JAX_FMHA_DECLARE

}  // namespace cpu
}  // namespace jax_fmha
