// Tensor memory and the fifth-generation tensor core, emulated. Compiled to PTX and pasted into the rewritten module.
//
// Products, copies and commits are queued per warp and run later by the warp as a whole, at points where it is
// converged: in front of elect.sync, while it waits, and when it ends. The lanes that happen to be there share the
// work, so a warp that issues from one diverged thread is slow but right.
#include "emulator.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

extern "C" {
__device__ sm100::Control sm100_control;
}

namespace sm100 {

// flags of an operation
constexpr uint32_t kKindMask = 15, kKindF16 = 0, kKindTf32 = 1, kKindF8 = 2;
constexpr uint32_t kAInTensorMemory = 16, kTwoCtas = 32, kMulticast = 64;

static __device__ __forceinline__ uint32_t LaneId() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(r));
  return r;
}
static __device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
static __device__ __forceinline__ uint64_t Now() {
  uint64_t r;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(r));
  return r;
}
static __device__ __forceinline__ uint32_t Thread() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
static __device__ __forceinline__ uint32_t Warp() { return Thread() / 32; }
static __device__ __forceinline__ uint32_t Random() {
  uint32_t x = static_cast<uint32_t>(clock64()) * 2654435761u ^ (sm100_control.seed + Warp() * 977u);
  x ^= x >> 15;
  x *= 2246822519u;
  return x ^ (x >> 13);
}

// The lanes that run a piece of work together.
struct Crew {
  uint32_t mask, rank, size;
  __device__ Crew() : mask(__activemask()), rank(__popc(mask & ((1u << LaneId()) - 1))), size(__popc(mask)) {}
  __device__ bool is_leader() const { return rank == 0; }
  __device__ void Sync() const { __syncwarp(mask); }
  __device__ uint32_t FromLeader(uint32_t x) const { return __shfl_sync(mask, x, __ffs(mask) - 1); }
};

static __device__ __noinline__ void Tell(uint32_t code, uint32_t site, uint32_t a, uint32_t b, uint32_t c) {
  const uint32_t i = atomicAdd(&sm100_control.num_reports, 1u);
  if (i >= kMaxReports) return;
  auto* to = reinterpret_cast<volatile Report*>(sm100_control.reports) + i;
  to->site = site;
  to->block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  to->thread = Thread();
  to->a = a;
  to->b = b;
  to->c = c;
  __threadfence_system();
  to->code = code;
  __threadfence_system();
}

static __device__ __forceinline__ bool IsFaulty(uint32_t site, uint32_t fault) {
  return sm100_control.fault_site == site && sm100_control.fault == fault;
}

static __device__ void GiveUp() {
  atomicCAS(reinterpret_cast<unsigned long long*>(&sm100_control.given_up), 0ull, Now());
}

// Shared memory
// -----------------------------------------------------------------------------------------------

