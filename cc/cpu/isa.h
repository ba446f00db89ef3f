// Which instruction sets the hot loops are compiled for, and which of them a machine can run.
//
// A hot unit (a *_tile.cc) is compiled once per instruction set with JAX_FMHA_ISA naming the
// namespace that it lives in, and exports a table of functions. Such a unit must not instantiate
// inline functions or templates of other namespaces: the linker keeps one copy of those, and it
// could keep the one with instructions that a machine lacks.
#pragma once

// JAX_FMHA_ISAS of the build may leave out all but the first.
#if defined(JAX_FMHA_WITHOUT_AVX2)
#define JAX_FMHA_IF_AVX2(X)
#else
#define JAX_FMHA_IF_AVX2(X) X(Avx2, avx2)
#endif
#if defined(JAX_FMHA_WITHOUT_AVX512)
#define JAX_FMHA_IF_AVX512(X)
#else
#define JAX_FMHA_IF_AVX512(X) X(Avx512, avx512)
#endif

#if defined(__x86_64__) || defined(_M_X64)
#define JAX_FMHA_FOR_EACH_ISA(X) X(Baseline, baseline) JAX_FMHA_IF_AVX2(X) JAX_FMHA_IF_AVX512(X)
#elif defined(__aarch64__)
#define JAX_FMHA_FOR_EACH_ISA(X) X(Neon, neon)
#else
#define JAX_FMHA_FOR_EACH_ISA(X) X(Baseline, baseline)
#endif

// Declares the table `name` of every instruction set; use inside namespace jax_fmha::cpu.
//   #define DECLARE(Name, space) namespace space { extern const Table kTable; }
//   JAX_FMHA_FOR_EACH_ISA(DECLARE)

namespace jax_fmha {
namespace cpu {

#define JAX_FMHA_ENUMERATOR(Name, space) k##Name,
enum class Isa { JAX_FMHA_FOR_EACH_ISA(JAX_FMHA_ENUMERATOR) };
#undef JAX_FMHA_ENUMERATOR

// Every instruction set that is compiled in, worst first.
#define JAX_FMHA_LISTED(Name, space) Isa::k##Name,
inline constexpr Isa kAllIsas[] = {JAX_FMHA_FOR_EACH_ISA(JAX_FMHA_LISTED)};
#undef JAX_FMHA_LISTED

const char* Name(Isa isa);

// Whether this machine and its operating system can run it.
bool CanRun(Isa isa);

// The last of kAllIsas that this machine can run.
Isa BestIsa();

}  // namespace cpu
}  // namespace jax_fmha
