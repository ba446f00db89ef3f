// The problem as kernels see it: plain sizes, operands with their batch maps, and how to read them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cc/core/operands.h"
#include "cc/core/problem.h"
#include "cc/gpu/plan.h"

namespace jax_fmha::gpu {

// What segment ids mean, computed on the device before the main kernel.
struct SegmentPlan {
  // [batch, PlanStride(T)]: first and one past the last key of the row's segment
  const int2* rows = nullptr;
  const PlanBlock* blocks = nullptr;  // [batch, ceil(T / kPlanRows)]
};

// A block-sparse mask as the caller built it; see Operands.
struct TileMaskParams {
  Operand tiles, bits;
  int num_heads, grid_rows, grid_cols, tile_rows, tile_cols;
  int64_t num_partial;
};

// Words of lines of tiles: those of one query tile along the keys, or of one key tile along the
// queries. Without a mask there are none.
struct MaskPlan {
  const TileWord* words = nullptr;  // [entry, num_heads, num_lines, line_words]
  BatchMap map;
  int num_heads = 0, num_lines = 0, line_words = 0;
};

struct ScoreParams {
  int batch, seqlen_q, seqlen_kv, num_q_heads, num_kv_heads, group_size, head_dim, head_dim_v;
  bool is_causal;
  int64_t window_left, window_right;
  float default_scale;
  Operand bias, mask, scale, logits_soft_cap, query_offset, q_positions, kv_positions,
      q_seq_lengths, kv_seq_lengths, q_segment_ids, kv_segment_ids, sinks;
  ScoreStrides bias_strides, mask_strides;
  TileMaskParams tile_mask;
  SegmentPlan plan;
  MaskPlan mask_plan;
};

inline ScoreParams MakeScoreParams(const Problem& p, const Operands& o, float default_scale) {
  ScoreParams s{};
  s.batch = static_cast<int>(p.batch);
  s.seqlen_q = static_cast<int>(p.seqlen_q);
  s.seqlen_kv = static_cast<int>(p.seqlen_kv);
  s.num_q_heads = static_cast<int>(p.num_q_heads);
  s.num_kv_heads = static_cast<int>(p.num_kv_heads);
  s.group_size = static_cast<int>(p.group_size());
  s.head_dim = static_cast<int>(p.head_dim);
  s.head_dim_v = static_cast<int>(p.head_dim_v);
  s.is_causal = p.is_causal;
  s.window_left = p.window_left;
  s.window_right = p.window_right;
  s.default_scale = default_scale;
  s.bias = o.bias;
  s.mask = o.mask;
  s.scale = o.scale;
  s.logits_soft_cap = o.logits_soft_cap;
  s.query_offset = o.query_offset;
  s.q_positions = o.q_positions;
  s.kv_positions = o.kv_positions;
  s.q_seq_lengths = o.q_seq_lengths;
  s.kv_seq_lengths = o.kv_seq_lengths;
  s.q_segment_ids = o.q_segment_ids;
  s.kv_segment_ids = o.kv_segment_ids;
  s.sinks = o.sinks;
  s.bias_strides = o.bias_strides;
  s.mask_strides = o.mask_strides;
  if (p.has_tile_mask) {
    s.tile_mask = {o.mask_tiles,
                   o.mask_bits,
                   static_cast<int>(p.num_mask_heads),
                   static_cast<int>(CeilDiv(p.seqlen_q, p.tile_rows)),
                   static_cast<int>(CeilDiv(p.seqlen_kv, p.tile_cols)),
                   static_cast<int>(p.tile_rows),
                   static_cast<int>(p.tile_cols),
                   p.num_partial_tiles};
  }
  return s;
}

// Device-side readers
// ---------------------------------------------------------------------------------------------

__device__ __forceinline__ int64_t EntryOf(const BatchMap& map, int b) {
  if (map.rank == 0) return 0;
  if (map.rank == 1) return b * map.strides[0];
  int64_t entry = 0;
  // Rare, and its divisions are long: many copies would crowd the instruction cache.
#pragma unroll 1
  for (int d = map.rank - 1; d >= 0; --d) {
    const int size = static_cast<int>(map.sizes[d]);
    entry += static_cast<int64_t>(b % size) * map.strides[d];
    b /= size;
  }
  return entry;
}

__device__ __forceinline__ int64_t ReadInt(const Operand& x, int64_t at) {
  return x.dtype == DType::kS64 ? static_cast<const int64_t*>(x.data)[at]
                                : static_cast<const int32_t*>(x.data)[at];
}

__device__ __forceinline__ float ReadFloat(const Operand& x, int64_t at) {
  switch (x.dtype) {
    case DType::kBF16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(x.data)[at]);
    case DType::kF16:
      return __half2float(static_cast<const __half*>(x.data)[at]);
    case DType::kF64:
      return static_cast<float>(static_cast<const double*>(x.data)[at]);
    default:
      return static_cast<const float*>(x.data)[at];
  }
}

