// Forward attention on Hopper: out = softmax(scale * q k^T) v for [entries, T, N, H] operands, and
// its lse.
//
// One producer warp loads tiles by TMA; block_q / 64 consumer warpgroups hold 64 query rows each,
// keep scores, probabilities and output in registers, and overlap the score product of one key tile
// with the softmax of the one before. Thread blocks are persistent and take (query tile, head,
// batch entry) triples, longest first.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cute/tensor.hpp>

#include "cc/gpu/forward_tile.cuh"
#include "cc/gpu/pipeline.cuh"
#include "cc/gpu/problem_params.cuh"
#include "cc/gpu/softmax.cuh"
#include "cc/gpu/store.cuh"
#include "cc/sm90/forward/config.h"

namespace jax_fmha::sm90 {

using namespace cute;

using gpu::ForwardParams;

template <typename Element_, ForwardMode kMode_, int kHeadDim_, int kHeadDimV_, int kBlockQ_,
          int kBlockKv_, int kStages_, int kBoxCols_>
struct ForwardKernel {
  using Element = Element_;
  static constexpr ForwardMode kMode = kMode_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kBlockQ = kBlockQ_,
                       kBlockKv = kBlockKv_, kStages = kStages_, kBoxCols = kBoxCols_;
  static constexpr int kConsumers = kBlockQ / 64;  // warpgroups
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // setmaxnreg shares out what the block started with: 168 x 3 or 128 x 4 registers per thread.
  static constexpr int kProducerRegs = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegs = kConsumers == 2 ? 240 : 160;
  static constexpr bool kHasSegments = kMode != ForwardMode::kDense,
                        kHasElements = kMode == ForwardMode::kGeneral;
  static constexpr bool kPingPong = kHeadDim <= 128;

