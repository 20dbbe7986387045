// Decode attention over head pages on sm_90: one query token per row, each KV head with a length of its own.
//
//   plan     once per step, for all layers: the pages of all (row, KV head) in a line, cut into equal parts, one for
//            every multiprocessor
//   attend   one block a part, whose warps take turns with the pages. A warp has several pages on their way through
//            the copy engine. A head that lies in several parts is put together by whichever block finishes it last.
//
// Scores are computed as K Q^T and the result as V^T P^T, so that the 16 tokens of a page fill the matrix
// instruction's long side and up to 8 query heads its short one. Grids depend on nothing that lies on the device, and
// nothing is read back: a captured graph stays right when lengths and tables change. Free of torch headers.
#pragma once

#include <type_traits>

#include "decode_gather.cuh"

namespace kvplug {

// Queries of one KV head as the right side of K Q^T: [D / 16] fragments of [16 dims, 8 heads].
template <typename T, int D, bool kFp8>
__device__ void load_query(uint32_t (&fragments)[D / 16][2], const DecodeArgs& args, int item) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const T* query = static_cast<const T*>(args.query) + item / args.heads * args.query_row +
                   (static_cast<int64_t>(item % args.heads) * args.group + g) * args.query_head;
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // A thread's two pairs of dims: 8 apart where matrices hold one dim per element, side by side where they hold two.
      const int dim = 16 * step + (kFp8 ? 4 * t + 2 * half : 2 * t + 8 * half);
      uint32_t pair = g < args.group ? *reinterpret_cast<const uint32_t*>(query + dim) : 0;
      if constexpr (kFp8 && std::is_same_v<T, __nv_bfloat16>) {  // products with e4m3 are computed in half precision
        const float2 wide = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
        pair = pack<__half>(wide.x, wide.y);
      }
      fragments[step][half] = pair;
    }
  }
}

// One warp's share of a head: result transposed, [D / 16] fragments of [16 dims, 8 heads], of which a thread holds two
// heads; their largest scores, and sums of exponentials over the thread's tokens.
template <typename T, int D, bool kFp8>
struct Accumulator {
  using Layout = PageLayout<D, kFp8>;
  using M = std::conditional_t<kFp8, __half, T>;  // of the matrix products
  float result[D / 16][4], peak[2], sum[2];

  __device__ Accumulator() : result{}, peak{-INFINITY, -INFINITY}, sum{} {}

