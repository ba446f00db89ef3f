// Instructions one by one: what CuTe says that they do, against what the emulator does.
//
//   instructions            loads, stores, copies, products and arithmetic; prints [OK] or what differs
//   instructions FAULT      one mistake that the emulator is to report: leak, double-free, ...
#include <cute/arch/copy_sm100.hpp>
#include <cute/arch/simd_sm100.hpp>
#include <cute/arch/tmem_allocator_sm100.hpp>
#include <cute/atom/copy_traits_sm100.hpp>
#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

using namespace cute;

// Not unnamed: CuTe has an unnamed namespace of its own, which nvcc's host code would mix up with this.
namespace instructions {

int failures = 0;

void Check(bool ok, const char* what) {
  if (!ok) {
    std::printf("[FAIL] %s\n", what);
    ++failures;
  }
}

template <class T>
struct Buffer {
  T* data = nullptr;
  explicit Buffer(size_t count) { cudaMalloc(reinterpret_cast<void**>(&data), count * sizeof(T)); }
  ~Buffer() { cudaFree(data); }
  std::vector<T> Get(size_t count) const {
    std::vector<T> host(count);
    const cudaError_t error = cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost);
    if (error != cudaSuccess) std::printf("[FAIL] %s\n", cudaGetErrorString(error));
    return host;
  }
};

__device__ uint32_t Allocate(uint32_t* slot, int columns = 512) {
  if (threadIdx.x < 32) {
    TMEM::Allocator1Sm allocator;
    allocator.allocate(columns, slot);
    allocator.release_allocation_lock();
  }
  __syncthreads();
  return *slot;
}

__device__ void Free(uint32_t tmem, int columns = 512) {
  __syncthreads();
  if (threadIdx.x < 32) TMEM::Allocator1Sm{}.free(tmem, columns);
}

__device__ void StoreWord(uint32_t address, uint32_t x) {
  SM100_TMEM_STORE_32dp32b1x::copy(x, address);
  cutlass::arch::fence_view_async_tmem_store();
}
__device__ uint32_t LoadWord(uint32_t address) {
  uint32_t x;
  SM100_TMEM_LOAD_32dp32b1x::copy(address, x);
  cutlass::arch::fence_view_async_tmem_load();
  return x;
}

// Loads and stores
// -----------------------------------------------------------------------------------------------

template <class Op, size_t... kI>
__device__ void CallLoad(uint32_t from, uint32_t* to, std::index_sequence<kI...>) {
  Op::copy(from, to[kI]...);
}
template <class Op, size_t... kI>
__device__ void CallStore(uint32_t to, const uint32_t* from, std::index_sequence<kI...>) {
  Op::copy(from[kI]..., to);
}

constexpr int kFilled = 64;  // columns

// Word (column, lane) holds lane * 1000 + column.
template <class Op>
__global__ void LoadKernel(uint32_t* out) {
  constexpr int kRegisters = extent<typename Op::DRegisters>::value;
  __shared__ uint32_t slot;
  const uint32_t tmem = Allocate(&slot), warp = threadIdx.x / 32;
#pragma unroll 1
  for (uint32_t c = 0; c < kFilled; ++c) StoreWord(tmem + (warp * 32 << 16) + c, threadIdx.x * 1000 + c);
  uint32_t r[kRegisters];
  CallLoad<Op>(tmem + (warp * 32 << 16), r, std::make_index_sequence<kRegisters>());
  cutlass::arch::fence_view_async_tmem_load();
  for (int i = 0; i < kRegisters; ++i) out[threadIdx.x * kRegisters + i] = r[i];
  Free(tmem);
}

template <class Op>
__global__ void StoreKernel(uint32_t* out) {
  constexpr int kRegisters = extent<typename Op::SRegisters>::value;
  __shared__ uint32_t slot;
  const uint32_t tmem = Allocate(&slot), warp = threadIdx.x / 32;
#pragma unroll 1
  for (uint32_t c = 0; c < kFilled; ++c) StoreWord(tmem + (warp * 32 << 16) + c, 0);
  uint32_t r[kRegisters];
  for (int i = 0; i < kRegisters; ++i) r[i] = threadIdx.x * 1000 + i + 1;
  CallStore<Op>(tmem + (warp * 32 << 16), r, std::make_index_sequence<kRegisters>());
  cutlass::arch::fence_view_async_tmem_store();
#pragma unroll 1
  for (uint32_t c = 0; c < kFilled; ++c) out[threadIdx.x * kFilled + c] = LoadWord(tmem + (warp * 32 << 16) + c);
  Free(tmem);
}

