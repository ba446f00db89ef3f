#include "cc/core/problem.h"

#include <algorithm>

namespace jax_fmha {
namespace {

std::string ShapeString(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t d = 0; d < shape.size(); ++d) {
    if (d) text += ", ";
    text += std::to_string(shape[d]);
  }
  return text + "]";
}

// "attention: key: expected ..., got .... Remedy."
Status Mistake(const char* operand, const std::string& expected, const std::string& got,
               const std::string& remedy) {
  return Status::InvalidArgument("attention: " + std::string(operand) + ": expected " + expected +
                                 ", got " + got + ". " + remedy);
}

bool IsFloat(DType dtype) {
  return dtype == DType::kF16 || dtype == DType::kBF16 || dtype == DType::kF32 ||
         dtype == DType::kF64;
}
bool IsInt(DType dtype) { return dtype == DType::kS32 || dtype == DType::kS64; }

using Dims = std::vector<int64_t>;

// Judges operands one by one against the sizes that query, key and value set.
class Checker {
 public:
  Checker(const Request& request, Problem* problem) : r_(request), p_(*problem) {}

  Status Check() {
    if (Status s = Sizes(); !s.ok()) return s;
    if (Status s = BatchShape(); !s.ok()) return s;
    if (Status s = Scores(); !s.ok()) return s;
    if (Status s = TileMask(); !s.ok()) return s;
    if (Status s = Integers(); !s.ok()) return s;
    if (Status s = Scalars(); !s.ok()) return s;
    if (r_.pass == Pass::kBackward) {
      if (Status s = Residuals(); !s.ok()) return s;
    }
    return Fill();
  }

 private:
  // query [*batch, T, N, H], key [*batch, S, K, H], value [*batch, S, K, Hv]
  Status Sizes() {
    if (!IsFloat(r_.q.dtype)) {
      return Mistake("query", "float16, bfloat16, float32 or float64", ToString(r_.q),
                     "Cast query, key and value to one of these.");
    }
    if (r_.q.shape.size() < 3) {
      return Mistake("query", "[*batch, T, N, H]", ToString(r_.q), "Add the missing dimensions.");
    }
    rank_ = r_.q.shape.size() - 3;
    if (rank_ > kMaxBatchRank) {
      return Mistake("query", "at most " + std::to_string(kMaxBatchRank) + " batch dimensions",
                     ToString(r_.q), "Reshape some batch dimensions into one.");
    }
    p_.dtype = r_.q.dtype;
    p_.seqlen_q = r_.q.shape[rank_];
    p_.num_q_heads = r_.q.shape[rank_ + 1];
    p_.head_dim = r_.q.shape[rank_ + 2];
    for (const auto& [name, spec, last] : {Named{"key", &r_.k, "H"}, Named{"value", &r_.v, "Hv"}}) {
      if (spec->dtype != p_.dtype) {
        return Mistake(name, "the dtype of query (" + std::string(Name(p_.dtype)) + ")",
                       ToString(*spec), "Cast query, key and value to one dtype.");
      }
      if (spec->shape.size() != r_.q.shape.size()) {
        return Mistake(name,
                       "[*batch, S, K, " + std::string(last) + "] of rank " +
                           std::to_string(rank_ + 3) + " as query " + ToString(r_.q),
                       ToString(*spec), "Give query, key and value the same batch dimensions.");
      }
    }
    p_.seqlen_kv = r_.k.shape[rank_];
    p_.num_kv_heads = r_.k.shape[rank_ + 1];
    p_.head_dim_v = r_.v.shape[rank_ + 2];
    if (r_.k.shape[rank_ + 2] != p_.head_dim) {
      return Mistake("key",
                     "head_dim " + std::to_string(p_.head_dim) + " as query " + ToString(r_.q),
                     ToString(r_.k), "query and key must share their last dimension.");
    }
    if (r_.v.shape[rank_] != p_.seqlen_kv || r_.v.shape[rank_ + 1] != p_.num_kv_heads) {
      return Mistake("value",
                     "sequence length " + std::to_string(p_.seqlen_kv) + " and " +
                         std::to_string(p_.num_kv_heads) + " heads as key " + ToString(r_.k),
                     ToString(r_.v), "key and value must share them.");
    }
    const bool divides =
        p_.num_kv_heads == 0 ? p_.num_q_heads == 0 : p_.num_q_heads % p_.num_kv_heads == 0;
    if (!divides) {
      return Mistake("key",
                     "a number of heads that divides query's " + std::to_string(p_.num_q_heads),
                     ToString(r_.k), "Query head n reads key/value head n // (N // K).");
    }
    return {};
  }