// The cluster-wide address of this address in block `rank` of the cluster.
static __device__ __forceinline__ uint32_t InCta(uint32_t address, uint32_t rank) {
  uint32_t r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
static __device__ __forceinline__ uint32_t SharedBytes() {
  uint32_t bytes;
  asm volatile("mov.u32 %0, %%total_smem_size;" : "=r"(bytes));
  return bytes + 1024;  // the system's part comes first and is not counted
}
static __device__ __forceinline__ void Load16(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
static __device__ __forceinline__ uint32_t LoadElement(uint32_t address, int bytes) {
  uint32_t r;
  if (bytes == 1) {
    asm volatile("ld.shared::cluster.u8 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
  } else if (bytes == 2) {
    uint16_t h;
    asm volatile("ld.shared::cluster.u16 %0, [%1];" : "=h"(h) : "r"(address) : "memory");
    r = h;
  } else {
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
  }
  return r;
}
static __device__ __forceinline__ void ArriveRemote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A shared memory operand of 32 bytes along K, as its descriptor lays it out.
struct Matrix {
  uint32_t start, leading, stride, swizzle;  // swizzle: log2 of the 16-byte chunks of a row
  bool is_plain, is_mn_major;
  int log_size;  // of an element, in bytes

  __device__ Matrix(uint64_t descriptor, int log_size_, bool is_mn_major_)
      : is_mn_major(is_mn_major_), log_size(log_size_) {
    start = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
    leading = static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4;
    stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
    const uint32_t layout = static_cast<uint32_t>(descriptor >> 61);
    is_plain = layout == 0;
    swizzle = layout == 0 ? 0 : layout == 6 ? 1 : layout == 4 ? 2 : 3;
  }

  // Version 1, no base offset, no absolute leading dimension, one of the four plain layouts.
  static __device__ bool IsValid(uint64_t descriptor) {
    const uint32_t layout = static_cast<uint32_t>(descriptor >> 61);
    return (descriptor >> 46 & 3) == 1 && (descriptor >> 49 & 7) == 0 && (descriptor >> 52 & 1) == 0 &&
           (layout == 0 || layout == 2 || layout == 4 || layout == 6);
  }

  // Swizzling permutes 16-byte chunks by address bits 7 and up, whatever the operand.
  __device__ uint32_t Swizzled(uint32_t address) const {
    return address ^ (address >> 7 & ((1u << swizzle) - 1)) << 4;
  }
  __device__ uint32_t Unswizzled(int mn, int k) const {
    const int log_chunk = 4 - log_size;
    if (!is_mn_major) {
      const uint32_t chunk = k >> log_chunk;
      return start + ((mn & 7) << (4 + swizzle)) + (mn >> 3) * stride + chunk * (is_plain ? leading : 16) +
             ((k & ((1 << log_chunk) - 1)) << log_size);
    }
    const uint32_t chunk = mn >> log_chunk, within = (mn & ((1 << log_chunk) - 1)) << log_size;
    if (is_plain) return start + within + chunk * stride + ((k & 7) << 4) + (k >> 3) * leading;
    return start + within + ((chunk & ((1u << swizzle) - 1)) << 4) + (chunk >> swizzle) * leading +
           ((k & 7) << (4 + swizzle)) + (k >> 3) * stride;
  }
  // Bytes [32 half 16) of row mn's 32 bytes along K, as words; block is mapa of the owner's address 0.
  __device__ void LoadHalf(uint32_t (&to)[4], int mn, int half, uint32_t block) const {
    if (!is_mn_major) {
      Load16(to, block + Swizzled(Unswizzled(mn, half << (4 - log_size))));
      return;
    }
    const int size = 1 << log_size, per_word = 4 >> log_size;
    for (int w = 0; w < 4; ++w) {
      to[w] = 0;
      for (int e = 0; e < per_word; ++e) {
        const int k = (half * 4 + w) * per_word + e;
        to[w] |= LoadElement(block + Swizzled(Unswizzled(mn, k)), size) << (8 * size * e);
      }
    }
  }
};

static __device__ __forceinline__ float Widen(uint32_t word, int e, uint32_t kind, uint32_t format) {
  if (kind == kKindTf32) return __uint_as_float(word & 0xffffe000u);
  if (kind == kKindF16) {
    const uint32_t x = word >> (16 * e) & 0xffff;
    return format == 0 ? __half2float(__ushort_as_half(static_cast<uint16_t>(x))) : __uint_as_float(x << 16);
  }
  const __half_raw h = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(word >> (8 * e) & 0xff),
                                               format == 0 ? __NV_E4M3 : __NV_E5M2);
  return __half2float(__half(h));
}

// Tensor memory
// -----------------------------------------------------------------------------------------------

static __device__ __forceinline__ uint32_t ColumnMask(uint32_t column, uint32_t count) {
  const uint32_t first = column / 32, last = (column + count - 1) / 32;
  return (2u << last) - (1u << first);
}

static __device__ bool IsAllocated(const Cta* cta, uint32_t column, uint32_t count) {
  if (count == 0 || column + count > kColumns) return false;
  const uint32_t mask = ColumnMask(column, count);
  return (*const_cast<const volatile uint32_t*>(&cta->allocated) & mask) == mask;
}

static __device__ Cta* PeerOf(Cta* cta, uint32_t rank) { return cta + static_cast<int>(rank) - static_cast<int>(ClusterRank()); }

// Products
// -----------------------------------------------------------------------------------------------

struct Shape {
  uint32_t kind, m, n, k, a_format, b_format;
  bool a_negative, b_negative, a_mn_major, b_mn_major, two_ctas, a_in_tmem;
  __device__ explicit Shape(const Operation& op)
      : kind(op.flags & kKindMask),
        m((op.idesc >> 24 & 31) << 4),
        n((op.idesc >> 17 & 63) << 3),
        k(kind == kKindF16 ? 16 : kind == kKindTf32 ? 8 : 32),
        a_format(op.idesc >> 7 & 7),
        b_format(op.idesc >> 10 & 7),
        a_negative(op.idesc >> 13 & 1),
        b_negative(op.idesc >> 14 & 1),
        a_mn_major(op.idesc >> 15 & 1),
        b_mn_major(op.idesc >> 16 & 1),
        two_ctas(op.flags & kTwoCtas),
        a_in_tmem(op.flags & kAInTensorMemory) {}
  __device__ int log_size() const { return kind == kKindF16 ? 1 : kind == kKindTf32 ? 2 : 0; }
};

static __device__ bool Check(Cta* cta, const Operation& op, const Shape& s) {
  bool ok = (op.idesc >> 4 & 3) == 1 && (op.idesc & 15) == 0 && (op.idesc >> 30) == 0 && (op.idesc >> 23 & 1) == 0;
  ok = ok && (s.kind == kKindTf32 ? s.a_format == 2 && s.b_format == 2 : s.a_format <= 1 && s.b_format <= 1);
  ok = ok && (s.two_ctas ? (s.m == 128 || s.m == 256) && s.n % 16 == 0 && s.n >= 32
                         : (s.m == 64 && s.n % 8 == 0) || (s.m == 128 && s.n % 16 == 0));
  ok = ok && s.n >= 8 && s.n <= 256 && !(s.a_in_tmem && s.a_mn_major);
  if (!ok) {
    Tell(kBadInstructionDescriptor, op.site, op.idesc, op.flags, 0);
    return false;
  }
  if (s.a_in_tmem && s.m != (s.two_ctas ? 256 : 128)) {
    Tell(kUnsupported, op.site, op.idesc, op.flags, 0);  // A of 64 rows per block in tensor memory
    return false;
  }
  if (!Matrix::IsValid(op.b) || (!s.a_in_tmem && !Matrix::IsValid(op.a))) {
    const uint64_t bad = Matrix::IsValid(op.b) ? op.a : op.b;
    Tell(kBadMatrixDescriptor, op.site, static_cast<uint32_t>(bad), static_cast<uint32_t>(bad >> 32), 0);
    return false;
  }
  // Swizzled rows stay inside their aligned group of chunks, so the last element bounds what is read.
  const uint32_t rows[2] = {s.two_ctas ? s.m / 2 : s.m, s.two_ctas ? s.n / 2 : s.n};
  for (int i = s.a_in_tmem ? 1 : 0; i < 2; ++i) {
    const Matrix x(i == 0 ? op.a : op.b, s.log_size(), i == 0 ? s.a_mn_major : s.b_mn_major);
    const uint32_t last = x.Unswizzled(rows[i] - 1, s.k - 1) | 15;
    if (last >= SharedBytes() || x.start < 1024) {
      Tell(kOutsideSharedMemory, op.site, x.start, last, SharedBytes());
      return false;
    }
  }
  const uint32_t d_columns = s.two_ctas && s.m == 128 ? s.n / 2 : s.n;
  const uint32_t d = op.d & 0xffff, a = static_cast<uint32_t>(op.a) & 0xffff;
  if (d + d_columns > kColumns || (s.a_in_tmem && a + 8 > kColumns) || (op.d >> 16) != 0) {
    Tell(kOutsideTensorMemory, op.site, op.d, static_cast<uint32_t>(op.a), d_columns);
    return false;
  }
  // Told, but done: the hardware's memory is there as well.
  if (!IsAllocated(cta, d, d_columns) || (s.a_in_tmem && !IsAllocated(cta, a, 8)))
    Tell(kNotAllocated, op.site, op.d, static_cast<uint32_t>(op.a), d_columns);
  return true;
}

// How a block's rows of D lie in the lanes.
enum Rows { kStraight, kM64, kSplitN };

// D (+)= A B^T for `rows` rows of one block; B is in operand[n][k], K padded to 16 or 32 with zeros.
static __device__ __noinline__ void Multiply(const Crew& crew, Cta* cta, const Operation& op, const Shape& s,
                                             const float* operand, uint32_t rank, uint32_t rows, Rows layout) {
  const uint32_t padded = s.k < 16 ? 16 : s.k;
  const Matrix a_matrix(op.a, s.log_size(), s.a_mn_major);
  const uint32_t block = InCta(0, rank);
  const uint32_t a_column = static_cast<uint32_t>(op.a) & 0xffff, a_lane = static_cast<uint32_t>(op.a) >> 16 & 0x7f;
  const uint32_t d_column = op.d & 0xffff, half_n = s.n / 2;
  const float shrink = exp2f(-static_cast<float>(op.scale));
  uint32_t bad = 0;
  for (uint32_t first = crew.rank; first < rows; first += 2 * crew.size) {
    for (uint32_t k0 = 0; k0 < padded; k0 += 16) {
      float a[2][16];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t row = first + r * crew.size;
#pragma unroll
        for (int i = 0; i < 16; ++i) a[r][i] = 0.f;
        if (row >= rows) continue;
        const int words = s.kind == kKindF8 ? 4 : 8;  // of these 16 (tf32: 8) elements
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (half * 4 >= words) break;
          const int part = s.kind == kKindF8 ? k0 / 16 : half;
          uint32_t w[4];
          if (s.a_in_tmem) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              w[i] = cta->tmem[(a_column + part * 4 + i) * kLanes + ((a_lane + row) & 127)];
              if (w[i] == kUnwritten || w[i] == kPending) bad = w[i];
            }
          } else {
            a_matrix.LoadHalf(w, row, part, block);
          }
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            if (s.kind == kKindF8) {
              a[r][i] = Widen(w[i / 4], i % 4, s.kind, s.a_format);
            } else if (s.kind == kKindF16) {
              if (i / 8 == half) a[r][i] = Widen(w[i / 2 % 4], i % 2, s.kind, s.a_format);
            } else if (i < 8 && i / 4 == half) {
              a[r][i] = Widen(w[i % 4], 0, s.kind, s.a_format);
            }
          }
        }
        if (s.a_negative) {
#pragma unroll
          for (int i = 0; i < 16; ++i) a[r][i] = -a[r][i];
        }
      }
      const bool accumulates = k0 > 0 || (op.flags >> 8 & 1);
