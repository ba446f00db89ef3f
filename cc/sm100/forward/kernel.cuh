// Forward attention on Blackwell: out = softmax(scale * q k^T) v for [entries, T, N, H] operands,
// and its lse.
//
// A thread block works on two groups of 128 query rows, whose scores, probabilities and outputs
// live in tensor memory. While the tensor core works on one group, a softmax warpgroup works on the
// other; a thread holds a whole row of scores, so that no row statistic needs a shuffle. A third
// warpgroup rescales outputs when a row's maximum has grown too far, and stores the results. Blocks
// are persistent and take (query tile, head, batch entry) triples, longest first.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/simd_sm100.hpp>
#include <cute/tensor.hpp>

#include "cc/gpu/forward_tile.cuh"
#include "cc/gpu/pipeline.cuh"
#include "cc/gpu/problem_params.cuh"
#include "cc/gpu/repair.cuh"
#include "cc/gpu/softmax.cuh"
#include "cc/sm100/forward/config.h"
#include "cc/sm100/load.cuh"
#include "cc/sm100/mma.cuh"
#include "cc/sm100/tmem.cuh"

namespace jax_fmha::sm100 {

using namespace cute;

using gpu::ForwardParams;

// Values need rows past kv_end as zeros, since 0 * NaN is NaN. Scores are masked by selection, so
// whatever lies behind queries and keys is harmless.
struct ForwardTensors {
  CUtensorMap q, k;
  RowMaps v;
};

template <typename Element_, ForwardMode kMode_, int kHeadDim_, int kHeadDimV_, int kKStages_,
          int kVStages_>
struct ForwardKernel {
  using Element = Element_;
  static constexpr ForwardMode kMode = kMode_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kKStages = kKStages_, kVStages = kVStages_;
  static constexpr int kKeys = kRows;  // per tile
  static constexpr bool kHasSegments = kMode != ForwardMode::kDense,
                        kHasElements = kMode == ForwardMode::kGeneral;

  // Warps 0-3 and 4-7 are the softmax warpgroups, 8-11 correct, 12 issues products, 13 loads.
  static constexpr int kThreads = 512;
  static constexpr int kCorrectionWarp = 8, kMmaWarp = 12, kLoadWarp = 13;
  // setmaxnreg shares out the 128 registers per thread that the block starts with.
  static constexpr int kSoftmaxRegs = 176, kCorrectionRegs = 96, kOtherRegs = 64;

  // Columns of tensor memory. Probabilities, two to a column, take the place of their scores.
  static constexpr int kColumns = 512;
  static __device__ __forceinline__ uint32_t ScoreColumn(int group) { return group * kKeys; }
  static __device__ __forceinline__ uint32_t OutColumn(int group) {
    return kGroups * kKeys + group * kHeadDimV;
  }
  static_assert(kGroups * (kKeys + kHeadDimV) <= kColumns);

  using MmaQK = decltype(make_tiled_mma(SM100_MMA_F16BF16_SS<Element, Element, float, kRows, kKeys,
                                                             UMMA::Major::K, UMMA::Major::K>{}));
  using MmaPV =
      decltype(make_tiled_mma(SM100_MMA_F16BF16_TS<Element, Element, float, kRows, kHeadDimV,
                                                   UMMA::Major::K, UMMA::Major::MN>{}));
  using AtomK = UMMA::Layout_K_SW128_Atom<Element>;
  using AtomMn = UMMA::Layout_MN_SW128_Atom<Element>;
  using LayoutQ = decltype(UMMA::tile_to_mma_shape(
      AtomK{}, partition_shape_A(MmaQK{}, Shape<Int<kRows>, Int<kHeadDim>>{})));
  using LayoutK = decltype(UMMA::tile_to_mma_shape(
      AtomK{}, partition_shape_B(MmaQK{}, Shape<Int<kKeys>, Int<kHeadDim>>{})));
  // The same bytes as [column block][row][kBoxCols], seen as (Hv, kv).
  using LayoutVt = decltype(UMMA::tile_to_mma_shape(
      AtomMn{}, partition_shape_B(MmaPV{}, Shape<Int<kHeadDimV>, Int<kKeys>>{}), Step<_2, _1>{}));
  using LayoutP = decltype(UMMA::tile_to_mma_shape(
      AtomK{}, partition_shape_A(MmaPV{}, Shape<Int<kRows>, Int<kKeys>>{})));

