// Tensor maps (TMA descriptors) of operands [entries, rows, heads, head_dim].
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "cc/core/operands.h"
#include "cc/core/status.h"
#include "cc/core/types.h"

namespace jax_fmha::gpu {

struct RowTensor {
  const void* data;
  DType dtype;
  int64_t entries, rows, heads, head_dim;
};

// Entries that an operand holds, shared ones once.
inline int64_t EntriesOf(const BatchMap& map) {
  int64_t last = 0;
  for (int d = 0; d < map.rank; ++d) last += (map.sizes[d] - 1) * map.strides[d];
  return last + 1;
}

inline RowTensor RowsOf(const Operand& x, int64_t rows, int64_t heads, int64_t head_dim) {
  return {x.data, x.dtype, EntriesOf(x.batch), rows, heads, head_dim};
}

// A map of `rank` dimensions, innermost first: strides in bytes of all but the first, and a box
// whose rows of 64 or 128 bytes are swizzled. What lies outside is zero-filled.
inline Status EncodeTensorMap(DType dtype, int rank, const void* base, const cuuint64_t* dims,
                              const cuuint64_t* strides, const cuuint32_t* box, CUtensorMap* map) {
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
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult result = reinterpret_cast<Encode>(entry_point)(
      map,
      dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      rank, const_cast<void*>(base), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      box[0] * SizeOf(dtype) == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Status::Internal("attention: cuTensorMapEncodeTiled failed with " +
                            std::to_string(result));
  }
  return {};
}

}  // namespace jax_fmha::gpu
