#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "../kv_write_checks.h"
#include "kv_write.cuh"

namespace kvplug {
namespace {

void kv_write(const at::Tensor& pool, const at::Tensor& key, const at::Tensor& value, const at::Tensor& dest) {
  check_kv_write(pool, key, value, dest);
  const c10::cuda::CUDAGuard guard(pool.device());
  const int64_t element = key.element_size();
  KvWriteArgs args;
  args.pool = static_cast<char*>(pool.data_ptr());
  args.key = static_cast<const char*>(key.const_data_ptr());
  args.value = static_cast<const char*>(value.const_data_ptr());
  args.dest = dest.const_data_ptr<int64_t>();
  args.tokens = key.size(0);
  args.heads = key.size(1);
  args.slots = pool.size(0) * kPageTokens;
  args.row_bytes = key.size(2) * pool.element_size();
  args.key_token_bytes = key.stride(0) * element;
  args.key_head_bytes = key.stride(1) * element;
  args.value_token_bytes = value.stride(0) * element;
  args.value_head_bytes = value.stride(1) * element;
  args.dest_token_stride = dest.stride(0);
  args.dest_head_stride = dest.stride(1);
  KvSource source = KvSource::kAsStored;
  if (pool.scalar_type() != key.scalar_type()) {
    TORCH_CHECK(key.scalar_type() == at::kFloat || key.scalar_type() == at::kBFloat16 ||
                    key.scalar_type() == at::kHalf,
                "kv_write: dtype must be float32, bfloat16 or float16, got ", key.scalar_type());
    source = key.scalar_type() == at::kFloat      ? KvSource::kFloat
             : key.scalar_type() == at::kBFloat16 ? KvSource::kBFloat16
                                                  : KvSource::kHalf;
  }
  C10_CUDA_CHECK(launch_kv_write(args, source, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(vllm_kvplug, CUDA, m) {
  m.impl("kv_write", &kv_write);
}

}  // namespace kvplug
