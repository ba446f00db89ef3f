// Element types and the handful of sizes that every layer agrees on.
#pragma once

#include <cstdint>

namespace jax_fmha {

enum class DType : int32_t { kAbsent, kBool, kU8, kS32, kS64, kF16, kBF16, kF32, kF64, kOther };

constexpr int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kU8:
      return 1;
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kS32:
    case DType::kF32:
      return 4;
    case DType::kS64:
    case DType::kF64:
      return 8;
    default:
      return 0;
  }
}

constexpr const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kAbsent:
      return "absent";
    case DType::kBool:
      return "bool";
    case DType::kU8:
      return "uint8";
    case DType::kS32:
      return "int32";
    case DType::kS64:
      return "int64";
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF32:
      return "float32";
    case DType::kF64:
      return "float64";
    case DType::kOther:
      return "unsupported";
  }
  return "unsupported";
}

// The type of softmax statistics, accumulators and lse: never narrower than float32.
constexpr DType AccumulatorOf(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

// Leading batch dimensions that one call may have, those that vmap adds included.
inline constexpr int kMaxBatchRank = 8;

// A window side without a bound. Far beyond any int32 position, yet safe to add to one.
inline constexpr int64_t kUnbounded = int64_t{1} << 40;

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

}  // namespace jax_fmha
