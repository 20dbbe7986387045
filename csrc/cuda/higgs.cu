#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <limits>

#include "../higgs_checks.h"
#include "../higgs_dispatch.h"
#include "higgs.cuh"

namespace kvplug {
namespace {

unsigned blocks_for(int64_t rows) {
  return static_cast<unsigned>((rows + kHiggsWarps - 1) / kHiggsWarps);
}

void higgs_encode(const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& x, const at::Tensor& grid) {
  check_higgs_rows("higgs_encode", x, codes, scale, grid);
  if (x.size(0) == 0) {
    return;
  }
  const c10::cuda::CUDAGuard guard(x.device());
  dispatch_higgs(x, grid, [&](auto zero, auto width) {
    using T = decltype(zero);
    dispatch_group(codes.size(1) * width, [&](auto group) {
      higgs_encode_kernel<width, group>
          <<<blocks_for(x.size(0)), dim3(kHiggsLanes, kHiggsWarps), 0, c10::cuda::getCurrentCUDAStream()>>>(
              codes.mutable_data_ptr<uint8_t>(), scale.mutable_data_ptr<at::Half>(), x.const_data_ptr<T>(),
              x.stride(0), grid.const_data_ptr<at::Half>(), x.size(0), static_cast<int>(x.size(1)));
    });
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void higgs_decode(const at::Tensor& out, const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& grid) {
  check_higgs_rows("higgs_decode", out, codes, scale, grid);
  if (out.size(0) == 0) {
    return;
  }
  const c10::cuda::CUDAGuard guard(out.device());
  dispatch_higgs(out, grid, [&](auto zero, auto width) {
    using T = decltype(zero);
    dispatch_group(codes.size(1) * width, [&](auto group) {
      higgs_decode_kernel<width, group>
          <<<blocks_for(out.size(0)), dim3(kHiggsLanes, kHiggsWarps), 0, c10::cuda::getCurrentCUDAStream()>>>(
              out.mutable_data_ptr<T>(), out.stride(0), codes.const_data_ptr<uint8_t>(),
              scale.const_data_ptr<at::Half>(), grid.const_data_ptr<at::Half>(), out.size(0),
              static_cast<int>(out.size(1)), static_cast<float>(std::numeric_limits<T>::max()));
    });
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void higgs_scores(const at::Tensor& out, const at::Tensor& lut, const at::Tensor& codes, const at::Tensor& scale) {
  check_higgs_scores(out, lut, codes, scale);
  const c10::cuda::CUDAGuard guard(out.device());
  HiggsScoresArgs<at::Half> args;
  args.out = out.mutable_data_ptr<float>();
  args.lut = lut.const_data_ptr<float>();
  args.codes = codes.const_data_ptr<uint8_t>();
  args.scale = scale.const_data_ptr<at::Half>();
  args.heads = lut.size(0);
  args.queries = lut.size(1);
  args.tokens = codes.size(1);
  args.pieces = static_cast<int>(codes.size(2));
  args.codes_head_stride = codes.stride(0);
  args.codes_token_stride = codes.stride(1);
  args.scale_head_stride = scale.stride(0);
  args.scale_token_stride = scale.stride(1);
  C10_CUDA_CHECK(launch_higgs_scores(args, c10::cuda::getCurrentCUDAStream()));
}

void landmark_scores(const at::Tensor& out, const at::Tensor& lut, const at::Tensor& pages, const at::Tensor& page,
                     int64_t page_tokens) {
  check_landmark_scores(out, lut, pages, page, page_tokens);
  const c10::cuda::CUDAGuard guard(out.device());
  LandmarkScoresArgs<at::Half> args;
  args.out = out.mutable_data_ptr<float>();
  args.lut = lut.const_data_ptr<float>();
  args.bytes = pages.const_data_ptr<uint8_t>();
  args.page = page.const_data_ptr<int64_t>();
  args.heads = lut.size(0) * lut.size(1);
  args.queries = lut.size(2);
  args.pages = page.size(2);
  args.num_pages = pages.size(0);
  args.page_bytes = pages.size(1);
  args.pieces = static_cast<int>(lut.size(3));
  args.page_tokens = static_cast<int>(page_tokens);
  C10_CUDA_CHECK(launch_landmark_scores(args, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(vllm_kvplug, CUDA, m) {
  m.impl("higgs_encode", &higgs_encode);
  m.impl("higgs_decode", &higgs_decode);
  m.impl("higgs_scores", &higgs_scores);
  m.impl("landmark_scores", &landmark_scores);
}

}  // namespace kvplug