// (column, lane) of register i of thread t, by CuTe's layout of the instruction.
template <class Layout, class ValID>
std::pair<int, int> PlaceOf(int t, int i) {
  const long bits = Layout{}(t, i * 32);
  const long at = ValID{}(static_cast<int>(bits));
  return {static_cast<int>(at % (1 << 21)) / 32, static_cast<int>(at >> 21)};
}

template <class Op>
void TestLoad(const char* name) {
  constexpr int kRegisters = extent<typename Op::DRegisters>::value;
  using Traits = Copy_Traits<Op>;
  Buffer<uint32_t> out(128 * kRegisters);
  LoadKernel<Op><<<1, 128>>>(out.data);
  const auto got = out.Get(128 * kRegisters);
  bool ok = true;
  for (int t = 0; t < 128; ++t) {
    for (int i = 0; i < kRegisters; ++i) {
      const auto [column, lane] = PlaceOf<typename Traits::DstLayout, typename Traits::ValID>(t % 32, i);
      ok = ok && got[t * kRegisters + i] == static_cast<uint32_t>((lane + t / 32 * 32) * 1000 + column);
    }
  }
  Check(ok, name);
}

template <class Op>
void TestStore(const char* name) {
  constexpr int kRegisters = extent<typename Op::SRegisters>::value;
  using Traits = Copy_Traits<Op>;
  Buffer<uint32_t> out(128 * kFilled);
  StoreKernel<Op><<<1, 128>>>(out.data);
  const auto got = out.Get(128 * kFilled);
  std::vector<uint32_t> expected(128 * kFilled);
  for (int t = 0; t < 128; ++t) {
    for (int i = 0; i < kRegisters; ++i) {
      const auto [column, lane] = PlaceOf<typename Traits::SrcLayout, typename Traits::ValID>(t % 32, i);
      expected[(lane + t / 32 * 32) * kFilled + column] = t * 1000 + i + 1;
    }
  }
  Check(got == expected, name);
}

#define TEST_SHAPE(shape)                                   \
  TestLoad<SM100_TMEM_LOAD_##shape>("tcgen05.ld " #shape);  \
  TestStore<SM100_TMEM_STORE_##shape>("tcgen05.st " #shape)

// Products
// -----------------------------------------------------------------------------------------------