  // Head dims for which values may be wider than a tile.
  static constexpr bool kSplitsValues = kHeadDim > 192;
  // What is the same for all rows stays in shared memory, as the softmax has no register to spare.
  struct TileInfo : gpu::ForwardTileInfo, gpu::Logits {
    int v_column;     // first of the values' columns
    int64_t bias_at;  // of the head
  };

  static __device__ __forceinline__ int ValueColumn(const TileInfo& info) {
    return kSplitsValues ? info.v_column : 0;
  }

  // Parts of one tile of queries are numbered one after the other, and share keys in L2.
  // Described in shared memory, as the loading thread has no register for all of it.
  static __device__ __forceinline__ void DescribeTile(const ForwardParams& p, int tile,
                                                      TileInfo& info) {
    const int parts = kSplitsValues ? (p.score.head_dim_v + kHeadDimV - 1) / kHeadDimV : 1;
    static_cast<gpu::ForwardTileInfo&>(info) =
        gpu::DescribeForwardTile<kGroups * kRows, kKeys, kHasSegments, kHasElements>(
            p.score, p.order, tile / parts);
    const gpu::ScoreParams& s = p.score;
    static_cast<gpu::Logits&>(info) = gpu::LogitsOf<kHasElements>(s, info.batch);
    info.v_column = kSplitsValues ? tile % parts * kHeadDimV : 0;
    info.bias_at = 0;
    if constexpr (kHasElements) {
      if (s.bias.data != nullptr) {
        info.bias_at = gpu::EntryOf(s.bias.batch, info.batch) * s.bias_strides.entry +
                       info.head * s.bias_strides.head;
      }
    }
  }

  static constexpr int kInfoSlots = 2;
  static constexpr int kInfoReaders = 13;  // warps

  struct alignas(1024) SharedStorage {
    alignas(1024) Element q[kGroups][kRows * kHeadDim];
    alignas(1024) Element k[kKStages][kKeys * kHeadDim];
    alignas(1024) Element v[kVStages][kKeys * kHeadDimV];
    float2 stats[kGroups]
                [kRows];  // what to rescale a row's output with; at the end its sum and maximum
    TileInfo info[kInfoSlots];
    gpu::Ring<kInfoSlots> info_ring;
    gpu::Barrier q_full[kGroups], q_empty[kGroups];
    gpu::Ring<kKStages> k_ring;
    gpu::Ring<kVStages> v_ring;
    gpu::Barrier s_full[kGroups];  // scores are in tensor memory
    gpu::Barrier p_full[kGroups];  // probabilities are, and the scores gone
    gpu::Barrier stats_full[kGroups], stats_empty[kGroups];
    gpu::Barrier o_ready[kGroups];  // the output may be added to
    gpu::Barrier o_full[kGroups];   // it has been
    gpu::Barrier tmem_unused;       // no warp will touch tensor memory again
    uint32_t tmem;
  };

