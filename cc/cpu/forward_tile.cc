// The forward's hot loops; compiled once per instruction set. See forward_tile.h for the layouts.
#include "cc/cpu/forward_tile.h"

#include "cc/cpu/gemm.h"
#include "cc/cpu/tile_common.h"

namespace jax_fmha {
namespace cpu {
namespace JAX_FMHA_ISA {
namespace {

// to[i][c] = factor * column[c][i] for c < count; the other lanes are 0. Rows of `to` are kPanel
// apart.
template <typename T, typename In>
void TransposeColumns(const In* const (&column)[kLanes<T>], int64_t count, int64_t n, T factor,
                      T* to) {
  constexpr int kL = kLanes<T>;
  for (int64_t i = 0; i < n; i += kL) {
    const int64_t rows = Min(kL, n - i);
    Vec<T> x[kL];
    JAX_FMHA_UNROLL
    for (int c = 0; c < kL; ++c) {
      x[c] = c >= count   ? Vec<T>{}
             : rows == kL ? LoadAs(column[c] + i, T()) * factor
                          : LoadFirst<T>(column[c] + i, rows) * factor;
    }
    Transpose<T>(x);
    for (int64_t r = 0; r < rows; ++r) Store(to + (i + r) * kPanel<T>, x[r]);
  }
}

template <typename T, typename In>
void PackQ(const RowSet& rows, int64_t group, int64_t columns, int64_t head_dim, T factor,
           T* panels) {
  int64_t row = 0, head = 0;
  const int64_t vectors = (columns + kLanes<T> - 1) / kLanes<T>;
  const int64_t used = (vectors + kNarrowVectors - 1) / kNarrowVectors * kNarrowVectors * kLanes<T>;
  for (int64_t c = 0; c < used; c += kLanes<T>) {
    const In* column[kLanes<T>];
    const int64_t count = Max(0, Min(kLanes<T>, columns - c));
    for (int64_t i = 0; i < count; ++i) {
      column[i] = Row<In>(rows, row) + head * head_dim;
      if (++head == group) ++row, head = 0;
    }
    T* panel = panels + c / kPanel<T> * (kPanel<T> * head_dim) + c % kPanel<T>;
    TransposeColumns<T, In>(column, count, head_dim, factor, panel);
  }
}

template <typename T, typename In>
void StageValues(const RowSet& rows, int64_t count, int64_t width, T* to, int64_t to_stride) {
  constexpr int kL = kLanes<T>;
  constexpr int64_t kTogether = 8;  // keys whose rows stay in the first cache, strip by strip
  for (int64_t j = 0; j < count; j += kTogether, to += kTogether * kStripRows) {
    const int64_t keys = Min(kTogether, count - j);
    const In* from[kTogether];
    for (int64_t i = 0; i < keys; ++i) from[i] = Row<In>(rows, j + i);
    T* strip = to;
    ForRowBlocks<kPanelVectors>(width, [&](auto, int64_t h) {
      for (int64_t i = 0; i < keys; ++i) {
        // In ascending order, for the lanes past a strip's row fall on what comes next.
        JAX_FMHA_UNROLL
        for (int r = 0; r < kStripRows; r += kL) {
          const int64_t left = width - h - r;
          const Vec<T> x = left >= kL ? LoadAs(from[i] + h + r, T())
                                      : LoadFirst<T>(from[i] + h + r, Max(left, 0));
          Store(strip + i * kStripRows + r, x);
        }
      }
      strip += to_stride;
    });
  }
}

template <typename T, typename In>
void StageKeys(const RowSet& rows, int64_t count, int64_t width, T* to) {
  constexpr int kL = kLanes<T>, kSquares = (kStripRows + kL - 1) / kL;
  for (int64_t row = 0; row < count; row += kStripRows, to += width * kStripRows) {
    const In* from[kStripRows];  // nobody reads what stands for rows past the last
    for (int i = 0; i < kStripRows; ++i) from[i] = Row<In>(rows, Min(row + i, count - 1));
    for (int64_t h = 0; h < width; h += kL) {
      const int64_t columns = Min(kL, width - h);
      Vec<T> x[kSquares][kL];
      JAX_FMHA_UNROLL
      for (int i = 0; i < kSquares * kL; ++i) {
        x[i / kL][i % kL] = i >= kStripRows ? Vec<T>{}
                            : columns == kL ? LoadAs(from[i] + h, T())
                                            : LoadFirst<T>(from[i] + h, columns);
      }
      JAX_FMHA_UNROLL
      for (int s = 0; s < kSquares; ++s) Transpose<T>(x[s]);
      // In ascending order, for the lanes past a strip's rows fall on what comes next.
      for (int64_t i = 0; i < columns; ++i) {
        JAX_FMHA_UNROLL
        for (int s = 0; s < kSquares; ++s) Store(to + (h + i) * kStripRows + s * kL, x[s][i]);
      }
    }
  }
}

// ---- bias and mask ----

template <typename T, typename In>
void StageBias(const ScoreOperand& bias, T* scratch, T* to) {
  constexpr int kL = kLanes<T>;
  if (bias.same_offsets) {
    ReadBias<T, In>(bias, 0, scratch);
    for (int64_t j = 0; j < bias.keys; ++j) {
      for (int v = 0; v < kPanelVectors; ++v) Store(to + j * kPanel<T> + v * kL, Set(scratch[j]));
    }
    return;
  }
  for (int64_t c = 0; c < kPanel<T>; c += kL) {
    const T* column[kL];
    const int64_t count = Max(0, Min(kL, bias.columns - c));
    for (int64_t i = 0; i < count; ++i) {
      column[i] = scratch + i * bias.keys;
      ReadBias<T, In>(bias, c + i, scratch + i * bias.keys);
    }
    TransposeColumns<T, T>(column, count, bias.keys, T(1), to + c);
  }
}

template <typename T>
MaskKind StageMask(const ScoreOperand& mask, LaneInt<T>* to) {
  const MaskKind kind = KindOf(mask);
  if (kind != MaskKind::kSome) return kind;
  for (int64_t c = 0; c < kPanel<T>; ++c) {
    if (c >= mask.columns) {
      for (int64_t j = 0; j < mask.keys; ++j) to[j * kPanel<T> + c] = 0;
      continue;
    }
    const uint8_t* keep = static_cast<const uint8_t*>(mask.base) + mask.offsets[c];
    for (int64_t j = 0; j < mask.keys; ++j) {
      to[j * kPanel<T> + c] = -static_cast<LaneInt<T>>(keep[KeyOffset(mask, j)] != 0);
    }
  }
  return kind;
}

// ---- one panel against one block of keys ----

// Whether scores are the products as they are.
template <typename T>
bool IsPlain(const PanelBlock<T>& b) {
  return b.bias == nullptr && !b.has_soft_cap && b.mask == nullptr && b.key_position == nullptr;
}

// S^T = K Q^T; with kMaxima, the new m of every column from what the registers hold.
template <bool kMaxima, typename T, int V>
void Scores(const PanelBlock<T>& b, Vec<T> (&m)[V]) {
  constexpr int kRows = kBlockRows<V>;
  static_assert(kRows % kStripRows == 0);
  Ahead ahead = b.next_k;
  const int64_t fetch = ahead.RowsPerStep(b.keys / kRows);
  for (int64_t row = 0; row < b.keys; row += kRows) {
    WithConstant<kRows>(Min(kRows, b.keys - row), [&](auto rows) {
      ahead.Fetch(fetch);
      constexpr int M = decltype(rows)::value;
      Vec<T> c[M][V];
      Clear(c);
      MultiplyAdd<Layout::kStrips, M, V, T>(b.head_dim, b.k + row * b.head_dim,
                                            b.head_dim * kStripRows, b.q, kPanel<T>, c);
      T* to = b.scores + row * kPanel<T>;
      JAX_FMHA_UNROLL
      for (int i = 0; i < M; ++i) {
        JAX_FMHA_UNROLL
        for (int v = 0; v < V; ++v) {
          Store(to + i * kPanel<T> + v * kLanes<T>, c[i][v]);
          if (kMaxima) m[v] = MaxOf<T>(c[i][v], m[v]);
        }
      }
    });
  }
}

// Bias, soft cap and masks for one vector of scores: key j, columns from `c` on.
template <typename T>
JAX_FMHA_INLINE Vec<T> ChangeScore(const PanelBlock<T>& b, int64_t j, int64_t c, Vec<T> s) {
  const int64_t at = j * kPanel<T> + c;
  const Vec<T> never = Set<T>(-__builtin_inf());
  if (b.bias != nullptr) s += Load(b.bias + at);
  if (b.has_soft_cap) s = b.soft_cap * Tanh<T>(s / b.soft_cap);
  if (b.mask != nullptr) s = (Mask<T>)Load(b.mask + at) ? s : never;
  if (b.key_position != nullptr) {
    const Vec<LaneInt<T>> position = b.key_position[j] - Vec<LaneInt<T>>{};
    s = position < Load(b.lowest + c) ? never : s;
    s = position > Load(b.highest + c) ? never : s;
  }
  return s;
}

// Scores changed in place, and the new m of every column.
template <typename T, int V>
void ChangeScores(const PanelBlock<T>& b, Vec<T> (&m)[V]) {
  for (int64_t j = 0; j < b.keys; ++j) {
    JAX_FMHA_UNROLL
    for (int v = 0; v < V; ++v) {
      T* at = b.scores + j * kPanel<T> + v * kLanes<T>;
      const Vec<T> s = ChangeScore(b, j, v * kLanes<T>, Load(at));
      Store(at, s);
      m[v] = MaxOf<T>(s, m[v]);
    }
  }
}

// P^T = exp2(S^T - m) in place; returns its column sums.
template <typename T, int V>
void Exponentials(const PanelBlock<T>& b, const Vec<T> (&base)[V], Vec<T> (&sum)[V]) {
  JAX_FMHA_UNROLL
  for (int v = 0; v < V; ++v) sum[v] = Vec<T>{};
  for (int64_t j = 0; j < b.keys; ++j) {
    JAX_FMHA_UNROLL
    for (int v = 0; v < V; ++v) {
      T* at = b.scores + j * kPanel<T> + v * kLanes<T>;
      const Vec<T> p = Exp2<T>(Load(at) - base[v]);
      Store(at, p);
      sum[v] += p;
    }
  }
}

// O^T = alpha O^T + V^T P^T.
template <typename T, int V>
void Accumulate(const PanelBlock<T>& b, const Vec<T> (&alpha)[V], T* o) {
  Ahead ahead = b.next_v;
  const int64_t fetch = ahead.RowsPerStep(b.head_dim_v / kStripRows);
  const T* strip = b.v;
  ForRowBlocks<kPanelVectors>(b.head_dim_v, [&](auto rows, int64_t row) {
    ahead.Fetch(fetch);
    constexpr int M = decltype(rows)::value;
    Vec<T> c[M][V];
    T* to = o + row * kPanel<T>;
    JAX_FMHA_UNROLL
    for (int m = 0; m < M; ++m) {
      JAX_FMHA_UNROLL
      for (int v = 0; v < V; ++v) c[m][v] = Load(to + m * kPanel<T> + v * kLanes<T>) * alpha[v];
    }
    MultiplyAdd<Layout::kStrips, M, V, T>(b.keys, strip, 0, b.scores, kPanel<T>, c);
    strip += b.v_stride;
    JAX_FMHA_UNROLL
    for (int m = 0; m < M; ++m) {
      JAX_FMHA_UNROLL
      for (int v = 0; v < V; ++v) Store(to + m * kPanel<T> + v * kLanes<T>, c[m][v]);
    }
  });
}

template <typename T, int V>
void AttendVectors(const PanelBlock<T>& b, const PanelState<T>& state) {
  Vec<T> m[V], base[V], alpha[V], sum[V];
  JAX_FMHA_UNROLL
  for (int v = 0; v < V; ++v) m[v] = Load(state.m + v * kLanes<T>);
  if (IsPlain(b)) {
    Scores<true>(b, m);
  } else {
    Scores<false>(b, m);
    ChangeScores(b, m);
  }
  JAX_FMHA_UNROLL
  for (int v = 0; v < V; ++v) {
    base[v] = Base<T>(m[v]);
    alpha[v] = Exp2<T>(Load(state.m + v * kLanes<T>) - base[v]);
    Store(state.m + v * kLanes<T>, m[v]);
  }
  Exponentials<T, V>(b, base, sum);
  JAX_FMHA_UNROLL
  for (int v = 0; v < V; ++v) {
    T* l = state.l + v * kLanes<T>;
    Store(l, Load(l) * alpha[v] + sum[v]);
  }
  Accumulate<T, V>(b, alpha, state.o);
}

template <typename T>
void Attend(const PanelBlock<T>& block, const PanelState<T>& state) {
  const bool narrow = block.columns <= kNarrowVectors * kLanes<T>;
  narrow ? AttendVectors<T, kNarrowVectors>(block, state)
         : AttendVectors<T, kPanelVectors>(block, state);
}

// ---- the end of a panel ----

// state = state * exp2(state.m - m) + other * exp2(other.m - m), m the larger one.
template <typename T>
void Merge(const PanelState<T>& other, int64_t head_dim_v, int64_t columns,
           const PanelState<T>& state) {
  for (int64_t c = 0; c < columns; c += kLanes<T>) {
    const Vec<T> m = MaxOf<T>(Load(other.m + c), Load(state.m + c));
    const Vec<T> keep = Exp2<T>(Load(state.m + c) - Base<T>(m));
    const Vec<T> take = Exp2<T>(Load(other.m + c) - Base<T>(m));
    Store(state.m + c, m);
    Store(state.l + c, Load(state.l + c) * keep + Load(other.l + c) * take);
    for (int64_t h = 0; h < head_dim_v; ++h) {
      T* o = state.o + h * kPanel<T> + c;
      Store(o, Load(o) * keep + Load(other.o + h * kPanel<T> + c) * take);
    }
  }
}

template <typename T, typename Out>
void Finish(const PanelState<T>& state, const T* sinks, int64_t head_dim_v, const RowSet& out,
            int64_t group, int64_t first_column, int64_t columns) {
  constexpr int kL = kLanes<T>;
  for (int64_t c = 0; c < columns; c += kL) {
    const Vec<T> scale = Close(state.m + c, state.l + c, sinks == nullptr ? nullptr : sinks + c);
    const int64_t count = Min(kL, columns - c);
    Out* to[kL];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t column = first_column + c + i;
      to[i] = const_cast<Out*>(Row<Out>(out, column / group)) + column % group * head_dim_v;
    }
    for (int64_t h = 0; h < head_dim_v; h += kL) {
      const int64_t rows = Min(kL, head_dim_v - h);
      Vec<T> x[kL];
      JAX_FMHA_UNROLL
      for (int r = 0; r < kL; ++r) {
        x[r] = r < rows ? Load(state.o + (h + r) * kPanel<T> + c) : Vec<T>{};
        x[r] = scale == Vec<T>{} ? Vec<T>{} : x[r] * scale;  // nothing attended: 0 whatever V held
      }
      Transpose<T>(x);
      for (int64_t i = 0; i < count; ++i) {
        rows == kL ? StoreAs(to[i] + h, x[i]) : StoreFirst<T>(to[i] + h, x[i], rows);
      }
    }
  }
}

}  // namespace

extern const ForwardTile<float> kForwardF32 = {
    kPanel<float>,
    kStripRows,
    {PackQ<float, F16>, PackQ<float, BF16>, PackQ<float, float>, nullptr},
    {StageKeys<float, F16>, StageKeys<float, BF16>, StageKeys<float, float>, nullptr},
    {StageValues<float, F16>, StageValues<float, BF16>, StageValues<float, float>, nullptr},
    {StageBias<float, F16>, StageBias<float, BF16>, StageBias<float, float>,
     StageBias<float, double>},
    StageMask<float>,
    {Attend<float>, Attend<float>, Attend<float>, nullptr},
    Merge<float>,
    {Finish<float, F16>, Finish<float, BF16>, Finish<float, float>, nullptr},
};

extern const ForwardTile<double> kForwardF64 = {
    kPanel<double>,
    kStripRows,
    {nullptr, nullptr, nullptr, PackQ<double, double>},
    {nullptr, nullptr, nullptr, StageKeys<double, double>},
    {nullptr, nullptr, nullptr, StageValues<double, double>},
    {StageBias<double, F16>, StageBias<double, BF16>, StageBias<double, float>,
     StageBias<double, double>},
    StageMask<double>,
    {nullptr, nullptr, nullptr, Attend<double>},
    Merge<double>,
    {nullptr, nullptr, nullptr, Finish<double, double>},
};

}  // namespace JAX_FMHA_ISA
}  // namespace cpu
}  // namespace jax_fmha
