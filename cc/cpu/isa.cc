#include "cc/cpu/isa.h"

namespace jax_fmha {
namespace cpu {

const char* Name(Isa isa) {
  switch (isa) {
#define JAX_FMHA_CASE(Name, space) \
  case Isa::k##Name:               \
    return #space;
    JAX_FMHA_FOR_EACH_ISA(JAX_FMHA_CASE)
#undef JAX_FMHA_CASE
  }
  return "unknown";
}

bool CanRun(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  [[maybe_unused]] const bool avx2 = __builtin_cpu_supports("avx2") &&
                                     __builtin_cpu_supports("fma") &&
                                     __builtin_cpu_supports("f16c");
  [[maybe_unused]] const bool avx512 =
      avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  [[maybe_unused]] const bool baseline = true, neon = true;
  switch (isa) {
#define JAX_FMHA_CASE(Name, space) \
  case Isa::k##Name:               \
    return space;
    JAX_FMHA_FOR_EACH_ISA(JAX_FMHA_CASE)
#undef JAX_FMHA_CASE
  }
  return false;
}

Isa BestIsa() {
  Isa best = kAllIsas[0];
  for (Isa isa : kAllIsas) {
    if (CanRun(isa)) best = isa;
  }
  return best;
}

}  // namespace cpu
}  // namespace jax_fmha
