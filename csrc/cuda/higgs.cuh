// HIGGS rows, one warp each, and scores of encoded keys, one thread each. Free of torch headers.
//
// Value i of a row is in lane i % 32, register i / 32. Arithmetic and its order are those of cpu/higgs_rows.h, so codes
// are equal: see there why fused multiply-add does not matter.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "../higgs.h"

namespace kvplug {

constexpr int kHiggsLanes = 32;
constexpr int kHiggsWarps = 8;            // rows of a block
constexpr unsigned kHiggsAllLanes = 0xffffffffu;

constexpr int higgs_registers(int group) { return (group + kHiggsLanes - 1) / kHiggsLanes; }

// Neighbours first, then pairs, fours and so on: across lanes, then across registers.
template <int Group>
__device__ void higgs_hadamard(float (&x)[higgs_registers(Group)], int lane) {
  constexpr int kRegisters = higgs_registers(Group);
#pragma unroll
  for (int step = 1; step < kHiggsLanes && step < Group; step *= 2) {
#pragma unroll
    for (int r = 0; r < kRegisters; ++r) {
      const float other = __shfl_xor_sync(kHiggsAllLanes, x[r], step);
      x[r] = lane & step ? other - x[r] : x[r] + other;
    }
  }
#pragma unroll
  for (int step = 1; step < kRegisters; step *= 2) {
#pragma unroll
    for (int r = 0; r < kRegisters; ++r) {
      if ((r & step) == 0) {
        const float low = x[r], high = x[r + step];
        x[r] = low + high;
        x[r + step] = low - high;
      }
    }
  }
}

// Copies the grid [256, P] to shared memory and, where wanted, -|c|^2 / 2 of each vector. All threads of a block.
template <int P, typename Half>
__device__ void higgs_load_grid(const Half* grid, float (&vectors)[kHiggsCodes * P], float* bias) {
  for (int n = threadIdx.y * kHiggsLanes + threadIdx.x; n < kHiggsCodes; n += kHiggsWarps * kHiggsLanes) {
    float square = 0;
    for (int j = 0; j < P; ++j) {
      const float value = static_cast<float>(grid[n * P + j]);
      vectors[n * P + j] = value;
      square += value * value;
    }
    if (bias != nullptr) {
      bias[n] = -0.5f * square;
    }
  }
  __syncthreads();
}

template <int P, int Group, typename Half, typename T>
__global__ void __launch_bounds__(kHiggsLanes* kHiggsWarps)
    higgs_encode_kernel(uint8_t* codes, Half* scale, const T* x, int64_t x_stride, const Half* grid, int64_t rows,
                        int dim) {
  constexpr int kRegisters = higgs_registers(Group);
  __shared__ float vectors[kHiggsCodes * P];
  __shared__ float bias[kHiggsCodes];
  __shared__ float pieces[kHiggsWarps][Group];
  higgs_load_grid<P>(grid, vectors, bias);
  const int lane = threadIdx.x;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kHiggsWarps + threadIdx.y;
  if (row >= rows) {
    return;
  }
  float z[kRegisters];
  double square = 0;
#pragma unroll
  for (int r = 0; r < kRegisters; ++r) {
    const int i = r * kHiggsLanes + lane;
    z[r] = i < dim ? static_cast<float>(x[row * x_stride + i]) : 0.0f;
    square += static_cast<double>(z[r]) * z[r];
  }
  for (int step = kHiggsLanes / 2; step > 0; step /= 2) {
    square += __shfl_xor_sync(kHiggsAllLanes, square, step);
  }
  const float norm = static_cast<float>(sqrt(square));
  const Half row_scale(isfinite(square) ? fminf(norm, kHalfMax) : nanf(""));
  const float stored = static_cast<float>(row_scale);
  const float divisor = stored == 0.0f ? 1.0f : stored;
  higgs_hadamard<Group>(z, lane);
#pragma unroll
  for (int r = 0; r < kRegisters; ++r) {
    const int i = r * kHiggsLanes + lane;
    if (i < Group) {
      pieces[threadIdx.y][i] = static_cast<float>(Half(clamp(__fdiv_rn(z[r], divisor), kHalfMax)));
    }
  }
  __syncwarp();
  // A lane searches whole pieces: all lanes then read the same code vector at a time.
  for (int piece = lane; piece < Group / P; piece += kHiggsLanes) {
    const float* values = &pieces[threadIdx.y][piece * P];
    float best = -INFINITY;
    int code = 0;
    for (int n = 0; n < kHiggsCodes; ++n) {
      float sum = bias[n];
#pragma unroll
      for (int j = 0; j < P; ++j) {
        sum += values[j] * vectors[n * P + j];
      }
      if (sum > best) {
        best = sum;
        code = n;
      }
    }
    codes[row * (Group / P) + piece] = static_cast<uint8_t>(code);
  }
  if (lane == 0) {
    scale[row] = row_scale;
  }
}

template <int P, int Group, typename Half, typename T>
__global__ void __launch_bounds__(kHiggsLanes* kHiggsWarps)
    higgs_decode_kernel(T* out, int64_t out_stride, const uint8_t* codes, const Half* scale, const Half* grid,
                        int64_t rows, int dim, float most) {
  constexpr int kRegisters = higgs_registers(Group);
  __shared__ float vectors[kHiggsCodes * P];
  higgs_load_grid<P>(grid, vectors, nullptr);
  const int lane = threadIdx.x;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kHiggsWarps + threadIdx.y;
  if (row >= rows) {
    return;
  }
  float x[kRegisters];
#pragma unroll
  for (int r = 0; r < kRegisters; ++r) {
    const int i = r * kHiggsLanes + lane;
    x[r] = i < Group ? vectors[codes[row * (Group / P) + i / P] * P + i % P] : 0.0f;
  }
  higgs_hadamard<Group>(x, lane);
  const float factor = static_cast<float>(scale[row]) / Group;
#pragma unroll
  for (int r = 0; r < kRegisters; ++r) {
    const int i = r * kHiggsLanes + lane;
    if (i < dim) {
      out[row * out_stride + i] = static_cast<T>(clamp(x[r] * factor, most));
    }
  }
}

template <typename Half>
struct HiggsScoresArgs {
  float* out;            // [heads, queries, tokens]
  const float* lut;      // [heads, queries, pieces, 256]
  const uint8_t* codes;  // [heads, tokens, pieces]
  const Half* scale;     // [heads, tokens]
  int64_t heads, queries, tokens;
  int pieces;
  int64_t codes_head_stride, codes_token_stride, scale_head_stride, scale_token_stride;
};

constexpr int kScoreThreads = 256;
constexpr int kScoreTokens = 4096;  // of a block, so that loading its table is little beside scoring

// Block (x, y): tokens from x * kScoreTokens, query y among all heads' queries, its table in shared memory.
template <typename Half>
__global__ void __launch_bounds__(kScoreThreads) higgs_scores_kernel(HiggsScoresArgs<Half> args) {
  extern __shared__ float lut[];
  const int64_t query = blockIdx.y;
  const int64_t head = query / args.queries;
  const int entries = args.pieces * kHiggsCodes;
  for (int i = threadIdx.x; i < entries; i += kScoreThreads) {
    lut[i] = args.lut[query * entries + i];
  }
  __syncthreads();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kScoreTokens;
  const int64_t end = first + kScoreTokens < args.tokens ? first + kScoreTokens : args.tokens;
  for (int64_t token = first + threadIdx.x; token < end; token += kScoreThreads) {
    const uint8_t* codes = args.codes + head * args.codes_head_stride + token * args.codes_token_stride;
    float sum = 0;
    for (int i = 0; i < args.pieces; ++i) {
      sum += lut[i * kHiggsCodes + codes[i]];
    }
    const float scale = static_cast<float>(args.scale[head * args.scale_head_stride + token * args.scale_token_stride]);
    args.out[query * args.tokens + token] = sum * scale;
  }
}

template <typename Half>
struct LandmarkScoresArgs {
  float* out;            // [rows * heads, queries, pages * page_tokens]
  const float* lut;      // [rows * heads, queries, pieces, 256]
  const uint8_t* bytes;  // [num_pages, page_bytes]
  const int64_t* page;   // [rows * heads, pages]
  int64_t heads, queries, pages, num_pages, page_bytes;
  int pieces, page_tokens;
};

constexpr int kLandmarkPages = 16;  // of a block, so that loading its table is little beside scoring

// Block (x, y): pages from x * kLandmarkPages, query y among all rows' and heads', its table in shared memory.
template <typename Half>
__global__ void __launch_bounds__(kScoreThreads) landmark_scores_kernel(LandmarkScoresArgs<Half> args) {
  extern __shared__ float lut[];
  const int64_t query = blockIdx.y;
  const int64_t head = query / args.queries;
  const int entries = args.pieces * kHiggsCodes;
  for (int i = threadIdx.x; i < entries; i += kScoreThreads) {
    lut[i] = args.lut[query * entries + i];
  }
  __syncthreads();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kLandmarkPages;
  const int64_t end = first + kLandmarkPages < args.pages ? first + kLandmarkPages : args.pages;
  for (int64_t j = first; j < end; ++j) {
    const int64_t page = args.page[head * args.pages + j];
    if (page < 0 || page >= args.num_pages) {
      __trap();  // fail loudly: whatever lies there is no landmark
    }
    const uint8_t* base = args.bytes + page * args.page_bytes;
    const auto* scale = reinterpret_cast<const Half*>(base + args.page_tokens * args.pieces);
    float* out = args.out + (query * args.pages + j) * args.page_tokens;
    for (int token = threadIdx.x; token < args.page_tokens; token += kScoreThreads) {
      const auto* words = reinterpret_cast<const uint32_t*>(base + token * args.pieces);
      float sum = 0;
      for (int i = 0; i < args.pieces; i += 4) {
        uint32_t codes = words[i / 4];
#pragma unroll
        for (int k = 0; k < 4; ++k, codes >>= 8) {
          sum += lut[(i + k) * kHiggsCodes + (codes & 0xff)];
        }
      }
      out[token] = sum * static_cast<float>(scale[token]);
    }
  }
}

// As launch_higgs_scores.
template <typename Half>
cudaError_t launch_landmark_scores(const LandmarkScoresArgs<Half>& args, cudaStream_t stream) {
  const int64_t queries = args.heads * args.queries;
  if (queries == 0 || args.pages == 0) {
    return cudaSuccess;
  }
  const int bytes = args.pieces * kHiggsCodes * static_cast<int>(sizeof(float));
  const cudaError_t error =
      cudaFuncSetAttribute(landmark_scores_kernel<Half>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) {
    return error;
  }
  const dim3 blocks(static_cast<unsigned>((args.pages + kLandmarkPages - 1) / kLandmarkPages),
                    static_cast<unsigned>(queries));
  landmark_scores_kernel<Half><<<blocks, kScoreThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

// Fails with cudaErrorInvalidValue where a query's table exceeds the shared memory of a block.
template <typename Half>
cudaError_t launch_higgs_scores(const HiggsScoresArgs<Half>& args, cudaStream_t stream) {
  const int64_t queries = args.heads * args.queries;
  if (queries == 0 || args.tokens == 0) {
    return cudaSuccess;
  }
  const int bytes = args.pieces * kHiggsCodes * static_cast<int>(sizeof(float));
  const cudaError_t error =
      cudaFuncSetAttribute(higgs_scores_kernel<Half>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) {
    return error;
  }
  const dim3 blocks(static_cast<unsigned>((args.tokens + kScoreTokens - 1) / kScoreTokens),
                    static_cast<unsigned>(queries));
  higgs_scores_kernel<Half><<<blocks, kScoreThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvplug
