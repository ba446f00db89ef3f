// Forward attention on Hopper: out = softmax(scale * q k^T) v for [entries, T, N, H] operands, and
// its lse.
//
// Thread blocks are persistent and take (query tile, head, batch entry) triples, longest first. One
// warp plans them, one loads them by TMA; block_q / 64 consumer warpgroups hold 64 query rows each
// and keep scores, probabilities and output in registers. They take turns: while one multiplies,
// the other is at its softmax, under which its value product of the key tile before still runs. So
// do the first softmax of a tile and the last value product of the tile before.
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
  // Where registers are left, probabilities wait there for the end of the value product before.
  static constexpr bool kHoldsPairs =
      !kHasElements && kConsumers == 2 && kBlockKv + kHeadDimV / 2 + kBlockKv / 8 <= 208;

  // Output rows leave by way of shared memory, and the next query rows arrive there before the old
  // ones are used up, where there is room for them.
  using OutBox = gpu::RowStage<Element>;
  static constexpr int kOutBoxes = (kHeadDimV + OutBox::kColumns - 1) / OutBox::kColumns;
  struct OutStage {  // of a warp
    OutBox boxes[kOutBoxes];
  };
  static constexpr int TileBytes(int q_slots, bool stages_out) {
    return 2 * (q_slots * kBlockQ * kHeadDim + kStages * kBlockKv * (kHeadDim + kHeadDimV)) +
           (stages_out ? 4 * kConsumers * static_cast<int>(sizeof(OutStage)) : 0);
  }
  static constexpr int kRoom = 226 * 1024;  // beside barriers
  static constexpr int kQSlots = TileBytes(2, true) <= kRoom ? 2 : 1;
  static constexpr bool kStagesOut = TileBytes(kQSlots, true) <= kRoom && !gpu::kIsForSanitizer;

  using TileQK = Shape<Int<kBlockQ>, Int<kBlockKv>, Int<kHeadDim>>;
  using TilePV = Shape<Int<kBlockQ>, Int<kHeadDimV>, Int<kBlockKv>>;
  using WarpGroups = Layout<Shape<Int<kConsumers>, _1, _1>>;
  using MmaQK = decltype(make_tiled_mma(GMMA::ss_op_selector<Element, Element, float, TileQK>(),
                                        WarpGroups{}));
  using MmaPV = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, TilePV, GMMA::Major::K, GMMA::Major::MN>(),
      WarpGroups{}));
  static_assert(tile_size<1>(MmaQK{}) == kBlockKv && tile_size<1>(MmaPV{}) == kHeadDimV,
                "one of CuTe's extended shapes, which CMakeLists.txt enables for some tiles");

  using AtomK = std::conditional_t<kBoxCols == 64, GMMA::Layout_K_SW128_Atom<Element>,
                                   GMMA::Layout_K_SW64_Atom<Element>>;
  using AtomMn = std::conditional_t<kBoxCols == 64, GMMA::Layout_MN_SW128_Atom<Element>,
                                    GMMA::Layout_MN_SW64_Atom<Element>>;
  using LayoutQ =
      decltype(tile_to_shape(AtomK{}, Shape<Int<kBlockQ>, Int<kHeadDim>, Int<kQSlots>>{}));
  using LayoutK =
      decltype(tile_to_shape(AtomK{}, Shape<Int<kBlockKv>, Int<kHeadDim>, Int<kStages>>{}));
  // The same bytes as [stage][column block][row][kBoxCols], seen as (Hv, kv).
  using LayoutVt = decltype(tile_to_shape(
      AtomMn{}, Shape<Int<kHeadDimV>, Int<kBlockKv>, Int<kStages>>{}, Step<_2, _1, _3>{}));

  // Of the tile that the planner describes, the one that the producer loads, those whose query rows
  // are in use, and the one that a warpgroup still ends then.
  static constexpr int kInfoSlots = kQSlots + 3;
  static __device__ int NextInfo(int slot) { return slot == kInfoSlots - 1 ? 0 : slot + 1; }
  // The next tile is asked for when no more than these key tiles are left to load: one that is
  // claimed earlier waits while other blocks idle.
  static constexpr int kTilesAhead = 2;

  // What a tile is, worked out once by the planner.
  struct TileInfo : gpu::ForwardTileInfo {
    float scale, cap;  // cap 0: none
  };

  struct KeyTile {
    int first;      // key
    int is_masked;  // by a mask, here and there
  };

  struct alignas(1024) SharedStorage {
    alignas(1024) Element q[kQSlots][kBlockQ * kHeadDim];
    alignas(1024) Element k[kStages][kBlockKv * kHeadDim];
    alignas(1024) Element v[kStages][kBlockKv * kHeadDimV];
    alignas(1024) char out[kStagesOut ? 4 * kConsumers * sizeof(OutStage) : 16];  // of each warp
    gpu::Ring<kQSlots> q_ring[kConsumers];
    gpu::Ring<kStages> k_ring, v_ring;
    gpu::Ring<1> tile_ring;      // from the planner to the producer
    KeyTile key_tiles[kStages];  // kHasElements: of the slots of k_ring
    TileInfo info[kInfoSlots];
  };

  // Planner: claims and describes tiles
  // ----------------------------------------------------------------------------------------------------------

  static __device__ __forceinline__ void Plan(const ForwardParams& p, SharedStorage& smem) {
    const gpu::ScoreParams& s = p.score;
    int slot = 0, phase = 0;
    for (int tile = blockIdx.x; tile < p.order.num_tiles;) {
      TileInfo& info = smem.info[slot];
      static_cast<gpu::ForwardTileInfo&>(info) =
          gpu::DescribeForwardTile<kBlockQ, kBlockKv, kHasSegments, kHasElements>(s, p.order, tile);
      info.scale = gpu::ScaleOf(s, info.batch);
      info.cap = gpu::CapOf(s, info.batch);
      gpu::Arrive(&smem.tile_ring.full[0]);
      slot = NextInfo(slot);
      gpu::Wait(&smem.tile_ring.empty[0], phase);
      phase ^= 1;
      tile = gridDim.x + atomicAdd(p.next_tile, 1);
    }
    smem.info[slot].is_last = 1;
    gpu::Arrive(&smem.tile_ring.full[0]);
  }

  // Producer
  // ----------------------------------------------------------------------------------------------------------

  static __device__ __forceinline__ void Produce(const ForwardParams& p,
                                                 const CUtensorMap* q_tensor,
                                                 const CUtensorMap* k_tensor,
                                                 const CUtensorMap* v_tensor, SharedStorage& smem) {
    const gpu::ScoreParams& s = p.score;
    gpu::RingState<kQSlots> q_state;
    gpu::RingState<kStages> k_state, v_state;
    q_state.phase = k_state.phase = v_state.phase = 1;  // empty slots
    // The last values of a tile come after the first keys of the next, in the order of their use.
    struct {
      int first, valid, head, entry;
    } values = {0, 0, 0, 0};  // nothing, if valid is 0
    auto load_v = [&] {
      if (values.valid == 0) return;
      gpu::Wait(&smem.v_ring.empty[v_state.stage], v_state.phase);
      gpu::ArriveExpect(&smem.v_ring.full[v_state.stage], kBlockKv * kHeadDimV * 2);
      gpu::LoadRows<kBlockKv, kHeadDimV, kBoxCols>(smem.v[v_state.stage], v_tensor,
                                                   &smem.v_ring.full[v_state.stage], values.first,
                                                   values.valid, values.head, values.entry);
      v_state.Next();
    };
    for (int slot = 0, phase = 0;;) {
      gpu::Wait(&smem.tile_ring.full[0], phase);
      phase ^= 1;
      const TileInfo& info = smem.info[slot];
      slot = NextInfo(slot);
      if (info.is_last) break;
      const int q_entry = gpu::EntryOf(p.q_map, info.batch),
                k_entry = gpu::EntryOf(p.k_map, info.batch),
                v_entry = gpu::EntryOf(p.v_map, info.batch);
      const int kv_head = info.head / s.group_size;
      auto load_q = [&] {
#pragma unroll
        for (int group = 0; group < kConsumers; ++group) {
          auto& ring = smem.q_ring[group];
          gpu::Wait(&ring.empty[q_state.stage], q_state.phase);
          if (info.num_kv_tiles == 0) {
            gpu::Arrive(&ring.full[q_state.stage]);
            continue;
          }
          // A warpgroup past the last row gets some row: a box without any row would touch memory
          // that is not ours.
          const int first = info.q_first + group * 64;
          gpu::ArriveExpect(&ring.full[q_state.stage], 64 * kHeadDim * 2);
          gpu::LoadRows<64, kHeadDim, kBoxCols, kBlockQ>(
              smem.q[q_state.stage] + group * 64 * kBoxCols, q_tensor, &ring.full[q_state.stage],
              min(first, s.seqlen_q - 1), max(1, min(64, s.seqlen_q - first)), info.head, q_entry);
        }
        q_state.Next();
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
      // Keys of tile n now, its values next time.
      auto load = [&](int n) {
        const int first = info.kv_first + n * kBlockKv, valid = min(kBlockKv, info.kv_end - first);
        gpu::Wait(&smem.k_ring.empty[k_state.stage], k_state.phase);
        if constexpr (kHasElements) {
          smem.key_tiles[k_state.stage] = {first, gpu::IsPartial(line, line_first + n)};
        }
        gpu::ArriveExpect(&smem.k_ring.full[k_state.stage], kBlockKv * kHeadDim * 2);
        gpu::LoadRows<kBlockKv, kHeadDim, kBoxCols>(smem.k[k_state.stage], k_tensor,
                                                    &smem.k_ring.full[k_state.stage], first, valid,
                                                    kv_head, k_entry);
        k_state.Next();
        load_v();
        values = {first, valid, kv_head, v_entry};
      };
      if constexpr (kQSlots > 1) {
        load_q();
      } else {
        // The slot is free when the last scores of the tile before are there: until then, rows come
        // as far as L2.
        for (int group = 0; group < kConsumers; ++group) {
          const int first = info.q_first + group * 64;
          if (info.num_kv_tiles > 0 && first < s.seqlen_q) {
            gpu::PrefetchRows<64, kHeadDim, kBoxCols>(q_tensor, first, min(64, s.seqlen_q - first),
                                                      info.head, q_entry);
          }
        }
      }
      int n = last_seen(info.kv_range - 1);
      if (n >= 0) {
        load(n);
      } else {
        load_v();
        values.valid = 0;
      }
      if constexpr (kQSlots == 1) load_q();
      bool is_asked = false;
      auto ask = [&](int n) {
        if (is_asked || n >= kTilesAhead) return;
        gpu::Arrive(&smem.tile_ring.empty[0]);
        is_asked = true;
      };
      for (n = last_seen(n - 1); n >= 0; n = last_seen(n - 1)) {
        ask(n);
        load(n);
      }
      ask(n);
    }
    load_v();
    for (int group = 0; group < kConsumers; ++group) {
      gpu::Wait(&smem.q_ring[group].empty[q_state.stage], q_state.phase);
      gpu::Arrive(&smem.q_ring[group].full[q_state.stage]);
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

  // A bit for each key of a row that this thread holds: those of columns 8 i and 8 i + 1 from its
  // first on.
  struct KeyBits {
    uint32_t word[(kScoreRegs / 2 + 31) / 32];
  };
  static __device__ __forceinline__ KeyBits KeysBelow(int column) {
    const int at = max(column, 0), count = at / 8 * 2 + min(at % 8, 2);
    KeyBits bits;
#pragma unroll
    for (int w = 0; w < (kScoreRegs / 2 + 31) / 32; ++w) {
      const int here = count - w * 32;
      bits.word[w] = here >= 32 ? ~0u : here <= 0 ? 0u : (1u << here) - 1;
    }
    return bits;
  }

  // A tile of query rows, as a thread works on it.
  struct RowTile {
    const TileInfo* info;
    Rows rows;
    int full_begin, full_end;  // keys that every row may see
    // The exponent takes the unit as a positive factor; anything else is applied to the scores
    // first.
    bool is_transformed, is_capped;
    float scale, inverse_cap;
    float unit;  // logits per score, as the softmax sees them
  };

  static __device__ __forceinline__ RowTile OpenTile(const ForwardParams& p, const TileInfo& info,
                                                     int group) {
    const gpu::ScoreParams& sp = p.score;
    RowTile tile;
    tile.info = &info;
    tile.rows.first =
        info.q_first + group * 64 + (threadIdx.x % 128) / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      tile.rows.interval[r] = gpu::RowInterval(sp, info.limits, info.batch, tile.rows.index(r));
    }
    tile.full_begin = info.full_begin;
    tile.full_end = info.full_end;
    tile.scale = info.scale;
    const float cap = info.cap;
    const bool has_bias = kHasElements && sp.bias.data != nullptr;
    tile.is_capped = cap > 0.f;
    tile.is_transformed = tile.is_capped || !(tile.scale > 0.f) || has_bias;
    tile.unit = tile.is_capped ? cap : tile.is_transformed ? 1.f : tile.scale;
    tile.inverse_cap = tile.is_capped ? 1.f / cap : 1.f;
    if (!has_bias) tile.scale *= tile.inverse_cap;
    return tile;
  }

  // Scores of one key tile: scale, bias and soft cap where they cannot be folded into the exponent,
  // then masks.
  template <bool kIsFirst>
  static __device__ __forceinline__ void FinishScores(const ForwardParams& p, const RowTile& tile,
                                                      int kv_first, bool is_partial, bool is_masked,
                                                      float (&s)[kScoreRegs]) {
    [[maybe_unused]] const gpu::ScoreParams& sp = p.score;
    const TileInfo& info = *tile.info;
    const Rows& rows = tile.rows;
    const int col = 2 * (threadIdx.x % 4);
    if (tile.is_transformed) {
#pragma unroll
      for (int i = 0; i < kScoreRegs; ++i) s[i] *= tile.scale;
      if constexpr (kHasElements) {
        if (sp.bias.data != nullptr) {
          const gpu::ElementRules rules = gpu::RulesOf(sp, info.batch, info.head, false);
          if (sp.bias.dtype == DType::kF32) {
            AddBias<float>(sp, rules, rows, kv_first + col, s);
          } else {
            AddBias<uint16_t>(sp, rules, rows, kv_first + col, s);
          }
          if (tile.is_capped) {
#pragma unroll
            for (int i = 0; i < kScoreRegs; ++i) s[i] *= tile.inverse_cap;
          }
        }
      }
      if (tile.is_capped) {
#pragma unroll
        for (int i = 0; i < kScoreRegs; ++i) s[i] = gpu::Tanh(s[i]);
      }
    }
    if (is_partial) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if constexpr (kIsFirst) {
          const int origin = kv_first + col;
          const KeyBits below_end = KeysBelow(rows.interval[r].y - origin),
                        below_begin = KeysBelow(rows.interval[r].x - origin);
#pragma unroll
          for (int i = 0; i < kScoreRegs / 2; ++i) {
            float& x = s[i / 2 * 4 + r * 2 + i % 2];
            const uint32_t keep = below_end.word[i / 32] & ~below_begin.word[i / 32];
            x = keep >> i % 32 & 1 ? x : -gpu::kInf;
          }
        } else {
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

  static __device__ __forceinline__ void Consume(const ForwardParams& p,
                                                 const CUtensorMap* out_tensor,
                                                 SharedStorage& smem) {
    const int thread = threadIdx.x - 128;
    const int group = __shfl_sync(0xffffffff, thread / 128, 0);

    Tensor sQ = make_tensor(make_smem_ptr(smem.q[0]), LayoutQ{});
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

    uint32_t (&pairs)[kScoreRegs / 2] =
        *reinterpret_cast<uint32_t (*)[kScoreRegs / 2]>(tOrP.data());
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
    gpu::RingState<kQSlots> q_state;
    int slot = 0;
    auto score_product = [&] {
      warpgroup_fence_operand(tSrS);
      warpgroup_arrive();
      Gemm(mma_qk, tSrQ(_, _, _, q_state.stage), tSrK(_, _, _, k_state.stage), tSrS, false);
    };
    auto value_product = [&](bool accumulates) {
      gpu::Wait(&smem.v_ring.full[v_state.stage], v_state.phase);
      warpgroup_fence_operand(tOrP);
      warpgroup_fence_operand(tOrO);
      warpgroup_arrive();
      Gemm(mma_pv, tOrP, tOrV(_, _, _, v_state.stage), tOrO, accumulates);
    };
    auto end_score_product = [&](auto pending) {
      warpgroup_wait<decltype(pending)::value>();
      warpgroup_fence_operand(tSrS);
      gpu::ArriveAsWarp(&smem.k_ring.empty[k_state.stage]);
      k_state.Next();
    };
    auto end_value_product = [&] {
      warpgroup_wait<0>();
      warpgroup_fence_operand(tOrO);
      warpgroup_fence_operand(tOrP);
      gpu::ArriveAsWarp(&smem.v_ring.empty[v_state.stage]);
      v_state.Next();
    };
    auto convert = [&] {
#pragma unroll
      for (int i = 0; i < kScoreRegs / 2; ++i)
        pairs[i] = gpu::PackPair<Element>(s[2 * i], s[2 * i + 1]);
    };
    const TileInfo* info;
    auto await_tile = [&] {
      gpu::Wait(&smem.q_ring[group].full[q_state.stage], q_state.phase);
      info = &smem.info[slot];
      slot = NextInfo(slot);
    };
    auto release_q = [&] {
      gpu::ArriveAsWarp(&smem.q_ring[group].empty[q_state.stage]);
      q_state.Next();
    };
    RowTile tile;
    gpu::RowStats stats;
    int kv_first = 0, num_kv_tiles = 0;
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
    auto enter_tile = [&] {
      num_kv_tiles = info->num_kv_tiles;
      kv_first = info->kv_first + info->kv_range * kBlockKv;
    };
    auto is_partial = [&](const RowTile& x) {
      return kv_first < x.full_begin || kv_first + kBlockKv > x.full_end || is_masked;
    };
    auto store = [&](const RowTile& x, const float (&norm)[2]) {
      Store(p, out_tensor, x, norm,
            reinterpret_cast<OutStage*>(smem.out)[kStagesOut ? thread / 32 : 0], o);
    };
    float rescale[2], norm[2];
    await_tile();
    while (!info->is_last) {
      if (info->num_kv_tiles == 0) {
        release_q();
#pragma unroll
        for (int i = 0; i < kOutRegs; ++i) o[i] = 0.f;
        tile = OpenTile(p, *info, group);
        CloseRows(p, tile, gpu::RowStats{}, norm);
        store(tile, norm);
        await_tile();
        continue;
      }
      // The first keys of a tile, beside nothing.
      enter_tile();
      await_keys();
      my_turn();
      score_product();
      next_turn();
      tile = OpenTile(p, *info, group);
      end_score_product(Int<0>{});
      if (num_kv_tiles == 1) release_q();
      FinishScores<true>(p, tile, kv_first, is_partial(tile), is_masked, s);
      stats = gpu::RowStats{};
      gpu::OnlineSoftmax(s, tile.unit * gpu::kLog2e, stats, rescale);
      convert();
      bool has_next;
      do {
        bool accumulates = false;
        const float factor = tile.unit * gpu::kLog2e;
        for (int n = num_kv_tiles - 2; n >= 0; --n) {
          await_keys();
          my_turn();
          score_product();
          value_product(accumulates);
          accumulates = true;
          next_turn();
          end_score_product(Int<1>{});
          if (n == 0) release_q();
          if constexpr (!kHoldsPairs) end_value_product();
          const bool is_partial_here = is_partial(tile);
          FinishScores<false>(p, tile, kv_first, is_partial_here, is_masked, s);
          // Masked scores end up in registers of their own, which the way from unmasked ones is not
          // to cross.
          bool is_steady = stats.is_steady && !is_partial_here;
          uint32_t held[2][kScoreRegs / 4];
          float sum[2];
          if (is_steady) {
            sum[0] = gpu::SteadyExponentials<Element, 0>(s, factor, stats.base[0], held[0]);
          }
          if constexpr (kHoldsPairs) end_value_product();
          if (is_steady) {
            sum[1] = gpu::SteadyExponentials<Element, 1>(s, factor, stats.base[1], held[1]);
            is_steady = gpu::IsSteady(sum[0] + sum[1]);
          }
          if (is_steady) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              stats.sum[r] += sum[r];
#pragma unroll
              for (int i = 0; i < kScoreRegs / 4; ++i) pairs[i * 2 + r] = held[r][i];
            }
          } else {
            gpu::OnlineSoftmax(s, factor, stats, rescale);
            convert();
#pragma unroll
            for (int i = 0; i < kOutRegs; ++i) o[i] *= rescale[i / 2 % 2];
          }
        }
        RowTile next;
        gpu::RowStats next_stats;
        await_tile();
        has_next = !info->is_last && info->num_kv_tiles > 0;
        if (has_next) {
          // The first keys of the next tile, beside the last values of this one.
          enter_tile();
          await_keys();
          my_turn();
          score_product();
          value_product(accumulates);
          next_turn();
          CloseRows(p, tile, stats, norm);
          next = OpenTile(p, *info, group);
          end_score_product(Int<1>{});
          if (num_kv_tiles == 1) release_q();
          FinishScores<true>(p, next, kv_first, is_partial(next), is_masked, s);
          gpu::OnlineSoftmax(s, next.unit * gpu::kLog2e, next_stats, rescale);
          // ptxas would move the wait in front of the softmax, which is to run under the value
          // product: a branch that needs the sums holds it back. They are never negative.
          if (next_stats.sum[0] + next_stats.sum[1] < 0.f) asm volatile("nanosleep.u32 0;");
          end_value_product();
          convert();
        } else {
          value_product(accumulates);
          CloseRows(p, tile, stats, norm);
          end_value_product();
        }
        store(tile, norm);
        tile = next;
        stats = next_stats;
      } while (has_next);
    }
    // Shared memory must outlive the last store.
    if (kStagesOut && threadIdx.x % 32 == 0) gpu::AwaitStores();
  }

  // Epilogue
  // ----------------------------------------------------------------------------------------------------------

  // Takes sinks in, stores lse, and gives what outputs are to be multiplied with. A row without
  // keys has sum 0: out 0, lse -inf or its sink.
  static __device__ __forceinline__ void CloseRows(const ForwardParams& p, const RowTile& tile,
                                                   const gpu::RowStats& stats, float (&norm)[2]) {
    const gpu::ScoreParams& sp = p.score;
    const TileInfo& info = *tile.info;
    const Rows& rows = tile.rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = gpu::QuadSum(stats.sum[r]), top = __fmul_rn(stats.max[r], tile.unit);
      norm[r] = gpu::CloseRow(sp, info, sum, top);
      if (threadIdx.x % 4 == 0 && rows.index(r) < sp.seqlen_q) {
        const int64_t row =
            (static_cast<int64_t>(info.batch) * sp.num_q_heads + info.head) * sp.seqlen_q;
        p.lse[row + rows.index(r)] = gpu::LseOf(sum, top);
      }
    }
  }

  static __device__ __forceinline__ void Store(const ForwardParams& p,
                                               const CUtensorMap* out_tensor, const RowTile& tile,
                                               const float (&norm)[2], OutStage& stage,
                                               float (&o)[kOutRegs]) {
    const gpu::ScoreParams& sp = p.score;
    const TileInfo& info = *tile.info;
    const Rows& rows = tile.rows;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kOutRegs; ++i) o[i] *= norm[i / 2 % 2];
    if (__any_sync(0xffffffff, norm[0] == 0.f || norm[1] == 0.f)) {
#pragma unroll
      for (int i = 0; i < kOutRegs; ++i) o[i] = norm[i / 2 % 2] == 0.f ? 0.f : o[i];
    }
    if constexpr (kHasSegments) {
      if (info.may_leak) {
        bool is_nan = false;
#pragma unroll
        for (int i = 0; i < kOutRegs; ++i) is_nan |= o[i] != o[i];
        // Warps beyond the last row list nothing: the list has room for strips of rows.
        if (__any_sync(0xffffffff, is_nan) && lane == 0 && rows.index(0) < sp.seqlen_q) {
          p.repair.strips[atomicAdd(p.repair.count, 1)] = {info.batch, info.head, rows.index(0)};
        }
      }
    }
    if constexpr (kStagesOut) {
      if (lane == 0) gpu::AwaitStores();  // of the tile before
      __syncwarp();
#pragma unroll
      for (int box = 0; box < kOutBoxes; ++box) {
        constexpr int kBoxRegs = OutBox::kColumns / 2;
        constexpr int kLastRegs = kOutRegs - (kOutBoxes - 1) * kBoxRegs;
        if (box < kOutBoxes - 1) {
          stage.boxes[box].template Fill<kBoxRegs>(&o[box * kBoxRegs]);
        } else {
          stage.boxes[box].template Fill<kLastRegs>(&o[box * kBoxRegs]);
        }
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      const int first = rows.index(0), valid = min(OutBox::kRows, sp.seqlen_q - first);
      if (lane == 0 && valid > 0) {
#pragma unroll
        for (int box = 0; box < kOutBoxes; ++box) {
          gpu::StoreBox(stage.boxes[box].data, out_tensor, box * OutBox::kColumns,
                        OutBox::kRows - valid, first + valid, info.head, info.batch);
        }
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
    } else {
      auto row_at = [&](int i) {
        const int64_t row =
            (static_cast<int64_t>(info.batch) * sp.seqlen_q + i) * sp.num_q_heads + info.head;
        return static_cast<Element*>(p.out) + row * sp.head_dim_v;
      };
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
                const __grid_constant__ CUtensorMap v_tensor,
                const __grid_constant__ CUtensorMap out_tensor) {
  extern __shared__ __align__(1024) char raw[];
  auto& smem = *reinterpret_cast<typename Kernel::SharedStorage*>(raw);
  if (threadIdx.x == 0) {
    constexpr int kArrivals = 4 * gpu::kArrivalsOfWarp;  // of a warpgroup
    for (int i = 0; i < Kernel::kConsumers; ++i) {
      for (int slot = 0; slot < Kernel::kQSlots; ++slot) {
        gpu::InitBarrier(&smem.q_ring[i].full[slot], 1);
        gpu::InitBarrier(&smem.q_ring[i].empty[slot], kArrivals);
      }
    }
    gpu::InitBarrier(&smem.tile_ring.full[0], 1);
    gpu::InitBarrier(&smem.tile_ring.empty[0], 1);
    for (int i = 0; i < Kernel::kStages; ++i) {
      gpu::InitBarrier(&smem.k_ring.full[i], 1);
      gpu::InitBarrier(&smem.k_ring.empty[i], kArrivals * Kernel::kConsumers);
      gpu::InitBarrier(&smem.v_ring.full[i], 1);
      gpu::InitBarrier(&smem.v_ring.empty[i], kArrivals * Kernel::kConsumers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    cutlass::arch::warpgroup_reg_dealloc<Kernel::kProducerRegs>();
    if (threadIdx.x == 0) Kernel::Produce(p, &q_tensor, &k_tensor, &v_tensor, smem);
    if (threadIdx.x == 32) Kernel::Plan(p, smem);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Kernel::kConsumerRegs>();
    Kernel::Consume(p, &out_tensor, smem);
  }
}

}  // namespace jax_fmha::sm90
