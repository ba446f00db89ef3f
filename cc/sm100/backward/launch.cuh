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
#include "cc/sm100/backward/kernel.cuh"
#include "cc/sm100/backward/launch.h"
#include "cc/sm100/tma.h"

namespace jax_fmha::sm100 {

// Queries, output gradients and dq that a section of heads should find in L2 again.
inline constexpr int64_t kBackwardSectionBytes = 48 << 20;
// Tiles of unequal length need a section long enough for short ones to fill the gaps that long ones
// leave.
inline constexpr int64_t kUnevenTiles = 1024;

inline gpu::KeyTileOrder OrderKeyTiles(const Problem& problem, int tile_head_dim) {
  const int64_t pairs = problem.batch * problem.num_kv_heads,
                num_kv_tiles = CeilDiv(problem.seqlen_kv, kRows);
  const int64_t group_bytes = problem.group_size() * problem.seqlen_q *
                              (2 * (problem.head_dim + problem.head_dim_v) + 4 * tile_head_dim);
  const bool is_uneven =
      problem.uses_positions() || problem.has_segment_ids || problem.has_seq_lengths;
  const int64_t least = is_uneven ? CeilDiv(kUnevenTiles, num_kv_tiles) : 1;
  return {static_cast<int>(num_kv_tiles), static_cast<int>(num_kv_tiles * pairs),
          static_cast<int>(
              std::clamp<int64_t>(std::max(kBackwardSectionBytes / group_bytes, least), 1, pairs))};
}

inline Status EncodeBackward(const Problem& problem, const Operands& o, BackwardTensors* tensors) {
  const struct {
    gpu::RowTensor tensor;
    RowMaps* maps;
  } all[] = {
      {gpu::RowsOf(o.q, problem.seqlen_q, problem.num_q_heads, problem.head_dim), &tensors->q},
      {gpu::RowsOf(o.k, problem.seqlen_kv, problem.num_kv_heads, problem.head_dim), &tensors->k},
      {gpu::RowsOf(o.dout, problem.seqlen_q, problem.num_q_heads, problem.head_dim_v),
       &tensors->dout}};
  for (const auto& [tensor, maps] : all) {
    if (Status s = EncodeRowMaps(tensor, kRows, kBoxCols, maps); !s.ok()) return s;
  }
  return EncodeRows(gpu::RowsOf(o.v, problem.seqlen_kv, problem.num_kv_heads, problem.head_dim_v),
                    kRows, kBoxCols, false, &tensors->v);
}

// Delta, and dsinks that follow from it.
template <typename Element, int kHeadDimV>
Status LaunchDelta(const gpu::DeltaParams& delta, const Operands& operands, cudaStream_t stream) {
  constexpr int kLanes = kHeadDimV <= 64 ? 8 : 16;  // of 8 elements each
  const gpu::ScoreParams& score = delta.score;
  const int64_t blocks =
      static_cast<int64_t>(score.batch) * score.num_q_heads * (delta.padded_q / gpu::kDeltaRows);
  gpu::Delta<Element, kLanes><<<static_cast<unsigned>(blocks), 256, 0, stream>>>(delta);
  if (Status s = gpu::ToStatus(cudaGetLastError(), "delta"); !s.ok()) return s;
  if (operands.dsinks.data == nullptr) return {};
  const gpu::SinkParams sinks = {
      score,          operands.saved_lse,    delta.delta,
      delta.padded_q, operands.dsinks.batch, static_cast<float*>(operands.dsinks.data)};
  gpu::SinkGradient<<<static_cast<unsigned>(operands.dsinks.entries * score.num_q_heads), 256, 0,
                      stream>>>(sinks);
  return gpu::ToStatus(cudaGetLastError(), "dsinks");
}

template <DType kDType, ForwardMode kMode, int kHeadDim, int kHeadDimV>
Status LaunchBackward(const Problem& problem, const Operands& operands, const Launch& launch) {
  using Element = std::conditional_t<kDType == DType::kBF16, cutlass::bfloat16_t, cutlass::half_t>;
  constexpr BackwardTile kTile = BackwardTileOf(kHeadDim, kHeadDimV);
  using Kernel =
      BackwardKernel<Element, kMode, kHeadDim, kHeadDimV, kTile.q_stages, kTile.dout_stages>;
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  char* memory = static_cast<char*>(launch.workspace);
  const BackwardWorkspace workspace = WorkspaceOf(problem);
  const int64_t q_tiles = problem.batch * problem.num_q_heads * NumQTiles(problem);

  BackwardParams params{};
  params.score = gpu::MakeScoreParams(problem, operands,
                                      1.f / std::sqrt(static_cast<float>(problem.head_dim)));
  params.q_map = operands.q.batch;
  params.k_map = operands.k.batch;
  params.v_map = operands.v.batch;
  params.dout_map = operands.dout.batch;
  auto* lse2 = reinterpret_cast<float*>(memory + workspace.lse2);
  auto* delta = reinterpret_cast<float*>(memory + workspace.delta);
  params.lse2 = lse2;
  params.delta = delta;
  params.dq = reinterpret_cast<float*>(memory + workspace.dq);
  params.dk = operands.dk.data;
  params.dv = operands.dv.data;
  params.num_q_tiles = static_cast<int>(NumQTiles(problem));
  params.order = OrderKeyTiles(problem, kHeadDim);

  const int64_t dq_bytes = q_tiles * kRows * kHeadDim * 4;
  if (Status s =
          gpu::ToStatus(cudaMemsetAsync(memory, 0, workspace.dq + dq_bytes, stream), "memset");
      !s.ok())
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
        gpu::RunMaskPlan(params.score, kRows, kRows, gpu::WalkOver::kQueries,
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
    if constexpr (Kernel::kPlansTurns) {
      params.turn_plan = {reinterpret_cast<int2*>(memory + workspace.turn_takers),
                          reinterpret_cast<int*>(memory + workspace.first_takers)};
      const cudaError_t error =
          gpu::RunTurnPlan(params.score, params.kv_plan, kRows, kRows, params.turn_plan, stream);
      if (Status s = gpu::ToStatus(error, "turns"); !s.ok()) return s;
    }
  }

  const int padded_q = params.num_q_tiles * kRows;
  const gpu::DeltaParams rows = {
      params.score, operands.saved_out, operands.dout, operands.saved_lse, operands.dlse, delta,
      lse2,         padded_q,           counters + 3};
  if (Status s = LaunchDelta<Element, kHeadDimV>(rows, operands, stream); !s.ok()) return s;

  BackwardTensors tensors{};
  if (Status s = EncodeBackward(problem, operands, &tensors); !s.ok()) return s;
  constexpr int kSmemBytes = sizeof(typename Kernel::SharedStorage);
  static_assert(kSmemBytes <= 227 * 1024);
  int num_sms = 0;
  if (Status s = gpu::PrepareLaunch(reinterpret_cast<const void*>(BackwardMain<Kernel>), kSmemBytes,
                                    &num_sms);
      !s.ok())
    return s;
  const int grid = std::min(num_sms, params.order.num_tiles);
  BackwardMain<Kernel><<<grid, Kernel::kThreads, kSmemBytes, stream>>>(params, tensors);
  if (Status s = gpu::ToStatus(cudaGetLastError(), "backward"); !s.ok()) return s;
  ConvertDq<Kernel>
      <<<static_cast<unsigned>(q_tiles), 256, 0, stream>>>(params, operands.dq.data, dq_list);
  if (Status s = gpu::ToStatus(cudaGetLastError(), "convert"); !s.ok()) return s;
  if (Status s = gpu::ToStatus(gpu::EndBiasGradient(problem, operands.dbias, params.dbias, stream),
                               "dbias");
      !s.ok())
    return s;
  if (!problem.has_segment_ids) return {};

  const auto& o = operands;
  const gpu::RepairBackwardParams repair = {
      params.score, params.kv_plan, params.q_map, params.k_map, params.v_map, params.dout_map,
      o.q.data,     o.k.data,       o.v.data,     o.dout.data,  o.saved_lse,  params.delta,
      padded_q,     o.dq.data,      o.dk.data,    o.dv.data,    dq_list,      params.repair};
  gpu::RepairDq<Element><<<num_sms, 32 * gpu::kStripRows, 0, stream>>>(repair);
  gpu::RepairDkv<Element><<<num_sms, 32 * gpu::kStripRows, 0, stream>>>(repair);
  return gpu::ToStatus(cudaGetLastError(), "repair");
}

}  // namespace jax_fmha::sm100
