// The CPU backward against a naive float64 reference, over feature combinations that no fixed list
// would reach.
//
// Rows that nothing may use are NaN in every operand, and results and workspace start as NaN: a
// read of what must not be read, or an element that is not written, shows up as NaN.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cc/core/kernel.h"
#include "cc/cpu/backward.h"
#include "cc/cpu/isa.h"
#include "cc/cpu/kernels.h"
#include "cc/tests/check.h"

namespace jax_fmha {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

// ---- Numbers ----

// IEEE binary with `exponent` and `mantissa` bits, round to nearest even.
uint16_t Encode16(double x, int exponent, int mantissa) {
  const int bias = (1 << (exponent - 1)) - 1;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const uint16_t inf = static_cast<uint16_t>(((1 << exponent) - 1) << mantissa);
  if (std::isnan(x)) return inf | static_cast<uint16_t>(1 << (mantissa - 1));
  x = std::fabs(x);
  if (std::isinf(x)) return sign | inf;
  if (x == 0) return sign;
  const int power = std::max(std::ilogb(x), 1 - bias);  // subnormals share the smallest power
  const int64_t steps = std::llrint(std::ldexp(x, mantissa - power));
  const int64_t bits =
      (int64_t{power + bias - 1} << mantissa) + steps;  // a carry moves into the exponent
  return sign | (bits >= inf ? inf : static_cast<uint16_t>(bits));
}

double Decode16(uint16_t bits, int exponent, int mantissa) {
  const int bias = (1 << (exponent - 1)) - 1;
  const int e = (bits >> mantissa) & ((1 << exponent) - 1);
  const int m = bits & ((1 << mantissa) - 1);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (e == (1 << exponent) - 1) return m ? kNaN : sign * kInf;
  if (e == 0) return sign * std::ldexp(m, 1 - bias - mantissa);
  return sign * std::ldexp((1 << mantissa) + m, e - bias - mantissa);
}

void Store(DType dtype, void* data, int64_t at, double x) {
  switch (dtype) {
    case DType::kF64:
      static_cast<double*>(data)[at] = x;
      return;
    case DType::kF32:
      static_cast<float*>(data)[at] = static_cast<float>(x);
      return;
    case DType::kBF16:
      static_cast<uint16_t*>(data)[at] = Encode16(x, 8, 7);
      return;
    case DType::kF16:
      static_cast<uint16_t*>(data)[at] = Encode16(x, 5, 10);
      return;
    case DType::kS32:
      static_cast<int32_t*>(data)[at] = static_cast<int32_t>(x);
      return;
    case DType::kS64:
      static_cast<int64_t*>(data)[at] = static_cast<int64_t>(x);
      return;
    case DType::kBool:
    case DType::kU8:
      static_cast<uint8_t*>(data)[at] = static_cast<uint8_t>(x);
      return;
    default:
      std::abort();
  }
}

double Load(DType dtype, const void* data, int64_t at) {
  switch (dtype) {
    case DType::kF64:
      return static_cast<const double*>(data)[at];
    case DType::kF32:
      return static_cast<const float*>(data)[at];
    case DType::kBF16:
      return Decode16(static_cast<const uint16_t*>(data)[at], 8, 7);
    case DType::kF16:
      return Decode16(static_cast<const uint16_t*>(data)[at], 5, 10);
    case DType::kS32:
      return static_cast<const int32_t*>(data)[at];
    case DType::kS64:
      return static_cast<double>(static_cast<const int64_t*>(data)[at]);
    case DType::kBool:
    case DType::kU8:
      return static_cast<const uint8_t*>(data)[at];
    default:
      std::abort();
  }
}

// ---- Tensors ----

// One operand or result: its own bytes (exactly, so that a sanitizer sees every step outside) and
// its batch map.
struct Tensor {
  DType dtype = DType::kAbsent;
  BatchMap batch;
  int64_t entries = 1;
  int64_t entry_size = 1;
  std::unique_ptr<char[]> bytes;
  std::vector<double> values;  // what the bytes hold, for the reference

