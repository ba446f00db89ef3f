// Backward attention on Hopper: dk and dv of one tile of keys stay in registers while queries
// stream by; dq is added to a float32 array in device memory.
//
// Two consumer warpgroups hold 64 keys each. They compute S^T = k q^T and dP^T = v dout^T, so that
// P^T and dS^T are register operands of dv += P^T dout and dk += dS^T q; dS also goes through
// shared memory, since dq = dS k sums over the keys of both. A block takes one (key tile, kv head,
// batch entry) and walks the query tiles of every query head of the group, so nothing of dk and dv
// is added twice. Of the four other warps one plans tiles and loads keys, one loads queries, and
// two, one for each warpgroup, have dq added to device memory in bulk.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cute/tensor.hpp>

#include "cc/gpu/backward_tile.cuh"
#include "cc/gpu/pipeline.cuh"
#include "cc/gpu/problem_params.cuh"
#include "cc/gpu/repair.cuh"
#include "cc/gpu/row_parts.cuh"
#include "cc/gpu/softmax.cuh"
#include "cc/gpu/store.cuh"
#include "cc/sm90/backward/config.h"

namespace jax_fmha::sm90 {

using namespace cute;

struct BackwardParams {
  gpu::ScoreParams score;
  gpu::SegmentPlan kv_plan;  // queries by key
  BatchMap q_map, k_map, v_map, dout_map;
  const float *lse2, *delta;  // [batch, N, padded_q]
  const uint4* parts;         // [batch, N, 2, padded_q], of lse and of delta; null if unused
  const int* has_large;       // not 0 if some |lse2| exceeds gpu::kLargeBase
  Operand lse;                // [batch, N, T], for such rows
  float* dq;      // [batch, N, query tile] tiles in the order of the accumulator's registers
  void *dk, *dv;  // [batch, S, K, H], [batch, S, K, Hv]
  int padded_q, num_q_tiles;
  gpu::KeyTileOrder order;
  int* next_tile;  // zeroed
  // Null where the order of additions is free; see "Addition of dq".
  int* turns;  // [batch, N, query tile, warpgroup], zeroed
  int2*
      turn_takers;  // [batch, key tile]: first and one past the last query tile it takes a turn at
  int* first_takers;  // [batch, query tile]: first key tile that takes a turn
  float* dbias;       // summed in float32, zeroed; null if it is not wanted
  BatchMap dbias_map;
  gpu::RepairList repair;
};

template <typename Element_, ForwardMode kMode_, int kHeadDim_, int kHeadDimV_, int kBlockQ_,
          int kBlockKv_, int kStages_, int kBoxCols_>
struct BackwardKernel {
  using Element = Element_;
  static constexpr ForwardMode kMode = kMode_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kBlockQ = kBlockQ_,
                       kBlockKv = kBlockKv_, kStages = kStages_, kBoxCols = kBoxCols_;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static_assert(kStages >= 2);  // a warpgroup may read dS of the step before
  static constexpr int kProducerRegs = 24, kConsumerRegs = 240;
  // A block is launched with as many registers a thread as fit, in steps of 8; warpgroups would
  // wait for more for ever.
  static_assert(128 * (kProducerRegs + kConsumers * kConsumerRegs) <=
                kThreads * (65536 / kThreads / 8 * 8));
  static constexpr bool kHasElements = kMode == ForwardMode::kGeneral;
  // The widest heads: the warpgroups share out the columns of dk and dv, and the queries of S^T and
  // dP^T, instead of the keys of all four; P^T and dS^T then reach the products through shared
  // memory.
  static constexpr bool kSplitsColumns = kBlockKv == 64;
  static constexpr int kGroupKv = 64;  // keys and queries of a warpgroup's part of S^T
  static constexpr int kGroupQ = kSplitsColumns ? kBlockQ / kConsumers : kBlockQ;
  static_assert(kBlockKv == (kSplitsColumns ? 64 : 64 * kConsumers));
  // Bulk additions of dq read a copy in shared memory, for which head_dim 256 leaves no room: its
  // warpgroups add their registers themselves, which takes them longer.
  static constexpr bool kAddsInBulk = kHeadDim <= 192;
  // Of 240 registers dk and dv take 160. dq then waits for those of P^T, and dS^T reaches dk
  // through shared memory, as it does dq; in one stage, so that dq has a copy there too.
  static constexpr bool kIsCrowded = !kSplitsColumns && kHeadDim + kHeadDimV > 256;
  static constexpr bool kSharesDs = kSplitsColumns || kIsCrowded;
  static constexpr int kDsStages = kIsCrowded ? 1 : kStages;
  // Registers do not hold all of dP^T beside S^T where these are large or others few: it comes in
  // two parts of the queries, and P^T of the second part is worked out behind the product.
  static constexpr int kParts = kIsCrowded || kGroupQ == 128 ? 2 : 1;
  // With elements, head_dim 128 has no registers for the start's operand.
  static constexpr bool kStartsFromStatistics =
      StartsFromStatistics(kHeadDim) && !(kHasElements && kHeadDim > 64);
  // dq's rows, else its columns, are shared out to the warpgroups.
  static constexpr bool kDqByRows = kBlockQ == 128;
  static constexpr int kDkCols = kSplitsColumns ? kHeadDim / kConsumers : kHeadDim,
                       kDvCols = kSplitsColumns ? kHeadDimV / kConsumers : kHeadDimV,
                       kDqCols = kDqByRows ? kHeadDim : kHeadDim / kConsumers;

