// The CPU forward and decode kernels against a naive double reference, on random combinations of
// every option, with every instruction set that this machine can run.
//
// Everything that must not be read is NaN: outputs and workspace before the call, rows past a
// length, keys of segments without queries. Operands drop random batch dimensions, as vmap makes
// them do.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cc/cpu/forward.h"
#include "cc/cpu/isa.h"
#include "cc/cpu/kernels.h"
#include "cc/tests/check.h"

namespace jax_fmha {
namespace {

using Bytes = std::vector<unsigned char>;

// ---- storage ----

float FromBF16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}
uint16_t ToBF16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
double FromF16(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 31) return mantissa != 0 ? std::nan("") : sign * INFINITY;
  return sign *
         (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}
uint16_t ToF16(double x) {  // of moderate size
  if (x != x) return 0x7e00;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  x = std::fabs(x);
  int exponent;
  std::frexp(x, &exponent);  // x < 2^exponent
  exponent = std::max(exponent, -13);
  const long mantissa = std::lrint(std::ldexp(x, 11 - exponent));
  return static_cast<uint16_t>(sign | (mantissa + ((exponent + 13) << 10)));
}

double Read(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kF64:
      return static_cast<const double*>(data)[i];
    case DType::kF32:
      return static_cast<const float*>(data)[i];
    case DType::kBF16:
      return FromBF16(static_cast<const uint16_t*>(data)[i]);
    case DType::kF16:
      return FromF16(static_cast<const uint16_t*>(data)[i]);
    case DType::kS64:
      return static_cast<double>(static_cast<const int64_t*>(data)[i]);
    case DType::kS32:
      return static_cast<const int32_t*>(data)[i];
    default:
      return static_cast<const uint8_t*>(data)[i];
  }
}
void Write(void* data, DType dtype, int64_t i, double x) {
  switch (dtype) {
    case DType::kF64:
      static_cast<double*>(data)[i] = x;
      break;
    case DType::kF32:
      static_cast<float*>(data)[i] = static_cast<float>(x);
      break;
    case DType::kBF16:
      static_cast<uint16_t*>(data)[i] = ToBF16(static_cast<float>(x));
      break;
    case DType::kF16:
      static_cast<uint16_t*>(data)[i] = ToF16(x);
      break;
    case DType::kS64:
      static_cast<int64_t*>(data)[i] = static_cast<int64_t>(x);
      break;
    case DType::kS32:
      static_cast<int32_t*>(data)[i] = static_cast<int32_t>(x);
      break;
    case DType::kU8:
      static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(x);
      break;
    default:
      static_cast<uint8_t*>(data)[i] = x != 0;
  }
}

// ---- pools ----

class Serial : public Workers {
 public:
  int num_slots() const override { return 1; }
  void Run(int64_t num_tasks, const std::function<void(int64_t, int)>& body) override {
    for (int64_t task = 0; task < num_tasks; ++task) body(task, 0);
  }
};

