// Tensor maps (TMA descriptors) that span mapped memory only, which Blackwell asks for: unlike
// Hopper's, none reaches in front of its operand.
//
// An operand is [entries, rows, heads, head_dim]. A plain map loads any box_rows rows and fills
// what lies past the operand with zeros. A masked map describes the rows twice, by an offset and by
// a masking dimension of box_rows rows, and so ends a box at any row of the operand from box_rows
// on.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "cc/core/operands.h"
#include "cc/core/status.h"
#include "cc/core/types.h"

namespace jax_fmha::sm100 {

struct RowTensor {
  const void* data;
  DType dtype;
  int64_t entries, rows, heads, head_dim;
};

inline int64_t EntriesOf(const BatchMap& map) {
  int64_t last = 0;
  for (int d = 0; d < map.rank; ++d) last += (map.sizes[d] - 1) * map.strides[d];
  return last + 1;
}

// A masked map needs at least box_rows rows; with fewer it is left as it is, for nothing will use
// it.
inline Status EncodeRows(const RowTensor& x, int box_rows, int box_cols, bool is_masked,
                         CUtensorMap* map) {
  if (is_masked && x.rows < box_rows) return {};
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
  const auto size = static_cast<cuuint64_t>(SizeOf(x.dtype));
  const cuuint64_t head = x.head_dim * size, row = x.heads * head, entry = x.rows * row;
  const auto rows = static_cast<cuuint64_t>(x.rows), mask = static_cast<cuuint64_t>(box_rows);
  // column, (masking row,) row, head, entry
  const cuuint64_t plain_dims[4] = {static_cast<cuuint64_t>(x.head_dim), rows,
                                    static_cast<cuuint64_t>(x.heads),
                                    static_cast<cuuint64_t>(x.entries)};
  const cuuint64_t masked_dims[5] = {plain_dims[0], mask, rows - mask + 1, plain_dims[2],
                                     plain_dims[3]};
  const cuuint64_t plain_strides[3] = {row, head, entry};
  const cuuint64_t masked_strides[4] = {row, row, head, entry};
  const auto cols = static_cast<cuuint32_t>(box_cols), height = static_cast<cuuint32_t>(box_rows);
  const cuuint32_t plain_box[4] = {cols, height, 1, 1}, masked_box[5] = {cols, height, 1, 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult result = reinterpret_cast<Encode>(entry_point)(
      map,
      x.dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      is_masked ? 5 : 4, const_cast<void*>(x.data), is_masked ? masked_dims : plain_dims,
      is_masked ? masked_strides : plain_strides, is_masked ? masked_box : plain_box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Status::Internal("attention: cuTensorMapEncodeTiled failed with " +
                            std::to_string(result));
  }
  return {};
}

}  // namespace jax_fmha::sm100