  struct Named {
    const char* name;
    const Spec* spec;
    const char* last;
  };

  // Each batch dimension is the one size other than 1 that an operand has there.
  Status BatchShape() {
    p_.batch_shape.assign(rank_, 1);
    for (const auto& [name, spec] : All()) {
      if (!spec->present()) continue;
      if (spec->shape.size() < rank_) {
        return Mistake(name, std::to_string(rank_) + " batch dimensions as query " + ToString(r_.q),
                       ToString(*spec), "Use size 1 for a shared dimension.");
      }
      for (size_t d = 0; d < rank_; ++d) {
        const int64_t size = spec->shape[d];
        if (size == 1 || size == p_.batch_shape[d]) continue;
        if (p_.batch_shape[d] != 1) {
          return Mistake(name, "batch dimensions that are 1 or those of query " + ToString(r_.q),
                         ToString(*spec), "Broadcast or transpose the operand.");
        }
        p_.batch_shape[d] = size;
      }
    }
    p_.batch = 1;
    for (int64_t size : p_.batch_shape) p_.batch *= size;
    return {};
  }

  std::vector<std::pair<const char*, const Spec*>> All() const {
    return {{"query", &r_.q},
            {"key", &r_.k},
            {"value", &r_.v},
            {"bias", &r_.bias},
            {"mask", &r_.mask},
            {"mask.tiles", &r_.mask_tiles},
            {"mask.bits", &r_.mask_bits},
            {"scale", &r_.scale},
            {"logits_soft_cap", &r_.logits_soft_cap},
            {"query_offset", &r_.query_offset},
            {"query_positions", &r_.q_positions},
            {"key_value_positions", &r_.kv_positions},
            {"query_seq_lengths", &r_.q_seq_lengths},
            {"key_value_seq_lengths", &r_.kv_seq_lengths},
            {"segment_ids.q", &r_.q_segment_ids},
            {"segment_ids.kv", &r_.kv_segment_ids},
            {"sinks", &r_.sinks}};
  }

  // bias and mask [*batch, N|1, T|1, S|1]
  Status Scores() {
    const Dims full = {p_.num_q_heads, p_.seqlen_q, p_.seqlen_kv};
    for (const auto& [name, spec] : {std::pair{"bias", &r_.bias}, std::pair{"mask", &r_.mask}}) {
      if (!spec->present()) continue;
      const bool is_mask = spec == &r_.mask;
      if (is_mask ? spec->dtype != DType::kBool : !IsFloat(spec->dtype)) {
        return Mistake(name, is_mask ? "bool, True where attended" : "a float dtype",
                       ToString(*spec),
                       is_mask ? "Convert a 0/1 mask with `mask != 0`; pass additive terms as bias."
                               : "Pass a boolean operand as mask.");
      }
      bool fits = spec->shape.size() == rank_ + 3;
      for (size_t d = 0; fits && d < 3; ++d) {
        const int64_t size = spec->shape[rank_ + d];
        fits = size == 1 || size == full[d];
      }
      if (!fits) {
        return Mistake(name, "[*batch|1, N|1, T|1, S|1] with N, T, S = " + ShapeString(full),
                       ToString(*spec), "Broadcast dimensions must have size 1.");
      }
    }
    return {};
  }