template <class Mma, class LayoutA, class LayoutB, int kM, int kN, bool kAInTmem>
__global__ void ProductKernel(float* out) {
  using A = typename Mma::ValTypeA;
  extern __shared__ __align__(1024) char raw[];
  __shared__ uint32_t slot;
  __shared__ uint64_t barrier;
  Mma mma;
  auto thread = mma.get_slice(0);
  Tensor sA = make_tensor(make_smem_ptr(reinterpret_cast<A*>(raw)), LayoutA{});
  Tensor sB = make_tensor(make_smem_ptr(reinterpret_cast<A*>(raw) + cosize_v<LayoutA>), LayoutB{});
  // ((M, K), rest of M, rest of K): element (m, k) is (m * 3 + k * 5) % 7 - 3, and (n, k) likewise.
  constexpr int kKAtom = size<0, 1>(LayoutA{}), kKBlocks = size<2>(LayoutA{});
  for (int i = threadIdx.x; i < kM * kKAtom * kKBlocks; i += blockDim.x) {
    const int m = i % kM, k = i / kM;
    sA(make_coord(m, k % kKAtom), 0, k / kKAtom) = static_cast<A>(static_cast<float>((m * 3 + k * 5) % 7 - 3));
  }
  for (int i = threadIdx.x; i < kN * kKAtom * kKBlocks; i += blockDim.x) {
    const int n = i % kN, k = i / kN;
    sB(make_coord(n, k % kKAtom), 0, k / kKAtom) = static_cast<A>(static_cast<float>((n * 2 + k * 3) % 5 - 2));
  }
  if (threadIdx.x == 0) cutlass::arch::ClusterBarrier::init(&barrier, 1);
  cutlass::arch::fence_barrier_init();
  cutlass::arch::fence_view_async_shared();
  const uint32_t tmem = Allocate(&slot);
  Tensor tD = partition_fragment_C(mma, Shape<Int<kM>, Int<kN>>{});
  tD.data() = tmem;
  const uint32_t warp = threadIdx.x / 32, lanes = warp * 32 << 16;
  constexpr int kPerWord = 4 / sizeof(A);
  if constexpr (kAInTmem) {
#pragma unroll 1
    for (int w = 0; w < kKAtom * kKBlocks / kPerWord; ++w) {
      uint32_t word = 0;
      for (int e = 0; e < kPerWord; ++e) {
        const int k = w * kPerWord + e;
        const A x = static_cast<A>(static_cast<float>((static_cast<int>(threadIdx.x) * 3 + k * 5) % 7 - 3));
        uint32_t bits = 0;
        memcpy(&bits, &x, sizeof(A));
        word |= bits << (8 * sizeof(A) * e);
      }
      StoreWord(tmem + lanes + 256 + w, word);
    }
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  }
  __syncthreads();
  if (warp == 0) {
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    Tensor tB = thread.make_fragment_B(sB);
    auto multiply = [&](auto const& tA) {
      mma.accumulate_ = UMMA::ScaleOut::Zero;
#pragma unroll
      for (int k = 0; k < kKBlocks; ++k) {
        cute::gemm(mma, tA(_, _, k), tB(_, _, k), tD);
        mma.accumulate_ = UMMA::ScaleOut::One;
      }
    };
    if constexpr (kAInTmem) {
      Tensor tA = thread.make_fragment_A(make_tensor(make_smem_ptr(static_cast<A*>(nullptr)), LayoutA{}));
      tA.data() = tmem + 256;
      multiply(tA);
    } else {
      multiply(thread.make_fragment_A(sA));
    }
    cutlass::arch::umma_arrive(&barrier);
  }
  cutlass::arch::ClusterBarrier::wait(&barrier, 0);
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  // With 64 rows, 16 of them lie in the first lanes of each warp; the others were never written.
#pragma unroll 1
  for (int n = 0; n < kN; ++n) {
    if constexpr (kM == 128) {
      out[threadIdx.x * kN + n] = __uint_as_float(LoadWord(tmem + lanes + n));
    } else {
      uint32_t x;
      SM100_TMEM_LOAD_16dp64b1x::copy(tmem + lanes + (n & ~1), x);
      cutlass::arch::fence_view_async_tmem_load();
      // Threads of this shape hold row 8 (t & 1) + t / 4 and column (t / 2) & 1.
      const int t = threadIdx.x % 32, its_row = warp * 16 + 8 * (t & 1) + t / 4;
      if ((t / 2 & 1) == (n & 1)) out[its_row * kN + n] = __uint_as_float(x);
    }
  }
  Free(tmem);
}

template <class Mma, class AtomA, class AtomB, int kM, int kN, int kK, bool kAInTmem = false, class OrderA = Step<_1, _2>,
          class OrderB = Step<_1, _2>>
void TestProduct(const char* name) {
  using Tiled = decltype(make_tiled_mma(Mma{}));
  using A = typename Tiled::ValTypeA;
  using LayoutA = decltype(UMMA::tile_to_mma_shape(AtomA{}, partition_shape_A(Tiled{}, Shape<Int<kM>, Int<kK>>{}), OrderA{}));
  using LayoutB = decltype(UMMA::tile_to_mma_shape(AtomB{}, partition_shape_B(Tiled{}, Shape<Int<kN>, Int<kK>>{}), OrderB{}));
  Buffer<float> out(kM * kN);
  constexpr int kBytes = (cosize_v<LayoutA> + cosize_v<LayoutB>)*sizeof(A) + 1024;
  auto* kernel = ProductKernel<Tiled, LayoutA, LayoutB, kM, kN, kAInTmem>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  kernel<<<1, 128, kBytes>>>(out.data);
  const auto got = out.Get(kM * kN);
  int wrong = 0;
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) {
      float expected = 0;
      for (int k = 0; k < kK; ++k) expected += static_cast<float>(((m * 3 + k * 5) % 7 - 3) * ((n * 2 + k * 3) % 5 - 2));
      wrong += got[m * kN + n] != expected;
    }
  }
  Check(wrong == 0, name);
}

