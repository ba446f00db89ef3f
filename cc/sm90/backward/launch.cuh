// Host side of one instance: delta, main, convert.
#pragma once

#include <algorithm>
#include <cmath>

#include "cc/gpu/bias_gradient.h"
#include "cc/gpu/check.h"
#include "cc/gpu/delta.cuh"
#include "cc/gpu/launch.h"
#include "cc/gpu/mask_plan.h"
#include "cc/gpu/repair_backward.cuh"
#include "cc/gpu/segment_plan.h"
#include "cc/gpu/turns.h"
#include "cc/sm90/backward/kernel.cuh"
#include "cc/sm90/backward/launch.h"
#include "cc/sm90/tma.h"

namespace jax_fmha::sm90 {

// Queries, output gradients and dq of a section of heads should stay in L2.
inline constexpr int64_t kBackwardSectionBytes = 24 << 20;
inline constexpr int64_t kUnevenTiles = 256;
// Tiles that take turns wait less for each other where more heads are under way.
inline constexpr int64_t kTurnTiles = 1024;

template <typename Element, int kHeadDimV>
void LaunchDelta(const gpu::DeltaParams& p, cudaStream_t stream) {
  constexpr int kLanes = kHeadDimV <= 64 ? 8 : kHeadDimV <= 128 ? 16 : 32;
  const int64_t blocks =
      static_cast<int64_t>(p.score.batch) * p.score.num_q_heads * (p.padded_q / gpu::kDeltaRows);
  gpu::Delta<Element, kLanes><<<static_cast<unsigned>(blocks), 256, 0, stream>>>(p);
}

template <DType kDType, ForwardMode kMode, int kHeadDim, int kHeadDimV>
Status LaunchBackward(const Problem& problem, const Operands& operands, const Launch& launch) {
  using Element = std::conditional_t<kDType == DType::kBF16, cutlass::bfloat16_t, cutlass::half_t>;
  constexpr BackwardTile kTile = BackwardTileOf(kHeadDim, kHeadDimV);
  using Kernel = BackwardKernel<Element, kMode, kHeadDim, kHeadDimV, kTile.block_q, kTile.block_kv,
                                kTile.num_stages, kTile.box_cols>;
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  char* memory = static_cast<char*>(launch.workspace);
  const BackwardWorkspace workspace = WorkspaceOf(problem);
  const int64_t q_pairs = problem.batch * problem.num_q_heads,
                kv_pairs = problem.batch * problem.num_kv_heads;

  BackwardParams params{};
  params.score = gpu::MakeScoreParams(problem, operands,
                                      1.f / std::sqrt(static_cast<float>(problem.head_dim)));
  params.q_map = operands.q.batch;
  params.k_map = operands.k.batch;
  params.v_map = operands.v.batch;
  params.dout_map = operands.dout.batch;
  params.lse2 = reinterpret_cast<float*>(memory + workspace.lse2);
  params.delta = reinterpret_cast<float*>(memory + workspace.delta);
  if (Kernel::kStartsFromStatistics) {
    params.parts = reinterpret_cast<uint4*>(memory + workspace.parts);
  }
  params.dq = reinterpret_cast<float*>(memory + workspace.dq);
  params.dk = operands.dk.data;
  params.dv = operands.dv.data;
  params.padded_q = static_cast<int>(PaddedSeqlenQ(problem));
  params.num_q_tiles = static_cast<int>(CeilDiv(problem.seqlen_q, kTile.block_q));
  gpu::KeyTileOrder& order = params.order;
  order.num_kv_tiles = static_cast<int>(CeilDiv(problem.seqlen_kv, kTile.block_kv));
  order.num_tiles = static_cast<int>(order.num_kv_tiles * kv_pairs);
  const int64_t group_bytes = problem.group_size() * problem.seqlen_q *
                              (2 * (problem.head_dim + problem.head_dim_v) + 4 * kHeadDim);
  // Tiles of unequal length need a section long enough for short ones to fill the gaps that long
  // ones leave.
  const bool is_uneven =
      problem.uses_positions() || problem.has_segment_ids || problem.has_seq_lengths;
  const int64_t least = CeilDiv(problem.deterministic ? kTurnTiles
                                : is_uneven           ? kUnevenTiles
                                                      : 1,
                                order.num_kv_tiles);
  order.pairs_per_section = static_cast<int>(
      gpu::EvenSections(kv_pairs, std::max(kBackwardSectionBytes / group_bytes, least)));

  // Counters, turns and dbias lie side by side: one memset zeroes them. dq, which follows, is as
  // large as out and dout; the kernel that reads those zeroes it.
  const int64_t dq_bytes = q_pairs * params.num_q_tiles * kTile.block_q * kHeadDim * 4;
  if (Status s = gpu::ToStatus(cudaMemsetAsync(memory, 0, workspace.dq, stream), "memset"); !s.ok())
    return s;
  int* counters = reinterpret_cast<int*>(memory + workspace.counters);
  params.next_tile = counters;
  params.has_large = counters + 3;
  params.lse = operands.saved_lse;
  params.dbias_map = operands.dbias.batch;
  if (Status s =
          gpu::ToStatus(gpu::BeginBiasGradient(problem, operands.dbias, memory + workspace.dbias,
                                               stream, &params.dbias),
                        "dbias");
      !s.ok())
    return s;
  if (problem.has_mask || problem.has_tile_mask) {
    const cudaError_t error =
        gpu::RunMaskPlan(params.score, kTile.block_q, kTile.block_kv, gpu::WalkOver::kQueries,
                         memory + workspace.mask_plan, stream, &params.score.mask_plan);
    if (Status s = gpu::ToStatus(error, "mask plan"); !s.ok()) return s;
  }
  gpu::RepairList dq_list{};
  if (problem.has_segment_ids) {
    dq_list = {counters + 1, reinterpret_cast<gpu::Strip*>(memory + workspace.dq_strips)};
    params.repair = {counters + 2, reinterpret_cast<gpu::Strip*>(memory + workspace.dkv_strips)};
    gpu::ScoreParams swapped = params.score;
    std::swap(swapped.seqlen_q, swapped.seqlen_kv);
    std::swap(swapped.q_segment_ids, swapped.kv_segment_ids);
    const cudaError_t error =
        gpu::RunSegmentPlan(swapped, memory + workspace.kv_plan, stream, &params.kv_plan);
    if (Status s = gpu::ToStatus(error, "segment plan"); !s.ok()) return s;
  }

  if (problem.deterministic) {
    params.turns = reinterpret_cast<int*>(memory + workspace.turns);
    params.turn_takers = reinterpret_cast<int2*>(memory + workspace.turn_takers);
    params.first_takers = reinterpret_cast<int*>(memory + workspace.first_takers);
    const cudaError_t error =
        gpu::RunTurnPlan(params.score, params.kv_plan, kTile.block_q, kTile.block_kv,
                         {params.turn_takers, params.first_takers}, stream);
    if (Status s = gpu::ToStatus(error, "turns"); !s.ok()) return s;
  }

  gpu::DeltaParams delta = {params.score,
                            operands.saved_out,
                            operands.dout,
                            operands.saved_lse,
                            operands.dlse,
                            const_cast<float*>(params.delta),
                            const_cast<float*>(params.lse2),
                            params.padded_q,
                            counters + 3,
                            reinterpret_cast<uint4*>(params.dq),
                            dq_bytes / 16,
                            gpu::kDeltaRows * kHeadDim / 4,
                            const_cast<uint4*>(params.parts)};
  LaunchDelta<Element, kHeadDimV>(delta, stream);
  if (Status s = gpu::ToStatus(cudaGetLastError(), "delta"); !s.ok()) return s;
  if (operands.dsinks.data != nullptr) {
    const gpu::SinkParams sinks = {
        params.score,    operands.saved_lse,    params.delta,
        params.padded_q, operands.dsinks.batch, static_cast<float*>(operands.dsinks.data)};
    gpu::SinkGradient<<<static_cast<unsigned>(operands.dsinks.entries * problem.num_q_heads), 256,
                        0, stream>>>(sinks);
    if (Status s = gpu::ToStatus(cudaGetLastError(), "dsinks"); !s.ok()) return s;
  }

  CUtensorMap q, k, v, dout;
  const auto& o = operands;
  if (Status s =
          EncodeRows(gpu::RowsOf(o.q, problem.seqlen_q, problem.num_q_heads, problem.head_dim),
                     kTile.block_q, kTile.box_cols, &q);
      !s.ok())
    return s;
  if (Status s =
          EncodeRows(gpu::RowsOf(o.dout, problem.seqlen_q, problem.num_q_heads, problem.head_dim_v),
                     kTile.block_q, kTile.box_cols, &dout);
      !s.ok())
    return s;
  if (Status s =
          EncodeRows(gpu::RowsOf(o.k, problem.seqlen_kv, problem.num_kv_heads, problem.head_dim),
                     kTile.block_kv, kTile.box_cols, &k);
      !s.ok())
    return s;
  if (Status s =
          EncodeRows(gpu::RowsOf(o.v, problem.seqlen_kv, problem.num_kv_heads, problem.head_dim_v),
                     kTile.block_kv, kTile.box_cols, &v);
      !s.ok())
    return s;

  constexpr int kSmemBytes = sizeof(typename Kernel::SharedStorage);
  static_assert(kSmemBytes <= 227 * 1024);
  int num_sms = 0;
  if (Status s = gpu::PrepareLaunch(reinterpret_cast<const void*>(BackwardMain<Kernel>), kSmemBytes,
                                    &num_sms);
      !s.ok())
    return s;
  BackwardMain<Kernel>
      <<<std::min(num_sms, order.num_tiles), Kernel::kThreads, kSmemBytes, stream>>>(params, q, k,
                                                                                     v, dout);
  if (Status s = gpu::ToStatus(cudaGetLastError(), "backward"); !s.ok()) return s;
  ConvertDq<Kernel><<<static_cast<unsigned>(q_pairs * params.num_q_tiles), 256, 0, stream>>>(
      params, operands.dq.data, dq_list);
  if (Status s = gpu::ToStatus(cudaGetLastError(), "convert"); !s.ok()) return s;
  if (Status s = gpu::ToStatus(gpu::EndBiasGradient(problem, operands.dbias, params.dbias, stream),
                               "dbias");
      !s.ok())
    return s;

  if (problem.has_segment_ids) {
    const gpu::RepairBackwardParams repair = {
        params.score,    params.kv_plan, params.q_map, params.k_map, params.v_map, params.dout_map,
        o.q.data,        o.k.data,       o.v.data,     o.dout.data,  o.saved_lse,  params.delta,
        params.padded_q, o.dq.data,      o.dk.data,    o.dv.data,    dq_list,      params.repair};
    gpu::RepairDq<Element><<<num_sms, 32 * gpu::kStripRows, 0, stream>>>(repair);
    gpu::RepairDkv<Element><<<num_sms, 32 * gpu::kStripRows, 0, stream>>>(repair);
    return gpu::ToStatus(cudaGetLastError(), "repair");
  }
  return {};
}

}  // namespace jax_fmha::sm90
