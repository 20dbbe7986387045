// Host side of decode_attention.cuh: the map of the pool for the copy engine, and launches. Free of torch headers.
#pragma once

#include <cuda_runtime.h>

#include "decode_attention.cuh"

namespace kvplug {

// Describes a pool of `pages` head pages to the copy engine: [D * 2 elements in rows of 128 bytes, tokens].
inline cudaError_t encode_pool(CUtensorMap* map, void* pool, int64_t pages, int row_bytes) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[3] = {kAtom, static_cast<cuuint64_t>(pages) * kPageTokens,
                               static_cast<cuuint64_t>(row_bytes / kAtom)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(row_bytes), kAtom};
  const cuuint32_t box[3] = {kAtom, kPageTokens, static_cast<cuuint32_t>(row_bytes / kAtom)};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, pool, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Launches a kernel that waits by itself for the one before it, so that its blocks may already be set up then.
template <typename... Args>
cudaError_t launch_early(void (*kernel)(Args...), int blocks, int threads, int shared, cudaStream_t stream,
                         const std::remove_const_t<Args>&... args) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, Args(args)...);
}

template <typename T, int D, bool kFp8>
cudaError_t launch_decode_attention(const DecodeArgs& args, const CUtensorMap& map, int blocks, cudaStream_t stream) {
  const auto kernel = decode_attention_kernel<T, D, kFp8>;
  const int shared = PageLayout<D, kFp8>::shared(args.group);
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  return launch_early(kernel, blocks, PageLayout<D, kFp8>::kThreads, shared, stream, args, map);
}

}  // namespace kvplug