#pragma unroll 1
      for (uint32_t n = 0; n < s.n; n += 4) {
        uint32_t* to[2];
        bool keeps[2];
        float acc[2][4];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint32_t row = first + r * crew.size;
          uint32_t lane = layout == kM64 ? row / 16 * 32 + row % 16 : row, column = n;
          if (layout == kSplitN && n >= half_n) {
            lane += 64;
            column -= half_n;
          }
          keeps[r] = row >= rows || (op.lanes[rank % 2 * 4 * s.two_ctas + lane / 32 % 4] >> (lane & 31) & 1);
          to[r] = cta->tmem + (d_column + column) * kLanes + (lane & 127);
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            acc[r][c] = 0.f;
            if (accumulates && row < rows) {
              const uint32_t word = to[r][c * kLanes];
              if (word == kUnwritten || word == kPending) bad = word;
              acc[r][c] = __uint_as_float(word) * (k0 == 0 ? shrink : 1.f);
            }
          }
        }
#pragma unroll
        for (int k = 0; k < 16; k += 4) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const float4 b = *reinterpret_cast<const float4*>(operand + (n + c) * padded + k0 + k);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              acc[r][c] = fmaf(a[r][k], b.x, acc[r][c]);
              acc[r][c] = fmaf(a[r][k + 1], b.y, acc[r][c]);
              acc[r][c] = fmaf(a[r][k + 2], b.z, acc[r][c]);
              acc[r][c] = fmaf(a[r][k + 3], b.w, acc[r][c]);
            }
          }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (keeps[r]) continue;
