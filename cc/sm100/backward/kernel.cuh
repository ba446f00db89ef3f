// Backward attention on Blackwell: dk and dv of one tile of keys stay in tensor memory while
// queries pass by; dq is added to a float32 array in device memory.
//
// A block takes one (tile of 128 keys, kv head, batch entry) and walks the tiles of 128 queries of
// every query head of the group, so nothing of dk and dv is added twice. One pair of tiles is a
// step. Its scores are computed transposed, S^T = k q^T and dP^T = v dout^T, so that a thread holds
// one key, whose interval of queries is all that most masks are, and so that P^T and dS^T may stay
// in tensor memory as operands of dv += P^T dout and dk += dS^T q. Only dq = dS k needs dS in
// shared memory. Blocks are persistent.
//
// Roles: one warp loads; one warp issues the products; two warpgroups compute P and dS, each of one
// half of the step's queries; a warpgroup adds dq to device memory.
//
// Every barrier completes once per step unless said otherwise. Who arrives -> who waits: what it
// protects.
//   k_full, v_full   TMA -> products, once per tile: keys and values are in shared memory.
//   kv_empty         products -> load, once per tile: the tile's products have read them.
//   q_ring, dout_ring  TMA -> products, products -> load: stages of q and dout.
//   stats_ring       TMA -> compute, compute -> load: lse and delta of a step's queries.
//   s_full           products -> compute: S. All products before are done as well, so that dv's
//                    operand P of the step before may be written over.
//   s_read           compute -> products: S is in registers. Only where dP takes its place.
//   p_full           compute -> products: P is in tensor memory, and S has been read. In a tile's
//                    first step also: gradients of the tile before have been read.
//   dp_full          products -> compute: dP. All products before are done as well, so that dS of
//                    the step before may be written over, in both memories.
//   ds_full          compute -> products: dS is in tensor and shared memory, and dP has been read.
//   dq_full          products -> reduce: dq.
//   dq_read          reduce -> products: dq is in registers.
//   grads_full       products -> compute, once per tile that has steps: dk and dv are complete.
//   tmem_unused      compute, reduce -> products, once: tensor memory may be freed.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/simd_sm100.hpp>
#include <cute/tensor.hpp>

#include "cc/gpu/backward_tile.cuh"
#include "cc/gpu/pipeline.cuh"
#include "cc/gpu/problem_params.cuh"
#include "cc/gpu/repair.cuh"
#include "cc/gpu/softmax.cuh"
#include "cc/gpu/turns.h"
#include "cc/sm100/backward/config.h"
#include "cc/sm100/backward/launch.h"
#include "cc/sm100/load.cuh"
#include "cc/sm100/mma.cuh"
#include "cc/sm100/tmem.cuh"

namespace jax_fmha::sm100 {

using namespace cute;

struct BackwardParams {
  gpu::ScoreParams score;
  gpu::SegmentPlan kv_plan;  // queries by key
  BatchMap q_map, k_map, v_map, dout_map;
  const float *lse2, *delta;  // [batch, N, query tile, kRows], in the order of gpu::RowSlot
  const int* has_large;       // not 0 if some |lse2| exceeds gpu::kLargeBase
  Operand lse;                // [batch, N, T], for such rows
  float* dq;      // [batch, N, query tile, head_dim / 4, kRows, 4], zeroed, of the tile's head dim
  void *dk, *dv;  // [batch, S, K, H], [batch, S, K, Hv]
  gpu::KeyTileOrder order;
  int num_q_tiles;
  int* next_tile;  // zeroed
  int* turns;  // [batch, N, query tile, kReduceWarps], zeroed; null where the order of additions
               // is free
  gpu::RepairList repair;  // strips of keys that another segment's NaN may have reached
  gpu::TurnPlan turn_plan;
  float* dbias;  // summed in float32, zeroed; null if it is not wanted
  BatchMap dbias_map;
};

// Queries, output gradients and keys meet probabilities and score gradients of 0 in products, and
// need rows past the last as zeros, since 0 * NaN is NaN. What values give is selected.
struct BackwardTensors {
  RowMaps q, k, dout;
  CUtensorMap v;
};

template <typename Element_, ForwardMode kMode_, int kHeadDim_, int kHeadDimV_, int kQStages_,
          int kDoutStages_>
struct BackwardKernel {
  using Element = Element_;
  static constexpr ForwardMode kMode = kMode_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kQStages = kQStages_, kDoutStages = kDoutStages_, kStatsStages = 2;
  static constexpr bool kHasElements = kMode == ForwardMode::kGeneral;
  // Whether turns of segments and masks are planned, or follow from causality and window alone.
  static constexpr bool kPlansTurns = kHasElements;

  // Warps 0-3 add dq, 4-7 and 8-11 compute, 12 issues products, 13 loads.
  static constexpr int kThreads = 512;
  static constexpr int kComputeWarp = 4, kMmaWarp = 12, kLoadWarp = 13;
  static constexpr int kComputeWarps = 8, kHalves = 2;
  static constexpr int kComputeThreads = 32 * kComputeWarps, kReduceThreads = 32 * kReduceWarps;
  static constexpr int kQueries = kRows / kHalves;  // of one step and thread
  // Columns of dq that are held in registers, so that tensor memory is free before they have been
  // added. Masks and bias take registers that the other half of 128 would need.
  static constexpr int kHeldColumns = kHeadDim % 128 == 0 && !kHasElements ? 128 : 64;
  // setmaxnreg shares out the 128 registers per thread that the block starts with. Descriptors of
  // products take the more, the larger the head dim.
  static constexpr int kReduceRegs = kHeldColumns == 128 ? 152 : 104;
  static constexpr int kComputeRegs = kHeldColumns == 128 ? 144 : 168;
  static constexpr int kOtherRegs = 512 - kReduceRegs - kHalves * kComputeRegs;

