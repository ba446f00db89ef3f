// Stores a warpgroup's accumulator (layout in softmax.cuh) as rows of 16-bit elements, 16 bytes at
// a time.
#pragma once

#include <cutlass/array.h>

#include <cstdint>

namespace jax_fmha::gpu {

// w[j] of quad lane t becomes w[t] of quad lane j.
__device__ __forceinline__ void TransposeQuad(uint32_t (&w)[4], int t) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool is_upper = t & step;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & step) continue;
      const uint32_t sent = is_upper ? w[j] : w[j + step];
      const uint32_t got = __shfl_xor_sync(0xffffffff, sent, step);
      if (is_upper) {
        w[j] = got;
      } else {
        w[j + step] = got;
      }
    }
  }
}

// rows[r]: where row r of this thread starts, null to skip it; columns from `num_columns` on are
// dropped (a multiple of 8). Quads exchange four 8-column groups, so that a thread stores 16 bytes
// of one row.
template <typename Element, int kRegs>
__device__ __forceinline__ void StoreRows(const float (&x)[kRegs], Element* const (&rows)[2],
                                          int num_columns) {
  static_assert(kRegs % 16 == 0);
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int g = 0; g < kRegs / 16; ++g) {
      uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = (g * 4 + j) * 4 + r * 2;
        cutlass::Array<Element, 2> pair;
        pair[0] = static_cast<Element>(x[at]);
        pair[1] = static_cast<Element>(x[at + 1]);
        w[j] = reinterpret_cast<const uint32_t&>(pair);
      }
      TransposeQuad(w, t);
      const int column = (g * 4 + t) * 8;
      if (rows[r] != nullptr && column < num_columns) {
        *reinterpret_cast<uint4*>(rows[r] + column) = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
  }
}

}  // namespace jax_fmha::gpu