  static __device__ __forceinline__ void InitBarriers(SharedStorage& smem) {
    auto ring = [](auto& r, int readers) {
      for (auto& bar : r.full) gpu::InitBarrier(&bar, 1);
      for (auto& bar : r.empty) gpu::InitBarrier(&bar, readers);
    };
    ring(smem.info_ring, kInfoReaders);
    ring(smem.k_ring, 1);
    ring(smem.v_ring, 1);
    for (int g = 0; g < kGroups; ++g) {
      gpu::InitBarrier(&smem.q_full[g], 1);
      gpu::InitBarrier(&smem.q_empty[g], 1);
      gpu::InitBarrier(&smem.s_full[g], 1);
      gpu::InitBarrier(&smem.p_full[g], kRows);
      gpu::InitBarrier(&smem.stats_full[g], kRows);
      gpu::InitBarrier(&smem.stats_empty[g], kRows);
      gpu::InitBarrier(&smem.o_ready[g], kRows);
      gpu::InitBarrier(&smem.o_full[g], 1);
    }
    gpu::InitBarrier(&smem.tmem_unused, kRows);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  // The next tile, for the warps that work on it; `done` tells the loading warp that it was read.
  struct Tiles {
    SharedStorage& smem;
    gpu::RingState<kInfoSlots> state;
    __device__ explicit Tiles(SharedStorage& storage) : smem(storage) {}
    __device__ __forceinline__ const TileInfo& Get() {
      gpu::Wait(&smem.info_ring.full[state.stage], state.phase);
      return smem.info[state.stage];
    }
    __device__ __forceinline__ void Done() {
      gpu::ArriveAsWarp(&smem.info_ring.empty[state.stage]);
      state.Next();
    }
  };

  // The key tiles of a tile of queries, from the last to the first: n counts those of its range,
  // and those that a mask skips are left out.
  struct KeyTiles {
    const gpu::TileWord* line = nullptr;
    int first = 0;  // the range's first in the line

    __device__ __forceinline__ KeyTiles(const gpu::ScoreParams& s, const TileInfo& info) {
      if constexpr (kHasElements) {
        line = gpu::LineOf(s.mask_plan, info.batch, info.head, info.q_first / (kGroups * kRows));
        if (line != nullptr) first = info.kv_first / kKeys;
      }
    }
    // n or the last before it.
    __device__ __forceinline__ int Seen(int n) const {
      return kHasElements ? gpu::LastSeen(line, first, first + n) - first : n;
    }
    // The mask drops some pair.
    __device__ __forceinline__ bool IsMasked(int n) const {
      return kHasElements && gpu::IsPartial(line, first + n);
    }
  };

  // Loading
  // ----------------------------------------------------------------------------------------------

  static __device__ __forceinline__ void Load(const ForwardParams& p, const ForwardTensors& tensors,
                                              SharedStorage& smem) {
    const gpu::ScoreParams& s = p.score;
    gpu::RingState<kInfoSlots> slot;
    gpu::RingState<kKStages> k_state;
    gpu::RingState<kVStages> v_state;
    slot.phase = k_state.phase = v_state.phase = 1;  // empty slots
    int q_phase = 1;
    int tile = blockIdx.x;
    while (tile < p.order.num_tiles) {
      const int next = gridDim.x + atomicAdd(p.next_tile, 1);
      gpu::Wait(&smem.info_ring.empty[slot.stage], slot.phase);
      TileInfo& info =
          smem.info[slot.stage];  // nobody else writes it before the tile after the next
      DescribeTile(p, tile, info);
      gpu::Arrive(&smem.info_ring.full[slot.stage]);
      slot.Next();
      const int q_entry = gpu::EntryOf(p.q_map, info.batch),
                k_entry = gpu::EntryOf(p.k_map, info.batch),
                v_entry = gpu::EntryOf(p.v_map, info.batch);
      const int kv_head = info.head / s.group_size;
      auto load_q = [&](int g) {
        gpu::Wait(&smem.q_empty[g], q_phase);
        LoadTile<kHeadDim>(smem.q[g], &tensors.q, &smem.q_full[g], info.q_first + g * kRows,
                           info.head, q_entry);
      };
      auto load_k = [&](int n) {
        gpu::Wait(&smem.k_ring.empty[k_state.stage], k_state.phase);
        LoadTile<kHeadDim>(smem.k[k_state.stage], &tensors.k, &smem.k_ring.full[k_state.stage],
                           info.kv_first + n * kKeys, kv_head, k_entry);
        k_state.Next();
      };
      auto load_v = [&](int n) {
        const int first = info.kv_first + n * kKeys;
        gpu::Wait(&smem.v_ring.empty[v_state.stage], v_state.phase);
        LoadTile<kHeadDimV>(smem.v[v_state.stage], tensors.v, &smem.v_ring.full[v_state.stage],
                            first, min(kKeys, info.kv_end - first), s.seqlen_kv, kv_head, v_entry,
                            ValueColumn(info));
        v_state.Next();
      };
      if (info.num_kv_tiles > 0) {
        const KeyTiles key_tiles(s, info);
        int n = key_tiles.Seen(info.kv_range - 1);
        load_q(0);
        load_k(n);
        load_q(1);
        q_phase ^= 1;
        for (int left = info.num_kv_tiles - 1; left > 0; --left) {
          const int next = key_tiles.Seen(n - 1);
          load_v(n);
          load_k(next);
          n = next;
        }
        load_v(n);
      }
      tile = next;
    }
    gpu::Wait(&smem.info_ring.empty[slot.stage], slot.phase);
    smem.info[slot.stage].is_last = 1;
    gpu::Arrive(&smem.info_ring.full[slot.stage]);
    // The last products tell these barriers that they have read their operands: until then the
    // block must not end.
    for (int i = 0; i < kKStages; ++i, k_state.Next())
      gpu::Wait(&smem.k_ring.empty[k_state.stage], k_state.phase);
    for (int i = 0; i < kVStages; ++i, v_state.Next())
      gpu::Wait(&smem.v_ring.empty[v_state.stage], v_state.phase);
    for (int g = 0; g < kGroups; ++g) gpu::Wait(&smem.q_empty[g], q_phase);
  }

  // Products
  // ----------------------------------------------------------------------------------------------

  // Scores may be written over the probabilities that the product before reads, so that only the
  // softmax needs to be waited for.
  static __device__ __forceinline__ void Multiply(SharedStorage& smem) {
    MmaQK mma_qk;
    MmaPV mma_pv;
    auto thread_qk = mma_qk.get_slice(0);
    auto thread_pv = mma_pv.get_slice(0);
    Tensor tStS = partition_fragment_C(mma_qk, Shape<Int<kRows>, Int<kKeys>>{});
    Tensor tOtO = partition_fragment_C(mma_pv, Shape<Int<kRows>, Int<kHeadDimV>>{});
    Tensor sP = make_tensor(make_smem_ptr(static_cast<Element*>(nullptr)), LayoutP{});
    Tensor tOrP = thread_pv.make_fragment_A(sP);
    const uint32_t tmem = smem.tmem;

    auto multiply_qk = [&](int g, int stage) {
      Tensor sQ = make_tensor(make_smem_ptr(smem.q[g]), LayoutQ{});
      Tensor sK = make_tensor(make_smem_ptr(smem.k[stage]), LayoutK{});
      Tensor s = AtColumn(tStS, tmem + ScoreColumn(g));
      Gemm(mma_qk, thread_qk.make_fragment_A(sQ), thread_qk.make_fragment_B(sK), s, false);
    };
    auto multiply_pv = [&](int g, int stage, bool accumulates) {
      Tensor sVt = make_tensor(make_smem_ptr(smem.v[stage]), LayoutVt{});
      Tensor o = AtColumn(tOtO, tmem + OutColumn(g));
      Gemm(mma_pv, AtColumn(tOrP, tmem + ScoreColumn(g)), thread_pv.make_fragment_B(sVt), o,
           accumulates);
    };

    Tiles tiles(smem);
    gpu::RingState<kKStages> k_state;
    gpu::RingState<kVStages> v_state;
    int q_phase = 0, p_phase = 0;
    while (true) {
      const TileInfo& info = tiles.Get();
      if (info.is_last) break;
      const int num_kv_tiles = info.num_kv_tiles;
      tiles.Done();
      if (num_kv_tiles == 0) continue;
#pragma unroll 1
      for (int g = 0; g < kGroups; ++g) {
        gpu::Wait(&smem.q_full[g], q_phase);
        if (g == 0) gpu::Wait(&smem.k_ring.full[k_state.stage], k_state.phase);
        multiply_qk(g, k_state.stage);
        Commit(&smem.s_full[g]);
        if (num_kv_tiles == 1) Commit(&smem.q_empty[g]);
      }
      q_phase ^= 1;
      Commit(&smem.k_ring.empty[k_state.stage]);
      k_state.Next();
      for (int left = num_kv_tiles - 1; left >= 0; --left) {
        gpu::Wait(&smem.v_ring.full[v_state.stage], v_state.phase);
        if (left > 0) gpu::Wait(&smem.k_ring.full[k_state.stage], k_state.phase);
#pragma unroll 1
        for (int g = 0; g < kGroups; ++g) {
          WaitTmem(&smem.o_ready[g], p_phase);
          WaitTmem(&smem.p_full[g], p_phase);
          multiply_pv(g, v_state.stage, left < num_kv_tiles - 1);
          Commit(&smem.o_full[g]);
          if (left > 0) {
            multiply_qk(g, k_state.stage);
            Commit(&smem.s_full[g]);
            if (left == 1) Commit(&smem.q_empty[g]);
          }
        }
        p_phase ^= 1;
        Commit(&smem.v_ring.empty[v_state.stage]);
        v_state.Next();
        if (left > 0) {
          Commit(&smem.k_ring.empty[k_state.stage]);
          k_state.Next();
        }
      }
    }
    gpu::Wait(&smem.tmem_unused, 0);
    cute::TMEM::Allocator1Sm{}.free(tmem, kColumns);
  }

  // Softmax
  // ----------------------------------------------------------------------------------------------

  // 2^x, x <= kMaxLag, on the FMA units: the integer part goes into the exponent, a polynomial of
  // degree 3 serves the rest to 1e-4, finer than the rounding of a 16-bit probability. -inf gives
  // 0, NaN stays.
  static __device__ __forceinline__ float PolynomialExp2(float x) {
    const float clamped = fmaxf(x, -126.f);
    const float shifted = clamped + 12582912.f;           // 1.5 * 2^23: rounds to an integer
    const float rest = clamped - (shifted - 12582912.f);  // in [-0.5, 0.5]
    const float y = fmaf(fmaf(fmaf(0.05500651f, rest, 0.2422064f), rest, 0.6932827f), rest, 1.f);
    const float result = __int_as_float(__float_as_int(y) + (__float_as_int(shifted) << 23));
    return x >= -126.f ? result : x < 0.f ? 0.f : x;
  }
  // Of every kPolynomialShare exponentials one runs on the FMA units, so that the special function
  // units keep pace with the tensor core.
  static constexpr int kPolynomialShare = 8;

  // Keys beyond the operand repeat its last: their scores are masked.
  template <typename T>
  static __device__ __forceinline__ void AddBias(const gpu::ScoreParams& sp, int64_t bias_at,
                                                 int row, int kv_first, float (&s)[kKeys]) {
    const T* bias = static_cast<const T*>(sp.bias.data) + bias_at +
                    min(row, sp.seqlen_q - 1) * sp.bias_strides.row;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int j = min(kv_first + i, sp.seqlen_kv - 1);
      s[i] += gpu::ToFloat(bias[sp.bias_strides.col == 0 ? 0 : j], sp.bias.dtype == DType::kBF16);
    }
  }

