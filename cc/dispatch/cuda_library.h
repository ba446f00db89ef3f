// What the shared library of the CUDA kernels offers. It knows neither XLA nor Python: the Python
// extension decodes calls and loads the library with the first one on a CUDA device.
#pragma once

#include "cc/core/kernel.h"

namespace jax_fmha {

using RunOnCuda = void(const Problem& problem, const Operands& operands, const Launch& launch,
                       Status* status);
inline constexpr char kRunOnCudaSymbol[] = "jax_fmha_run_on_cuda";

}  // namespace jax_fmha

// Runs the kernel that the registry chooses for the current device on the launch's stream.
extern "C" __attribute__((visibility("default"))) jax_fmha::RunOnCuda jax_fmha_run_on_cuda;