#pragma unroll
          for (int c = 0; c < 4; ++c) to[r][c * kLanes] = __float_as_uint(acc[r][c]);
        }
      }
    }
  }
  const uint32_t who = __ballot_sync(crew.mask, bad != 0);
  if (bad != 0 && LaneId() == static_cast<uint32_t>(__ffs(who) - 1)) {
    Tell(bad == kUnwritten ? kReadUnwritten : kReadPending, op.site, op.d, static_cast<uint32_t>(op.a), op.flags);
  }
}

static __device__ void WidenB(const Crew& crew, const Operation& op, const Shape& s, float* operand, uint32_t rank,
                              uint32_t rows) {
  const Matrix matrix(op.b, s.log_size(), s.b_mn_major);
  const uint32_t padded = s.k < 16 ? 16 : s.k, block = InCta(0, rank);
  const int per_word = 4 >> s.log_size(), per_half = 4 * per_word;
  for (uint32_t row = crew.rank; row < rows; row += crew.size) {
    for (int half = 0; half < 2; ++half) {
      uint32_t w[4];
      matrix.LoadHalf(w, row, half, block);
      for (int i = 0; i < per_half; ++i) {
        const float x = Widen(w[i / per_word], i % per_word, s.kind, s.b_format);
        operand[row * padded + half * per_half + i] = s.b_negative ? -x : x;
      }
    }
    for (uint32_t k = s.k; k < padded; ++k) operand[row * padded + k] = 0.f;
  }
}

static __device__ void RunMma(const Crew& crew, Cta* cta, Queue* queue, const Operation& op) {
  const Shape s(op);
  uint32_t ok = 1;
  if (crew.is_leader()) ok = Check(cta, op, s);
  if (!crew.FromLeader(ok)) return;
  if (!s.two_ctas) {
    WidenB(crew, op, s, queue->operand, ClusterRank(), s.n);
    crew.Sync();
    Multiply(crew, cta, op, s, queue->operand, ClusterRank(), s.m, s.m == 64 ? kM64 : kStraight);
  } else {
    const uint32_t even = ClusterRank() & ~1u, padded = s.k < 16 ? 16 : s.k;
    for (uint32_t c = 0; c < 2; ++c) WidenB(crew, op, s, queue->operand + c * s.n / 2 * padded, even + c, s.n / 2);
    crew.Sync();
    for (uint32_t c = 0; c < 2; ++c) {
      Multiply(crew, PeerOf(cta, even + c), op, s, queue->operand, even + c, s.m / 2,
               s.m == 256 ? kStraight : kSplitN);
    }
  }
  crew.Sync();
}

