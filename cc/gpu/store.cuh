// Stores a warpgroup's accumulator (layout in softmax.cuh) as rows of 16-bit elements, 16 bytes at
// a time.
#pragma once

#include <cutlass/array.h>

#include <cstdint>

#include "cc/gpu/pipeline.cuh"

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

// Shared memory of one warp, by way of which 64 columns of its 16 accumulator rows go to global
// memory: whole rows at a time, and without exchanges between lanes. Chunks of 8 columns are
// swizzled as in boxes of TMA, so that the same columns of rows lie in different banks.
template <typename Element>
struct RowStage {
  static constexpr int kRows = 16, kColumns = 64;
  alignas(16) Element data[kRows * kColumns];

  static __device__ __forceinline__ int PlaceOf(int row, int chunk) {
    return row * kColumns + (chunk ^ row % 8) * 8;
  }

  // The first `kRegs` registers' columns of x.
  template <int kRegs>
  __device__ __forceinline__ void Fill(const float* x) {
    const int lane = threadIdx.x % 32;
    // A matrix is 8 columns of rows 8 r to 8 r + 7; lanes 8 m to 8 m + 7 say where the rows of
    // matrix m go.
#pragma unroll
    for (int g = 0; g < kRegs / 8; ++g) {
      uint32_t w[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        cutlass::Array<Element, 2> pair;
        pair[0] = static_cast<Element>(x[g * 8 + m * 2]);
        pair[1] = static_cast<Element>(x[g * 8 + m * 2 + 1]);
        w[m] = reinterpret_cast<const uint32_t&>(pair);
      }
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       SmemAddress(data + PlaceOf(lane % 16, lane / 16 + g * 2))),
                   "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                   : "memory");
    }
  }

  // The first `num_rows` rows (all, if there are more) go `stride` elements apart; columns from
  // `num_columns` on are dropped (a multiple of 8).
  __device__ __forceinline__ void Store(const float* x, Element* first, int64_t stride,
                                        int num_rows, int num_columns) {
    __syncwarp();  // of what was stored before, everything has been read
    Fill<kColumns / 2>(x);
    __syncwarp();
    constexpr int kChunks = kColumns / 8;  // of a row, 16 bytes each
#pragma unroll
    for (int i = 0; i < kChunks / 2; ++i) {
      const int at = i * 32 + threadIdx.x % 32, row = at / kChunks, chunk = at % kChunks;
      if (row < num_rows && chunk * 8 < num_columns) {
        *reinterpret_cast<uint4*>(first + row * stride + chunk * 8) =
            *reinterpret_cast<const uint4*>(data + PlaceOf(row, chunk));
      }
    }
  }
};

}  // namespace jax_fmha::gpu
