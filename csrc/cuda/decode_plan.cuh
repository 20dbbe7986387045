// The plan of decode_attention.cuh: the pages of all heads in a line, cut into equal parts. Free of torch headers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../layout.h"

namespace kvplug {

constexpr int kPlanThreads = 1024;
constexpr int kLeastPages = 8;  // of a part; fewer would leave warps idle

// What one block does: `pages` pages of the line, from page `first` of item = (row, KV head) on. share: pages of every
// part but the last. slot, length: of that item. begin, end: where it lies in the line.
struct alignas(16) Part {
  int item, first, pages, share;
  int slot, length, begin, end;
};

struct PlanArgs {
  Part* parts;    // [layers, blocks]
  int* starts;    // [layers, starts_stride]: first page of every item in the line, and the end
  const int* row_slot;
  const int* lengths;
  int64_t starts_stride, lengths_stride;
  int rows, heads, blocks;
};

__global__ void __launch_bounds__(kPlanThreads) decode_plan_kernel(PlanArgs args) {
  __shared__ int warp_sums[32];
  const int layer = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int items = args.rows * args.heads;
  int* starts = args.starts + layer * args.starts_stride;
  int total = 0;
  for (int base = 0; base < items; base += kPlanThreads) {
    const int item = base + threadIdx.x;
    int pages = 0;
    if (item < items) {
      const int64_t slot = args.row_slot[item / args.heads];
      const int head = layer * args.heads + item % args.heads;
      pages = slot < 0 ? 0 : (args.lengths[slot * args.lengths_stride + head] + kPageTokens - 1) / kPageTokens;
    }
    int sum = pages;  // inclusive scan of the block
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(~0u, sum, step);
      sum += lane >= step ? below : 0;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int of_block = 0;
    for (int other = 0; other < 32; ++other) {
      sum += other < warp ? warp_sums[other] : 0;
      of_block += warp_sums[other];
    }
    if (item < items) starts[item] = total + sum - pages;
    total += of_block;
    __syncthreads();
  }
  if (threadIdx.x == 0) starts[items] = total;
  __syncthreads();
  const int share = max((total + args.blocks - 1) / args.blocks, kLeastPages);
  for (int block = threadIdx.x; block < args.blocks; block += kPlanThreads) {
    const int64_t begin = static_cast<int64_t>(block) * share;
    Part part = {0, 0, 0, share, -1, 0, 0, 0};
    if (begin < total) {
      int low = 0, high = items;  // starts[low] <= begin < starts[high]
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (starts[middle] <= begin ? low : high) = middle;
      }
      const int slot = args.row_slot[low / args.heads], head = layer * args.heads + low % args.heads;
      part.item = low;
      part.first = static_cast<int>(begin) - starts[low];
      part.pages = min(share, total - static_cast<int>(begin));
      part.slot = slot;
      part.length = args.lengths[slot * args.lengths_stride + head];
      part.begin = starts[low];
      part.end = starts[low + 1];
    }
    args.parts[static_cast<int64_t>(layer) * args.blocks + block] = part;
  }
}

// Stands between a plan and the attention that reads it before the kernel in front of it is over.
__global__ void settle_kernel() {}

inline cudaError_t launch_decode_plan(const PlanArgs& args, int layers, cudaStream_t stream) {
  decode_plan_kernel<<<layers, kPlanThreads, 0, stream>>>(args);
  settle_kernel<<<1, 1, 0, stream>>>();
  return cudaGetLastError();
}

}  // namespace kvplug
