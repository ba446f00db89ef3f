// The hot loops for few query columns; compiled once per instruction set. See forward_tile.h.
//
// Reading k and v is what such a call costs, so every row is read once, from where it is stored.
// Lanes run along the head dimension in both products and along the keys in the softmax.
#include "cc/cpu/forward_tile.h"
#include "cc/cpu/tile_common.h"

namespace jax_fmha {
namespace cpu {
namespace JAX_FMHA_ISA {
namespace {

template <typename T>
inline constexpr int kColumns = kLanes<T> > 8 ? kLanes<T> : 8;

// Rows of k or v at once, and columns: 8 sums fill the pipeline of multiply-adds.
constexpr int kRows = 4;
constexpr int kPair = 2;

// Rows far enough ahead to arrive in time. They lie num_kv_heads * head_dim apart, too far for the
// machine to guess.
constexpr int kAhead = 8;

// Length of a column's scores: whole vectors.
template <typename T>
JAX_FMHA_INLINE int64_t Padded(int64_t keys) {
  return (keys + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

template <typename T, typename In>
void PackQ(const RowSet& rows, int64_t group, int64_t columns, int64_t head_dim, T factor, T* q) {
  for (int64_t c = 0; c < columns; ++c) {
    WidenRow<T>(Row<In>(rows, c / group) + c % group * head_dim, head_dim, factor,
                q + c * head_dim);
  }
}

template <typename T, typename In>
void StageBias(const ScoreOperand& bias, T*, T* to) {
  for (int64_t c = 0; c < bias.columns; ++c)
    ReadBias<T, In>(bias, c, to + c * Padded<T>(bias.keys));
}

template <typename T>
MaskKind StageMask(const ScoreOperand& mask, LaneInt<T>* to) {
  const MaskKind kind = KindOf(mask);
  if (kind != MaskKind::kSome) return kind;
  for (int64_t c = 0; c < mask.columns; ++c) {
    const uint8_t* keep = static_cast<const uint8_t*>(mask.base) + mask.offsets[c];
    LaneInt<T>* lanes = to + c * Padded<T>(mask.keys);
    for (int64_t j = 0; j < mask.keys; ++j) {
      lanes[j] = -static_cast<LaneInt<T>>(keep[KeyOffset(mask, j)] != 0);
    }
  }
  return kind;
}

template <typename In>
JAX_FMHA_INLINE void PrefetchRow(const RowSet& rows, int64_t i, int64_t width) {
  const char* row = reinterpret_cast<const char*>(Row<In>(rows, i));
  for (int64_t at = 0; at < width * static_cast<int64_t>(sizeof(In)); at += 64)
    __builtin_prefetch(row + at);
}

// Calls f(h, load) for the vectors of [0, width); `load` reads what the last one has.
template <typename T, typename F>
JAX_FMHA_INLINE void ForVectors(int64_t width, F&& f) {
  int64_t h = 0;
  for (; h + kLanes<T> <= width; h += kLanes<T>) f(h, [](const auto* p) { return LoadAs(p, T()); });
  if (h < width) f(h, [=](const auto* p) { return LoadFirst<T>(p, width - h); });
}

// Scores of C columns against R keys.
template <int R, int C, typename T, typename In>
JAX_FMHA_INLINE void ScoreRows(const In* const* k, const T* q, int64_t head_dim, T* scores,
                               int64_t stride) {
  Vec<T> sum[R][C];
  JAX_FMHA_UNROLL
  for (int r = 0; r < R; ++r) {
    JAX_FMHA_UNROLL
    for (int c = 0; c < C; ++c) sum[r][c] = Vec<T>{};
  }
  ForVectors<T>(head_dim, [&](int64_t h, auto load) {
    Vec<T> x[C];
    JAX_FMHA_UNROLL
    for (int c = 0; c < C; ++c) x[c] = load(q + c * head_dim + h);
    JAX_FMHA_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec<T> y = load(k[r] + h);
      JAX_FMHA_UNROLL
      for (int c = 0; c < C; ++c) sum[r][c] += x[c] * y;
    }
  });
  JAX_FMHA_UNROLL
  for (int r = 0; r < R; ++r) {
    JAX_FMHA_UNROLL
    for (int c = 0; c < C; ++c) scores[c * stride + r] = SumOf<T>(sum[r][c]);
  }
}

// o[c] += sum over R keys of p[c][r] * v[r].
template <int R, int C, typename T, typename In>
JAX_FMHA_INLINE void AddRows(const In* const* v, const T* p, int64_t stride, int64_t head_dim_v,
                             T* o) {
  Vec<T> weight[R][C];
  JAX_FMHA_UNROLL
  for (int r = 0; r < R; ++r) {
    JAX_FMHA_UNROLL
    for (int c = 0; c < C; ++c) weight[r][c] = Set(p[c * stride + r]);
  }
  int64_t h = 0;
  for (; h + kLanes<T> <= head_dim_v; h += kLanes<T>) {
    Vec<T> sum[C];
    JAX_FMHA_UNROLL
    for (int c = 0; c < C; ++c) sum[c] = Load(o + c * head_dim_v + h);
    JAX_FMHA_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec<T> y = LoadAs(v[r] + h, T());
      JAX_FMHA_UNROLL
      for (int c = 0; c < C; ++c) sum[c] += weight[r][c] * y;
    }
    JAX_FMHA_UNROLL
    for (int c = 0; c < C; ++c) Store(o + c * head_dim_v + h, sum[c]);
  }
  const int64_t rest = head_dim_v - h;
  if (rest == 0) return;
  for (int c = 0; c < C; ++c) {
    T* at = o + c * head_dim_v + h;
    Vec<T> sum = LoadFirst<T>(at, rest);
    for (int r = 0; r < R; ++r) sum += weight[r][c] * LoadFirst<T>(v[r] + h, rest);
    StoreFirst<T>(at, sum, rest);
  }
}

// Calls f(rows, first key, kRows of them or one, first column, kPair of them or one) for all keys
// and columns, with later rows prefetched on the way.
template <typename In, typename F>
JAX_FMHA_INLINE void ForKeysAndColumns(const RowSet& rows, int64_t width, int64_t keys,
                                       int64_t columns, F&& f) {
  for (int64_t j = 0; j < keys;) {
    const int64_t step = keys - j >= kRows ? kRows : 1;
    const In* row[kRows];
    for (int64_t r = 0; r < step; ++r) {
      row[r] = Row<In>(rows, j + r);
      if (j + r + kAhead < keys) PrefetchRow<In>(rows, j + r + kAhead, width);
    }
    for (int64_t c = 0; c < columns; c += kPair) f(row, j, step == kRows, c, columns - c >= kPair);
    j += step;
  }
}

template <typename T, typename In>
void Scores(const PanelBlock<T>& b) {
  const int64_t stride = Padded<T>(b.keys);
  ForKeysAndColumns<In>(b.k_rows, b.head_dim, b.keys, b.columns,
                        [&](const In* const* k, int64_t j, bool rows, int64_t c, bool pair) {
                          const T* q = b.q + c * b.head_dim;
                          T* to = b.scores + c * stride + j;
                          if (rows && pair)
                            return ScoreRows<kRows, kPair, T>(k, q, b.head_dim, to, stride);
                          if (rows) return ScoreRows<kRows, 1, T>(k, q, b.head_dim, to, stride);
                          if (pair) return ScoreRows<1, kPair, T>(k, q, b.head_dim, to, stride);
                          ScoreRows<1, 1, T>(k, q, b.head_dim, to, stride);
                        });
}

template <typename T, typename In>
void AddValues(const PanelBlock<T>& b, T* o) {
  const int64_t stride = Padded<T>(b.keys);
  ForKeysAndColumns<In>(b.v_rows, b.head_dim_v, b.keys, b.columns,
                        [&](const In* const* v, int64_t j, bool rows, int64_t c, bool pair) {
                          const T* p = b.scores + c * stride + j;
                          T* to = o + c * b.head_dim_v;
                          if (rows && pair)
                            return AddRows<kRows, kPair, T>(v, p, stride, b.head_dim_v, to);
                          if (rows) return AddRows<kRows, 1, T>(v, p, stride, b.head_dim_v, to);
                          if (pair) return AddRows<1, kPair, T>(v, p, stride, b.head_dim_v, to);
                          AddRows<1, 1, T>(v, p, stride, b.head_dim_v, to);
                        });
}

// Bias, soft cap and masks for the scores of column c from key j on; lanes past the last key get
// -inf.
template <typename T>
JAX_FMHA_INLINE Vec<T> ChangeScores(const PanelBlock<T>& b, int64_t c, int64_t j, Vec<T> s) {
  const int64_t at = c * Padded<T>(b.keys) + j;
  const Vec<T> never = Set<T>(-__builtin_inf());
  if (b.bias != nullptr) s += Load(b.bias + at);
  if (b.has_soft_cap) s = b.soft_cap * Tanh<T>(s / b.soft_cap);
  if (b.mask != nullptr) s = (Mask<T>)Load(b.mask + at) ? s : never;
  if (b.key_position != nullptr) {
    const Vec<LaneInt<T>> position = Load(b.key_position + j);
    s = position < b.lowest[c] ? never : s;
    s = position > b.highest[c] ? never : s;
  }
  for (int64_t i = b.keys - j; i < kLanes<T>; ++i) s[i] = -__builtin_inf();
  return s;
}

// The softmax of column c over the block; returns what the sums so far are to be multiplied by.
template <typename T>
T Softmax(const PanelBlock<T>& b, int64_t c, const PanelState<T>& state) {
  T* scores = b.scores + c * Padded<T>(b.keys);
  Vec<T> largest = Set(state.m[c]);
  for (int64_t j = 0; j < b.keys; j += kLanes<T>) {
    const Vec<T> s = ChangeScores(b, c, j, Load(scores + j));
    Store(scores + j, s);
    largest = MaxOf<T>(s, largest);
  }
  T m = largest[0];
  for (int i = 1; i < kLanes<T>; ++i) m = largest[i] > m ? largest[i] : m;
  const Vec<T> base = Base<T>(Set(m));
  Vec<T> sum{};
  for (int64_t j = 0; j < b.keys; j += kLanes<T>) {
    const Vec<T> p = Exp2<T>(Load(scores + j) - base);
    Store(scores + j, p);
    sum += p;
  }
  const T alpha = Exp2<T>(Set(state.m[c]) - base)[0];
  state.m[c] = m;
  state.l[c] = state.l[c] * alpha + SumOf<T>(sum);
  return alpha;
}

template <typename T, typename In>
void Attend(const PanelBlock<T>& b, const PanelState<T>& state) {
  Scores<T, In>(b);
  for (int64_t c = 0; c < b.columns; ++c) {
    const T alpha = Softmax<T>(b, c, state);
    T* o = state.o + c * b.head_dim_v;
    for (int64_t h = 0; h < b.head_dim_v; ++h) o[h] *= alpha;
  }
  AddValues<T, In>(b, state.o);
}

// state = state * exp2(state.m - m) + other * exp2(other.m - m), m the larger one.
template <typename T>
void Merge(const PanelState<T>& other, int64_t head_dim_v, int64_t columns,
           const PanelState<T>& state) {
  for (int64_t first = 0; first < columns; first += kLanes<T>) {
    const Vec<T> m = MaxOf<T>(Load(other.m + first), Load(state.m + first));
    const Vec<T> keep = Exp2<T>(Load(state.m + first) - Base<T>(m));
    const Vec<T> take = Exp2<T>(Load(other.m + first) - Base<T>(m));
    Store(state.m + first, m);
    Store(state.l + first, Load(state.l + first) * keep + Load(other.l + first) * take);
    for (int64_t i = 0; i < Min(kLanes<T>, columns - first); ++i) {
      T* to = state.o + (first + i) * head_dim_v;
      const T* from = other.o + (first + i) * head_dim_v;
      const T kept = keep[i], taken = take[i];
      for (int64_t h = 0; h < head_dim_v; ++h) to[h] = to[h] * kept + from[h] * taken;
    }
  }
}

template <typename T, typename Out>
void Finish(const PanelState<T>& state, const T* sinks, int64_t head_dim_v, const RowSet& out,
            int64_t group, int64_t first_column, int64_t columns) {
  for (int64_t first = 0; first < columns; first += kLanes<T>) {
    const Vec<T> scale =
        Close(state.m + first, state.l + first, sinks == nullptr ? nullptr : sinks + first);
    for (int64_t c = first; c < Min(first + kLanes<T>, columns); ++c) {
      const int64_t column = first_column + c;
      Out* to = const_cast<Out*>(Row<Out>(out, column / group)) + column % group * head_dim_v;
      T* from = state.o + c * head_dim_v;
      const T factor = scale[c - first];
      if (factor == 0) {  // nothing attended: 0 whatever v held
        for (int64_t h = 0; h < head_dim_v; ++h) from[h] = 0;
      }
      NarrowRow<T>(from, head_dim_v, factor, to);
    }
  }
}

}  // namespace

extern const ForwardTile<float> kDecodeF32 = {
    kColumns<float>,
    1,
    {PackQ<float, F16>, PackQ<float, BF16>, PackQ<float, float>, nullptr},
    {nullptr, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr},
    {StageBias<float, F16>, StageBias<float, BF16>, StageBias<float, float>,
     StageBias<float, double>},
    StageMask<float>,
    {Attend<float, F16>, Attend<float, BF16>, Attend<float, float>, nullptr},
    Merge<float>,
    {Finish<float, F16>, Finish<float, BF16>, Finish<float, float>, nullptr},
};

extern const ForwardTile<double> kDecodeF64 = {
    kColumns<double>,
    1,
    {nullptr, nullptr, nullptr, PackQ<double, double>},
    {nullptr, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr},
    {StageBias<double, F16>, StageBias<double, BF16>, StageBias<double, float>,
     StageBias<double, double>},
    StageMask<double>,
    {nullptr, nullptr, nullptr, Attend<double, double>},
    Merge<double>,
    {nullptr, nullptr, nullptr, Finish<double, double>},
};

}  // namespace JAX_FMHA_ISA
}  // namespace cpu
}  // namespace jax_fmha