  // Columns of tensor memory
  // ----------------------------------------------------------------------------------------------
  // dk, dv, S, dP and dq fit side by side up to head dim 64. With 128, dq takes dP's place. With
  // 192 dP takes the place of S, and dq that of everything but dk and dv; then the scores of the
  // next step must wait for dq. P and dS, two to a column, lie where the same threads have read
  // before they write, but for head dim 192, where columns that nobody reads are left for P.
  static constexpr int kColumns = 512;
  static constexpr int kDkColumn = 0, kDvColumn = kHeadDim, kFreeColumn = kHeadDim + kHeadDimV;
  static constexpr bool kDpReplacesS = kFreeColumn + 2 * kRows > kColumns;
  static constexpr int kDpColumn = kDpReplacesS ? kColumns - kRows : kFreeColumn + kRows;
  static constexpr int kSColumn = kDpReplacesS ? kDpColumn : kFreeColumn;
  static constexpr bool kDqReplacesDp = kDpColumn + kRows + kHeadDim > kColumns;
  static constexpr int kDqColumn = kDqReplacesDp ? kColumns - kHeadDim : kDpColumn + kRows;
  static_assert(kDqColumn >= kFreeColumn);
  static_assert(!kDpReplacesS || kSColumn - kFreeColumn >= kRows / 2);
  // Where the next step's scores are computed before this step's dq, dq must leave them alone.
  static_assert(kDpReplacesS || kDqColumn >= kSColumn + kRows);
  static __host__ __device__ constexpr uint32_t PColumn(int half) {
    return kDpReplacesS ? kFreeColumn + half * (kQueries / 2) : kSColumn + half * kQueries;
  }
  static __host__ __device__ constexpr uint32_t DsColumn(int half) {
    return kDpColumn + half * kQueries;
  }

  using MmaS = decltype(make_tiled_mma(SM100_MMA_F16BF16_SS<Element, Element, float, kRows, kRows,
                                                            UMMA::Major::K, UMMA::Major::K>{}));
  using MmaDv =
      decltype(make_tiled_mma(SM100_MMA_F16BF16_TS<Element, Element, float, kRows, kHeadDimV,
                                                   UMMA::Major::K, UMMA::Major::MN>{}));
  using MmaDk =
      decltype(make_tiled_mma(SM100_MMA_F16BF16_TS<Element, Element, float, kRows, kHeadDim,
                                                   UMMA::Major::K, UMMA::Major::MN>{}));
  using MmaDq =
      decltype(make_tiled_mma(SM100_MMA_F16BF16_SS<Element, Element, float, kRows, kHeadDim,
                                                   UMMA::Major::MN, UMMA::Major::MN>{}));
  using AtomK = UMMA::Layout_K_SW128_Atom<Element>;
  using AtomMn = UMMA::Layout_MN_SW128_Atom<Element>;
  using LayoutK = decltype(UMMA::tile_to_mma_shape(
      AtomK{}, partition_shape_A(MmaS{}, Shape<Int<kRows>, Int<kHeadDim>>{})));
  using LayoutV = decltype(UMMA::tile_to_mma_shape(
      AtomK{}, partition_shape_A(MmaS{}, Shape<Int<kRows>, Int<kHeadDimV>>{})));
  using LayoutQ = decltype(UMMA::tile_to_mma_shape(
      AtomK{}, partition_shape_B(MmaS{}, Shape<Int<kRows>, Int<kHeadDim>>{})));
  using LayoutDo = decltype(UMMA::tile_to_mma_shape(
      AtomK{}, partition_shape_B(MmaS{}, Shape<Int<kRows>, Int<kHeadDimV>>{})));
  // The same bytes, [column block][row][kBoxCols], seen transposed.
  using LayoutKt = decltype(UMMA::tile_to_mma_shape(
      AtomMn{}, partition_shape_B(MmaDq{}, Shape<Int<kHeadDim>, Int<kRows>>{}), Step<_2, _1>{}));
  using LayoutQt = decltype(UMMA::tile_to_mma_shape(
      AtomMn{}, partition_shape_B(MmaDk{}, Shape<Int<kHeadDim>, Int<kRows>>{}), Step<_2, _1>{}));
  using LayoutDot = decltype(UMMA::tile_to_mma_shape(
      AtomMn{}, partition_shape_B(MmaDv{}, Shape<Int<kHeadDimV>, Int<kRows>>{}), Step<_2, _1>{}));
  // dS as (query, key), of bytes [query block][key][kBoxCols queries]: a half is a block.
  using LayoutDs = decltype(UMMA::tile_to_mma_shape(
      AtomMn{}, partition_shape_A(MmaDq{}, Shape<Int<kRows>, Int<kRows>>{}), Step<_2, _1>{}));
  static_assert(kQueries == kBoxCols);
  // One half of P and dS, as operands in tensor memory.
  using LayoutHalf = decltype(UMMA::tile_to_mma_shape(
      AtomK{}, partition_shape_A(MmaDv{}, Shape<Int<kRows>, Int<kQueries>>{})));

  // What the computing warps want to know of a tile stays in shared memory, as they have no
  // register to spare.
  struct TileInfo : gpu::BackwardTileInfo, gpu::Logits {
    int has_large;  // see ExponentiateLarge
    int num_steps;
    int64_t bias_at, dbias_at, lse_at;  // of the batch entry
  };
  static constexpr int kInfoSlots = 2;
  static constexpr int kInfoReaders = 13;  // warps

  struct Stats {
    float lse2[kRows], delta[kRows];
  };

  struct alignas(1024) SharedStorage {
    alignas(1024) Element k[kRows * kHeadDim];
    alignas(1024) Element v[kRows * kHeadDimV];
    alignas(1024) Element q[kQStages][kRows * kHeadDim];
    alignas(1024) Element dout[kDoutStages][kRows * kHeadDimV];
    alignas(1024) Element ds[kRows * kRows];
    alignas(128) Stats stats[kStatsStages];
    TileInfo info[kInfoSlots];
    gpu::Ring<kInfoSlots> info_ring;
    gpu::Ring<kQStages> q_ring;
    gpu::Ring<kDoutStages> dout_ring;
    gpu::Ring<kStatsStages> stats_ring;
    gpu::Barrier k_full, v_full, kv_empty;
    gpu::Barrier s_full, s_read, p_full, dp_full, ds_full, dq_full, dq_read;
    gpu::Barrier grads_full, tmem_unused;
    uint32_t tmem;
  };

