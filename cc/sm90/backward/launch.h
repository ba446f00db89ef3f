// One function per row of instances.def, in object files that nvcc builds: see unit.cu.in.
#pragma once

#include "cc/core/kernel.h"
#include "cc/gpu/plan.h"
#include "cc/sm90/backward/config.h"

namespace jax_fmha::sm90 {

template <DType kDType, ForwardMode kMode, int kHeadDim, int kHeadDimV>
Status LaunchBackward(const Problem& problem, const Operands& operands, const Launch& launch);

// Offsets of what the backward keeps in its workspace.
struct BackwardWorkspace {
  int64_t counters, turns, dbias, dq, lse2, delta, parts, turn_takers, first_takers, mask_plan,
      dq_strips, dkv_strips, kv_plan, bytes;
};

inline int64_t PaddedSeqlenQ(const Problem& p) { return RoundUp(p.seqlen_q, 128); }

inline BackwardWorkspace WorkspaceOf(const Problem& p) {
  const BackwardTile tile =
      BackwardTileOf(static_cast<int>(p.head_dim), static_cast<int>(p.head_dim_v));
  const int64_t rows = p.batch * p.num_q_heads * PaddedSeqlenQ(p);
  BackwardWorkspace w{};
  auto take = [&w](int64_t bytes) {
    const int64_t at = w.bytes;
    w.bytes += RoundUp(bytes, 128);
    return at;
  };
  w.counters = take(4 * sizeof(int));
  // Everything up to and with dq is zeroed in one go.
  const int64_t q_tiles = CeilDiv(p.seqlen_q, tile.block_q),
                kv_tiles = CeilDiv(p.seqlen_kv, tile.block_kv);
  if (p.deterministic) w.turns = take(p.batch * p.num_q_heads * q_tiles * 2 * 4);
  w.dbias = take(gpu::BiasSumBytes(p));
  w.dq = take(rows * tile.head_dim * 4);
  w.lse2 = take(rows * 4);
  w.delta = take(rows * 4);
  if (StartsFromStatistics(tile.head_dim)) w.parts = take(rows * 2 * 16);
  if (p.deterministic) {
    w.turn_takers = take(gpu::TurnTakerBytes(p, kv_tiles));
    w.first_takers = take(gpu::FirstTakerBytes(p, q_tiles));
  }
  w.mask_plan = take(gpu::MaskPlanBytes(p, kv_tiles, q_tiles));
  if (p.has_segment_ids) {
    // Both column halves of a strip may report it.
    w.dq_strips = take(2 * gpu::RepairListBytes(p));
    w.dkv_strips = take(2 * gpu::RepairListBytes(gpu::Swapped(p)));
    w.kv_plan = take(gpu::SegmentPlanBytes(gpu::Swapped(p)));
  }
  return w;
}

}  // namespace jax_fmha::sm90
