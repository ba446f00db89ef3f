// From the buffers of a custom call to a judged Problem and typed Operands.
#pragma once

#include "cc/core/operands.h"
#include "cc/core/problem.h"
#include "cc/ffi/attributes.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fmha::ffi {

struct Call {
  Problem problem;
  Operands operands;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
};

// Operands and results come in the order of the tables in decode.cc; an absent one is an array of
// shape (0,). The last result is the workspace.
Status Decode(Pass pass, const CallAttributes& attributes, xla::ffi::RemainingArgs args,
              xla::ffi::RemainingRets rets, Call* call);

xla::ffi::Error ToError(const Status& status);

}  // namespace jax_fmha::ffi
