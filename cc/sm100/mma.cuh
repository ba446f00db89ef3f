// Products of the tensor core, issued by a whole warp. Those of one block are done in the order of
// their issue, so that one may overwrite what another before it reads.
#pragma once

#include <cute/tensor.hpp>

#include <cstdint>

namespace jax_fmha::sm100 {

// c = a b, or c += a b, step by step along what a and b share; `first` is b's step for a's first.
template <class Mma, class A, class B, class C>
__device__ __forceinline__ void Gemm(Mma& mma, const A& a, const B& b, C& c, bool accumulates,
                                     int first = 0) {
  using cute::_;
  mma.accumulate_ = accumulates ? cute::UMMA::ScaleOut::One : cute::UMMA::ScaleOut::Zero;
  CUTLASS_PRAGMA_UNROLL
  for (int k = 0; k < cute::size<2>(a); ++k) {
    cute::gemm(mma, a(_, _, k), b(_, _, first + k), c);
    mma.accumulate_ = cute::UMMA::ScaleOut::One;
  }
}

// A tensor in tensor memory, `column` further.
template <class Tensor>
__device__ __forceinline__ auto AtColumn(const Tensor& x, uint32_t column) {
  auto moved = x;
  moved.data() = x.data().get() + column;
  return moved;
}

}  // namespace jax_fmha::sm100
