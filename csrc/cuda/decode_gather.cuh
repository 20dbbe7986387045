// How decode_attention.cuh puts together what warps and blocks have found for one head. Free of torch headers.
#pragma once

#include "decode_pages.cuh"

namespace kvplug {

// Softmax sums of two parts, put together: the largest score, the sum of exponentials, and weighted values.
struct Sums {
  float peak = -INFINITY, total = 0.f;
  float4 value = {};

  __device__ void add(float2 sums, float4 other) {
    const float most = fmaxf(peak, sums.x), shift = most == -INFINITY ? 0.f : most;
    const float mine = exp2f(peak - shift), theirs = exp2f(sums.x - shift);
    peak = most;
    total = total * mine + sums.y * theirs;
    value.x = value.x * mine + other.x * theirs;
    value.y = value.y * mine + other.y * theirs;
    value.z = value.z * mine + other.z * theirs;
    value.w = value.w * mine + other.w * theirs;
  }

  __device__ float4 mean() const { return {value.x / total, value.y / total, value.z / total, value.w / total}; }
};

// Results of the warps of a block, or of several blocks, put together. A thread takes four dims of a query head.
template <typename T, int D, bool kFp8>
struct Gather {
  using Layout = PageLayout<D, kFp8>;
  static constexpr int kQuads = D / 4;
  static constexpr int kAhead = Layout::kThreads > 256 ? 16 : 32;  // partial results of a thread on their way
  const DecodeArgs& args;
  float* results;  // in shared memory: [warps, group, kPitch], or weights of blocks and [turns, group, D]
  float2* sums;    // [warps, 8]
  int* last;       // whether this block is the last to finish an item

  // After all warps have stored: finishes a head that lies in this part alone, or leaves its partial result.
  __device__ void finish(const Segments& segment, int share) const {
    const int first_block = segment.begin / share, blocks = (segment.end - 1) / share - first_block + 1;
    const int64_t mine = (2 * blockIdx.x + (segment.base > 0)) * static_cast<int64_t>(args.group);
    for (int quad = threadIdx.x; quad < args.group * kQuads; quad += Layout::kThreads) {
      const int head = quad / kQuads, dim = quad % kQuads * 4;
      Sums of_block;
#pragma unroll
      for (int warp = 0; warp < Layout::kWarps; ++warp) {
        of_block.add(sums[warp * kMostGroup + head],
                     *reinterpret_cast<float4*>(&results[(warp * args.group + head) * Layout::kPitch + dim]));
      }
      if (blocks == 1) {
        write(segment.item, head, dim, of_block.mean());
      } else {
        *reinterpret_cast<float4*>(&args.partial[(mine + head) * D + dim]) = of_block.value;
        if (dim == 0) args.sums[mine + head] = make_float2(of_block.peak, of_block.total);
      }
    }
    if (blocks == 1) return;
    __syncthreads();
    if (threadIdx.x == 0) *last = add_in_order(&args.arrived[segment.item], 1) == blocks - 1;
    __syncthreads();
    if (*last) {
      combine(segment.item, first_block, blocks, segment.begin % share == 0);
      if (threadIdx.x == 0) args.arrived[segment.item] = 0;
    }
  }

  // The partial results of all blocks that share an item; the first has it at the begin of its part, or not. This block
  // reads them all by itself, so many loads must be on their way at once: weights come first, and no load is behind a
  // branch, which compilers keep in order. Threads beyond one for every four dims take turns with the blocks.
  __device__ void combine(int item, int first_block, int blocks, bool at_begin) const {
    const int quads = args.group * kQuads, turns = max(Layout::kThreads / quads, 1), turn = threadIdx.x / quads;
    const float* weights = results;                       // [blocks, group]
    float* of_turns = results + kMostBlocks * args.group;  // [turns, group, D]
    weigh(first_block, blocks, at_begin);
    for (int quad = threadIdx.x % quads; turn < turns && quad < quads; quad += Layout::kThreads) {
      const int head = quad / kQuads;
      const float* values = args.partial + head * D + quad % kQuads * 4;
      float4 sum = {};
      for (int first = turn; first < blocks; first += kAhead * turns) {
        float4 found[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int block = min(first + i * turns, blocks - 1);
          found[i] = __ldcg(reinterpret_cast<const float4*>(values + place(first_block, block, at_begin) * D));
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int block = first + i * turns;
          if (block < blocks) add(sum, weights[block * args.group + head], found[i]);
        }
      }
      *reinterpret_cast<float4*>(&of_turns[(turn * quads + quad) * 4]) = sum;
    }
    __syncthreads();
    for (int quad = threadIdx.x; quad < quads; quad += Layout::kThreads) {
      float4 all = {};
      for (int i = 0; i < turns; ++i) add(all, 1.f, *reinterpret_cast<float4*>(&of_turns[(i * quads + quad) * 4]));
      write(item, quad / kQuads, quad % kQuads * 4, all);
    }
  }