template <class T>
void TestProducts(const char* name) {
  constexpr auto kK = UMMA::Major::K, kMN = UMMA::Major::MN;
  constexpr int kWidth = 64 * 2 / sizeof(T);
  std::printf("products of %s\n", name);
  TestProduct<SM100_MMA_F16BF16_SS<T, T, float, 128, 64, kK, kK>, UMMA::Layout_K_SW128_Atom<T>,
              UMMA::Layout_K_SW128_Atom<T>, 128, 64, kWidth>("128-byte swizzle");
  TestProduct<SM100_MMA_F16BF16_SS<T, T, float, 128, 96, kK, kK>, UMMA::Layout_K_SW64_Atom<T>,
              UMMA::Layout_K_SW64_Atom<T>, 128, 96, kWidth>("64-byte swizzle");
  TestProduct<SM100_MMA_F16BF16_SS<T, T, float, 128, 32, kK, kK>, UMMA::Layout_K_SW32_Atom<T>,
              UMMA::Layout_K_SW32_Atom<T>, 128, 32, kWidth>("32-byte swizzle");
  TestProduct<SM100_MMA_F16BF16_SS<T, T, float, 128, 16, kK, kK>, UMMA::Layout_K_INTER_Atom<T>,
              UMMA::Layout_K_INTER_Atom<T>, 128, 16, kWidth>("no swizzle");
  TestProduct<SM100_MMA_F16BF16_SS<T, T, float, 128, 128, kMN, kMN>, UMMA::Layout_MN_SW128_Atom<T>,
              UMMA::Layout_MN_SW128_Atom<T>, 128, 128, kWidth>("MN-major, 128-byte swizzle");
  TestProduct<SM100_MMA_F16BF16_SS<T, T, float, 128, 128, kMN, kMN>, UMMA::Layout_MN_SW128_Atom<T>,
              UMMA::Layout_MN_SW128_Atom<T>, 128, 128, kWidth, false, Step<_2, _1>, Step<_2, _1>>(
      "MN-major, 128-byte swizzle, K first");
  TestProduct<SM100_MMA_F16BF16_SS<T, T, float, 128, 64, kMN, kK>, UMMA::Layout_MN_SW64_Atom<T>,
              UMMA::Layout_K_SW128_Atom<T>, 128, 64, kWidth>("MN-major A, 64-byte swizzle");
  TestProduct<SM100_MMA_F16BF16_SS<T, T, float, 128, 64, kMN, kMN>, UMMA::Layout_MN_INTER_Atom<T>,
              UMMA::Layout_MN_INTER_Atom<T>, 128, 64, kWidth>("MN-major, no swizzle");
  TestProduct<SM100_MMA_F16BF16_SS<T, T, float, 64, 64, kK, kK>, UMMA::Layout_K_SW128_Atom<T>,
              UMMA::Layout_K_SW128_Atom<T>, 64, 64, kWidth>("64 rows");
  TestProduct<SM100_MMA_F16BF16_TS<T, T, float, 128, 256, kK, kK>, UMMA::Layout_K_SW128_Atom<T>,
              UMMA::Layout_K_SW128_Atom<T>, 128, 256, kWidth, true>("A in tensor memory");
}

// Copies from shared to tensor memory
// -----------------------------------------------------------------------------------------------

