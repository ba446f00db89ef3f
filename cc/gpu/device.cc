#include "cc/gpu/device.h"

#include <cuda_runtime_api.h>

#include "cc/gpu/check.h"

namespace jax_fmha::gpu {

Status CurrentDevice(Device* device) {
  int ordinal = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&ordinal);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
  }
  device->platform = Platform::kCuda;
  device->compute_capability = 10 * major + minor;
  return ToStatus(error, "device");
}

}  // namespace jax_fmha::gpu
