// Argument checks of the HIGGS ops, the same for every device.
#pragma once

#include <ATen/core/Tensor.h>

#include "higgs.h"

namespace kvplug {

inline bool is_value_dtype(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
}

// Of higgs_encode and higgs_decode, whose tensors differ in direction only.
inline void check_higgs_rows(const char* op, const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scale,
                             const at::Tensor& grid) {
  TORCH_CHECK(x.dim() == 2 && is_value_dtype(x) && x.stride(1) == 1, op,
              ": values must be float32, bfloat16 or float16 [N, D], the last dimension contiguous, got ",
              x.scalar_type(), " ", x.sizes());
  TORCH_CHECK(grid.dim() == 2 && grid.size(0) == kHiggsCodes && grid.scalar_type() == at::kHalf &&
                  grid.is_contiguous() && (grid.size(1) == 2 || grid.size(1) == 4 || grid.size(1) == 8),
              op, ": grid must be contiguous float16 [", kHiggsCodes, ", 2, 4 or 8], got ", grid.scalar_type(), " ",
              grid.sizes());
  TORCH_CHECK(codes.dim() == 2 && codes.size(0) == x.size(0) && codes.scalar_type() == at::kByte &&
                  codes.is_contiguous(),
              op, ": codes must be contiguous uint8 [N, group / p] with N = ", x.size(0), ", got ",
              codes.scalar_type(), " ", codes.sizes());
  const int64_t group = codes.size(1) * grid.size(1);
  TORCH_CHECK(group >= 16 && group <= kHiggsMaxGroup && (group & (group - 1)) == 0 && x.size(1) <= group, op,
              ": a row must be padded to a power of two from 16 to ", kHiggsMaxGroup, ", but ", codes.size(1),
              " codes of ", grid.size(1), " values hold ", group, " for rows of ", x.size(1));
  TORCH_CHECK(scale.dim() == 1 && scale.size(0) == x.size(0) && scale.scalar_type() == at::kHalf &&
                  scale.is_contiguous(),
              op, ": scale must be contiguous float16 [N] with N = ", x.size(0), ", got ", scale.scalar_type(), " ",
              scale.sizes());
  TORCH_CHECK(x.device() == codes.device() && scale.device() == codes.device() && grid.device() == codes.device(), op,
              ": all tensors must be on one device");
}

inline void check_higgs_scores(const at::Tensor& out, const at::Tensor& lut, const at::Tensor& codes,
                               const at::Tensor& scale) {
  TORCH_CHECK(lut.dim() == 4 && lut.size(3) == kHiggsCodes && lut.scalar_type() == at::kFloat && lut.is_contiguous(),
              "higgs_scores: lut must be contiguous float32 [H, G, P, ", kHiggsCodes, "], got ", lut.scalar_type(), " ",
              lut.sizes());
  TORCH_CHECK(codes.dim() == 3 && codes.size(0) == lut.size(0) && codes.size(2) == lut.size(2) &&
                  codes.stride(2) == 1 && codes.scalar_type() == at::kByte,
              "higgs_scores: codes must be uint8 [H, T, P], the last dimension contiguous, H and P as in lut ",
              lut.sizes(), ", got ", codes.scalar_type(), " ", codes.sizes());
  TORCH_CHECK(scale.dim() == 2 && scale.size(0) == codes.size(0) && scale.size(1) == codes.size(1) &&
                  scale.scalar_type() == at::kHalf,
              "higgs_scores: scale must be float16 [H, T], got ", scale.scalar_type(), " ", scale.sizes());
  TORCH_CHECK(out.dim() == 3 && out.size(0) == lut.size(0) && out.size(1) == lut.size(1) &&
                  out.size(2) == codes.size(1) && out.scalar_type() == at::kFloat && out.is_contiguous(),
              "higgs_scores: out must be contiguous float32 [H, G, T], got ", out.scalar_type(), " ", out.sizes());
  TORCH_CHECK(lut.device() == out.device() && codes.device() == out.device() && scale.device() == out.device(),
              "higgs_scores: all tensors must be on one device");
}

inline void check_landmark_scores(const at::Tensor& out, const at::Tensor& lut, const at::Tensor& pages,
                                  const at::Tensor& page, int64_t page_tokens) {
  TORCH_CHECK(lut.dim() == 5 && lut.size(3) % 4 == 0 && lut.size(4) == kHiggsCodes && lut.scalar_type() == at::kFloat &&
                  lut.is_contiguous(),
              "landmark_scores: lut must be contiguous float32 [R, H, G, P, ", kHiggsCodes, "], P a multiple of 4, got ",
              lut.scalar_type(), " ", lut.sizes());
  TORCH_CHECK(page_tokens > 0 && page_tokens % 2 == 0, "landmark_scores: page_tokens must be even, got ", page_tokens);
  TORCH_CHECK(pages.dim() == 2 && pages.scalar_type() == at::kByte && pages.is_contiguous() && pages.size(1) % 4 == 0 &&
                  pages.size(1) >= page_tokens * (lut.size(3) + 2),
              "landmark_scores: pages must be contiguous uint8 [N, bytes] with room for ", page_tokens, " keys, got ",
              pages.scalar_type(), " ", pages.sizes());
  TORCH_CHECK(page.dim() == 3 && page.size(0) == lut.size(0) && page.size(1) == lut.size(1) &&
                  page.scalar_type() == at::kLong && page.is_contiguous(),
              "landmark_scores: page must be contiguous int64 [R, H, M], R and H as in lut ", lut.sizes(), ", got ",
              page.scalar_type(), " ", page.sizes());
  TORCH_CHECK(out.dim() == 4 && out.size(0) == lut.size(0) && out.size(1) == lut.size(1) &&
                  out.size(2) == lut.size(2) && out.size(3) == page.size(2) * page_tokens &&
                  out.scalar_type() == at::kFloat && out.is_contiguous(),
              "landmark_scores: out must be contiguous float32 [R, H, G, M * page_tokens], got ", out.scalar_type(), " ",
              out.sizes());
  TORCH_CHECK(lut.device() == out.device() && pages.device() == out.device() && page.device() == out.device(),
              "landmark_scores: all tensors must be on one device");
}

}  // namespace kvplug