// tcgen05.cp: 8-row groups of 16-byte chunks into lanes. op.idesc: rows | 16-byte chunks per row << 8 | spread << 12,
// where spread says which warps' lanes get row r: 0 lane r, 1 warps 0 and 2 or 1 and 3, 2 warps 0 and 1 or 2 and 3,
// 3 all warps.
static __device__ void RunCopy(const Crew& crew, Cta* cta, const Operation& op) {
  const uint32_t rows = op.idesc & 255, chunks = op.idesc >> 8 & 15, spread = op.idesc >> 12, column = op.d & 0xffff;
  uint32_t ok = 1;
  if (crew.is_leader()) {
    const Matrix x(op.a, 0, false);
    const uint32_t last = x.Unswizzled(rows - 1, chunks * 16 - 1);
    if (!Matrix::IsValid(op.a)) {
      Tell(kBadMatrixDescriptor, op.site, static_cast<uint32_t>(op.a), static_cast<uint32_t>(op.a >> 32), 0);
      ok = 0;
    } else if (last >= SharedBytes() || x.start < 1024) {
      Tell(kOutsideSharedMemory, op.site, x.start, last, SharedBytes());
      ok = 0;
    } else if (!IsAllocated(cta, column, chunks * 4)) {
      Tell(kNotAllocated, op.site, op.d, 0, chunks * 4);
      ok = 0;
    }
  }
  if (!crew.FromLeader(ok)) return;
  const bool two_ctas = op.flags & kTwoCtas;
  const uint32_t first_rank = two_ctas ? ClusterRank() & ~1u : ClusterRank();
  for (uint32_t c = 0; c < (two_ctas ? 2u : 1u); ++c) {
    const Matrix x(op.a, 0, false);
    const uint32_t block = InCta(0, first_rank + c);
    Cta* to = PeerOf(cta, first_rank + c);
    for (uint32_t row = crew.rank; row < rows; row += crew.size) {
      for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
        uint32_t w[4];
        x.LoadHalf(w, row, chunk, block);
        for (uint32_t copy = 0; copy < (spread == 0 ? 1u : spread == 3 ? 4u : 2u); ++copy) {
          const uint32_t lane = spread == 0   ? row
                                : spread == 1 ? row % 32 + (row / 32 + 2 * copy) * 32
                                : spread == 2 ? row % 32 + (row / 32 * 2 + copy) * 32
                                              : row % 32 + copy * 32;
          for (int i = 0; i < 4; ++i) to->tmem[(column + chunk * 4 + i) * kLanes + lane] = w[i];
        }
      }
    }
  }
  crew.Sync();
}

static __device__ void RunCommit(const Crew& crew, const Operation& op) {
  __threadfence();
  crew.Sync();
  if (!crew.is_leader()) return;
  if (op.flags & kMulticast) {
    for (uint32_t rank = 0; rank < 16; ++rank) {
      if (op.scale >> rank & 1) ArriveRemote(InCta(op.d & 0xffffff, rank));
    }
  } else {
    ArriveRemote(op.d);
  }
}

// Queues
// -----------------------------------------------------------------------------------------------

static __device__ __forceinline__ uint32_t Volatile(const uint32_t& x) { return *const_cast<const volatile uint32_t*>(&x); }
static __device__ __forceinline__ void SetVolatile(uint32_t& x, uint32_t value) {
  *const_cast<volatile uint32_t*>(&x) = value;
}

