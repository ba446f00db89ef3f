// What surrounds the main kernel of the forward, on the host.
#pragma once

#include <cmath>

#include "cc/core/kernel.h"
#include "cc/gpu/check.h"
#include "cc/gpu/forward_tile.cuh"
#include "cc/gpu/mask_plan.h"
#include "cc/gpu/segment_plan.h"

namespace jax_fmha::gpu {

// The parameters but for what PlanForward fills in. A tile is `rows` query rows; keys and values
// of a section of heads take `section_bytes`, which should stay in L2.
inline ForwardParams MakeForwardParams(const Problem& problem, const Operands& operands, int rows,
                                       int64_t section_bytes) {
  ForwardParams params{};
  params.score =
      MakeScoreParams(problem, operands, 1.f / std::sqrt(static_cast<float>(problem.head_dim)));
  params.q_map = operands.q.batch;
  params.k_map = operands.k.batch;
  params.v_map = operands.v.batch;
  params.out = operands.out.data;
  params.lse = static_cast<float*>(operands.lse.data);
  const int64_t pairs = problem.batch * problem.num_q_heads;
  params.order.num_q_tiles = static_cast<int>(CeilDiv(problem.seqlen_q, rows));
  params.order.num_tiles = static_cast<int>(params.order.num_q_tiles * pairs);
  const int64_t kv_head_bytes = 2 * problem.seqlen_kv * (problem.head_dim + problem.head_dim_v);
  params.order.pairs_per_section = static_cast<int>(
      EvenSections(problem.batch * problem.num_kv_heads, section_bytes / kv_head_bytes) *
      problem.group_size());
  return params;
}

// Carves ForwardWorkspaceBytes: two zeroed counters, the next tile and how many strips to repair;
// with segments the strips and the plan, and what a mask says of tiles of block_q by block_kv.
inline Status PlanForward(const Problem& problem, const Launch& launch, int block_q, int block_kv,
                          ForwardParams* params, int value_parts = 1) {
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  char* workspace = static_cast<char*>(launch.workspace);
  int* counters = reinterpret_cast<int*>(workspace);
  if (Status s = ToStatus(cudaMemsetAsync(counters, 0, 2 * sizeof(int), stream), "memset"); !s.ok())
    return s;
  params->next_tile = counters;
  workspace += kForwardCounterBytes;
  if (problem.has_segment_ids) {
    params->repair = {counters + 1, reinterpret_cast<Strip*>(workspace)};
    workspace += value_parts * RepairListBytes(problem);
    const cudaError_t error = RunSegmentPlan(params->score, workspace, stream, &params->score.plan);
    if (Status s = ToStatus(error, "segment plan"); !s.ok()) return s;
    workspace += SegmentPlanBytes(problem);
  }
  if (!problem.has_mask && !problem.has_tile_mask) return {};
  return ToStatus(RunMaskPlan(params->score, block_q, block_kv, WalkOver::kKeys, workspace, stream,
                              &params->score.mask_plan),
                  "mask plan");
}

// Repairs what the main kernel listed. The main kernel's type makes this function the
// architecture's own: two of one name would launch the code of either.
template <class MainKernel>
Status RepairRows(const Problem& problem, const Operands& operands, const ForwardParams& params,
                  int num_sms, cudaStream_t stream) {
  if (!problem.has_segment_ids) return {};
  const RepairParams repair = {params.score,    params.q_map,    params.k_map,    params.v_map,
                               operands.q.data, operands.k.data, operands.v.data, params.out,
                               params.lse,      params.repair};
  RepairForward<typename MainKernel::Element><<<num_sms, 32 * kStripRows, 0, stream>>>(repair);
  return ToStatus(cudaGetLastError(), "repair");
}

}  // namespace jax_fmha::gpu
