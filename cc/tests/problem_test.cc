// `Describe`: every fact that it derives, and every mistake that it names.
#include "cc/core/problem.h"

#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "cc/tests/check.h"

namespace jax_fmha {
namespace {

constexpr int64_t kB = 2, kT = 5, kS = 7, kN = 6, kK = 3, kH = 8, kHv = 4;

// Every operand in full. Distinct sizes, so that a mixed-up dimension cannot pass.
Request Full(Pass pass = Pass::kForward) {
  Request r;
  r.pass = pass;
  r.q = {DType::kBF16, {kB, kT, kN, kH}};
  r.k = {DType::kBF16, {kB, kS, kK, kH}};
  r.v = {DType::kBF16, {kB, kS, kK, kHv}};
  r.bias = {DType::kF32, {kB, kN, kT, kS}};
  r.mask = {DType::kBool, {kB, kN, kT, kS}};
  r.scale = {DType::kF32, {kB}};
  r.logits_soft_cap = {DType::kF32, {kB}};
  r.query_offset = {DType::kS32, {kB}};
  r.q_positions = {DType::kS32, {kB, kT}};
  r.kv_positions = {DType::kS64, {kB, kS}};
  r.q_seq_lengths = {DType::kS32, {kB}};
  r.kv_seq_lengths = {DType::kS32, {kB}};
  r.q_segment_ids = {DType::kS32, {kB, kT}};
  r.kv_segment_ids = {DType::kS32, {kB, kS}};
  r.sinks = {DType::kF32, {kB, kN}};
  if (pass == Pass::kBackward) {
    r.saved_out = r.dout = {DType::kBF16, {kB, kT, kN, kHv}};
    r.saved_lse = r.dlse = {DType::kF32, {kB, kN, kT}};
    r.dbias = r.bias;
    r.dsinks = r.sinks;
  }
  return r;
}

// Only what every call has.
Request Minimal() {
  Request r;
  r.q = {DType::kF32, {kB, kT, kN, kH}};
  r.k = {DType::kF32, {kB, kS, kK, kH}};
  r.v = {DType::kF32, {kB, kS, kK, kHv}};
  r.scale = {DType::kF32, {1}};
  return r;
}

Problem Described(const Request& request) {
  Problem problem;
  const Status status = Describe(request, &problem);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  CHECK(status.ok());
  return problem;
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void TestFacts() {
  const Problem p = Described(Full(Pass::kBackward));
  CHECK(p.pass == Pass::kBackward && p.dtype == DType::kBF16 && p.bias_dtype == DType::kF32);
  CHECK(p.batch == kB && p.batch_shape == std::vector<int64_t>{kB});
  CHECK(p.seqlen_q == kT && p.seqlen_kv == kS && p.num_q_heads == kN && p.num_kv_heads == kK);
  CHECK(p.head_dim == kH && p.head_dim_v == kHv && p.group_size() == kN / kK);
  CHECK(p.has_bias && p.has_mask && p.has_logits_soft_cap && p.has_query_offset);
  CHECK(p.has_positions && p.has_seq_lengths && p.has_segment_ids && p.has_sinks && p.has_dlse);
  CHECK(p.wants_dbias && p.wants_dsinks);

  const Problem minimal = Described(Minimal());
  CHECK(!minimal.has_bias && !minimal.has_mask && !minimal.has_logits_soft_cap);
  CHECK(!minimal.has_query_offset && !minimal.has_positions && !minimal.has_seq_lengths);
  CHECK(!minimal.has_segment_ids && !minimal.has_sinks && !minimal.wants_dbias);
  CHECK(minimal.bias_shape.empty() && !minimal.uses_positions());
}

void TestOneSideOnly() {
  Request r = Minimal();
  r.kv_positions = {DType::kS32, {1, kS}};
  r.q_seq_lengths = {DType::kS32, {1}};
  const Problem p = Described(r);
  CHECK(p.has_positions && p.has_seq_lengths);
}

void TestAttributes() {
  Request r = Minimal();
  r.attributes.is_causal = true;
  r.attributes.deterministic = true;
  r.attributes.implementation = "cpu";
  Problem p = Described(r);
  CHECK(p.is_causal && p.deterministic && p.implementation == "cpu" && p.uses_positions());

  // Windows are clamped so that adding one to a position never overflows; negative sides are legal.
  r = Minimal();
  r.attributes.window_left = INT64_MAX;
  r.attributes.window_right = -3;
  p = Described(r);
  CHECK(p.window_left == kUnbounded && p.window_right == -3 && p.uses_positions());
  r.attributes.window_right = INT64_MIN;
  CHECK(Described(r).window_right == -kUnbounded);
}

// Every subset of operands shared along each batch dimension gives the same call.
void TestSharedBatchDimensions() {
  const std::vector<int64_t> batch = {2, 3};
  for (unsigned shared = 0; shared < 64; ++shared) {
    Request r = Minimal();
    r.mask = {DType::kBool, {kB, 1, kT, 1}};
    unsigned bit = 0;
    std::vector<int64_t> want = {1, 1};
    for (Spec* spec : {&r.q, &r.k, &r.mask}) {
      spec->shape.erase(spec->shape.begin());
      for (size_t d = 2; d-- > 0;) {
        const bool one = (shared >> bit++) & 1;
        spec->shape.insert(spec->shape.begin(), one ? 1 : batch[d]);
        if (!one) want[d] = batch[d];
      }
    }
    r.v.shape = {1, 1, kS, kK, kHv};
    r.scale.shape = {1, 1};
    const Problem p = Described(r);
    CHECK(p.batch_shape == want && p.batch == want[0] * want[1]);
  }
}

void TestEmptySizes() {
  Request r = Minimal();
  r.q.shape = {kB, 0, kN, kH};
  CHECK(Described(r).seqlen_q == 0);
  r = Minimal();
  r.k.shape = {kB, 0, kK, kH};
  r.v.shape = {kB, 0, kK, kHv};
  CHECK(Described(r).seqlen_kv == 0);
  for (Spec* spec : {&r.q, &r.k, &r.v}) spec->shape[2] = 0;
  CHECK(Described(r).group_size() == 1);
  for (Spec* spec : {&r.q, &r.k, &r.v}) spec->shape[0] = 0;
  CHECK(Described(r).batch == 0);
}

void TestSizesBeyond32Bits() {
  Request r = Minimal();
  r.k.shape[1] = r.v.shape[1] = int64_t{1} << 33;
  CHECK(Described(r).seqlen_kv == int64_t{1} << 33);
  for (Spec* spec : {&r.q, &r.k, &r.v}) spec->shape[0] = int64_t{1} << 34;
  CHECK(Described(r).batch == int64_t{1} << 34);
}

struct Mistake {
  const char* operand;  // as the caller spells it
  std::function<void(Request&)> make;
};

void TestMistakesNameTheOperand() {
  const Mistake mistakes[] = {
      {"query", [](Request& r) { r.q.dtype = DType::kS32; }},
      {"query", [](Request& r) { r.q.shape = {kT, kH}; }},
      {"query", [](Request& r) { r.q.shape.insert(r.q.shape.begin(), kMaxBatchRank, 1); }},
      {"key", [](Request& r) { r.k.dtype = DType::kF16; }},
      {"key", [](Request& r) { r.k.shape.erase(r.k.shape.begin()); }},
      {"key", [](Request& r) { r.k.shape.back() = kH + 1; }},
      {"key", [](Request& r) { r.k.shape[2] = r.v.shape[2] = 4; }},
      {"key", [](Request& r) { r.k.shape[2] = r.v.shape[2] = 0; }},
      {"key", [](Request& r) { r.k.shape[0] = kB + 1; }},
      {"value", [](Request& r) { r.v.dtype = DType::kF32; }},
      {"value", [](Request& r) { r.v.shape.pop_back(); }},
      {"value", [](Request& r) { r.v.shape[1] = kS + 1; }},
      {"value", [](Request& r) { r.v.shape[2] = kK + 3; }},
      {"bias", [](Request& r) { r.bias.dtype = DType::kBool; }},
      {"bias", [](Request& r) { r.bias.shape[1] = kK; }},
      {"bias", [](Request& r) { r.bias.shape[0] = kB + 1; }},
      {"bias", [](Request& r) { std::swap(r.bias.shape[2], r.bias.shape[3]); }},
      {"mask", [](Request& r) { r.mask.dtype = DType::kF32; }},
      {"mask", [](Request& r) { r.mask.shape[3] = kS - 1; }},
      {"mask", [](Request& r) { r.mask.shape.pop_back(); }},
      {"scale", [](Request& r) { r.scale.shape = {kB, kN}; }},
      {"scale", [](Request& r) { r.scale.dtype = DType::kBF16; }},
      {"logits_soft_cap", [](Request& r) { r.logits_soft_cap.dtype = DType::kF64; }},
      {"query_offset", [](Request& r) { r.query_offset.shape = {kB, 1}; }},
      {"query_offset", [](Request& r) { r.query_offset.dtype = DType::kF32; }},
      {"query_positions", [](Request& r) { r.q_positions.shape[1] = kS; }},
      {"key_value_positions", [](Request& r) { r.kv_positions.shape[1] = kT; }},
      {"query_seq_lengths", [](Request& r) { r.q_seq_lengths.shape = {kB + 1}; }},
      {"key_value_seq_lengths", [](Request& r) { r.kv_seq_lengths.dtype = DType::kBool; }},
      {"segment_ids.q", [](Request& r) { r.q_segment_ids.shape[1] = kS; }},
      {"segment_ids.kv", [](Request& r) { r.kv_segment_ids.dtype = DType::kF32; }},
      {"segment_ids", [](Request& r) { r.kv_segment_ids = {}; }},
      {"sinks", [](Request& r) { r.sinks.shape[1] = kK; }},
  };
  for (const Mistake& mistake : mistakes) {
    Request r = Full();
    mistake.make(r);
    Problem problem;
    const Status status = Describe(r, &problem);
    CHECK(status.code() == StatusCode::kInvalidArgument);
    const std::string& m = status.message();
    const bool complete =
        Contains(m, std::string("attention: ") + mistake.operand + ": expected ") &&
        Contains(m, ", got ") && m.back() == '.';
    if (!complete) std::fprintf(stderr, "%s: %s\n", mistake.operand, m.c_str());
    CHECK(complete);
  }
}

void TestBackwardMismatchesAreInternal() {
  const std::function<void(Request&)> faults[] = {
      [](Request& r) { r.saved_out.dtype = DType::kF32; },
      [](Request& r) { r.dout.shape.back() = kH; },
      [](Request& r) { std::swap(r.saved_lse.shape[1], r.saved_lse.shape[2]); },
      [](Request& r) { r.dlse.dtype = DType::kBF16; },
      [](Request& r) { r.dbias.dtype = DType::kBF16; },
      [](Request& r) { r.dbias.shape[1] = 1; },
      [](Request& r) { r.dsinks.shape[1] = 1; },
      [](Request& r) { r.sinks = {}; },
  };
  for (const auto& fault : faults) {
    Request r = Full(Pass::kBackward);
    fault(r);
    Problem problem;
    CHECK(Describe(r, &problem).code() == StatusCode::kInternal);
  }
  Request r = Full(Pass::kBackward);
  r.dlse = r.dbias = r.dsinks = {};  // each is optional
  const Problem p = Described(r);
  CHECK(!p.has_dlse && !p.wants_dbias && !p.wants_dsinks && p.has_bias && p.has_sinks);
}

void TestSpecText() {
  CHECK(ToString(Spec{DType::kBF16, {2, 1024, 8, 64}}) == "[2, 1024, 8, 64] bfloat16");
  CHECK(ToString(Spec{DType::kF32, {}}) == "[] float32");
}

}  // namespace
}  // namespace jax_fmha

int main() {
  jax_fmha::TestFacts();
  jax_fmha::TestOneSideOnly();
  jax_fmha::TestAttributes();
  jax_fmha::TestSharedBatchDimensions();
  jax_fmha::TestEmptySizes();
  jax_fmha::TestSizesBeyond32Bits();
  jax_fmha::TestMistakesNameTheOperand();
  jax_fmha::TestBackwardMismatchesAreInternal();
  jax_fmha::TestSpecText();
  std::puts("problem_test: ok");
  return 0;
}
