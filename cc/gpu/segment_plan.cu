// Turns segment ids into an interval of keys per query row, on the device.
//
// Ids may come in any order and number. Keys fall into runs of equal ids; a row whose id has
// exactly one run sees that interval, and a row whose id has several sees their hull with
// `is_scattered` set, so that the main kernel compares ids element by element there. Sorted ids
// (the usual packing) are searched by bisection, others run by run.
#include "cc/gpu/segment_plan.h"

namespace jax_fmha::gpu {
namespace {

struct RunParams {
  Operand kv_segment_ids, q_segment_ids;
  int batch, seqlen_q, seqlen_kv, num_chunks, num_plan_blocks;
  int* chunk_runs;    // [batch, num_chunks]: runs that start in the chunk
  int* chunk_sorted;  // [batch, num_chunks]: ids never fall inside the chunk, or from the one
                      // before into it
  int* run_start;     // [batch, S + 1]: first key of each run, then S
  int64_t* run_id;    // [batch, S]
  int2* rows;         // [batch, PlanStride(T)]
  PlanBlock* blocks;  // [batch, num_plan_blocks]
};

__device__ __forceinline__ void RunFlags(const RunParams& p, int64_t entry, int j, bool& is_start,
                                         bool& falls) {
  is_start = falls = false;
  if (j >= p.seqlen_kv) return;
  const int64_t id = ReadInt(p.kv_segment_ids, entry + j);
  const int64_t before = j == 0 ? id : ReadInt(p.kv_segment_ids, entry + j - 1);
  is_start = j == 0 || id != before;
  falls = id < before;
}

__global__ void __launch_bounds__(kRunChunk) CountRuns(const __grid_constant__ RunParams p) {
  const int b = blockIdx.x / p.num_chunks, chunk = blockIdx.x % p.num_chunks;
  const int64_t entry = EntryOf(p.kv_segment_ids.batch, b) * p.seqlen_kv;
  bool is_start, falls;
  RunFlags(p, entry, chunk * kRunChunk + threadIdx.x, is_start, falls);
  const int runs = __syncthreads_count(is_start);
  const int any_fall = __syncthreads_or(falls);
  if (threadIdx.x == 0) {
    p.chunk_runs[blockIdx.x] = runs;
    p.chunk_sorted[blockIdx.x] = !any_fall;
  }
}

__global__ void __launch_bounds__(kRunChunk) ListRuns(const __grid_constant__ RunParams p) {
  __shared__ int warp_sums[kRunChunk / 32];
  __shared__ int before;
  const int b = blockIdx.x / p.num_chunks, chunk = blockIdx.x % p.num_chunks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t entry = EntryOf(p.kv_segment_ids.batch, b) * p.seqlen_kv;
  if (threadIdx.x == 0) before = 0;
  __syncthreads();
  for (int c = threadIdx.x; c < chunk; c += kRunChunk)
    atomicAdd(&before, p.chunk_runs[b * p.num_chunks + c]);
  const int j = chunk * kRunChunk + threadIdx.x;
  bool is_start, falls;
  RunFlags(p, entry, j, is_start, falls);
  const unsigned starts = __ballot_sync(0xffffffff, is_start);
  if (lane == 0) warp_sums[warp] = __popc(starts);
  __syncthreads();
  int at = before + __popc(starts & ((1u << lane) - 1));
  for (int w = 0; w < warp; ++w) at += warp_sums[w];
  int* run_start = p.run_start + static_cast<int64_t>(b) * (p.seqlen_kv + 1);
  if (is_start) {
    run_start[at] = j;
    p.run_id[static_cast<int64_t>(b) * p.seqlen_kv + at] = ReadInt(p.kv_segment_ids, entry + j);
  }
  if (j == p.seqlen_kv - 1) run_start[at + is_start] = p.seqlen_kv;
}

// One block per kPlanRows query rows.
__global__ void __launch_bounds__(128) PlanRows(const __grid_constant__ RunParams p) {
  __shared__ int num_runs, is_sorted;
  __shared__ int head_row[kPlanRows], num_heads;
  __shared__ int head_lo[kPlanRows], head_hi[kPlanRows], head_matches[kPlanRows];
  __shared__ PlanBlock block;
  const int b = blockIdx.x / p.num_plan_blocks, first = blockIdx.x % p.num_plan_blocks * kPlanRows;
  const int num_rows = min(kPlanRows, p.seqlen_q - first);
  const int64_t entry = EntryOf(p.q_segment_ids.batch, b) * p.seqlen_q + first;
  const int* run_start = p.run_start + static_cast<int64_t>(b) * (p.seqlen_kv + 1);
  const int64_t* run_id = p.run_id + static_cast<int64_t>(b) * p.seqlen_kv;
  if (threadIdx.x == 0) {
    num_runs = 0;
    is_sorted = 1;
    num_heads = 0;
    block = {kFar, 0, 0, kFar, 0};
  }
  __syncthreads();
  for (int c = threadIdx.x; c < p.num_chunks; c += blockDim.x) {
    atomicAdd(&num_runs, p.chunk_runs[b * p.num_chunks + c]);
    if (!p.chunk_sorted[b * p.num_chunks + c]) atomicAnd(&is_sorted, 0);
  }
  // Heads: rows whose id differs from that of the row before; the others copy them.
  __shared__ int head_of[kPlanRows];
  if (threadIdx.x < 32) {
    int count = 0;
    for (int base = 0; base < kPlanRows; base += 32) {
      const int i = base + threadIdx.x;
      const bool is_head = i < num_rows && (i == 0 || ReadInt(p.q_segment_ids, entry + i) !=
                                                          ReadInt(p.q_segment_ids, entry + i - 1));
      const unsigned heads = __ballot_sync(0xffffffff, is_head);
      const int at = count + __popc(heads & (0xffffffffu >> (31 - threadIdx.x))) - 1;
      head_of[i] = at;
      if (is_head) {
        head_row[at] = i;
        head_lo[at] = kFar;
        head_hi[at] = 0;
        head_matches[at] = 0;
      }
      count += __popc(heads);
    }
    if (threadIdx.x == 0) num_heads = count;
  }
  __syncthreads();
  if (is_sorted) {
    for (int h = threadIdx.x; h < num_heads; h += blockDim.x) {
      const int64_t id = ReadInt(p.q_segment_ids, entry + head_row[h]);
      int lo = 0, hi = num_runs;  // first run whose id is not below
      while (lo < hi) {
        const int mid = (lo + hi) / 2;
        if (run_id[mid] < id) {
          lo = mid + 1;
        } else {
          hi = mid;
        }
      }
      if (lo < num_runs && run_id[lo] == id) {
        head_lo[h] = run_start[lo];
        head_hi[h] = run_start[lo + 1];
        head_matches[h] = 1;
      }
    }
  } else {
    for (int h = 0; h < num_heads; ++h) {
      const int64_t id = ReadInt(p.q_segment_ids, entry + head_row[h]);
      for (int r = threadIdx.x; r < num_runs; r += blockDim.x) {
        if (run_id[r] == id) {
          atomicMin(&head_lo[h], run_start[r]);
          atomicMax(&head_hi[h], run_start[r + 1]);
          atomicAdd(&head_matches[h], 1);
        }
      }
    }
  }
  __syncthreads();
  if (threadIdx.x < num_rows) {
    const int h = head_of[threadIdx.x];
    const bool is_empty = head_matches[h] == 0;
    const int2 row = is_empty ? make_int2(0, 0) : make_int2(head_lo[h], head_hi[h]);
    p.rows[b * PlanStride(p.seqlen_q) + first + threadIdx.x] = row;
    if (!is_empty) {
      atomicMin(&block.lo_min, row.x);
      atomicMax(&block.hi_max, row.y);
      if (head_matches[h] > 1) atomicOr(&block.is_scattered, 1);
    }
    atomicMax(&block.lo_max, is_empty ? kFar : row.x);
    atomicMin(&block.hi_min, row.y);
  }
  __syncthreads();
  if (threadIdx.x == 0) p.blocks[blockIdx.x] = block;
}

}  // namespace

cudaError_t RunSegmentPlan(const ScoreParams& s, char* memory, cudaStream_t stream,
                           SegmentPlan* plan) {
  RunParams p{};
  p.kv_segment_ids = s.kv_segment_ids;
  p.q_segment_ids = s.q_segment_ids;
  p.batch = s.batch;
  p.seqlen_q = s.seqlen_q;
  p.seqlen_kv = s.seqlen_kv;
  p.num_chunks = static_cast<int>(CeilDiv(s.seqlen_kv, kRunChunk));
  p.num_plan_blocks = static_cast<int>(CeilDiv(s.seqlen_q, kPlanRows));
  auto take = [&memory](int64_t bytes) {
    char* at = memory;
    memory += RoundUp(bytes, 16);
    return at;
  };
  const int64_t batch = s.batch;
  p.run_id = reinterpret_cast<int64_t*>(take(batch * 8 * s.seqlen_kv));
  p.rows = reinterpret_cast<int2*>(take(batch * 8 * PlanStride(s.seqlen_q)));
  p.run_start = reinterpret_cast<int*>(take(batch * 4 * (s.seqlen_kv + 1)));
  p.chunk_runs = reinterpret_cast<int*>(take(batch * 4 * p.num_chunks));
  p.chunk_sorted = reinterpret_cast<int*>(take(batch * 4 * p.num_chunks));
  p.blocks =
      reinterpret_cast<PlanBlock*>(take(batch * p.num_plan_blocks * int64_t{sizeof(PlanBlock)}));
  CountRuns<<<s.batch * p.num_chunks, kRunChunk, 0, stream>>>(p);
  ListRuns<<<s.batch * p.num_chunks, kRunChunk, 0, stream>>>(p);
  PlanRows<<<s.batch * p.num_plan_blocks, 128, 0, stream>>>(p);
  plan->rows = p.rows;
  plan->blocks = p.blocks;
  return cudaGetLastError();
}

}  // namespace jax_fmha::gpu
