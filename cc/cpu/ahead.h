// Rows of memory that are read soon, brought nearer bit by bit while a product runs.
//
// Hardware prefetches long runs of addresses only. It follows neither the short rows that a block
// of a product reads side by side nor the rows of one head among many.
#pragma once

#include <cstdint>

namespace jax_fmha {
namespace cpu {

struct Ahead {
  const char* row = nullptr;
  int64_t stride = 0;  // bytes from row to row
  int64_t bytes = 0;   // of a row
  int64_t rows = 0;

  // How many rows each of `steps` calls of Fetch must take for all of them.
  __attribute__((always_inline)) int64_t RowsPerStep(int64_t steps) const {
    return steps < 1 ? rows : (rows + steps - 1) / steps;
  }

  // Asks for the next `count` rows. Into the second cache: the first belongs to the product at
  // hand.
  __attribute__((always_inline)) void Fetch(int64_t count) {
    constexpr int64_t kLine = 64;
    for (; count > 0 && rows > 0; --count, --rows, row += stride) {
      for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(row + at, 0, 2);
    }
  }
};

}  // namespace cpu
}  // namespace jax_fmha