  bool present() const { return dtype != DType::kAbsent; }
  int64_t size() const { return entries * entry_size; }
  int64_t At(int64_t b, int64_t i) const { return batch(b) * entry_size + i; }
  double Get(int64_t b, int64_t i) const { return values[At(b, i)]; }
  void Put(int64_t at, double x) {
    Store(dtype, bytes.get(), at, x);
    values[at] = Load(dtype, bytes.get(), at);
  }
  void Set(int64_t b, int64_t i, double x) { Put(At(b, i), x); }
  void Fill(double x) {
    for (int64_t i = 0; i < size(); ++i) Put(i, x);
  }
  Operand operand() const {
    Operand o;
    if (!present()) return o;
    o.data = bytes.get();
    o.dtype = dtype;
    o.batch = batch;
    return o;
  }
  Result result() const {
    Result r;
    if (!present()) return r;
    r.data = bytes.get();
    r.dtype = dtype;
    r.batch = batch;
    r.entries = entries;
    return r;
  }
};

// Bit d of `shared` gives batch dimension d the size 1.
Tensor MakeTensor(DType dtype, const std::vector<int64_t>& batch_shape, unsigned shared,
                  int64_t entry_size) {
  Tensor t;
  t.dtype = dtype;
  t.entry_size = entry_size;
  t.batch.rank = static_cast<int>(batch_shape.size());
  for (int d = t.batch.rank - 1; d >= 0; --d) {
    t.batch.sizes[d] = batch_shape[d];
    t.batch.strides[d] = (shared >> d) & 1 ? 0 : t.entries;
    if (!((shared >> d) & 1)) t.entries *= batch_shape[d];
  }
  t.bytes.reset(new char[t.size() * SizeOf(dtype)]);
  t.values.resize(t.size());
  return t;
}

// ---- Cases ----

struct Options {
  std::vector<int64_t> batch_shape;
  int64_t T = 1, S = 1, N = 1, K = 1, H = 8, Hv = 8;
  DType dtype = DType::kF32;
  bool is_causal = false;
  int64_t window_left = kUnbounded, window_right = kUnbounded;
  bool scale = false, soft_cap = false, offset = false, q_positions = false, kv_positions = false;
  bool q_lengths = false, kv_lengths = false, sinks = false, dlse = false;
  int num_segments = 0;         // 0: no segment ids
  bool sorted_segments = true;  // runs of equal ids, ids themselves in any order
  bool bias = false, mask = false, wants_dbias = false, wants_dsinks = false;
  DType bias_dtype = DType::kF32;
  bool bias_n = true, bias_t = true, bias_s = true;
  bool mask_n = true, mask_t = true, mask_s = true;
  double mask_density = 0.7;
  int64_t tile_rows = 0, tile_cols = 0;  // of a tile mask; 0: none
  bool dead_rows = false;                // the mask kills a few rows altogether
  unsigned share_q = 0, share_k = 0, share_bias = 0, share_mask = 0, share_ids = 0, share_sinks = 0;
  double magnitude = 1;  // of q and k
  int slots = 2;
  unsigned seed = 1;
  std::string name;
};

struct Case {
  Options options;
  Problem problem;
  int64_t batch = 1;
  Tensor q, k, v, bias, mask, scale, soft_cap, offset, q_positions, kv_positions, q_lengths,
      kv_lengths, q_ids, kv_ids, sinks, out, lse, dout, dlse;
  Tensor dq, dk, dv, dbias, dsinks;
  ScoreStrides bias_strides, mask_strides;
  Tensor mask_tiles, mask_bits;  // [N|1, tile rows, tile columns], [kPartialTiles, rows, cols / 8]
  std::vector<char> allowed;     // [batch, N, T, S]
};

ScoreStrides StridesOf(bool n, bool t, bool s, int64_t N, int64_t T, int64_t S) {
  ScoreStrides strides;
  const int64_t cols = s ? S : 1, rows = t ? T : 1, heads = n ? N : 1;
  strides.col = cols > 1 ? 1 : 0;
  strides.row = rows > 1 ? cols : 0;
  strides.head = heads > 1 ? rows * cols : 0;
  strides.entry = heads * rows * cols;
  return strides;
}

constexpr int64_t kPartialTiles = 3;

bool TileMaskKeeps(const Case& c, int64_t b, int64_t n, int64_t i, int64_t j) {
  const Options& o = c.options;
  const int64_t rows = o.tile_rows, cols = o.tile_cols;
  const int64_t line = (o.mask_n ? n : 0) * CeilDiv(o.T, rows) + i / rows;
  const int64_t tile =
      static_cast<int64_t>(c.mask_tiles.Get(b, line * CeilDiv(o.S, cols) + j / cols));
  if (tile < 2) return tile == 1;
  const int64_t bit = ((tile - 2) * rows + i % rows) * cols + j % cols;
  return static_cast<int>(c.mask_bits.Get(b, bit / 8)) >> (bit % 8) & 1;
}

// The contract's `allowed`, in two halves: isolation (length, segment) and the rest.
bool SameDocument(const Case& c, int64_t b, int64_t i, int64_t j) {
  if (c.q_lengths.present() && i >= c.q_lengths.Get(b, 0)) return false;
  if (c.kv_lengths.present() && j >= c.kv_lengths.Get(b, 0)) return false;
  return !c.q_ids.present() || c.q_ids.Get(b, i) == c.kv_ids.Get(b, j);
}

bool IsAllowed(const Case& c, int64_t b, int64_t n, int64_t i, int64_t j) {
  const Options& o = c.options;
  if (!SameDocument(c, b, i, j)) return false;
  const ScoreStrides& m = c.mask_strides;
  if (c.mask.present() && c.mask.Get(b, n * m.head + i * m.row + j * m.col) == 0) return false;
  if (c.mask_tiles.present() && !TileMaskKeeps(c, b, n, i, j)) return false;
  const double offset = c.offset.present() ? c.offset.Get(b, 0) : 0;
  const double qpos = c.q_positions.present() ? c.q_positions.Get(b, i) : i + offset;
  const double kpos = c.kv_positions.present() ? c.kv_positions.Get(b, j) : j;
  if (o.is_causal && kpos > qpos) return false;
  if (o.window_left < kUnbounded && kpos < qpos - o.window_left) return false;
  return !(o.window_right < kUnbounded && kpos > qpos + o.window_right);
}

bool Allowed(const Case& c, int64_t b, int64_t n, int64_t i, int64_t j) {
  const Options& o = c.options;
  return c.allowed[((b * o.N + n) * o.T + i) * o.S + j];
}

int64_t BiasAt(const Case& c, int64_t n, int64_t i, int64_t j) {
  return n * c.bias_strides.head + i * c.bias_strides.row + j * c.bias_strides.col;
}

struct Score {
  double s;           // after bias and soft cap
  double derivative;  // ds / d(scale * <q, k> + bias)
};

double ScaleOf(const Case& c, int64_t b) {
  return c.scale.present() ? c.scale.Get(b, 0) : 1 / std::sqrt(static_cast<double>(c.options.H));
}

Score ScoreOf(const Case& c, int64_t b, int64_t n, int64_t i, int64_t j) {
  const Options& o = c.options;
  const int64_t kh = n / (o.N / o.K);
  double dot = 0;
  for (int64_t h = 0; h < o.H; ++h)
    dot += c.q.Get(b, (i * o.N + n) * o.H + h) * c.k.Get(b, (j * o.K + kh) * o.H + h);
  double s = ScaleOf(c, b) * dot;
  if (c.bias.present()) s += c.bias.Get(b, BiasAt(c, n, i, j));
  if (!c.soft_cap.present()) return {s, 1};
  const double cap = c.soft_cap.Get(b, 0), t = std::tanh(s / cap);
  return {cap * t, 1 - t * t};
}

// Random values, with NaN wherever no pair of any batch entry that shares the row may look.
void FillOperands(Case* c) {
  const Options& o = c->options;
  std::mt19937 random(o.seed);
  std::normal_distribution<double> normal;
  const auto draw = [&](Tensor* t, double magnitude) {
    for (int64_t i = 0; i < t->size(); ++i) t->Put(i, magnitude * normal(random));
  };
  const auto integers = [&](Tensor* t, int64_t low, int64_t high) {
    for (int64_t i = 0; i < t->size(); ++i)
      t->Put(i, static_cast<double>(low + static_cast<int64_t>(random() % (high - low + 1))));
  };
  if (c->scale.present())
    for (int64_t i = 0; i < c->scale.size(); ++i) c->scale.Put(i, 0.2 + 0.1 * (i % 3));
  if (c->soft_cap.present())
    for (int64_t i = 0; i < c->soft_cap.size(); ++i) c->soft_cap.Put(i, 1.5 + i % 3);
  if (c->offset.present()) integers(&c->offset, -5, 20);
  if (c->q_positions.present()) integers(&c->q_positions, -3, o.T + 5);
  if (c->kv_positions.present()) integers(&c->kv_positions, -3, o.S + 5);
  if (c->q_lengths.present()) integers(&c->q_lengths, 0, o.T + 2);
  if (c->kv_lengths.present()) integers(&c->kv_lengths, 0, o.S + 2);
  const auto ids = [&](Tensor* t) {
    for (int64_t e = 0; e < t->entries; ++e) {
      int64_t id = 0;
      for (int64_t i = 0; i < t->entry_size; ++i) {
        const bool change =
            i == 0 || !o.sorted_segments || random() % t->entry_size < unsigned(o.num_segments);
        if (change) id = static_cast<int64_t>(random() % o.num_segments) * 7 - 9;
        t->Put(e * t->entry_size + i, static_cast<double>(id));
      }
    }
  };
  if (c->q_ids.present()) ids(&c->q_ids), ids(&c->kv_ids);
  if (c->mask.present()) {
    for (int64_t i = 0; i < c->mask.size(); ++i) {
      const bool dead = o.dead_rows && o.mask_t && o.mask_s && (i / o.S) % 5 == 2;
      c->mask.Put(i, !dead && random() % 1000 < 1000 * o.mask_density);
    }
  }
  if (c->mask_tiles.present()) {
    integers(&c->mask_tiles, 0, 1 + kPartialTiles), integers(&c->mask_bits, 0, 255);
  }
  draw(&c->q, o.magnitude), draw(&c->k, o.magnitude), draw(&c->v, 1), draw(&c->dout, 1);
  if (c->dlse.present()) draw(&c->dlse, 1);
  if (c->sinks.present()) draw(&c->sinks, 1);
  if (c->bias.present()) draw(&c->bias, 1);
}

void FindAllowed(Case* c) {
  const Options& o = c->options;
  c->allowed.clear();
  for (int64_t b = 0; b < c->batch; ++b)
    for (int64_t n = 0; n < o.N; ++n)
      for (int64_t i = 0; i < o.T; ++i)
        for (int64_t j = 0; j < o.S; ++j) c->allowed.push_back(IsAllowed(*c, b, n, i, j));
}

// Which rows some pair uses: q and dout rows by any allowed pair, k and v rows by any pair of one
// document.
void Poison(Case* c) {
  const Options& o = c->options;
  std::vector<char> q(c->q.entries * o.T * o.N), k(c->k.entries * o.S), row(c->batch * o.N * o.T);
  std::vector<char> bias(c->bias.present() ? c->bias.size() : 0);
  for (int64_t b = 0; b < c->batch; ++b)
    for (int64_t n = 0; n < o.N; ++n)
      for (int64_t i = 0; i < o.T; ++i)
        for (int64_t j = 0; j < o.S; ++j) {
          if (!SameDocument(*c, b, i, j)) continue;
          k[c->k.batch(b) * o.S + j] = 1;
          if (c->bias.present()) bias[c->bias.At(b, BiasAt(*c, n, i, j))] = 1;
          if (!Allowed(*c, b, n, i, j)) continue;
          q[(c->q.batch(b) * o.T + i) * o.N + n] = 1;
          row[(b * o.N + n) * o.T + i] = 1;
        }
  const auto poison = [](Tensor* t, const std::vector<char>& used, int64_t width) {
    for (int64_t i = 0; i < t->size(); ++i)
      if (!used[i / width]) t->Put(i, kNaN);
  };
  poison(&c->q, q, o.H);
  poison(&c->k, k, o.K * o.H);
  poison(&c->v, k, o.K * o.Hv);
  if (c->bias.present()) poison(&c->bias, bias, 1);
  for (int64_t b = 0; b < c->batch; ++b)
    for (int64_t n = 0; n < o.N; ++n)
      for (int64_t i = 0; i < o.T; ++i) {
        if (row[(b * o.N + n) * o.T + i]) continue;
        for (int64_t h = 0; h < o.Hv; ++h) c->dout.Set(b, (i * o.N + n) * o.Hv + h, kNaN);
        // The cotangent of a row's lse matters as long as a sink takes part in it.
        const bool in_length = !c->q_lengths.present() || i < c->q_lengths.Get(b, 0);
        if (c->dlse.present() && !(in_length && c->sinks.present()))
          c->dlse.Set(b, n * o.T + i, kNaN);
      }
}

// Fills `out` and `lse` as the forward would.
void ReferenceForward(Case* c) {
  const Options& o = c->options;
  std::vector<double> s(o.S), acc(o.Hv);
  for (int64_t b = 0; b < c->batch; ++b)
    for (int64_t n = 0; n < o.N; ++n)
      for (int64_t i = 0; i < o.T; ++i) {
        const bool in_length = !c->q_lengths.present() || i < c->q_lengths.Get(b, 0);
        const double sink = c->sinks.present() ? c->sinks.Get(b, n) : -kInf;
        double max = sink;
        for (int64_t j = 0; j < o.S; ++j) {
          s[j] = Allowed(*c, b, n, i, j) ? ScoreOf(*c, b, n, i, j).s : -kInf;
          max = std::max(max, s[j]);
        }
        double sum = max == -kInf ? 0 : std::exp(sink - max);
        acc.assign(o.Hv, 0);
        for (int64_t j = 0; j < o.S; ++j) {
          if (s[j] == -kInf) continue;
          const double p = std::exp(s[j] - max);
          sum += p;
          for (int64_t h = 0; h < o.Hv; ++h)
            acc[h] += p * c->v.Get(b, (j * o.K + n / (o.N / o.K)) * o.Hv + h);
        }
        const double lse = max == -kInf ? -kInf : max + std::log(sum);
        c->lse.Set(b, n * o.T + i, in_length ? lse : kNaN);
        for (int64_t h = 0; h < o.Hv; ++h)
          c->out.Set(b, (i * o.N + n) * o.Hv + h, !in_length ? kNaN : sum > 0 ? acc[h] / sum : 0);
      }
}

struct Gradients {
  std::vector<double> dq, dk, dv, dbias, dsinks;
};

// The definition, one pair at a time; `out` and `lse` are the rounded ones that the kernel gets
// too.
Gradients ReferenceBackward(const Case& c) {
  const Options& o = c.options;
  Gradients g;
  g.dq.assign(c.dq.size(), 0), g.dk.assign(c.dk.size(), 0), g.dv.assign(c.dv.size(), 0);
  g.dbias.assign(c.dbias.present() ? c.dbias.size() : 0, 0);
  g.dsinks.assign(c.dsinks.present() ? c.dsinks.size() : 0, 0);
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t n = 0; n < o.N; ++n)
      for (int64_t i = 0; i < o.T; ++i) {
        if (c.q_lengths.present() && i >= c.q_lengths.Get(b, 0)) continue;
        const int64_t kh = n / (o.N / o.K), qrow = (i * o.N + n) * o.H, orow = (i * o.N + n) * o.Hv;
        bool any = false;
        for (int64_t j = 0; j < o.S; ++j) any |= Allowed(c, b, n, i, j);
        double delta = 0;
        for (int64_t h = 0; any && h < o.Hv; ++h)
          delta += c.out.Get(b, orow + h) * c.dout.Get(b, orow + h);
        if (c.dlse.present() && (any || c.sinks.present())) delta -= c.dlse.Get(b, n * o.T + i);
        const double lse = c.lse.Get(b, n * o.T + i);
        if (c.dsinks.present())
          g.dsinks[c.dsinks.At(b, n)] -= std::exp(c.sinks.Get(b, n) - lse) * delta;
        for (int64_t j = 0; j < o.S; ++j) {
          if (!Allowed(c, b, n, i, j)) continue;
          const int64_t krow = (j * o.K + kh) * o.H, vrow = (j * o.K + kh) * o.Hv;
          const Score score = ScoreOf(c, b, n, i, j);
          const double p = std::exp(score.s - lse);
          double dp = 0;
          for (int64_t h = 0; h < o.Hv; ++h) {
            dp += c.dout.Get(b, orow + h) * c.v.Get(b, vrow + h);
            g.dv[c.dv.At(b, vrow + h)] += p * c.dout.Get(b, orow + h);
          }
          const double ds = p * (dp - delta) * score.derivative;
          if (c.dbias.present()) g.dbias[c.dbias.At(b, BiasAt(c, n, i, j))] += ds;
          for (int64_t h = 0; h < o.H; ++h) {
            g.dq[c.dq.At(b, qrow + h)] += ScaleOf(c, b) * ds * c.k.Get(b, krow + h);
            g.dk[c.dk.At(b, krow + h)] += ScaleOf(c, b) * ds * c.q.Get(b, qrow + h);
          }
        }
      }
  return g;
}

