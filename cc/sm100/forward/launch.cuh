// Host side of one instance: tensor maps, workspace, launches.
#pragma once

#include <algorithm>

#include "cc/gpu/check.h"
#include "cc/gpu/forward_launch.cuh"
#include "cc/gpu/launch.h"
#include "cc/sm100/forward/kernel.cuh"
#include "cc/sm100/forward/launch.h"
#include "cc/sm100/tma.h"

namespace jax_fmha::sm100 {

// Keys and values that a section of heads should find in L2 again.
inline constexpr int64_t kSectionBytes = 48 << 20;

inline Status EncodeForward(const Problem& problem, const Operands& operands,
                            ForwardTensors* tensors) {
  const gpu::RowTensor q =
      gpu::RowsOf(operands.q, problem.seqlen_q, problem.num_q_heads, problem.head_dim);
  const gpu::RowTensor k =
      gpu::RowsOf(operands.k, problem.seqlen_kv, problem.num_kv_heads, problem.head_dim);
  const gpu::RowTensor v =
      gpu::RowsOf(operands.v, problem.seqlen_kv, problem.num_kv_heads, problem.head_dim_v);
  if (Status s = EncodeRows(q, kRows, kBoxCols, false, &tensors->q); !s.ok()) return s;
  if (Status s = EncodeRows(k, kRows, kBoxCols, false, &tensors->k); !s.ok()) return s;
  return EncodeRowMaps(v, kRows, kBoxCols, &tensors->v);
}

template <DType kDType, ForwardMode kMode, int kHeadDim, int kHeadDimV>
Status LaunchForward(const Problem& problem, const Operands& operands, const Launch& launch) {
  using Element = std::conditional_t<kDType == DType::kBF16, cutlass::bfloat16_t, cutlass::half_t>;
  constexpr ForwardTile kTile = TileOf(kHeadDim, kHeadDimV);
  using Kernel = ForwardKernel<Element, kMode, kHeadDim, kHeadDimV, kTile.k_stages, kTile.v_stages>;
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  ForwardParams params = gpu::MakeForwardParams(problem, operands, kGroups * kRows, kSectionBytes);

  ForwardTensors tensors{};
  if (Status s = EncodeForward(problem, operands, &tensors); !s.ok()) return s;

  const int parts = NumValueParts(static_cast<int>(problem.head_dim_v), kTile);
  params.order.num_tiles *= parts;
  if (Status s = gpu::PlanForward(problem, launch, kGroups * kRows, kRows, &params, parts); !s.ok())
    return s;

  constexpr int kSmemBytes = sizeof(typename Kernel::SharedStorage);
  static_assert(kSmemBytes <= 227 * 1024);
  int num_sms = 0;
  if (Status s = gpu::PrepareLaunch(reinterpret_cast<const void*>(ForwardMain<Kernel>), kSmemBytes,
                                    &num_sms);
      !s.ok())
    return s;
  const int grid = std::min(num_sms, params.order.num_tiles);
  ForwardMain<Kernel><<<grid, Kernel::kThreads, kSmemBytes, stream>>>(params, tensors);
  if (Status s = gpu::ToStatus(cudaGetLastError(), "forward"); !s.ok()) return s;
  return gpu::RepairRows<Kernel>(problem, operands, params, num_sms, stream);
}

}  // namespace jax_fmha::sm100