  // Scores of a page's 16 tokens against 8 heads: c0, c1 of token lane / 4, c2, c3 of the one 8 below.
  __device__ static void scores(float (&c)[4], uint32_t page, const uint32_t (&query)[D / 16][2]) {
    const int row = threadIdx.x % 8 + (threadIdx.x / 8 % 2) * 8, half = threadIdx.x / 16 % 2;
    float even[4] = {}, odd[4] = {};
    if constexpr (kFp8) {
#pragma unroll
      for (int step = 0; step < D / 16; step += 2) {
        uint32_t codes[4];
        load_matrices<false>(codes, Layout::address(page, row, step + half));
        const uint32_t a[4] = {unpack_e4m3(codes[0]), unpack_e4m3(codes[1]), unpack_e4m3(codes[0] >> 16),
                               unpack_e4m3(codes[1] >> 16)};
        const uint32_t b[4] = {unpack_e4m3(codes[2]), unpack_e4m3(codes[3]), unpack_e4m3(codes[2] >> 16),
                               unpack_e4m3(codes[3] >> 16)};
        multiply_add<M>(even, a, query[step]);
        multiply_add<M>(odd, b, query[step + 1]);
      }
    } else {
#pragma unroll
      for (int step = 0; step < D / 16; step += 2) {
        uint32_t a[4], b[4];
        load_matrices<false>(a, Layout::address(page, row, 2 * step + half));
        load_matrices<false>(b, Layout::address(page, row, 2 * step + 2 + half));
        multiply_add<M>(even, a, query[step]);
        multiply_add<M>(odd, b, query[step + 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = even[i] + odd[i];
  }

  // Adds V^T P^T; rows of V that hold no token are taken for zeros, whatever lies there.
  __device__ void add_values(uint32_t page, const uint32_t (&high)[2], const uint32_t (&low)[2], int tokens) {
    const int r = threadIdx.x % 8, i = threadIdx.x / 8 % 4;
    const int row = r + (i / 2) * 8, half = i % 2, first = 2 * (threadIdx.x % 4);
    const uint32_t keep[2] = {pair_mask(tokens - first), pair_mask(tokens - first - 8)};
#pragma unroll
    for (int tile = 0; tile < D / 16; tile += kFp8 ? 2 : 1) {
      uint32_t loaded[4];
      load_matrices<true>(loaded, Layout::address(page, row, Layout::kValuePiece + (kFp8 ? tile : 2 * tile) + half));
      if constexpr (kFp8) {
#pragma unroll
        for (int next = 0; next < 2; ++next) {
          const uint32_t below = loaded[next], above = loaded[next + 2];  // tokens 0-7 and 8-15
          // Bytes are (token, dim), (token, dim + 1), (token + 1, dim), (token + 1, dim + 1).
          const uint32_t a[4] = {unpack_e4m3(__byte_perm(below, 0, 0x20)) & keep[0],
                                 unpack_e4m3(__byte_perm(below, 0, 0x31)) & keep[0],
                                 unpack_e4m3(__byte_perm(above, 0, 0x20)) & keep[1],
                                 unpack_e4m3(__byte_perm(above, 0, 0x31)) & keep[1]};
          multiply_add<M>(result[tile + next], a, high);
        }
      } else {
        const uint32_t a[4] = {loaded[0] & keep[0], loaded[1] & keep[0], loaded[2] & keep[1], loaded[3] & keep[1]};
        multiply_add<M>(result[tile], a, high);
        if constexpr (std::is_same_v<M, __nv_bfloat16>) multiply_add<M>(result[tile], a, low);
      }
    }
  }

  __device__ static uint32_t pair_mask(int tokens) { return tokens >= 2 ? ~0u : tokens == 1 ? 0xffffu : 0u; }

  // Attends to one page, of which the first `tokens` (1 or more; 16 and more are all) are stored.
  __device__ void add(uint32_t page, const uint32_t (&query)[D / 16][2], int tokens, float scale) {
    float c[4];
    scores(c, page, query);
    const int token = threadIdx.x % 32 / 4;
    float weights[4];
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      const float upper = token < tokens ? c[head] * scale : -INFINITY;
      const float lower = token + 8 < tokens ? c[head + 2] * scale : -INFINITY;
      float most = fmaxf(upper, lower);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
      most = fmaxf(most, peak[head]);
      // Where all scores are -inf so far, weights are 0 and not NaN: another page may hold finite ones.
      const float shift = most == -INFINITY ? 0.f : most;
      const float decay = exp2f(peak[head] - shift);
      weights[head] = exp2f(upper - shift);
      weights[head + 2] = exp2f(lower - shift);
      peak[head] = most;
      sum[head] = sum[head] * decay + weights[head] + weights[head + 2];
#pragma unroll
      for (int tile = 0; tile < D / 16; ++tile) {
        result[tile][head] *= decay;
        result[tile][head + 2] *= decay;
      }
    }
    uint32_t high[2], low[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float a = weights[2 * half], b = weights[2 * half + 1];
      const uint32_t packed = pack<M>(a, b);
      high[half] = transpose_matrix(packed);
      if constexpr (std::is_same_v<M, __nv_bfloat16>) {
        // A second term holds what rounding the weights loses, so the softmax stays a float32 one.
        const float2 rounded = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&packed));
        low[half] = transpose_matrix(pack<M>(a - rounded.x, b - rounded.y));
      }
    }
    add_values(page, high, low, tokens);
  }

  // Leaves this warp's result in shared memory, [group, kPitch], with the largest score and the sum of each head.
  __device__ void store(float* warp_result, float2* warp_sums, int group) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int head = 0; head < 2; ++head) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum[head] += __shfl_xor_sync(~0u, sum[head], step);
      if (2 * t + head >= group) continue;
      if (g == 0) warp_sums[2 * t + head] = make_float2(peak[head], sum[head]);
#pragma unroll
      for (int tile = 0; tile < D / 16; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int dim = 16 * tile + (kFp8 ? 2 * g + half : g + 8 * half);
          warp_result[(2 * t + head) * Layout::kPitch + dim] = result[tile][head + 2 * half];
        }
      }
    }
  }
};

