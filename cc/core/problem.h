// What is asked, without the data: one struct, filled and judged by one function.
//
// The same `Describe` serves the trace-time check in Python (through nanobind) and the FFI handler
// at run time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/status.h"
#include "cc/core/types.h"

namespace jax_fmha {

enum class Pass : int32_t { kForward, kBackward };

// The attributes of both custom calls. Everything else is read off the buffers.
struct Attributes {
  bool is_causal = false;
  int64_t window_left = kUnbounded;
  int64_t window_right = kUnbounded;
  bool deterministic = false;
  std::string implementation;  // empty: the best kernel of the platform
};

// Shape and type of one operand or result as it reaches the custom call.
struct Spec {
  DType dtype = DType::kAbsent;
  std::vector<int64_t> shape;
  bool present() const { return dtype != DType::kAbsent; }
};

// Every operand and result by name, batch dimensions in front: see Operands for the trailing
// shapes.
struct Request {
  Pass pass = Pass::kForward;
  Attributes attributes;
  Spec q, k, v, bias, mask, mask_tiles, mask_bits, scale, logits_soft_cap, query_offset,
      q_positions, kv_positions, q_seq_lengths, kv_seq_lengths, q_segment_ids, kv_segment_ids,
      sinks;
  Spec saved_out, saved_lse, dout, dlse;  // backward only
  Spec dbias, dsinks;  // backward results whose batch dimensions differ from the call's
};

struct Problem {
  Pass pass = Pass::kForward;
  DType dtype = DType::kAbsent;       // of q, k, v, out and their gradients
  DType bias_dtype = DType::kAbsent;  // of bias and dbias
  std::vector<int64_t> batch_shape;
  int64_t batch = 1;
  int64_t seqlen_q = 0;
  int64_t seqlen_kv = 0;
  int64_t num_q_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t head_dim_v = 0;

  bool is_causal = false;
  int64_t window_left = kUnbounded;
  int64_t window_right = kUnbounded;
  bool has_bias = false;
  bool has_mask = false;
  bool has_tile_mask = false;
  int64_t tile_rows = 0;  // query rows and key columns of a tile of the tile mask
  int64_t tile_cols = 0;
  int64_t num_mask_heads = 0;  // N or 1
  int64_t num_partial_tiles = 0;
  bool has_logits_soft_cap = false;
  bool has_query_offset = false;
  bool has_positions = false;
  bool has_seq_lengths = false;
  bool has_segment_ids = false;
  bool has_sinks = false;
  bool has_dlse = false;
  bool wants_dbias = false;
  bool wants_dsinks = false;
  bool deterministic = false;
  std::string implementation;

  std::vector<int64_t> bias_shape;   // with batch dimensions; empty when absent
  std::vector<int64_t> dbias_shape;  // with batch dimensions; empty unless wanted
  std::vector<int64_t> dsinks_shape;

  int64_t group_size() const { return num_kv_heads == 0 ? 1 : num_q_heads / num_kv_heads; }
  // Causal, window and positions restrict pairs by position; without them positions are not looked
  // at.
  bool uses_positions() const {
    return is_causal || window_left < kUnbounded || window_right < kUnbounded;
  }
};

// Fills `problem` from `request`, or says which operand is wrong, what was expected, what was got,
// and what to do.
Status Describe(const Request& request, Problem* problem);

// "[2, 1024, 8, 64] bfloat16"
std::string ToString(const Spec& spec);

}  // namespace jax_fmha