  // mask.tiles [*batch, N|1, ceil(T/rows), ceil(S/cols)], mask.bits [*batch, P, rows, cols/8]
  Status TileMask() {
    if (r_.mask_tiles.present() != r_.mask_bits.present()) {
      return Mistake("mask", "tiles and bits", "one of the two", "Build a TileMask.");
    }
    if (!r_.mask_tiles.present()) return {};
    if (r_.mask.present()) return Status::Internal("attention: a dense mask and a tile mask");
    const Dims& bits = r_.mask_bits.shape;
    if (r_.mask_bits.dtype != DType::kU8 || bits.size() != rank_ + 3 || bits[rank_ + 1] < 1 ||
        bits[rank_ + 2] < 1) {
      return Mistake("mask.bits", "uint8 [*batch|1, P, rows, cols / 8]", ToString(r_.mask_bits),
                     "Build a TileMask.");
    }
    p_.num_partial_tiles = bits[rank_];
    p_.tile_rows = bits[rank_ + 1];
    p_.tile_cols = 8 * bits[rank_ + 2];
    const Dims grid = {CeilDiv(p_.seqlen_q, p_.tile_rows), CeilDiv(p_.seqlen_kv, p_.tile_cols)};
    const Dims& tiles = r_.mask_tiles.shape;
    if (r_.mask_tiles.dtype != DType::kS32 || tiles.size() != rank_ + 3 ||
        (tiles[rank_] != 1 && tiles[rank_] != p_.num_q_heads) || tiles[rank_ + 1] != grid[0] ||
        tiles[rank_ + 2] != grid[1]) {
      return Mistake("mask.tiles",
                     "int32 [*batch|1, N|1, " + std::to_string(grid[0]) + ", " +
                         std::to_string(grid[1]) + "] for tiles of " +
                         std::to_string(p_.tile_rows) + " rows and " +
                         std::to_string(p_.tile_cols) + " columns",
                     ToString(r_.mask_tiles), "Build a TileMask for this T and S.");
    }
    p_.num_mask_heads = tiles[rank_];
    return {};
  }

  Status Integers() {
    const Dims none, t = {p_.seqlen_q}, s = {p_.seqlen_kv};
    struct Rule {
      const char* name;
      const Spec* spec;
      const Dims* trailing;
      const char* expected;
    };
    for (const Rule& rule :
         {Rule{"query_offset", &r_.query_offset, &none, "an int, or [*batch]"},
          Rule{"query_positions", &r_.q_positions, &t, "[*batch, T] or [T]"},
          Rule{"key_value_positions", &r_.kv_positions, &s, "[*batch, S] or [S]"},
          Rule{"query_seq_lengths", &r_.q_seq_lengths, &none, "[*batch], or a scalar"},
          Rule{"key_value_seq_lengths", &r_.kv_seq_lengths, &none, "[*batch], or a scalar"},
          Rule{"segment_ids.q", &r_.q_segment_ids, &t, "[*batch, T] or [T]"},
          Rule{"segment_ids.kv", &r_.kv_segment_ids, &s, "[*batch, S] or [S]"}}) {
      if (!rule.spec->present()) continue;
      if (!IsInt(rule.spec->dtype)) {
        return Mistake(rule.name, "int32 or int64", ToString(*rule.spec), "Cast it.");
      }
      if (!HasTrailing(*rule.spec, *rule.trailing)) {
        return Mistake(rule.name,
                       std::string(rule.expected) + " with T = " + std::to_string(p_.seqlen_q) +
                           ", S = " + std::to_string(p_.seqlen_kv) + " and batch " +
                           ShapeString(p_.batch_shape),
                       ToString(*rule.spec), "Reshape it.");
      }
    }
    if (r_.q_segment_ids.present() != r_.kv_segment_ids.present()) {
      return Mistake("segment_ids", "ids for both sides", "one side only",
                     "Pass SegmentIds(q=..., kv=...).");
    }
    return {};
  }

