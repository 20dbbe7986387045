#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "rows.cuh"

namespace kvplug {
namespace {

RowsArgs check_rows(const char* op, const at::Tensor& pool, const at::Tensor& dense, const at::Tensor& rows) {
  TORCH_CHECK(pool.dim() == 2 && dense.dim() == 2 && pool.size(1) == dense.size(1) && rows.dim() == 1 &&
                  rows.size(0) == dense.size(0),
              op, ": pool [R, bytes], values [n, bytes] and rows [n] do not fit: ", pool.sizes(), ", ", dense.sizes(),
              " and ", rows.sizes());
  TORCH_CHECK(pool.scalar_type() == at::kByte && dense.scalar_type() == at::kByte && rows.scalar_type() == at::kLong,
              op, ": pool and values must be uint8, rows int64");
  TORCH_CHECK(pool.is_contiguous() && dense.is_contiguous() && rows.is_contiguous(), op, ": tensors must be contiguous");
  TORCH_CHECK(dense.is_cuda() && rows.device() == dense.device() && (pool.is_cpu() || pool.device() == dense.device()),
              op, ": values and rows must be on one GPU, the pool there or on the CPU");
  void* start = pool.data_ptr();
  if (pool.is_cpu()) {  // pinned memory has an address on the device too
    const cudaError_t error = cudaHostGetDevicePointer(&start, pool.data_ptr(), 0);
    if (error != cudaSuccess) cudaGetLastError();
    TORCH_CHECK(error == cudaSuccess, op, ": the pool is not pinned memory");
  }
  RowsArgs args;
  args.pool = static_cast<char*>(start);
  args.dense = static_cast<char*>(dense.data_ptr());
  args.rows = rows.const_data_ptr<int64_t>();
  args.count = dense.size(0);
  args.pool_rows = pool.size(0);
  args.bytes = dense.size(1);
  args.on_host = pool.is_cpu();
  return args;
}

void gather_rows(const at::Tensor& out, const at::Tensor& pool, const at::Tensor& rows) {
  const c10::cuda::CUDAGuard guard(out.device());
  const RowsArgs args = check_rows("gather_rows", pool, out, rows);
  C10_CUDA_CHECK(launch_rows<true>(args, c10::cuda::getCurrentCUDAStream()));
}

void scatter_rows(const at::Tensor& pool, const at::Tensor& values, const at::Tensor& rows) {
  const c10::cuda::CUDAGuard guard(values.device());
  const RowsArgs args = check_rows("scatter_rows", pool, values, rows);
  C10_CUDA_CHECK(launch_rows<false>(args, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(vllm_kvplug, CUDA, m) {
  m.impl("gather_rows", &gather_rows);
  m.impl("scatter_rows", &scatter_rows);
}

}  // namespace kvplug
