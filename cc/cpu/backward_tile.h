// The hot part of the backward, per instruction set: one tile of keys against the blocks of query
// rows that see it.
//
// Query rows are addressed as the columns of the forward are: row = query slot * group_size + head
// in the group, so that all query heads of a key/value head share its tiles. T below is the
// accumulator type.
#pragma once

#include <cstdint>

#include "cc/core/types.h"
#include "cc/cpu/isa.h"

namespace jax_fmha {
namespace cpu {

// Multiples of every micro-kernel's block. With head_dim 128 everything that a block touches stays
// in a 512 KB cache.
inline constexpr int64_t kBackwardBlockQ = 96;
inline constexpr int64_t kBackwardBlockKv = 96;

// Elements from one row of a staged matrix to the next: whole cache lines, and an odd number of
// them, so that a walk down a column visits every set of the cache.
template <typename T>
constexpr int64_t StagedStride(int64_t columns) {
  return (CeilDiv(columns * static_cast<int64_t>(sizeof(T)), 64) | 1) * 64 /
         static_cast<int64_t>(sizeof(T));
}

// A bias, its gradient, or a mask at one batch entry and the first head of the group.
template <typename Pointer>
struct ScoreView {
  Pointer data = nullptr;
  DType dtype = DType::kAbsent;
  int64_t head = 0, row = 0, col = 0;  // strides; 0 along a broadcast dimension
};

// The stride of the score tiles.
template <typename T>
inline constexpr int64_t kScoreStride = StagedStride<T>(kBackwardBlockKv);

// One key/value head of one batch entry, and the query heads that share it.
template <typename T>
struct BackwardHead {
  const void* q;     // [T, G, H] with q_stride from row to row; so are k, v, dout, dk, dv, dq
  const void* k;     // [S, H]
  const void* v;     // [S, Hv]
  const void* dout;  // [T, G, Hv]
  void* dq;          // [T, G, H]
  void* dk;          // [S, H]
  void* dv;          // [S, Hv]
  int64_t q_stride, k_stride, v_stride, dout_stride;
  int64_t group_size, head_dim, head_dim_v;
  int64_t staged_h, staged_hv;  // StagedStride of head_dim and head_dim_v
  T scale;
  bool has_soft_cap;
  T soft_cap;
  // The pairs that causal and window allow: band_lo <= kpos - qpos <= band_hi.
  int64_t band_lo, band_hi;
  ScoreView<const void*> bias;
  ScoreView<T*> dbias;
};

struct KeyTile {
  int64_t count;            // at most kBackwardBlockKv
  const int64_t* rows;      // [count] rows of k
  const int64_t* position;  // [count]
};

template <typename T>
struct QueryBlock {
  int64_t count;            // rows, at most kBackwardBlockQ
  const T* q;               // [count][staged_h]
  const T* dout;            // [count][staged_hv]
  const int64_t* rows;      // [count] rows of q
  const int64_t* heads;     // [count] heads in the group
  const int64_t* position;  // [count]; null when the band holds every pair of the tile
  const uint8_t*
      mask;        // [count][kBackwardBlockKv]; null when the mask holds every pair of the tile
  const T* lse2;   // [count] log2(e) * lse, +inf for a row with nothing to attend
  const T* delta;  // [count]
  T* dq;           // [count][staged_h], accumulated without the scale
};

// Matrices of one slot. Columns past the last key or feature hold garbage that no result reads.
template <typename T>
struct BackwardScratch {
  T* k;     // [kBackwardBlockKv][staged_h]
  T* kt;    // [panels][H][panel]
  T* vt;    // [panels][Hv][panel]
  T* dk;    // [kBackwardBlockKv][staged_h]
  T* dv;    // [kBackwardBlockKv][staged_hv]
  T* q;     // [kBackwardBlockQ][staged_h] Q and dO without dead rows, where those hold NaN
  T* dout;  // [kBackwardBlockQ][staged_hv]
  T* p;     // [kBackwardBlockQ][kScoreStride] S, then P
  T* ds;    // [kBackwardBlockQ][kScoreStride] dP, then dS
};

// The functions for one element type of q, k, v.
template <typename T>
struct BackwardFunctions {
  // Widens `count` rows of q and dout, one after another. Done once for all tiles of keys: rows of
  // a strided matrix come slowly from a far cache.
  void (*stage_queries)(const BackwardHead<T>&, int64_t count, const int64_t* rows,
                        const int64_t* heads, T* q, T* dout);
  // Stages the keys and values of a tile and clears dk and dv.
  void (*load_keys)(const BackwardHead<T>&, const KeyTile&, const BackwardScratch<T>&);
  // Adds what a block of query rows contributes to dk, dv, dq and dbias.
  void (*query_block)(const BackwardHead<T>&, const KeyTile&, const QueryBlock<T>&,
                      const BackwardScratch<T>&);
  // Rounds dk and dv into the results.
  void (*store_keys)(const BackwardHead<T>&, const KeyTile&, const BackwardScratch<T>&);
  // dq of `count` rows: the scaled sum of `num_slabs` slabs that lie `slab_stride` apart. Leaves
  // the sum in the first.
  void (*store_queries)(const BackwardHead<T>&, int64_t count, const int64_t* rows,
                        const int64_t* heads, T* slab, int64_t slab_stride, int64_t num_slabs);
  // sums[i] = <out_i, dout_i> over `count` rows of `width`. A row of `out` that is all zero has
  // nothing to attend, or nothing to say: its sum is 0 whatever `dout` holds.
  void (*row_dots)(const void* out, const void* dout, int64_t count, int64_t width, T* sums);
  // Rounds `count` elements to a float type.
  void (*round)(const T* from, int64_t count, DType to_dtype, void* to);
};

struct BackwardTable {
  BackwardFunctions<float> f32, bf16, f16;
  BackwardFunctions<double> f64;
};

#define JAX_FMHA_DECLARE(Name, space)   \
  namespace space {                     \
  extern const BackwardTable kBackward; \
  }
JAX_FMHA_FOR_EACH_ISA(JAX_FMHA_DECLARE)
#undef JAX_FMHA_DECLARE

}  // namespace cpu
}  // namespace jax_fmha
