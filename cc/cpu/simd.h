// Vectors of the instruction set that a hot unit is compiled for: loads, stores, conversions, exp2
// and tanh.
//
// Written with the vector extensions of GCC and Clang, so that one source serves every instruction
// set; intrinsics only where the extension has no word for it. Everything lives in the unit's own
// namespace (see isa.h).
#pragma once

#include <cstdint>

#ifndef JAX_FMHA_ISA
#error "simd.h belongs to units that are compiled once per instruction set"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define JAX_FMHA_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define JAX_FMHA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define JAX_FMHA_UNROLL _Pragma("GCC unroll 32")
#endif

namespace jax_fmha {
namespace cpu {
namespace JAX_FMHA_ISA {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
inline constexpr int kRegisters = 32;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
inline constexpr int kRegisters = 16;
#elif defined(__aarch64__)
inline constexpr int kVectorBytes = 16;
inline constexpr int kRegisters = 32;
#else
inline constexpr int kVectorBytes = 16;
inline constexpr int kRegisters = 16;
#endif

template <typename T>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
  typedef T memory __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
};
template <typename T>
using Vec = typename VectorOf<T>::type;

// What a comparison of Vec<T> gives: all bits set where it holds.
template <typename T>
using Mask = decltype(Vec<T>{} < Vec<T>{});

// The integer of the same width.
template <typename T>
struct IntOf;
template <>
struct IntOf<float> {
  using type = int32_t;
};
template <>
struct IntOf<double> {
  using type = int64_t;
};
template <typename T>
using Int = typename IntOf<T>::type;

// Storage types narrower than their accumulator. float and double are stored as they are computed.
struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

// ---- scalars ----

JAX_FMHA_INLINE int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
JAX_FMHA_INLINE int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }

// ---- whole vectors; T is float or double ----

template <typename T>
JAX_FMHA_INLINE Vec<T> Load(const T* p) {
  return *reinterpret_cast<const typename VectorOf<T>::memory*>(p);
}
template <typename T>
JAX_FMHA_INLINE void Store(T* p, Vec<T> x) {
  *reinterpret_cast<typename VectorOf<T>::memory*>(p) = x;
}
template <typename T>
JAX_FMHA_INLINE Vec<T> Set(T x) {
  return x - Vec<T>{};  // exact, also for -0 and NaN; folds into a broadcast
}

// A NaN in `a` gives b: callers keep NaN alive through exp, not through the maximum.
template <typename T>
JAX_FMHA_INLINE Vec<T> MaxOf(Vec<T> a, Vec<T> b) {
  return a > b ? a : b;
}

// ---- 16-bit storage: kLanes<float> elements are half a vector ----

typedef uint16_t Half __attribute__((vector_size(kVectorBytes / 2)));
typedef uint16_t HalfMemory __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));
using VecU32 = Vec<uint32_t>;

JAX_FMHA_INLINE Vec<float> Widen(Half x, BF16) {
  return (Vec<float>)(__builtin_convertvector(x, VecU32) << 16);
}

JAX_FMHA_INLINE Half Narrow(Vec<float> x, BF16) {
  const VecU32 bits = (VecU32)x;
  const VecU32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  const VecU32 quiet = (bits >> 16) | 0x40;  // rounding could turn a NaN into infinity
  return __builtin_convertvector(x != x ? quiet : rounded, Half);
}

#if defined(__AVX512F__)
// The forms with a mask: the plain ones read an uninitialised vector in GCC 12's headers, and warn.
JAX_FMHA_INLINE Vec<float> Widen(Half x, F16) {
  return (Vec<float>)_mm512_maskz_cvtph_ps(0xffff, (__m256i)x);
}
JAX_FMHA_INLINE Half Narrow(Vec<float> x, F16) {
  return (Half)_mm512_maskz_cvtps_ph(0xffff, (__m512)x,
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__F16C__)
JAX_FMHA_INLINE Vec<float> Widen(Half x, F16) { return (Vec<float>)_mm256_cvtph_ps((__m128i)x); }
JAX_FMHA_INLINE Half Narrow(Vec<float> x, F16) {
  return (Half)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
}
#elif defined(__aarch64__)
JAX_FMHA_INLINE Vec<float> Widen(Half x, F16) {
  return (Vec<float>)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)x));
}
JAX_FMHA_INLINE Half Narrow(Vec<float> x, F16) {
  return (Half)vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x));
}
#else
// In integers where subnormals are involved: XLA runs kernels with denormals flushed to zero.
JAX_FMHA_INLINE Vec<float> Widen(Half x, F16) {
  const VecU32 half = __builtin_convertvector(x, VecU32);
  const VecU32 sign = (half & 0x8000) << 16;
  const VecU32 rest = half & 0x7fff;
  const VecU32 normal = (rest << 13) + (112u << 23);
  const VecU32 special = (rest << 13) | 0x7f800000;  // infinity and NaN
  const VecU32 tiny = (VecU32)(__builtin_convertvector((Vec<int32_t>)rest, Vec<float>) * 0x1p-24f);
  const VecU32 finite = rest < 0x400 ? tiny : normal;
  return (Vec<float>)(sign | (rest >= 0x7c00 ? special : finite));
}
JAX_FMHA_INLINE Half Narrow(Vec<float> x, F16) {
  const VecU32 bits = (VecU32)x;
  const VecU32 sign = (bits >> 16) & 0x8000;
  const VecU32 rest = bits & 0x7fffffff;
  const VecU32 normal = (rest - (112u << 23) + 0xfff + ((rest >> 13) & 1)) >> 13;
  // Adding 0.5 leaves the multiple of 2^-24 in the low bits, rounded by the addition itself.
  const VecU32 tiny = (VecU32)((Vec<float>)rest + 0.5f) - 0x3f000000;
  const VecU32 finite = rest < (113u << 23) ? tiny : normal;
  const VecU32 bounded =
      rest >= 0x477ff000 ? VecU32{} + 0x7c00 : finite;  // from 65520 on: infinity
  return __builtin_convertvector(sign | (rest > 0x7f800000 ? VecU32{} + 0x7e00 : bounded), Half);
}
#endif