// Runs what is due. `needed` operations run in any mode; `waits`: the warp has nothing else to do.
static __device__ __noinline__ void RunQueue(Cta* cta, Queue* queue, uint32_t needed, bool waits) {
  const Crew crew;
  uint32_t is_locked = 0, until = 0, head = 0;
  if (crew.is_leader()) {
    is_locked = atomicCAS(&queue->lock, 0u, 1u) == 0;
    if (is_locked) {
      head = Volatile(queue->head);
      const uint32_t tail = Volatile(queue->tail), committed = Volatile(queue->commits);
      const uint32_t mode = sm100_control.mode;
      // Positions run on without end; `committed` is one past the last commit.
      if (mode == kEager) {
        until = tail;
      } else if (mode == kDeferred) {
        until = waits && committed > head ? committed : head;
      } else {
        until = head + Random() % (tail - head + 1);
        if (waits && committed > until) until = committed;
      }
      if (until < head + needed) until = head + needed;
    }
  }
  is_locked = crew.FromLeader(is_locked);
  if (!is_locked) return;
  head = crew.FromLeader(head);
  until = crew.FromLeader(until);
  if (head != until) __threadfence();
  const bool is_given_up = *reinterpret_cast<volatile uint64_t*>(&sm100_control.given_up) != 0;
  for (; head < until; ++head) {
    if (is_given_up) {
      if (crew.is_leader()) SetVolatile(queue->head, head + 1);
      continue;
    }
    const Operation op = queue->operations[head % kQueueLength];
    if (op.kind == Operation::kMma) RunMma(crew, cta, queue, op);
    if (op.kind == Operation::kCopy) RunCopy(crew, cta, op);
    if (op.kind == Operation::kCommit) RunCommit(crew, op);
    crew.Sync();
    if (crew.is_leader()) {
      SetVolatile(queue->head, head + 1);
      *reinterpret_cast<volatile uint64_t*>(&sm100_control.last_progress) = Now();
    }
  }
  __threadfence();
  crew.Sync();
  if (crew.is_leader()) atomicExch(&queue->lock, 0u);
  crew.Sync();
}

static __device__ Queue* QueueOf(Cta* cta) {
  const uint32_t i = Volatile(cta->queue_of_warp[Warp() % kWarps]);
  return i == 0 ? nullptr : &cta->queues[i - 1];
}

// One thread at a time adds to its warp's queue.
static __device__ void Append(Cta* cta, const Operation& op) {
  Queue* queue = QueueOf(cta);
  if (queue == nullptr) {
    const uint32_t i = atomicAdd(&cta->num_queues, 1u);
    if (i >= kQueues) {
      Tell(kTooManyQueues, op.site, i, 0, 0);
      asm volatile("trap;");
    }
    queue = &cta->queues[i];
    SetVolatile(queue->warp, Warp());
    SetVolatile(cta->queue_of_warp[Warp() % kWarps], i + 1);
  }
  if (Volatile(queue->tail) - Volatile(queue->head) >= kQueueLength) RunQueue(cta, queue, 1, false);
  const uint32_t tail = Volatile(queue->tail);
  queue->operations[tail % kQueueLength] = op;
  __threadfence();
  SetVolatile(queue->tail, tail + 1);
  if (op.kind == Operation::kCommit) SetVolatile(queue->commits, tail + 1);
}

static __device__ void AppendInTurn(Cta* cta, const Operation& op) {
  for (uint32_t mask = __activemask(), turn = 0; mask != 0; mask &= mask - 1) {
    turn = __ffs(mask) - 1;
    if (LaneId() == turn) Append(cta, op);
  }
}

}  // namespace sm100

// What the rewritten code calls
// -----------------------------------------------------------------------------------------------

using namespace sm100;

extern "C" {

__device__ __noinline__ uint64_t sm100_enter() {
  uint32_t x, y, z, nx, ny, size;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(x));
  asm volatile("mov.u32 %0, %%clusterid.y;" : "=r"(y));
  asm volatile("mov.u32 %0, %%clusterid.z;" : "=r"(z));
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(nx));
  asm volatile("mov.u32 %0, %%nclusterid.y;" : "=r"(ny));
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  const uint64_t linear = (x + nx * (y + static_cast<uint64_t>(ny) * z)) * size + ClusterRank();
  return sm100_control.ctas + linear * sizeof(Cta);
}

__device__ __noinline__ void sm100_serve(uint64_t cta_) {
  Cta* cta = reinterpret_cast<Cta*>(cta_);
  if (Queue* queue = QueueOf(cta); queue != nullptr && Volatile(queue->head) != Volatile(queue->tail)) {
    RunQueue(cta, queue, 0, false);
  }
}

__device__ __noinline__ void sm100_leave(uint64_t cta_) {
  Cta* cta = reinterpret_cast<Cta*>(cta_);
  if (Queue* queue = QueueOf(cta); queue != nullptr && Volatile(queue->head) != Volatile(queue->tail)) {
    RunQueue(cta, queue, 0, true);
  }
}