  Status Scalars() {
    const DType accumulator = AccumulatorOf(p_.dtype);
    const Dims none, n = {p_.num_q_heads};
    struct Rule {
      const char* name;
      const Spec* spec;
      const Dims* trailing;
      const char* expected;
    };
    for (const Rule& rule : {Rule{"scale", &r_.scale, &none, "a scalar"},
                             Rule{"logits_soft_cap", &r_.logits_soft_cap, &none, "a scalar"},
                             Rule{"sinks", &r_.sinks, &n, "[N], one logit per query head"}}) {
      if (!rule.spec->present()) continue;
      if (rule.spec->dtype != accumulator || !HasTrailing(*rule.spec, *rule.trailing)) {
        return Mistake(rule.name,
                       std::string(rule.expected) + " (N = " + std::to_string(p_.num_q_heads) + ")",
                       ToString(*rule.spec), "Reshape it.");
      }
    }
    if (!r_.scale.present()) return Status::Internal("attention: scale: operand missing");
    return {};
  }

  Status Residuals() {
    const DType accumulator = AccumulatorOf(p_.dtype);
    const Dims out = {p_.seqlen_q, p_.num_q_heads, p_.head_dim_v};
    const Dims lse = {p_.num_q_heads, p_.seqlen_q};
    const bool ok =
        r_.saved_out.dtype == p_.dtype && HasTrailing(r_.saved_out, out) &&
        r_.dout.dtype == p_.dtype && HasTrailing(r_.dout, out) &&
        r_.saved_lse.dtype == accumulator && HasTrailing(r_.saved_lse, lse) &&
        (!r_.dlse.present() || (r_.dlse.dtype == accumulator && HasTrailing(r_.dlse, lse)));
    if (!ok) return Status::Internal("attention: backward residuals do not match the operands");
    if (r_.dbias.present() &&
        (r_.dbias.dtype != r_.bias.dtype || r_.dbias.shape.size() != r_.bias.shape.size() ||
         !std::equal(r_.bias.shape.begin() + rank_, r_.bias.shape.end(),
                     r_.dbias.shape.begin() + rank_))) {
      return Status::Internal("attention: dbias does not match bias");
    }
    if (r_.dsinks.present() && (!r_.sinks.present() || !HasTrailing(r_.dsinks, {p_.num_q_heads}))) {
      return Status::Internal("attention: dsinks does not match sinks");
    }
    return {};
  }

  Status Fill() {
    const Attributes& a = r_.attributes;
    p_.pass = r_.pass;
    p_.is_causal = a.is_causal;
    p_.window_left = std::clamp(a.window_left, -kUnbounded, kUnbounded);
    p_.window_right = std::clamp(a.window_right, -kUnbounded, kUnbounded);
    p_.deterministic = a.deterministic;
    p_.implementation = a.implementation;
    p_.has_bias = r_.bias.present();
    p_.has_mask = r_.mask.present();
    p_.has_tile_mask = r_.mask_tiles.present();
    p_.has_logits_soft_cap = r_.logits_soft_cap.present();
    p_.has_query_offset = r_.query_offset.present();
    p_.has_positions = r_.q_positions.present() || r_.kv_positions.present();
    p_.has_seq_lengths = r_.q_seq_lengths.present() || r_.kv_seq_lengths.present();
    p_.has_segment_ids = r_.q_segment_ids.present();
    p_.has_sinks = r_.sinks.present();
    p_.has_dlse = r_.dlse.present();
    p_.wants_dbias = r_.dbias.present();
    p_.wants_dsinks = r_.dsinks.present();
    p_.bias_dtype = r_.bias.dtype;
    p_.bias_shape = r_.bias.shape;
    p_.dbias_shape = r_.dbias.shape;
    p_.dsinks_shape = r_.dsinks.shape;
    return {};
  }

  bool HasTrailing(const Spec& spec, const Dims& trailing) const {
    return spec.shape.size() == rank_ + trailing.size() &&
           std::equal(trailing.begin(), trailing.end(), spec.shape.begin() + rank_);
  }

  const Request& r_;
  Problem& p_;
  size_t rank_ = 0;
};

}  // namespace

std::string ToString(const Spec& spec) { return ShapeString(spec.shape) + " " + Name(spec.dtype); }

Status Describe(const Request& request, Problem* problem) {
  *problem = Problem();
  return Checker(request, problem).Check();
}

}  // namespace jax_fmha
