// The shared library of the CUDA kernels, which lies beside the extension if it was built.
#pragma once

#include "cc/dispatch/cuda_library.h"

namespace jax_fmha::ffi {

bool HasCudaLibrary();

// Loads it with the first call; null with a reason in `status` if that fails.
RunOnCuda* LoadCudaLibrary(Status* status);

}  // namespace jax_fmha::ffi
