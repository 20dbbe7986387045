// Argument checks of fetch_tokens, the same for every device.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "higgs.h"
#include "layout.h"

namespace kvplug {

inline void check_fetch_list(const char* name, const at::Tensor& list, const at::Tensor& source) {
  TORCH_CHECK(list.dim() == 1 && list.size(0) == source.size(0) && list.scalar_type() == at::kLong &&
                  list.is_contiguous() && list.device() == source.device(),
              "fetch_tokens: ", name, " must be contiguous int64 [n] like source, got ", list.scalar_type(), " ",
              list.sizes());
}

inline void check_fetch(const at::Tensor& pool, const at::Tensor& rows, const at::Tensor& source,
                        const at::Tensor& position, const at::Tensor& dest, const at::Tensor& frequencies,
                        const std::optional<at::Tensor>& grid, at::ScalarType dtype,
                        const std::optional<at::Tensor>& count) {
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
              "fetch_tokens: dtype must be float32, bfloat16 or float16, got ", dtype);
  TORCH_CHECK(pool.dim() == 3 && pool.size(1) == kPageTokens && pool.size(2) % 2 == 0 && pool.is_contiguous() &&
                  (pool.scalar_type() == dtype || pool.scalar_type() == at::kFloat8_e4m3fn),
              "fetch_tokens: pool must be contiguous [P, ", kPageTokens, ", 2*D] of ", dtype, " or float8_e4m3fn, got ",
              pool.scalar_type(), " ", pool.sizes());
  const int64_t dim = pool.size(2) / 2;
  TORCH_CHECK(dim <= kHiggsMaxGroup, "fetch_tokens: D must be at most ", kHiggsMaxGroup, ", got ", dim);
  TORCH_CHECK(rows.dim() == 2 && rows.scalar_type() == at::kByte && rows.is_contiguous() && rows.is_cpu(),
              "fetch_tokens: rows must be contiguous uint8 [N, bytes] in CPU memory, got ", rows.scalar_type(), " ",
              rows.sizes(), " on ", rows.device());
  if (grid.has_value()) {
    TORCH_CHECK(grid->dim() == 2 && grid->size(0) == kHiggsCodes && grid->size(1) == 2 &&
                    grid->scalar_type() == at::kHalf && grid->is_contiguous() && grid->device() == pool.device(),
                "fetch_tokens: grid must be contiguous float16 [", kHiggsCodes, ", 2], got ", grid->scalar_type(), " ",
                grid->sizes());
    const int64_t group = rows.size(1) - 4;  // two values a code, K and V, and their scales
    TORCH_CHECK(group >= 16 && group <= kHiggsMaxGroup && (group & (group - 1)) == 0 && dim <= group,
                "fetch_tokens: rows of ", rows.size(1), " bytes do not hold codes of D = ", dim, " values");
  } else {
    TORCH_CHECK(rows.size(1) == 2 * dim * static_cast<int64_t>(at::elementSize(dtype)),
                "fetch_tokens: rows of ", rows.size(1), " bytes do not hold K and V of D = ", dim, " values");
  }
  TORCH_CHECK(source.dim() == 1 && source.scalar_type() == at::kLong && source.is_contiguous() &&
                  source.device() == pool.device(),
              "fetch_tokens: source must be contiguous int64 [n], got ", source.scalar_type(), " ", source.sizes());
  if (count.has_value()) {
    TORCH_CHECK(count->numel() == 1 && count->scalar_type() == at::kInt && count->device() == pool.device(),
                "fetch_tokens: count must be one int32 on the pool's device, got ", count->scalar_type(), " ",
                count->sizes(), " on ", count->device());
  }
  check_fetch_list("position", position, source);
  check_fetch_list("dest", dest, source);
  TORCH_CHECK(frequencies.dim() == 1 && 2 * frequencies.size(0) <= dim && frequencies.scalar_type() == at::kFloat &&
                  frequencies.is_contiguous() && frequencies.device() == pool.device(),
              "fetch_tokens: frequencies must be contiguous float32 [D / 2] or less, got ", frequencies.scalar_type(),
              " ", frequencies.sizes());
}

}  // namespace kvplug
