// The checks of cc/tests/sm90/driver.cu, run on what the registry chooses for a Blackwell. With
// tests/sm100 the program runs on a Hopper GPU.
//   HDS=128 DTYPE=float16 SHARD=0/2 driver check 200 1    every other case of head dim 128, and of
//   200 fuzzed ones
#include "cc/cpu/kernels.h"
#include "cc/dispatch/registry.h"

namespace jax_fmha {

// The registry's other kernels are asked, and never run.
static std::string IsNoCpu(const Problem&, const Device&) { return "the platform is not the CPU"; }
const Kernel kCpuDecode = {"cpu_decode", "cpu", Pass::kForward, IsNoCpu, nullptr, nullptr};
const Kernel kCpuForward = {"cpu_forward", "cpu", Pass::kForward, IsNoCpu, nullptr, nullptr};
const Kernel kCpuBackward = {"cpu_backward", "cpu", Pass::kBackward, IsNoCpu, nullptr, nullptr};
namespace gpu {
Status NotLinked() { return Status::Internal("the Hopper kernels are not linked"); }
}  // namespace gpu

static const Kernel* KernelOf(const Problem& problem, const Device& device, std::string* why) {
  const Selection selection = Select(problem, device);
  for (const auto& [name, reason] : selection.refusals) {
    if (name.rfind("sm100", 0) == 0) *why = reason;
  }
  return selection.kernel;
}

}  // namespace jax_fmha

#define DRIVER_CAPABILITY 100
#define DRIVER_HEAD_DIM_V(head_dim) (head_dim == 192 ? 128 : head_dim)  // as in MLA
#include "cc/tests/sm90/driver.cu"
