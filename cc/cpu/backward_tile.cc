#include "cc/cpu/backward_tile.h"

#include "cc/cpu/ahead.h"
#include "cc/cpu/gemm.h"
#include "cc/cpu/simd.h"

namespace jax_fmha {
namespace cpu {
namespace JAX_FMHA_ISA {
namespace {

constexpr double kLog2E = 1.4426950408889634074;

// ---- matrix products on staged tiles ----

// C[rows][V vectors] = A B, or += A B. Every block fetches `fetch` rows ahead.
template <Layout kLayout, bool kAccumulate, int V, typename T>
void MultiplyPanel(int64_t rows, int64_t depth, const T* a, int64_t lda, const T* b, int64_t ldb,
                   T* c, int64_t ldc, int64_t fetch, Ahead* ahead) {
  ForRowBlocks<V>(rows, [&](auto m, int64_t row) {
    ahead->Fetch(fetch);
    Vec<T> sum[m.value][V];
    T* const to = c + row * ldc;
    Clear(sum);
    MultiplyAdd<kLayout>(depth, a + row * (kLayout == Layout::kRows ? lda : 1), lda, b, ldb, sum);
    JAX_FMHA_UNROLL
    for (int i = 0; i < m.value; ++i) {
      JAX_FMHA_UNROLL
      for (int v = 0; v < V; ++v) {
        T* const at = to + i * ldc + v * kLanes<T>;
        Store(at, kAccumulate ? Load(at) + sum[i][v] : sum[i][v]);
      }
    }
  });
}

// C[rows][columns] for any number of columns; whole vectors are written. Panel p of B is at b + p *
// panel_stride. Goes over the panels with as many rows of A as stay in half of a 32 KB cache, and
// fetches what is `ahead` in even parts.
template <Layout kLayout, bool kAccumulate, typename T>
void Multiply(int64_t rows, int64_t columns, int64_t depth, const T* a, int64_t lda, const T* b,
              int64_t panel_stride, int64_t ldb, T* c, int64_t ldc, Ahead ahead = {}) {
  constexpr int64_t kBlock = kBlockRows<kPanelVectors>, kCached = 18432 / sizeof(T);
  const int64_t most = Max(kCached / Max(depth, 1) / kBlock, 1) * kBlock;
  const int64_t fetch = ahead.RowsPerStep(rows / kBlock * (columns / kPanel<T>));
  for (int64_t row = 0; row < rows; row += most) {
    const T* const part = a + row * (kLayout == Layout::kRows ? lda : 1);
    const int64_t count = Min(most, rows - row);
    const T* panel = b;
    T* to = c + row * ldc;
    int64_t left = columns;
    for (; left > kNarrowVectors * kLanes<T>;
         left -= kPanel<T>, panel += panel_stride, to += kPanel<T>) {
      MultiplyPanel<kLayout, kAccumulate, kPanelVectors>(count, depth, part, lda, panel, ldb, to,
                                                         ldc, fetch, &ahead);
    }
    if (left > 0) {
      MultiplyPanel<kLayout, kAccumulate, kNarrowVectors>(count, depth, part, lda, panel, ldb, to,
                                                          ldc, fetch, &ahead);
    }
  }
}

template <typename T>
Ahead RowsAhead(const T* rows, int64_t stride, int64_t count) {
  const int64_t bytes = stride * static_cast<int64_t>(sizeof(T));
  return {reinterpret_cast<const char*>(rows), bytes, bytes, count};
}

// ---- staging ----

template <typename T>
void ClearRows(T* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = T();
}

// Rows of a matrix, widened, one after another.
template <typename In, typename T>
void StageRows(const void* from, int64_t from_stride, const int64_t* rows, int64_t count,
               int64_t width, T* to, int64_t to_stride) {
  const In* const base = static_cast<const In*>(from);
  for (int64_t i = 0; i < count; ++i)
    WidenRow<T>(base + rows[i] * from_stride, width, T(1), to + i * to_stride);
}

template <typename In, typename T>
void StageQueries(const BackwardHead<T>& head, int64_t count, const int64_t* rows,
                  const int64_t* heads, T* q, T* dout) {
  const In* const from_q = static_cast<const In*>(head.q);
  const In* const from_dout = static_cast<const In*>(head.dout);
  const int64_t h = head.head_dim, hv = head.head_dim_v;
  for (int64_t i = 0; i < count; ++i) {
    WidenRow<T>(from_q + rows[i] * head.q_stride + heads[i] * h, h, T(1), q + i * head.staged_h);
    WidenRow<T>(from_dout + rows[i] * head.dout_stride + heads[i] * hv, hv, T(1),
                dout + i * head.staged_hv);
  }
}

// Staged rows [count][width] -> panels [count / kPanel][width][kPanel].
template <typename T>
void TransposeToPanels(const T* from, int64_t stride, int64_t count, int64_t width, T* to) {
  constexpr int kL = kLanes<T>;
  for (int64_t row = 0; row < count; row += kL) {
    T* const panel = to + row / kPanel<T> * width * kPanel<T> + row % kPanel<T>;
    int64_t h = 0;
    for (; h < width; h += kL) {  // reads up to the end of the cache line, which the staged row has
      Vec<T> square[kL];
      JAX_FMHA_UNROLL
      for (int i = 0; i < kL; ++i) square[i] = Load(from + Min(row + i, count - 1) * stride + h);
      Transpose<T>(square);
      if (h + kL <= width) {
        JAX_FMHA_UNROLL
        for (int i = 0; i < kL; ++i) Store(panel + (h + i) * kPanel<T>, square[i]);
      } else {
        T rest[kL * kL];
        JAX_FMHA_UNROLL
        for (int i = 0; i < kL; ++i) Store(rest + i * kL, square[i]);
        for (int64_t i = 0; i < width - h; ++i)
          Store(panel + (h + i) * kPanel<T>, Load(rest + i * kL));
      }
    }
  }
}

template <typename In, typename T>
void LoadKeys(const BackwardHead<T>& head, const KeyTile& keys, const BackwardScratch<T>& scratch) {
  StageRows<In>(head.v, head.v_stride, keys.rows, keys.count, head.head_dim_v, scratch.dv,
                head.staged_hv);
  TransposeToPanels(scratch.dv, head.staged_hv, keys.count, head.head_dim_v, scratch.vt);
  StageRows<In>(head.k, head.k_stride, keys.rows, keys.count, head.head_dim, scratch.k,
                head.staged_h);
  TransposeToPanels(scratch.k, head.staged_h, keys.count, head.head_dim, scratch.kt);
  ClearRows(scratch.dk, keys.count * head.staged_h);
  ClearRows(scratch.dv, keys.count * head.staged_hv);
}

template <typename In, typename T>
void StoreKeys(const BackwardHead<T>& head, const KeyTile& keys,
               const BackwardScratch<T>& scratch) {
  for (int64_t c = 0; c < keys.count; ++c) {
    NarrowRow<T>(scratch.dk + c * head.staged_h, head.head_dim, head.scale,
                 static_cast<In*>(head.dk) + keys.rows[c] * head.k_stride);
    NarrowRow<T>(scratch.dv + c * head.staged_hv, head.head_dim_v, T(1),
                 static_cast<In*>(head.dv) + keys.rows[c] * head.v_stride);
  }
}

// ---- which part of a tile is worked on ----

// A part of the tile that is worked on as a whole. Without causal or window it is the whole tile;
// else there is one part per panel of keys, with the rows that see any of them, so that the
// diagonal wastes little.
struct Part {
  int64_t column, columns, row, rows;
};

// The narrowest panel bounds the number of parts: two vectors of doubles in 16 bytes each.
constexpr int kMaxParts = kBackwardBlockKv / kPanel<double> + 1;

template <typename T>
Part PartOfPanel(const BackwardHead<T>& head, const KeyTile& keys, const QueryBlock<T>& block,
                 int64_t column) {
  const int64_t columns = Min(kPanel<T>, keys.count - column);
  int64_t lowest = keys.position[column], highest = lowest;
  for (int64_t c = column + 1; c < column + columns; ++c) {
    lowest = Min(lowest, keys.position[c]);
    highest = Max(highest, keys.position[c]);
  }
  int64_t first = block.count, last = -1;
  for (int64_t r = 0; r < block.count; ++r) {
    if (highest - block.position[r] < head.band_lo || lowest - block.position[r] > head.band_hi)
      continue;
    first = Min(first, r);
    last = r;
  }
  if (last < 0) return Part{column, columns, 0, 0};
  // Whole blocks of the micro-kernel, so that the parts of dQ are, too.
  constexpr int64_t kRows = kBlockRows<kPanelVectors>;
  const int64_t begin = first / kRows * kRows;
  return Part{column, columns, begin, Min((last / kRows + 1) * kRows, block.count) - begin};
}

template <typename T>
int PartsOf(const BackwardHead<T>& head, const KeyTile& keys, const QueryBlock<T>& block,
            Part* parts) {
  if (block.position == nullptr) {
    parts[0] = Part{0, keys.count, 0, block.count};
    return 1;
  }
  int n = 0;
  for (int64_t column = 0; column < keys.count; column += kPanel<T>) {
    parts[n] = PartOfPanel(head, keys, block, column);
    if (parts[n].rows > 0) ++n;
  }
  return n;
}

// Rows of a block that parts work on without any allowed pair having been seen yet.
struct RowFlags {
  bool dead[kBackwardBlockQ];
};
void MarkDead(const Part* parts, int num_parts, RowFlags* rows) {
  for (bool& dead : rows->dead) dead = false;
  for (int i = 0; i < num_parts; ++i) {
    for (int64_t r = parts[i].row; r < parts[i].row + parts[i].rows; ++r) rows->dead[r] = true;
  }
}

// ---- softmax ----

// The keys that one row may attend, as lanes. Returns whether there are any.
template <typename T>
bool AllowedLanes(const BackwardHead<T>& head, const KeyTile& keys, const QueryBlock<T>& block,
                  int64_t row, const Part& part, Int<T>* lanes) {
  Int<T> any = 0;
  for (int64_t c = 0; c < part.columns; ++c) lanes[c] = -1;
  if (block.position != nullptr) {
    const int64_t* const position = keys.position + part.column;
    const int64_t lowest = block.position[row] + head.band_lo,
                  highest = block.position[row] + head.band_hi;
    for (int64_t c = 0; c < part.columns; ++c)
      lanes[c] = -Int<T>((position[c] >= lowest) & (position[c] <= highest));
  }
  if (block.mask != nullptr) {
    const uint8_t* const mask = block.mask + row * kBackwardBlockKv + part.column;
    for (int64_t c = 0; c < part.columns; ++c) lanes[c] &= -Int<T>(mask[c] != 0);
  }
  for (int64_t c = 0; c < part.columns; ++c) any |= lanes[c];
  return any != 0;
}

template <typename In, typename T>
void LoadBias(const void* data, int64_t col, const int64_t* keys, int64_t count, T* to) {
  const In* const from = static_cast<const In*>(data);
  for (int64_t c = 0; c < count; ++c) to[c] = T(ToFloat(from[keys[c] * col]));
}

// The bias of one row at some keys, widened.
template <typename T>
void StageBias(const ScoreView<const void*>& bias, int64_t offset, const int64_t* keys,
               int64_t count, T* to) {
  const auto load = [&](auto in) {
    using In = decltype(in);
    const In* const from = static_cast<const In*>(bias.data) + offset;
    if constexpr (sizeof(In) <= sizeof(float) && sizeof(T) == sizeof(float)) {
      if (bias.col == 1 && keys[count - 1] - keys[0] == count - 1)
        return WidenRow<T>(from + keys[0], count, T(1), to);
    }
    LoadBias<In>(from, bias.col, keys, count, to);
  };
  switch (bias.dtype) {
    case DType::kF64:
      return load(double());
    case DType::kF32:
      return load(float());
    case DType::kBF16:
      return load(BF16());
    default:
      return load(F16());
  }
}

// What the elements of a row share.
template <typename T>
struct RowTerms {
  T scale;  // times log2(e) without a soft cap
  T soft_cap;
  T lse2;
  T delta;
  const T* bias;        // or null
  const Int<T>* lanes;  // or null
};

// s: S -> P. ds: dP -> dS = P * (dP - delta) * d(score)/d(scale * S + bias). A masked element is
// exactly 0.
template <bool kBias, bool kSoftCap, bool kMasked, typename T>
JAX_FMHA_INLINE void SoftmaxRow(const RowTerms<T>& row, int64_t columns, T* s, T* ds) {
  constexpr T kToLog2 = static_cast<T>(kLog2E);
  const Vec<T> scale = Set(row.scale), lse2 = Set(row.lse2), delta = Set(row.delta);
  for (int64_t c = 0; c < columns; c += kLanes<T>) {
    Vec<T> x = Load(s + c) * scale, slope = Set(T(1));
    if (kBias) x += Load(row.bias + c) * (kSoftCap ? T(1) : kToLog2);
    if (kSoftCap) {
      const Vec<T> tanh = Tanh<T>(x / row.soft_cap);
      slope = T(1) - tanh * tanh;
      x = tanh * (row.soft_cap * kToLog2);
    }
    // Never above 1, though the rounding of huge logits may put one above its own lse. NaN stays.
    const Vec<T> exponent = x - lse2;
    Vec<T> p = Exp2<T>(exponent > Vec<T>{} ? Vec<T>{} : exponent);
    Vec<T> d = p * (Load(ds + c) - delta);
    if (kSoftCap) d *= slope;
    if (kMasked) {
      const Mask<T> keep = (Mask<T>)Load(row.lanes + c);
      p = keep ? p : Vec<T>{};
      d = keep ? d : Vec<T>{};
    }
    Store(s + c, p);
    Store(ds + c, d);
  }
}

// Adds the dS of one row to the bias's gradient.
template <typename T>
void AddToBias(const ScoreView<T*>& dbias, int64_t offset, const int64_t* keys, int64_t count,
               const T* ds) {
  T* const to = dbias.data + offset;
  if (dbias.col == 0) {
    Vec<T> sum = {};
    int64_t c = 0;
    for (; c + kLanes<T> <= count; c += kLanes<T>) sum += Load(ds + c);
    *to += SumOf<T>(sum + LoadFirst<T>(ds + c, count - c));
  } else if (dbias.col == 1 && keys[count - 1] - keys[0] == count - 1) {
    T* const at = to + keys[0];
    for (int64_t c = 0; c < count; ++c) at[c] += ds[c];
  } else {
    for (int64_t c = 0; c < count; ++c) to[keys[c] * dbias.col] += ds[c];
  }
}

template <bool kBias, bool kSoftCap, bool kMasked, typename T>
void SoftmaxPart(const BackwardHead<T>& head, const KeyTile& keys, const QueryBlock<T>& block,
                 const Part& part, const BackwardScratch<T>& scratch, RowFlags* rows) {
  alignas(64) T bias[kBackwardBlockKv];
  alignas(64) Int<T> lanes[kBackwardBlockKv];
  const int64_t* const key_rows = keys.rows + part.column;
  const T scale = kSoftCap ? head.scale : head.scale * static_cast<T>(kLog2E);
  for (int64_t r = part.row; r < part.row + part.rows; ++r) {
    T* const s = scratch.p + r * kScoreStride<T> + part.column;
    T* const ds = scratch.ds + r * kScoreStride<T> + part.column;
    if (kMasked && AllowedLanes(head, keys, block, r, part, lanes)) rows->dead[r] = false;
    if (kBias) {
      const int64_t offset = block.heads[r] * head.bias.head + block.rows[r] * head.bias.row;
      StageBias(head.bias, offset, key_rows, part.columns, bias);
    }
    const RowTerms<T> terms = {scale, head.soft_cap, block.lse2[r], block.delta[r], bias, lanes};
    SoftmaxRow<kBias, kSoftCap, kMasked>(terms, part.columns, s, ds);
    if (kBias && head.dbias.data != nullptr) {
      const int64_t offset = block.heads[r] * head.dbias.head + block.rows[r] * head.dbias.row;
      AddToBias(head.dbias, offset, key_rows, part.columns, ds);
    }
  }
}

template <typename F>
void WithBool(bool value, F&& f) {
  if (value) {
    f(Constant<1>());
  } else {
    f(Constant<0>());
  }
}

template <typename T>
void Softmax(const BackwardHead<T>& head, const KeyTile& keys, const QueryBlock<T>& block,
             const Part& part, const BackwardScratch<T>& scratch, RowFlags* rows) {
  const bool masked = block.position != nullptr || block.mask != nullptr;
  WithBool(head.bias.data != nullptr, [&](auto bias) {
    WithBool(head.has_soft_cap, [&](auto soft_cap) {
      WithBool(masked, [&](auto is_masked) {
        SoftmaxPart<bias.value, soft_cap.value, is_masked.value>(head, keys, block, part, scratch,
                                                                 rows);
      });
    });
  });
}

// ---- the five products ----

// P and dS of one part. Both products may read garbage beyond the last key; it stays beyond the
// last key. Each fetches what the next one streams from a far cache: dO, then dQ.
template <typename T>
void Scores(const BackwardHead<T>& head, const KeyTile& keys, const QueryBlock<T>& block,
            const Part& part, const BackwardScratch<T>& scratch, RowFlags* rows) {
  constexpr int64_t kStride = kScoreStride<T>;
  const int64_t h = head.head_dim, hv = head.head_dim_v, at = part.row * kStride + part.column;
  Multiply<Layout::kRows, false>(
      part.rows, part.columns, h, block.q + part.row * head.staged_h, head.staged_h,
      scratch.kt + part.column * h, h * kPanel<T>, kPanel<T>, scratch.p + at, kStride,
      RowsAhead(block.dout + part.row * head.staged_hv, head.staged_hv, part.rows));
  Multiply<Layout::kRows, false>(
      part.rows, part.columns, hv, block.dout + part.row * head.staged_hv, head.staged_hv,
      scratch.vt + part.column * hv, hv * kPanel<T>, kPanel<T>, scratch.ds + at, kStride,
      RowsAhead(block.dq + part.row * head.staged_h, head.staged_h, part.rows));
  Softmax(head, keys, block, part, scratch, rows);
}

// dV += P^T dO, dK += dS^T Q.
template <typename T>
void AddToKeys(const BackwardHead<T>& head, const QueryBlock<T>& block, const Part& part,
               const BackwardScratch<T>& scratch) {
  constexpr int64_t kStride = kScoreStride<T>;
  const int64_t at = part.row * kStride + part.column;
  Multiply<Layout::kColumns, true>(part.columns, head.head_dim_v, part.rows, scratch.p + at,
                                   kStride, block.dout + part.row * head.staged_hv, kPanel<T>,
                                   head.staged_hv, scratch.dv + part.column * head.staged_hv,
                                   head.staged_hv);
  Multiply<Layout::kColumns, true>(part.columns, head.head_dim, part.rows, scratch.ds + at, kStride,
                                   block.q + part.row * head.staged_h, kPanel<T>, head.staged_h,
                                   scratch.dk + part.column * head.staged_h, head.staged_h);
}

// dQ += dS K for rows that see the keys [begin, end). Fetches the rows of Q that come next: those
// of the next block, unless a copy without dead rows stands for this one.
template <typename T>
void AddToQueries(const BackwardHead<T>& head, const QueryBlock<T>& block, int64_t row,
                  int64_t rows, int64_t begin, int64_t end, const BackwardScratch<T>& scratch) {
  Multiply<Layout::kRows, true>(
      rows, head.head_dim, end - begin, scratch.ds + row * kScoreStride<T> + begin, kScoreStride<T>,
      scratch.k + begin * head.staged_h, kPanel<T>, head.staged_h, block.dq + row * head.staged_h,
      head.staged_h, RowsAhead(block.q + (block.count + row) * head.staged_h, head.staged_h, rows));
}

// The keys from the first to the last that a row sees.
struct Range {
  int64_t begin, end;
};
Range KeysOfRow(const Part* parts, int num_parts, int64_t row) {
  Range keys = {kBackwardBlockKv, 0};
  for (int i = 0; i < num_parts; ++i) {
    if (row < parts[i].row || row >= parts[i].row + parts[i].rows) continue;
    keys.begin = Min(keys.begin, parts[i].column);
    keys.end = Max(keys.end, parts[i].column + parts[i].columns);
  }
  return keys;
}

template <typename T>
void AddToQueries(const BackwardHead<T>& head, const QueryBlock<T>& block, const Part* parts,
                  int num_parts, const BackwardScratch<T>& scratch) {
  constexpr int64_t kRows = kBlockRows<kPanelVectors>;
  for (int64_t row = 0, next; row < block.count; row = next) {
    const Range keys = KeysOfRow(parts, num_parts, row);
    for (next = row + kRows; next < block.count; next += kRows) {
      const Range other = KeysOfRow(parts, num_parts, next);
      if (other.begin != keys.begin || other.end != keys.end) break;
    }
    next = Min(next, block.count);
    if (keys.begin < keys.end)
      AddToQueries(head, block, row, next - row, keys.begin, keys.end, scratch);
  }
}

template <typename T>
bool IsFinite(const T* row, int64_t width) {
  Int<T> finite = 1;
  for (int64_t h = 0; h < width; ++h) finite &= row[h] * T(0) == T(0);
  return finite != 0;
}

// A row without a key to attend has P = dS = 0, but 0 * NaN must not reach dk and dv. Points the
// block at a copy without such rows when they hold anything that is not finite.
template <typename T>
void SilenceDeadRows(const BackwardHead<T>& head, const RowFlags& rows,
                     const BackwardScratch<T>& scratch, QueryBlock<T>* block) {
  const int64_t h = head.staged_h, hv = head.staged_hv;
  bool silent = true;
  for (int64_t r = 0; r < block->count; ++r) {
    silent = silent && (!rows.dead[r] || (IsFinite(block->q + r * h, head.head_dim) &&
                                          IsFinite(block->dout + r * hv, head.head_dim_v)));
  }
  if (silent) return;
  for (int64_t r = 0; r < block->count; ++r) {
    for (int64_t i = 0; i < h; ++i)
      scratch.q[r * h + i] = rows.dead[r] ? T(0) : block->q[r * h + i];
    for (int64_t i = 0; i < hv; ++i)
      scratch.dout[r * hv + i] = rows.dead[r] ? T(0) : block->dout[r * hv + i];
  }
  block->q = scratch.q;
  block->dout = scratch.dout;
}

template <typename T>
void ProcessQueryBlock(const BackwardHead<T>& head, const KeyTile& keys,
                       const QueryBlock<T>& queries, const BackwardScratch<T>& scratch) {
  QueryBlock<T> block = queries;
  Part parts[kMaxParts];
  const int num_parts = PartsOf(head, keys, block, parts);
  // Between two parts a row of dQ may read what no part has written.
  if (num_parts > 1) ClearRows(scratch.ds, block.count * kScoreStride<T>);
  RowFlags rows;
  MarkDead(parts, num_parts, &rows);
  for (int i = 0; i < num_parts; ++i) Scores(head, keys, block, parts[i], scratch, &rows);
  if (block.position != nullptr || block.mask != nullptr)
    SilenceDeadRows(head, rows, scratch, &block);
  for (int i = 0; i < num_parts; ++i) AddToKeys(head, block, parts[i], scratch);
  AddToQueries(head, block, parts, num_parts, scratch);
}

// ---- before and after ----

template <typename In, typename T>
void StoreQueries(const BackwardHead<T>& head, int64_t count, const int64_t* rows,
                  const int64_t* heads, T* slab, int64_t slab_stride, int64_t num_slabs) {
  for (int64_t i = 0; i < count; ++i) {
    T* const sum = slab + i * head.staged_h;
    for (int64_t n = 1; n < num_slabs; ++n) {
      const T* const more = sum + n * slab_stride;
      for (int64_t h = 0; h < head.head_dim; ++h) sum[h] += more[h];
    }
    NarrowRow<T>(sum, head.head_dim, head.scale,
                 static_cast<In*>(head.dq) + rows[i] * head.q_stride + heads[i] * head.head_dim);
  }
}

template <typename In, typename T>
void RowDots(const void* out, const void* dout, int64_t count, int64_t width, T* sums) {
  const In* o = static_cast<const In*>(out);
  const In* d = static_cast<const In*>(dout);
  for (int64_t i = 0; i < count; ++i, o += width, d += width) {
    Vec<T> sum = {};
    Mask<T> nonzero = {};
    int64_t h = 0;
    for (; h + kLanes<T> <= width; h += kLanes<T>) {
      const Vec<T> x = LoadAs(o + h, T());
      nonzero |= x != Vec<T>{};
      sum += x * LoadAs(d + h, T());
    }
    if (h < width) {
      const Vec<T> x = LoadFirst<T>(o + h, width - h);
      nonzero |= x != Vec<T>{};
      sum += x * LoadFirst<T>(d + h, width - h);
    }
    Int<T> any = 0;
    for (int lane = 0; lane < kLanes<T>; ++lane) any |= nonzero[lane];
    sums[i] = any ? SumOf<T>(sum) : T(0);
  }
}

template <typename Out, typename T>
void RoundTo(const T* from, int64_t count, void* to) {
  Out* const out = static_cast<Out*>(to);
  if constexpr (sizeof(Out) < sizeof(float) && sizeof(T) == sizeof(float)) {
    NarrowRow<T>(from, count, T(1), out);
  } else if constexpr (sizeof(Out) < sizeof(float)) {
    for (int64_t i = 0; i < count; ++i)
      StoreFirst<float>(out + i, Set(static_cast<float>(from[i])), 1);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<Out>(from[i]);
  }
}

template <typename T>
void Round(const T* from, int64_t count, DType to_dtype, void* to) {
  switch (to_dtype) {
    case DType::kF64:
      return RoundTo<double>(from, count, to);
    case DType::kF32:
      return RoundTo<float>(from, count, to);
    case DType::kBF16:
      return RoundTo<BF16>(from, count, to);
    default:
      return RoundTo<F16>(from, count, to);
  }
}

template <typename In, typename T>
constexpr BackwardFunctions<T> FunctionsOf() {
  return {StageQueries<In, T>,
          LoadKeys<In, T>,
          ProcessQueryBlock<T>,
          StoreKeys<In, T>,
          StoreQueries<In, T>,
          RowDots<In, T>,
          Round<T>};
}

}  // namespace

const BackwardTable kBackward = {FunctionsOf<float, float>(), FunctionsOf<BF16, float>(),
                                 FunctionsOf<F16, float>(), FunctionsOf<double, double>()};

}  // namespace JAX_FMHA_ISA
}  // namespace cpu
}  // namespace jax_fmha
