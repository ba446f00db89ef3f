// The attribute struct of both custom calls, decoded by XLA as one dictionary.
#pragma once

#include <cstdint>
#include <string_view>

#include "cc/core/problem.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fmha::ffi {

struct CallAttributes {
  bool is_causal;
  int64_t window_left;
  int64_t window_right;
  bool deterministic;
  std::string_view implementation;

  Attributes ToCore() const {
    return {is_causal, window_left, window_right, deterministic, std::string(implementation)};
  }
};

}  // namespace jax_fmha::ffi

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_fmha::ffi::CallAttributes,
                                      xla::ffi::StructMember<bool>("is_causal"),
                                      xla::ffi::StructMember<int64_t>("window_left"),
                                      xla::ffi::StructMember<int64_t>("window_right"),
                                      xla::ffi::StructMember<bool>("deterministic"),
                                      xla::ffi::StructMember<std::string_view>("implementation"));