// A bias element of 32 bits, or of 16 bits in either format.
__device__ __forceinline__ float ToFloat(float x, bool) { return x; }
__device__ __forceinline__ float ToFloat(uint16_t x, bool is_bf16) {
  return is_bf16 ? __uint_as_float(static_cast<uint32_t>(x) << 16)
                 : __half2float(__ushort_as_half(x));
}

__device__ __forceinline__ int Clamp(int64_t x, int lo, int hi) {
  return x < lo ? lo : x > hi ? hi : static_cast<int>(x);
}

// What one batch entry says about its rows: row i may see keys [max(0, i + lo_shift),
// min(kv_length, i + hi_shift)). With explicit positions the shifts say nothing and every element
// is compared.
struct EntryLimits {
  int q_length, kv_length;
  int lo_shift, hi_shift;
};

__device__ __forceinline__ EntryLimits LimitsOf(const ScoreParams& s, int b) {
  EntryLimits e;
  e.q_length =
      s.q_seq_lengths.data == nullptr
          ? s.seqlen_q
          : Clamp(ReadInt(s.q_seq_lengths, EntryOf(s.q_seq_lengths.batch, b)), 0, s.seqlen_q);
  e.kv_length =
      s.kv_seq_lengths.data == nullptr
          ? s.seqlen_kv
          : Clamp(ReadInt(s.kv_seq_lengths, EntryOf(s.kv_seq_lengths.batch, b)), 0, s.seqlen_kv);
  e.lo_shift = -kFar;
  e.hi_shift = kFar;
  if (s.q_positions.data == nullptr && s.kv_positions.data == nullptr) {
    int64_t offset = s.query_offset.data == nullptr
                         ? 0
                         : ReadInt(s.query_offset, EntryOf(s.query_offset.batch, b));
    offset = offset < -kUnbounded ? -kUnbounded : offset > kUnbounded ? kUnbounded : offset;
    if (s.window_left < kUnbounded) e.lo_shift = Clamp(offset - s.window_left, -kFar, kFar);
    int64_t right = s.window_right;
    if (s.is_causal && right > 0) right = 0;
    if (right < kUnbounded) e.hi_shift = Clamp(offset + right + 1, -kFar, kFar);
  }
  return e;
}

__device__ __forceinline__ float ScaleOf(const ScoreParams& s, int b) {
  return s.scale.data == nullptr ? s.default_scale : ReadFloat(s.scale, EntryOf(s.scale.batch, b));
}

// 0 without a soft cap; its sign means nothing.
__device__ __forceinline__ float CapOf(const ScoreParams& s, int b) {
  const Operand& cap = s.logits_soft_cap;
  return cap.data == nullptr ? 0.f : fabsf(ReadFloat(cap, EntryOf(cap.batch, b)));
}

// Whether scores become logits before an exponent is taken: it takes a positive scale as a factor,
// and nothing else. Kernels that no call with a bias reaches need not ask for it.
template <bool kMayHaveBias = true>
__device__ __forceinline__ bool IsTransformed(const ScoreParams& s, float scale) {
  return s.logits_soft_cap.data != nullptr || !(scale > 0.f) ||
         (kMayHaveBias && s.bias.data != nullptr);
}

// How scores of a batch entry become logits.
struct Logits {
  float scale, cap, inverse_cap;
  float unit;  // logits per score, where an exponent is taken
  int is_transformed;
};