// kLanes<T> stored elements as Vec<T>, and back.
JAX_FMHA_INLINE Vec<float> LoadAs(const float* p, float) { return Load(p); }
JAX_FMHA_INLINE Vec<double> LoadAs(const double* p, double) { return Load(p); }
template <typename In>  // BF16, F16
JAX_FMHA_INLINE Vec<float> LoadAs(const In* p, float) {
  return Widen((Half) * reinterpret_cast<const HalfMemory*>(p), In());
}
// A bias may be wider or narrower than the accumulator; rare, and left to the compiler.
JAX_FMHA_INLINE Vec<float> LoadAs(const double* p, float) {
  Vec<float> x;
  for (int i = 0; i < kLanes<float>; ++i) x[i] = static_cast<float>(p[i]);
  return x;
}
template <typename T, typename In>
JAX_FMHA_INLINE Vec<T> LoadFirst(const In* p, int64_t n);
template <typename In>  // BF16, F16, float
JAX_FMHA_INLINE Vec<double> LoadAs(const In* p, double) {
  const Vec<float> first = LoadFirst<float>(p, kLanes<double>);
  Vec<double> x;
  for (int i = 0; i < kLanes<double>; ++i) x[i] = first[i];
  return x;
}
JAX_FMHA_INLINE void StoreAs(float* p, Vec<float> x) { Store(p, x); }
JAX_FMHA_INLINE void StoreAs(double* p, Vec<double> x) { Store(p, x); }
template <typename Out>  // BF16, F16
JAX_FMHA_INLINE void StoreAs(Out* p, Vec<float> x) {
  *reinterpret_cast<HalfMemory*>(p) = Narrow(x, Out());
}

// The first n < kLanes<T> of a vector, the rest 0. For tails; goes through the stack.
template <typename T, typename In>
JAX_FMHA_INLINE Vec<T> LoadFirst(const In* p, int64_t n) {
  In lanes[kLanes<T>] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
  return LoadAs(lanes, T());
}
template <typename T, typename Out>
JAX_FMHA_INLINE void StoreFirst(Out* p, Vec<T> x, int64_t n) {
  Out lanes[kLanes<T>];
  StoreAs(lanes, x);
  for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
}

// One element.
JAX_FMHA_INLINE float ToFloat(float x) { return x; }
JAX_FMHA_INLINE double ToFloat(double x) { return x; }
template <typename In>  // BF16, F16
JAX_FMHA_INLINE float ToFloat(In x) {
  return LoadFirst<float>(&x, 1)[0];
}

// to[i] = factor * from[i], widened.
template <typename T, typename In>
JAX_FMHA_INLINE void WidenRow(const In* __restrict from, int64_t n, T factor, T* __restrict to) {
  int64_t i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) Store(to + i, LoadAs(from + i, T()) * factor);
  if (i < n) StoreFirst<T>(to + i, LoadFirst<T>(from + i, n - i) * factor, n - i);
}
// to[i] = factor * from[i], rounded once.
template <typename T, typename Out>
JAX_FMHA_INLINE void NarrowRow(const T* __restrict from, int64_t n, T factor, Out* __restrict to) {
  int64_t i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) StoreAs(to + i, Load(from + i) * factor);
  if (i < n) StoreFirst<T>(to + i, LoadFirst<T>(from + i, n - i) * factor, n - i);
}

// ---- transposition ----

template <int... I>
struct Indices {};
template <int N, int... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <int... I>
struct MakeIndices<0, I...> {
  using type = Indices<I...>;
};

// Exchanges the off-diagonal quarters of every 2S x 2S square that two rows at distance S share.
template <int S, typename T, int... I>
JAX_FMHA_INLINE void ExchangeRows(Vec<T>* upper, Vec<T>* lower, Indices<I...>) {
  constexpr int kL = kLanes<T>;
  const Vec<T> a = *upper, b = *lower;
  *upper = __builtin_shufflevector(a, b, ((I & S) ? kL + I - S : I)...);
  *lower = __builtin_shufflevector(a, b, ((I & S) ? kL + I : I + S)...);
}

