// Tensor memory and the barriers around it, as thin wrappers around CuTe's instructions.
//
// An address is a lane in its upper and a column in its lower 16 bits. A warp reaches the 32 lanes
// that begin at 32 times its number in the warpgroup, and a thread holds one lane: a row of scores
// or output.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm100.hpp>
#include <cute/arch/tmem_allocator_sm100.hpp>

#include <cstdint>
#include <utility>

#include "cc/gpu/pipeline.cuh"

namespace jax_fmha::sm100 {

namespace detail {
template <size_t... kI>
__device__ __forceinline__ void Load32(uint32_t from, uint32_t* to, std::index_sequence<kI...>) {
  cute::SM100_TMEM_LOAD_32dp32b32x::copy(from, to[kI]...);
}
template <size_t... kI>
__device__ __forceinline__ void Store32(uint32_t to, const uint32_t* from,
                                        std::index_sequence<kI...>) {
  cute::SM100_TMEM_STORE_32dp32b32x::copy(from[kI]..., to);
}
template <size_t... kI>
__device__ __forceinline__ void Store16(uint32_t to, const uint32_t* from,
                                        std::index_sequence<kI...>) {
  cute::SM100_TMEM_STORE_32dp32b16x::copy(from[kI]..., to);
}
}  // namespace detail

// 32 columns of this thread's lane. The registers hold nothing before WaitLoads.
__device__ __forceinline__ void LoadColumns(uint32_t from, float (&to)[32]) {
  detail::Load32(from, reinterpret_cast<uint32_t*>(to), std::make_index_sequence<32>());
}
__device__ __forceinline__ void StoreColumns(uint32_t to, const float (&from)[32]) {
  detail::Store32(to, reinterpret_cast<const uint32_t*>(from), std::make_index_sequence<32>());
}
__device__ __forceinline__ void StoreColumns(uint32_t to, const uint32_t (&from)[16]) {
  detail::Store16(to, from, std::make_index_sequence<16>());
}
__device__ __forceinline__ void WaitLoads() { cutlass::arch::fence_view_async_tmem_load(); }
__device__ __forceinline__ void WaitStores() { cutlass::arch::fence_view_async_tmem_store(); }

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
