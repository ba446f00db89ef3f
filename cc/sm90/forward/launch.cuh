// Host side of one instance: tensor maps, workspace, launches.
#pragma once

#include <algorithm>

#include "cc/gpu/check.h"
#include "cc/gpu/forward_launch.cuh"
#include "cc/gpu/launch.h"
#include "cc/sm90/forward/kernel.cuh"
#include "cc/sm90/forward/launch.h"
#include "cc/sm90/tma.h"

namespace jax_fmha::sm90 {

// Keys and values that a section of heads should find in L2 again.
inline constexpr int64_t kSectionBytes = 24 << 20;

template <DType kDType, ForwardMode kMode, int kHeadDim, int kHeadDimV>
Status LaunchForward(const Problem& problem, const Operands& operands, const Launch& launch) {
  using Element = std::conditional_t<kDType == DType::kBF16, cutlass::bfloat16_t, cutlass::half_t>;
  constexpr ForwardTile kTile = TileOf(kHeadDim, kHeadDimV, kMode);
  using Kernel = ForwardKernel<Element, kMode, kHeadDim, kHeadDimV, kTile.block_q, kTile.block_kv,
                               kTile.num_stages, kTile.box_cols>;
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  ForwardParams params = gpu::MakeForwardParams(problem, operands, kTile.block_q, kSectionBytes);

  CUtensorMap q, k, v, out;
  if (Status s = EncodeRows(
          gpu::RowsOf(operands.q, problem.seqlen_q, problem.num_q_heads, problem.head_dim), 64,
          kTile.box_cols, &q);
      !s.ok())
    return s;
  if (Status s = EncodeRows(
          gpu::RowsOf(operands.k, problem.seqlen_kv, problem.num_kv_heads, problem.head_dim),
          kTile.block_kv, kTile.box_cols, &k);
      !s.ok())
    return s;
  if (Status s = EncodeRows(
          gpu::RowsOf(operands.v, problem.seqlen_kv, problem.num_kv_heads, problem.head_dim_v),
          kTile.block_kv, kTile.box_cols, &v);
      !s.ok())
    return s;
  // A box is what a warp stages.
  if (Status s = EncodeRows({operands.out.data, operands.q.dtype, problem.batch, problem.seqlen_q,
                             problem.num_q_heads, problem.head_dim_v},
                            Kernel::OutBox::kRows, Kernel::OutBox::kColumns, &out);
      !s.ok())
    return s;
  if (Status s = gpu::PlanForward(problem, launch, kTile.block_q, kTile.block_kv, &params); !s.ok())
    return s;

  constexpr int kSmemBytes = sizeof(typename Kernel::SharedStorage);
  static_assert(kSmemBytes <= 227 * 1024);
  int num_sms = 0;
  if (Status s = gpu::PrepareLaunch(reinterpret_cast<const void*>(ForwardMain<Kernel>), kSmemBytes,
                                    &num_sms);
      !s.ok())
    return s;
  const int grid = std::min(num_sms, params.order.num_tiles);
  ForwardMain<Kernel><<<grid, Kernel::kThreads, kSmemBytes, stream>>>(params, q, k, v, out);
  if (Status s = gpu::ToStatus(cudaGetLastError(), "forward"); !s.ok()) return s;
  return gpu::RepairRows<Kernel>(problem, operands, params, num_sms, stream);
}

}  // namespace jax_fmha::sm90
