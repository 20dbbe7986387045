// Rows between device memory and a pool, in pinned host memory, which the kernel reads or writes itself, or on the device:
// rows of one token and head are too small for a copy engine. Free of torch headers.
#pragma once

#include <cuda_runtime.h>

#include <cassert>
#include <cstdint>

namespace kvplug {

constexpr int kRowWarps = 8;
constexpr int kMostHostBlocks = 16;  // of a launch: they fill the bus, and leave the model that runs beside them the rest
constexpr int kRowsAhead = 8;        // of a warp, on their way at once

struct RowsArgs {
  char* pool;
  char* dense;
  const int64_t* rows;  // of the pool
  int64_t count, pool_rows, bytes;
  bool on_host;  // the pool
};

// Gathers rows of the pool, or scatters to them. A warp reads kRowsAhead rows before it writes them.
template <typename Vec, bool kGather>
__global__ void __launch_bounds__(32 * kRowWarps) rows_kernel(RowsArgs args) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kRowWarps;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  for (int64_t first = warp * kRowsAhead; first < args.count; first += warps * kRowsAhead) {
    const int some = static_cast<int>(min(args.count - first, static_cast<int64_t>(kRowsAhead)));
    const int64_t mine = lane < some ? args.rows[first + lane] : 0;
    assert(mine >= 0 && mine < args.pool_rows);
    int64_t rows[kRowsAhead];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) rows[i] = __shfl_sync(~0u, mine, i);
    for (int64_t byte = lane * sizeof(Vec); byte < args.bytes; byte += 32 * sizeof(Vec)) {
      char *in_pool = args.pool + byte, *in_dense = args.dense + first * args.bytes + byte;
      Vec held[kRowsAhead];
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i) {
        if (i < some) {
          held[i] = *reinterpret_cast<const Vec*>(kGather ? in_pool + rows[i] * args.bytes : in_dense + i * args.bytes);
        }
      }
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i) {
        if (i < some) {
          *reinterpret_cast<Vec*>(kGather ? in_dense + i * args.bytes : in_pool + rows[i] * args.bytes) = held[i];
        }
      }
    }
  }
}

template <typename Vec, bool kGather>
cudaError_t launch_rows_of(const RowsArgs& args, cudaStream_t stream) {
  const int64_t per_block = kRowWarps * kRowsAhead, blocks = (args.count + per_block - 1) / per_block;
  const unsigned grid = static_cast<unsigned>(args.on_host && blocks > kMostHostBlocks ? kMostHostBlocks : blocks);
  rows_kernel<Vec, kGather><<<grid, 32 * kRowWarps, 0, stream>>>(args);
  return cudaGetLastError();
}

// As rows_kernel, of rows of one number, of which a warp would use one lane: a thread takes a row.
template <bool kGather>
__global__ void __launch_bounds__(32 * kRowWarps) numbers_kernel(RowsArgs args) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= args.count) return;
  const int64_t row = args.rows[i];
  assert(row >= 0 && row < args.pool_rows);
  uint32_t* in_pool = reinterpret_cast<uint32_t*>(args.pool) + row;
  uint32_t* in_dense = reinterpret_cast<uint32_t*>(args.dense) + i;
  *(kGather ? in_dense : in_pool) = *(kGather ? in_pool : in_dense);
}

// With the widest copies that all addresses allow.
template <bool kGather>
cudaError_t launch_rows(const RowsArgs& args, cudaStream_t stream) {
  if (args.count == 0 || args.bytes == 0) return cudaSuccess;
  const int64_t offsets = reinterpret_cast<int64_t>(args.pool) | reinterpret_cast<int64_t>(args.dense) | args.bytes;
  if (!args.on_host && args.bytes == 4 && offsets % 4 == 0) {
    const unsigned grid = static_cast<unsigned>((args.count + 32 * kRowWarps - 1) / (32 * kRowWarps));
    numbers_kernel<kGather><<<grid, 32 * kRowWarps, 0, stream>>>(args);
    return cudaGetLastError();
  }
  if (offsets % 16 == 0) return launch_rows_of<uint4, kGather>(args, stream);
  if (offsets % 4 == 0) return launch_rows_of<uint32_t, kGather>(args, stream);
  return launch_rows_of<uint8_t, kGather>(args, stream);
}

}  // namespace kvplug
