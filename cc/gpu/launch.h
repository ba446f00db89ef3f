// What every launch of a main kernel needs of the device that is current.
#pragma once

#include "cc/gpu/check.h"

namespace jax_fmha::gpu {

// Lets `kernel` use `smem_bytes` of shared memory, and counts the multiprocessors. Per call, since
// both belong to the device.
inline Status PrepareLaunch(const void* kernel, int smem_bytes, int* num_sms) {
  int device = 0;
  if (Status s = ToStatus(cudaGetDevice(&device), "device"); !s.ok()) return s;
  cudaDeviceGetAttribute(num_sms, cudaDevAttrMultiProcessorCount, device);
  return ToStatus(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes),
      "shared memory");
}

}  // namespace jax_fmha::gpu