template <bool kMayHaveBias>
__device__ __forceinline__ Logits LogitsOf(const ScoreParams& s, int b) {
  Logits x;
  x.scale = ScaleOf(s, b);
  x.cap = CapOf(s, b);
  x.inverse_cap = 1.f / x.cap;
  x.is_transformed = IsTransformed<kMayHaveBias>(s, x.scale);
  x.unit = x.is_transformed ? 1.f : x.scale;
  return x;
}

// Interval of keys that row i may see; empty intervals are (0, 0).
__device__ __forceinline__ int2 RowInterval(const ScoreParams& s, const EntryLimits& e, int b,
                                            int i) {
  int lo = max(0, i + e.lo_shift), hi = min(e.kv_length, i + e.hi_shift);
  if (s.plan.rows != nullptr && i < s.seqlen_q) {
    const int2 run = s.plan.rows[b * PlanStride(s.seqlen_q) + i];
    lo = max(lo, run.x);
    hi = min(hi, run.y);
  }
  if (i >= e.q_length || lo >= hi) return make_int2(0, 0);
  return make_int2(lo, hi);
}

// Everything that no interval expresses, for one pair. Offsets are those of the batch entry (and
// head).
struct ElementRules {
  const Operand* q_segments = nullptr;  // null: ids are already in the row's interval
  const Operand* kv_segments = nullptr;
  int64_t q_segment_at = 0, kv_segment_at = 0;
  int64_t q_position_at = 0, kv_position_at = 0, query_offset = 0;
  int64_t mask_at = 0, bias_at = 0;
  int64_t mask_tiles_at = 0, mask_bits_at = 0;
  bool uses_positions = false;
};

__device__ __forceinline__ ElementRules RulesOf(const ScoreParams& s, int b, int head,
                                                bool is_scattered) {
  ElementRules r;
  if (s.q_segment_ids.data != nullptr && is_scattered) {
    r.q_segments = &s.q_segment_ids;
    r.kv_segments = &s.kv_segment_ids;
    r.q_segment_at = EntryOf(s.q_segment_ids.batch, b) * s.seqlen_q;
    r.kv_segment_at = EntryOf(s.kv_segment_ids.batch, b) * s.seqlen_kv;
  }
  if (s.q_positions.data != nullptr || s.kv_positions.data != nullptr) {
    r.uses_positions = s.is_causal || s.window_left < kUnbounded || s.window_right < kUnbounded;
    if (s.q_positions.data != nullptr)
      r.q_position_at = EntryOf(s.q_positions.batch, b) * s.seqlen_q;
    if (s.kv_positions.data != nullptr)
      r.kv_position_at = EntryOf(s.kv_positions.batch, b) * s.seqlen_kv;
    if (s.query_offset.data != nullptr) {
      r.query_offset = ReadInt(s.query_offset, EntryOf(s.query_offset.batch, b));
    }
  }
  if (s.mask.data != nullptr) {
    r.mask_at = EntryOf(s.mask.batch, b) * s.mask_strides.entry + head * s.mask_strides.head;
  }
  if (s.tile_mask.tiles.data != nullptr) {
    const TileMaskParams& t = s.tile_mask;
    r.mask_tiles_at = (EntryOf(t.tiles.batch, b) * t.num_heads + (t.num_heads == 1 ? 0 : head)) *
                      t.grid_rows * t.grid_cols;
    r.mask_bits_at = EntryOf(t.bits.batch, b) * t.num_partial * t.tile_rows * (t.tile_cols / 8);
  }
  if (s.bias.data != nullptr) {
    r.bias_at = EntryOf(s.bias.batch, b) * s.bias_strides.entry + head * s.bias_strides.head;
  }
  return r;
}

__device__ __forceinline__ bool KeepSegment(const ElementRules& r, int i, int j) {
  return r.q_segments == nullptr ||
         ReadInt(*r.q_segments, r.q_segment_at + i) == ReadInt(*r.kv_segments, r.kv_segment_at + j);
}

__device__ __forceinline__ bool KeepDense(const ScoreParams& s, const ElementRules& r, int i,
                                          int j) {
  return static_cast<const bool*>(
      s.mask.data)[r.mask_at + i * s.mask_strides.row + j * s.mask_strides.col];
}

