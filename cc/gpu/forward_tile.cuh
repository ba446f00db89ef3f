// What the forward kernels of every architecture are given, what one tile of query rows has to do,
// and how a row ends.
#pragma once

#include "cc/gpu/problem_params.cuh"
#include "cc/gpu/repair.cuh"
#include "cc/gpu/softmax.cuh"

namespace jax_fmha::gpu {

// How tiles of (query rows, head, batch entry) are numbered. Sections of (batch entry, head) pairs,
// whose keys and values fit in L2, come one after the other; inside one, query tiles go last to
// first, so that causal rows with most keys start early.
struct TileOrder {
  int num_q_tiles, num_tiles, pairs_per_section;
};

struct ForwardParams {
  ScoreParams score;
  BatchMap q_map, k_map, v_map;
  void* out;   // [batch, T, N, Hv]
  float* lse;  // [batch, N, T]
  TileOrder order;
  int* next_tile;     // zeroed
  RepairList repair;  // strips that another segment's NaN may have reached; with segments only
};

struct ForwardTileInfo {
  int is_last;  // no tile: the block is done
  int batch, head, q_first;
  int kv_first, kv_range;  // keys kv_first + [0, kv_range * block_kv), clipped at kv_end
  int kv_end;
  int num_kv_tiles;                  // those of the range that the mask does not skip
  int full_begin, full_end;          // keys that every row of the tile may see
  int is_elementwise, is_scattered;  // partial by more than intervals
  int may_leak;                      // rows of several segments share key tiles
  EntryLimits limits;
};

template <int kBlockQ, int kBlockKv, bool kHasSegments, bool kHasElements>
__device__ __forceinline__ ForwardTileInfo DescribeForwardTile(const ScoreParams& s,
                                                               const TileOrder& order, int tile) {
  ForwardTileInfo info;
  info.is_last = 0;
  const int pairs = s.batch * s.num_q_heads;
  const int per_section = order.pairs_per_section * order.num_q_tiles;
  const int section = tile / per_section;
  const int within = tile - section * per_section;
  const int pairs_here = min(order.pairs_per_section, pairs - section * order.pairs_per_section);
  const int from_last = within / pairs_here;
  const int pair = section * order.pairs_per_section + within - from_last * pairs_here;
  info.batch = pair / s.num_q_heads;
  info.head = pair - info.batch * s.num_q_heads;
  info.q_first = (order.num_q_tiles - 1 - from_last) * kBlockQ;
  info.limits = LimitsOf(s, info.batch);
  const EntryLimits& e = info.limits;
  const int q_last = min(info.q_first + kBlockQ, e.q_length) - 1;
  int lo_min = max(0, info.q_first + e.lo_shift), lo_max = max(0, q_last + e.lo_shift);
  int hi_min = min(e.kv_length, info.q_first + e.hi_shift),
      hi_max = min(e.kv_length, q_last + e.hi_shift);
  info.is_elementwise = 0;
  info.is_scattered = 0;
  info.may_leak = 0;
  if constexpr (kHasSegments) {
    if (s.plan.blocks != nullptr && q_last >= info.q_first) {
      const int num_blocks = (s.seqlen_q + kPlanRows - 1) / kPlanRows;
      const PlanBlock* blocks = s.plan.blocks + static_cast<int64_t>(info.batch) * num_blocks;
      PlanBlock sum = blocks[info.q_first / kPlanRows];
      for (int i = info.q_first / kPlanRows + 1; i <= q_last / kPlanRows; ++i) {
        const PlanBlock x = blocks[i];
        sum.lo_min = min(sum.lo_min, x.lo_min);
        sum.hi_max = max(sum.hi_max, x.hi_max);
        sum.lo_max = max(sum.lo_max, x.lo_max);
        sum.hi_min = min(sum.hi_min, x.hi_min);
        sum.is_scattered |= x.is_scattered;
      }
      info.may_leak = sum.is_scattered || sum.lo_min < sum.lo_max || sum.hi_min < sum.hi_max;
      info.is_scattered = sum.is_scattered;
      lo_min = max(lo_min, sum.lo_min);
      hi_max = min(hi_max, sum.hi_max);
      lo_max = max(lo_max, sum.lo_max);
      hi_min = min(hi_min, sum.hi_min);
    }
    info.is_elementwise = info.is_scattered;
  }
  if constexpr (kHasElements) {
    info.is_elementwise |= s.q_positions.data != nullptr || s.kv_positions.data != nullptr ||
                           (s.mask.data != nullptr && s.mask_plan.words == nullptr);
  }
  if (q_last < info.q_first) hi_max = lo_min;
  info.kv_first = lo_min;
  info.kv_end = hi_max;
  const bool has_plan = kHasElements && s.mask_plan.words != nullptr;
  if (has_plan) {
    // Tiles lie where those of the plan do, and may start before the first segment that is wanted.
    info.kv_first = lo_min / kBlockKv * kBlockKv;
    info.may_leak |= s.plan.blocks != nullptr;
  }
  info.kv_range = hi_max > lo_min ? (hi_max - info.kv_first + kBlockKv - 1) / kBlockKv : 0;
  info.num_kv_tiles = info.kv_range;
  if (has_plan) {
    const int first = info.kv_first / kBlockKv;
    info.num_kv_tiles =
        CountSeen(LineOf(s.mask_plan, info.batch, info.head, info.q_first / kBlockQ), first,
                  first + info.kv_range);
  }
  info.full_begin = lo_max;
  // Rows past q_length see nothing, which only masks can tell.
  const bool has_dead_rows = e.q_length < min(info.q_first + kBlockQ, s.seqlen_q);
  info.full_end = info.is_elementwise || has_dead_rows ? 0 : hi_min;
  return info;
}

// Takes the sink, if there is one, into a row's sum and its largest logit, which the exponentials
// were taken against. Gives what outputs are to be multiplied with: 0 for a row without keys, whose
// sum is 0.
__device__ __forceinline__ float CloseRow(const ScoreParams& s, const ForwardTileInfo& info,
                                          float& sum, float& top) {
  const bool is_empty = sum == 0.f;
  float scale = 1.f;
  if (s.sinks.data != nullptr) {
    const float sink =
        ReadFloat(s.sinks, EntryOf(s.sinks.batch, info.batch) * s.num_q_heads + info.head);
    const float new_top = fmaxf(top, sink);
    if (new_top != -kInf) {
      scale = Exp2((top - new_top) * kLog2e);
      sum = sum * scale + Exp2((sink - new_top) * kLog2e);
      top = new_top;
    }
  }
  return is_empty ? 0.f : scale / sum;
}

// Of a closed row: -inf without keys and sink.
__device__ __forceinline__ float LseOf(float sum, float top) {
  return sum == 0.f ? -kInf : top + __log2f(sum) * kLn2;
}

}  // namespace jax_fmha::gpu
