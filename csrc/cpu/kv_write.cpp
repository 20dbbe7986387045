#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "../kv_write_checks.h"

namespace kvplug {
namespace {

// A thread is worth waking for about this much copying.
constexpr int64_t kGrainBytes = 64 * 1024;

void kv_write(const at::Tensor& pool, const at::Tensor& key, const at::Tensor& value, const at::Tensor& dest) {
  check_kv_write(pool, key, value, dest);
  const int64_t heads = key.size(1);
  const int64_t slots = pool.size(0) * kPageTokens;
  const int64_t element = pool.element_size();
  const int64_t row_bytes = key.size(2) * element;
  char* pool_bytes = static_cast<char*>(pool.data_ptr());
  const char* key_bytes = static_cast<const char*>(key.const_data_ptr());
  const char* value_bytes = static_cast<const char*>(value.const_data_ptr());
  const auto dest_slots = dest.accessor<int64_t, 2>();

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
      char* row = pool_bytes + slot * 2 * row_bytes;
      std::memcpy(row, key_bytes + (token * key.stride(0) + head * key.stride(1)) * element, row_bytes);
      std::memcpy(row + row_bytes, value_bytes + (token * value.stride(0) + head * value.stride(1)) * element,
                  row_bytes);
    }
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(vllm_kvplug, CPU, m) {
  m.impl("kv_write", &kv_write);
}

}  // namespace kvplug