Case MakeCase(const Options& o) {
  Case c;
  c.options = o;
  for (int64_t size : o.batch_shape) c.batch *= size;
  const DType acc = AccumulatorOf(o.dtype);
  const auto tensor = [&](DType dtype, unsigned shared, int64_t size) {
    return MakeTensor(dtype, o.batch_shape, shared, size);
  };
  c.bias_strides = StridesOf(o.bias_n, o.bias_t, o.bias_s, o.N, o.T, o.S);
  c.mask_strides = StridesOf(o.mask_n, o.mask_t, o.mask_s, o.N, o.T, o.S);
  c.q = tensor(o.dtype, o.share_q, o.T * o.N * o.H);
  c.k = tensor(o.dtype, o.share_k, o.S * o.K * o.H);
  c.v = tensor(o.dtype, o.share_k, o.S * o.K * o.Hv);
  if (o.bias) c.bias = tensor(o.bias_dtype, o.share_bias, c.bias_strides.entry);
  if (o.mask) c.mask = tensor(DType::kBool, o.share_mask, c.mask_strides.entry);
  if (o.tile_rows > 0) {
    c.mask_tiles =
        tensor(DType::kS32, o.share_mask,
               (o.mask_n ? o.N : 1) * CeilDiv(o.T, o.tile_rows) * CeilDiv(o.S, o.tile_cols));
    c.mask_bits = tensor(DType::kU8, o.share_ids, kPartialTiles * o.tile_rows * o.tile_cols / 8);
  }
  if (o.scale) c.scale = tensor(acc, o.share_ids, 1);
  if (o.soft_cap) c.soft_cap = tensor(acc, o.share_ids, 1);
  if (o.offset) c.offset = tensor(DType::kS32, o.share_ids, 1);
  if (o.q_positions) c.q_positions = tensor(DType::kS32, o.share_ids, o.T);
  if (o.kv_positions)
    c.kv_positions = tensor(o.seed % 2 ? DType::kS64 : DType::kS32, o.share_ids, o.S);
  if (o.q_lengths) c.q_lengths = tensor(DType::kS32, 0, 1);
  if (o.kv_lengths) c.kv_lengths = tensor(DType::kS32, 0, 1);
  if (o.num_segments)
    c.q_ids = tensor(DType::kS32, o.share_ids, o.T),
    c.kv_ids = tensor(DType::kS32, o.share_ids, o.S);
  if (o.sinks) c.sinks = tensor(acc, o.share_sinks, o.N);
  c.out = tensor(o.dtype, 0, o.T * o.N * o.Hv);
  c.lse = tensor(acc, 0, o.N * o.T);
  c.dout = tensor(o.dtype, 0, o.T * o.N * o.Hv);
  if (o.dlse) c.dlse = tensor(acc, 0, o.N * o.T);
  c.dq = tensor(o.dtype, 0, o.T * o.N * o.H);
  c.dk = tensor(o.dtype, 0, o.S * o.K * o.H);
  c.dv = tensor(o.dtype, 0, o.S * o.K * o.Hv);
  if (o.bias && o.wants_dbias) c.dbias = tensor(o.bias_dtype, o.share_bias, c.bias_strides.entry);
  if (o.sinks && o.wants_dsinks) c.dsinks = tensor(acc, o.share_sinks, o.N);

  Problem& p = c.problem;
  p.pass = Pass::kBackward;
  p.dtype = o.dtype;
  p.bias_dtype = o.bias ? o.bias_dtype : DType::kAbsent;
  p.batch_shape = o.batch_shape;
  p.batch = c.batch;
  p.seqlen_q = o.T, p.seqlen_kv = o.S, p.num_q_heads = o.N, p.num_kv_heads = o.K;
  p.head_dim = o.H, p.head_dim_v = o.Hv;
  p.is_causal = o.is_causal, p.window_left = o.window_left, p.window_right = o.window_right;
  p.has_tile_mask = o.tile_rows > 0, p.tile_rows = o.tile_rows, p.tile_cols = o.tile_cols;
  p.num_mask_heads = o.mask_n ? o.N : 1, p.num_partial_tiles = kPartialTiles;
  p.has_bias = o.bias, p.has_mask = o.mask, p.has_logits_soft_cap = o.soft_cap,
  p.has_query_offset = o.offset;
  p.has_positions = o.q_positions || o.kv_positions;
  p.has_seq_lengths = o.q_lengths || o.kv_lengths;
  p.has_segment_ids = o.num_segments > 0;
  p.has_sinks = o.sinks, p.has_dlse = o.dlse;
  p.wants_dbias = c.dbias.present(), p.wants_dsinks = c.dsinks.present();
  p.deterministic = true;
  const auto shape = [&](unsigned shared, std::vector<int64_t> tail) {
    std::vector<int64_t> all = o.batch_shape;
    for (size_t d = 0; d < all.size(); ++d)
      if ((shared >> d) & 1) all[d] = 1;
    all.insert(all.end(), tail.begin(), tail.end());
    return all;
  };
  const std::vector<int64_t> tail = {o.bias_n ? o.N : 1, o.bias_t ? o.T : 1, o.bias_s ? o.S : 1};
  if (o.bias) p.bias_shape = shape(o.share_bias, tail);
  if (p.wants_dbias) p.dbias_shape = p.bias_shape;
  if (p.wants_dsinks) p.dsinks_shape = shape(o.share_sinks, {o.N});

  FillOperands(&c);
  FindAllowed(&c);
  Poison(&c);
  ReferenceForward(&c);
  return c;
}

