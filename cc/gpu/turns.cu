#include "cc/gpu/turns.h"

#include "cc/gpu/backward_tile.cuh"

namespace jax_fmha::gpu {
namespace {

struct TurnParams {
  ScoreParams score;
  SegmentPlan kv_plan;
  TurnPlan plan;
  int block_q, block_kv, num_q_tiles, num_kv_tiles;
};

// A block plans one batch entry.
__global__ void __launch_bounds__(256) PlanTurns(const __grid_constant__ TurnParams p) {
  __shared__ int scan[256];
  const int b = blockIdx.x, thread = threadIdx.x, n = p.num_kv_tiles;
  int2* takers = p.plan.takers + static_cast<int64_t>(b) * n;
  const EntryLimits limits = LimitsOf(p.score, b);
  for (int t = thread; t < n; t += 256) {
    const int2 range =
        QueryTiles(p.score, p.kv_plan, limits, b, t * p.block_kv, p.block_q, p.block_kv);
    takers[t] = range.x < range.y ? range : make_int2(p.num_q_tiles, 0);
  }
  __syncthreads();
  // The largest x of this thread and those before it.
  auto running_max = [&](int x) {
    scan[thread] = x;
    __syncthreads();
    for (int step = 1; step < 256; step *= 2) {
      const int other = thread >= step ? scan[thread - step] : x;
      __syncthreads();
      x = max(x, other);
      scan[thread] = x;
      __syncthreads();
    }
    return x;
  };
  int last = 0, first = -p.num_q_tiles;  // of all tiles before, and minus that of all behind
  for (int base = 0; base < n; base += 256) {
    const int up = base + thread, down = n - 1 - up;
    const int end = max(last, running_max(up < n ? takers[up].y : 0));
    last = max(last, scan[255]);
    __syncthreads();
    const int begin = max(first, running_max(up < n ? -takers[down].x : -p.num_q_tiles));
    first = max(first, scan[255]);
    __syncthreads();
    if (up < n) {
      takers[up].y = end;
      takers[down].x = -begin;
    }
    __syncthreads();
  }
  for (int m = thread; m < p.num_q_tiles; m += 256) {
    int lo = 0, hi = n;  // first tile that reaches beyond m
    while (lo < hi) {
      const int mid = (lo + hi) / 2;
      if (takers[mid].y <= m) {
        lo = mid + 1;
      } else {
        hi = mid;
      }
    }
    p.plan.first_takers[static_cast<int64_t>(b) * p.num_q_tiles + m] = lo;
  }
}

}  // namespace

cudaError_t RunTurnPlan(const ScoreParams& s, const SegmentPlan& kv_plan, int block_q, int block_kv,
                        const TurnPlan& plan, cudaStream_t stream) {
  const TurnParams p = {s,
                        kv_plan,
                        plan,
                        block_q,
                        block_kv,
                        static_cast<int>(CeilDiv(s.seqlen_q, block_q)),
                        static_cast<int>(CeilDiv(s.seqlen_kv, block_kv))};
  PlanTurns<<<static_cast<unsigned>(s.batch), 256, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace jax_fmha::gpu