class Threads : public Workers {
 public:
  explicit Threads(int n) : n_(n) {}
  int num_slots() const override { return n_; }
  void Run(int64_t num_tasks, const std::function<void(int64_t, int)>& body) override {
    std::atomic<int64_t> next{0};
    std::vector<std::thread> threads;
    for (int slot = 0; slot < n_; ++slot) {
      threads.emplace_back([&, slot] {
        for (int64_t task; (task = next++) < num_tasks;) body(task, slot);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  int n_;
};

// ---- a call with all its data ----

struct Case {
  Problem p;
  Operands x;
  std::vector<Bytes> storage;  // of the operands
  Bytes out, lse;

  Case() = default;
  Case(const Case&) = delete;
};

class Maker {
 public:
  explicit Maker(uint64_t seed) : random_(seed) {}

  int64_t Int(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random_() % static_cast<uint64_t>(high - low + 1));
  }
  bool Chance(double p) { return static_cast<double>(random_() >> 11) * 0x1p-53 < p; }
  double Normal() { return normal_(random_); }

  // An operand of `entry` elements per batch entry that keeps or drops each batch dimension.
  Operand Make(Case* c, DType dtype, int64_t entry, bool may_share,
               const std::function<double(int64_t)>& value) {
    Operand operand;
    operand.dtype = dtype;
    operand.batch.rank = static_cast<int>(c->p.batch_shape.size());
    int64_t entries = 1;
    for (int d = operand.batch.rank - 1; d >= 0; --d) {
      operand.batch.sizes[d] = c->p.batch_shape[d];
      const bool shared = may_share && Chance(0.3);
      operand.batch.strides[d] = shared ? 0 : entries;
      if (!shared) entries *= c->p.batch_shape[d];
    }
    // Never null, also when empty; else exactly as large as needed, for the address sanitizer.
    Bytes bytes(std::max<int64_t>(entries * entry * SizeOf(dtype), 1));
    for (int64_t i = 0; i < entries * entry; ++i)
      Write(bytes.data(), dtype, i, value(i % std::max<int64_t>(entry, 1)));
    c->storage.push_back(std::move(bytes));
    operand.data = c->storage.back().data();
    return operand;
  }

 private:
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
};

void MakeResults(Case* c) {
  const Problem& p = c->p;
  const auto make = [&](Bytes* bytes, DType dtype, int64_t entry) {
    bytes->assign(std::max<int64_t>(p.batch * entry * SizeOf(dtype), 1),
                  0xff);  // NaN of every type
    Result result;
    result.data = bytes->data();
    result.dtype = dtype;
    result.entries = p.batch;
    result.batch.rank = static_cast<int>(p.batch_shape.size());
    int64_t stride = 1;
    for (int d = result.batch.rank - 1; d >= 0; --d) {
      result.batch.sizes[d] = p.batch_shape[d];
      result.batch.strides[d] = stride;
      stride *= p.batch_shape[d];
    }
    return result;
  };
  c->x.out = make(&c->out, p.dtype, p.seqlen_q * p.num_q_heads * p.head_dim_v);
  c->x.lse = make(&c->lse, AccumulatorOf(p.dtype), p.num_q_heads * p.seqlen_q);
}

struct Sizes {
  int64_t seqlen_q, seqlen_kv, kv_heads, group, head_dim, head_dim_v;
  std::vector<int64_t> batch_shape;
};

ScoreStrides MakeStrides(Maker* m, const Problem& p, ScoreStrides* shape) {
  shape->head = m->Chance(0.5) ? p.num_q_heads : 1;
  shape->row = m->Chance(0.6) ? p.seqlen_q : 1;
  shape->col = m->Chance(0.8) ? p.seqlen_kv : 1;
  ScoreStrides s;
  s.col = shape->col == 1 ? 0 : 1;
  s.row = shape->row == 1 ? 0 : shape->col;
  s.head = shape->head == 1 ? 0 : shape->row * shape->col;
  s.entry = shape->head * shape->row * shape->col;
  return s;
}

// Segment ids: ascending runs, shuffled runs, or no order at all; a few ids in all.
std::function<double(int64_t)> SegmentIds(Maker* m, std::vector<double>* ids, int64_t rows) {
  const int64_t style = m->Int(0, 2);
  ids->resize(rows);
  double id = static_cast<double>(m->Int(-2, 1));
  for (double& at : *ids) {
    if (style == 2 || m->Chance(0.15))
      id = style == 0 ? id + 1 : static_cast<double>(m->Int(-3, 4));
    at = id;
  }
  return [ids](int64_t i) { return (*ids)[i]; };
}

void Fill(Maker* m, Case* c, const Sizes& sizes, DType dtype, double options) {
  Problem& p = c->p;
  Operands& x = c->x;
  p.dtype = dtype;
  p.batch_shape = sizes.batch_shape;
  for (int64_t n : sizes.batch_shape) p.batch *= n;
  p.seqlen_q = sizes.seqlen_q;
  p.seqlen_kv = sizes.seqlen_kv;
  p.num_kv_heads = sizes.kv_heads;
  p.num_q_heads = sizes.kv_heads * sizes.group;
  p.head_dim = sizes.head_dim;
  p.head_dim_v = sizes.head_dim_v;
  const DType accumulator = AccumulatorOf(dtype);
  const auto normal = [m](int64_t) { return m->Normal(); };

  x.q = m->Make(c, dtype, p.seqlen_q * p.num_q_heads * p.head_dim, true, normal);
  x.k = m->Make(c, dtype, p.seqlen_kv * p.num_kv_heads * p.head_dim, true, normal);
  x.v = m->Make(c, dtype, p.seqlen_kv * p.num_kv_heads * p.head_dim_v, true, normal);
  const double scale =
      m->Chance(0.2) ? -0.3 : 1 / std::sqrt(std::max<double>(static_cast<double>(p.head_dim), 1));
  x.scale =
      m->Make(c, accumulator, 1, true, [&](int64_t) { return scale * (m->Chance(0.5) ? 1 : 0.5); });

  p.is_causal = m->Chance(options);
  if (m->Chance(options)) p.window_left = m->Int(-5, 40);
  if (m->Chance(options / 2)) p.window_right = m->Int(-5, 40);
  const auto int_type = [m] { return m->Chance(0.5) ? DType::kS32 : DType::kS64; };
  if (m->Chance(options)) {
    p.has_query_offset = true;
    x.query_offset = m->Make(c, int_type(), 1, true, [m](int64_t) { return m->Int(-20, 60); });
  }
  const auto positions = [&](int64_t rows) {
    const bool huge = m->Chance(0.2);  // beyond 32 bits, so that differences need 64
    return m->Make(c, huge ? DType::kS64 : int_type(), rows, true, [=](int64_t i) {
      if (huge) return static_cast<double>(m->Int(-4, 4)) * 1e12 + static_cast<double>(i);
      return static_cast<double>(m->Int(-10, 10) + i);
    });
  };
  if (m->Chance(options / 2)) x.q_positions = positions(p.seqlen_q);
  if (m->Chance(options / 2)) x.kv_positions = positions(p.seqlen_kv);
  p.has_positions = x.q_positions || x.kv_positions;
  if (m->Chance(options)) {
    p.has_seq_lengths = true;
    x.q_seq_lengths =
        m->Make(c, int_type(), 1, true, [&](int64_t) { return m->Int(-1, p.seqlen_q + 2); });
  }
  if (m->Chance(options)) {
    p.has_seq_lengths = true;
    x.kv_seq_lengths =
        m->Make(c, int_type(), 1, true, [&](int64_t) { return m->Int(-1, p.seqlen_kv + 2); });
  }
  if (m->Chance(options)) {
    p.has_segment_ids = true;
    std::vector<double> q_ids, kv_ids;
    x.q_segment_ids = m->Make(c, int_type(), p.seqlen_q, true, SegmentIds(m, &q_ids, p.seqlen_q));
    x.kv_segment_ids =
        m->Make(c, int_type(), p.seqlen_kv, true, SegmentIds(m, &kv_ids, p.seqlen_kv));
  }
  ScoreStrides shape;
  if (m->Chance(options)) {
    p.has_mask = true;
    x.mask_strides = MakeStrides(m, p, &shape);
    const double density = m->Chance(0.3) ? 1 : m->Chance(0.2) ? 0 : 0.7;
    x.mask = m->Make(c, DType::kBool, x.mask_strides.entry, true,
                     [=](int64_t) { return m->Chance(density); });
  }
  if (m->Chance(options)) {
    const DType types[] = {DType::kF16, DType::kBF16, DType::kF32, DType::kF64};
    p.has_bias = true;
    p.bias_dtype = types[m->Int(0, 3)];
    x.bias_strides = MakeStrides(m, p, &shape);
    const double size = m->Chance(0.1) ? 1000 : 1;
    x.bias = m->Make(c, p.bias_dtype, x.bias_strides.entry, true,
                     [=](int64_t) { return size * m->Normal(); });
  }
  if (m->Chance(options)) {
    p.has_logits_soft_cap = true;
    x.logits_soft_cap =
        m->Make(c, accumulator, 1, true, [m](int64_t) { return m->Chance(0.5) ? 2 : 30; });
  }
  if (m->Chance(options)) {
    p.has_sinks = true;
    x.sinks = m->Make(c, accumulator, p.num_q_heads, true, normal);
  }
  MakeResults(c);
}

// Tiles of every class and of any size: smaller than a block of keys, and larger.
void AddTileMask(Maker* m, Case* c) {
  Problem& p = c->p;
  const int64_t rows[] = {1, 3, 16, 64, 128}, cols[] = {8, 24, 64, 128, 256};
  p.has_tile_mask = true;
  p.tile_rows = rows[m->Int(0, 4)];
  p.tile_cols = cols[m->Int(0, 4)];
  p.num_partial_tiles = m->Int(1, 3);
  p.num_mask_heads = m->Chance(0.5) ? 1 : p.num_q_heads;
  const double empty = m->Chance(0.5) ? 0.9 : 0.3;
  const int64_t tiles =
      p.num_mask_heads * CeilDiv(p.seqlen_q, p.tile_rows) * CeilDiv(p.seqlen_kv, p.tile_cols);
  c->x.mask_tiles = m->Make(c, DType::kS32, tiles, true, [&](int64_t) {
    return static_cast<double>(m->Chance(empty) ? 0 : m->Int(1, 1 + p.num_partial_tiles));
  });
  c->x.mask_bits = m->Make(c, DType::kU8, p.num_partial_tiles * p.tile_rows * p.tile_cols / 8, true,
                           [m](int64_t) { return static_cast<double>(m->Int(0, 255)); });
}

// ---- the reference ----

bool TileMaskKeeps(const Case& c, int64_t b, int64_t n, int64_t i, int64_t j) {
  const Problem& p = c.p;
  const int64_t grid_rows = CeilDiv(p.seqlen_q, p.tile_rows);
  const int64_t grid_cols = CeilDiv(p.seqlen_kv, p.tile_cols);
  const int64_t line = (p.num_mask_heads == 1 ? 0 : n) * grid_rows + i / p.tile_rows;
  const int64_t tile = c.x.mask_tiles.Int(b, p.num_mask_heads * grid_rows * grid_cols,
                                          line * grid_cols + j / p.tile_cols);
  if (tile < 2) return tile == 1;
  const int64_t bit = ((tile - 2) * p.tile_rows + i % p.tile_rows) * p.tile_cols + j % p.tile_cols;
  const uint8_t* const bits =
      c.x.mask_bits.Entry<uint8_t>(b, p.num_partial_tiles * p.tile_rows * p.tile_cols / 8);
  return (bits[bit / 8] >> (bit % 8) & 1) != 0;
}

bool Allowed(const Case& c, int64_t b, int64_t n, int64_t i, int64_t j) {
  const Problem& p = c.p;
  const Operands& x = c.x;
  if (x.mask) {
    const ScoreStrides& s = x.mask_strides;
    if (Read(x.mask.data, DType::kBool,
             x.mask.batch(b) * s.entry + n * s.head + i * s.row + j * s.col) == 0) {
      return false;
    }
  }
  if (p.has_tile_mask && !TileMaskKeeps(c, b, n, i, j)) return false;
  const int64_t offset = x.query_offset ? x.query_offset.Int(b, 1, 0) : 0;
  const int64_t qpos = x.q_positions ? x.q_positions.Int(b, p.seqlen_q, i) : i + offset;
  const int64_t kpos = x.kv_positions ? x.kv_positions.Int(b, p.seqlen_kv, j) : j;
  if (p.is_causal && kpos > qpos) return false;
  if (p.window_left < kUnbounded && kpos < qpos - p.window_left) return false;
  if (p.window_right < kUnbounded && kpos > qpos + p.window_right) return false;
  return true;
}

bool Related(const Case& c, int64_t b, int64_t i, int64_t j) {
  const Problem& p = c.p;
  const Operands& x = c.x;
  if (x.q_seq_lengths && i >= x.q_seq_lengths.Int(b, 1, 0)) return false;
  if (x.kv_seq_lengths && j >= x.kv_seq_lengths.Int(b, 1, 0)) return false;
  return !p.has_segment_ids ||
         x.q_segment_ids.Int(b, p.seqlen_q, i) == x.kv_segment_ids.Int(b, p.seqlen_kv, j);
}

double Score(const Case& c, int64_t b, int64_t n, int64_t i, int64_t j) {
  const Problem& p = c.p;
  const Operands& x = c.x;
  const int64_t q = ((x.q.batch(b) * p.seqlen_q + i) * p.num_q_heads + n) * p.head_dim;
  const int64_t k =
      ((x.k.batch(b) * p.seqlen_kv + j) * p.num_kv_heads + n / p.group_size()) * p.head_dim;
  double s = 0;
  for (int64_t h = 0; h < p.head_dim; ++h)
    s += Read(x.q.data, p.dtype, q + h) * Read(x.k.data, p.dtype, k + h);
  s *= x.scale.Float(b);
  if (x.bias) {
    const ScoreStrides& t = x.bias_strides;
    s += Read(x.bias.data, p.bias_dtype,
              x.bias.batch(b) * t.entry + n * t.head + i * t.row + j * t.col);
  }
  if (x.logits_soft_cap) {
    const double cap = x.logits_soft_cap.Float(b);
    s = cap * std::tanh(s / cap);
  }
  return s;
}

struct Expected {
  double lse;
  std::vector<double> out;
};

Expected Reference(const Case& c, int64_t b, int64_t n, int64_t i) {
  const Problem& p = c.p;
  std::vector<std::pair<int64_t, double>> scores;
  double largest = -INFINITY;
  for (int64_t j = 0; j < p.seqlen_kv; ++j) {
    if (!Related(c, b, i, j) || !Allowed(c, b, n, i, j)) continue;
    scores.emplace_back(j, Score(c, b, n, i, j));
    largest = std::max(largest, scores.back().second);
  }
  const double sink =
      p.has_sinks ? Read(c.x.sinks.data, c.x.sinks.dtype, c.x.sinks.batch(b) * p.num_q_heads + n)
                  : -INFINITY;
  largest = std::max(largest, sink);
  Expected expected{-INFINITY, std::vector<double>(p.head_dim_v, 0.0)};
  if (scores.empty() && !p.has_sinks) return expected;
  double sum = p.has_sinks ? std::exp(sink - largest) : 0;
  for (const auto& s : scores) sum += std::exp(s.second - largest);
  expected.lse = largest + std::log(sum);
  for (const auto& s : scores) {
    const double weight = std::exp(s.second - expected.lse);
    const int64_t v =
        ((c.x.v.batch(b) * p.seqlen_kv + s.first) * p.num_kv_heads + n / p.group_size()) *
        p.head_dim_v;
    for (int64_t h = 0; h < p.head_dim_v; ++h)
      expected.out[h] += weight * Read(c.x.v.data, p.dtype, v + h);
  }
  return expected;
}

bool Close(double got, double want, double tolerance) {
  if (std::isnan(want)) return std::isnan(got);
  if (std::isinf(want)) return got == want;
  return std::fabs(got - want) <= tolerance * (1 + std::fabs(want));
}

void CompareWithReference(const Case& c) {
  const Problem& p = c.p;
  // Scores of a biased case reach 1000s, whose float32 rounding is what exp amplifies.
  const double exact = p.dtype == DType::kF64 ? 1e-12 : p.has_bias ? 4e-4 : 1e-5;
  const double stored = p.dtype == DType::kBF16 ? 4.5e-3 : p.dtype == DType::kF16 ? 6e-4 : exact;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t n = 0; n < p.num_q_heads; ++n) {
      for (int64_t i = 0; i < p.seqlen_q; ++i) {
        const Expected expected = Reference(c, b, n, i);
        const double lse =
            Read(c.lse.data(), c.x.lse.dtype, (b * p.num_q_heads + n) * p.seqlen_q + i);
        if (!EXPECT(Close(lse, expected.lse, exact))) {
          std::printf("  lse b %ld n %ld i %ld: %g, expected %g\n", b, n, i, lse, expected.lse);
          return;
        }
        for (int64_t h = 0; h < p.head_dim_v; ++h) {
          const double got = Read(c.out.data(), p.dtype,
                                  ((b * p.seqlen_q + i) * p.num_q_heads + n) * p.head_dim_v + h);
          if (!EXPECT(Close(got, expected.out[h], std::max(exact, stored)))) {
            std::printf("  out b %ld n %ld i %ld h %ld: %g, expected %g\n", b, n, i, h, got,
                        expected.out[h]);
            return;
          }
        }
      }
    }
  }
}

// ---- poison ----

// NaN in every row that no row of the other side may meet by segment or length, in any batch entry
// that shares it; and, now and then, in a key that some rows do meet.
void Poison(Maker* m, Case* c) {
  const Problem& p = c->p;
  const auto write = [&](const Operand& x, int64_t b, int64_t rows, int64_t row, int64_t width) {
    for (int64_t e = 0; e < width; ++e) {
      Write(const_cast<void*>(x.data), p.dtype, (x.batch(b) * rows + row) * width + e, NAN);
    }
  };
  const auto met = [&](const Operand& x, bool is_q, int64_t entry, int64_t row) {
    for (int64_t b = 0; b < p.batch; ++b) {
      if (x.batch(b) != entry) continue;
      for (int64_t other = 0; other < (is_q ? p.seqlen_kv : p.seqlen_q); ++other) {
        if (is_q ? Related(*c, b, row, other) : Related(*c, b, other, row)) return true;
      }
    }
    return false;
  };
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t i = 0; i < p.seqlen_q; ++i) {
      if (!met(c->x.q, true, c->x.q.batch(b), i))
        write(c->x.q, b, p.seqlen_q, i, p.num_q_heads * p.head_dim);
    }
    for (int64_t j = 0; j < p.seqlen_kv; ++j) {
      if (!met(c->x.k, false, c->x.k.batch(b), j))
        write(c->x.k, b, p.seqlen_kv, j, p.num_kv_heads * p.head_dim);
      if (!met(c->x.v, false, c->x.v.batch(b), j))
        write(c->x.v, b, p.seqlen_kv, j, p.num_kv_heads * p.head_dim_v);
    }
  }
  if (p.batch > 0 && p.seqlen_kv > 0 && m->Chance(0.1)) {
    write(c->x.k, m->Int(0, p.batch - 1), p.seqlen_kv, m->Int(0, p.seqlen_kv - 1),
          p.num_kv_heads * p.head_dim);
  }
}