  // Scale, bias and soft cap where they cannot be folded into the exponent.
  static __device__ __forceinline__ void Transform(const gpu::ScoreParams& sp, const TileInfo& info,
                                                   int row, int kv_first, uint32_t address,
                                                   float (&s)[kKeys]) {
    const float scale = info.scale;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) s[i] *= scale;
    if constexpr (kHasElements) {
      if (sp.bias.data != nullptr) {
        if (sp.bias.dtype == DType::kF32) {
          AddBias<float>(sp, info.bias_at, row, kv_first, s);
        } else {
          AddBias<uint16_t>(sp, info.bias_at, row, kv_first, s);
        }
      }
    }
    const float cap = info.cap;
    if (cap > 0.f) {
      KeepOrder(address);  // lest the compiler makes predicates of this branch
      const float inverse = info.inverse_cap;
#pragma unroll
      for (int i = 0; i < kKeys; ++i) s[i] = cap * gpu::Tanh(s[i] * inverse);
    }
  }

  static constexpr int kWords = kKeys / 32;

  // Whether a row may not see all keys of a tile; if so, a bit for each key that it sees. Found
  // before the scores are in registers, as it takes many.
  static __device__ __forceinline__ bool FindKept(const gpu::ScoreParams& sp, const TileInfo& info,
                                                  int row, int2 interval, int kv_first,
                                                  bool is_masked, uint32_t (&kept)[kWords]) {
    if (kv_first >= info.full_begin && kv_first + kKeys <= info.full_end && !is_masked)
      return false;
    KeepInterval(kv_first, interval, kept);
    if constexpr (kHasSegments) {
      if (info.is_elementwise || is_masked) {
        const gpu::ElementRules rules = gpu::RulesOf(sp, info.batch, info.head, info.is_scattered);
        const int i = min(row, sp.seqlen_q - 1);
        KeepIf(kv_first, kept, [&](int key) {
          const int j = min(key, sp.seqlen_kv - 1);
          return kHasElements ? gpu::Keep(sp, rules, i, j) : gpu::KeepSegment(rules, i, j);
        });
      }
    }
    return true;
  }

