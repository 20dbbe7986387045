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

#include "../layout.h"
#include "hopper.cuh"

namespace kvplug {

constexpr int kMostGroup = 8;  // query heads of a KV head
constexpr int kPlanThreads = 1024;
constexpr int kLeastPages = 8;  // of a part, so that no warp is idle
constexpr int kAtom = 128;      // bytes that the copy engine swizzles as one row
constexpr int kMostShared = 227 * 1024;
constexpr int kMostStages = 8;  // pages of a warp on their way; more than memory's latency can use
constexpr int kMostTurns = 16;

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

struct DecodeArgs {
  void* out;
  const void* query;
  const int* directory;
  const int* chunks;
  const int* row_slot;
  const int* lengths;
  const Part* parts;    // this layer's
  const int* starts;    // this layer's
  float* partial;       // [2 * blocks, group, D]: of a part's first head, and of another that goes on behind it
  float2* sums;         // [2 * blocks, group]: largest score and sum of exponentials
  int* arrived;         // [items], blocks that are done with an item; zero between launches
  const float* scales;  // [2, heads] of K and V that are stored as e4m3; null otherwise
  int64_t out_row, out_head, query_row, query_head;  // strides in elements
  int64_t directory_slot, directory_head, chunk_stride, lengths_stride;
  int rows, heads, group, first_head;
  float scale;  // of the scores, times log2(e)
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

// How pages of head size D lie in shared memory: boxes of 128 bytes by 16 tokens, in which the copy engine exchanges
// 16-byte pieces of a row so that the same piece of eight rows lies in eight different banks.
template <int D, bool kFp8>
struct PageLayout {
  static constexpr int kWarps = D > 128 ? 4 : 8;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kBytes = kPageTokens * 2 * D * (kFp8 ? 1 : 2);
  static constexpr int kValuePiece = D * (kFp8 ? 1 : 2) / 16;  // the first 16-byte piece of V in a row
  static constexpr int kPitch = D + 4;                         // floats of a head's result, padded against conflicts

  // Floats of the results of warps, [warps, group, kPitch], or of the turns that threads take with blocks: at least
  // one of [group, D], and one of every four dims a thread.
  __host__ __device__ static constexpr int results(int group) {
    const int of_warps = kWarps * group * kPitch, of_turns = group * D > 4 * kThreads ? group * D : 4 * kThreads;
    return of_warps > of_turns ? of_warps : of_turns;
  }

  // Bytes behind the pages: results, sums [warps or turns, 8], barriers [warps, stages], and a flag.
  __host__ __device__ static constexpr int fixed(int group) {
    return 4 * results(group) + 8 * (kMostTurns * kMostGroup + kWarps * kMostStages) + 16;
  }

  __host__ __device__ static constexpr int stages(int group) {  // 1,023 bytes may be lost to alignment
    const int fit = (kMostShared - 1024 - fixed(group)) / kBytes / kWarps;
    return fit < kMostStages ? fit : kMostStages;
  }

  static constexpr int shared(int group) { return 1024 + kWarps * stages(group) * kBytes + fixed(group); }

  static_assert(stages(kMostGroup) >= 2);

  // Address of 16-byte piece `piece` of token `row`.
  __device__ static uint32_t address(uint32_t page, int row, int piece) {
    return page + (piece / 8) * (kPageTokens * kAtom) + row * kAtom + (((piece % 8) ^ (row % 8)) << 4);
  }
};

// What a block works through: heads one after another, each with a run of pages.
struct Segments {
  const DecodeArgs& args;
  int item, first, left, slot, length, begin, end;
  int base = 0, pages = 0;  // of the part before this run, and of the run

  __device__ Segments(const DecodeArgs& a, const Part& part)
      : args(a),
        item(part.item),
        first(part.first),
        left(part.pages),
        slot(part.slot),
        length(part.length),
        begin(part.begin),
        end(part.end) {}

  __device__ int head() const { return args.first_head + item % args.heads; }

  // Goes on to the next run of pages; false at the end.
  __device__ bool next() {
    if (left == 0) return false;
    base += pages;
    if (pages > 0) {
      first = 0;
      do {
        ++item;
        begin = end;
        end = args.starts[item + 1];
        slot = args.row_slot[item / args.heads];
        length = slot < 0 ? 0 : args.lengths[slot * args.lengths_stride + head()];
      } while (begin == end);
    }
    pages = min(end - begin - first, left);
    left -= pages;
    return true;
  }
};

// Keeps one warp's pages coming: every kWarps-th of the part.
template <int D, bool kFp8>
struct Fetcher {
  using Layout = PageLayout<D, kFp8>;
  const DecodeArgs& args;
  const CUtensorMap* map;
  Segments segments;
  int next;         // the warp's next page of the part
  int id, used = 32;  // of 32 pages of the warp, one a lane; how many of these are under way

  __device__ Fetcher(const DecodeArgs& a, const CUtensorMap* m, const Part& part)
      : args(a), map(m), segments(a, part), next(threadIdx.x / 32) {}

  // Has the warp's next page copied to `target`, if there is one.
  __device__ void fetch(uint32_t target, uint32_t barrier) {
    if (!look_ahead()) return;
    const int token = __shfl_sync(~0u, id, used) * kPageTokens;
    if (threadIdx.x % 32 == 0) {
      barrier_arrive_expecting(barrier, Layout::kBytes);
      copy_box(target, map, 0, token, 0, barrier);
    }
    ++used;
    next += Layout::kWarps;
  }

  // Makes sure of the next page's id; false if there is no next page.
  __device__ bool look_ahead() {
    while (next >= segments.base + segments.pages) {
      if (!segments.next()) return false;
      used = 32;
    }
    if (used == 32) look_up();
    return true;
  }

