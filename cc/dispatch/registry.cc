#include "cc/dispatch/registry.h"

#include "cc/cpu/kernels.h"
#include "cc/sm100/kernels.h"
#include "cc/sm90/kernels.h"

namespace jax_fmha {
namespace {

// The only list of kernels in the project, best first.
const Kernel* const kKernels[] = {
    &kCpuDecode,    &kCpuForward,   &kCpuBackward,   &kSm90Forward,
    &kSm90Backward, &kSm100Forward, &kSm100Backward,
};

std::string Refusal(const Kernel& kernel, const Problem& problem, const Device& device) {
  if (!problem.implementation.empty() && problem.implementation != kernel.implementation) {
    return "implementation=\"" + problem.implementation + "\" was asked for";
  }
  return kernel.refusal(problem, device);
}

}  // namespace

Selection Select(const Problem& problem, const Device& device) {
  Selection selection;
  for (const Kernel* kernel : kKernels) {
    if (kernel->pass != problem.pass) continue;
    std::string reason = Refusal(*kernel, problem, device);
    if (!reason.empty()) {
      selection.refusals.emplace_back(kernel->name, std::move(reason));
    } else if (selection.kernel == nullptr) {
      selection.kernel = kernel;
    } else {
      selection.refusals.emplace_back(kernel->name,
                                      std::string(selection.kernel->name) + " is preferred");
    }
  }
  return selection;
}

Status NoKernel(const Selection& selection) {
  std::string message = "attention: no kernel takes this call:";
  for (const auto& [kernel, reason] : selection.refusals) {
    message += "\n  " + kernel + ": " + reason;
  }
  message += "\nimplementation=\"xla\" computes it with plain einsums in O(T*S) memory.";
  return Status::Unimplemented(std::move(message));
}

}  // namespace jax_fmha
