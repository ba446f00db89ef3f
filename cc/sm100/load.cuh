// Tiles of kRows rows by TMA, as [column block][row][kBoxCols] of swizzled shared memory. Each is a
// transaction of its own on the barrier that it is given, and loads by one thread.
#pragma once

#include "cc/gpu/pipeline.cuh"
#include "cc/sm100/forward/config.h"
#include "cc/sm100/tma.h"

namespace jax_fmha::sm100 {

__device__ __forceinline__ void LoadBox(void* to, const CUtensorMap* map, gpu::Barrier* bar,
                                        int col, int row, int head, int entry) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3, %4, %5, %6}], [%2];" ::"r"(gpu::SmemAddress(to)),
      "l"(map), "r"(gpu::SmemAddress(bar)), "r"(col), "r"(row), "r"(head), "r"(entry)
      : "memory");
}

// Rows from `first` on, and zeros where the operand has ended.
template <int kCols, typename Element>
__device__ __forceinline__ void LoadTile(Element* to, const CUtensorMap* map, gpu::Barrier* bar,
                                         int first, int head, int entry, int first_col = 0) {
  gpu::ArriveExpect(bar, kRows * kCols * sizeof(Element));
#pragma unroll
  for (int c = 0; c < kCols / kBoxCols; ++c)
    LoadBox(to + c * kRows * kBoxCols, map, bar, first_col + c * kBoxCols, first, head, entry);
}

// Rows [first, first + valid) of an operand of num_rows rows, and zeros behind them.
template <int kCols, typename Element>
__device__ __forceinline__ void LoadTile(Element* to, const RowMaps& maps, gpu::Barrier* bar,
                                         int first, int valid, int num_rows, int head, int entry,
                                         int first_col = 0) {
  const int end = first + valid;
  if (valid == kRows || end == num_rows) {
    LoadTile<kCols>(to, &maps.tile, bar, first, head, entry, first_col);
    return;
  }
  gpu::ArriveExpect(bar, kRows * kCols * sizeof(Element));
#pragma unroll 1
  for (int c = 0; c < kCols / kBoxCols; ++c) {
    Element* block = to + c * kRows * kBoxCols;
    const int col = first_col + c * kBoxCols;
    if (end >= kRows) {
      gpu::LoadBox(block, &maps.masked, bar, col, kRows - valid, end - kRows, head, entry);
      continue;
    }
    // No box of kRows rows ends here without beginning in front of the operand. Row num_rows and
    // those behind it read as zeros.
#pragma unroll 1
    for (int r = 0; r < kRows; r += 8) {
      if (r + 8 <= valid || r >= valid) {
        LoadBox(block + r * kBoxCols, &maps.rows[0], bar, col, r >= valid ? num_rows : first + r,
                head, entry);
      } else {
#pragma unroll 1
        for (int i = r; i < r + 8; ++i) {
          LoadBox(block + i * kBoxCols, &maps.rows[1], bar, col, i >= valid ? num_rows : first + i,
                  head, entry);
        }
      }
    }
  }
}

}  // namespace jax_fmha::sm100