Operands OperandsOf(const Case& c) {
  Operands x;
  x.q = c.q.operand(), x.k = c.k.operand(), x.v = c.v.operand();
  x.bias = c.bias.operand(), x.mask = c.mask.operand();
  x.mask_tiles = c.mask_tiles.operand(), x.mask_bits = c.mask_bits.operand();
  x.scale = c.scale.operand(), x.logits_soft_cap = c.soft_cap.operand(),
  x.query_offset = c.offset.operand();
  x.q_positions = c.q_positions.operand(), x.kv_positions = c.kv_positions.operand();
  x.q_seq_lengths = c.q_lengths.operand(), x.kv_seq_lengths = c.kv_lengths.operand();
  x.q_segment_ids = c.q_ids.operand(), x.kv_segment_ids = c.kv_ids.operand();
  x.sinks = c.sinks.operand(), x.bias_strides = c.bias_strides, x.mask_strides = c.mask_strides;
  x.saved_out = c.out.operand(), x.saved_lse = c.lse.operand();
  x.dout = c.dout.operand(), x.dlse = c.dlse.operand();
  x.dq = c.dq.result(), x.dk = c.dk.result(), x.dv = c.dv.result();
  x.dbias = c.dbias.result(), x.dsinks = c.dsinks.result();
  return x;
}