  using TileQK = Shape<Int<kBlockQ>, Int<kBlockKv>, Int<kHeadDim>>;
  using TilePV = Shape<Int<kBlockQ>, Int<kHeadDimV>, Int<kBlockKv>>;
  using WarpGroups = Layout<Shape<Int<kConsumers>, _1, _1>>;
  using MmaQK = decltype(make_tiled_mma(GMMA::ss_op_selector<Element, Element, float, TileQK>(),
                                        WarpGroups{}));
  using MmaPV = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, TilePV, GMMA::Major::K, GMMA::Major::MN>(),
      WarpGroups{}));

  using AtomK = std::conditional_t<kBoxCols == 64, GMMA::Layout_K_SW128_Atom<Element>,
                                   GMMA::Layout_K_SW64_Atom<Element>>;
  using AtomMn = std::conditional_t<kBoxCols == 64, GMMA::Layout_MN_SW128_Atom<Element>,
                                    GMMA::Layout_MN_SW64_Atom<Element>>;
  using LayoutQ = decltype(tile_to_shape(AtomK{}, Shape<Int<kBlockQ>, Int<kHeadDim>>{}));
  using LayoutK =
      decltype(tile_to_shape(AtomK{}, Shape<Int<kBlockKv>, Int<kHeadDim>, Int<kStages>>{}));
  // The same bytes as [stage][column block][row][kBoxCols], seen as (Hv, kv).
  using LayoutVt = decltype(tile_to_shape(
      AtomMn{}, Shape<Int<kHeadDimV>, Int<kBlockKv>, Int<kStages>>{}, Step<_2, _1, _3>{}));

  // A warpgroup asks for its next query rows as soon as it needs its old ones no more, so that
  // warpgroups stay out of step across tiles. The producer may be two tiles ahead of the slowest
  // reader of a TileInfo.
  static constexpr int kInfoSlots = 3;

  // What a tile is, worked out once by the producer.
  using TileInfo = gpu::ForwardTileInfo;

  struct KeyTile {
    int first;      // key
    int is_masked;  // by a mask, here and there
  };

  // Output rows leave by way of shared memory where there is room for them.
  using OutStage = gpu::RowStage<Element, kHeadDimV>;
  static constexpr int kTileBytes =
      2 * (kBlockQ * kHeadDim + kStages * kBlockKv * (kHeadDim + kHeadDimV));
  static constexpr bool kStagesOut =
      kTileBytes + 4 * kConsumers * static_cast<int>(sizeof(OutStage)) <= 225 * 1024;

  struct alignas(1024) SharedStorage {
    alignas(1024) Element q[kBlockQ * kHeadDim];
    alignas(1024) Element k[kStages][kBlockKv * kHeadDim];
    alignas(1024) Element v[kStages][kBlockKv * kHeadDimV];
    alignas(16) char out[kStagesOut ? 4 * kConsumers * sizeof(OutStage) : 16];  // of each warp
    gpu::Barrier q_full[kConsumers], q_empty[kConsumers];
    gpu::Ring<kStages> k_ring, v_ring;
    KeyTile key_tiles[kStages];  // kHasElements: of the slots of k_ring
    TileInfo info[kInfoSlots];
  };

  // Producer
  // ----------------------------------------------------------------------------------------------------------

  static __device__ __forceinline__ void Produce(const ForwardParams& p,
                                                 const CUtensorMap* q_tensor,
                                                 const CUtensorMap* k_tensor,
                                                 const CUtensorMap* v_tensor, SharedStorage& smem) {
    const gpu::ScoreParams& s = p.score;
    gpu::RingState<kStages> k_state, v_state;
    k_state.phase = v_state.phase = 1;  // empty slots
    int q_phase = 1, slot = 0;
    int tile = blockIdx.x;
    while (tile < p.order.num_tiles) {
      const TileInfo info =
          gpu::DescribeForwardTile<kBlockQ, kBlockKv, kHasSegments, kHasElements>(s, p.order, tile);
      const int q_entry = gpu::EntryOf(p.q_map, info.batch),
                k_entry = gpu::EntryOf(p.k_map, info.batch),
                v_entry = gpu::EntryOf(p.v_map, info.batch);
      const int kv_head = info.head / s.group_size;
      auto load_q = [&](int group) {
        gpu::Wait(&smem.q_empty[group], q_phase);
        if (group == 0) smem.info[slot] = info;
        if (info.num_kv_tiles == 0) {
          gpu::Arrive(&smem.q_full[group]);
          return;
        }
        // A warpgroup past the last row gets some row: a box without any row would touch memory
        // that is not ours.
        const int first = info.q_first + group * 64;
        gpu::ArriveExpect(&smem.q_full[group], 64 * kHeadDim * 2);
        gpu::LoadRows<64, kHeadDim, kBoxCols, kBlockQ>(
            smem.q + group * 64 * kBoxCols, q_tensor, &smem.q_full[group],
            min(first, s.seqlen_q - 1), max(1, min(64, s.seqlen_q - first)), info.head, q_entry);
      };
      // Tiles of the range by the mask, which skips some.
      const gpu::TileWord* line = nullptr;
      int line_first = 0;
      if constexpr (kHasElements) {
        line = gpu::LineOf(s.mask_plan, info.batch, info.head, info.q_first / kBlockQ);
        if (line != nullptr) line_first = info.kv_first / kBlockKv;
      }
      auto last_seen = [&](int n) {
        return gpu::LastSeen(line, line_first, line_first + n) - line_first;
      };
      auto load_k = [&](int n) {
        const int first = info.kv_first + n * kBlockKv;
        gpu::Wait(&smem.k_ring.empty[k_state.stage], k_state.phase);
        if constexpr (kHasElements) {
          smem.key_tiles[k_state.stage] = {first, gpu::IsPartial(line, line_first + n)};
        }
        gpu::ArriveExpect(&smem.k_ring.full[k_state.stage], kBlockKv * kHeadDim * 2);
        gpu::LoadRows<kBlockKv, kHeadDim, kBoxCols>(
            smem.k[k_state.stage], k_tensor, &smem.k_ring.full[k_state.stage], first,
            min(kBlockKv, info.kv_end - first), kv_head, k_entry);
        k_state.Next();
      };
      auto load_v = [&](int n) {
        const int first = info.kv_first + n * kBlockKv;
        gpu::Wait(&smem.v_ring.empty[v_state.stage], v_state.phase);
        gpu::ArriveExpect(&smem.v_ring.full[v_state.stage], kBlockKv * kHeadDimV * 2);
        gpu::LoadRows<kBlockKv, kHeadDimV, kBoxCols>(
            smem.v[v_state.stage], v_tensor, &smem.v_ring.full[v_state.stage], first,
            min(kBlockKv, info.kv_end - first), kv_head, v_entry);
        v_state.Next();
      };
      load_q(0);
      int n = last_seen(info.kv_range - 1);
      if (n >= 0) load_k(n);
      for (int group = 1; group < kConsumers; ++group) load_q(group);
      q_phase ^= 1;
      slot = slot == kInfoSlots - 1 ? 0 : slot + 1;
      for (int next = last_seen(n - 1); next >= 0; next = last_seen(n - 1)) {
        load_k(next);
        load_v(n);
        n = next;
      }
      // Not earlier: a tile claimed ahead of time waits while other blocks idle.
      tile = gridDim.x + atomicAdd(p.next_tile, 1);
      if (n >= 0) load_v(n);
    }
    for (int group = 0; group < kConsumers; ++group) {
      gpu::Wait(&smem.q_empty[group], q_phase);
      if (group == 0) smem.info[slot].is_last = 1;
      gpu::Arrive(&smem.q_full[group]);
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

  static constexpr int kScoreRegs = kBlockKv / 2, kOutRegs = kHeadDimV / 2;

  struct Rows {  // of this thread: `first`, and 8 further on
    int first;
    int2 interval[2];
    __device__ int index(int r) const { return first + 8 * r; }
  };

  // Rows and keys beyond the operand repeat its last: their scores are masked or their rows not
  // stored.
  template <typename T>
  static __device__ __forceinline__ void AddBias(const gpu::ScoreParams& sp,
                                                 const gpu::ElementRules& rules, const Rows& rows,
                                                 int first_col, float (&s)[kScoreRegs]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const T* bias = static_cast<const T*>(sp.bias.data) + rules.bias_at +
                      min(rows.index(r), sp.seqlen_q - 1) * sp.bias_strides.row;
#pragma unroll
      for (int i = 0; i < kScoreRegs / 4; ++i) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int j = min(first_col + i * 8 + c, sp.seqlen_kv - 1);
          s[i * 4 + r * 2 + c] +=
              gpu::ToFloat(bias[sp.bias_strides.col == 0 ? 0 : j], sp.bias.dtype == DType::kBF16);
        }
      }
    }
  }

  // Where only a mask selects: a mask's pairs of neighbouring keys, several at a time.
  static __device__ __forceinline__ void ApplyMask(const gpu::ScoreParams& sp, const TileInfo& info,
                                                   const Rows& rows, int first_col,
                                                   float (&s)[kScoreRegs]) {
    const gpu::ElementRules rules = gpu::RulesOf(sp, info.batch, info.head, false);
    const int row[2] = {min(rows.index(0), sp.seqlen_q - 1), min(rows.index(1), sp.seqlen_q - 1)};
    // Two bits of each row, for keys j and j + 1 where j is even.
    auto select = [&](auto pair) {
      constexpr int kWords = (kScoreRegs + 31) / 32;
      uint32_t keep[kWords] = {};
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
#pragma unroll 4
        for (int i = 0; i < min(8, kScoreRegs / 4 - word * 8); ++i) {
          const int j = first_col + (word * 8 + i) * 8;
          keep[word] |= (pair(row[0], j) | pair(row[1], j) << 2) << (i * 4);
        }
      }
#pragma unroll
      for (int i = 0; i < kScoreRegs; ++i) s[i] = keep[i / 32] >> i % 32 & 1 ? s[i] : -gpu::kInf;
    };
    // Keys beyond the operand are masked anyway: any others stand in for them.
    const int last = sp.seqlen_kv - 1;
    if (sp.tile_mask.tiles.data != nullptr) {
      select([&](int i, int j) {
        return gpu::TileMaskByte(sp.tile_mask, rules, i, min(j, last) / 8 * 8) >> j % 8 & 3u;
      });
    } else if (sp.mask_strides.col == 1 && sp.seqlen_kv % 2 == 0) {
      const auto* mask = static_cast<const uint8_t*>(sp.mask.data) + rules.mask_at;
      select([&](int i, int j) {
        const uint32_t x =
            *reinterpret_cast<const uint16_t*>(mask + i * sp.mask_strides.row + min(j, last - 1));
        return (x | x >> 7) & 3u;
      });
    } else {
      select([&](int i, int j) {
        return static_cast<uint32_t>(gpu::KeepDense(sp, rules, i, min(j, last))) |
               static_cast<uint32_t>(gpu::KeepDense(sp, rules, i, min(j + 1, last))) << 1;
      });
    }
  }

  // Scores of one key tile: scale, bias and soft cap where they cannot be folded into the exponent,
  // then masks.
  static __device__ __forceinline__ void FinishScores(const ForwardParams& p, const TileInfo& info,
                                                      float scale, float cap, bool is_transformed,
                                                      const Rows& rows, int kv_first,
                                                      bool is_masked, float (&s)[kScoreRegs]) {
    const gpu::ScoreParams& sp = p.score;
    const int col = 2 * (threadIdx.x % 4);
    if (is_transformed) {
#pragma unroll
      for (int i = 0; i < kScoreRegs; ++i) s[i] *= scale;
      if constexpr (kHasElements) {
        if (sp.bias.data != nullptr) {
          const gpu::ElementRules rules = gpu::RulesOf(sp, info.batch, info.head, false);
          if (sp.bias.dtype == DType::kF32) {
            AddBias<float>(sp, rules, rows, kv_first + col, s);
          } else {
            AddBias<uint16_t>(sp, rules, rows, kv_first + col, s);
          }
        }
      }
      if (cap > 0.f) {
        const float inverse = 1.f / cap;
#pragma unroll
        for (int i = 0; i < kScoreRegs; ++i) s[i] = cap * gpu::Tanh(s[i] * inverse);
      }
    }
    if (kv_first < info.full_begin || kv_first + kBlockKv > info.full_end || is_masked) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int lo = rows.interval[r].x - kv_first - col;
        const unsigned length = rows.interval[r].y - rows.interval[r].x;
#pragma unroll
        for (int i = 0; i < kScoreRegs / 4; ++i) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& x = s[i * 4 + r * 2 + c];
            x = static_cast<unsigned>(i * 8 + c - lo) < length ? x : -gpu::kInf;
          }
        }
      }
      if constexpr (kHasSegments) {
        if (kHasElements && is_masked && !info.is_elementwise) {
          ApplyMask(sp, info, rows, kv_first + col, s);
        } else if (info.is_elementwise || is_masked) {
          const gpu::ElementRules rules =
              gpu::RulesOf(sp, info.batch, info.head, info.is_scattered);
          // Rolled loops over bits keep the code small: the registers themselves need constant
          // indices.
          uint32_t keep[(kScoreRegs + 31) / 32];
#pragma unroll
          for (int word = 0; word < (kScoreRegs + 31) / 32; ++word) {
            keep[word] = 0;
#pragma unroll 1
            for (int bit = 0; bit < 32; ++bit) {
              const int i = word * 32 + bit;
              const int row = min(i & 2 ? rows.index(1) : rows.index(0), sp.seqlen_q - 1);
              const int j = min(kv_first + i / 4 * 8 + col + i % 2, sp.seqlen_kv - 1);
              keep[word] |= static_cast<uint32_t>(kHasElements ? gpu::Keep(sp, rules, row, j)
                                                               : gpu::KeepSegment(rules, row, j))
                            << bit;
            }
          }
#pragma unroll
          for (int i = 0; i < kScoreRegs; ++i)
            s[i] = keep[i / 32] >> i % 32 & 1 ? s[i] : -gpu::kInf;
        }
      }
    }
  }

  static __device__ __forceinline__ void Consume(const ForwardParams& p, SharedStorage& smem) {
    const gpu::ScoreParams& sp = p.score;
    const int thread = threadIdx.x - 128;
    const int group = __shfl_sync(0xffffffff, thread / 128, 0);
    const int lane = threadIdx.x % 32;

    Tensor sQ = make_tensor(make_smem_ptr(smem.q), LayoutQ{});
    Tensor sK = make_tensor(make_smem_ptr(smem.k[0]), LayoutK{});
    Tensor sVt = make_tensor(make_smem_ptr(smem.v[0]), LayoutVt{});
    MmaQK mma_qk;
    MmaPV mma_pv;
    auto thread_qk = mma_qk.get_slice(thread);
    auto thread_pv = mma_pv.get_slice(thread);
    Tensor tSrQ = thread_qk.partition_fragment_A(sQ);
    Tensor tSrK = thread_qk.partition_fragment_B(sK);
    Tensor tOrV = thread_pv.partition_fragment_B(sVt);
    Tensor tSrS = partition_fragment_C(mma_qk, Shape<Int<kBlockQ>, Int<kBlockKv>>{});
    Tensor tOrO = partition_fragment_C(mma_pv, Shape<Int<kBlockQ>, Int<kHeadDimV>>{});
    Tensor tOrP =
        make_tensor<Element>(partition_shape_A(mma_pv, Shape<Int<kBlockQ>, Int<kBlockKv>>{}));
    static_assert(size(tSrS) == kScoreRegs && size(tOrO) == kOutRegs && size(tOrP) == kScoreRegs);
    float (&s)[kScoreRegs] = *reinterpret_cast<float (*)[kScoreRegs]>(tSrS.data());
    float (&o)[kOutRegs] = *reinterpret_cast<float (*)[kOutRegs]>(tOrO.data());

    auto convert = [&] {
#pragma unroll
      for (int i = 0; i < kScoreRegs; ++i) tOrP(i) = static_cast<Element>(s[i]);
    };
    // One lane speaks for its warp, once all of them have read.
    auto release = [&](gpu::Barrier* bar) {
      __syncwarp();
      if (lane == 0) gpu::Arrive(bar);
    };
    constexpr int kPingPongBar = 1;
    auto my_turn = [&] {
      if constexpr (kPingPong) gpu::NamedSync(kPingPongBar + group, 256);
    };
    auto next_turn = [&] {
      if constexpr (kPingPong) {
        gpu::NamedArrive(kPingPongBar + (group == kConsumers - 1 ? 0 : group + 1), 256);
      }
    };
    if (kPingPong && group == kConsumers - 1) gpu::NamedArrive(kPingPongBar, 256);

    gpu::RingState<kStages> k_state, v_state;
    int q_phase = 0, slot = 0;
    while (true) {
      gpu::Wait(&smem.q_full[group], q_phase);
      q_phase ^= 1;
      const TileInfo& info = smem.info[slot];
      slot = slot == kInfoSlots - 1 ? 0 : slot + 1;
      if (info.is_last) return;
      const float scale = gpu::ScaleOf(sp, info.batch);
      const float cap =
          sp.logits_soft_cap.data == nullptr
              ? 0.f
              : fabsf(gpu::ReadFloat(sp.logits_soft_cap,
                                     gpu::EntryOf(sp.logits_soft_cap.batch, info.batch)));
      // The exponent takes the scale as a positive factor; anything else is applied to the scores
      // first.
      const bool is_transformed = sp.logits_soft_cap.data != nullptr || !(scale > 0.f) ||
                                  (kHasElements && sp.bias.data != nullptr);
      const float unit = is_transformed ? 1.f : scale;  // logits per score
      const float factor = unit * gpu::kLog2e;
      Rows rows;
      rows.first = info.q_first + group * 64 + (threadIdx.x % 128) / 32 * 16 + lane / 4;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        rows.interval[r] = gpu::RowInterval(sp, info.limits, info.batch, rows.index(r));
      }
      gpu::RowStats stats;
      float rescale[2];
      if (info.num_kv_tiles > 0) {
        int kv_first = info.kv_first + info.kv_range * kBlockKv;
        bool is_masked = false;
        auto await_keys = [&] {
          gpu::Wait(&smem.k_ring.full[k_state.stage], k_state.phase);
          if constexpr (kHasElements) {
            kv_first = smem.key_tiles[k_state.stage].first;
            is_masked = smem.key_tiles[k_state.stage].is_masked;
          } else {
            kv_first -= kBlockKv;
          }
        };
        await_keys();
        warpgroup_fence_operand(tSrS);
        warpgroup_arrive();
        Gemm(mma_qk, tSrQ, tSrK(_, _, _, k_state.stage), tSrS, false);
        warpgroup_wait<0>();
        warpgroup_fence_operand(tSrS);
        release(&smem.k_ring.empty[k_state.stage]);
        k_state.Next();
        FinishScores(p, info, scale, cap, is_transformed, rows, kv_first, is_masked, s);
        gpu::OnlineSoftmax(s, factor, stats, rescale);
        convert();
        bool accumulates = false;
        for (int n = info.num_kv_tiles - 2; n >= 0; --n) {
          await_keys();
          my_turn();
          warpgroup_fence_operand(tSrS);
          warpgroup_fence_operand(tOrP);
          warpgroup_fence_operand(tOrO);
          warpgroup_arrive();
          Gemm(mma_qk, tSrQ, tSrK(_, _, _, k_state.stage), tSrS, false);
          gpu::Wait(&smem.v_ring.full[v_state.stage], v_state.phase);
          Gemm(mma_pv, tOrP, tOrV(_, _, _, v_state.stage), tOrO, accumulates);
          accumulates = true;
          next_turn();
          warpgroup_wait<1>();
          warpgroup_fence_operand(tSrS);
          release(&smem.k_ring.empty[k_state.stage]);
          k_state.Next();
          FinishScores(p, info, scale, cap, is_transformed, rows, kv_first, is_masked, s);
          gpu::OnlineSoftmax(s, factor, stats, rescale);
          // ptxas would move the wait in front of the softmax, which is to run under the value
          // product: a branch that needs the sums holds it back. They are never negative.
          if (stats.sum[0] + stats.sum[1] < 0.f) asm volatile("nanosleep.u32 0;");
          warpgroup_wait<0>();
          warpgroup_fence_operand(tOrO);
          warpgroup_fence_operand(tOrP);
          release(&smem.v_ring.empty[v_state.stage]);
          v_state.Next();
          convert();
          // Most key tiles leave every maximum of a warp's rows as it was.
          if (__any_sync(0xffffffff, rescale[0] != 1.f || rescale[1] != 1.f)) {
#pragma unroll
            for (int i = 0; i < kOutRegs; ++i) o[i] *= rescale[i / 2 % 2];
          }
        }
        release(&smem.q_empty[group]);
        gpu::Wait(&smem.v_ring.full[v_state.stage], v_state.phase);
        warpgroup_fence_operand(tOrP);
        warpgroup_fence_operand(tOrO);
        warpgroup_arrive();
        Gemm(mma_pv, tOrP, tOrV(_, _, _, v_state.stage), tOrO, accumulates);
        warpgroup_wait<0>();
        warpgroup_fence_operand(tOrO);
        release(&smem.v_ring.empty[v_state.stage]);
        v_state.Next();
      } else {
        release(&smem.q_empty[group]);
#pragma unroll
        for (int i = 0; i < kOutRegs; ++i) o[i] = 0.f;
      }
      Finish(p, info, rows, stats, unit,
             reinterpret_cast<OutStage*>(smem.out)[kStagesOut ? thread / 32 : 0], o);
    }
  }

  // Epilogue
  // ----------------------------------------------------------------------------------------------------------

  // Normalises, takes sinks in, and stores out and lse. A row without keys has sum 0: out 0, lse
  // -inf or its sink.
  static __device__ __forceinline__ void Finish(const ForwardParams& p, const TileInfo& info,
                                                const Rows& rows, gpu::RowStats& stats, float unit,
                                                OutStage& stage, float (&o)[kOutRegs]) {
    const gpu::ScoreParams& sp = p.score;
    const int lane = threadIdx.x % 32;
    float norm[2];
    bool is_nan = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = gpu::QuadSum(stats.sum[r]), top = __fmul_rn(stats.max[r], unit);
      norm[r] = gpu::CloseRow(sp, info, sum, top);
      if (lane % 4 == 0 && rows.index(r) < sp.seqlen_q) {
        const int64_t row =
            (static_cast<int64_t>(info.batch) * sp.num_q_heads + info.head) * sp.seqlen_q;
        p.lse[row + rows.index(r)] = gpu::LseOf(sum, top);
      }
    }