// Core matrices of 8 rows by 16 bytes, those of one row group side by side.
template <int kWhich>
__global__ void CopyKernel(uint32_t* out, int rows, int chunks) {
  __shared__ __align__(1024) uint32_t source[128 * 8];
  __shared__ uint32_t slot;
  __shared__ uint64_t barrier;
  for (int i = threadIdx.x; i < rows * chunks * 4; i += blockDim.x) {
    const int row = i / (chunks * 4), word = i % (chunks * 4);
    source[(row / 8 * chunks + word / 4) * 32 + row % 8 * 4 + word % 4] = row * 100 + word;
  }
  if (threadIdx.x == 0) cutlass::arch::ClusterBarrier::init(&barrier, 1);
  cutlass::arch::fence_barrier_init();
  cutlass::arch::fence_view_async_shared();
  const uint32_t tmem = Allocate(&slot), warp = threadIdx.x / 32, lanes = warp * 32 << 16;
#pragma unroll 1
  for (uint32_t c = 0; c < 8; ++c) StoreWord(tmem + lanes + c, 0);
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  if (warp == 0) {
    const uint64_t descriptor = static_cast<uint64_t>(cast_smem_ptr_to_uint(source) >> 4) | uint64_t{8} << 16 |
                                static_cast<uint64_t>(chunks * 8) << 32 | uint64_t{1} << 46;
    if (elect_one_sync()) {
      if constexpr (kWhich == 0)
        asm volatile("tcgen05.cp.cta_group::1.128x256b [%0], %1;" ::"r"(tmem), "l"(descriptor));
      if constexpr (kWhich == 1)
        asm volatile("tcgen05.cp.cta_group::1.128x128b [%0], %1;" ::"r"(tmem), "l"(descriptor));
      if constexpr (kWhich == 2)
        asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(tmem), "l"(descriptor));
      if constexpr (kWhich == 3)
        asm volatile("tcgen05.cp.cta_group::1.64x128b.warpx2::02_13 [%0], %1;" ::"r"(tmem), "l"(descriptor));
      if constexpr (kWhich == 4)
        asm volatile("tcgen05.cp.cta_group::1.64x128b.warpx2::01_23 [%0], %1;" ::"r"(tmem), "l"(descriptor));
    }
    cutlass::arch::umma_arrive(&barrier);
  }
  cutlass::arch::ClusterBarrier::wait(&barrier, 0);
#pragma unroll 1
  for (uint32_t c = 0; c < 8; ++c) out[threadIdx.x * 8 + c] = LoadWord(tmem + lanes + c);
  Free(tmem);
}

template <int kWhich>
void TestCopy(const char* name, int rows, int chunks) {
  Buffer<uint32_t> out(128 * 8);
  CopyKernel<kWhich><<<1, 128>>>(out.data, rows, chunks);
  const auto got = out.Get(128 * 8);
  bool ok = true;
  for (int lane = 0; lane < 128; ++lane) {
    const int warp = lane / 32;
    const int row = kWhich == 2   ? lane % 32
                    : kWhich == 3 ? warp % 2 * 32 + lane % 32
                    : kWhich == 4 ? warp / 2 * 32 + lane % 32
                                  : lane;
    for (int c = 0; c < 8; ++c) ok = ok && got[lane * 8 + c] == static_cast<uint32_t>(c < chunks * 4 ? row * 100 + c : 0);
  }
  Check(ok, name);
}

// Arithmetic
// -----------------------------------------------------------------------------------------------

__global__ void ArithmeticKernel(float* out) {
  __shared__ uint32_t slot;
  const uint32_t tmem = Allocate(&slot, 32);
  float2 x;
  const float2 a = make_float2(1.5f, -2.f), b = make_float2(3.f, 0.25f), c = make_float2(-1.f, 8.f);
  cute::fma(x, a, b, c);
  out[0] = x.x;
  out[1] = x.y;
  cute::mul(x, a, b);
  out[2] = x.x;
  out[3] = x.y;
  cute::add(x, a, b);
  out[4] = x.x;
  out[5] = x.y;
  asm volatile("max.f32 %0, %1, %2, %3;" : "=f"(out[6]) : "f"(a.x), "f"(b.x), "f"(c.x));
  asm volatile("min.f32 %0, %1, %2, %3;" : "=f"(out[7]) : "f"(a.y), "f"(b.y), "f"(c.y));
  // A NaN is passed over by max, and a product is rounded before it is added to.
  asm volatile("max.f32 %0, %1, %2, %3;" : "=f"(out[8]) : "f"(__int_as_float(0x7fffffff)), "f"(b.x), "f"(c.x));
  float2 tiny = make_float2(1.f + 0x1p-12f, 1.f + 0x1p-12f), product;
  cute::mul(product, tiny, tiny);
  cute::add(x, product, make_float2(-1.f, -1.f));
  out[9] = x.x;
  Free(tmem, 32);
}

void TestArithmetic() {
  Buffer<float> out(10);
  ArithmeticKernel<<<1, 32>>>(out.data);
  const float rounded = (1.f + 0x1p-11f) - 1.f;  // 2^-24 is lost
  const std::vector<float> expected = {3.5f, 7.5f, 4.5f, -0.5f, 4.5f, -1.75f, 3.f, -2.f, 3.f, rounded};
  Check(out.Get(10) == expected, "f32x2 and extrema of three");
}

