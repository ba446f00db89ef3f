// Host side of one instance: tensor maps, workspace, launches.
#pragma once

#include <algorithm>
#include <cmath>

#include "cc/gpu/check.h"
#include "cc/gpu/repair.cuh"
#include "cc/gpu/segment_plan.h"
#include "cc/sm100/forward/kernel.cuh"
#include "cc/sm100/forward/launch.h"
#include "cc/sm100/tma.h"

namespace jax_fmha::sm100 {

// Keys and values that a section of heads should find in L2 again.
inline constexpr int64_t kSectionBytes = 48 << 20;

inline Status EncodeForward(const Problem& problem, const Operands& operands, DType dtype,
                            ForwardTensors* tensors) {
  const RowTensor q = {
      operands.q.data,     dtype,           EntriesOf(operands.q.batch), problem.seqlen_q,
      problem.num_q_heads, problem.head_dim};
  const RowTensor k = {
      operands.k.data,      dtype,           EntriesOf(operands.k.batch), problem.seqlen_kv,
      problem.num_kv_heads, problem.head_dim};
  const RowTensor v = {operands.v.data,
                       dtype,
                       EntriesOf(operands.v.batch),
                       problem.seqlen_kv,
                       problem.num_kv_heads,
                       problem.head_dim_v};
  const struct {
    const RowTensor& tensor;
    int box_rows;
    bool is_masked;
    CUtensorMap* map;
  } maps[] = {{q, kRows, false, &tensors->q},     {k, kRows, false, &tensors->k},
              {v, kRows, false, &tensors->v},     {v, kRows, true, &tensors->v_masked},
              {v, 8, false, &tensors->v_rows[0]}, {v, 1, false, &tensors->v_rows[1]}};
  for (const auto& m : maps) {
    if (Status s = EncodeRows(m.tensor, m.box_rows, kBoxCols, m.is_masked, m.map); !s.ok())
      return s;
  }
  return {};
}

template <DType kDType, ForwardMode kMode, int kHeadDim, int kHeadDimV>
Status LaunchForward(const Problem& problem, const Operands& operands, const Launch& launch) {
  using Element = std::conditional_t<kDType == DType::kBF16, cutlass::bfloat16_t, cutlass::half_t>;
  constexpr ForwardTile kTile = TileOf(kHeadDim, kHeadDimV);
  using Kernel = ForwardKernel<Element, kMode, kHeadDim, kHeadDimV, kTile.k_stages, kTile.v_stages>;
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  char* workspace = static_cast<char*>(launch.workspace);
  auto take = [&workspace](int64_t bytes) {
    char* at = workspace;
    workspace += RoundUp(bytes, 16);
    return at;
  };

  ForwardParams params{};
  params.score = gpu::MakeScoreParams(problem, operands,
                                      1.f / std::sqrt(static_cast<float>(problem.head_dim)));
  params.q_map = operands.q.batch;
  params.k_map = operands.k.batch;
  params.v_map = operands.v.batch;
  params.out = operands.out.data;
  params.lse = static_cast<float*>(operands.lse.data);
  const int64_t pairs = problem.batch * problem.num_q_heads;
  params.order.num_q_tiles = static_cast<int>(CeilDiv(problem.seqlen_q, kGroups * kRows));
  params.order.num_tiles = static_cast<int>(params.order.num_q_tiles * pairs);
  const int64_t kv_head_bytes = 2 * problem.seqlen_kv * (problem.head_dim + problem.head_dim_v);
  params.order.pairs_per_section = static_cast<int>(std::clamp<int64_t>(
      std::max<int64_t>(1, kSectionBytes / kv_head_bytes) * problem.group_size(), 1, pairs));

  ForwardTensors tensors{};
  if (Status s = EncodeForward(problem, operands, kDType, &tensors); !s.ok()) return s;

  // Two zeroed counters: the next tile, and how many strips to repair.
  int* counters = reinterpret_cast<int*>(take(2 * sizeof(int)));
  if (Status s = gpu::ToStatus(cudaMemsetAsync(counters, 0, 2 * sizeof(int), stream), "memset");
      !s.ok())
    return s;
  params.next_tile = counters;
  if (problem.has_segment_ids) {
    params.repair.count = counters + 1;
    params.repair.strips = reinterpret_cast<gpu::Strip*>(take(gpu::RepairListBytes(problem)));
    const cudaError_t error =
        gpu::RunSegmentPlan(params.score, workspace, stream, &params.score.plan);
    if (Status s = gpu::ToStatus(error, "segment plan"); !s.ok()) return s;
  }

  int device = 0, num_sms = 0;
  if (Status s = gpu::ToStatus(cudaGetDevice(&device), "device"); !s.ok()) return s;
  cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  constexpr int kSmemBytes = sizeof(typename Kernel::SharedStorage);
  static_assert(kSmemBytes <= 227 * 1024);
  // Per call, since the attribute belongs to the current device.
  if (Status s = gpu::ToStatus(
          cudaFuncSetAttribute(ForwardMain<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kSmemBytes),
          "shared memory");
      !s.ok())
    return s;
  const int grid = std::min(num_sms, params.order.num_tiles);
  ForwardMain<Kernel><<<grid, Kernel::kThreads, kSmemBytes, stream>>>(params, tensors);
  if (Status s = gpu::ToStatus(cudaGetLastError(), "forward"); !s.ok()) return s;

  if (problem.has_segment_ids) {
    const gpu::RepairParams repair = {
        params.score,    params.q_map,    params.k_map, params.v_map, operands.q.data,
        operands.k.data, operands.v.data, params.out,   params.lse,   params.repair};
    gpu::RepairForward<Element><<<num_sms, 32 * gpu::kStripRows, 0, stream>>>(repair);
    return gpu::ToStatus(cudaGetLastError(), "repair");
  }
  return {};
}

}  // namespace jax_fmha::sm100