#pragma unroll
    for (int i = 0; i < kOutRegs; ++i) {
      const float n = norm[i / 2 % 2];
      o[i] = n == 0.f ? 0.f : o[i] * n;
      if constexpr (kHasSegments) is_nan |= o[i] != o[i];
    }
    if constexpr (kHasSegments) {
      // Warps beyond the last row list nothing: the list has room for strips of rows.
      if (info.may_leak && __any_sync(0xffffffff, is_nan) && lane == 0 &&
          rows.index(0) < sp.seqlen_q) {
        p.repair.strips[atomicAdd(p.repair.count, 1)] = {info.batch, info.head, rows.index(0)};
      }
    }
    auto row_at = [&](int i) {
      const int64_t row =
          (static_cast<int64_t>(info.batch) * sp.seqlen_q + i) * sp.num_q_heads + info.head;
      return static_cast<Element*>(p.out) + row * sp.head_dim_v;
    };
    if constexpr (kStagesOut) {
      const int first = rows.first - lane / 4;
      stage.Store(o, row_at(first), static_cast<int64_t>(sp.num_q_heads) * sp.head_dim_v,
                  sp.seqlen_q - first, sp.head_dim_v);
    } else {
      Element* rows_to[2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        rows_to[r] = rows.index(r) < sp.seqlen_q ? row_at(rows.index(r)) : nullptr;
      gpu::StoreRows<Element>(o, rows_to, sp.head_dim_v);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    ForwardMain(const __grid_constant__ ForwardParams p,
                const __grid_constant__ CUtensorMap q_tensor,
                const __grid_constant__ CUtensorMap k_tensor,
                const __grid_constant__ CUtensorMap v_tensor) {
  extern __shared__ __align__(1024) char raw[];
  auto& smem = *reinterpret_cast<typename Kernel::SharedStorage*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Kernel::kConsumers; ++i) {
      gpu::InitBarrier(&smem.q_full[i], 1);
      gpu::InitBarrier(&smem.q_empty[i], 4);
    }
    for (int i = 0; i < Kernel::kStages; ++i) {
      gpu::InitBarrier(&smem.k_ring.full[i], 1);
      gpu::InitBarrier(&smem.k_ring.empty[i], 4 * Kernel::kConsumers);
      gpu::InitBarrier(&smem.v_ring.full[i], 1);
      gpu::InitBarrier(&smem.v_ring.empty[i], 4 * Kernel::kConsumers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    cutlass::arch::warpgroup_reg_dealloc<Kernel::kProducerRegs>();
    if (threadIdx.x == 0) Kernel::Produce(p, &q_tensor, &k_tensor, &v_tensor, smem);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Kernel::kConsumerRegs>();
    Kernel::Consume(p, smem);
  }
}

}  // namespace jax_fmha::sm90