  static __device__ __forceinline__ void InitBarriers(SharedStorage& smem) {
    auto ring = [](auto& r, int readers) {
      for (auto& bar : r.full) gpu::InitBarrier(&bar, 1);
      for (auto& bar : r.empty) gpu::InitBarrier(&bar, readers);
    };
    ring(smem.info_ring, kInfoReaders);
    ring(smem.q_ring, 1);
    ring(smem.dout_ring, 1);
    ring(smem.stats_ring, kComputeWarps);
    for (gpu::Barrier* bar : {&smem.k_full, &smem.v_full, &smem.kv_empty, &smem.s_full,
                              &smem.dp_full, &smem.dq_full, &smem.grads_full}) {
      gpu::InitBarrier(bar, 1);
    }
    for (gpu::Barrier* bar : {&smem.s_read, &smem.p_full, &smem.ds_full})
      gpu::InitBarrier(bar, kComputeThreads);
    gpu::InitBarrier(&smem.dq_read, kReduceThreads);
    gpu::InitBarrier(&smem.tmem_unused, kComputeThreads + kReduceThreads);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  // The next tile, for the warps that work on it; `Done` tells the loading warp that it was read.
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

  // Query tiles of a head by the mask, which skips some; null if none.
  static __device__ __forceinline__ const gpu::TileWord* LineOf(const gpu::ScoreParams& s,
                                                                const TileInfo& info, int head) {
    return gpu::LineOf(s.mask_plan, info.batch, head, info.kv_first / kRows);
  }

  // Steps of a tile: its query tiles of one query head after those of another, without those that
  // the mask skips.
  struct Steps {
    const TileInfo& info;
    int head, q_tile, left;
    bool is_masked = false;  // the mask drops some pair of this step
    __device__ __forceinline__ Steps(const BackwardParams& p, const TileInfo& tile)
        : info(tile),
          head(tile.kv_head * p.score.group_size),
          q_tile(tile.q_begin),
          left(tile.num_steps) {
      Seek(p);
    }
    __device__ __forceinline__ void Next(const BackwardParams& p) {
      --left;
      if (++q_tile == info.q_end) {
        q_tile = info.q_begin;
        ++head;
      }
      Seek(p);
    }
    __device__ __forceinline__ void Seek(const BackwardParams& p) {
      if constexpr (kHasElements) {
        if (left == 0 || p.score.mask_plan.words == nullptr) return;
        while (true) {
          const gpu::TileWord* line = LineOf(p.score, info, head);
          q_tile = gpu::FirstSeen(line, q_tile, info.q_end);
          if (q_tile < info.q_end) {
            is_masked = gpu::IsPartial(line, q_tile);
            return;
          }
          q_tile = info.q_begin;
          ++head;
        }
      }
    }
    // Of [batch, N, query tile].
    __device__ __forceinline__ int64_t Index(const BackwardParams& p, int batch) const {
      return (static_cast<int64_t>(batch) * p.score.num_q_heads + head) * p.num_q_tiles + q_tile;
    }
  };

  // Loading
  // ----------------------------------------------------------------------------------------------

  static __device__ __forceinline__ void LoadFloats(float* to, const float* from,
                                                    gpu::Barrier* bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(gpu::SmemAddress(to)),
        "l"(from), "r"(kRows * 4), "r"(gpu::SmemAddress(bar))
        : "memory");
  }

  // Into shared memory at once, as the loading thread has no register for all of it.
  static __device__ __forceinline__ void DescribeTile(const BackwardParams& p, int tile,
                                                      TileInfo& info) {
    const gpu::ScoreParams& s = p.score;
    static_cast<gpu::BackwardTileInfo&>(info) =
        gpu::DescribeBackwardTile<kRows, kRows, kHasElements>(s, p.kv_plan, p.order, tile);
    static_cast<gpu::Logits&>(info) = gpu::LogitsOf<kHasElements>(s, info.batch);
    info.has_large = *p.has_large;
    info.lse_at = gpu::EntryOf(p.lse.batch, info.batch) * s.num_q_heads * s.seqlen_q;
    info.bias_at = info.dbias_at = 0;
    if constexpr (kHasElements) {
      if (s.bias.data != nullptr)
        info.bias_at = gpu::EntryOf(s.bias.batch, info.batch) * s.bias_strides.entry;
      if (p.dbias != nullptr)
        info.dbias_at = gpu::EntryOf(p.dbias_map, info.batch) * s.bias_strides.entry;
    }
    info.num_steps = s.group_size * (info.q_end - info.q_begin);
    if constexpr (kHasElements) {
      if (s.mask_plan.words != nullptr) {
        int num_steps = 0;
        for (int g = 0; g < s.group_size; ++g) {
          num_steps += gpu::CountSeen(LineOf(s, info, info.kv_head * s.group_size + g),
                                      info.q_begin, info.q_end);
        }
        info.num_steps = num_steps;
      }
    }
  }

  static __device__ __forceinline__ void Load(const BackwardParams& p,
                                              const BackwardTensors& tensors, SharedStorage& smem) {
    const gpu::ScoreParams& s = p.score;
    gpu::RingState<kInfoSlots> slot;
    gpu::RingState<kQStages> q_state;
    gpu::RingState<kDoutStages> dout_state;
    gpu::RingState<kStatsStages> stats_state;
    slot.phase = q_state.phase = dout_state.phase = stats_state.phase = 1;  // empty slots
    int kv_phase = 1;
    // A tile is claimed when the one before has been loaded.
    for (int tile = blockIdx.x; tile < p.order.num_tiles;
         tile = gridDim.x + atomicAdd(p.next_tile, 1)) {
      gpu::Wait(&smem.info_ring.empty[slot.stage], slot.phase);
      TileInfo& info =
          smem.info[slot.stage];  // nobody else writes it before the tile after the next
      DescribeTile(p, tile, info);
      gpu::Arrive(&smem.info_ring.full[slot.stage]);
      slot.Next();
      if (info.num_steps == 0) continue;
      const int q_entry = gpu::EntryOf(p.q_map, info.batch),
                k_entry = gpu::EntryOf(p.k_map, info.batch),
                v_entry = gpu::EntryOf(p.v_map, info.batch),
                dout_entry = gpu::EntryOf(p.dout_map, info.batch);
      const int kv_valid = min(kRows, info.limits.kv_length - info.kv_first);
      bool is_first = true;
      for (Steps step(p, info); step.left > 0; step.Next(p)) {
        const int first = step.q_tile * kRows;
        const int valid = min(kRows, info.limits.q_length - first);
        if (is_first) {
          gpu::Wait(&smem.kv_empty, kv_phase);
          kv_phase ^= 1;
          LoadTile<kHeadDim>(smem.k, tensors.k, &smem.k_full, info.kv_first, kv_valid, s.seqlen_kv,
                             info.kv_head, k_entry);
        }
        gpu::Wait(&smem.q_ring.empty[q_state.stage], q_state.phase);
        LoadTile<kHeadDim>(smem.q[q_state.stage], tensors.q, &smem.q_ring.full[q_state.stage],
                           first, valid, s.seqlen_q, step.head, q_entry);
        q_state.Next();
        if (is_first) {
          LoadTile<kHeadDimV>(smem.v, &tensors.v, &smem.v_full, info.kv_first, info.kv_head,
                              v_entry);
          is_first = false;
        }
        gpu::Wait(&smem.stats_ring.empty[stats_state.stage], stats_state.phase);
        gpu::Barrier* full = &smem.stats_ring.full[stats_state.stage];
        const int64_t rows = step.Index(p, info.batch) * kRows;
        gpu::ArriveExpect(full, sizeof(Stats));
        LoadFloats(smem.stats[stats_state.stage].lse2, p.lse2 + rows, full);
        LoadFloats(smem.stats[stats_state.stage].delta, p.delta + rows, full);
        stats_state.Next();
        gpu::Wait(&smem.dout_ring.empty[dout_state.stage], dout_state.phase);
        LoadTile<kHeadDimV>(smem.dout[dout_state.stage], tensors.dout,
                            &smem.dout_ring.full[dout_state.stage], first, valid, s.seqlen_q,
                            step.head, dout_entry);
        dout_state.Next();
      }
    }
    gpu::Wait(&smem.info_ring.empty[slot.stage], slot.phase);
    smem.info[slot.stage].is_last = 1;
    gpu::Arrive(&smem.info_ring.full[slot.stage]);
    // The last products tell these barriers that they have read their operands: until then the
    // block must not end.
    gpu::Wait(&smem.kv_empty, kv_phase);
    for (int i = 0; i < kQStages; ++i, q_state.Next())
      gpu::Wait(&smem.q_ring.empty[q_state.stage], q_state.phase);
    for (int i = 0; i < kDoutStages; ++i, dout_state.Next())
      gpu::Wait(&smem.dout_ring.empty[dout_state.stage], dout_state.phase);
  }

