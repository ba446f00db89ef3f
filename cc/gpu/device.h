// The CUDA device that is current in this thread, as `Device`. Asked per call: one process may use
// several, of several kinds.
#pragma once

#include "cc/core/kernel.h"
#include "cc/core/status.h"

namespace jax_fmha::gpu {

Status CurrentDevice(Device* device);

}  // namespace jax_fmha::gpu