// The tile mask's bits of row i and the eight keys from j on, a multiple of 8.
__device__ __forceinline__ uint32_t TileMaskByte(const TileMaskParams& t, const ElementRules& r,
                                                 int i, int j) {
  const int64_t tile = int64_t{i / t.tile_rows} * t.grid_cols + j / t.tile_cols;
  const int32_t code = static_cast<const int32_t*>(t.tiles.data)[r.mask_tiles_at + tile];
  if (code < 2) return code == 1 ? 0xff : 0;
  const int64_t byte =
      (int64_t{code - 2} * t.tile_rows + i % t.tile_rows) * (t.tile_cols / 8) + j % t.tile_cols / 8;
  return static_cast<const uint8_t*>(t.bits.data)[r.mask_bits_at + byte];
}

__device__ __forceinline__ bool KeepTile(const ScoreParams& s, const ElementRules& r, int i,
                                         int j) {
  return TileMaskByte(s.tile_mask, r, i, j / 8 * 8) >> j % 8 & 1;
}

// The words of one line of tiles, for LastSeen and the like; null without a mask.
__device__ __forceinline__ const TileWord* LineOf(const MaskPlan& m, int b, int head, int line) {
  if (m.words == nullptr) return nullptr;
  const int64_t at =
      (EntryOf(m.map, b) * m.num_heads + (m.num_heads == 1 ? 0 : head)) * m.num_lines + line;
  return m.words + at * m.line_words;
}

// The last tile of [begin, n] of a line that the mask does not skip, begin - 1 if there is none.
__device__ __forceinline__ int LastSeen(const TileWord* line, int begin, int n) {
  if (line == nullptr) return n;
  while (n >= begin) {
    const uint32_t seen = line[n / kWordTiles].seen << (kWordTiles - 1 - n % kWordTiles);
    if (seen != 0) return max(begin - 1, n - __clz(seen));
    n = n / kWordTiles * kWordTiles - 1;
  }
  return begin - 1;
}

// The first tile of [n, end) of a line that the mask does not skip, `end` if there is none.
__device__ __forceinline__ int FirstSeen(const TileWord* line, int n, int end) {
  if (line == nullptr) return n;
  while (n < end) {
    const uint32_t seen = line[n / kWordTiles].seen >> n % kWordTiles;
    if (seen != 0) return min(end, n + __ffs(seen) - 1);
    n = (n / kWordTiles + 1) * kWordTiles;
  }
  return end;
}

__device__ __forceinline__ int CountSeen(const TileWord* line, int begin, int end) {
  if (line == nullptr) return end - begin;
  if (begin >= end) return 0;  // an empty range may begin anywhere, also past the line
  int count = 0;
  for (int first = begin / kWordTiles * kWordTiles; first < end; first += kWordTiles) {
    uint32_t seen = line[first / kWordTiles].seen;
    if (first < begin) seen &= ~0u << (begin - first);
    if (end - first < kWordTiles) seen &= (1u << (end - first)) - 1;
    count += __popc(seen);
  }
  return count;
}

__device__ __forceinline__ bool IsSeen(const TileWord* line, int n) {
  return line == nullptr || line[n / kWordTiles].seen >> n % kWordTiles & 1;
}

__device__ __forceinline__ bool IsPartial(const TileWord* line, int n) {
  return line != nullptr && line[n / kWordTiles].partial >> n % kWordTiles & 1;
}

__device__ __forceinline__ bool Keep(const ScoreParams& s, const ElementRules& r, int i, int j) {
  if (!KeepSegment(r, i, j)) return false;
  if (r.uses_positions) {
    const int64_t q = s.q_positions.data != nullptr ? ReadInt(s.q_positions, r.q_position_at + i)
                                                    : i + r.query_offset;
    const int64_t k =
        s.kv_positions.data != nullptr ? ReadInt(s.kv_positions, r.kv_position_at + j) : j;
    if (s.is_causal && k > q) return false;
    if (s.window_left < kUnbounded && k < q - s.window_left) return false;
    if (s.window_right < kUnbounded && k > q + s.window_right) return false;
  }
  if (s.mask.data != nullptr) return KeepDense(s, r, i, j);
  return s.tile_mask.tiles.data == nullptr || KeepTile(s, r, i, j);
}

__device__ __forceinline__ float Bias(const ScoreParams& s, const ElementRules& r, int i, int j) {
  return ReadFloat(s.bias, r.bias_at + i * s.bias_strides.row + j * s.bias_strides.col);
}

}  // namespace jax_fmha::gpu