// ---- Running ----

// Threads of its own; tasks are handed out in order, so that any interleaving may happen.
class ThreadWorkers : public Workers {
 public:
  explicit ThreadWorkers(int slots) : slots_(slots) {}
  int num_slots() const override { return slots_; }
  void Run(int64_t num_tasks, const std::function<void(int64_t, int)>& body) override {
    std::atomic<int64_t> next{0};
    const auto work = [&](int slot) {
      for (int64_t task; (task = next.fetch_add(1)) < num_tasks;) body(task, slot);
    };
    std::vector<std::thread> threads;
    for (int slot = 1; slot < slots_ && slot < num_tasks; ++slot) threads.emplace_back(work, slot);
    work(0);
    for (std::thread& thread : threads) thread.join();
  }

 private:
  int slots_;
};

// One task after another, the last one first.
class ReverseWorkers : public Workers {
 public:
  explicit ReverseWorkers(int slots) : slots_(slots) {}
  int num_slots() const override { return slots_; }
  void Run(int64_t num_tasks, const std::function<void(int64_t, int)>& body) override {
    for (int64_t task = num_tasks - 1; task >= 0; --task) body(task, slots_ - 1);
  }

 private:
  int slots_;
};

std::vector<cpu::Isa> RunnableIsas() {
  std::vector<cpu::Isa> isas;
  for (cpu::Isa isa : cpu::kAllIsas) {
    if (cpu::CanRun(isa)) isas.push_back(isa);
  }
  return isas;
}