template <typename T, int D, bool kFp8>
__global__ void __launch_bounds__(PageLayout<D, kFp8>::kThreads, 1)
    decode_attention_kernel(const DecodeArgs args, const __grid_constant__ CUtensorMap map) {
#if __CUDA_ARCH__ >= 900
  using Layout = PageLayout<D, kFp8>;
  extern __shared__ uint8_t raw[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, stages = Layout::stages(args.group);
  uint8_t* shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
  float* results = reinterpret_cast<float*>(shared + Layout::kWarps * stages * Layout::kBytes);
  float2* sums = reinterpret_cast<float2*>(results + Layout::results(args.group));
  uint64_t* barriers = reinterpret_cast<uint64_t*>(sums + Layout::kWarps * kMostGroup);
  const Gather<T, D, kFp8> gather = {args, results, sums, reinterpret_cast<int*>(barriers + Layout::kWarps * stages)};
  const uint32_t pages = shared_address(shared + warp * stages * Layout::kBytes);
  const uint32_t full = shared_address(barriers + warp * stages);
  if (lane < stages) {
    barrier_init(full + 8 * lane, 1);
    fence_barrier_init();
  }
  if (lane == 0) prefetch_map(&map);
  __syncwarp();
  // Plan and tables were settled before the previous kernel began; pages, queries and results belong to it until it ends,
  // but the way of pages to the second-level cache can begin.
  const Part part = args.parts[blockIdx.x];
  Fetcher<D, kFp8> fetcher(args, &map, part);
  EmptyItems<T, D> empty(args);
  fetcher.prefetch(stages);
  wait_for_previous_kernel();
  Segments segment(args, part);
  uint32_t query[D / 16][2];
  bool more = segment.next();
  // Asked for before the pages: behind them it would wait until they all are there.
  if (more) load_query<T, D, kFp8>(query, args, segment.item);
  for (int stage = 0; stage < stages; ++stage) fetcher.fetch(pages + stage * Layout::kBytes, full + 8 * stage);
  empty.fill();
  int mine = warp, stage = 0;
  uint32_t parity = 0;
  while (more) {
    const float scale = args.scales ? args.scale * args.scales[segment.item % args.heads] : args.scale;
    Accumulator<T, D, kFp8> accumulator;
    for (; mine < segment.base + segment.pages; mine += Layout::kWarps) {
      barrier_wait(full + 8 * stage, parity);
      const int tokens = segment.length - (segment.first + mine - segment.base) * kPageTokens;
      accumulator.add(pages + stage * Layout::kBytes, query, tokens, scale);
      __syncwarp();
      fetcher.fetch(pages + stage * Layout::kBytes, full + 8 * stage);
      if (++stage == stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    accumulator.store(results + warp * args.group * Layout::kPitch, sums + warp * kMostGroup, args.group);
    __syncthreads();
    gather.finish(segment, part.share);
    __syncthreads();
    more = segment.next();
    if (more) load_query<T, D, kFp8>(query, args, segment.item);
  }
#else
  __trap();
#endif
}

}  // namespace kvplug
