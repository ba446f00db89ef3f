// Tensor maps (TMA descriptors) whose row dimension is described twice, so that a box of rows can
// be clipped anywhere.
//
// An operand [entries, rows, heads, head_dim] becomes five dimensions: column, masking row, offset
// row, head, entry. The box spans `box_rows` masking rows, and that dimension is exactly box_rows
// long: a box whose last wanted row is `first + valid - 1` is addressed by masking row box_rows -
// valid and offset row first + valid, and what lies past the masking dimension is zero-filled
// (loads). The base is moved back by box_rows rows to make the indices cancel, so a descriptor may
// span memory that is not ours; on Hopper only rows that a box really touches must be mapped.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cc/core/status.h"
#include "cc/core/types.h"

namespace jax_fmha::gpu {

struct RowTensor {
  const void* data;
  DType dtype;
  int64_t entries, rows, heads, head_dim;
};

inline Status EncodeRows(const RowTensor& x, int box_rows, int box_cols, CUtensorMap* map) {
  static_assert(sizeof(void*) == 8);
  using Encode =
      CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                   const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                   CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  void* entry_point = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry_point, 12000,
                                       cudaEnableDefault, &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    return Status::Internal("attention: the CUDA driver has no cuTensorMapEncodeTiled");
  }
  const cuuint64_t size = static_cast<cuuint64_t>(SizeOf(x.dtype));
  const cuuint64_t row = x.heads * x.head_dim * size;
  const cuuint64_t dims[5] = {static_cast<cuuint64_t>(x.head_dim),
                              static_cast<cuuint64_t>(box_rows),
                              static_cast<cuuint64_t>(x.rows + 1), static_cast<cuuint64_t>(x.heads),
                              static_cast<cuuint64_t>(x.entries)};
  const cuuint64_t strides[4] = {row, row, x.head_dim * size, row * x.rows};
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(box_cols), static_cast<cuuint32_t>(box_rows),
                             1, 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  auto* base = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(x.data) - box_rows * row);
  const CUresult result = reinterpret_cast<Encode>(entry_point)(
      map,
      x.dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      5, base, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      box_cols * size == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Status::Internal("attention: cuTensorMapEncodeTiled failed with " +
                            std::to_string(result));
  }
  return {};
}

inline int64_t EntriesOf(const int64_t* sizes, const int64_t* strides, int rank) {
  int64_t last = 0;
  for (int d = 0; d < rank; ++d) last += (sizes[d] - 1) * strides[d];
  return last + 1;
}

}  // namespace jax_fmha::gpu