// ---- runs ----

using BytesFor = int64_t (*)(const Problem&, int, cpu::Isa);
using Runner = Status (*)(const Problem&, const Operands&, const Launch&, cpu::Isa);

// Into fresh results and a fresh workspace sized for `sized_for` slots.
void Run(Case* c, BytesFor bytes_for, Runner runner, cpu::Isa isa, Workers* workers,
         int sized_for) {
  MakeResults(c);
  const int64_t bytes = bytes_for(c->p, sized_for, isa);
  Bytes workspace(bytes + 64, 0xff);
  Launch launch;
  launch.workers = workers;
  launch.workspace = workspace.data() + (-reinterpret_cast<uintptr_t>(workspace.data()) & 63);
  launch.workspace_bytes = bytes;
  EXPECT(runner(c->p, c->x, launch, isa).ok());
}

// Against the reference, and the same bits from any pool.
void TestCase(Case* c, BytesFor bytes_for, Runner runner, cpu::Isa isa) {
  Serial serial;
  Threads threads(3);
  Run(c, bytes_for, runner, isa, &serial, 1);
  CompareWithReference(*c);
  const Bytes out = c->out, lse = c->lse;
  Run(c, bytes_for, runner, isa, &threads, 3);
  EXPECT(out == c->out && lse == c->lse);
  Run(c, bytes_for, runner, isa, &threads,
      2);  // a machine with more threads than the program was compiled for
  EXPECT(out == c->out && lse == c->lse);
}

