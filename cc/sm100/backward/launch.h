// One function per row of instances.def, in object files that nvcc builds: see unit.cu.in.
#pragma once

#include "cc/core/kernel.h"
#include "cc/gpu/empty_backward.h"
#include "cc/gpu/plan.h"
#include "cc/sm100/backward/config.h"

namespace jax_fmha::sm100 {

template <DType kDType, ForwardMode kMode, int kHeadDim, int kHeadDimV>
Status LaunchBackward(const Problem& problem, const Operands& operands, const Launch& launch);

// Offsets of what the backward keeps in its workspace.
struct BackwardWorkspace {
  int64_t counters, turns, dbias, dq, lse2, delta, turn_takers, first_takers, mask_plan, dq_strips,
      dkv_strips, kv_plan, bytes;
};

inline int64_t NumQTiles(const Problem& p) { return CeilDiv(p.seqlen_q, kRows); }

inline constexpr int kReduceWarps = 4;  // that take turns in adding to one tile of dq

inline BackwardWorkspace WorkspaceOf(const Problem& p) {
  const BackwardTile tile =
      BackwardTileOf(static_cast<int>(p.head_dim), static_cast<int>(p.head_dim_v));
  const int64_t q_tiles = p.batch * p.num_q_heads * NumQTiles(p), rows = q_tiles * kRows;
  BackwardWorkspace w{};
  auto take = [&w](int64_t bytes) {
    const int64_t at = w.bytes;
    w.bytes += RoundUp(bytes, 128);
    return at;
  };
  w.counters = take(4 * sizeof(int));
  // Everything up to and with dq is zeroed in one go.
  w.turns = take(p.deterministic ? q_tiles * kReduceWarps * int64_t{sizeof(int)} : 0);
  w.dbias = take(gpu::BiasSumBytes(p));
  w.dq = take(rows * tile.head_dim * 4);
  w.lse2 = take(rows * 4);
  w.delta = take(rows * 4);
  const int64_t kv_tiles = CeilDiv(p.seqlen_kv, kRows);
  if (p.deterministic) {
    w.turn_takers = take(gpu::TurnTakerBytes(p, kv_tiles));
    w.first_takers = take(gpu::FirstTakerBytes(p, NumQTiles(p)));
  }
  w.mask_plan = take(gpu::MaskPlanBytes(p, kv_tiles, NumQTiles(p)));
  if (p.has_segment_ids) {
    w.dq_strips = take(gpu::RepairListBytes(p));
    // The warps of either column half may report a strip.
    w.dkv_strips = take(2 * gpu::RepairListBytes(gpu::Swapped(p)));
    w.kv_plan = take(gpu::SegmentPlanBytes(gpu::Swapped(p)));
  }
  if (w.bytes < gpu::EmptyBackwardWorkspaceBytes(p)) w.bytes = gpu::EmptyBackwardWorkspaceBytes(p);
  return w;
}

}  // namespace jax_fmha::sm100