  using GroupsM = Layout<Shape<Int<kConsumers>, _1, _1>>;
  using GroupsN = Layout<Shape<_1, Int<kConsumers>, _1>>;
  using GroupsKv = std::conditional_t<kSplitsColumns, GroupsN, GroupsM>;
  using GroupsDq = std::conditional_t<kDqByRows, GroupsM, GroupsN>;
  template <int kCols, bool kIsShared>
  static constexpr auto SelectDkv() {
    using Tile = Shape<Int<kBlockKv>, Int<kCols>, Int<kBlockQ>>;
    if constexpr (kIsShared) {
      return GMMA::ss_op_selector<Element, Element, float, Tile, GMMA::Major::K, GMMA::Major::MN>();
    } else {
      return GMMA::rs_op_selector<Element, Element, float, Tile, GMMA::Major::K, GMMA::Major::MN>();
    }
  }
  using MmaS = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float,
                           Shape<Int<kBlockKv>, Int<kGroupQ>, Int<kHeadDim>>>(),
      GroupsKv{}));
  using MmaDp = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float,
                           Shape<Int<kBlockKv>, Int<kGroupQ / kParts>, Int<kHeadDimV>>>(),
      GroupsKv{}));
  using MmaDv = decltype(make_tiled_mma(SelectDkv<kDvCols, kSplitsColumns>(), GroupsKv{}));
  using MmaDk = decltype(make_tiled_mma(SelectDkv<kDkCols, kSharesDs>(), GroupsKv{}));
  using MmaDq =
      decltype(make_tiled_mma(GMMA::ss_op_selector<Element, Element, float,
                                                   Shape<Int<kBlockQ>, Int<kDqCols>, Int<kBlockKv>>,
                                                   GMMA::Major::MN, GMMA::Major::MN>(),
                              GroupsDq{}));
  // The instructions with which S^T and dP^T start.
  template <int kQueries>
  using MmaStart = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<Int<kBlockKv>, Int<kQueries>, _16>>(),
      GroupsKv{}));
  // Columns that one instruction of a product writes.
  template <typename Mma>
  static constexpr int kAtomCols = size<1>(typename Mma::AtomShape_MNK{});
  static_assert(kAtomCols<MmaS> == kGroupQ && kAtomCols<MmaDp> == kGroupQ / kParts &&
                    kAtomCols<MmaDv> == kDvCols && kAtomCols<MmaDk> == kDkCols &&
                    kAtomCols<MmaDq> == kDqCols,
                "one of CuTe's extended shapes, which CMakeLists.txt enables for some tiles");

  using AtomK = std::conditional_t<kBoxCols == 64, GMMA::Layout_K_SW128_Atom<Element>,
                                   GMMA::Layout_K_SW64_Atom<Element>>;
  using AtomMn = std::conditional_t<kBoxCols == 64, GMMA::Layout_MN_SW128_Atom<Element>,
                                    GMMA::Layout_MN_SW64_Atom<Element>>;
  using LayoutK = decltype(tile_to_shape(AtomK{}, Shape<Int<kBlockKv>, Int<kHeadDim>>{}));
  using LayoutV = decltype(tile_to_shape(AtomK{}, Shape<Int<kBlockKv>, Int<kHeadDimV>>{}));
  using LayoutQ =
      decltype(tile_to_shape(AtomK{}, Shape<Int<kBlockQ>, Int<kHeadDim>, Int<kStages>>{}));
  using LayoutDo =
      decltype(tile_to_shape(AtomK{}, Shape<Int<kBlockQ>, Int<kHeadDimV>, Int<kStages>>{}));
  // The same bytes seen transposed.
  using LayoutKt =
      decltype(tile_to_shape(AtomMn{}, Shape<Int<kHeadDim>, Int<kBlockKv>>{}, Step<_2, _1>{}));
  using LayoutQt = decltype(tile_to_shape(
      AtomMn{}, Shape<Int<kHeadDim>, Int<kBlockQ>, Int<kStages>>{}, Step<_2, _1, _3>{}));
  using LayoutDot = decltype(tile_to_shape(
      AtomMn{}, Shape<Int<kHeadDimV>, Int<kBlockQ>, Int<kStages>>{}, Step<_2, _1, _3>{}));
  // dS as (query, key) with queries contiguous: [query block of 64][key][64].
  using LayoutDs = decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Element>{},
                                          Shape<Int<kBlockQ>, Int<kBlockKv>, Int<kDsStages>>{},
                                          Step<_2, _1, _3>{}));
  using LayoutDst = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                           Shape<Int<kBlockKv>, Int<kBlockQ>, Int<kDsStages>>{}));

  // Parts of the rows' lse and of their delta; the second 8 columns of 16 are 0.
  using LayoutParts = decltype(tile_to_shape(GMMA::Layout_K_INTER_Atom<Element>{},
                                             Shape<Int<kBlockQ>, _16, _2, Int<kStages>>{}));

  struct TileInfo : gpu::BackwardTileInfo, gpu::Logits {
    int num_steps;  // pairs of a query head and a query tile that the mask does not skip
    int has_large;  // rows of the call, see ExponentiateLarge
  };

  // A tile is described while the consumers are at the one before, and some of their warps may not
  // have left the one before that.
  static constexpr int kInfoSlots = 3;
  static __device__ __forceinline__ int NextInfo(int slot) {
    return slot == kInfoSlots - 1 ? 0 : slot + 1;
  }

  // One query tile of one query head, and what must be selected in it: nothing where every pair of
  // the tile is allowed.
  static constexpr int kIsFull = 1, kIsMasked = 2, kHasLarge = 4, kIsTransformed = 8,
                       kIsCapped = 16;
  struct Step {
    int flags, head, m;
  };

  struct alignas(1024) SharedStorage {
    alignas(1024) Element k[kBlockKv * kHeadDim];
    alignas(1024) Element v[kBlockKv * kHeadDimV];
    alignas(1024) Element q[kStages][kBlockQ * kHeadDim];
    alignas(1024) Element dout[kStages][kBlockQ * kHeadDimV];
    alignas(1024) Element ds[kDsStages][kBlockQ * kBlockKv];
    alignas(kSplitsColumns ? 1024 : 16)
        Element p[kSplitsColumns ? kStages : 1][kSplitsColumns ? kBlockQ * kBlockKv : 1];
    alignas(128) float dq[kConsumers][kAddsInBulk ? kBlockQ * kHeadDim / kConsumers : 4];
    alignas(128) float lse2[kStages][kBlockQ];
    alignas(128) float delta[kStages][kStartsFromStatistics ? 4 : kBlockQ];
    alignas(128) uint4 parts[kStages][2][2][kStartsFromStatistics ? kBlockQ : 1];  // LayoutParts
    alignas(128) int2 runs[kBlockKv];  // of queries, by key; where there are segments
    Step steps[kStages];
    gpu::Barrier info_full[kInfoSlots];
    gpu::Barrier near_end;  // of a tile's steps, few are left to load
    gpu::Barrier kv_full, kv_empty;
    gpu::Ring<kStages> q_ring, dout_ring;
    gpu::Ring<kConsumers> dq_ring;  // a slot per warpgroup
    gpu::Barrier ds_free;           // dq and dk have read dS, if that has one stage
    TileInfo info[kInfoSlots];
  };

  static __device__ __forceinline__ TileInfo DescribeTile(const BackwardParams& p, int tile) {
    const gpu::ScoreParams& s = p.score;
    TileInfo info;
    static_cast<gpu::BackwardTileInfo&>(info) =
        gpu::DescribeBackwardTile<kBlockQ, kBlockKv, kHasElements>(s, p.kv_plan, p.order, tile);
    static_cast<gpu::Logits&>(info) = gpu::LogitsOf<kHasElements>(s, info.batch);
    info.has_large = *p.has_large;
    info.num_steps = s.group_size * (info.q_end - info.q_begin);
    if constexpr (kHasElements) {
      if (s.mask_plan.words != nullptr) {
        info.num_steps = 0;
        for (int g = 0; g < s.group_size; ++g) {
          info.num_steps += gpu::CountSeen(LineOf(s, info, info.kv_head * s.group_size + g),
                                           info.q_begin, info.q_end);
        }
      }
    }
    return info;
  }

  // Query tiles of a head by the mask, which skips some; null if none.
  static __device__ __forceinline__ const gpu::TileWord* LineOf(const gpu::ScoreParams& s,
                                                                const TileInfo& info, int head) {
    if constexpr (!kHasElements) return nullptr;
    return gpu::LineOf(s.mask_plan, info.batch, head, info.kv_first / kBlockKv);
  }

  // Whether query tiles go last to first; see "Addition of dq".
  static __device__ __forceinline__ bool Descends(const BackwardParams& p) {
    return p.turns != nullptr;
  }

  // Plan and loads
  // ----------------------------------------------------------------------------------------------------------

  static __device__ __forceinline__ void LoadBulk(void* smem, const void* from, int bytes,
                                                  gpu::Barrier* bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(gpu::SmemAddress(smem)),
        "l"(from), "r"(bytes), "r"(gpu::SmemAddress(bar))
        : "memory");
  }

  // Claims and describes tiles, each while the consumers are at the one before, and loads keys and
  // values. Products keep shared memory so busy that every read of it, or of local memory, is slow
  // for a thread beside them: what happens between the end of a tile and the loads of the next must
  // be in registers.
  static __device__ __forceinline__ void PlanTiles(const BackwardParams& p,
                                                   const CUtensorMap* k_tensor,
                                                   const CUtensorMap* v_tensor,
                                                   SharedStorage& smem) {
    int slot = 0, phase = 0;
    for (int tile = blockIdx.x; tile < p.order.num_tiles;) {
      const TileInfo info = DescribeTile(p, tile);
      smem.info[slot] = info;
      gpu::Arrive(&smem.info_full[slot]);
      const int first = info.kv_first, head = info.kv_head;
      const int valid = min(kBlockKv, info.limits.kv_length - first);
      const int k_entry = gpu::EntryOf(p.k_map, info.batch),
                v_entry = gpu::EntryOf(p.v_map, info.batch);
      const int2* runs = p.kv_plan.rows;
      if (runs != nullptr) runs += info.batch * gpu::PlanStride(p.score.seqlen_kv) + first;
      const bool has_steps = info.num_steps > 0;
      gpu::Wait(&smem.kv_empty, phase ^ 1);
      if (has_steps) {
        gpu::ArriveExpect(&smem.kv_full, kBlockKv * ((kHeadDim + kHeadDimV) * 2 +
                                                     (runs != nullptr ? sizeof(int2) : 0)));
        gpu::LoadRows<kBlockKv, kHeadDim, kBoxCols>(smem.k, k_tensor, &smem.kv_full, first, valid,
                                                    head, k_entry);
        gpu::LoadRows<kBlockKv, kHeadDimV, kBoxCols>(smem.v, v_tensor, &smem.kv_full, first, valid,
                                                     head, v_entry);
        if (runs != nullptr) {
          LoadBulk(smem.runs, runs, kBlockKv * sizeof(int2), &smem.kv_full);
        }
      } else {
        gpu::Arrive(&smem.kv_full);
      }
      gpu::Wait(&smem.near_end, phase);
      tile = gridDim.x + atomicAdd(p.next_tile, 1);
      phase ^= 1;
      slot = NextInfo(slot);
    }
    smem.info[slot].is_last = 1;
    gpu::Arrive(&smem.info_full[slot]);
    gpu::Wait(&smem.kv_empty, phase ^ 1);
    gpu::Arrive(&smem.kv_full);
  }

  // The next tile is claimed when this many steps are left to load: early enough to describe it,
  // and not earlier, as a tile that was claimed waits while other blocks idle.
  static constexpr int kStepsAtClaim = 3;

  // Loads queries and what belongs to them, step by step.
  static __device__ __forceinline__ void LoadSteps(const BackwardParams& p,
                                                   const CUtensorMap* q_tensor,
                                                   const CUtensorMap* dout_tensor,
                                                   SharedStorage& smem) {
    const gpu::ScoreParams& s = p.score;
    gpu::RingState<kStages> state;
    state.phase = 1;  // empty slots
    gpu::RingState<kInfoSlots> info_state;
    while (true) {
      gpu::Wait(&smem.info_full[info_state.stage], info_state.phase);
      const TileInfo& info = smem.info[info_state.stage];
      info_state.Next();
      if (info.is_last) return;
      // In registers, see PlanTiles.
      const int q_begin = info.q_begin, q_end = info.q_end, q_length = info.limits.q_length;
      const int full_begin = info.full_begin, full_end = info.full_end;
      const int tile_flags = (info.has_large ? kHasLarge : 0) |
                             (info.is_transformed ? kIsTransformed : 0) |
                             (info.cap > 0.f ? kIsCapped : 0);
      const int q_entry = gpu::EntryOf(p.q_map, info.batch),
                dout_entry = gpu::EntryOf(p.dout_map, info.batch);
      int left = info.num_steps;
      if (left < kStepsAtClaim) gpu::Arrive(&smem.near_end);
      int head = info.kv_head * s.group_size;
      int64_t rows = (static_cast<int64_t>(info.batch) * s.num_q_heads + head) * p.padded_q;
      const bool descends = Descends(p);
      for (; left > 0; ++head, rows += p.padded_q) {
        const gpu::TileWord* line = LineOf(s, info, head);
        auto next = [&](int m) {
          return descends ? gpu::LastSeen(line, q_begin, m - 1)
                          : gpu::FirstSeen(line, m + 1, q_end);
        };
        for (int m = next(descends ? q_end : q_begin - 1); m >= q_begin && m < q_end; m = next(m)) {
          if (left-- == kStepsAtClaim) gpu::Arrive(&smem.near_end);
          const int first = m * kBlockQ;
          const int valid = min(kBlockQ, q_length - first);
          // Rows past the last count as seen: they are 0 without a selection.
          const bool is_masked = gpu::IsPartial(line, m);
          const bool is_full =
              first >= full_begin && min(first + kBlockQ, s.seqlen_q) <= full_end && !is_masked;
          gpu::Wait(&smem.q_ring.empty[state.stage], state.phase);
          gpu::Barrier* full = &smem.q_ring.full[state.stage];
          smem.steps[state.stage] = {
              tile_flags | (is_full ? kIsFull : 0) | (is_masked ? kIsMasked : 0), head, m};
          constexpr int kRowBytes = kHeadDim * 2 + (kStartsFromStatistics ? 36 : 8);
          gpu::ArriveExpect(full, kBlockQ * kRowBytes);
          gpu::LoadRows<kBlockQ, kHeadDim, kBoxCols>(smem.q[state.stage], q_tensor, full, first,
                                                     valid, head, q_entry);
          LoadBulk(smem.lse2[state.stage], p.lse2 + rows + first, kBlockQ * 4, full);
          if constexpr (kStartsFromStatistics) {
            const uint4* parts = p.parts + 2 * rows + first;
            LoadBulk(smem.parts[state.stage][0][0], parts, kBlockQ * 16, full);
            LoadBulk(smem.parts[state.stage][1][0], parts + p.padded_q, kBlockQ * 16, full);
          } else {
            LoadBulk(smem.delta[state.stage], p.delta + rows + first, kBlockQ * 4, full);
          }
          gpu::Wait(&smem.dout_ring.empty[state.stage], state.phase);
          full = &smem.dout_ring.full[state.stage];
          gpu::ArriveExpect(full, kBlockQ * kHeadDimV * 2);
          gpu::LoadRows<kBlockQ, kHeadDimV, kBoxCols>(smem.dout[state.stage], dout_tensor, full,
                                                      first, valid, head, dout_entry);
          state.Next();
        }
      }
    }
  }

  // Consumers
  // ---------------------------------------------------------------------------------------------------------

  template <class Mma, class A, class B, class C>
  static __device__ __forceinline__ void Gemm(Mma& mma, const A& a, const B& b, C& c,
                                              bool accumulates) {
    mma.accumulate_ = accumulates ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < size<2>(a); ++k) {
      cute::gemm(mma, a(_, _, k), b(_, _, k), c);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  }

  // The product of one part of the columns of b and c.
  template <class Mma, class A, class B, class C>
  static __device__ __forceinline__ void PartGemm(int part, Mma& mma, const A& a, const B& b,
                                                  C& c) {
    mma.accumulate_ = GMMA::ScaleOut::One;
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < size<2>(a); ++k) cute::gemm(mma, a(_, 0, k), b(_, part, k), c(_, 0, part));
    warpgroup_commit_batch();
  }

  // Starts one part of the columns of c from statistics; `weights` are PartWeights.
  template <class Mma, class B, class C>
  static __device__ __forceinline__ void Start(int part, Mma mma, uint32_t weights, const B& b,
                                               C& c) {
    uint32_t words[4] = {weights, weights, 0, 0};
    Tensor a = make_tensor(reinterpret_cast<Element*>(words),
                           partition_shape_A(mma, Shape<Int<kBlockKv>, _16>{}));
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    cute::gemm(mma, a(_, 0, 0), b(_, part, 0), c(_, 0, part));
  }

  static constexpr int kScoreRegs = kGroupQ / 2;
  static constexpr int kPartQ = kGroupQ / kParts, kPartRegs = kScoreRegs / kParts;
  // Named barriers; of kDqBar one for each warpgroup.
  static constexpr int kDsBar = 1, kDqBar = 2, kScoresBar = 4, kGradientsBar = 5;

  // Calls f(i, x) for the rows' values x[..] of this thread: i is the first register of its query,
  // whose other is i + 2. The values lie in the order of RowSlot.
  template <class F>
  static __device__ __forceinline__ void ForRows(const float* values, F&& f) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) ForPartRows(part, values, f);
  }
  template <class F>
  static __device__ __forceinline__ void ForPartRows(int part, const float* values, F&& f) {
#pragma unroll
    for (int block = part * kPartQ / 32; block < (part + 1) * kPartQ / 32; ++block) {
      const float4* from = reinterpret_cast<const float4*>(values + block * 32);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float4 x;
        if constexpr (kParts == 2) {
          // Here and not before, where registers are scarce.
          asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                       : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                       : "r"(gpu::SmemAddress(from + half)));
        } else {
          x = from[half];
        }
        const int i = block * 16 + half * 8;
        f(i, x.x);
        f(i + 1, x.y);
        f(i + 4, x.z);
        f(i + 5, x.w);
      }
    }
  }

  // This thread's scores in one tile, of 64 keys by kGroupQ queries.
  struct Scores {
    float factor;  // their exponent is factor * score
    int kv[2];     // keys of this thread
    int quarter;   // where its queries begin, in the order of RowSlot
  };

  // Bias and soft cap, which no factor of the exponent can express.
  static __device__ __forceinline__ void TransformScores(const gpu::ScoreParams& sp,
                                                         const TileInfo& info, const Scores& x,
                                                         int head, int q_first,
                                                         float (&s)[kScoreRegs]) {
#pragma unroll
    for (int i = 0; i < kScoreRegs; ++i) s[i] *= info.scale;
    if constexpr (kHasElements) {
      if (sp.bias.data != nullptr) {
        const gpu::ElementRules rules = gpu::RulesOf(sp, info.batch, head, false);
        const int first_row = q_first + 2 * (threadIdx.x % 4);
        if (sp.bias.dtype == DType::kF32) {
          AddBias<float>(sp, rules, first_row, x.kv, s);
        } else {
          AddBias<uint16_t>(sp, rules, first_row, x.kv, s);
        }
      }
    }
    if (info.cap > 0.f) {
      const float cap = info.cap, inverse = info.inverse_cap;
#pragma unroll
      for (int i = 0; i < kScoreRegs; ++i) s[i] = cap * gpu::Tanh(s[i] * inverse);
    }
  }

  // Probabilities where some lse is large: of such rows from differences in the scores' own unit.
  static __device__ __forceinline__ void ExponentiateLarge(const BackwardParams& p,
                                                           const TileInfo& info, const Scores& x,
                                                           int head, int q_first, const float* lse2,
                                                           float (&s)[kScoreRegs]) {
    const gpu::ScoreParams& sp = p.score;
    const float* lse =
        static_cast<const float*>(p.lse.data) +
        (gpu::EntryOf(p.lse.batch, info.batch) * sp.num_q_heads + head) * sp.seqlen_q + q_first +
        2 * (threadIdx.x % 4);
    const float unit = info.unit;
    const bool is_started = kStartsFromStatistics && !info.is_transformed;
    ForRows(lse2 + x.quarter, [&](int i, float base) {
      // Rows that see nothing have lse2 +inf, those past the last among them.
      const bool is_large = fabsf(base) > gpu::kLargeBase && base < gpu::kInf;
      const float top = is_large ? lse[i / 4 * 8 + i % 2] : 0.f;
#pragma unroll
      for (int r = 0; r < 4; r += 2) {
        // No weight exceeds 1, whatever the rounding of lse.
        const float above = __fmul_rn(s[i + r], unit) - top;
        s[i + r] = gpu::Exp2(!is_large     ? s[i + r] * x.factor - (is_started ? 0.f : base)
                             : above > 0.f ? 0.f
                                           : above * gpu::kLog2e);
      }
    });
  }

  // Selects among scores of a tile that not every pair of may attend; `runs` are those of queries
  // by key.
  static __device__ __forceinline__ void MaskScores(const BackwardParams& p, const TileInfo& info,
                                                    int flags, const int2* runs, int head,
                                                    int q_first, const int (&kv)[2],
                                                    float (&s)[kScoreRegs]) {
    const gpu::ScoreParams& sp = p.score;
    const int col = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int2 run =
          p.kv_plan.rows == nullptr ? make_int2(0, gpu::kFar) : runs[kv[r] - info.kv_first];
      const int2 seen = gpu::KeyInterval(info.limits, run, kv[r]);
      const unsigned length = seen.y - seen.x;
      const int at = q_first + col - seen.x;
#pragma unroll
      for (int i = 0; i < kScoreRegs / 4; ++i) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[i * 4 + r * 2 + c];
          x = static_cast<unsigned>(at + i * 8 + c) < length ? x : -gpu::kInf;
        }
      }
    }
    if (!info.is_elementwise && !(flags & kIsMasked)) return;
    const gpu::ElementRules rules = gpu::RulesOf(sp, info.batch, head, info.is_scattered);
    if constexpr (kHasElements) {
      if (!info.is_elementwise) {
        // Only a mask selects.
        if (sp.mask.data != nullptr) {
          SelectPairs<4>(sp, q_first, kv, s,
                         [&](int i, int j) { return gpu::KeepDense(sp, rules, i, j); });
        } else {
          SelectPairs<4>(sp, q_first, kv, s,
                         [&](int i, int j) { return gpu::KeepTile(sp, rules, i, j); });
        }
        return;
      }
    }
    SelectPairs<1>(sp, q_first, kv, s, [&](int i, int j) {
      return kHasElements ? gpu::Keep(sp, rules, i, j) : gpu::KeepSegment(rules, i, j);
    });
  }

  // Drops the scores of pairs that `keep` does not, asking for kAtOnce at a time.
  template <int kAtOnce, class Keep>
  static __device__ __forceinline__ void SelectPairs(const gpu::ScoreParams& sp, int q_first,
                                                     const int (&kv)[2], float (&s)[kScoreRegs],
                                                     const Keep& keep_pair) {
    const int col = 2 * (threadIdx.x % 4);
    constexpr int kBits = kScoreRegs < 32 ? kScoreRegs : 32;
    uint32_t keep[kScoreRegs / kBits];
#pragma unroll
    for (int word = 0; word < kScoreRegs / kBits; ++word) {
      keep[word] = 0;
#pragma unroll kAtOnce
      for (int bit = 0; bit < kBits; ++bit) {
        const int i = word * kBits + bit;
        const int j = min(i & 2 ? kv[1] : kv[0], sp.seqlen_kv - 1);
        const int row = min(q_first + i / 4 * 8 + col + i % 2, sp.seqlen_q - 1);
        keep[word] |= static_cast<uint32_t>(keep_pair(row, j)) << bit;
      }
    }
#pragma unroll
    for (int i = 0; i < kScoreRegs; ++i) {
      s[i] = keep[i / kBits] >> i % kBits & 1 ? s[i] : -gpu::kInf;
    }
  }

  template <typename T>
  static __device__ __forceinline__ void AddBias(const gpu::ScoreParams& sp,
                                                 const gpu::ElementRules& rules, int first_row,
                                                 const int (&kv)[2], float (&s)[kScoreRegs]) {
    const T* bias = static_cast<const T*>(sp.bias.data) + rules.bias_at;
#pragma unroll
    for (int i = 0; i < kScoreRegs / 4; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const T* row = bias + min(first_row + i * 8 + c, sp.seqlen_q - 1) * sp.bias_strides.row;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int64_t j = sp.bias_strides.col == 0 ? 0 : min(kv[r], sp.seqlen_kv - 1);
          s[i * 4 + r * 2 + c] += gpu::ToFloat(row[j], sp.bias.dtype == DType::kBF16);
        }
      }
    }
  }

  // Adds dS to dbias. Along a dimension that the bias shares, the warp sums first.
  static __device__ __forceinline__ void AddBiasGradient(const BackwardParams& p,
                                                         const TileInfo& info, int head,
                                                         int q_first, const int (&kv)[2],
                                                         const float (&ds)[kPartRegs]) {
    const gpu::ScoreParams& sp = p.score;
    const ScoreStrides& strides = sp.bias_strides;
    float* to =
        p.dbias + gpu::EntryOf(p.dbias_map, info.batch) * strides.entry + head * strides.head;
    const int lane = threadIdx.x % 32, row = q_first + 2 * (lane % 4);
    auto add = [&](bool is_inside, int64_t at, float x) {
      if (is_inside && x != 0.f) atomicAdd(to + at, x);
    };
    if (strides.row != 0 && strides.col != 0) {
#pragma unroll
      for (int i = 0; i < kPartRegs; ++i) {
        const int q = row + i / 4 * 8 + i % 2, j = kv[i / 2 % 2];
        add(q < sp.seqlen_q && j < sp.seqlen_kv, q * strides.row + j * strides.col, ds[i]);
      }
    } else if (strides.col != 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < kPartRegs / 4; ++i) sum += ds[i * 4 + r * 2] + ds[i * 4 + r * 2 + 1];
        sum = gpu::QuadSum(sum);
        add(lane % 4 == 0 && kv[r] < sp.seqlen_kv, kv[r] * strides.col, sum);
      }
    } else {
      float total = 0.f;
#pragma unroll
      for (int i = 0; i < kPartRegs / 4; ++i) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float sum = ds[i * 4 + c] + ds[i * 4 + 2 + c];
          if (strides.row == 0) {
            total += sum;
            continue;
          }
#pragma unroll
          for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
          const int q = row + i * 8 + c;
          add(lane / 4 == 0 && q < sp.seqlen_q, q * strides.row, sum);
        }
      }
      if (strides.row == 0) {
#pragma unroll
        for (int step = 1; step < 32; step *= 2) total += __shfl_xor_sync(0xffffffff, total, step);
        add(lane == 0, 0, total);
      }
    }
  }

  // P^T or dS^T of this warp into [query block][key][64], 128-byte swizzled; `at` is
  // PlaceOfTransposed.
  static __device__ __forceinline__ void StoreTransposed(Element* to, uint32_t at, int part,
                                                         const uint32_t (&x)[kScoreRegs / 2]) {
    const uint32_t first = gpu::SmemAddress(to) + at;
#pragma unroll
    for (int g = part * kPartQ / 8; g < (part + 1) * kPartQ / 8; g += 2) {
      // Tiles are aligned to 1024 bytes, so the swizzle of a chunk of 8 queries is one of
      // addresses.
      const uint32_t address = (first ^ (g % 8 * 16)) + g / 8 * kBlockKv * 128;
      asm volatile(
          "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
          "r"(x[g * 2]), "r"(x[g * 2 + 1]), "r"(x[g * 2 + 2]), "r"(x[g * 2 + 3])
          : "memory");
    }
  }

  // Where this lane's row of 8 queries of the warp's 16 keys goes; the first 8 lanes have keys 0-7,
  // the next 8 keys 8-15.
  static __device__ __forceinline__ uint32_t PlaceOfTransposed(int group) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const int row = lane % 16;
    const int key = (kSplitsColumns ? 0 : group * kGroupKv) + warp * 16 + row;
    const int chunk = lane / 16 + (kSplitsColumns ? group * kGroupQ / 8 : 0);
    return (chunk / 8) * kBlockKv * 128 + key * 128 + ((chunk % 8) ^ (row % 8)) * 16;
  }

  // Addition of dq
  // ----------------------------------------------------------------------------------------------------------
  //
  // Accumulators are added in the order of their registers; ConvertDq puts them right. With `turns`
  // key tiles take turns in their order at each query tile, so that every run adds in the same
  // order. The turn plan says who takes a turn where; a tile that takes one without anything to add
  // only passes it on. Blocks start key tiles in that order too, so the tile waited for is running
  // or done. With turns, query tiles go last to first: causal key tiles all begin at the same one
  // and follow each other at a distance of one turn, while first to last each would have to wait at
  // its diagonal until those before it have come so far.

  static constexpr int kDqFloats = kBlockQ * kHeadDim / kConsumers;  // of a warpgroup

  // One warpgroup's part of one (query head, query tile).
  struct DqPart {
    float* to;
    int* turn;  // null where the order is free
    int mine;

    __device__ DqPart(const BackwardParams& p, const TileInfo& info, int head, int m, int group) {
      const int tile = (info.batch * p.score.num_q_heads + head) * p.num_q_tiles + m;
      const int64_t part = static_cast<int64_t>(tile) * kConsumers + group;
      to = p.dq + part * kDqFloats;
      turn = p.turns == nullptr ? nullptr : p.turns + part;
      mine = p.turns == nullptr
                 ? 0
                 : info.kv_first / kBlockKv -
                       p.first_takers[static_cast<int64_t>(info.batch) * p.num_q_tiles + m];
    }
    __device__ void Await() const {
      int now;
      do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
      } while (now != mine);
    }
    __device__ void Pass() const {
      asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(mine + 1) : "memory");
    }
  };

  // By the warpgroup itself.
  template <class Dq>
  static __device__ __forceinline__ void AddRegisters(const DqPart& part, int group, const Dq& dq) {
    const int thread = threadIdx.x % 128;
    if (part.turn != nullptr) {
      if (thread == 0) part.Await();
      gpu::NamedSync(kDqBar + group, 128);
    }
    float* to = part.to + thread * 4;
#pragma unroll
    for (int i = 0; i < size(dq) / 4; ++i) {
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + i * 512),
                   "f"(dq(i * 4)), "f"(dq(i * 4 + 1)), "f"(dq(i * 4 + 2)), "f"(dq(i * 4 + 3))
                   : "memory");
    }
    if (part.turn != nullptr) {
      // Complete before the next tile may add.
      __threadfence();
      gpu::NamedSync(kDqBar + group, 128);
      if (thread == 0) part.Pass();
    }
  }

  // By a thread for each warpgroup, which goes through the tiles with the consumers: it has what
  // the warpgroup leaves in shared memory added in bulk, and passes on turns at query tiles to
  // which nothing is added. Where consumers add for themselves only the latter is left.
  static __device__ __forceinline__ void AddForConsumers(const BackwardParams& p, int group,
                                                         SharedStorage& smem) {
    int kv_phase = 0, dq_phase = 0, slot = 0;
    while (true) {
      gpu::Wait(&smem.kv_full, kv_phase);
      kv_phase ^= 1;
      const TileInfo& info = smem.info[slot];
      slot = NextInfo(slot);
      if (info.is_last) break;
      gpu::Arrive(&smem.kv_empty);
      int2 takes = make_int2(info.q_begin, kAddsInBulk ? info.q_end : info.q_begin);
      if (p.turns != nullptr) {
        takes = p.turn_takers[static_cast<int64_t>(info.batch) * p.order.num_kv_tiles +
                              info.kv_first / kBlockKv];
      }
      for (int g = 0; g < p.score.group_size; ++g) {
        const int head = info.kv_head * p.score.group_size + g;
        const gpu::TileWord* line = LineOf(p.score, info, head);
        for (int i = takes.x; i < takes.y; ++i) {
          const int m = Descends(p) ? takes.x + takes.y - 1 - i : i;
          if (m >= info.q_begin && m < info.q_end && gpu::IsSeen(line, m)) {
            if constexpr (kAddsInBulk) {
              AddBulk(DqPart(p, info, head, m, group), group, dq_phase, smem);
              dq_phase ^= 1;
            }
          } else if (p.turns != nullptr) {
            const DqPart part(p, info, head, m, group);
            part.Await();
            part.Pass();
          }
        }
      }
    }
    // Shared memory must outlive the last addition.
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }

  // One step of a warpgroup, from shared memory.
  static __device__ __forceinline__ void AddBulk(const DqPart& part, int group, int phase,
                                                 SharedStorage& smem) {
    gpu::Wait(&smem.dq_ring.full[group], phase);
    if (part.turn != nullptr) {
      part.Await();
      asm volatile("fence.proxy.async.global;" ::: "memory");
    }
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
        "cp.async.bulk.commit_group;\n"
        "cp.async.bulk.wait_group.read 0;" ::"l"(part.to),
        "r"(gpu::SmemAddress(smem.dq[group])), "r"(kDqFloats * 4)
        : "memory");
    gpu::Arrive(&smem.dq_ring.empty[group]);
    if (part.turn != nullptr) {
      // Complete, not merely read, before the next tile may add.
      asm volatile("cp.async.bulk.wait_group 0;\nfence.proxy.async.global;" ::: "memory");
      __threadfence();
      part.Pass();
    }
  }

  static __device__ __forceinline__ void Consume(const BackwardParams& p, SharedStorage& smem) {
    const gpu::ScoreParams& sp = p.score;
    const int thread = threadIdx.x - 128;
    const int group = __shfl_sync(0xffffffff, thread / 128, 0);
    const int lane = threadIdx.x % 32;

    Tensor sK = make_tensor(make_smem_ptr(smem.k), LayoutK{});
    Tensor sV = make_tensor(make_smem_ptr(smem.v), LayoutV{});
    Tensor sQ = make_tensor(make_smem_ptr(smem.q[0]), LayoutQ{});
    Tensor sDo = make_tensor(make_smem_ptr(smem.dout[0]), LayoutDo{});
    Tensor sKt = make_tensor(make_smem_ptr(smem.k), LayoutKt{});
    Tensor sQt = make_tensor(make_smem_ptr(smem.q[0]), LayoutQt{});
    Tensor sDot = make_tensor(make_smem_ptr(smem.dout[0]), LayoutDot{});
    Tensor sParts =
        make_tensor(make_smem_ptr(reinterpret_cast<Element*>(smem.parts[0])), LayoutParts{});
    Tensor sDs = make_tensor(make_smem_ptr(smem.ds[0]), LayoutDs{});
    Tensor sPt = make_tensor(make_smem_ptr(smem.p[0]), LayoutDst{});
    Tensor sDst = make_tensor(make_smem_ptr(smem.ds[0]), LayoutDst{});
    MmaS mma_s;
    MmaStart<kGroupQ> mma_start_s;
    MmaDp mma_dp;
    MmaStart<kGroupQ / kParts> mma_start_dp;
    MmaDv mma_dv;
    MmaDk mma_dk;
    MmaDq mma_dq;
    auto thread_s = mma_s.get_slice(thread);
    auto thread_dp = mma_dp.get_slice(thread);
    auto thread_dv = mma_dv.get_slice(thread);
    auto thread_dk = mma_dk.get_slice(thread);
    auto thread_dq = mma_dq.get_slice(thread);
    Tensor tSrK = thread_s.partition_fragment_A(sK);
    Tensor tSrQ = thread_s.partition_fragment_B(sQ);
    Tensor tSrParts = mma_start_s.get_slice(thread).partition_fragment_B(sParts);
    Tensor tPrParts = mma_start_dp.get_slice(thread).partition_fragment_B(sParts);
    Tensor tPrV = thread_dp.partition_fragment_A(sV);
    Tensor tPrDo = thread_dp.partition_fragment_B(sDo);
    Tensor tVrDo = thread_dv.partition_fragment_B(sDot);
    Tensor tKrQ = thread_dk.partition_fragment_B(sQt);
    Tensor tQrDs = thread_dq.partition_fragment_A(sDs);
    Tensor tQrK = thread_dq.partition_fragment_B(sKt);
    constexpr auto kScoreShape = Shape<Int<kBlockKv>, Int<kBlockQ>>{};
    Tensor tS = partition_fragment_C(mma_s, kScoreShape);
    Tensor tDp = partition_fragment_C(mma_dp, kScoreShape);
    Tensor tDv = partition_fragment_C(mma_dv, Shape<Int<kBlockKv>, Int<kHeadDimV>>{});
    Tensor tDk = partition_fragment_C(mma_dk, Shape<Int<kBlockKv>, Int<kHeadDim>>{});
    // 16-bit P^T and dS^T: operands of dv and dk, in registers unless these go by columns.
    Tensor tP = make_tensor<Element>(Shape<Int<kScoreRegs>>{});
    Tensor tDs = make_tensor<Element>(Shape<Int<kScoreRegs>>{});
    auto operand = [&](auto is_shared, auto& mma, auto& registers, const auto& shared, int stage) {
      if constexpr (is_shared) {
        return mma.get_slice(thread).partition_fragment_A(shared)(_, _, _, stage);
      } else {
        return make_tensor(registers.data(), partition_shape_A(mma, kScoreShape));
      }
    };
    float (&s)[kScoreRegs] = *reinterpret_cast<float (*)[kScoreRegs]>(tS.data());
    float (&dp)[kScoreRegs] = *reinterpret_cast<float (*)[kScoreRegs]>(tDp.data());
    float (&dv)[kDvCols / 2] = *reinterpret_cast<float (*)[kDvCols / 2]>(tDv.data());
    float (&dk)[kDkCols / 2] = *reinterpret_cast<float (*)[kDkCols / 2]>(tDk.data());

    // Results of a shuffle stay in registers; others are worked out again in every step, from a
    // thread index that is slow to arrive while products keep shared memory busy. Crowded tiles
    // would keep them in local memory.
    const auto kept = [&](int x) { return kIsCrowded ? x : __shfl_sync(0xffffffff, x, lane); };
    const uint32_t place = kept(PlaceOfTransposed(group));
    const uint32_t weights = kept(gpu::PartWeights<Element>());
    const int quarter = kept(threadIdx.x % 4 * 8);
    gpu::RingState<kStages> state;
    int kv_phase = 0, dq_phase = 0, ds_phase = 0, slot = 0;
    while (true) {
      gpu::Wait(&smem.kv_full, kv_phase);
      kv_phase ^= 1;
      const TileInfo& info = smem.info[slot];
      slot = NextInfo(slot);
      if (info.is_last) break;
      Scores x;
      x.quarter = quarter;
      x.factor = info.unit * gpu::kLog2e;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        x.kv[r] = info.kv_first + (kSplitsColumns ? 0 : group * kGroupKv) +
                  threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * r;
      }
      clear(tDk);
      clear(tDv);

      // The first warpgroup's products go before the second's: its exponentials run under the
      // scores of the second, and its copy of dq under the gradients.
      auto lead = [&](int bar) {
        if (group == 0) gpu::NamedArrive(bar, 128 * kConsumers);
      };
      auto follow = [&](int bar) {
        if (group == 1) gpu::NamedSync(bar, 128 * kConsumers);
      };
      // What the warp has stored of dq, to the thread that has it added. It waits for the stores,
      // so the products of the next step are issued before.
      auto hand_over_dq = [&] {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        gpu::ArriveAsWarp(&smem.dq_ring.full[group]);
      };
      // The query tiles of one head after those of another.
      const int num_steps = info.num_steps;
      const int q_offset = kSplitsColumns ? group * kGroupQ : 0;
      for (int step = 0; step < num_steps; ++step) {
        const int stage = state.stage, ds_stage = kDsStages == 1 ? 0 : stage;
        // dP^T starts from -delta, so that nothing is left to subtract.
        auto prepare_dp = [&](int part) {
          if constexpr (kStartsFromStatistics) return;
          ForPartRows(part, smem.delta[stage] + q_offset + x.quarter, [&](int i, float delta) {
            dp[i] = -delta;
            dp[i + 2] = -delta;
          });
        };
        auto fence_dp = [&](int part) {
          Tensor part_of_dp = tDp(_, _, part);
          warpgroup_fence_operand(part_of_dp);
        };
        auto start_dp = [&](int part) {
          fence_dp(part);
          warpgroup_arrive();
          if constexpr (kStartsFromStatistics) {
            Start(part, mma_start_dp, weights, tPrParts(_, _, _, 1, stage), tDp);
          }
          PartGemm(part, mma_dp, tPrV, tPrDo(_, _, _, stage), tDp);
        };
        float lse2[kScoreRegs / 2];
        auto load_lse2 = [&](int part) {
          ForPartRows(part, smem.lse2[stage] + q_offset + x.quarter,
                      [&](int i, float x) { lse2[i / 4 * 2 + i % 2] = x; });
        };
        gpu::Wait(&smem.q_ring.full[stage], state.phase);
        const Step now = smem.steps[stage];
        const int flags = now.flags, head = now.head, m = now.m;
        // Before the products, which would make loads of shared memory wait for their end.
        prepare_dp(0);
        if constexpr (!kIsCrowded && !kStartsFromStatistics) load_lse2(0);
        gpu::Wait(&smem.dout_ring.full[stage], state.phase);
        follow(kScoresBar);
        warpgroup_fence_operand(tS);
        fence_dp(0);
        warpgroup_arrive();
        if constexpr (kStartsFromStatistics) {
          Start(0, mma_start_s, weights, tSrParts(_, _, _, 0, stage), tS);
        }
        Gemm(mma_s, tSrK, tSrQ(_, _, _, stage), tS, kStartsFromStatistics);
        start_dp(0);
        lead(kScoresBar);
        if (kAddsInBulk && step > 0) hand_over_dq();
        warpgroup_wait<1>();
        warpgroup_fence_operand(tS);
        if (flags & kIsTransformed) {
          TransformScores(sp, info, x, head, m * kBlockQ + q_offset, s);
          if (kStartsFromStatistics && !(flags & kHasLarge)) {
            ForRows(smem.lse2[stage] + q_offset + x.quarter, [&](int i, float lse2) {
              s[i] -= lse2 * gpu::kLn2;
              s[i + 2] -= lse2 * gpu::kLn2;
            });
          }
        }
        if (!(flags & kIsFull)) {
          MaskScores(p, info, flags, smem.runs, head, m * kBlockQ + q_offset, x.kv, s);
        }
        if (flags & kHasLarge) {
          ExponentiateLarge(p, info, x, head, m * kBlockQ + q_offset, smem.lse2[stage] + q_offset,
                            s);
        }
        auto exponentiate = [&](int part) {
          if (flags & kHasLarge) return;
#pragma unroll
          for (int i = part * kPartRegs; i < (part + 1) * kPartRegs; ++i) {
            const float base = kStartsFromStatistics ? 0.f : lse2[i / 4 * 2 + i % 2];
            s[i] = gpu::Exp2(s[i] * x.factor - base);
          }
        };
        auto round_p = [&](int part) {
#pragma unroll
          for (int i = part * kPartRegs; i < (part + 1) * kPartRegs; ++i) {
            tP(i) = static_cast<Element>(s[i]);
          }
        };
        auto add_dv = [&] {
          auto p_operand = operand(std::bool_constant<kSplitsColumns>{}, mma_dv, tP, sPt, ds_stage);
          if constexpr (!kSplitsColumns) warpgroup_fence_operand(tP);
          warpgroup_fence_operand(tDv);
          warpgroup_arrive();
          Gemm(mma_dv, p_operand, tVrDo(_, _, _, stage), tDv, true);
        };
        // dS^T from dP^T, which is done.
        auto finish_ds = [&](int part) {
          fence_dp(part);
#pragma unroll
          for (int i = part * kPartRegs; i < (part + 1) * kPartRegs; ++i) dp[i] *= s[i];
          if (flags & kIsCapped) {
            // The soft cap's derivative 1 - tanh^2, with the capped score taken back from the
            // probability.
            const float inverse = gpu::kLn2 * info.inverse_cap;
            ForPartRows(part, smem.lse2[stage] + q_offset + x.quarter, [&](int i, float lse2) {
#pragma unroll
              for (int r = 0; r < 4; r += 2) {
                const float t = (__log2f(s[i + r]) + lse2) * inverse;
                dp[i + r] = s[i + r] == 0.f ? 0.f : dp[i + r] * (1.f - t * t);
              }
            });
          }
          if (!(flags & kIsFull)) {  // 0 * NaN of a pair that is not allowed
#pragma unroll
            for (int i = part * kPartRegs; i < (part + 1) * kPartRegs; ++i) {
              dp[i] = s[i] == 0.f ? 0.f : dp[i];
            }
          }
          if constexpr (kHasElements) {
            if (p.dbias != nullptr) {
              AddBiasGradient(p, info, head, m * kBlockQ + q_offset + part * kPartQ, x.kv,
                              *reinterpret_cast<float (*)[kPartRegs]>(&dp[part * kPartRegs]));
            }
          }
        };
        auto round_ds = [&](int part) {
#pragma unroll
          for (int i = part * kPartRegs; i < (part + 1) * kPartRegs; ++i) {
            tDs(i) = static_cast<Element>(dp[i]);
          }
        };
        auto store = [&](Element* to, int part, auto& registers) {
          StoreTransposed(to, place, part,
                          *reinterpret_cast<const uint32_t (*)[kScoreRegs / 2]>(&registers(0)));
        };
        if constexpr (kIsCrowded) load_lse2(0);
        exponentiate(0);
        // Fences keep the arithmetic on this side of the waits, where products are still under way.
        warpgroup_fence_operand(tS);
        if constexpr (kParts == 2) {
          if constexpr (!kIsCrowded && !kStartsFromStatistics) load_lse2(1);
          warpgroup_wait<0>();
          finish_ds(0);
          round_ds(0);
          if constexpr (kDsStages == 1) {
            gpu::Wait(&smem.ds_free, ds_phase ^ 1);
            ds_phase ^= 1;
          }
          store(smem.ds[ds_stage], 0, tDs);
          prepare_dp(1);
          start_dp(1);
          round_p(0);
          if constexpr (kIsCrowded) load_lse2(1);
          exponentiate(1);
          round_p(1);
          add_dv();
          warpgroup_fence_operand(tS);
          warpgroup_wait<1>();
        } else if constexpr (!kSplitsColumns) {
          round_p(0);
          add_dv();
          warpgroup_wait<1>();
        } else {
          warpgroup_wait<0>();
        }
        finish_ds(kParts - 1);
        if constexpr (kSplitsColumns) {
          round_p(0);
          store(smem.p[ds_stage], 0, tP);
        }
        round_ds(kParts - 1);
        store(smem.ds[ds_stage], kParts - 1, tDs);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        gpu::NamedSync(kDsBar, 128 * kConsumers);
        auto finish_dv = [&] {
          warpgroup_fence_operand(tDv);
          if constexpr (!kSplitsColumns) warpgroup_fence_operand(tP);
          gpu::ArriveAsWarp(&smem.dout_ring.empty[stage]);
        };
        if constexpr (kIsCrowded) {
          warpgroup_wait<0>();
          finish_dv();
        }
        auto ds_operand = operand(std::bool_constant<kSharesDs>{}, mma_dk, tDs, sDst, ds_stage);
        Tensor tDq = partition_fragment_C(mma_dq, Shape<Int<kBlockQ>, Int<kHeadDim>>{});
        if constexpr (!kSharesDs) warpgroup_fence_operand(tDs);
        follow(kGradientsBar);
        warpgroup_fence_operand(tDk);
        warpgroup_fence_operand(tDq);
        warpgroup_arrive();
        // First, so that dv and dk run beside its addition.
        Gemm(mma_dq, tQrDs(_, _, _, ds_stage), tQrK, tDq, false);
        if constexpr (kSplitsColumns) add_dv();
        Gemm(mma_dk, ds_operand, tKrQ(_, _, _, stage), tDk, true);
        lead(kGradientsBar);
        warpgroup_wait<kSplitsColumns ? 2 : 1>();
        warpgroup_fence_operand(tDq);
        if constexpr (!kSplitsColumns && !kIsCrowded) finish_dv();
        if constexpr (kAddsInBulk) {
          gpu::Wait(&smem.dq_ring.empty[group], dq_phase ^ 1);
          float* to = smem.dq[group] + threadIdx.x % 128 * 4;
#pragma unroll
          for (int i = 0; i < size(tDq) / 4; ++i) {
            *reinterpret_cast<float4*>(to + i * 512) =
                make_float4(tDq(i * 4), tDq(i * 4 + 1), tDq(i * 4 + 2), tDq(i * 4 + 3));
          }
          dq_phase ^= 1;
        } else {
          AddRegisters(DqPart(p, info, head, m, group), group, tDq);
        }
        warpgroup_wait<0>();
        warpgroup_fence_operand(tDk);
        if constexpr (kSplitsColumns) finish_dv();
        if constexpr (!kSharesDs) warpgroup_fence_operand(tDs);
        if constexpr (kDsStages == 1) gpu::ArriveAsWarp(&smem.ds_free);
        gpu::ArriveAsWarp(&smem.q_ring.empty[stage]);
        state.Next();
      }
      if (kAddsInBulk && num_steps > 0) hand_over_dq();
      gpu::ArriveAsWarp(&smem.kv_empty);
      Element* room = nullptr;
      if constexpr (kStagesDkv && kDsStages == 1) {
        // dq of the last step has been read.
        gpu::Wait(&smem.dq_ring.empty[group], dq_phase ^ 1);
        room = reinterpret_cast<Element*>(smem.dq[group]) + threadIdx.x % 128 / 32 * kRowsOfWarp;
      } else if constexpr (kStagesDkv) {
        // Rows of dS that only this warp writes, and that nobody reads any more.
        room = smem.ds[state.stage] + (threadIdx.x / 32 - 4) * kRowsOfWarp;
      }
      Finish(p, info, group, x, dk, dv, room);
    }
  }

  // Epilogue
  // ----------------------------------------------------------------------------------------------------------

  // dk and dv of whole rows go by way of shared memory: that of dS in the stage of the step to
  // come, or, where it has only one, that from which dq is added. A warp has room for 64 columns of
  // its 16 rows.
  static constexpr bool kStagesDkv = kAddsInBulk && !kSplitsColumns;
  static constexpr int kStagedCols = gpu::RowStage<Element>::kColumns,
                       kRowsOfWarp = gpu::RowStage<Element>::kRows * kStagedCols;

  // Rows of one warp.
  template <int kRegs>
  static __device__ __forceinline__ void StoreStaged(Element* room, const float (&x)[kRegs],
                                                     Element* first, int64_t stride, int num_rows,
                                                     int num_columns) {
    using Stage = gpu::RowStage<Element>;
    static_assert(sizeof(Stage) == kRowsOfWarp * sizeof(Element));
    static_assert(kRegs * 2 % kStagedCols == 0);
#pragma unroll
    for (int i = 0; i < kRegs * 2 / kStagedCols; ++i) {
      reinterpret_cast<Stage*>(room)->Store(&x[i * (kStagedCols / 2)], first + i * kStagedCols,
                                            stride, num_rows, num_columns - i * kStagedCols);
    }
  }

  static __device__ __forceinline__ void Finish(const BackwardParams& p, const TileInfo& info,
                                                int group, const Scores& x,
                                                float (&dk)[kDkCols / 2], float (&dv)[kDvCols / 2],
                                                Element* room) {
    const gpu::ScoreParams& sp = p.score;
    const int lane = threadIdx.x % 32;
    const float scale = info.scale;
    bool is_nan = false;
#pragma unroll
    for (int i = 0; i < kDkCols / 2; ++i) {
      dk[i] *= scale;
      is_nan |= dk[i] != dk[i];
    }
#pragma unroll
    for (int i = 0; i < kDvCols / 2; ++i) is_nan |= dv[i] != dv[i];
    if (info.may_leak && __any_sync(0xffffffff, is_nan) && lane == 0 && x.kv[0] < sp.seqlen_kv) {
      p.repair.strips[atomicAdd(p.repair.count, 1)] = {info.batch, info.kv_head, x.kv[0]};
    }
    if constexpr (kStagesDkv) {
      const int warp = threadIdx.x % 128 / 32;
      const int first = info.kv_first + group * kGroupKv + warp * 16;
      const int num_rows = sp.seqlen_kv - first;
      const int64_t heads = sp.num_kv_heads;
      const int64_t row =
          (static_cast<int64_t>(info.batch) * sp.seqlen_kv + first) * heads + info.kv_head;
      StoreStaged(room, dk, static_cast<Element*>(p.dk) + row * sp.head_dim, heads * sp.head_dim,
                  num_rows, sp.head_dim);
      StoreStaged(room, dv, static_cast<Element*>(p.dv) + row * sp.head_dim_v,
                  heads * sp.head_dim_v, num_rows, sp.head_dim_v);
    } else {
      const int dk_column = kSplitsColumns ? group * kDkCols : 0,
                dv_column = kSplitsColumns ? group * kDvCols : 0;
      Element *dk_rows[2], *dv_rows[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int64_t row =
            (static_cast<int64_t>(info.batch) * sp.seqlen_kv + x.kv[r]) * sp.num_kv_heads +
            info.kv_head;
        const bool is_inside = x.kv[r] < sp.seqlen_kv;
        dk_rows[r] =
            is_inside ? static_cast<Element*>(p.dk) + row * sp.head_dim + dk_column : nullptr;
        dv_rows[r] =
            is_inside ? static_cast<Element*>(p.dv) + row * sp.head_dim_v + dv_column : nullptr;
      }
      gpu::StoreRows<Element>(dk, dk_rows, sp.head_dim - dk_column);
      gpu::StoreRows<Element>(dv, dv_rows, sp.head_dim_v - dv_column);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    BackwardMain(const __grid_constant__ BackwardParams p,
                 const __grid_constant__ CUtensorMap q_tensor,
                 const __grid_constant__ CUtensorMap k_tensor,
                 const __grid_constant__ CUtensorMap v_tensor,
                 const __grid_constant__ CUtensorMap dout_tensor) {
  extern __shared__ __align__(1024) char raw[];
  auto& smem = *reinterpret_cast<typename Kernel::SharedStorage*>(raw);
  if (threadIdx.x == 0) {
    for (gpu::Barrier& bar : smem.info_full) gpu::InitBarrier(&bar, 1);
    gpu::InitBarrier(&smem.near_end, 1);
    gpu::InitBarrier(&smem.kv_full, 1);
    constexpr int kGroupArrivals = 4 * gpu::kArrivalsOfWarp;
    gpu::InitBarrier(&smem.kv_empty, (kGroupArrivals + 1) * Kernel::kConsumers);
    gpu::InitBarrier(&smem.ds_free, kGroupArrivals * Kernel::kConsumers);
    for (int i = 0; i < Kernel::kConsumers; ++i) {
      gpu::InitBarrier(&smem.dq_ring.full[i], kGroupArrivals);
      gpu::InitBarrier(&smem.dq_ring.empty[i], 1);
    }
    for (int i = 0; i < Kernel::kStages; ++i) {
      gpu::InitBarrier(&smem.q_ring.full[i], 1);
      gpu::InitBarrier(&smem.q_ring.empty[i], kGroupArrivals * Kernel::kConsumers);
      gpu::InitBarrier(&smem.dout_ring.full[i], 1);
      gpu::InitBarrier(&smem.dout_ring.empty[i], kGroupArrivals * Kernel::kConsumers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if constexpr (Kernel::kStartsFromStatistics) {
    uint4* parts = smem.parts[0][0][0];
    for (int i = threadIdx.x; i < sizeof(smem.parts) / sizeof(uint4); i += Kernel::kThreads) {
      parts[i] = make_uint4(0, 0, 0, 0);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    cutlass::arch::warpgroup_reg_dealloc<Kernel::kProducerRegs>();
    if (threadIdx.x == 0) {
      Kernel::LoadSteps(p, &q_tensor, &dout_tensor, smem);
    } else if (threadIdx.x == 32 * (Kernel::kConsumers + 1)) {
      Kernel::PlanTiles(p, &k_tensor, &v_tensor, smem);
    } else if (threadIdx.x % 32 == 0) {
      Kernel::AddForConsumers(p, threadIdx.x / 32 - 1, smem);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Kernel::kConsumerRegs>();
    Kernel::Consume(p, smem);
  }
}

// dq of one (query tile, head, batch entry): scaled, in its own type and order. Blocks of 256
// threads hold the tile as the main kernel's consumers do.
template <class Kernel>
__global__ void __launch_bounds__(256)
    ConvertDq(const __grid_constant__ BackwardParams p, void* dq, gpu::RepairList repair) {
  using Element = typename Kernel::Element;
  constexpr int kRegs = Kernel::kBlockQ * Kernel::kHeadDim / 256;
  const gpu::ScoreParams& s = p.score;
  const int m = blockIdx.x % p.num_q_tiles, pair = blockIdx.x / p.num_q_tiles;
  const int b = pair / s.num_q_heads, head = pair % s.num_q_heads;
  const float4* from = reinterpret_cast<const float4*>(
      p.dq + static_cast<int64_t>(blockIdx.x) * (Kernel::kBlockQ * Kernel::kHeadDim));
  const float scale = gpu::ScaleOf(s, b);
  const int q_length = gpu::LimitsOf(s, b).q_length;
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int column = Kernel::kDqByRows ? 0 : group * Kernel::kDqCols;
  const int row = m * Kernel::kBlockQ + (Kernel::kDqByRows ? group * 64 : 0) +
                  threadIdx.x % 128 / 32 * 16 + lane / 4;
  // A product adds 0 * NaN to rows past their length, beside a key that is NaN.
  const bool is_seen[2] = {row < q_length, row + 8 < q_length};
  float x[kRegs];
  bool is_nan = false;
#pragma unroll
  for (int i = 0; i < kRegs / 4; ++i) {
    const float4 y = from[(threadIdx.x / 128 * (kRegs / 4) + i) * 128 + threadIdx.x % 128];
    x[i * 4] = is_seen[0] ? y.x * scale : 0.f;
    x[i * 4 + 1] = is_seen[0] ? y.y * scale : 0.f;
    x[i * 4 + 2] = is_seen[1] ? y.z * scale : 0.f;
    x[i * 4 + 3] = is_seen[1] ? y.w * scale : 0.f;
#pragma unroll
    for (int c = 0; c < 4; ++c) is_nan |= x[i * 4 + c] != x[i * 4 + c];
  }
  Element* rows[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int to = row + 8 * r;
    rows[r] = to < s.seqlen_q
                  ? static_cast<Element*>(dq) +
                        ((static_cast<int64_t>(b) * s.seqlen_q + to) * s.num_q_heads + head) *
                            s.head_dim +
                        column
                  : nullptr;
  }
  if (repair.count != nullptr && __any_sync(0xffffffff, is_nan) && lane == 0 && row < s.seqlen_q) {
    repair.strips[atomicAdd(repair.count, 1)] = {b, head, row};
  }
  gpu::StoreRows<Element>(x, rows, s.head_dim - column);
}

}  // namespace jax_fmha::sm90
