// Argument checks of kv_write, the same for every device.
#pragma once

#include <ATen/core/Tensor.h>

#include "layout.h"

namespace kvplug {

inline void check_kv_write(const at::Tensor& pool, const at::Tensor& key, const at::Tensor& value,
                           const at::Tensor& dest) {
  TORCH_CHECK(key.dim() == 3 && key.sizes() == value.sizes(), "kv_write: key and value must both be [T, H, D], got ",
              key.sizes(), " and ", value.sizes());
  TORCH_CHECK(pool.dim() == 3 && pool.size(1) == kPageTokens && pool.size(2) == 2 * key.size(2) && pool.is_contiguous(),
              "kv_write: pool must be contiguous [P, ", kPageTokens, ", 2*D] with D = ", key.size(2), ", got ",
              pool.sizes());
  TORCH_CHECK(key.stride(2) == 1 && value.stride(2) == 1,
              "kv_write: the last dimension of key and value must be contiguous");
  TORCH_CHECK(dest.dim() == 2 && dest.size(0) == key.size(0) && dest.size(1) == key.size(1) &&
                  dest.scalar_type() == at::kLong,
              "kv_write: dest must be int64 [T, H], got ", dest.scalar_type(), " ", dest.sizes());
  TORCH_CHECK(key.scalar_type() == value.scalar_type() &&
                  (key.scalar_type() == pool.scalar_type() || pool.scalar_type() == at::kFloat8_e4m3fn),
              "kv_write: pool, key and value must have one dtype, or the pool float8_e4m3fn, got ",
              pool.scalar_type(), ", ", key.scalar_type(), " and ", value.scalar_type());
  TORCH_CHECK(key.device() == pool.device() && value.device() == pool.device() && dest.device() == pool.device(),
              "kv_write: all tensors must be on one device");
}

}  // namespace kvplug
