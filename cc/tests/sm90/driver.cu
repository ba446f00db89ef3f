// Standalone check and timing of the Hopper kernels against a naive float64 reference on the GPU.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>
#include "cc/core/kernel.h"
#include "cc/sm90/kernels.h"
using namespace jax_fmha;
#ifdef NO_BACKWARD
static std::string NoBackward(const Problem&, const Device&) { return "not built"; }
namespace jax_fmha {
const Kernel kSm90Backward = {"none", "sm90", Pass::kBackward, NoBackward, nullptr, nullptr};
}
#endif
// cc/tests/sm100 runs the same checks on the Blackwell kernels.
#ifndef DRIVER_CAPABILITY
#define DRIVER_CAPABILITY 90
#define DRIVER_HEAD_DIM_V(head_dim) head_dim
// The kernel that takes a problem; null, and why not, if none does.
static const Kernel* KernelOf(const Problem& problem, const Device& device, std::string* why) {
  const Kernel& kernel = problem.pass == Pass::kForward ? kSm90Forward : kSm90Backward;
  *why = kernel.refusal(problem, device);
  return why->empty() ? &kernel : nullptr;
}
#endif
#define CK(x)                                                                         \
  do {                                                                                \
    cudaError_t e_ = (x);                                                             \
    if (e_ != cudaSuccess) {                                                          \
      printf("CUDA error %s at %s:%d\n", cudaGetErrorString(e_), __FILE__, __LINE__); \
      fflush(stdout);                                                                 \
      exit(3);                                                                        \
    }                                                                                 \
  } while (0)

__device__ uint32_t mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  x ^= x >> 33;
  return (uint32_t)x;
}
__device__ float normal(uint64_t i, uint32_t seed) {
  float u = (mix(i * 2 + ((uint64_t)seed << 40)) + 1.f) * 2.3283064e-10f,
        v = mix(i * 2 + 1 + ((uint64_t)seed << 40)) * 2.3283064e-10f;
  return sqrtf(-2.f * logf(fminf(u, 1.f))) * cospif(2 * v);
}
__device__ void put(void* p, int dt, int64_t i, float x) {
  if (dt == 0)
    ((__nv_bfloat16*)p)[i] = __float2bfloat16(x);
  else if (dt == 1)
    ((__half*)p)[i] = __float2half(x);
  else
    ((float*)p)[i] = x;
}
__device__ __host__ inline float getf(const void* p, int dt, int64_t i) {
  if (dt == 0) return __bfloat162float(((const __nv_bfloat16*)p)[i]);
  if (dt == 1) return __half2float(((const __half*)p)[i]);
  return ((const float*)p)[i];
}
__global__ void fill_normal(void* p, int dt, int64_t n, uint32_t seed, float mul, float add) {
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n;
       i += (int64_t)gridDim.x * blockDim.x)
    put(p, dt, i, add + mul * normal(i, seed));
}
__global__ void fill_nan_rows(void* p, int dt, int64_t row_elems, const int* rows, int nrows) {
  if (!nrows) return;
  for (int r = blockIdx.x; r < nrows; r += gridDim.x)
    for (int64_t d = threadIdx.x; d < row_elems; d += blockDim.x)
      put(p, dt, rows[r] * row_elems + d, (r & 1) ? NAN : INFINITY);
}

struct Case {
  std::string name;
  int B = 2, T = 200, S = 200, N = 2, K = 2, H = 128, Hv = 128, dt = 0;
  bool causal = false;
  int64_t left = kUnbounded, right = kUnbounded;
  bool offset = false, qpos = false, kpos = false, qlen = false, kvlen = false;
  int seg = 0;  // 1 sorted, 2 unsorted runs, 3 scattered, 4 different T/S ids
  int mask = 0,
      bias = 0;  // bit 0 head, 1 row, 2 col, 3 batch: dimension in full; 16 marks present with none
  int bias_dt = 0;
  float cap = 0;
  bool sinks = false;
  bool scale = false;
  float scale_value = 0.1f;
  bool poison = false, share_k = false, dlse = false, deterministic = false;
  float mul = 1.f, kadd = 0.f, qadd = 0.f, badd = 0.f;
  bool dbias = false;
  bool blocks = false;               // the mask keeps and drops in blocks
  int tile_rows = 0, tile_cols = 0;  // a tile mask; bits of `mask`: head, batch
};

