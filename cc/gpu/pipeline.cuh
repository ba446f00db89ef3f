// mbarriers, TMA loads and named barriers, as thin wrappers around the instructions.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace jax_fmha::gpu {

using Barrier = uint64_t;  // an mbarrier in shared memory

__device__ __forceinline__ uint32_t SmemAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void InitBarrier(Barrier* bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SmemAddress(bar)), "r"(count));
}

__device__ __forceinline__ void Arrive(Barrier* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SmemAddress(bar)) : "memory");
}

// compute-sanitizer sees less than happens: racecheck does not follow that all of a warp has met
// before one of its lanes arrives, and initcheck does not count what TMA stores. Hence a build for
// it, in which every lane arrives and outputs are stored by threads.
#ifdef JAX_FMHA_FOR_SANITIZER
inline constexpr bool kIsForSanitizer = true;
#else
inline constexpr bool kIsForSanitizer = false;
#endif

// A warp arrives by one lane, once all have met: what the others read before is done as well.
inline constexpr int kArrivalsOfWarp = kIsForSanitizer ? 32 : 1;

__device__ __forceinline__ void ArriveAsWarp(Barrier* bar) {
  __syncwarp();
  if (threadIdx.x % 32 < kArrivalsOfWarp) Arrive(bar);
}

__device__ __forceinline__ void ArriveExpect(Barrier* bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SmemAddress(bar)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void Wait(Barrier* bar, int phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}" ::"r"(SmemAddress(bar)),
      "r"(phase)
      : "memory");
}

// A ring of kStages slots with a full and an empty barrier each; `index` runs on from tile to tile.
template <int kStages>
struct Ring {
  Barrier full[kStages];
  Barrier empty[kStages];
};

template <int kStages>
struct RingState {
  int stage = 0;
  int phase = 0;
  __device__ __forceinline__ void Next() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

__device__ __forceinline__ void LoadBox(void* smem, const CUtensorMap* map, Barrier* bar, int col,
                                        int mask_row, int offset_row, int head, int entry) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5, %6, "
      "%7}], [%2];" ::"r"(SmemAddress(smem)),
      "l"(map), "r"(SmemAddress(bar)), "r"(col), "r"(mask_row), "r"(offset_row), "r"(head),
      "r"(entry)
      : "memory");
}

// Rows beyond those of the map are not stored.
__device__ __forceinline__ void StoreBox(const void* smem, const CUtensorMap* map, int col,
                                         int mask_row, int offset_row, int head, int entry) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::
          "l"(map),
      "r"(SmemAddress(smem)), "r"(col), "r"(mask_row), "r"(offset_row), "r"(head), "r"(entry)
      : "memory");
}

// Until everything that this thread has stored is read from shared memory.
__device__ __forceinline__ void AwaitStores() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void PrefetchBox(const CUtensorMap* map, int col, int mask_row,
                                            int offset_row, int head, int entry) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(map),
               "r"(col), "r"(mask_row), "r"(offset_row), "r"(head), "r"(entry)
               : "memory");
}

// Rows [first, first + valid) of one head into [column block][row][kBoxCols]; the rest of the tile
// is zero-filled. Column blocks lie kPitch rows apart.
template <int kRows, int kCols, int kBoxCols, int kPitch = kRows, typename T>
__device__ __forceinline__ void LoadRows(T* smem, const CUtensorMap* map, Barrier* bar, int first,
                                         int valid, int head, int entry) {
#pragma unroll
  for (int c = 0; c < kCols / kBoxCols; ++c) {
    LoadBox(smem + c * kPitch * kBoxCols, map, bar, c * kBoxCols, kRows - valid, first + valid,
            head, entry);
  }
}

// What LoadRows would load, into L2.
template <int kRows, int kCols, int kBoxCols>
__device__ __forceinline__ void PrefetchRows(const CUtensorMap* map, int first, int valid, int head,
                                             int entry) {
#pragma unroll
  for (int c = 0; c < kCols / kBoxCols; ++c) {
    PrefetchBox(map, c * kBoxCols, kRows - valid, first + valid, head, entry);
  }
}

__device__ __forceinline__ void NamedSync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void NamedArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace jax_fmha::gpu