void Describe(const Case& c, int number, cpu::Isa isa) {
  const Problem& p = c.p;
  std::printf(
      "  in case %d on %s: %s B %ld T %ld S %ld K %ld G %ld H %ld Hv %ld%s%s%s%s%s%s%s%s%s%s "
      "window "
      "%ld %ld\n",
      number, cpu::Name(isa), Name(p.dtype), p.batch, p.seqlen_q, p.seqlen_kv, p.num_kv_heads,
      p.group_size(), p.head_dim, p.head_dim_v, p.is_causal ? " causal" : "",
      p.has_bias ? " bias" : "", p.has_mask ? " mask" : "", p.has_tile_mask ? " tiles" : "",
      p.has_logits_soft_cap ? " cap" : "", p.has_sinks ? " sinks" : "",
      p.has_segment_ids ? " segments" : "", p.has_seq_lengths ? " lengths" : "",
      p.has_positions ? " positions" : "", p.has_query_offset ? " offset" : "", p.window_left,
      p.window_right);
}

void TestOn(const Sizes& sizes, double options, int number, cpu::Isa isa, int64_t max_columns,
            BytesFor bytes_for, Runner runner) {
  const DType types[] = {DType::kF32, DType::kBF16, DType::kF64, DType::kF16};
  Maker m(1000 + number);
  Case c;
  Fill(&m, &c, sizes, types[number % 4], options);
  Maker tiles(number);
  if (number / 4 % 2 == 1 && !c.p.has_mask) AddTileMask(&tiles, &c);
  Poison(&m, &c);
  if (c.p.seqlen_q * c.p.group_size() > max_columns) return;
  const long before = test::counts().failures;
  TestCase(&c, bytes_for, runner, isa);
  if (test::counts().failures > before) Describe(c, number, isa);
}