// Mistakes
// -----------------------------------------------------------------------------------------------

enum Mistake { kLeak, kDoubleFree, kNotAllocated, kWrongLanes, kOutside, kUnwritten, kPending, kAllocAgain, kBadAlloc, kForgotten };
const char* const kMistakes[] = {"leak",    "double-free", "not-allocated", "wrong-lanes", "outside",
                                 "unwritten", "pending",   "alloc-again",   "bad-alloc",   "forgotten"};

__global__ void MistakeKernel(int mistake, uint32_t* out) {
  __shared__ uint32_t slot, second;
  const uint32_t tmem = Allocate(&slot, 64), lanes = threadIdx.x / 32 * 32 << 16;
  uint32_t x = 0;
  StoreWord(tmem + lanes, 1);
  if (mistake == kNotAllocated) StoreWord(tmem + lanes + 64, 1);
  if (mistake == kWrongLanes) x = LoadWord(tmem + ((lanes + (32 << 16)) & 0x7fffff));
  if (mistake == kOutside) x = LoadWord(tmem + lanes + 512);
  if (mistake == kUnwritten) x = LoadWord(tmem + lanes + 1);
  if (mistake == kPending) {
    SM100_TMEM_STORE_32dp32b1x::copy(x, tmem + lanes);
    SM100_TMEM_LOAD_32dp32b1x::copy(tmem + lanes, x);
    out[threadIdx.x] = x;
    cutlass::arch::fence_view_async_tmem_store();
  }
  if (mistake == kAllocAgain && threadIdx.x < 32) TMEM::Allocator1Sm{}.allocate(32, &second);
  __syncthreads();
  if (mistake == kAllocAgain) Free(second, 32);
  if (mistake == kBadAlloc && threadIdx.x < 32) TMEM::Allocator1Sm{}.allocate(48, &second);
  if (mistake == kForgotten && threadIdx.x < 32 && elect_one_sync()) {
    const uint64_t descriptor = uint64_t{64} | uint64_t{8} << 16 | uint64_t{8} << 32 | uint64_t{1} << 46;
    asm volatile("tcgen05.cp.cta_group::1.128x128b [%0], %1;" ::"r"(tmem), "l"(descriptor));
  }
  out[threadIdx.x] = x;
  if (mistake != kLeak) Free(tmem, 64);
  if (mistake == kDoubleFree) Free(tmem, 64);
}

}  // namespace instructions

int main(int argc, char** argv) {
  using namespace instructions;
  if (argc > 1 && argv[1][0] != '-') {
    for (int i = 0; i < 10; ++i) {
      if (std::strcmp(argv[1], kMistakes[i]) != 0) continue;
      Buffer<uint32_t> out(128);
      MistakeKernel<<<1, 128>>>(i, out.data);
      std::printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
      return 0;
    }
    std::printf("no mistake of that name\n");
    return 2;
  }
  TEST_SHAPE(32dp32b1x);
  TEST_SHAPE(32dp32b2x);
  TEST_SHAPE(32dp32b16x);
  TEST_SHAPE(32dp32b32x);
  TEST_SHAPE(16dp64b1x);
  TEST_SHAPE(16dp64b8x);
  TEST_SHAPE(16dp128b1x);
  TEST_SHAPE(16dp128b4x);
  TEST_SHAPE(16dp256b1x);
  TEST_SHAPE(16dp256b4x);
  TEST_SHAPE(16dp32b1x);
  TEST_SHAPE(16dp32b8x);
  TestProducts<half_t>("float16");
  TestProducts<bfloat16_t>("bfloat16");
  TestCopy<0>("tcgen05.cp 128x256b", 128, 2);
  TestCopy<1>("tcgen05.cp 128x128b", 128, 1);
  TestCopy<2>("tcgen05.cp 32x128b.warpx4", 32, 1);
  TestCopy<3>("tcgen05.cp 64x128b.warpx2::02_13", 64, 1);
  TestCopy<4>("tcgen05.cp 64x128b.warpx2::01_23", 64, 1);
  TestArithmetic();
  std::printf(failures == 0 ? "[OK] instructions\n" : "[FAIL] instructions: %d\n", failures);
  return failures == 0 ? 0 : 1;
}
