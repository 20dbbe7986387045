// Scatters K and V rows into token slots. Copies bytes, so it serves every dtype. Free of torch headers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hopper.cuh"

namespace kvplug {

// What K and V are, where they are stored as e4m3 and so not copied as they are.
enum class KvSource { kAsStored, kFloat, kBFloat16, kHalf };

struct KvWriteArgs {
  char* pool;
  const char* key;
  const char* value;
  const int64_t* dest;
  int64_t tokens, heads, slots;
  int64_t row_bytes;  // bytes of one stored K row; a token slot holds the K row and the V row behind it
  int64_t key_token_bytes, key_head_bytes;
  int64_t value_token_bytes, value_head_bytes;
  int64_t dest_token_stride, dest_head_stride;  // in elements
};

constexpr int kWarpLanes = 32;
constexpr int kWarpsPerBlock = 8;

// Where a warp reads and writes: one (token, head).
struct KvRow {
  const char *key, *value;
  char* stored;  // null if there is nothing to write
};

__device__ inline KvRow kv_row(const KvWriteArgs& args) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.y;
  if (item >= args.tokens * args.heads) {
    return {};
  }
  const int64_t token = item / args.heads;
  const int64_t head = item % args.heads;
  const int64_t slot = args.dest[token * args.dest_token_stride + head * args.dest_head_stride];
  if (slot == -1) {
    return {};
  }
  if (slot < 0 || slot >= args.slots) {
    __trap();  // fail loudly: the write would land in somebody else's memory
  }
  return {args.key + token * args.key_token_bytes + head * args.key_head_bytes,
          args.value + token * args.value_token_bytes + head * args.value_head_bytes,
          args.pool + slot * 2 * args.row_bytes};
}

// One warp copies the row pair of one (token, head).
template <typename Vec>
__global__ void __launch_bounds__(kWarpLanes* kWarpsPerBlock) kv_write_kernel(KvWriteArgs args) {
  allow_next_kernel();  // attention has its tables to read before it needs what is written here
  const KvRow row = kv_row(args);
  if (row.stored == nullptr) {
    return;
  }
  for (int64_t byte = threadIdx.x * sizeof(Vec); byte < args.row_bytes; byte += kWarpLanes * sizeof(Vec)) {
    *reinterpret_cast<Vec*>(row.stored + byte) = *reinterpret_cast<const Vec*>(row.key + byte);
    *reinterpret_cast<Vec*>(row.stored + args.row_bytes + byte) = *reinterpret_cast<const Vec*>(row.value + byte);
  }
}

// As kv_write_kernel, into e4m3: what exceeds its largest finite number becomes that, NaN stays NaN.
template <typename T>
__global__ void __launch_bounds__(kWarpLanes* kWarpsPerBlock) kv_quantise_kernel(KvWriteArgs args) {
  allow_next_kernel();
  const KvRow row = kv_row(args);
  if (row.stored == nullptr) {
    return;
  }
  const T *key = reinterpret_cast<const T*>(row.key), *value = reinterpret_cast<const T*>(row.value);
  auto* stored = reinterpret_cast<__nv_fp8_storage_t*>(row.stored);
  for (int64_t i = threadIdx.x; i < args.row_bytes; i += kWarpLanes) {
    stored[i] = __nv_cvt_float_to_fp8(widen(key[i]), __NV_SATFINITE, __NV_E4M3);
    stored[args.row_bytes + i] = __nv_cvt_float_to_fp8(widen(value[i]), __NV_SATFINITE, __NV_E4M3);
  }
}

template <typename Vec>
bool kv_write_fits(const KvWriteArgs& args) {
  const int64_t offsets = reinterpret_cast<int64_t>(args.pool) | reinterpret_cast<int64_t>(args.key) |
                          reinterpret_cast<int64_t>(args.value) | args.row_bytes | args.key_token_bytes |
                          args.key_head_bytes | args.value_token_bytes | args.value_head_bytes;
  return offsets % static_cast<int64_t>(sizeof(Vec)) == 0;
}

// Launches with the widest copies that all addresses allow. Neither the grid nor the choice depends on device data.
inline cudaError_t launch_kv_write(const KvWriteArgs& args, KvSource source, cudaStream_t stream) {
  const int64_t items = args.tokens * args.heads;
  if (items == 0) {
    return cudaSuccess;
  }
  const dim3 grid(static_cast<unsigned>((items + kWarpsPerBlock - 1) / kWarpsPerBlock));
  const dim3 block(kWarpLanes, kWarpsPerBlock);
  if (source == KvSource::kFloat) {
    kv_quantise_kernel<float><<<grid, block, 0, stream>>>(args);
  } else if (source == KvSource::kBFloat16) {
    kv_quantise_kernel<__nv_bfloat16><<<grid, block, 0, stream>>>(args);
  } else if (source == KvSource::kHalf) {
    kv_quantise_kernel<__half><<<grid, block, 0, stream>>>(args);
  } else if (kv_write_fits<uint4>(args)) {
    kv_write_kernel<uint4><<<grid, block, 0, stream>>>(args);
  } else if (kv_write_fits<uint32_t>(args)) {
    kv_write_kernel<uint32_t><<<grid, block, 0, stream>>>(args);
  } else if (kv_write_fits<uint16_t>(args)) {
    kv_write_kernel<uint16_t><<<grid, block, 0, stream>>>(args);
  } else {
    kv_write_kernel<uint8_t><<<grid, block, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

}  // namespace kvplug