Sizes RandomSizes(int number) {
  Maker m(number);
  const int64_t heads_dims[] = {1, 3, 8, 16, 20, 40, 64, 72, 128};
  const auto dim = [&] { return m.Chance(0.03) ? 0 : heads_dims[m.Int(0, 8)]; };
  const auto length = [&] {
    if (m.Chance(0.05)) return int64_t{0};
    return m.Chance(0.3) ? m.Int(1, 5) : m.Chance(0.8) ? m.Int(1, 70) : m.Int(100, 450);
  };
  Sizes s;
  s.seqlen_q = length();
  s.seqlen_kv = length();
  s.kv_heads = m.Int(1, 3);
  s.group = m.Chance(0.5) ? 1 : m.Int(1, 5);
  s.head_dim = dim();
  s.head_dim_v = m.Chance(0.6) ? s.head_dim : dim();
  if (m.Chance(0.7)) s.batch_shape.push_back(m.Int(m.Chance(0.05) ? 0 : 1, 3));
  if (m.Chance(0.3)) s.batch_shape.push_back(m.Int(1, 2));
  return s;
}

void TestKernel(BytesFor bytes_for, Runner runner, int64_t max_columns, int cases) {
  for (cpu::Isa isa : cpu::kAllIsas) {
    if (!cpu::CanRun(isa)) continue;
    for (int number = 0; number < cases; ++number) {
      Sizes sizes = RandomSizes(number);
      if (max_columns < 100) sizes.seqlen_q = std::min<int64_t>(sizes.seqlen_q, number % 3 + 1);
      TestOn(sizes, number % 5 * 0.1, number, isa, max_columns, bytes_for, runner);
    }
    // Few tiles and many keys: the keys are split.
    for (int number = 0; number < 8; ++number) {
      TestOn({number < 4 ? 3 : 50, 4200, 1, number % 2 + 1, 16, 24, {}}, 0.3, number, isa,
             max_columns, bytes_for, runner);
    }
    // Several tiles, and more keys than a thread keeps staged.
    TestOn({70, 2200, 1, 1, 24, 1000, {}}, 0.1, 0, isa, max_columns, bytes_for, runner);
    // Many entries and heads of almost nothing.
    TestOn({1, 1, 1, 1, 4, 4, {70000}}, 0, 0, isa, max_columns, bytes_for, runner);
  }
}