  static __device__ __forceinline__ float MaxOf(const float (&s)[kKeys]) {
    float top[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
    for (int i = 4; i < kKeys; i += 8) {
#pragma unroll
      for (int c = 0; c < 4; ++c)
        top[c] = i + 4 + c < kKeys ? fmaxf(fmaxf(top[c], s[i + c]), s[i + 4 + c])
                                   : fmaxf(top[c], s[i + c]);
    }
    return fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
  }

  // A maximum may lag behind by a factor of 2^8 in the exponentials: float32 and the 16-bit formats
  // hold probabilities up to 256 as well as those up to 1, and most rescaling of outputs is spared.
  static constexpr float kMaxLag = 8.f;

  // Probabilities of 32 keys, stored two to a column of tensor memory.
  static __device__ __forceinline__ void Exponentiate(float* s, float factor, float base,
                                                      uint32_t column, float2& sum) {
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      float2 x = make_float2(s[i], s[i + 1]);
      cute::fma(x, x, make_float2(factor, factor), make_float2(-base, -base));
      x.x = gpu::Exp2(x.x);
      x.y = i / 2 % (kPolynomialShare / 2) == 0 ? PolynomialExp2(x.y) : gpu::Exp2(x.y);
      cute::add(sum, sum, x);
      s[i] = x.x;
      s[i + 1] = x.y;
    }
    uint32_t packed[16];
    Pack<Element>(s, packed);
    StoreColumns(column, packed);
  }

