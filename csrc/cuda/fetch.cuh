// Reads tokens' K and V from pinned host memory by index, decodes them, turns keys to their positions, and stores them
// in pages: one warp a token. Free of torch headers.
//
// How many tokens there are may be known to the device alone, so that a captured graph can fetch as many as a step needs:
// a fixed number of blocks then takes them in turns.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../layout.h"
#include "higgs.cuh"
#include "hopper.cuh"

namespace kvplug {

constexpr int64_t kFetchBlocks = 1024;  // that take tokens in turns

struct FetchArgs {
  void* pool;                // [slots, 2 * dim]
  const uint8_t* rows;       // [num_rows, row_bytes], in pinned host memory
  const int64_t* source;     // [items], -1: nothing to fetch
  const int64_t* position;   // [items]
  const int64_t* dest;       // [items], token slots
  const float* frequencies;  // [half]
  const int* count;          // how many of the items there are; nullptr: all
  int64_t items, num_rows, slots;
  int row_bytes, dim, half;
};

template <typename T, typename P>
__device__ void fetch_store(P* out, float value, float most) {
  if constexpr (sizeof(P) == 1) {
    *reinterpret_cast<__nv_fp8_storage_t*>(out) = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
  } else {
    *out = static_cast<P>(clamp(value, most));
  }
}

// Group: of HIGGS rows, 0 for K and V as they are. T: of K and V; P: of the pool, T or a byte for e4m3.
template <int Group, typename Half, typename T, typename P>
__global__ void __launch_bounds__(kHiggsLanes* kHiggsWarps)
    fetch_kernel(FetchArgs args, const Half* grid, float most) {
  constexpr int kWords = Group ? Group / 4 + 1 : kHiggsMaxGroup * 2 * static_cast<int>(sizeof(T)) / 4;
  constexpr int kValues = Group ? Group : kHiggsMaxGroup;
  __shared__ float vectors[kHiggsCodes * 2];
  __shared__ uint32_t words[kHiggsWarps][kWords];
  __shared__ float keys[kHiggsWarps][kValues];
  const int64_t items = args.count == nullptr ? args.items : min(static_cast<int64_t>(*args.count), args.items);
  if (static_cast<int64_t>(blockIdx.x) * kHiggsWarps >= items) {
    return;
  }
  if constexpr (Group > 0) {
    higgs_load_grid<2>(grid, vectors, nullptr);
  }
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kHiggsWarps;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kHiggsWarps + threadIdx.y; item < items; item += warps) {
    const int64_t source = args.source[item];
    if (source == -1) {
      continue;
    }
    const int64_t dest = args.dest[item];
    if (source < 0 || source >= args.num_rows || dest < 0 || dest >= args.slots) {
      __trap();  // fail loudly: the write would land in somebody else's memory
    }
    // The row crosses the bus once, in whole words side by side.
    uint32_t* row = words[threadIdx.y];
    const auto* host = reinterpret_cast<const uint32_t*>(args.rows + source * args.row_bytes);
    for (int i = threadIdx.x; i < args.row_bytes / 4; i += kHiggsLanes) {
      row[i] = host[i];
    }
    __syncwarp();
    P* out = static_cast<P*>(args.pool) + dest * 2 * args.dim;
    float* key = keys[threadIdx.y];
    if constexpr (Group > 0) {
      const auto* codes = reinterpret_cast<const uint8_t*>(row);
      const auto* scale = reinterpret_cast<const Half*>(codes + Group);
      for (int part = 0; part < 2; ++part) {
        float x[higgs_registers(Group)];
#pragma unroll
        for (int r = 0; r < higgs_registers(Group); ++r) {
          const int i = r * kHiggsLanes + threadIdx.x;
          x[r] = i < Group ? vectors[codes[part * Group / 2 + i / 2] * 2 + i % 2] : 0.0f;
        }
        higgs_hadamard<Group>(x, threadIdx.x);
        const float factor = static_cast<float>(scale[part]) / Group;
#pragma unroll
        for (int r = 0; r < higgs_registers(Group); ++r) {
          const int i = r * kHiggsLanes + threadIdx.x;
          if (i < args.dim && part == 0) {
            key[i] = x[r] * factor;
          } else if (i < args.dim) {
            fetch_store<T>(out + args.dim + i, x[r] * factor, most);
          }
        }
      }
    } else {
      const auto* values = reinterpret_cast<const T*>(row);
      for (int i = threadIdx.x; i < args.dim; i += kHiggsLanes) {
        key[i] = static_cast<float>(values[i]);
        fetch_store<T>(out + args.dim + i, static_cast<float>(values[args.dim + i]), most);
      }
    }
    __syncwarp();
    for (int i = threadIdx.x; i < args.dim; i += kHiggsLanes) {
      float value = key[i];
      if (i < 2 * args.half) {
        const int pair = i < args.half ? i : i - args.half;
        float sine, cosine;
        sincosf(static_cast<float>(args.position[item]) * args.frequencies[pair], &sine, &cosine);
        const float other = key[i < args.half ? i + args.half : pair];
        value = value * cosine + (i < args.half ? -other : other) * sine;
      }
      fetch_store<T>(out + i, value, most);
    }
    __syncwarp();  // the next token takes the same shared memory
  }
}

template <int Group, typename Half, typename T, typename P>
cudaError_t launch_fetch(const FetchArgs& args, const Half* grid, float most, cudaStream_t stream) {
  if (args.items == 0) {
    return cudaSuccess;
  }
  const int64_t all = (args.items + kHiggsWarps - 1) / kHiggsWarps;
  const auto blocks = static_cast<unsigned>(args.count == nullptr ? all : min(all, kFetchBlocks));
  fetch_kernel<Group, Half, T, P><<<blocks, dim3(kHiggsLanes, kHiggsWarps), 0, stream>>>(args, grid, most);
  return cudaGetLastError();
}

}  // namespace kvplug
