// Micro-kernels: small blocks C[M rows][V vectors] = sum_k A(m, k) B(k, n), held in registers.
//
// B is a panel: row k is V vectors at b + k * ldb. A is read one element at a time and broadcast:
// along its rows (k contiguous), along its columns (m contiguous), or from strips, which interleave
// the rows of a block so that it reads one stream of memory. What becomes of C is the caller's
// business.
#pragma once

#include "cc/cpu/simd.h"

namespace jax_fmha {
namespace cpu {
namespace JAX_FMHA_ISA {

// Vectors in a full panel and in a narrow one, which serves ragged edges.
#if defined(__aarch64__)
inline constexpr int kPanelVectors = 4;
#else
inline constexpr int kPanelVectors = 2;
#endif
inline constexpr int kNarrowVectors = kPanelVectors / 2;

// Columns of a full panel: 16 floats or 8 doubles with AVX2.
template <typename T>
inline constexpr int kPanel = kPanelVectors * kLanes<T>;

// Rows of a block that keep the accumulators, one row of B and an element of A in registers.
template <int V>
inline constexpr int kBlockRows = kRegisters == 32 ? 24 / V : 12 / V;

// Rows of a strip: every block is whole strips.
inline constexpr int kStripRows = kBlockRows<kPanelVectors>;

enum class Layout { kRows, kColumns, kStrips };

// Where A(m, k) is: lda counts from row to row, from column to column, or from strip to strip.
template <Layout kLayout>
JAX_FMHA_INLINE constexpr int64_t Offset(int64_t m, int64_t k, int64_t lda) {
  return kLayout == Layout::kRows      ? m * lda + k
         : kLayout == Layout::kColumns ? k * lda + m
                                       : m / kStripRows * lda + k * kStripRows + m % kStripRows;
}

// Starts from what c holds. Two steps to an iteration: one alone spends a tenth of its time on the
// loop where two threads share a core.
template <Layout kLayout, int M, int V, typename T>
JAX_FMHA_INLINE void MultiplyAdd(int64_t depth, const T* __restrict a, int64_t lda,
                                 const T* __restrict b, int64_t ldb, Vec<T> (&c)[M][V]) {
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    Vec<T> row[V];
    JAX_FMHA_UNROLL
    for (int v = 0; v < V; ++v) row[v] = Load(b + k * ldb + v * kLanes<T>);
    JAX_FMHA_UNROLL
    for (int m = 0; m < M; ++m) {
      const Vec<T> x = Set(a[Offset<kLayout>(m, k, lda)]);
      JAX_FMHA_UNROLL
      for (int v = 0; v < V; ++v) c[m][v] += x * row[v];
    }
  };
  int64_t k = 0;
  for (; k + 2 <= depth; k += 2) {
    step(k);
    step(k + 1);
  }
  if (k < depth) step(k);
}

// c = 0, in registers: an initialiser would go through memory.
template <int M, int V, typename VecT>
JAX_FMHA_INLINE void Clear(VecT (&c)[M][V]) {
  JAX_FMHA_UNROLL
  for (int m = 0; m < M; ++m) {
    JAX_FMHA_UNROLL
    for (int v = 0; v < V; ++v) c[m][v] = VecT{};
  }
}

// A compile-time number handed to a generic lambda.
template <int N>
struct Constant {
  static constexpr int value = N;
};

template <int N, typename F>
JAX_FMHA_INLINE void WithConstant(int64_t n, F&& f) {
  if constexpr (N > 0) {
    if (n == N) {
      f(Constant<N>());
    } else {
      WithConstant<N - 1>(n, f);
    }
  }
}

// Covers [0, rows) with blocks: calls f(Constant<M>, first row). Full blocks as long as they fit;
// what is left is cut in two even parts when it exceeds a block, since a block of two rows would
// wait for its own additions.
template <int V, typename F>
JAX_FMHA_INLINE void ForRowBlocks(int64_t rows, F&& f) {
  constexpr int kFull = kBlockRows<V>;
  int64_t row = 0;
  for (; rows - row >= kFull + kFull / 2 || rows - row == kFull; row += kFull) {
    f(Constant<kFull>(), row);
  }
  if (rows - row > kFull) {
    const int64_t half = (rows - row + 1) / 2;
    WithConstant<kFull>(half, [&](auto m) { f(m, row); });
    row += half;
  }
  if (row < rows) WithConstant<kFull>(rows - row, [&](auto m) { f(m, row); });
}

}  // namespace JAX_FMHA_ISA
}  // namespace cpu
}  // namespace jax_fmha
