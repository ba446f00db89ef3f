// CUDA errors as Status.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "cc/core/status.h"

namespace jax_fmha::gpu {

inline Status ToStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return Status::Internal("attention: " + std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace jax_fmha::gpu
