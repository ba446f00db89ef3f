// Tensor memory and the barriers around it, as thin wrappers around CuTe's instructions.
//
// An address is a lane in its upper and a column in its lower 16 bits. A warp reaches the 32 lanes
// that begin at 32 times its number in the warpgroup, and a thread holds one lane: a row of scores
// or output.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_conversion.h>
#include <cute/arch/copy_sm100.hpp>
#include <cute/arch/tmem_allocator_sm100.hpp>

#include <cstdint>
#include <utility>

#include "cc/gpu/pipeline.cuh"

namespace jax_fmha::sm100 {

namespace detail {
template <class Op, size_t... kI>
__device__ __forceinline__ void Load(uint32_t from, uint32_t* to, std::index_sequence<kI...>) {
  Op::copy(from, to[kI]...);
}
template <class Op, size_t... kI>
__device__ __forceinline__ void Store(uint32_t to, const uint32_t* from,
                                      std::index_sequence<kI...>) {
  Op::copy(from[kI]..., to);
}
}  // namespace detail

// Columns of this thread's lane. The registers hold nothing before WaitLoads.
__device__ __forceinline__ void LoadColumns(uint32_t from, float (&to)[32]) {
  detail::Load<cute::SM100_TMEM_LOAD_32dp32b32x>(from, reinterpret_cast<uint32_t*>(to),
                                                 std::make_index_sequence<32>());
}
__device__ __forceinline__ void LoadColumns(uint32_t from, float (&to)[16]) {
  detail::Load<cute::SM100_TMEM_LOAD_32dp32b16x>(from, reinterpret_cast<uint32_t*>(to),
                                                 std::make_index_sequence<16>());
}
__device__ __forceinline__ void StoreColumns(uint32_t to, const float (&from)[32]) {
  detail::Store<cute::SM100_TMEM_STORE_32dp32b32x>(to, reinterpret_cast<const uint32_t*>(from),
                                                   std::make_index_sequence<32>());
}
__device__ __forceinline__ void StoreColumns(uint32_t to, const uint32_t (&from)[32]) {
  detail::Store<cute::SM100_TMEM_STORE_32dp32b32x>(to, from, std::make_index_sequence<32>());
}
__device__ __forceinline__ void StoreColumns(uint32_t to, const uint32_t (&from)[16]) {
  detail::Store<cute::SM100_TMEM_STORE_32dp32b16x>(to, from, std::make_index_sequence<16>());
}
__device__ __forceinline__ void WaitLoads() { cutlass::arch::fence_view_async_tmem_load(); }
__device__ __forceinline__ void WaitStores() { cutlass::arch::fence_view_async_tmem_store(); }

// Two values to a register. Pairs are converted together, since single conversions are as slow as
// exponentials.
template <typename Element, int kPairs>
__device__ __forceinline__ void Pack(const float* x, uint32_t (&packed)[kPairs]) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const cutlass::Array<float, 2> pair = {x[2 * i], x[2 * i + 1]};
    const auto rounded = cutlass::NumericArrayConverter<Element, float, 2>::convert(pair);
    packed[i] = reinterpret_cast<const uint32_t&>(rounded);
  }
}

// Bits [lo, hi) of a word, of which any part may lie outside.
__device__ __forceinline__ uint32_t IntervalBits(int lo, int hi) {
  lo = min(max(lo, 0), 32);
  hi = min(max(hi, 0), 32);
  return static_cast<uint32_t>((uint64_t{1} << hi) - (uint64_t{1} << min(lo, hi)));
}

// A bit for each of the indices from `first` on: whether it lies in [interval.x, interval.y).
template <int kWords>
__device__ __forceinline__ void KeepInterval(int first, int2 interval, uint32_t (&kept)[kWords]) {
#pragma unroll
  for (int w = 0; w < kWords; ++w)
    kept[w] = IntervalBits(interval.x - first - 32 * w, interval.y - first - 32 * w);
}

// Of these bits, those of indices that `keep` keeps. Rolled loops keep the code small; the words
// rotate, since registers need constant indices.
template <int kWords, class Keep>
__device__ __forceinline__ void KeepIf(int first, uint32_t (&kept)[kWords], const Keep& keep) {
#pragma unroll 1
  for (int at = first; at < first + 32 * kWords; at += 32) {
    uint32_t bits = 0;
#pragma unroll 1
    for (int bit = 0; bit < 32; ++bit) bits |= static_cast<uint32_t>(keep(at + bit)) << bit;
    bits &= kept[0];
#pragma unroll
    for (int w = 0; w + 1 < kWords; ++w) kept[w] = kept[w + 1];
    kept[kWords - 1] = bits;
  }
}

// The compiler moves no arithmetic across this branch. It is never taken: `address` is one of
// tensor memory. Branches after one another take different ones, lest the second follows from the
// first.
__device__ __forceinline__ void KeepOrder(uint32_t address) {
  if (address == ~0u) __trap();
}

// Around barriers that hand tensor memory from one warp to another.
__device__ __forceinline__ void FenceBefore() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void FenceAfter() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void WaitTmem(gpu::Barrier* bar, int phase) {
  gpu::Wait(bar, phase);
  FenceAfter();
}
__device__ __forceinline__ void ArriveTmem(gpu::Barrier* bar) {
  FenceBefore();
  gpu::Arrive(bar);
}

// The barrier is told when all products issued so far are done. By a whole warp.
__device__ __forceinline__ void Commit(gpu::Barrier* bar) { cutlass::arch::umma_arrive(bar); }

}  // namespace jax_fmha::sm100
