#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <limits>
#include <optional>

#include "../fetch_checks.h"
#include "../higgs_dispatch.h"
#include "fetch.cuh"

namespace kvplug {
namespace {

template <int Group, typename T>
void fetch(const FetchArgs& args, const at::Half* grid, bool e4m3) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const auto most = static_cast<float>(std::numeric_limits<T>::max());
  C10_CUDA_CHECK(e4m3 ? (launch_fetch<Group, at::Half, T, uint8_t>(args, grid, most, stream))
                      : (launch_fetch<Group, at::Half, T, T>(args, grid, most, stream)));
}

void fetch_tokens(const at::Tensor& pool, const at::Tensor& rows, const at::Tensor& source, const at::Tensor& position,
                  const at::Tensor& dest, const at::Tensor& frequencies, const std::optional<at::Tensor>& grid,
                  at::ScalarType dtype, const std::optional<at::Tensor>& count) {
  check_fetch(pool, rows, source, position, dest, frequencies, grid, dtype, count);
  TORCH_CHECK(rows.is_pinned(), "fetch_tokens: rows must be in pinned memory, which the device reads by itself");
  const c10::cuda::CUDAGuard guard(pool.device());
  FetchArgs args;
  args.pool = pool.data_ptr();
  args.rows = rows.const_data_ptr<uint8_t>();
  args.source = source.const_data_ptr<int64_t>();
  args.position = position.const_data_ptr<int64_t>();
  args.dest = dest.const_data_ptr<int64_t>();
  args.frequencies = frequencies.const_data_ptr<float>();
  args.count = count.has_value() ? count->const_data_ptr<int32_t>() : nullptr;
  args.items = source.size(0);
  args.num_rows = rows.size(0);
  args.slots = pool.size(0) * kPageTokens;
  args.row_bytes = static_cast<int>(rows.size(1));
  args.dim = static_cast<int>(pool.size(2) / 2);
  args.half = static_cast<int>(frequencies.size(0));
  const at::Half* codes = grid.has_value() ? grid->const_data_ptr<at::Half>() : nullptr;
  const bool e4m3 = pool.scalar_type() != dtype;
  dispatch_values(dtype, [&](auto zero) {
    using T = decltype(zero);
    if (codes == nullptr) {
      return fetch<0, T>(args, codes, e4m3);
    }
    dispatch_group(rows.size(1) - 4, [&](auto group) { fetch<group, T>(args, codes, e4m3); });
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(vllm_kvplug, CUDA, m) {
  m.impl("fetch_tokens", &fetch_tokens);
}

}  // namespace kvplug
