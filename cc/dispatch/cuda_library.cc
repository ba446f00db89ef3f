#include "cc/dispatch/cuda_library.h"

#include <string>

#include "cc/dispatch/registry.h"
#include "cc/gpu/device.h"

namespace jax_fmha {
namespace {

Status Run(const Problem& problem, const Operands& operands, const Launch& launch) {
  Device device;
  if (Status s = gpu::CurrentDevice(&device); !s.ok()) return s;
  const Selection selection = Select(problem, device);
  if (selection.kernel == nullptr) return NoKernel(selection);
  // The program may have been made for another device, or by another version of this library.
  const int64_t needed = selection.kernel->workspace_bytes(problem, device);
  if (launch.workspace_bytes < needed) {
    return Status::Internal("attention: " + std::string(selection.kernel->name) + " needs " +
                            std::to_string(needed) + " bytes of workspace, the program has " +
                            std::to_string(launch.workspace_bytes) +
                            ". Lower it again for this device with this version of jax_fmha.");
  }
  return selection.kernel->run(problem, operands, launch);
}

}  // namespace
}  // namespace jax_fmha

void jax_fmha_run_on_cuda(const jax_fmha::Problem& problem, const jax_fmha::Operands& operands,
                          const jax_fmha::Launch& launch, jax_fmha::Status* status) {
  *status = jax_fmha::Run(problem, operands, launch);
}