  static __device__ __forceinline__ void Softmax(const ForwardParams& p, SharedStorage& smem,
                                                 int group) {
    const gpu::ScoreParams& sp = p.score;
    const int thread = threadIdx.x % kRows;
    const uint32_t lanes = static_cast<uint32_t>(thread / 32 * 32) << 16;
    const uint32_t scores = smem.tmem + lanes + ScoreColumn(group);
    Tiles tiles(smem);
    int s_phase = 0, stats_phase = 1;
    auto send = [&](float x, float y) {
      gpu::Wait(&smem.stats_empty[group], stats_phase);
      stats_phase ^= 1;
      smem.stats[group][thread] = make_float2(x, y);
      gpu::Arrive(&smem.stats_full[group]);
    };
    while (true) {
      const TileInfo& info = tiles.Get();
      if (info.is_last) return;
      const int row = info.q_first + group * kRows + thread;
      const int2 interval = gpu::RowInterval(sp, info.limits, info.batch, row);
      const float factor = info.unit * gpu::kLog2e;
      float max = -gpu::kInf;
      float2 sum = make_float2(0.f, 0.f);
      const KeyTiles key_tiles(sp, info);
      int n = info.kv_range;
      for (int left = info.num_kv_tiles - 1; left >= 0; --left) {
        n = key_tiles.Seen(n - 1);
        const int kv_first = info.kv_first + n * kKeys;
        uint32_t kept[kWords];
        const bool is_partial = FindKept(sp, info, info.q_first + group * kRows + thread, interval,
                                         kv_first, key_tiles.IsMasked(n), kept);
        WaitTmem(&smem.s_full[group], s_phase);
        s_phase ^= 1;
        float s[kKeys];
#pragma unroll
        for (int c = 0; c < kKeys; c += 32)
          LoadColumns(scores + c, reinterpret_cast<float (&)[32]>(s[c]));
        WaitLoads();
        if (info.is_transformed)
          Transform(sp, info, info.q_first + group * kRows + thread, kv_first, scores + 3, s);
        if (is_partial) {
          // A branch and not a selection in every tile, which the compiler prefers.
          if constexpr (kMode == ForwardMode::kDense) KeepOrder(scores + 1);
#pragma unroll
          for (int i = 0; i < kKeys; ++i) s[i] = kept[i / 32] >> i % 32 & 1 ? s[i] : -gpu::kInf;
        }
        const float top = fmaxf(MaxOf(s), max);
        // -inf is caught up with at once: the difference is inf, or NaN if there is still no key.
        float rescale = 1.f;
        if ((top - max) * factor > kMaxLag) {
          rescale = gpu::Exp2((max - top) * factor);
          max = top;
        }
        if (left < info.num_kv_tiles - 1) send(rescale, 0.f);
        sum.x *= rescale;
        sum.y *= rescale;
        float base = max == -gpu::kInf ? 0.f : max * factor;
        const bool is_large = fabsf(base) > gpu::kLargeBase;
        if (__any_sync(0xffffffff, is_large)) {
          const float shift = is_large ? -max : 0.f;
          base = is_large ? 0.f : base;
          KeepOrder(scores + 2);  // lest the compiler makes predicates of this branch
#pragma unroll
          for (int i = 0; i < kKeys; i += 2) {
            float2 x = make_float2(s[i], s[i + 1]);
            cute::add(x, x, make_float2(shift, shift));
            s[i] = x.x;
            s[i + 1] = x.y;
          }
        }
#pragma unroll
        for (int c = 0; c < kKeys; c += 32) {
          // Lest all of them are begun at once, and loop counters lose their registers.
          if (c == kKeys / 2) KeepOrder(scores);
          Exponentiate(s + c, factor, base, scores + c / 2, sum);
        }
        WaitStores();
        ArriveTmem(&smem.p_full[group]);
      }
      send(sum.x + sum.y, max == -gpu::kInf ? max : __fmul_rn(max, info.unit));
      tiles.Done();
    }
  }