// After a try_wait that failed. Gives back whether to go on without what was waited for: once a hang has been found
// and told, the kernel is brought to an end, which costs less than the loss of the context.
__device__ __noinline__ uint64_t sm100_wait(uint64_t cta_, uint32_t site, uint32_t barrier, uint32_t parity) {
  Cta* cta = reinterpret_cast<Cta*>(cta_);
  if (Queue* queue = QueueOf(cta); queue != nullptr && Volatile(queue->head) != Volatile(queue->tail)) {
    RunQueue(cta, queue, 0, true);
  }
  const Crew crew;
  if (crew.is_leader()) {
    volatile Wait* wait = &cta->waits[Warp() % kWarps];
    const uint64_t now = Now();
    if (wait->site != site + 1) {
      wait->site = site + 1;
      wait->since = now;
      wait->reported = 0;
    }
    // Progress of any block counts, a wait for a slow neighbour included.
    const uint64_t progress = *reinterpret_cast<volatile uint64_t*>(&sm100_control.last_progress);
    if (progress > wait->since) wait->since = progress;
    if (now > wait->since + sm100_control.timeout && !wait->reported) {
      wait->reported = 1;
      Tell(kHang, site, barrier, parity, 0);
    }
    // Long enough for the other warps to tell where they are.
    if (now > wait->since + sm100_control.timeout + 20000000) GiveUp();
  }
  crew.Sync();
  const uint64_t given_up = *reinterpret_cast<volatile uint64_t*>(&sm100_control.given_up);
  if (given_up != 0 && Now() > given_up + 500000000) asm volatile("trap;");
  return given_up != 0;
}

__device__ __noinline__ void sm100_mma(uint64_t cta, uint32_t site, uint32_t d, uint64_t a, uint64_t b, uint32_t idesc,
                                       uint32_t flags, uint32_t scale, uint32_t l0, uint32_t l1, uint32_t l2,
                                       uint32_t l3, uint32_t l4, uint32_t l5, uint32_t l6, uint32_t l7) {
  if (sm100_control.fault_site == site) {
    const uint64_t value = sm100_control.fault_value;
    switch (sm100_control.fault) {
      case kDrop: return;
      case kInstruction: idesc ^= static_cast<uint32_t>(value); break;
      case kA: a ^= value; break;
      case kB: b ^= value; break;
      case kD: d += static_cast<uint32_t>(value); break;
      case kAccumulate: flags ^= 256; break;
      default: break;
    }
  }
  Operation op{};
  op.kind = Operation::kMma;
  op.site = site;
  op.a = a;
  op.b = b;
  op.d = d;
  op.idesc = idesc;
  op.flags = flags;
  op.scale = scale;
  const uint32_t lanes[8] = {l0, l1, l2, l3, l4, l5, l6, l7};
  for (int i = 0; i < 8; ++i) op.lanes[i] = lanes[i];
  AppendInTurn(reinterpret_cast<Cta*>(cta), op);
}

__device__ __noinline__ void sm100_copy(uint64_t cta, uint32_t site, uint32_t d, uint64_t source, uint32_t shape,
                                        uint32_t flags) {
  Operation op{};
  op.kind = Operation::kCopy;
  op.site = site;
  op.a = source;
  op.d = d;
  op.idesc = shape;
  op.flags = flags;
  AppendInTurn(reinterpret_cast<Cta*>(cta), op);
}

__device__ __noinline__ void sm100_commit(uint64_t cta, uint32_t site, uint32_t barrier, uint32_t flags,
                                          uint32_t multicast) {
  if (IsFaulty(site, kDrop)) return;
  Operation op{};
  op.kind = Operation::kCommit;
  op.site = site;
  op.d = barrier;
  op.flags = flags;
  op.scale = multicast;
  if (IsFaulty(site, kEarly)) {
    ArriveRemote(barrier);
    return;
  }
  AppendInTurn(reinterpret_cast<Cta*>(cta), op);
}

__device__ __noinline__ void sm100_alloc(uint64_t cta_, uint32_t site, uint32_t to, uint32_t columns, uint32_t flags) {
  Cta* cta = reinterpret_cast<Cta*>(cta_);
  if (columns < 32 || columns > kColumns || (columns & (columns - 1)) != 0) {
    if (LaneId() == 0) Tell(kBadAlloc, site, columns, 0, 0);
    return;
  }
  if (LaneId() == 0 && Volatile(cta->relinquished)) Tell(kAllocAfterRelinquish, site, columns, 0, 0);
  uint32_t base = 0;
  if (LaneId() == 0) {
    const uint32_t blocks = columns / 32, wanted = blocks == 16 ? 0xffffu : (1u << blocks) - 1;
    const uint64_t start = Now();
    for (bool found = false; !found;) {
      const uint32_t now = Volatile(cta->allocated);
      for (uint32_t at = 0; at + blocks <= 16 && !found; at += blocks) {
        if ((now & (wanted << at)) == 0 &&
            atomicCAS(&cta->allocated, now, now | (wanted << at)) == now) {
          found = true;
          base = at * 32;
        }
      }
      if (!found && Now() > start + sm100_control.timeout) {
        Tell(kHang, site, columns, now, 0);
        asm volatile("trap;");
      }
    }
    cta->alloc_site = site;
  }
  base = __shfl_sync(0xffffffffu, base, 0);
  for (uint32_t i = LaneId(); i < columns * kLanes; i += 32) cta->tmem[base * kLanes + i] = kUnwritten;
  __threadfence();
  __syncwarp();
  if ((flags & kTwoCtas) && LaneId() == 0) {
    // Both blocks of a pair allocate before either goes on, for products write to both.
    Cta* peer = PeerOf(cta, ClusterRank() ^ 1);
    atomicAdd(&cta->pair_allocations, 1u);
    __threadfence();
    for (const uint64_t start = Now(); Volatile(peer->pair_allocations) < Volatile(cta->pair_allocations);) {
      if (Now() > start + sm100_control.timeout) {
        Tell(kHang, site, columns, 0, 0);
        asm volatile("trap;");
      }
    }
  }
  __syncwarp();
  // Last, so that a reader that is not ordered after the allocation finds what was there before.
  if (LaneId() == 0) asm volatile("st.shared::cta.u32 [%0], %1;" ::"r"(to), "r"(base) : "memory");
  __syncwarp();
}