  // What each block's values count for in the whole, [blocks, group] in `results`. A warp takes a head, a lane every
  // 32nd block.
  __device__ void weigh(int first_block, int blocks, bool at_begin) const {
    constexpr int kEach = kMostBlocks / 32;
    const int lane = threadIdx.x % 32;
    for (int head = threadIdx.x / 32; head < args.group; head += Layout::kWarps) {
      float2 found[kEach];
      float most = -INFINITY, total = 0.f;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int block = lane + 32 * i;
        found[i] = block < blocks ? __ldcg(&args.sums[place(first_block, block, at_begin) + head])
                                  : make_float2(-INFINITY, 0.f);
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) most = fmaxf(most, found[i].x);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
      const float shift = most == -INFINITY ? 0.f : most;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        found[i].x = exp2f(found[i].x - shift);
        total += found[i].x * found[i].y;
      }
#pragma unroll
      for (int step = 1; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (lane + 32 * i < blocks) results[(lane + 32 * i) * args.group + head] = found[i].x / total;
      }
    }
    __syncthreads();
  }

  // Where the `block`-th of the blocks that share an item has left what it found, in rows of `partial` and `sums`.
  __device__ int64_t place(int first_block, int block, bool at_begin) const {
    return (2 * (first_block + block) + (block == 0 && !at_begin)) * static_cast<int64_t>(args.group);
  }

  __device__ static void add(float4& sum, float weight, float4 value) {
    sum.x += weight * value.x;
    sum.y += weight * value.y;
    sum.z += weight * value.z;
    sum.w += weight * value.w;
  }

  __device__ void write(int item, int group_head, int dim, float4 found) const {
    const int kv_head = item % args.heads;
    const float factor = args.scales ? args.scales[args.heads + kv_head] : 1.f;
    const float values[4] = {found.x, found.y, found.z, found.w};
    T* out = static_cast<T*>(args.out) + item / args.heads * args.out_row +
             (static_cast<int64_t>(kv_head) * args.group + group_head) * args.out_head + dim;
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = narrow<T>(values[i] * factor);
  }
};

// Items that store nothing, padding rows among them, lie in no part: their results are zeros. Warps take turns.
template <typename T, int D>
struct EmptyItems {
  const DecodeArgs& args;
  int item;
  bool empty;

  // Looks at the warp's first item; one is all that most launches have for a warp.
  __device__ explicit EmptyItems(const DecodeArgs& a)
      : args(a), item(blockIdx.x + gridDim.x * (threadIdx.x / 32)), empty(is_empty()) {}

  __device__ bool is_empty() const {
    return item < args.rows * args.heads && args.starts[item] == args.starts[item + 1];
  }

  __device__ void fill() {
    while (item < args.rows * args.heads) {
      if (empty) {
        T* out = static_cast<T*>(args.out) + item / args.heads * args.out_row +
                 static_cast<int64_t>(item % args.heads) * args.group * args.out_head;
        for (int i = threadIdx.x % 32; i < args.group * D; i += 32) {
          out[i / D * args.out_head + i % D] = narrow<T>(0.f);
        }
      }
      item += gridDim.x * (blockDim.x / 32);
      empty = is_empty();
    }
  }
};

}  // namespace kvplug