  // Correction and epilogue
  // ----------------------------------------------------------------------------------------------

  static __device__ __forceinline__ void Correct(const ForwardParams& p, SharedStorage& smem) {
    const int thread = threadIdx.x % kRows;
    const uint32_t lanes = static_cast<uint32_t>(thread / 32 * 32) << 16;
    Tiles tiles(smem);
    int stats_phase = 0, o_phase = 0;
    auto receive = [&](int g) {
      gpu::Wait(&smem.stats_full[g], stats_phase);
      const float2 stats = smem.stats[g][thread];
      gpu::Arrive(&smem.stats_empty[g]);
      return stats;
    };
    while (true) {
      const TileInfo& info = tiles.Get();
      if (info.is_last) break;
      if (info.num_kv_tiles > 0) {
        // The outputs before have been read.
        for (int g = 0; g < kGroups; ++g) ArriveTmem(&smem.o_ready[g]);
        for (int n = info.num_kv_tiles - 2; n >= 0; --n) {
#pragma unroll 1
          for (int g = 0; g < kGroups; ++g) {
            const float rescale = receive(g).x;
            WaitTmem(&smem.o_full[g], o_phase);
            if (__any_sync(0xffffffff, rescale != 1.f))
              Rescale(smem.tmem + lanes + OutColumn(g), rescale);
            ArriveTmem(&smem.o_ready[g]);
          }
          stats_phase ^= 1;
          o_phase ^= 1;
        }
      }
#pragma unroll 1
      for (int g = 0; g < kGroups; ++g) {
        const float2 stats = receive(g);
        if (info.num_kv_tiles > 0) WaitTmem(&smem.o_full[g], o_phase);
        Finish(p, info, info.q_first + g * kRows + thread, stats.x, stats.y,
               smem.tmem + lanes + OutColumn(g));
      }
      stats_phase ^= 1;
      if (info.num_kv_tiles > 0) o_phase ^= 1;
      tiles.Done();
    }
    ArriveTmem(&smem.tmem_unused);
  }

