// The backward of a call without queries or keys.
#pragma once

#include "cc/core/kernel.h"

namespace jax_fmha::gpu {

// For delta, lse and a flag, see DeltaParams. Rows are padded to whole tiles of 128.
inline int64_t EmptyBackwardWorkspaceBytes(const Problem& p) {
  return 2 * 4 * p.batch * p.num_q_heads * RoundUp(p.seqlen_q, 128) + int64_t{sizeof(int)};
}

// Writes zero gradients, and dsinks, which rows without keys have, too.
Status LaunchEmptyBackward(const Problem& problem, const Operands& operands, const Launch& launch);

}  // namespace jax_fmha::gpu