  __device__ void look_up() {
    const int page = segments.first + next - segments.base + Layout::kWarps * (threadIdx.x % 32);
    id = 0;
    if (page < segments.first + segments.pages) {
      const int* of_head =
          args.directory + segments.slot * args.directory_slot + segments.head() * args.directory_head;
      id = args.chunks[of_head[page / kChunkPages] * args.chunk_stride + page % kChunkPages];
    }
    used = 0;
  }
};

// Queries of one KV head as the right side of K Q^T: [D / 16] fragments of [16 dims, 8 heads].
template <typename T, int D, bool kFp8>
__device__ void load_query(uint32_t (&fragments)[D / 16][2], const DecodeArgs& args, int row, int kv_head) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const T* query = static_cast<const T*>(args.query) + row * args.query_row +
                   (static_cast<int64_t>(kv_head) * args.group + g) * args.query_head;
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
};

// Results of the warps of a block, or of several blocks, put together. A thread takes four dims of a query head.
template <typename T, int D, bool kFp8>
struct Gather {
  using Layout = PageLayout<D, kFp8>;
  static constexpr int kQuads = D / 4;
  const DecodeArgs& args;
  float* results;  // in shared memory: [warps, group, kPitch], or [turns, group, D]
  float2* sums;    // [warps or turns, 8]
  int* last;       // whether this block is the last to finish an item

  // After all warps have stored: finishes a head that lies in this part alone, or leaves its partial result.
  __device__ void finish(const Segments& segment, int share) const {
    const int first_block = segment.begin / share, blocks = (segment.end - 1) / share - first_block + 1;
    const int64_t place = (2 * blockIdx.x + (segment.base > 0)) * static_cast<int64_t>(args.group);
    for (int quad = threadIdx.x; quad < args.group * kQuads; quad += Layout::kThreads) {
      const int head = quad / kQuads, dim = quad % kQuads * 4;
      Sums of_block;
#pragma unroll
      for (int warp = 0; warp < Layout::kWarps; ++warp) {
        of_block.add(sums[warp * kMostGroup + head],
                     *reinterpret_cast<float4*>(&results[(warp * args.group + head) * Layout::kPitch + dim]));
      }
      if (blocks == 1) {
        write(segment.item, head, dim, of_block);
      } else {
        *reinterpret_cast<float4*>(&args.partial[(place + head) * D + dim]) = of_block.value;
        if (dim == 0) args.sums[place + head] = make_float2(of_block.peak, of_block.total);
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

  // The partial results of all blocks that share an item; the first has it at the begin of its part, or not. Threads
  // beyond one for every four dims take turns with the blocks.
  __device__ void combine(int item, int first_block, int blocks, bool at_begin) const {
    const int quads = args.group * kQuads, turns = min(max(Layout::kThreads / quads, 1), kMostTurns);
    const int turn = threadIdx.x / quads;
    for (int quad = threadIdx.x % quads; turn < turns && quad < quads; quad += Layout::kThreads) {
      const int head = quad / kQuads, dim = quad % kQuads * 4;
      Sums of_turn;
#pragma unroll 8
      for (int block = turn; block < blocks; block += turns) {
        const int64_t place = (2 * (first_block + block) + (block == 0 && !at_begin)) * static_cast<int64_t>(args.group);
        of_turn.add(__ldcg(&args.sums[place + head]),
                    __ldcg(reinterpret_cast<const float4*>(&args.partial[(place + head) * D + dim])));
      }
      *reinterpret_cast<float4*>(&results[(turn * args.group + head) * D + dim]) = of_turn.value;
      if (dim == 0) sums[turn * kMostGroup + head] = make_float2(of_turn.peak, of_turn.total);
    }
    __syncthreads();
    for (int quad = threadIdx.x; quad < quads; quad += Layout::kThreads) {
      const int head = quad / kQuads, dim = quad % kQuads * 4;
      Sums all;
      for (int i = 0; i < turns; ++i) {
        all.add(sums[i * kMostGroup + head], *reinterpret_cast<float4*>(&results[(i * args.group + head) * D + dim]));
      }
      write(item, head, dim, all);
    }
  }

  __device__ void write(int item, int group_head, int dim, const Sums& found) const {
    const int kv_head = item % args.heads;
    const float factor = args.scales ? args.scales[args.heads + kv_head] : 1.f;
    const float values[4] = {found.value.x, found.value.y, found.value.z, found.value.w};
    T* out = static_cast<T*>(args.out) + item / args.heads * args.out_row +
             (static_cast<int64_t>(kv_head) * args.group + group_head) * args.out_head + dim;
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = narrow<T>(values[i] / found.total * factor);
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
  // Plan and tables were settled before the previous kernel began; pages, queries and results belong to it until it ends.
  const Part part = args.parts[blockIdx.x];
  Fetcher<D, kFp8> fetcher(args, &map, part);
  fetcher.look_ahead();
  EmptyItems<T, D> empty(args);
  wait_for_previous_kernel();
  for (int stage = 0; stage < stages; ++stage) fetcher.fetch(pages + stage * Layout::kBytes, full + 8 * stage);
  empty.fill();
  Segments segment(args, part);
  int mine = warp, stage = 0;
  uint32_t parity = 0;
  while (segment.next()) {
    uint32_t query[D / 16][2];
    const int kv_head = segment.item % args.heads;
    load_query<T, D, kFp8>(query, args, segment.item / args.heads, kv_head);
    const float scale = args.scales ? args.scale * args.scales[kv_head] : args.scale;
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
  }
#else
  __trap();
#endif
}

}  // namespace kvplug