// ------------------------------------------------------------------------------------------------
// reference (float64)
struct Ref {
  int B, T, S, N, K, H, Hv, dt, causal;
  int64_t left, right;
  const void *q, *k, *v, *dout;
  const int *offset, *qpos, *kpos, *qlen, *kvlen, *qseg, *kseg;
  const bool* mask;
  const void* bias;
  int bias_dt;
  int64_t ms[4], bs[4];
  float cap;
  const float *sinks, *dlse;
  double scale;
  int share_k;
  double *p, *ds, *lse, *out, *dq, *dk, *dv, *delta, *dsink, *dsbias;
};
__device__ bool allowed(const Ref& r, int b, int n, int i, int j) {
  if (r.kvlen && j >= r.kvlen[b]) return false;
  if (r.qlen && i >= r.qlen[b]) return false;
  if (r.mask && !r.mask[b * r.ms[3] + n * r.ms[0] + i * r.ms[1] + j * r.ms[2]]) return false;
  if (r.qseg && r.qseg[b * r.T + i] != r.kseg[b * r.S + j]) return false;
  int64_t qp = r.qpos ? r.qpos[b * r.T + i] : i + (r.offset ? r.offset[b] : 0),
          kp = r.kpos ? r.kpos[b * r.S + j] : j;
  if (r.causal && kp > qp) return false;
  return kp >= qp - r.left && kp <= qp + r.right;
}
__global__ void ref_forward(Ref r) {  // block per (b, n, i)
  int i = blockIdx.x % r.T, n = blockIdx.x / r.T % r.N, b = blockIdx.x / r.T / r.N;
  int kh = n / (r.N / r.K);
  double* p = r.p + (int64_t)blockIdx.x * r.S;
  double* ds = r.ds + (int64_t)blockIdx.x * r.S;
  int kb = r.share_k ? 0 : b;
  for (int j = threadIdx.x; j < r.S; j += blockDim.x) {
    double s = -INFINITY, der = 1;
    if (allowed(r, b, n, i, j)) {
      s = 0;
      for (int d = 0; d < r.H; ++d)
        s += (double)getf(r.q, r.dt, (((int64_t)b * r.T + i) * r.N + n) * r.H + d) *
             getf(r.k, r.dt, (((int64_t)kb * r.S + j) * r.K + kh) * r.H + d);
      s *= r.scale;
      if (r.bias)
        s += getf(r.bias, r.bias_dt, b * r.bs[3] + n * r.bs[0] + i * r.bs[1] + j * r.bs[2]);
      if (r.cap > 0) {
        double t = tanh(s / r.cap);
        s = r.cap * t;
        der = 1 - t * t;
      }
    }
    p[j] = s;
    ds[j] = der;
  }
  __syncthreads();
  __shared__ double top, sum;
  if (threadIdx.x == 0) {
    double m = r.sinks ? r.sinks[n] : -INFINITY;
    for (int j = 0; j < r.S; ++j)
      if (!(p[j] <= m)) m = p[j];
    double l = 0;
    for (int j = 0; j < r.S; ++j)
      if (p[j] != -INFINITY) l += exp(p[j] - m);
    if (r.sinks) l += exp(r.sinks[n] - m);
    r.lse[blockIdx.x] = l == 0 ? -INFINITY : m + log(l);
    top = m;
    sum = l;
  }
  __syncthreads();
  for (int j = threadIdx.x; j < r.S; j += blockDim.x)
    p[j] = p[j] == -INFINITY ? 0 : exp(p[j] - top) / sum;
  __syncthreads();
  for (int d = threadIdx.x; d < r.Hv; d += blockDim.x) {
    double o = 0;
    for (int j = 0; j < r.S; ++j)
      if (allowed(r, b, n, i, j))
        o += p[j] * getf(r.v, r.dt, (((int64_t)b * r.S + j) * r.K + kh) * r.Hv + d);
    r.out[(((int64_t)b * r.T + i) * r.N + n) * r.Hv + d] = o;
  }
}
__global__ void ref_ds(Ref r) {  // block per (b, n, i): ds, delta, dq
  int i = blockIdx.x % r.T, n = blockIdx.x / r.T % r.N, b = blockIdx.x / r.T / r.N;
  int kh = n / (r.N / r.K);
  double* p = r.p + (int64_t)blockIdx.x * r.S;
  double* ds = r.ds + (int64_t)blockIdx.x * r.S;
  int kb = r.share_k ? 0 : b;
  __shared__ double delta, any;
  if (threadIdx.x == 0) {
    delta = 0;
    any = 0;
    for (int j = 0; j < r.S; ++j)
      if (allowed(r, b, n, i, j)) {
        any = 1;
        break;
      }
    if (any)
      for (int d = 0; d < r.Hv; ++d) {
        int64_t at = (((int64_t)b * r.T + i) * r.N + n) * r.Hv + d;
        delta += r.out[at] * getf(r.dout, r.dt, at);
      }
    // Rows past their length have no gradient; others without keys have that of their sink.
    const bool is_row = !r.qlen || i < r.qlen[b];
    if (r.dlse && is_row && (any || (r.sinks && r.lse[blockIdx.x] != -INFINITY)))
      delta -= r.dlse[blockIdx.x];
    r.delta[blockIdx.x] = delta;
  }
  __syncthreads();
  for (int j = threadIdx.x; j < r.S; j += blockDim.x) {
    double g = 0;
    if (allowed(r, b, n, i, j)) {
      double dp = 0;
      for (int d = 0; d < r.Hv; ++d)
        dp += (double)getf(r.dout, r.dt, (((int64_t)b * r.T + i) * r.N + n) * r.Hv + d) *
              getf(r.v, r.dt, (((int64_t)b * r.S + j) * r.K + kh) * r.Hv + d);
      g = p[j] * (dp - delta) * ds[j];
    }
    ds[j] = g;
  }
  __syncthreads();
  for (int d = threadIdx.x; d < r.H; d += blockDim.x) {
    double o = 0;
    for (int j = 0; j < r.S; ++j)
      if (allowed(r, b, n, i, j))
        o += ds[j] * getf(r.k, r.dt, (((int64_t)kb * r.S + j) * r.K + kh) * r.H + d);
    r.dq[(((int64_t)b * r.T + i) * r.N + n) * r.H + d] = o * r.scale;
  }
}
__global__ void ref_dbias(Ref r) {  // after ref_ds
  int i = blockIdx.x % r.T, n = blockIdx.x / r.T % r.N, b = blockIdx.x / r.T / r.N;
  for (int j = threadIdx.x; j < r.S; j += blockDim.x)
    atomicAdd(r.dsbias + b * r.bs[3] + n * r.bs[0] + i * r.bs[1] + j * r.bs[2],
              r.ds[(int64_t)blockIdx.x * r.S + j]);
}
__global__ void ref_dkv(Ref r) {  // block per (b, k, j)
  int j = blockIdx.x % r.S, kh = blockIdx.x / r.S % r.K, b = blockIdx.x / r.S / r.K;
  int g = r.N / r.K;
  for (int d = threadIdx.x; d < max(r.H, r.Hv); d += blockDim.x) {
    double dk = 0, dv = 0;
    for (int n = kh * g; n < kh * g + g; ++n)
      for (int i = 0; i < r.T; ++i) {
        if (!allowed(r, b, n, i, j)) continue;
        int64_t at = (((int64_t)b * r.N + n) * r.T + i) * r.S + j,
                row = ((int64_t)b * r.T + i) * r.N + n;
        if (d < r.H) dk += r.ds[at] * getf(r.q, r.dt, row * r.H + d);
        if (d < r.Hv) dv += r.p[at] * getf(r.dout, r.dt, row * r.Hv + d);
      }
    int64_t row = ((int64_t)b * r.S + j) * r.K + kh;
    if (d < r.H) r.dk[row * r.H + d] = dk * r.scale;
    if (d < r.Hv) r.dv[row * r.Hv + d] = dv;
  }
}