  // Products
  // ----------------------------------------------------------------------------------------------

  // The order of issue per step: dP, dv, [S of the next step,] dk, dq[, S of the next step]. While
  // P is computed the tensor core works on dk and dq of the step before, while dS is, on dv and S.
  static __device__ __forceinline__ void Multiply(SharedStorage& smem) {
    MmaS mma_s;
    MmaDv mma_dv;
    MmaDk mma_dk;
    MmaDq mma_dq;
    auto thread_s = mma_s.get_slice(0);
    auto thread_dv = mma_dv.get_slice(0);
    auto thread_dk = mma_dk.get_slice(0);
    auto thread_dq = mma_dq.get_slice(0);
    const uint32_t tmem = smem.tmem;
    Tensor tS =
        AtColumn(partition_fragment_C(mma_s, Shape<Int<kRows>, Int<kRows>>{}), tmem + kSColumn);
    Tensor tDp =
        AtColumn(partition_fragment_C(mma_s, Shape<Int<kRows>, Int<kRows>>{}), tmem + kDpColumn);
    Tensor tDv = AtColumn(partition_fragment_C(mma_dv, Shape<Int<kRows>, Int<kHeadDimV>>{}),
                          tmem + kDvColumn);
    Tensor tDk = AtColumn(partition_fragment_C(mma_dk, Shape<Int<kRows>, Int<kHeadDim>>{}),
                          tmem + kDkColumn);
    Tensor tDq = AtColumn(partition_fragment_C(mma_dq, Shape<Int<kRows>, Int<kHeadDim>>{}),
                          tmem + kDqColumn);
    Tensor sHalf = make_tensor(make_smem_ptr(static_cast<Element*>(nullptr)), LayoutHalf{});
    Tensor tP = thread_dv.make_fragment_A(sHalf);
    Tensor tDs = thread_dk.make_fragment_A(sHalf);
    constexpr int kHalfSteps = decltype(size<2>(tP))::value;

    Tiles tiles(smem);
    gpu::RingState<kQStages> s_state, dk_state;  // of the same ring: S runs ahead of dk
    gpu::RingState<kDoutStages> dout_state;
    int kv_phase = 0, phase = 0;  // of a tile, of a step
    int dq_phase = 1;             // dq of the step before
    auto multiply_s = [&] {
      gpu::Wait(&smem.q_ring.full[s_state.stage], s_state.phase);
      Tensor sK = make_tensor(make_smem_ptr(smem.k), LayoutK{});
      Tensor sQ = make_tensor(make_smem_ptr(smem.q[s_state.stage]), LayoutQ{});
      Gemm(mma_s, thread_s.make_fragment_A(sK), thread_s.make_fragment_B(sQ), tS, false);
      Commit(&smem.s_full);
      s_state.Next();
    };
    auto wait_for_dq = [&] {
      WaitTmem(&smem.dq_read, dq_phase);
      dq_phase ^= 1;
    };
    while (true) {
      const TileInfo& info = tiles.Get();
      if (info.is_last) break;
      int left = info.num_steps;
      tiles.Done();
      if (left == 0) continue;
      gpu::Wait(&smem.k_full, kv_phase);
      if constexpr (kDpReplacesS) wait_for_dq();
      multiply_s();
      gpu::Wait(&smem.v_full, kv_phase);
      kv_phase ^= 1;
      for (bool accumulates = false; left > 0; --left, accumulates = true) {
        const bool is_last_step = left == 1;
        gpu::Wait(&smem.dout_ring.full[dout_state.stage], dout_state.phase);
        if constexpr (kDpReplacesS) {
          WaitTmem(&smem.s_read, phase);
        } else if constexpr (kDqReplacesDp) {
          wait_for_dq();
        }
        Tensor sV = make_tensor(make_smem_ptr(smem.v), LayoutV{});
        Tensor sDo = make_tensor(make_smem_ptr(smem.dout[dout_state.stage]), LayoutDo{});
        Gemm(mma_s, thread_s.make_fragment_A(sV), thread_s.make_fragment_B(sDo), tDp, false);
        Commit(&smem.dp_full);

        WaitTmem(&smem.p_full, phase);
        Tensor sDot = make_tensor(make_smem_ptr(smem.dout[dout_state.stage]), LayoutDot{});
        Tensor tDot = thread_dv.make_fragment_B(sDot);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          Gemm(mma_dv, AtColumn(tP, tmem + PColumn(half)), tDot, tDv, accumulates || half > 0,
               half * kHalfSteps);
        }
        Commit(&smem.dout_ring.empty[dout_state.stage]);
        dout_state.Next();

        if constexpr (!kDpReplacesS) {
          if (!is_last_step) multiply_s();
        }

        WaitTmem(&smem.ds_full, phase);
        phase ^= 1;
        Tensor sQt = make_tensor(make_smem_ptr(smem.q[dk_state.stage]), LayoutQt{});
        Tensor tQt = thread_dk.make_fragment_B(sQt);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          Gemm(mma_dk, AtColumn(tDs, tmem + DsColumn(half)), tQt, tDk, accumulates || half > 0,
               half * kHalfSteps);
        }
        Commit(&smem.q_ring.empty[dk_state.stage]);
        dk_state.Next();
        if (is_last_step) Commit(&smem.grads_full);

        if constexpr (!kDqReplacesDp) wait_for_dq();
        Tensor sDs = make_tensor(make_smem_ptr(smem.ds), LayoutDs{});
        Tensor sKt = make_tensor(make_smem_ptr(smem.k), LayoutKt{});
        Gemm(mma_dq, thread_dq.make_fragment_A(sDs), thread_dq.make_fragment_B(sKt), tDq, false);
        Commit(&smem.dq_full);
        if (is_last_step) Commit(&smem.kv_empty);

        if constexpr (kDpReplacesS) {
          if (!is_last_step) {
            wait_for_dq();
            multiply_s();
          }
        }
      }
    }
    gpu::Wait(&smem.tmem_unused, 0);
    cute::TMEM::Allocator1Sm{}.free(tmem, kColumns);
  }

  // Probabilities and score gradients
  // ----------------------------------------------------------------------------------------------

  struct Key {  // of this thread
    int index;
    int2 interval;  // of queries
  };

  // Where four of 16 queries from `first` on lie among row statistics: first + 2 t and the next,
  // and the two 8 further.
  static __device__ __forceinline__ constexpr int StatsOf(int first, int t) {
    return gpu::RowSlot(first + 2 * t);
  }
  static_assert(gpu::RowSlot(1) == 1 && gpu::RowSlot(8) == 2 && gpu::RowSlot(9) == 3);

  static constexpr int kChunk = 16;  // queries that are worked on at a time

  // Queries beyond the operand repeat its last: their scores are masked.
  template <typename T>
  static __device__ __forceinline__ void AddBias(const gpu::ScoreParams& sp, int64_t bias_at,
                                                 int key, int q_first, uint32_t address,
                                                 float (&s)[kQueries]) {
    const int last = sp.seqlen_q - 1;
    const T* bias = static_cast<const T*>(sp.bias.data) + bias_at +
                    min(key, sp.seqlen_kv - 1) * sp.bias_strides.col +
                    min(q_first, last) * sp.bias_strides.row;
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      if (i > 0 && i % kChunk == 0) KeepOrder(address + i);
      s[i] += gpu::ToFloat(*bias, sp.bias.dtype == DType::kBF16);
      if (q_first + i < last) bias += sp.bias_strides.row;
    }
  }

  // Scale, bias and soft cap where they cannot be folded into the exponent.
  static __device__ __forceinline__ void Transform(const gpu::ScoreParams& sp, const TileInfo& info,
                                                   int key, int head, int q_first, uint32_t address,
                                                   float (&s)[kQueries]) {
    const float scale = info.scale;
#pragma unroll
    for (int i = 0; i < kQueries; ++i) s[i] *= scale;
    if constexpr (kHasElements) {
      if (sp.bias.data != nullptr) {
        const int64_t bias_at = info.bias_at + head * sp.bias_strides.head;
        if (sp.bias.dtype == DType::kF32) {
          AddBias<float>(sp, bias_at, key, q_first, address, s);
        } else {
          AddBias<uint16_t>(sp, bias_at, key, q_first, address, s);
        }
      }
    }
    const float cap = info.cap;
    if (cap > 0.f) {
      const float inverse = info.inverse_cap;
#pragma unroll
      for (int i = 0; i < kQueries; ++i) s[i] = cap * gpu::Tanh(s[i] * inverse);
    }
  }

  static constexpr int kWords = kQueries / 32;

  // Whether a key may not be seen by all queries of a half; if so, a bit for each query that sees
  // it. Found before the scores are in registers, as it takes many.
  static __device__ __forceinline__ bool FindKept(const gpu::ScoreParams& sp, const TileInfo& info,
                                                  const Key& key, int head, int q_first,
                                                  bool is_masked, uint32_t (&kept)[kWords]) {
    if (q_first >= info.full_begin && q_first + kQueries <= info.full_end && !is_masked)
      return false;
    KeepInterval(q_first, key.interval, kept);
    if (info.is_elementwise || is_masked) {
      const gpu::ElementRules rules = gpu::RulesOf(sp, info.batch, head, info.is_scattered);
      const int j = min(key.index, sp.seqlen_kv - 1);
      KeepIf(q_first, kept, [&](int query) {
        const int i = min(query, sp.seqlen_q - 1);
        return kHasElements ? gpu::Keep(sp, rules, i, j) : gpu::KeepSegment(rules, i, j);
      });
    }
    return true;
  }

  // Probabilities of scores, in place.
  static __device__ __forceinline__ void Exponentiate(float factor, const float* lse2,
                                                      uint32_t address, float (&s)[kQueries]) {
#pragma unroll
    for (int c = 0; c < kQueries; c += 16) {
      // Lest all row statistics are loaded at once, and loop counters lose their registers.
      if (c == kQueries / 2) KeepOrder(address);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int i = c + 2 * t, j = i + 8;  // and the next each
        const float4 l = *reinterpret_cast<const float4*>(lse2 + StatsOf(c, t));
        float2 x = make_float2(s[i], s[i + 1]), y = make_float2(s[j], s[j + 1]);
        // lse - s, since the exponential takes a sign for free.
        cute::fma(x, x, make_float2(-factor, -factor), make_float2(l.x, l.y));
        cute::fma(y, y, make_float2(-factor, -factor), make_float2(l.z, l.w));
        s[i] = gpu::Exp2(-x.x);
        s[i + 1] = gpu::Exp2(-x.y);
        s[j] = gpu::Exp2(-y.x);
        s[j + 1] = gpu::Exp2(-y.y);
      }
    }
  }

  // The same where some row's lse is large, whose differences from logits are taken in their own
  // unit. No weight exceeds 1, whatever the rounding of lse.
  static __device__ __forceinline__ void ExponentiateLarge(const BackwardParams& p,
                                                           const TileInfo& info, int head,
                                                           int q_first, const float* lse2,
                                                           uint32_t address, float (&s)[kQueries]) {
    const gpu::ScoreParams& sp = p.score;
    const float* lse = static_cast<const float*>(p.lse.data) + info.lse_at +
                       static_cast<int64_t>(head) * sp.seqlen_q + q_first;
    const float unit = info.unit;
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      if (kHasElements && i > 0 && i % kChunk == 0) KeepOrder(address + i);
      const float base = lse2[gpu::RowSlot(i)];
      float exponent = s[i] * unit * gpu::kLog2e - base;
      // Rows that see nothing have lse2 +inf, those past the last among them.
      if (fabsf(base) > gpu::kLargeBase && base < gpu::kInf) {
        const float above = __fmul_rn(s[i], unit) - lse[i];
        exponent = above > 0.f ? 0.f : above * gpu::kLog2e;
      }
      s[i] = gpu::Exp2(exponent);
    }
  }

  // Adds dS of a chunk of queries to dbias; what keys of a warp or queries of the chunk share is
  // summed first. Uses up dS.
  static __device__ __forceinline__ void AddBiasGradient(const BackwardParams& p,
                                                         const TileInfo& info, int key, int head,
                                                         int q_first, float (&ds)[kChunk]) {
    const gpu::ScoreParams& sp = p.score;
    const ScoreStrides& strides = sp.bias_strides;
    const int lane = threadIdx.x % 32;
    float* to =
        p.dbias + info.dbias_at + head * strides.head + q_first * strides.row + key * strides.col;
    auto add = [](bool is_inside, float* at, float x) {
      if (is_inside && x != 0.f) atomicAdd(at, x);
    };
    if (strides.row == 0) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kChunk; ++i) sum += ds[i];
      if (strides.col == 0) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
      }
      add(strides.col == 0 ? lane == 0 : key < sp.seqlen_kv, to, sum);
    } else if (strides.col == 0) {
      // Lanes exchange halves of their queries until each has one, of 16 keys; then pairs add up.
      static_assert(kChunk == 16);
#pragma unroll
      for (int n = kChunk / 2; n > 0; n /= 2) {
        const bool is_upper = lane & 2 * n;
#pragma unroll
        for (int i = 0; i < n; ++i) {
          const float sent = is_upper ? ds[i] : ds[i + n], kept = is_upper ? ds[i + n] : ds[i];
          ds[i] = kept + __shfl_xor_sync(0xffffffff, sent, 2 * n);
        }
      }
      const float sum = ds[0] + __shfl_xor_sync(0xffffffff, ds[0], 1);
      const int query = lane / 2;
      add(lane % 2 == 0 && q_first + query < sp.seqlen_q, to + query * strides.row, sum);
    } else if (key < sp.seqlen_kv) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i, to += strides.row) add(q_first + i < sp.seqlen_q, to, ds[i]);
    }
  }

  // A half of dS of this thread's key, as LayoutDs has it: rows of 128 bytes, whose pieces of 16
  // bytes are swizzled by the row.
  static __device__ __forceinline__ void StoreDs(Element* ds, int half, int key,
                                                 const uint32_t (&packed)[kQueries / 2]) {
    const uint32_t row = gpu::SmemAddress(ds) + (half * kRows + key) * kBoxCols * sizeof(Element);
#pragma unroll
    for (int i = 0; i < kQueries / 8; ++i) {
      // The address is made here, lest eight of them are kept in registers.
      asm volatile(
          "{\n"
          ".reg .b32 at;\n"
          "xor.b32 at, %0, %1;\n"
          "st.shared.v4.b32 [at], {%2, %3, %4, %5};\n"
          "}" ::"r"(row + key % 8 * 16),
          "r"(i * 16), "r"(packed[4 * i]), "r"(packed[4 * i + 1]), "r"(packed[4 * i + 2]),
          "r"(packed[4 * i + 3])
          : "memory");
    }
  }

  static __device__ __forceinline__ void Compute(const BackwardParams& p, SharedStorage& smem,
                                                 int half) {
    const gpu::ScoreParams& sp = p.score;
    const int thread = threadIdx.x % kRows;
    const uint32_t tmem = smem.tmem + (static_cast<uint32_t>(thread / 32 * 32) << 16);
    const uint32_t s_at = tmem + kSColumn + half * kQueries,
                   dp_at = tmem + kDpColumn + half * kQueries, p_at = tmem + PColumn(half),
                   ds_at = tmem + DsColumn(half);
    Tiles tiles(smem);
    static_assert(kStatsStages == 2);
    int steps = 0;  // so far, of all tiles: stages and phases of barriers follow from it
    int grads_phase = 0;
    while (true) {
      const TileInfo& info = tiles.Get();
      if (info.is_last) break;
      Key key;
      key.index = info.kv_first + thread;
      key.interval = gpu::KeyInterval(sp, p.kv_plan, info.limits, info.batch, key.index);
      for (Steps step(p, info); step.left > 0; step.Next(p), ++steps) {
        const int phase = steps & 1, stage = steps & 1;
        const int q_first = step.q_tile * kRows + half * kQueries;
        uint32_t kept[kWords];
        const bool is_partial = FindKept(sp, info, key, step.head, q_first, step.is_masked, kept);
        float s[kQueries];  // then probabilities
        WaitTmem(&smem.s_full, phase);
#pragma unroll
        for (int c = 0; c < kQueries; c += 32)
          LoadColumns(s_at + c, reinterpret_cast<float (&)[32]>(s[c]));
        WaitLoads();
        if constexpr (kDpReplacesS) ArriveTmem(&smem.s_read);
        if (info.is_transformed) Transform(sp, info, key.index, step.head, q_first, s_at, s);
        if (is_partial) {
#pragma unroll
          for (int i = 0; i < kQueries; ++i) s[i] = kept[i / 32] >> i % 32 & 1 ? s[i] : -gpu::kInf;
        }
        gpu::Wait(&smem.stats_ring.full[stage], steps >> 1 & 1);
        const float* lse2 = smem.stats[stage].lse2 + half * kQueries;
        const float* delta = smem.stats[stage].delta + half * kQueries;
        if (info.has_large) {
          ExponentiateLarge(p, info, step.head, q_first, lse2, s_at, s);
        } else {
          Exponentiate(info.unit * gpu::kLog2e, lse2, s_at, s);
        }
        uint32_t packed[kQueries / 2];
        Pack<Element>(s, packed);
        StoreColumns(p_at, packed);
        WaitStores();
        ArriveTmem(&smem.p_full);

        WaitTmem(&smem.dp_full, phase);
        auto compute_ds = [&](auto has_dbias) {
          constexpr bool kHasDbias = decltype(has_dbias)::value;
          // One chunk of columns is on its way while another is worked on, where registers allow.
          constexpr int kAhead = kHasDbias ? 0 : 1;
          float chunks[1 + kAhead][kChunk];
          LoadColumns(dp_at, chunks[0]);
#pragma unroll
          for (int c = 0; c < kQueries; c += kChunk) {
            if (kHasDbias ? c > 0 : c == kQueries / 2) KeepOrder(dp_at + c);
            float (&dp)[kChunk] = chunks[c / kChunk % (1 + kAhead)];
            if (kAhead == 0 && c > 0) LoadColumns(dp_at + c, dp);
            WaitLoads();
            if (kAhead == 1 && c + kChunk < kQueries)
              LoadColumns(dp_at + c + kChunk, chunks[(c / kChunk + 1) % (1 + kAhead)]);
#pragma unroll
            for (int t = 0; t < 4; ++t) {
              const int i = 2 * t, j = i + 8;  // and the next each
              const float4 d = *reinterpret_cast<const float4*>(delta + StatsOf(c, t));
              float2 x = make_float2(dp[i], dp[i + 1]), y = make_float2(dp[j], dp[j + 1]);
              cute::fma(x, make_float2(d.x, d.y), make_float2(-1.f, -1.f), x);
              cute::fma(y, make_float2(d.z, d.w), make_float2(-1.f, -1.f), y);
              cute::mul(x, x, make_float2(s[c + i], s[c + i + 1]));
              cute::mul(y, y, make_float2(s[c + j], s[c + j + 1]));
              dp[i] = x.x;
              dp[i + 1] = x.y;
              dp[j] = y.x;
              dp[j + 1] = y.y;
            }
            if (info.cap > 0.f) {
              // The soft cap's derivative 1 - tanh^2, with the capped score taken back from the
              // probability.
              const float inverse = gpu::kLn2 * info.inverse_cap;
#pragma unroll
              for (int i = 0; i < kChunk; ++i) {
                const float t = (__log2f(s[c + i]) + lse2[gpu::RowSlot(c + i)]) * inverse;
                dp[i] = s[c + i] == 0.f ? 0.f : dp[i] * (1.f - t * t);
              }
            }
            if (is_partial) {  // 0 * NaN of a pair that is not allowed
#pragma unroll
              for (int i = 0; i < kChunk; ++i) dp[i] = s[c + i] == 0.f ? 0.f : dp[i];
            }
            Pack<Element>(dp, reinterpret_cast<uint32_t (&)[kChunk / 2]>(packed[c / 2]));
            if constexpr (kHasDbias)
              AddBiasGradient(p, info, key.index, step.head, q_first + c, dp);
          }
        };
        // Apart, since addresses of dbias would take registers from all others.
        if constexpr (kHasElements) {
          if (p.dbias != nullptr) {
            compute_ds(std::true_type{});
          } else {
            compute_ds(std::false_type{});
          }
        } else {
          compute_ds(std::false_type{});
        }
        StoreColumns(ds_at, packed);
        StoreDs(smem.ds, half, thread, packed);
        WaitStores();
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        ArriveTmem(&smem.ds_full);
        gpu::ArriveAsWarp(&smem.stats_ring.empty[stage]);
      }
      const bool has_steps = info.num_steps > 0;
      if (has_steps) {
        WaitTmem(&smem.grads_full, grads_phase);
        grads_phase ^= 1;
      }
      StoreGradients(p, info, key, has_steps, tmem, half);
      tiles.Done();
    }
    ArriveTmem(&smem.tmem_unused);
  }

  // This half's columns of dk and dv, of this thread's key. A tile without steps stores zeros.
  static __device__ __forceinline__ void StoreGradients(const BackwardParams& p,
                                                        const TileInfo& info, const Key& key,
                                                        bool has_steps, uint32_t tmem, int half) {
    const gpu::ScoreParams& sp = p.score;
    const bool is_key = key.index < sp.seqlen_kv;
    const int64_t row =
        (static_cast<int64_t>(info.batch) * sp.seqlen_kv + key.index) * sp.num_kv_heads +
        info.kv_head;
    bool is_nan = StoreRow<kHeadDim>(static_cast<Element*>(p.dk) + row * sp.head_dim, sp.head_dim,
                                     is_key, has_steps, info.scale, tmem + kDkColumn, half);
    is_nan |= StoreRow<kHeadDimV>(static_cast<Element*>(p.dv) + row * sp.head_dim_v, sp.head_dim_v,
                                  is_key, has_steps, 1.f, tmem + kDvColumn, half);
    if (info.may_leak) {
      const uint32_t bad = __ballot_sync(0xffffffff, is_nan && is_key);
      const int lane = threadIdx.x % 32;
      if (lane % gpu::kStripRows == 0 && (bad >> lane & 0xffff) != 0)
        p.repair.strips[atomicAdd(p.repair.count, 1)] = {info.batch, info.kv_head, key.index};
    }
  }

  // Half of a row of an accumulator, scaled. Returns whether a NaN is there.
  template <int kCols>
  static __device__ __forceinline__ bool StoreRow(Element* to, int num_cols, bool is_row,
                                                  bool has_steps, float scale, uint32_t from,
                                                  int half) {
    static_assert(kCols % (32 * kHalves) == 0);
    bool is_nan = false;
#pragma unroll 1
    for (int c = half * (kCols / kHalves); c < (half + 1) * (kCols / kHalves); c += 32) {
      float x[32];
      if (has_steps) {
        LoadColumns(from + c, x);
        WaitLoads();
      }
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        x[i] = has_steps ? x[i] * scale : 0.f;
        is_nan |= x[i] != x[i];
      }
      uint32_t packed[16];
      Pack<Element>(x, packed);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (is_row && c + 8 * i < num_cols) {
          *reinterpret_cast<uint4*>(to + c + 8 * i) =
              make_uint4(packed[4 * i], packed[4 * i + 1], packed[4 * i + 2], packed[4 * i + 3]);
        }
      }
    }
    return is_nan;
  }

  // Addition of dq
  // ----------------------------------------------------------------------------------------------

  // A thread holds a query. Its columns are added four at a time, and those of a warp lie side by
  // side in device memory, so that nothing passes through shared memory.
  //
  // With `turns` key tiles add in their order, so that every run does so: a tile's turn is the
  // number of tiles before it that take one at the same queries. Blocks start tiles in that order,
  // too, so that the tile waited for is running or done. A warp waits for the same warp of that
  // tile. Where turns are planned a tile may take one without anything to add, and passes it on.
  struct Turn {  // of a warp
    int* at;     // null where the order is free
    int mine;

    __device__ __forceinline__ Turn(const BackwardParams& p, const TileInfo& info, int64_t index,
                                    int q_tile) {
      at = p.turns == nullptr ? nullptr : p.turns + index * kReduceWarps + threadIdx.x % kRows / 32;
      const int kv_tile = info.kv_first / kRows;
      if constexpr (kPlansTurns) {
        mine =
            at == nullptr
                ? 0
                : kv_tile -
                      p.turn_plan
                          .first_takers[static_cast<int64_t>(info.batch) * p.num_q_tiles + q_tile];
      } else {
        mine = kv_tile - gpu::FirstKeyTile<kRows, kRows>(info.limits, q_tile);
      }
    }
    __device__ __forceinline__ void Await() const {
      if (threadIdx.x % 32 == 0) {
        int now;
        do {
          asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(at) : "memory");
        } while (now != mine);
      }
      __syncwarp();
    }
    // Once the whole warp has come here.
    __device__ __forceinline__ void Pass() const {
      __syncwarp();
      if (threadIdx.x % 32 == 0)
        asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(at), "r"(mine + 1) : "memory");
    }
  };

  // Passes on a tile's turns at query tiles to which it adds nothing, in the order of its steps.
  struct IdleTurns {
    const BackwardParams& p;
    const TileInfo& info;
    int2 takes = make_int2(0, 0);
    int next = 0;  // turn, of all heads

    __device__ __forceinline__ IdleTurns(const BackwardParams& params, const TileInfo& tile)
        : p(params), info(tile) {
      if (!kPlansTurns || p.turns == nullptr) return;
      takes = p.turn_plan.takers[static_cast<int64_t>(info.batch) * p.order.num_kv_tiles +
                                 info.kv_first / kRows];
    }
    // Up to that of query tile q_tile of the group's head g, which the caller takes.
    __device__ __forceinline__ void PassUntil(int g, int q_tile) {
      if (p.turns == nullptr) return;
      const int width = max(0, takes.y - takes.x), end = g * width + q_tile - takes.x;
      for (; next < end; ++next) {
        const int64_t head = info.kv_head * p.score.group_size + next / width;
        const int m = takes.x + next % width;
        const int64_t index =
            (static_cast<int64_t>(info.batch) * p.score.num_q_heads + head) * p.num_q_tiles + m;
        const Turn turn(p, info, index, m);
        turn.Await();
        turn.Pass();
      }
      next = end + 1;
    }
    __device__ __forceinline__ void PassAll() { PassUntil(p.score.group_size, takes.x); }
  };

  static __device__ __forceinline__ void Reduce(const BackwardParams& p, SharedStorage& smem) {
    const int thread = threadIdx.x % kRows;
    const uint32_t from = smem.tmem + (static_cast<uint32_t>(thread / 32 * 32) << 16) + kDqColumn;
    Tiles tiles(smem);
    int phase = 0;
    while (true) {
      const TileInfo& info = tiles.Get();
      if (info.is_last) break;
      IdleTurns idle(p, info);
      for (Steps step(p, info); step.left > 0; step.Next(p), phase ^= 1) {
        const int64_t index = step.Index(p, info.batch);
        float* to = p.dq + index * (kRows * kHeadDim) + thread * 4;
        const Turn turn(p, info, index, step.q_tile);
        if constexpr (kPlansTurns)
          idle.PassUntil(step.head - info.kv_head * p.score.group_size, step.q_tile);
        WaitTmem(&smem.dq_full, phase);
#pragma unroll 1
        for (int c = 0; c < kHeadDim; c += kHeldColumns) {
          float x[kHeldColumns];
#pragma unroll
          for (int i = 0; i < kHeldColumns; i += 32)
            LoadColumns(from + c + i, reinterpret_cast<float (&)[32]>(x[i]));
          WaitLoads();
          if (c + kHeldColumns == kHeadDim) ArriveTmem(&smem.dq_read);
          if (c == 0 && turn.at != nullptr) turn.Await();
#pragma unroll
          for (int i = 0; i < kHeldColumns; i += 4) {
            asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                             to + (c + i) * kRows),
                         "f"(x[i]), "f"(x[i + 1]), "f"(x[i + 2]), "f"(x[i + 3])
                         : "memory");
          }
        }
        if (turn.at != nullptr) {
          __threadfence();
          turn.Pass();
        }
      }
      if constexpr (kPlansTurns) idle.PassAll();
      tiles.Done();
    }
    ArriveTmem(&smem.tmem_unused);
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    BackwardMain(const __grid_constant__ BackwardParams p,
                 const __grid_constant__ BackwardTensors tensors) {
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
  if (warp < Kernel::kComputeWarp) {
    if constexpr (Kernel::kReduceRegs > 128) {
      cutlass::arch::warpgroup_reg_alloc<Kernel::kReduceRegs>();
    } else {
      cutlass::arch::warpgroup_reg_dealloc<Kernel::kReduceRegs>();
    }
    Kernel::Reduce(p, smem);
  } else if (warp < Kernel::kMmaWarp) {
    cutlass::arch::warpgroup_reg_alloc<Kernel::kComputeRegs>();
    Kernel::Compute(p, smem, warp / 4 - 1);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Kernel::kOtherRegs>();
    if (warp == Kernel::kMmaWarp) {
      Kernel::Multiply(smem);
    } else if (warp == Kernel::kLoadWarp && threadIdx.x % 32 == 0) {
      Kernel::Load(p, tensors, smem);
    }
  }
}

