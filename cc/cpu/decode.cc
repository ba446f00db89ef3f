// The decode: the forward for few query columns per key/value head, limited by reading k and v
// once.
//
// The walk is the forward's (see forward.cc), keys split among the threads included; only the hot
// loops differ.
#include <algorithm>

#include "cc/cpu/forward.h"
#include "cc/cpu/kernels.h"

namespace jax_fmha {
namespace cpu {
namespace {

ForwardTables TablesOf(Isa isa) {
  switch (isa) {
#define JAX_FMHA_CASE(Name, space) \
  case Isa::k##Name:               \
    return {&space::kDecodeF32, &space::kDecodeF64};
    JAX_FMHA_FOR_EACH_ISA(JAX_FMHA_CASE)
#undef JAX_FMHA_CASE
  }
  return {};
}

std::string Refusal(const Problem& problem, const Device& device) {
  const std::string refusal = RefusalOnCpu(problem, device);
  if (!refusal.empty()) return refusal;
  if (problem.seqlen_q * problem.group_size() <= kMaxDecodeColumns) return "";
  return "takes at most " + std::to_string(kMaxDecodeColumns) + " query columns per key/value head";
}

// An exported program may meet any machine: the workspace fits every instruction set.
int64_t WorkspaceBytes(const Problem& problem, const Device& device) {
  int64_t bytes = 0;
  for (Isa isa : kAllIsas)
    bytes = std::max(bytes, DecodeWorkspaceBytes(problem, device.num_workers, isa));
  return bytes;
}

Status RunOnBest(const Problem& problem, const Operands& operands, const Launch& launch) {
  return RunDecode(problem, operands, launch, BestIsa());
}

}  // namespace

int64_t DecodeWorkspaceBytes(const Problem& problem, int num_slots, Isa isa) {
  return TablesWorkspaceBytes(problem, num_slots, TablesOf(isa));
}

Status RunDecode(const Problem& problem, const Operands& operands, const Launch& launch, Isa isa) {
  return RunTables(problem, operands, launch, TablesOf(isa));
}

}  // namespace cpu

extern const Kernel kCpuDecode = {"cpu_decode",        "cpu",         Pass::kForward, cpu::Refusal,
                                  cpu::WorkspaceBytes, cpu::RunOnBest};

}  // namespace jax_fmha