// -------------------------------------------------------------------------------------------------------------
// helpers
struct Arena {  // every allocation lies in NaN
  std::vector<void*> all;
  char* get(int64_t bytes, bool at_start = false) {
    char* p;
    int64_t pad = at_start ? 0 : 1 << 20;
    CK(cudaMalloc(&p, bytes + pad + (1 << 20)));
    CK(cudaMemset(p, 0xff, bytes + pad + (1 << 20)));
    all.push_back(p);
    return p + pad;
  }
  ~Arena() {
    for (void* p : all) cudaFree(p);
  }
};
template <typename T>
T* upload(Arena& a, const std::vector<T>& x) {
  T* p = (T*)a.get(x.size() * sizeof(T));
  CK(cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}
static DType dtype_of(int dt) {
  return dt == 0 ? DType::kBF16 : dt == 1 ? DType::kF16 : DType::kF32;
}
static BatchMap full(int B) {
  BatchMap m;
  m.rank = 1;
  m.sizes[0] = B;
  m.strides[0] = B == 1 ? 0 : 1;
  return m;
}
static BatchMap shared(int B) {
  BatchMap m;
  m.rank = 1;
  m.sizes[0] = B;
  m.strides[0] = 0;
  return m;
}

struct Data {
  Arena a;
  Case c;
  Problem p;
  Operands o;
  Ref r{};
  void *out, *lse, *dq, *dk, *dv, *dsinks, *dbias = nullptr;
  int64_t nbias = 0;
  int64_t nq, nk, nv, no, nl;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  std::vector<int> qseg, kseg;
  std::string ran;  // name of the last kernel
};

static void build(Data& d, const Case& c, uint32_t seed, bool for_reference) {
  d.c = c;
  std::mt19937 rng(seed);
  const int es = 2;
  const int B = c.B;
  Problem& p = d.p;
  Operands& o = d.o;
  Ref& r = d.r;
  p.pass = Pass::kForward;
  p.dtype = dtype_of(c.dt);
  p.batch_shape = {B};
  p.batch = B;
  p.seqlen_q = c.T;
  p.seqlen_kv = c.S;
  p.num_q_heads = c.N;
  p.num_kv_heads = c.K;
  p.head_dim = c.H;
  p.head_dim_v = c.Hv;
  p.is_causal = c.causal;
  p.window_left = c.left;
  p.window_right = c.right;
  p.deterministic = c.deterministic;
  d.nq = (int64_t)B * c.T * c.N * c.H;
  d.nk = (int64_t)(c.share_k ? 1 : B) * c.S * c.K * c.H;
  d.nv = (int64_t)B * c.S * c.K * c.Hv;
  d.no = (int64_t)B * c.T * c.N * c.Hv;
  d.nl = (int64_t)B * c.N * c.T;
  auto* q = d.a.get(d.nq * es, true);
  auto* k = d.a.get(d.nk * es, true);
  auto* v = d.a.get(d.nv * es, true);
  auto* dout = d.a.get(d.no * es, true);
  fill_normal<<<1024, 256>>>(q, c.dt, d.nq, seed * 7 + 1, c.mul, c.qadd);
  fill_normal<<<1024, 256>>>(k, c.dt, d.nk, seed * 7 + 2, c.mul, c.kadd);
  if (d.nv) fill_normal<<<1024, 256>>>(v, c.dt, d.nv, seed * 7 + 3, 1, 0);
  fill_normal<<<1024, 256>>>(dout, c.dt, d.no, seed * 7 + 4, 1, 0);
  CK(cudaGetLastError());
  r = Ref{B, c.T, c.S, c.N, c.K, c.H, c.Hv, c.dt, c.causal, c.left, c.right, q, k, v, dout};
  r.scale = 1 / std::sqrt((double)c.H);
  r.share_k = c.share_k;
  o.q = {q, p.dtype, full(B)};
  o.k = {k, p.dtype, c.share_k ? shared(B) : full(B)};
  o.v = {v, p.dtype, full(B)};
  o.dout = {dout, p.dtype, full(B)};
  auto ints = [&](int64_t n, auto f) {
    std::vector<int> x(n);
    for (int64_t i = 0; i < n; ++i) x[i] = f(i);
    return x;
  };
  if (c.offset) {
    auto x = ints(B, [&](int64_t) { return (int)(rng() % 101) - 50 + c.S - c.T; });
    r.offset = upload(d.a, x);
    o.query_offset = {r.offset, DType::kS32, full(B)};
    p.has_query_offset = true;
  }
  if (c.qpos) {
    auto x = ints((int64_t)B * c.T, [&](int64_t i) { return (int)(i % c.T / 3 * 2 + rng() % 5); });
    r.qpos = upload(d.a, x);
    o.q_positions = {r.qpos, DType::kS32, full(B)};
    p.has_positions = true;
  }
  if (c.kpos) {
    auto x = ints((int64_t)B * c.S, [&](int64_t i) { return (int)((i * 7) % c.S); });
    r.kpos = upload(d.a, x);
    o.kv_positions = {r.kpos, DType::kS32, full(B)};
    p.has_positions = true;
  }
  std::vector<int> qlen(B, c.T), kvlen(B, c.S);
  if (c.qlen) {
    qlen = ints(B, [&](int64_t b) { return b % 3 == 2 ? 0 : (int)(rng() % (c.T + 1)); });
    r.qlen = upload(d.a, qlen);
    o.q_seq_lengths = {r.qlen, DType::kS32, full(B)};
    p.has_seq_lengths = true;
  }
  if (c.kvlen) {
    kvlen = ints(B, [&](int64_t b) { return b % 4 == 3 ? 0 : (int)(rng() % (c.S + 1)); });
    r.kvlen = upload(d.a, kvlen);
    o.kv_seq_lengths = {r.kvlen, DType::kS32, full(B)};
    p.has_seq_lengths = true;
  }
  if (c.seg) {
    auto make = [&](int L) {
      std::vector<int> x;
      for (int b = 0; b < B; ++b) {
        int id = 5, left_ = 0;
        for (int i = 0; i < L; ++i) {
          if (left_ == 0) {
            left_ = 1 + rng() % 90;
            if (c.seg == 1)
              id++;
            else if (c.seg == 2)
              id = (id * 37 + 11) % 1009;
            else
              id = (int)(rng() % 4) - 1;
          }
          x.push_back(id);
          --left_;
        }
      }
      return x;
    };
    if (d.qseg.empty()) {
      d.kseg = make(c.S);
      d.qseg = (c.T == c.S && c.seg != 4) ? d.kseg : make(c.T);
    }
    r.qseg = upload(d.a, d.qseg);
    r.kseg = upload(d.a, d.kseg);
    o.q_segment_ids = {r.qseg, DType::kS32, full(B)};
    o.kv_segment_ids = {r.kseg, DType::kS32, full(B)};
    p.has_segment_ids = true;
  }
  auto shape = [&](int bits, int64_t* st, ScoreStrides& ss, Operand& op, int64_t& n) {
    int64_t h = bits & 1 ? c.N : 1, t = bits & 2 ? c.T : 1, s = bits & 4 ? c.S : 1;
    n = h * t * s;
    ss = {h == 1 ? 0 : t * s, t == 1 ? 0 : s, s == 1 ? 0 : 1, n};
    st[0] = ss.head;
    st[1] = ss.row;
    st[2] = ss.col;
    st[3] = bits & 8 ? n : 0;
    op.batch = bits & 8 ? full(B) : shared(B);
    if (bits & 8) n *= B;
  };
  if (c.tile_rows) {
    const int rows = (c.T + c.tile_rows - 1) / c.tile_rows,
              cols = (c.S + c.tile_cols - 1) / c.tile_cols, num_partial = 3;
    const int heads = c.mask & 1 ? c.N : 1, entries = c.mask & 8 ? B : 1;
    const int64_t bits_size = (int64_t)num_partial * c.tile_rows * c.tile_cols / 8;
    std::vector<uint8_t> bits(entries * bits_size);
    for (auto& y : bits) y = rng();
    std::vector<int> tiles((int64_t)entries * heads * rows * cols);
    for (auto& y : tiles) y = std::max(0, (int)(rng() % (2 + num_partial + 3)) - 3);
    std::vector<char> dense((int64_t)entries * heads * c.T * c.S);
    for (int64_t x = 0; x < (int64_t)dense.size(); ++x) {
      const int j = x % c.S, i = x / c.S % c.T;
      const int64_t eh = x / c.S / c.T, e = eh / heads;
      const int code = tiles[(eh * rows + i / c.tile_rows) * cols + j / c.tile_cols];
      const int64_t bit =
          ((int64_t)(code - 2) * c.tile_rows + i % c.tile_rows) * c.tile_cols + j % c.tile_cols;
      dense[x] = code < 2 ? code : bits[e * bits_size + bit / 8] >> bit % 8 & 1;
    }
    r.mask = (const bool*)upload(d.a, dense);
    r.ms[0] = heads == 1 ? 0 : (int64_t)c.T * c.S;
    r.ms[1] = c.S;
    r.ms[2] = 1;
    r.ms[3] = entries == 1 ? 0 : (int64_t)heads * c.T * c.S;
    o.mask_tiles = {upload(d.a, tiles), DType::kS32, entries == 1 ? shared(B) : full(B)};
    o.mask_bits = {upload(d.a, bits), DType::kU8, entries == 1 ? shared(B) : full(B)};
    p.has_tile_mask = true;
    p.tile_rows = c.tile_rows;
    p.tile_cols = c.tile_cols;
    p.num_mask_heads = heads;
    p.num_partial_tiles = num_partial;
  } else if (c.mask) {
    int64_t n;
    shape(c.mask, r.ms, o.mask_strides, o.mask, n);
    std::vector<char> x(n);
    for (auto& y : x) y = rng() % 4 != 0;
    if (c.blocks && (c.mask & 6) == 6)
      for (int64_t y = 0; y < n; ++y)
        x[y] = (y % c.S / 150 + y / c.S % c.T / 130 + y / c.S / c.T) % 3 == 0;
    if (n > 3000 && !c.blocks)
      for (int64_t i = 0; i < c.S; ++i) x[i] = 0;
    auto* m = upload(d.a, x);
    r.mask = (const bool*)m;
    o.mask.data = m;
    o.mask.dtype = DType::kBool;
    p.has_mask = true;
  }
  if (c.bias) {
    int64_t n;
    shape(c.bias, r.bs, o.bias_strides, o.bias, n);
    d.nbias = n;
    auto* m = d.a.get(n * 4);
    fill_normal<<<256, 256>>>(m, c.bias_dt, n, seed + 77, 1, c.badd);
    r.bias = m;
    r.bias_dt = c.bias_dt;
    o.bias.data = m;
    o.bias.dtype = dtype_of(c.bias_dt);
    p.has_bias = true;
    p.bias_dtype = o.bias.dtype;
    if (c.dbias) {
      d.dbias = d.a.get(n * 4);
      o.dbias = {d.dbias, o.bias.dtype, o.bias.batch, c.bias & 8 ? B : 1};
      p.dbias_shape = {n};
    }
  }
  if (c.cap > 0) {
    auto* x = upload(d.a, std::vector<float>{c.cap});
    r.cap = c.cap;
    o.logits_soft_cap = {x, DType::kF32, shared(B)};
    p.has_logits_soft_cap = true;
  }
  if (c.scale) {
    auto* x = upload(d.a, std::vector<float>{c.scale_value});
    r.scale = c.scale_value;
    o.scale = {x, DType::kF32, shared(B)};
  }
  if (c.sinks) {
    std::vector<float> x(c.N);
    for (auto& y : x) y = (int)(rng() % 5) - 2;
    r.sinks = upload(d.a, x);
    o.sinks = {r.sinks, DType::kF32, shared(B)};
    p.has_sinks = true;
  }
  if (c.dlse) {
    auto* x = d.a.get(d.nl * 4);
    fill_normal<<<256, 256>>>(x, 2, d.nl, seed + 99, 1, 0);
    r.dlse = (float*)x;
    o.dlse = {x, DType::kF32, full(B)};
    p.has_dlse = true;
  }
  if (c.poison) {  // rows that lengths exclude, and one segment whole
    std::vector<int> krows, qrows;
    for (int b = 0; b < B; ++b) {
      for (int j = 0; j < c.S; ++j)
        if (j >= kvlen[b] ||
            (c.seg && d.kseg[(int64_t)b * c.S + j] == d.kseg[(int64_t)b * c.S + c.S / 2])) {
          if (!c.share_k || b == 0) krows.push_back(b * c.S + j);
        }
      for (int i = 0; i < c.T; ++i)
        if (i >= qlen[b]) qrows.push_back(b * c.T + i);
    }
    if (!krows.empty()) {
      auto* kr = upload(d.a, krows);
      if (!c.share_k) fill_nan_rows<<<256, 128>>>(k, c.dt, (int64_t)c.K * c.H, kr, krows.size());
      fill_nan_rows<<<256, 128>>>(v, c.dt, (int64_t)c.K * c.Hv, kr, krows.size());
    }
    if (!qrows.empty()) {
      auto* qr = upload(d.a, qrows);
      fill_nan_rows<<<256, 128>>>(q, c.dt, (int64_t)c.N * c.H, qr, qrows.size());
      fill_nan_rows<<<256, 128>>>(dout, c.dt, (int64_t)c.N * c.Hv, qr, qrows.size());
    }
  }
  d.out = d.a.get(d.no * es);
  d.lse = d.a.get(d.nl * 4);
  d.dq = d.a.get(d.nq * es);
  d.dk = d.a.get((int64_t)B * c.S * c.K * c.H * es);
  d.dv = d.a.get(d.nv * es);
  o.out = {d.out, p.dtype, full(B), B};
  o.lse = {d.lse, DType::kF32, full(B), B};
  o.dq = {d.dq, p.dtype, full(B), B};
  o.dk = {d.dk, p.dtype, full(B), B};
  o.dv = {d.dv, p.dtype, full(B), B};
  o.saved_out = {d.out, p.dtype, full(B)};
  o.saved_lse = {d.lse, DType::kF32, full(B)};
  if (c.sinks) {
    d.dsinks = d.a.get(c.N * 4);
    o.dsinks = {d.dsinks, DType::kF32, shared(B), 1};
  }
  if (for_reference) {
    int64_t rows = d.nl;
    r.p = (double*)d.a.get(rows * c.S * 8);
    r.ds = (double*)d.a.get(rows * c.S * 8);
    r.lse = (double*)d.a.get(rows * 8);
    r.delta = (double*)d.a.get(rows * 8);
    r.out = (double*)d.a.get(d.no * 8);
    r.dq = (double*)d.a.get(d.nq * 8);
    r.dk = (double*)d.a.get((int64_t)B * c.S * c.K * c.H * 8);
    r.dv = (double*)d.a.get(d.nv * 8);
    if (c.dbias && d.nbias) {
      r.dsbias = (double*)d.a.get(d.nbias * 8);
      CK(cudaMemset(r.dsbias, 0, d.nbias * 8));
    }
  }
  CK(cudaDeviceSynchronize());
}

static int launch(Data& d, Pass pass, cudaStream_t stream, std::string* why) {
  Device dev;
  dev.platform = Platform::kCuda;
  dev.compute_capability = DRIVER_CAPABILITY;
  d.p.pass = pass;
  d.p.wants_dsinks = pass == Pass::kBackward && d.c.sinks;
  d.p.wants_dbias = pass == Pass::kBackward && d.dbias != nullptr;
  const Kernel* kernel = KernelOf(d.p, dev, why);
  if (kernel == nullptr) return 1;
  d.ran = kernel->name;
  int64_t need = kernel->workspace_bytes(d.p, dev);
  if (need > d.workspace_bytes) {
    d.workspace = d.a.get(need);
    d.workspace_bytes = need;
  }
  Launch l;
  l.stream = stream;
  l.workspace = d.workspace;
  l.workspace_bytes = need;
  Status s = kernel->run(d.p, d.o, l);
  if (!s.ok()) {
    *why = s.message();
    return 2;
  }
  return 0;
}

struct Err {
  double rms = 0, max = 0, error = 0, norm = 0;
  int64_t bad = 0;
  double top = 0;
  int64_t first = -1, mine = 0;
  double a = 0, b = 0;
};
static Err compare(const void* dev, int dt, const double* refd, int64_t n) {
  std::vector<char> x(n * 4);
  std::vector<double> y(n);
  CK(cudaMemcpy(x.data(), dev, n * (dt == 2 ? 4 : 2), cudaMemcpyDeviceToHost));
  CK(cudaMemcpy(y.data(), refd, n * 8, cudaMemcpyDeviceToHost));
  Err e;
  double se = 0, sr = 0;
  for (int64_t i = 0; i < n; ++i) {
    double a = getf(x.data(), dt, i), b = y[i];
    if (std::isnan(a) != std::isnan(b)) {
      if (e.bad++ == 0) {
        e.first = i;
        e.a = a;
        e.b = b;
      }
      e.mine += std::isnan(a);
      continue;
    }
    if (std::isnan(b)) continue;
    if (std::isinf(b) || std::isinf(a)) {
      if (a != b) e.bad++;
      continue;
    }
    if (b == 0 && std::fabs(a) > 1e-2) e.bad++;
    se += (a - b) * (a - b);
    sr += b * b;
    e.max = std::max(e.max, std::fabs(a - b));
    e.top = std::max(e.top, std::fabs(b));
  }
  e.error = std::sqrt(se);
  e.norm = std::sqrt(sr);
  e.rms = sr > 0 ? e.error / e.norm : e.error;
  return e;
}

// What the rounding of out to 16 bits leaves in the row sums <out, dout>, added up like noise: sums
// of them in which the rest cancels show it.
static double noise_of_row_sums(const Data& d) {
  std::vector<double> out(d.no);
  std::vector<char> dout(d.no * 2);
  CK(cudaMemcpy(out.data(), d.r.out, d.no * 8, cudaMemcpyDeviceToHost));
  CK(cudaMemcpy(dout.data(), d.r.dout, d.no * 2, cudaMemcpyDeviceToHost));
  double sum = 0;
  for (int64_t i = 0; i < d.no; ++i) {
    const double x = out[i] * getf(dout.data(), d.c.dt, i);
    if (!std::isnan(x)) sum += x * x;
  }
  return std::ldexp(std::sqrt(sum), d.c.dt == 0 ? -8 : -11);
}

static int failures = 0, passed = 0, refused = 0;
static bool verbose = false;
static bool with_backward = true;
static void report(const Case& c, const char* what, const Err& e, double bound, std::string& line,
                   double noise = 0) {
  char t[160];
  bool ok = e.bad == 0 && (e.rms <= bound || e.error <= bound * e.norm + noise);
  snprintf(t, sizeof t, " %s rms %.1e max %.1e bad %lld%s", what, e.rms, e.max, (long long)e.bad,
           ok ? "" : " FAIL");
  line += t;
  if (e.first >= 0) {
    snprintf(t, sizeof t, "[first %lld %g vs %g, NaN here only %lld]", (long long)e.first, e.a, e.b,
             (long long)e.mine);
    line += t;
  }
}
static void check(const Case& c, uint32_t seed) {
  Data d;
  build(d, c, seed, true);
  std::string why, line;
  int code = launch(d, Pass::kForward, 0, &why);
  char desc[512];
  snprintf(desc, sizeof desc,
           "%-22s B%d T%d S%d N%d K%d H%d/%d dt%d c%d w%lld,%lld off%d pos%d%d len%d%d seg%d m%d "
           "b%d:%d cap%g sink%d sc%d",
           c.name.c_str(), c.B, c.T, c.S, c.N, c.K, c.H, c.Hv, c.dt, c.causal,
           c.left >= kUnbounded ? -9LL : (long long)c.left,
           c.right >= kUnbounded ? -9LL : (long long)c.right, c.offset, c.qpos, c.kpos, c.qlen,
           c.kvlen, c.seg, c.mask, c.bias, c.bias_dt, c.cap, c.sinks, c.scale);
  if (code == 1) {
    ++refused;
    printf("REFUSED %s: %s\n", desc, why.c_str());
    return;
  }
  if (code == 2) {
    ++failures;
    printf("FAIL %s: %s\n", desc, why.c_str());
    return;
  }
  cudaError_t e = cudaDeviceSynchronize();
  if (e != cudaSuccess) {
    printf("FAIL %s: CUDA %s\n", desc, cudaGetErrorString(e));
    fflush(stdout);
    exit(4);
  }
  line += " " + d.ran;
  ref_forward<<<c.B * c.N * c.T, 128>>>(d.r);
  CK(cudaDeviceSynchronize());
  const double eps = c.dt == 0 ? 4e-3 : 1.2e-3;
  report(c, "out", compare(d.out, c.dt, d.r.out, d.no), c.cap > 0 ? 2 * eps : eps, line);
  report(c, "lse", compare(d.lse, 2, d.r.lse, d.nl), c.cap > 0 ? 2e-3 : 1e-4, line);
  if (with_backward) {
    code = launch(d, Pass::kBackward, 0, &why);
    if (code == 1) {
      ++refused;
      line += " bwd refused: " + why;
    } else if (code == 2) {
      line += " FAIL " + why;
    } else {
      e = cudaDeviceSynchronize();
      if (e != cudaSuccess) {
        printf("FAIL bwd %s: CUDA %s\n", desc, cudaGetErrorString(e));
        fflush(stdout);
        exit(4);
      }
      line += " " + d.ran;
      if (c.deterministic) {
        std::vector<char> a(d.nq * 2), b(d.nq * 2);
        CK(cudaMemcpy(a.data(), d.dq, d.nq * 2, cudaMemcpyDeviceToHost));
        for (int t = 0; t < 5; ++t) {
          launch(d, Pass::kBackward, 0, &why);
          CK(cudaMemcpy(b.data(), d.dq, d.nq * 2, cudaMemcpyDeviceToHost));
          if (memcmp(a.data(), b.data(), a.size())) {
            line += " FAIL dq not deterministic";
            break;
          }
        }
      }
      ref_ds<<<c.B * c.N * c.T, 128>>>(d.r);
      if (c.S) ref_dkv<<<c.B * c.K * c.S, 128>>>(d.r);
      CK(cudaDeviceSynchronize());
      const double be = (c.cap > 0 ? 2 : 1) * (c.dt == 0 ? 8e-3 : 2e-3);
      // Where lse is in the thousands, its rounding alone is that large.
      const double far = c.name == "far lse" ? 0.1 : be;
      report(c, "dq", compare(d.dq, c.dt, d.r.dq, d.nq), far, line);
      report(c, "dk", compare(d.dk, c.dt, d.r.dk, (int64_t)c.B * c.S * c.K * c.H), far, line);
      report(c, "dv", compare(d.dv, c.dt, d.r.dv, d.nv), be, line);
      if (d.dbias) {
        ref_dbias<<<c.B * c.N * c.T, 128>>>(d.r);
        CK(cudaDeviceSynchronize());
        report(c, "dbias", compare(d.dbias, c.bias_dt, d.r.dsbias, d.nbias), be, line,
               noise_of_row_sums(d));
      }
      if (c.seg && line.find("FAIL") != std::string::npos) {
        int n[3];
        CK(cudaMemcpy(n, d.workspace, 12, cudaMemcpyDeviceToHost));
        char t[80];
        snprintf(t, sizeof t, " counters %d %d %d", n[0], n[1], n[2]);
        line += t;
      }
      if (c.sinks) {
        std::vector<double> delta(d.nl), lse(d.nl), want(c.N, 0.0);
        std::vector<float> sink(c.N);
        CK(cudaMemcpy(delta.data(), d.r.delta, d.nl * 8, cudaMemcpyDeviceToHost));
        CK(cudaMemcpy(lse.data(), d.r.lse, d.nl * 8, cudaMemcpyDeviceToHost));
        CK(cudaMemcpy(sink.data(), d.r.sinks, c.N * 4, cudaMemcpyDeviceToHost));
        for (int64_t i = 0; i < d.nl; ++i) {
          int n = i / c.T % c.N;
          if (lse[i] != -INFINITY) want[n] -= std::exp(sink[n] - lse[i]) * delta[i];
        }
        double* w = upload(d.a, want);
        report(c, "dsinks", compare(d.dsinks, 2, w, c.N), be, line, noise_of_row_sums(d));
      }
    }
  }
  const bool bad = line.find("FAIL") != std::string::npos;
  bad ? ++failures : ++passed;
  if (bad || verbose) printf("%s %s:%s\n", bad ? "FAIL" : "ok", desc, line.c_str());
  fflush(stdout);
}

static void time_case(Case c, double pairs_override, const char* label, double fa3_f, double fa3_b,
                      bool packed_docs_given = false, std::vector<int> docs = {}) {
  if (const char* rows = getenv("ROWS"); rows && !strstr(label, rows)) return;
  Data d;
  if (packed_docs_given) {
    int id = 0;
    for (int len : docs) {
      for (int i = 0; i < len; ++i) d.kseg.push_back(id);
      ++id;
    }
    d.qseg = d.kseg;
    c.seg = 1;
  }
  build(d, c, 3, false);
  double pairs = (double)c.T * c.S;
  if (c.causal) pairs /= 2;
  if (pairs_override > 0) pairs = pairs_override;
  const double flop = 2.0 * c.B * c.N * pairs * (c.H + c.Hv);
  std::string why;
  float best[2] = {0, 0};
  cudaEvent_t a, b;
  cudaEventCreate(&a);
  cudaEventCreate(&b);
  for (int pass = 0; pass < 2; ++pass) {
    if (pass == 1 && !with_backward) break;
    Pass w = pass == 0 ? Pass::kForward : Pass::kBackward;
    int code = launch(d, w, 0, &why);
    if (code) {
      printf("%-44s pass %d: %s\n", label, pass, why.c_str());
      continue;
    }
    {
      cudaError_t e = cudaDeviceSynchronize();
      if (e != cudaSuccess) {
        printf("%s pass %d: %s\n", label, pass, cudaGetErrorString(e));
        fflush(stdout);
        exit(5);
      }
    }
    if (getenv("ONCE")) {
      best[pass] = 1;
      continue;
    }
    std::vector<float> ms;
    for (int loop = 0; loop < 4; ++loop) {
      int n = 10;
      cudaEventRecord(a);
      for (int i = 0; i < n; ++i) launch(d, w, 0, &why);
      cudaEventRecord(b);
      CK(cudaEventSynchronize(b));
      float t;
      cudaEventElapsedTime(&t, a, b);
      ms.push_back(t / n);
    }
    std::sort(ms.begin(), ms.end());
    best[pass] = (ms[1] + ms[2]) / 2;
  }
  printf("%-44s fwd %7.3f ms %5.0f TF (FA3 %4.0f, %.2fx)", label, best[0], flop / best[0] * 1e-9,
         fa3_f, flop / best[0] * 1e-9 / fa3_f);
  if (best[1] > 0)
    printf("  bwd %7.3f ms %5.0f TF (FA3 %4.0f, %.2fx)", best[1], 2.5 * flop / best[1] * 1e-9,
           fa3_b, 2.5 * flop / best[1] * 1e-9 / fa3_b);
  printf("\n");
  fflush(stdout);
}

int main(int argc, char** argv) {
  std::string mode = argc > 1 ? argv[1] : "all";
  bool perf = mode == "all" || mode == "perf", corr = mode == "all" || mode == "check";
  int fuzz = argc > 2 ? atoi(argv[2]) : 150;
  with_backward = argc > 3 ? atoi(argv[3]) : 1;
  const char* only = argc > 4 ? argv[4] : "";
  std::vector<int> head_dims = {128};
  if (const char* e = getenv("HDS")) {
    head_dims.clear();
    for (const char* s = e; *s;) {
      head_dims.push_back(strtol(s, (char**)&s, 10));
      if (*s == ',') ++s;
    }
  }
  const char* hdv = getenv("HDV");  // head_dim_v, where it is not head_dim
  auto head_dim_v = [hdv](int h) { return hdv ? atoi(hdv) : DRIVER_HEAD_DIM_V(h); };
  verbose = getenv("VERBOSE");
  const int dtype = getenv("DTYPE") && !strcmp(getenv("DTYPE"), "float16");
  int shard = 0, shards = 1;  // SHARD=I/N: every Nth case
  if (const char* e = getenv("SHARD")) sscanf(e, "%d/%d", &shard, &shards);
  if (corr) {
    std::vector<Case> cs;
    auto add = [&](const char* name, auto f) {
      for (int h : head_dims) {
        Case c;
        c.name = name;
        c.H = h;
        c.Hv = head_dim_v(h);
        c.dt = dtype;
        f(c);
        cs.push_back(c);
      }
    };
    add("plain", [](Case& c) {});
    add("plain1", [](Case& c) {
      c.B = 1;
      c.T = c.S = 128;
      c.N = c.K = 1;
    });
    add("plain512", [](Case& c) { c.T = c.S = 512; });
    add("causal", [](Case& c) {
      c.causal = true;
      c.T = c.S = 700;
    });
    add("causal T<S off", [](Case& c) {
      c.causal = true;
      c.T = 150;
      c.S = 333;
      c.offset = true;
    });
    add("causal T>S", [](Case& c) {
      c.causal = true;
      c.T = 350;
      c.S = 133;
    });
    add("window", [](Case& c) {
      c.T = c.S = 600;
      c.left = 64;
      c.right = 10;
    });
    add("window neg", [](Case& c) {
      c.T = c.S = 300;
      c.left = 100;
      c.right = -20;
    });
    add("causal empty", [](Case& c) {
      c.T = 132;
      c.S = 243;
      c.causal = true;
      c.left = 16;
      c.right = -20;
      c.sinks = true;
    });
    add("causal window", [](Case& c) {
      c.T = c.S = 1000;
      c.causal = true;
      c.left = 200;
    });
    add("gqa", [](Case& c) {
      c.N = 6;
      c.K = 2;
      c.causal = true;
    });
    add("one", [](Case& c) { c.T = c.S = 1; });
    add("decode", [](Case& c) {
      c.T = 1;
      c.S = 1000;
      c.N = 8;
      c.K = 2;
    });
    add("lengths", [](Case& c) {
      c.B = 5;
      c.qlen = c.kvlen = true;
      c.T = 300;
      c.S = 400;
    });
    add("lengths poison", [](Case& c) {
      c.B = 5;
      c.qlen = c.kvlen = c.poison = true;
      c.T = 300;
      c.S = 400;
    });
    add("softcap", [](Case& c) {
      c.cap = 5;
      c.T = c.S = 300;
      c.causal = true;
    });
    add("sinks", [](Case& c) {
      c.sinks = true;
      c.kvlen = true;
      c.B = 4;
    });
    add("scale neg", [](Case& c) {
      c.scale = true;
      c.scale_value = -0.05f;
    });
    add("scale 0", [](Case& c) {
      c.scale = true;
      c.scale_value = 0;
      c.causal = true;
    });
    add("shared k", [](Case& c) {
      c.share_k = true;
      c.B = 3;
    });
    for (int m : {16, 1, 2, 4, 6, 7, 15, 8 + 4, 8 + 2})
      add("mask", [m](Case& c) {
        c.mask = m;
        c.B = 3;
      });
    for (int m : {16, 1, 2, 4, 6, 7, 15, 12})
      add("bias", [m](Case& c) {
        c.bias = m;
        c.bias_dt = m % 3;
      });
    for (int m : {16, 1, 2, 4, 6, 7, 15, 12})
      add("dbias", [m](Case& c) {
        c.bias = m;
        c.bias_dt = m % 3;
        c.dbias = c.dlse = true;
        c.causal = m % 2;
        c.cap = m == 7 ? 6 : 0;
      });
    for (int m : {6, 7, 14, 15})
      add("mask blocks", [m](Case& c) {
        c.mask = m;
        c.blocks = true;
        c.T = 500;
        c.S = 700;
        c.N = 4;
        c.causal = m == 15;
        c.deterministic = m == 7;
        c.seg = m == 14 ? 1 : 0;
        c.poison = m == 14;
      });
    for (int m : {16, 1, 8, 9})
      add("tile mask", [m](Case& c) {
        c.mask = m;
        c.tile_rows = m == 16 ? 128 : m == 1 ? 48 : 256;
        c.tile_cols = m == 16 ? 128 : m == 1 ? 24 : 64;
        c.T = 600;
        c.S = 500;
        c.N = 4;
        c.left = m == 9 ? 200 : kUnbounded;
        c.deterministic = m == 8;
      });
    for (int s : {1, 2, 3, 4})
      add("det segments", [s](Case& c) {
        c.deterministic = true;
        c.seg = s;
        c.causal = s % 2;
        c.T = s == 4 ? 700 : 900;
        c.S = 900;
        c.N = 4;
      });
    add("qpos", [](Case& c) {
      c.qpos = true;
      c.causal = true;
    });
    add("kpos", [](Case& c) {
      c.kpos = true;
      c.causal = true;
      c.left = 60;
    });
    add("pos", [](Case& c) {
      c.kpos = c.qpos = true;
      c.left = 30;
      c.right = 25;
    });
    for (int s : {1, 2, 3, 4})
      for (int ca : {0, 1})
        for (int po : {0, 1})
          add(po ? "segments poison" : "segments", [=](Case& c) {
            c.seg = s;
            c.causal = ca;
            c.poison = po;
            c.T = c.S = 500;
          });
    add("segments T!=S", [](Case& c) {
      c.seg = 1;
      c.T = 300;
      c.S = 450;
    });
    add("segments len", [](Case& c) {
      c.seg = 1;
      c.T = c.S = 450;
      c.qlen = c.kvlen = true;
      c.poison = true;
      c.B = 4;
    });
    add("far lse", [](Case& c) {
      c.qadd = 4;
      c.kadd = -4;
      c.mul = 0.5;
      c.scale = true;
      c.scale_value = 0.3;
      c.dt = 0;
      c.T = 70;
      c.S = 77;
    });
    for (float large : {2e4f, -2e4f})
      add("large lse", [=](Case& c) {
        c.bias = 15;
        c.bias_dt = 2;
        c.badd = large;
        c.causal = large > 0;
        c.seg = large > 0 ? 0 : 1;
        c.dlse = true;
      });
    add("dlse", [](Case& c) {
      c.dlse = true;
      c.causal = true;
    });
    add("dlse sinks", [](Case& c) {
      c.dlse = true;
      c.sinks = true;
      c.qlen = true;
      c.B = 3;
    });
    add("f16", [](Case& c) {
      c.dt = 1;
      c.causal = true;
      c.T = c.S = 300;
    });
    add("det", [](Case& c) {
      c.deterministic = true;
      c.causal = true;
      c.T = c.S = 300;
      c.N = c.K = 4;
    });
    add("det big", [](Case& c) {
      c.deterministic = true;
      c.T = c.S = 1100;
      c.N = 8;
      c.K = 4;
    });
    add("det window", [](Case& c) {
      c.deterministic = true;
      c.causal = true;
      c.left = 200;
      c.offset = true;
      c.B = 3;
      c.T = 800;
      c.S = 1100;
      c.N = 8;
      c.K = 4;
      c.kvlen = c.qlen = true;
    });
    add("empty S", [](Case& c) {
      c.S = 0;
      c.sinks = true;
    });
    int id = 1;
    for (auto& c : cs) {
      if (*only && c.name.find(only) == std::string::npos) continue;
      if (id % shards == shard) check(c, id);
      ++id;
    }
    std::mt19937 rng(12345);
    for (int f = 0; f < fuzz; ++f) {
      Case c;
      c.name = "fuzz" + std::to_string(f);
      auto one = [&](int n) { return rng() % n == 0; };
      c.B = 1 + rng() % 4;
      c.K = 1 + rng() % 3;
      c.N = c.K * (1 + rng() % 3);
      c.T = 1 + rng() % 420;
      c.S = one(2) ? c.T : 1 + rng() % 420;
      int top = head_dims[rng() % head_dims.size()];
      c.H = top;
      c.Hv = top == 192 && one(2) ? 128 : head_dim_v(top);
      if (one(2)) {
        c.H = std::max(8, top - 8 * (int)(rng() % 4));
        c.Hv = std::max(8, c.Hv - 8 * (int)(rng() % 4));
      }
      c.causal = one(2);
      if (one(3)) {
        c.left = rng() % 200;
        if (one(2)) c.right = (int)(rng() % 100) - 20;
      }
      c.offset = one(3);
      c.qpos = one(8);
      c.kpos = one(8);
      c.qlen = one(4);
      c.kvlen = one(4);
      if (one(3)) c.seg = 1 + rng() % 4;
      if (one(6)) c.mask = 1 + rng() % 15;
      if (one(6)) {
        c.bias = 1 + rng() % 15;
        c.bias_dt = rng() % 3;
      }
      if (one(5)) c.cap = 3 + rng() % 20;
      c.sinks = one(5);
      c.poison = one(2);
      c.share_k = one(8) && !c.poison;
      c.dlse = one(4);
      c.deterministic = one(5);
      c.dbias = c.bias && one(2);
      c.blocks = one(2);
      if (one(8)) {
        c.mask = 1 + rng() % 15;
        c.tile_rows = 16 << rng() % 5;
        c.tile_cols = 8 << rng() % 6;
      }
      c.dt = getenv("F16") ? rng() % 2 : dtype;
      if (f % shards == shard) check(c, 1000 + f);
    }
    printf("checked: %d passed, %d failed, %d refused\n", passed, failures, refused);
  }
  if (perf) {
    auto row = [&](int H, bool causal, int B, int T, double f, double b) {
      Case c;
      c.H = c.Hv = H;
      c.N = c.K = 2048 / H;
      c.B = B;
      c.T = c.S = T;
      c.causal = causal;
      char l[64];
      snprintf(l, sizeof l, "H%d causal%d %dx%d", H, causal, B, T);
      time_case(c, 0, l, f, b);
    };
    for (int h : head_dims) {
      if (h == 64) {
        row(64, 0, 4, 4096, 486, 494);
        row(64, 0, 1, 16384, 516, 528);
        row(64, 1, 4, 4096, 457, 445);
        row(64, 1, 1, 16384, 498, 540);
      }
      if (h == 128) {
        row(128, 0, 16, 1024, 621, 445);
        row(128, 0, 4, 4096, 640, 562);
        row(128, 0, 1, 16384, 663, 606);
        row(128, 1, 16, 1024, 481, 340);
        row(128, 1, 4, 4096, 671, 497);
        row(128, 1, 1, 16384, 632, 603);
      }
      if (h == 256) {
        row(256, 0, 4, 4096, 693, 433);
        row(256, 0, 1, 16384, 705, 460);
        row(256, 1, 4, 4096, 675, 396);
        row(256, 1, 1, 16384, 710, 456);
      }
      if (h == 192) {
        Case c;
        c.H = 192;
        c.Hv = 128;
        c.N = c.K = 16;
        c.B = 2;
        c.T = c.S = 8192;
        c.causal = true;
        time_case(c, 0, "192/128 causal 2x8192", 547, 416);
      }
      if (h == 96) {
        Case c;
        c.H = c.Hv = 96;
        c.N = c.K = 16;
        c.B = 4;
        c.T = c.S = 4096;
        c.causal = true;
        time_case(c, 0, "H96 causal 4x4096 (no peer figure)", 1, 1);
      }
      if (h != 128) continue;
      auto gqa = [&](int B, int T, double f, double b) {
        Case c;
        c.N = 32;
        c.K = 8;
        c.B = B;
        c.T = c.S = T;
        c.causal = true;
        char l[64];
        snprintf(l, sizeof l, "GQA 32:8 causal %dx%d", B, T);
        time_case(c, 0, l, f, b);
      };
      gqa(4, 4096, 614, 497);
      gqa(1, 16384, 665, 586);
      {
        Case c;
        c.N = 32;
        c.K = 8;
        c.B = 1;
        c.T = c.S = 32768;
        c.causal = true;
        c.left = 1023;
        time_case(c, 1024.0 * 32768 - 1024.0 * 1023 / 2, "window 1024 1x32768", 512, 379);
      }
      {
        Case c;
        c.N = 32;
        c.K = 8;
        c.B = 4;
        c.T = c.S = 4096;
        c.causal = true;
        c.cap = 30;
        time_case(c, 0, "GQA causal 4x4096 softcap", 614, 497);
        c.cap = 0;
        c.sinks = true;
        time_case(c, 0, "GQA causal 4x4096 sinks", 614, 497);
        c.sinks = false;
        c.deterministic = true;
        time_case(c, 0, "GQA causal 4x4096 deterministic", 614, 497);
      }
      for (int total : {16384, 131072})
        for (int kind : {0, 1, 2}) {
          std::mt19937 g(1);
          std::vector<int> docs;
          int left = total;
          double pairs = 0;
          while (left > 0) {
            int len;
            if (kind == 2)
              len = 16 + g() % 113;
            else {
              std::lognormal_distribution<double> ln(std::log(kind == 0 ? 512.0 : 2048.0), 1.0);
              len = std::min(8192, std::max(16, (int)ln(g)));
            }
            len = std::min(len, left);
            docs.push_back(len);
            left -= len;
            pairs += len * (len + 1.0) / 2;
          }
          Case c;
          c.N = 32;
          c.K = 8;
          c.B = 1;
          c.T = c.S = total;
          c.causal = true;
          char l[80];
          snprintf(l, sizeof l, "packed %d %s (%d docs)", total,
                   kind == 0   ? "median 512"
                   : kind == 1 ? "median 2048"
                               : "16..128",
                   (int)docs.size());
          double f[2][3] = {{423, 503, 55}, {532, 571, 58}},
                 b[2][3] = {{283, 397, 26}, {432, 491, 24}};
          time_case(c, pairs, l, f[total > 20000][kind], b[total > 20000][kind], true, docs);
        }
    }
  }
  return failures ? 1 : 0;
}