__device__ __noinline__ void sm100_dealloc(uint64_t cta_, uint32_t site, uint32_t base, uint32_t columns) {
  Cta* cta = reinterpret_cast<Cta*>(cta_);
  __syncwarp();
  if (LaneId() == 0) {
    if (columns < 32 || columns > kColumns || (columns & (columns - 1)) != 0 || (base & 31) != 0 ||
        base + columns > kColumns) {
      Tell(kBadDealloc, site, base, columns, 0);
    } else {
      for (uint32_t i = 0; i < Volatile(cta->num_queues) && i < kQueues; ++i) {
        const uint32_t head = Volatile(cta->queues[i].head), tail = Volatile(cta->queues[i].tail);
        for (uint32_t at = head; at < tail; ++at) {
          const Operation& op = cta->queues[i].operations[at % kQueueLength];
          if (op.kind == Operation::kMma && (op.d & 0xffff) >= base && (op.d & 0xffff) < base + columns) {
            Tell(kDeallocWhilePending, site, base, columns, op.site);
            break;
          }
        }
      }
      const uint32_t mask = ColumnMask(base, columns), before = atomicAnd(&cta->allocated, ~mask);
      if ((before & mask) != mask) Tell(kBadDealloc, site, base, columns, before);
    }
  }
  __syncwarp();
}

__device__ __noinline__ void sm100_relinquish(uint64_t cta) {
  if (LaneId() == 0) SetVolatile(reinterpret_cast<Cta*>(cta)->relinquished, 1);
  __syncwarp();
}

// A TMA load whose barrier may be in the other block of the pair, which Hopper's cannot tell. Such a load goes by a
// barrier of its own, and the bytes are then counted where they are awaited.
__device__ __noinline__ void sm100_pair_load(uint32_t site, uint32_t to, uint64_t tensor, uint32_t barrier,
                                             uint32_t own, uint32_t rank, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t c4) {
  const bool is_remote = (barrier >> 24) != (to >> 24);
  const uint32_t bytes = reinterpret_cast<const uint32_t*>(tensor)[16];  // of a box; found by comparing tensor maps
  uint32_t signal = barrier;
  if (is_remote) {
    // As an address in the cluster, which names the block in its upper byte.
    signal = (own & 0xffffff) + (to & 0xff000000) + 8 * (Warp() % kWarps);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(signal) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(signal), "r"(bytes) : "memory");
  }
#define LOAD(n, coordinates)                                                                                   \
  asm volatile("cp.async.bulk.tensor." n "d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {" \
               coordinates "}], [%2];" ::"r"(to), "l"(tensor), "r"(signal), "r"(c0), "r"(c1), "r"(c2), "r"(c3), \
               "r"(c4) : "memory")
  switch (rank) {
    case 2: LOAD("2", "%3, %4"); break;
    case 3: LOAD("3", "%3, %4, %5"); break;
    case 4: LOAD("4", "%3, %4, %5, %6"); break;
    default: LOAD("5", "%3, %4, %5, %6, %7"); break;
  }
#undef LOAD
  if (is_remote) {
    uint32_t done = 0;
    for (const uint64_t start = Now(); !done;) {
      if (Now() > start + sm100_control.timeout) {
        Tell(kHang, site, to, barrier, bytes);
        asm volatile("trap;");
      }
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
          : "=r"(done)
          : "r"(signal)
          : "memory");
    }
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(signal) : "memory");
    __threadfence();
    asm volatile("mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
  }
}

}  // extern "C"