// One call with poisoned results and workspace. The workspace may be sized for another machine than
// the one it runs on, as in an exported program.
Status RunCase(Case* c, int sized_for, Workers* workers, cpu::Isa isa) {
  Device device;
  device.num_workers = sized_for;
  CHECK(kCpuBackward.refusal(c->problem, device).empty());
  const int64_t bytes = kCpuBackward.workspace_bytes(c->problem, device);
  std::unique_ptr<char[]> storage(new char[bytes + 64]);
  std::memset(storage.get(), 0xff, bytes + 64);
  Launch launch;
  launch.workers = workers;
  launch.workspace =
      reinterpret_cast<void*>(RoundUp(reinterpret_cast<intptr_t>(storage.get()), 64));
  launch.workspace_bytes = bytes;
  for (Tensor* t : {&c->dq, &c->dk, &c->dv, &c->dbias, &c->dsinks})
    if (t->present()) t->Fill(kNaN);
  return cpu::RunBackward(isa, c->problem, OperandsOf(*c), launch);
}

Status RunCase(Case* c, int slots, cpu::Isa isa) {
  ThreadWorkers workers(slots);
  return RunCase(c, slots, &workers, isa);
}

std::vector<char> Bytes(const Case& c) {
  std::vector<char> all;
  for (const Tensor* t : {&c.dq, &c.dk, &c.dv, &c.dbias, &c.dsinks})
    if (t->present())
      all.insert(all.end(), t->bytes.get(), t->bytes.get() + t->size() * SizeOf(t->dtype));
  return all;
}

double RoundingOf(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return 1.0 / 256;
    case DType::kF16:
      return 1.0 / 2048;
    case DType::kF32:
      return 1.2e-7;
    default:
      return 2.3e-16;
  }
}

// Within the accumulator's error, relative to the largest element, and one rounding of the result.
bool Near(const Tensor& got, const std::vector<double>& want, DType acc, const char* what,
          const Case& c) {
  if (!got.present()) return true;
  double largest = 1;
  for (double x : want) largest = std::max(largest, std::fabs(x));
  const double absolute =
      (acc == DType::kF64 ? 1e-13 : 1e-5) * largest * std::max(1.0, c.options.magnitude);
  for (int64_t i = 0; i < got.size(); ++i) {
    const double x = Load(got.dtype, got.bytes.get(), i);
    if (std::fabs(x - want[i]) <= absolute + RoundingOf(got.dtype) * std::fabs(want[i])) continue;
    std::printf("%s: %s[%lld] is %.9g, expected %.9g\n", c.options.name.c_str(), what,
                static_cast<long long>(i), x, want[i]);
    return false;
  }
  return true;
}

