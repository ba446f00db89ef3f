// The choice of a kernel: the first that accepts, and a reason from every other one of the same
// pass.
#include "cc/dispatch/registry.h"

#include <cstdio>
#include <set>
#include <string>

#include "cc/tests/check.h"

namespace jax_fmha {
namespace {

Problem Ordinary(Pass pass, int64_t seqlen_q) {
  Problem p;
  p.pass = pass;
  p.dtype = DType::kF32;
  p.batch_shape = {2};
  p.batch = 2;
  p.seqlen_q = seqlen_q;
  p.seqlen_kv = 512;
  p.num_q_heads = p.num_kv_heads = 4;
  p.head_dim = p.head_dim_v = 64;
  return p;
}

void CheckComplete(const Selection& selection, Pass pass) {
  std::set<std::string> seen;
  if (selection.kernel) {
    CHECK(selection.kernel->pass == pass);
    seen.insert(selection.kernel->name);
  }
  for (const auto& [name, reason] : selection.refusals) {
    CHECK(seen.insert(name).second);
    CHECK(!reason.empty());
  }
  CHECK(!seen.empty());
}

void TestEveryPassRunsOnTheCpu() {
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    for (int64_t seqlen_q : {0, 1, 3, 512}) {
      for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
        Problem p = Ordinary(pass, seqlen_q);
        p.dtype = dtype;
        const Selection s = Select(p, Device());
        CHECK(s.kernel != nullptr && std::string(s.kernel->implementation) == "cpu");
        CHECK(s.kernel->workspace_bytes(p, Device()) >= 0);
        CheckComplete(s, pass);
      }
    }
  }
}

void TestDecodeIsPreferredForOneRow() {
  const Selection one = Select(Ordinary(Pass::kForward, 1), Device());
  const Selection many = Select(Ordinary(Pass::kForward, 512), Device());
  CHECK(std::string(one.kernel->name) != many.kernel->name);
  bool preferred = false;  // the general kernel would take one row as well
  for (const auto& [name, reason] : one.refusals) {
    if (name == many.kernel->name) {
      CHECK(reason == std::string(one.kernel->name) + " is preferred");
      preferred = true;
    }
  }
  CHECK(preferred);
}

void TestInsisting() {
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    Problem p = Ordinary(pass, 512);
    p.implementation = "cpu";
    CHECK(Select(p, Device()).kernel != nullptr);
    p.implementation = "sm100";
    const Selection s = Select(p, Device());
    CHECK(s.kernel == nullptr);
    CheckComplete(s, pass);
    for (const auto& [name, reason] : s.refusals) {
      if (name.rfind("cpu", 0) == 0) CHECK(reason == "implementation=\"sm100\" was asked for");
    }
  }
}

void TestNoKernelGivesEveryReason() {
  Device device;
  device.platform = Platform::kCuda;
  device.compute_capability = 70;  // no kernel of ours will ever run there
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    const Selection s = Select(Ordinary(pass, 512), device);
    CHECK(s.kernel == nullptr);
    CheckComplete(s, pass);
    const Status status = NoKernel(s);
    CHECK(status.code() == StatusCode::kUnimplemented);
    for (const auto& [name, reason] : s.refusals) {
      CHECK(status.message().find(name + ": " + reason) != std::string::npos);
    }
    CHECK(status.message().find("implementation=\"xla\"") != std::string::npos);
  }
}

// Device{capability 0} stands for any device: a program is lowered where there is none.
void TestHopperTakesSixteenBits() {
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    for (int capability : {90, 0}) {
      Device device;
      device.platform = Platform::kCuda;
      device.compute_capability = capability;
      Problem p = Ordinary(pass, 512);
      p.dtype = DType::kBF16;
      const Selection s = Select(p, device);
      CHECK(s.kernel != nullptr && std::string(s.kernel->implementation) == "sm90");
      CHECK(s.kernel->workspace_bytes(p, device) > 0);
      CheckComplete(s, pass);
      p.dtype = DType::kF32;
      CHECK(Select(p, device).kernel == nullptr);
      p.dtype = DType::kBF16;
      device.has_cuda_kernels = false;
      CHECK(Select(p, device).kernel == nullptr);
    }
  }
}

}  // namespace
}  // namespace jax_fmha

int main() {
  jax_fmha::TestEveryPassRunsOnTheCpu();
  jax_fmha::TestDecodeIsPreferredForOneRow();
  jax_fmha::TestInsisting();
  jax_fmha::TestNoKernelGivesEveryReason();
  jax_fmha::TestHopperTakesSixteenBits();
  std::puts("registry_test: ok");
  return 0;
}
