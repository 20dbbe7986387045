// How decode_attention.cuh gets at its pages: where they lie in shared memory, and who asks for which. Free of torch
// headers.
#pragma once

#include "decode_plan.cuh"
#include "hopper.cuh"

namespace kvplug {

constexpr int kMostGroup = 8;   // query heads of a KV head
constexpr int kAtom = 128;      // bytes that the copy engine swizzles as one row
constexpr int kMostShared = 227 * 1024;
constexpr int kMostStages = 8;  // pages of a warp on their way; more than memory's latency can use
constexpr int kMostBlocks = 256;  // of a launch

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
  const float* scales;  // [2, heads] of K and V that are stored as e4m3; null if they are 1
  int64_t out_row, out_head, query_row, query_head;  // strides in elements
  int64_t directory_slot, directory_head, chunk_stride, lengths_stride;
  int rows, heads, group, first_head;
  float scale;  // of the scores, times log2(e)
};

// How pages of head size D lie in shared memory: boxes of 128 bytes by 16 tokens, in which the copy engine exchanges
// 16-byte pieces of a row so that the same piece of eight rows lies in eight different banks.
template <int D, bool kFp8>
struct PageLayout {
  static constexpr int kBytes = kPageTokens * 2 * D * (kFp8 ? 1 : 2);
  // A warp's pages follow each other: of small pages, whose bytes arrive sooner, more must be at work at once.
  static constexpr int kWarps = kBytes > 8192 ? 4 : kBytes > 4096 ? 8 : 16;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kValuePiece = D * (kFp8 ? 1 : 2) / 16;  // the first 16-byte piece of V in a row
  static constexpr int kPitch = D + 4;                         // floats of a head's result, padded against conflicts

  // Floats of the results of warps, [warps, group, kPitch], or of weights of blocks and the turns that threads take with
  // these: at least one of [group, D], and at most four dims a thread.
  __host__ __device__ static constexpr int results(int group) {
    const int of_warps = kWarps * group * kPitch, of_turns = group * D > 4 * kThreads ? group * D : 4 * kThreads;
    return of_warps > of_turns + kMostBlocks * group ? of_warps : of_turns + kMostBlocks * group;
  }

  // Bytes behind the pages: results, sums [warps, 8], barriers [warps, stages], and a flag.
  __host__ __device__ static constexpr int fixed(int group) {
    return 4 * results(group) + 8 * kWarps * (kMostGroup + kMostStages) + 16;
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

  // Has the warp's first pages brought into the second-level cache. What another kernel writes to them meanwhile is written
  // there, so this may be done before it is over.
  __device__ void prefetch(int pages) {
    const int ahead = threadIdx.x % 32;
    if (look_ahead() && ahead < pages && next + Layout::kWarps * ahead < segments.base + segments.pages) {
      prefetch_box(map, 0, id * kPageTokens, 0);
    }
  }

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

}  // namespace kvplug