void CheckGradients(const Case& c, const Gradients& want) {
  const DType acc = AccumulatorOf(c.options.dtype);
  CHECK(Near(c.dq, want.dq, acc, "dq", c));
  CHECK(Near(c.dk, want.dk, acc, "dk", c));
  CHECK(Near(c.dv, want.dv, acc, "dv", c));
  CHECK(Near(c.dbias, want.dbias, acc, "dbias", c));
  CHECK(Near(c.dsinks, want.dsinks, acc, "dsinks", c));
}

void Verify(const Options& options) {
  Case c = MakeCase(options);
  const Gradients want = ReferenceBackward(c);
  ReverseWorkers reverse(options.slots);
  for (cpu::Isa isa : RunnableIsas()) {
    c.options.name = options.name + " seed " + std::to_string(options.seed) + " " + cpu::Name(isa);
    CHECK(RunCase(&c, options.slots, isa).ok());
    CheckGradients(c, want);
    // Bitwise the same again, and in whatever order the tasks run.
    const std::vector<char> first = Bytes(c);
    CHECK(RunCase(&c, options.slots, isa).ok());
    CHECK(Bytes(c) == first);
    CHECK(RunCase(&c, options.slots, &reverse, isa).ok());
    CHECK(Bytes(c) == first);
  }
}

// ---- Tests ----

Options RandomOptions(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  const auto one_in = [&](int n) { return below(n) == 0; };
  Options o;
  o.seed = seed;
  o.name = "random";
  const std::vector<int64_t> shapes[] = {{}, {1}, {3}, {2, 2}, {2, 1, 3}};
  o.batch_shape = shapes[below(5)];
  const int64_t lengths[] = {0, 1, 2, 7, 16, 33, 61, 97, 130, 201};
  o.T = lengths[one_in(8) ? below(3) : 1 + below(9)];
  o.S = lengths[one_in(8) ? below(3) : 1 + below(9)];
  o.K = 1 + below(2);
  o.N = o.K * (1 + below(3));
  const int64_t dims[] = {1, 5, 8, 16, 24, 40, 64};
  o.H = dims[below(7)];
  o.Hv = one_in(2) ? o.H : dims[below(7)];
  const DType types[] = {DType::kF32, DType::kF64, DType::kBF16, DType::kF16};
  o.dtype = types[below(4)];
  o.is_causal = one_in(2);
  if (one_in(3)) o.window_left = below(40) - 3;
  if (one_in(4)) o.window_right = below(40) - 3;
  o.scale = one_in(2), o.soft_cap = one_in(3), o.offset = one_in(3);
  o.q_positions = one_in(4), o.kv_positions = one_in(4);
  o.q_lengths = one_in(4), o.kv_lengths = one_in(4), o.sinks = one_in(3), o.dlse = one_in(2);
  o.num_segments = one_in(2) ? 1 + below(12) : 0;
  o.sorted_segments = one_in(2);
  o.bias = one_in(2), o.wants_dbias = !one_in(4), o.wants_dsinks = !one_in(4);
  o.bias_dtype = types[below(4)];
  o.bias_n = one_in(2), o.bias_t = !one_in(3), o.bias_s = !one_in(3);
  o.mask = one_in(3), o.mask_n = one_in(2), o.mask_t = !one_in(3), o.mask_s = !one_in(3);
  o.mask_density = one_in(3) ? 0.02 : 0.7;
  if (!o.mask && one_in(4)) o.tile_rows = 1 + below(60), o.tile_cols = 8 * (1 + below(8));
  o.dead_rows = one_in(2);
  for (unsigned* share :
       {&o.share_q, &o.share_k, &o.share_bias, &o.share_mask, &o.share_ids, &o.share_sinks})
    *share = one_in(3) ? static_cast<unsigned>(below(8)) : 0;
  o.slots = 1 + below(5);
  return o;
}

void TestRandomCombinations(unsigned count) {
  for (unsigned seed = 1; seed <= count; ++seed) Verify(RandomOptions(seed));
}

void TestDense() {
  for (DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16})
    for (bool causal : {false, true}) {
      Options o;
      o.name = std::string("dense ") + Name(dtype);
      o.batch_shape = {2};
      o.T = 210, o.S = 233, o.N = 2, o.K = 1, o.H = 72, o.Hv = 40;
      o.dtype = dtype, o.is_causal = causal;
      Verify(o);
    }
}

// Every broadcast shape of the bias, with batch dimensions shared or not, and more slots than units
// of work.
void TestBiasShapes() {
  for (unsigned shape = 0; shape < 8; ++shape)
    for (unsigned share : {0u, 1u, 2u, 3u})
      for (int segments : {0, 4}) {
        Options o;
        o.name = "bias shape " + std::to_string(shape) + " shared " + std::to_string(share);
        o.seed = 8 * shape + share;
        o.batch_shape = {2, 2};
        o.T = 50, o.S = 300, o.N = 2, o.K = 2, o.H = 8, o.Hv = 8;
        o.bias = o.wants_dbias = true;
        o.bias_n = shape & 1, o.bias_t = shape & 2, o.bias_s = shape & 4;
        o.share_bias = share;
        o.bias_dtype = share == 1 ? DType::kBF16 : DType::kF32;
        o.num_segments = segments, o.sorted_segments = false;
        o.slots = 7;
        Verify(o);
      }
}