  static __device__ __forceinline__ void Rescale(uint32_t out, float factor) {
#pragma unroll 1
    for (int c = 0; c < kHeadDimV; c += 32) {
      float o[32];
      LoadColumns(out + c, o);
      WaitLoads();
#pragma unroll
      for (int i = 0; i < 32; ++i) o[i] *= factor;
      StoreColumns(out + c, o);
    }
    WaitStores();
  }

  // Normalises, takes sinks in, and stores out and lse. A row without keys has sum 0: out 0, lse
  // -inf or its sink. `top` is the logit that the exponentials were taken against.
  static __device__ __forceinline__ void Finish(const ForwardParams& p, const TileInfo& info,
                                                int row, float sum, float top, uint32_t out) {
    const gpu::ScoreParams& sp = p.score;
    const float norm = gpu::CloseRow(sp, info, sum, top);
    const bool is_row = row < sp.seqlen_q;
    const int column = ValueColumn(info);
    if (is_row && column == 0) {
      const int64_t pair = static_cast<int64_t>(info.batch) * sp.num_q_heads + info.head;
      p.lse[pair * sp.seqlen_q + row] = gpu::LseOf(sum, top);
    }
    Element* to =
        static_cast<Element*>(p.out) +
        ((static_cast<int64_t>(info.batch) * sp.seqlen_q + row) * sp.num_q_heads + info.head) *
            sp.head_dim_v +
        column;
    bool is_nan = false;
#pragma unroll 1
    for (int c = 0; c < kHeadDimV; c += 32) {
      float o[32];
      if (info.num_kv_tiles > 0) {
        LoadColumns(out + c, o);
        WaitLoads();
      }
#pragma unroll
      for (int i = 0; i < 32; i += 8) {
#pragma unroll
        for (int e = i; e < i + 8; ++e) {
          o[e] = norm == 0.f ? 0.f : o[e] * norm;
          if constexpr (kHasSegments) is_nan |= o[e] != o[e];
        }
        uint32_t packed[4];
        Pack<Element>(o + i, packed);
        if (is_row && column + c + i < sp.head_dim_v) {
          *reinterpret_cast<uint4*>(to + c + i) =
              make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
      }
    }
    if constexpr (kHasSegments) {
      if (info.may_leak) {
        const uint32_t bad = __ballot_sync(0xffffffff, is_nan && is_row);
        const int lane = threadIdx.x % 32;
        if (lane % gpu::kStripRows == 0 && (bad >> lane & 0xffff) != 0)
          p.repair.strips[atomicAdd(p.repair.count, 1)] = {info.batch, info.head, row};
      }
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    ForwardMain(const __grid_constant__ ForwardParams p,
                const __grid_constant__ ForwardTensors tensors) {
  extern __shared__ __align__(1024) char raw[];
  auto& smem = *reinterpret_cast<typename Kernel::SharedStorage*>(raw);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) Kernel::InitBarriers(smem);
  if (warp == Kernel::kMmaWarp) {
    cute::TMEM::Allocator1Sm allocator;
    allocator.allocate(Kernel::kColumns, &smem.tmem);
    allocator.release_allocation_lock();
    FenceBefore();
  }
  __syncthreads();
  FenceAfter();
  if (warp < Kernel::kCorrectionWarp) {
    cutlass::arch::warpgroup_reg_alloc<Kernel::kSoftmaxRegs>();
    Kernel::Softmax(p, smem, warp / 4);
  } else if (warp < Kernel::kMmaWarp) {
    cutlass::arch::warpgroup_reg_dealloc<Kernel::kCorrectionRegs>();
    Kernel::Correct(p, smem);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Kernel::kOtherRegs>();
    if (warp == Kernel::kMmaWarp) {
      Kernel::Multiply(smem);
    } else if (warp == Kernel::kLoadWarp && threadIdx.x % 32 == 0) {
      Kernel::Load(p, tensors, smem);
    }
  }
}

}  // namespace jax_fmha::sm100
