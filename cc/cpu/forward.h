// The forward and the decode with the instruction set as an argument, for unit tests, and what they
// share.
#pragma once

#include <cstdint>
#include <string>

#include "cc/core/kernel.h"
#include "cc/cpu/forward_tile.h"
#include "cc/cpu/isa.h"

namespace jax_fmha {
namespace cpu {

// Query columns per key/value head, at most, that the decode takes.
inline constexpr int64_t kMaxDecodeColumns = 8;

int64_t ForwardWorkspaceBytes(const Problem& problem, int num_slots, Isa isa);
Status RunForward(const Problem& problem, const Operands& operands, const Launch& launch, Isa isa);

int64_t DecodeWorkspaceBytes(const Problem& problem, int num_slots, Isa isa);
Status RunDecode(const Problem& problem, const Operands& operands, const Launch& launch, Isa isa);

// Why no CPU kernel takes the problem, or empty.
std::string RefusalOnCpu(const Problem& problem, const Device& device);

// The forward's walk over tiles and blocks, with the hot loops of one kernel and instruction set.
struct ForwardTables {
  const ForwardTile<float>* f32 = nullptr;
  const ForwardTile<double>* f64 = nullptr;
};
int64_t TablesWorkspaceBytes(const Problem& problem, int num_slots, const ForwardTables& tables);
Status RunTables(const Problem& problem, const Operands& operands, const Launch& launch,
                 const ForwardTables& tables);

}  // namespace cpu
}  // namespace jax_fmha