// lse lies far below -88 here: a tail that is computed with zero padding would overflow.
void TestFarBelowZero() {
  Options o;
  o.name = "q = +4, k = -4";
  o.T = 37, o.S = 45, o.H = 64, o.Hv = 64;
  o.magnitude = 4;
  Case c = MakeCase(o);
  c.q.Fill(4), c.k.Fill(-4);
  ReferenceForward(&c);
  const Gradients want = ReferenceBackward(c);
  for (cpu::Isa isa : RunnableIsas()) {
    CHECK(RunCase(&c, 2, isa).ok());
    CHECK(Near(c.dq, want.dq, DType::kF32, "dq", c) && Near(c.dv, want.dv, DType::kF32, "dv", c));
  }
}

void TestAllOnes() {
  Options o;
  o.name = "all ones";
  o.T = 50, o.S = 20, o.H = 16, o.Hv = 16;
  Case c = MakeCase(o);
  for (Tensor* t : {&c.q, &c.k, &c.v, &c.dout}) t->Fill(1);
  ReferenceForward(&c);
  for (cpu::Isa isa : RunnableIsas()) {
    CHECK(RunCase(&c, 2, isa).ok());
    CHECK(Near(c.dv, std::vector<double>(c.dv.size(), 2.5), DType::kF32, "dv", c));
    CHECK(Near(c.dq, std::vector<double>(c.dq.size(), 0), DType::kF32, "dq", c));
  }
}

// A NaN that a row legitimately sees reaches its gradients.
void TestNaNPropagates() {
  Options o;
  o.name = "NaN";
  o.T = 40, o.S = 40, o.H = 16, o.Hv = 16;
  Case c = MakeCase(o);
  c.k.Set(0, 3 * o.H, kNaN);
  for (cpu::Isa isa : RunnableIsas()) {
    CHECK(RunCase(&c, 2, isa).ok());
    CHECK(std::isnan(c.dq.Get(0, 0)) && std::isnan(c.dk.Get(0, 3 * o.H)) &&
          std::isnan(c.dv.Get(0, 3 * o.Hv)));
  }
}

// A row whose bias is -inf everywhere has nothing to attend, whatever its cotangents hold.
void TestMinusInfinityBias() {
  Options o;
  o.name = "bias -inf";
  o.T = 40, o.S = 30, o.H = 16, o.Hv = 16;
  o.bias = o.wants_dbias = o.dlse = true;
  Case c = MakeCase(o);
  for (int64_t i = 0; i < o.T; i += 3) {
    for (int64_t j = 0; j < o.S; ++j) {
      c.bias.Set(0, i * o.S + j, -kInf);
      c.allowed[i * o.S + j] = 0;
    }
    c.dlse.Set(0, i, kNaN);
  }
  ReferenceForward(&c);
  const Gradients want = ReferenceBackward(c);
  for (cpu::Isa isa : RunnableIsas()) {
    CHECK(RunCase(&c, 2, isa).ok());
    CheckGradients(c, want);
  }
}

// An exported program: the workspace was sized where it was compiled.
void TestWorkspaceOfAnotherMachine() {
  Options o;
  o.name = "another machine";
  o.T = 260, o.S = 700, o.H = 16, o.Hv = 16;
  Case c = MakeCase(o);
  const Gradients want = ReferenceBackward(c);
  for (int sized_for : {1, 2, 3, 9})
    for (int slots : {1, 2, 8}) {
      ThreadWorkers workers(slots);
      CHECK(RunCase(&c, sized_for, &workers, cpu::BestIsa()).ok());
      CHECK(Near(c.dq, want.dq, DType::kF32, "dq", c) && Near(c.dk, want.dk, DType::kF32, "dk", c));
    }
}

void TestManyTinyDocuments() {
  Options o;
  o.name = "one-token documents";
  o.T = o.S = 600, o.N = o.K = 2, o.H = o.Hv = 8;
  o.num_segments = 5000, o.sorted_segments = false;
  Verify(o);
  o.name = "many batch entries";
  o.batch_shape = {3000};
  o.T = 1, o.S = 2, o.num_segments = 0;
  Verify(o);
}

void TestRefusals() {
  Options o;
  const Case c = MakeCase(o);
  Device device;
  device.platform = Platform::kCuda;
  CHECK(kCpuBackward.refusal(c.problem, device).find("CPU only") != std::string::npos);
  Problem problem = c.problem;
  problem.dtype = DType::kS32;
  CHECK(!kCpuBackward.refusal(problem, Device()).empty());
}

}  // namespace
}  // namespace jax_fmha

int main(int argc, char** argv) {
  using namespace jax_fmha;
  TestRefusals();
  TestDense();
  TestBiasShapes();
  TestFarBelowZero();
  TestAllOnes();
  TestNaNPropagates();
  TestMinusInfinityBias();
  TestWorkspaceOfAnotherMachine();
  TestManyTinyDocuments();
  TestRandomCombinations(argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 150);
  return test::Summary("cpu_backward_test");
}