// dq of one (query tile, head, batch entry): scaled, in its own type and order.
template <class Kernel>
__global__ void __launch_bounds__(256)
    ConvertDq(const __grid_constant__ BackwardParams p, void* dq, gpu::RepairList repair) {
  using Element = typename Kernel::Element;
  constexpr int kPieces = Kernel::kHeadDim / 8;  // of 8 columns, in a row
  __shared__ unsigned bad_strips;
  const gpu::ScoreParams& s = p.score;
  const int m = blockIdx.x % p.num_q_tiles, pair = blockIdx.x / p.num_q_tiles;
  const int b = pair / s.num_q_heads, head = pair % s.num_q_heads;
  const float4* from = reinterpret_cast<const float4*>(p.dq + static_cast<int64_t>(blockIdx.x) *
                                                                  (kRows * Kernel::kHeadDim));
  const float scale = gpu::ScaleOf(s, b);
  const int q_length = gpu::LimitsOf(s, b).q_length;
  if (threadIdx.x == 0) bad_strips = 0;
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < kRows * kPieces; i += 256) {
    const int row = i / kPieces, piece = i % kPieces;
    const int query = m * kRows + row;
    if (query >= s.seqlen_q || piece * 8 >= s.head_dim) continue;
    const float4 x = from[2 * piece * kRows + row], y = from[(2 * piece + 1) * kRows + row];
    float z[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
    bool is_nan = false;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      // A product adds 0 * NaN to rows past their length, beside a key that is NaN.
      z[c] = query < q_length ? z[c] * scale : 0.f;
      is_nan |= z[c] != z[c];
    }
    uint32_t packed[4];
    Pack<Element>(z, packed);
    if (is_nan && repair.count != nullptr) atomicOr(&bad_strips, 1u << row / gpu::kStripRows);
    const int64_t at =
        ((static_cast<int64_t>(b) * s.seqlen_q + query) * s.num_q_heads + head) * s.head_dim;
    *reinterpret_cast<uint4*>(static_cast<Element*>(dq) + at + piece * 8) =
        make_uint4(packed[0], packed[1], packed[2], packed[3]);
  }
  if (repair.count == nullptr) return;
  __syncthreads();
  if (threadIdx.x < kRows / gpu::kStripRows && (bad_strips >> threadIdx.x & 1)) {
    const int row = m * kRows + static_cast<int>(threadIdx.x) * gpu::kStripRows;
    repair.strips[atomicAdd(repair.count, 1)] = {b, head, row};
  }
}

}  // namespace jax_fmha::sm100