// x[i][j] <-> x[j][i].
template <typename T, int S = kLanes<T> / 2>
JAX_FMHA_INLINE void Transpose(Vec<T> (&x)[kLanes<T>]) {
  if constexpr (S > 0) {
    JAX_FMHA_UNROLL
    for (int i = 0; i < kLanes<T>; ++i) {
      if ((i & S) == 0)
        ExchangeRows<S, T>(&x[i], &x[i + S], typename MakeIndices<kLanes<T>>::type());
    }
    Transpose<T, S / 2>(x);
  }
}

// ---- sums over lanes, pairwise ----

template <int S, typename T, int... I>
JAX_FMHA_INLINE Vec<T> SwapLanes(Vec<T> x, Indices<I...>) {
  return __builtin_shufflevector(x, x, (I ^ S)...);
}
template <typename T, int S = kLanes<T> / 2>
JAX_FMHA_INLINE T SumOf(Vec<T> x) {
  if constexpr (S > 0) {
    return SumOf<T, S / 2>(x + SwapLanes<S, T>(x, typename MakeIndices<kLanes<T>>::type()));
  } else {
    return x[0];
  }
}

// ---- exp2 and tanh ----

template <typename T>
struct Exp2Constants;
// (2^f - 1) / f = c[0] + c[1] f + ... on [-1/2, 1/2], with least relative error: 1e-8 and 2e-17.
template <>
struct Exp2Constants<float> {
  static constexpr int kDegree = 5;
  static constexpr int kMantissa = 23;
  static constexpr float kMagic =
      0x1.8p23f + 127;  // adding it leaves round(x) + 127 in the low bits
  static constexpr float kLowest = -126;
  static constexpr float c[] = {0x1.62e430p-1f, 0x1.ebfbdep-3f,  0x1.c6af6ep-5f,
                                0x1.3b2ba0p-7f, 0x1.5f07b4p-10f, 0x1.4308fap-13f};
};
template <>
struct Exp2Constants<double> {
  static constexpr int kDegree = 10;
  static constexpr int kMantissa = 52;
  static constexpr double kMagic = 0x1.8p52 + 1023;
  static constexpr double kLowest = -1022;
  static constexpr double c[] = {
      0x1.62e42fefa39efp-1,  0x1.ebfbdff82c598p-3,  0x1.c6b08d704a08ep-5,  0x1.3b2ab6fba1e40p-7,
      0x1.5d87fe78b211ap-10, 0x1.4309130958e77p-13, 0x1.ffcbfc1ea37c7p-17, 0x1.62bfd4b4adf2bp-20,
      0x1.b525a09339debp-24, 0x1.e605d28b72567p-28, 0x1.e8cab7c976947p-32};
};

// 2^x = power + power * rest, with power = 2^round(x); for kLowest <= x <= -kLowest. NaN gives NaN
// in rest.
template <typename T>
JAX_FMHA_INLINE void SplitExp2(Vec<T> x, Vec<T>* power, Vec<T>* rest) {
  using C = Exp2Constants<T>;
  const Vec<T> shifted = x + C::kMagic;
  const Vec<T> f = x - (shifted - C::kMagic);
  *power = (Vec<T>)((Vec<Int<T>>)shifted << C::kMantissa);
  Vec<T> sum = Set<T>(C::c[C::kDegree]);
  JAX_FMHA_UNROLL
  for (int i = C::kDegree - 1; i >= 0; --i) sum = sum * f + C::c[i];
  *rest = sum * f;
}

// 2^x within 2 ulp for x <= 127 (float) or 1023 (double), which holds for every softmax argument.
// Exactly 0 for -inf, and 0 where the result would be subnormal. NaN stays NaN.
template <typename T>
JAX_FMHA_INLINE Vec<T> Exp2(Vec<T> x) {
  Vec<T> power, rest;
  SplitExp2<T>(x, &power, &rest);
  const Vec<T> value = power * rest + power;
  return x < Exp2Constants<T>::kLowest ? Vec<T>{} : value;
}

// tanh(x) to a few ulp, also near 0: -e / (2 + e) with e = exp(-2|x|) - 1 free of cancellation.
template <typename T>
JAX_FMHA_INLINE Vec<T> Tanh(Vec<T> x) {
  using Bits = Vec<Int<T>>;
  constexpr T kMinusTwoLog2E = static_cast<T>(-2.8853900817779268147);
  const Bits sign = (Bits)x & (Bits)Set<T>(T(-0.0));
  const Vec<T> magnitude = (Vec<T>)((Bits)x ^ sign);
  const Vec<T> argument = magnitude * kMinusTwoLog2E;
  constexpr T kLowest = Exp2Constants<T>::kLowest;
  const Vec<T> bounded = argument < kLowest ? Set(kLowest) : argument;  // keeps NaN
  Vec<T> power, rest;
  SplitExp2<T>(bounded, &power, &rest);
  const Vec<T> e = power * rest + (power - 1);
  return (Vec<T>)((Bits)(-e / (e + 2)) | sign);
}

}  // namespace JAX_FMHA_ISA
}  // namespace cpu
}  // namespace jax_fmha