void TestRefusals() {
  Problem p;
  p.dtype = DType::kF32;
  p.seqlen_q = 1;
  p.num_q_heads = p.num_kv_heads = 1;
  Device device;
  EXPECT(kCpuForward.refusal(p, device).empty());
  EXPECT(kCpuDecode.refusal(p, device).empty());
  p.seqlen_q = cpu::kMaxDecodeColumns + 1;
  EXPECT(kCpuForward.refusal(p, device).empty());
  EXPECT(kCpuDecode.refusal(p, device) == "takes at most 8 query columns per key/value head");
  p.dtype = DType::kS32;
  EXPECT(!kCpuForward.refusal(p, device).empty());
  p.dtype = DType::kBF16;
  device.platform = Platform::kCuda;
  EXPECT(kCpuForward.refusal(p, device) == "runs on the CPU only");
}

}  // namespace
}  // namespace jax_fmha

int main() {
  using namespace jax_fmha;
  TestRefusals();
  TestKernel(cpu::ForwardWorkspaceBytes, cpu::RunForward, std::numeric_limits<int64_t>::max(), 500);
  TestKernel(cpu::DecodeWorkspaceBytes, cpu::RunDecode, cpu::kMaxDecodeColumns, 400);
  return test::Summary("cpu_forward_test");
}
