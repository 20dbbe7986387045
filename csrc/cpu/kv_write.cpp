#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Float8_e4m3fn.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "../kv_write_checks.h"

namespace kvplug {
namespace {

// A thread is worth waking for about this much copying.
constexpr int64_t kGrainBytes = 64 * 1024;

// e4m3 of the largest finite number where a value exceeds it; NaN stays NaN.
template <typename T>
c10::Float8_e4m3fn saturate(T value) {
  constexpr float kMost = 448.0f;
  const float x = static_cast<float>(value);
  return c10::Float8_e4m3fn(x > kMost ? kMost : x < -kMost ? -kMost : x);
}

template <typename T, typename P>
void write_row(P* row, const T* source, int64_t dim) {
  if constexpr (std::is_same_v<T, P>) {
    std::memcpy(row, source, dim * sizeof(T));
  } else {
    std::transform(source, source + dim, row, saturate<T>);
  }
}

// T: of key and value; P: of the pool.
template <typename T, typename P>
void write_rows(const at::Tensor& pool, const at::Tensor& key, const at::Tensor& value, const at::Tensor& dest) {
  const int64_t heads = key.size(1), dim = key.size(2);
  const int64_t slots = pool.size(0) * kPageTokens;
  P* pool_data = static_cast<P*>(pool.data_ptr());
  const T* key_data = static_cast<const T*>(key.const_data_ptr());
  const T* value_data = static_cast<const T*>(value.const_data_ptr());
  const auto dest_slots = dest.accessor<int64_t, 2>();

  const int64_t row_bytes = dim * sizeof(P);
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, 2 * row_bytes));
  at::parallel_for(0, key.size(0) * heads, grain, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t token = item / heads;
      const int64_t head = item % heads;
      const int64_t slot = dest_slots[token][head];
      if (slot == -1) {
        continue;
      }
      TORCH_CHECK_INDEX(slot >= 0 && slot < slots, "kv_write: token slot ", slot, " is outside a pool of ", slots);
      P* row = pool_data + slot * 2 * dim;
      write_row(row, key_data + token * key.stride(0) + head * key.stride(1), dim);
      write_row(row + dim, value_data + token * value.stride(0) + head * value.stride(1), dim);
    }
  });
}

void kv_write(const at::Tensor& pool, const at::Tensor& key, const at::Tensor& value, const at::Tensor& dest) {
  check_kv_write(pool, key, value, dest);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, key.scalar_type(), "kv_write", [&] {
    if (pool.scalar_type() == key.scalar_type()) {
      write_rows<scalar_t, scalar_t>(pool, key, value, dest);
    } else {
      write_rows<scalar_t, c10::Float8_e4m3fn>(pool, key, value, dest);
    }
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(vllm_kvplug, CPU, m) {
  m.impl("kv_write", &kv_write);
}

}  // namespace kvplug
