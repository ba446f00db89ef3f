// What the forward's and the decode's hot loops share: rows, bias columns, mask kinds and the end
// of a softmax.
#pragma once

#include "cc/cpu/forward_tile.h"
#include "cc/cpu/simd.h"

namespace jax_fmha {
namespace cpu {
namespace JAX_FMHA_ISA {

inline constexpr double kLog2E = 1.4426950408889634074;

template <typename In>
JAX_FMHA_INLINE const In* Row(const RowSet& rows, int64_t i) {
  const int64_t number = rows.index == nullptr ? rows.first + i : rows.index[i];
  return static_cast<const In*>(rows.base) + number * rows.stride;
}

// The number of the operand's column that holds key j.
JAX_FMHA_INLINE int64_t KeyOffset(const ScoreOperand& x, int64_t j) {
  return (x.key_index == nullptr ? x.first_key + j : x.key_index[j]) * x.key_stride;
}
JAX_FMHA_INLINE bool IsDense(const ScoreOperand& x) {
  return x.key_index == nullptr && x.key_stride == 1;
}

// One column's bias over all keys.
template <typename T, typename In>
void ReadBias(const ScoreOperand& bias, int64_t column, T* to) {
  const In* from = static_cast<const In*>(bias.base) + bias.offsets[column];
  if (IsDense(bias)) return WidenRow<T>(from + bias.first_key, bias.keys, T(kLog2E), to);
  for (int64_t j = 0; j < bias.keys; ++j) {
    to[j] = LoadFirst<T>(from + KeyOffset(bias, j), 1)[0] * T(kLog2E);
  }
}

inline MaskKind KindOf(const ScoreOperand& mask) {
  bool any = false, all = true;
  const int64_t columns = mask.same_offsets ? 1 : mask.columns;
  for (int64_t c = 0; c < columns; ++c) {
    const uint8_t* keep = static_cast<const uint8_t*>(mask.base) + mask.offsets[c];
    uint8_t or_all = 0, and_all = 1;
    if (IsDense(mask)) {
      for (int64_t j = 0; j < mask.keys; ++j) {
        or_all |= keep[mask.first_key + j];
        and_all &= keep[mask.first_key + j];
      }
    } else {
      for (int64_t j = 0; j < mask.keys; ++j) {
        or_all |= keep[KeyOffset(mask, j)];
        and_all &= keep[KeyOffset(mask, j)];
      }
    }
    any |= or_all != 0;
    all &= and_all != 0;
    if (any && !all) return MaskKind::kSome;
  }
  return all ? MaskKind::kAll : MaskKind::kNone;
}

// A finite base for exp2 where no key was allowed yet: exp2(-inf - base) is 0 all the same.
template <typename T>
JAX_FMHA_INLINE Vec<T> Base(Vec<T> m) {
  return m == Set<T>(-__builtin_inf()) ? Vec<T>{} : m;
}

// Takes the sinks of kLanes columns in and returns what normalises their O.
template <typename T>
JAX_FMHA_INLINE Vec<T> Close(T* m, T* l, const T* sinks) {
  const Vec<T> old = Load(m);
  Vec<T> scale = Set(T(1)), sum = Load(l);
  if (sinks != nullptr) {
    const Vec<T> largest = MaxOf<T>(Load(sinks), old), base = Base<T>(largest);
    scale = Exp2<T>(old - base);
    sum = sum * scale + Exp2<T>(Load(sinks) - base);
    Store(m, largest);
    Store(l, sum);
  }
  return sum == Vec<T>{} ? Vec<T>{} : scale / sum;
}

}  // namespace JAX_FMHA_ISA
}  // namespace cpu
}  // namespace jax_fmha
