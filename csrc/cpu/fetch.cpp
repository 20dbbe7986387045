#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Float8_e4m3fn.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "../fetch_checks.h"
#include "higgs_rows.h"

namespace kvplug {
namespace {

constexpr int64_t kFetchGrain = 64;  // rows worth waking a thread for

// Turns pairs (i, i + half) of a key as RoPE does at a position.
void rotate(float* key, const float* frequencies, int half, int64_t position) {
  for (int i = 0; i < half; ++i) {
    const float angle = static_cast<float>(position) * frequencies[i];
    const float cosine = std::cos(angle), sine = std::sin(angle);
    const float first = key[i], second = key[i + half];
    key[i] = first * cosine - second * sine;
    key[i + half] = second * cosine + first * sine;
  }
}

template <typename T, typename P>
void store(P* out, const float* values, int dim) {
  const float most = std::is_same_v<T, P> ? static_cast<float>(std::numeric_limits<T>::max()) : 448.0f;
  for (int i = 0; i < dim; ++i) {
    out[i] = static_cast<P>(clamp(values[i], most));
  }
}

// K and V of one row in float32.
template <typename T>
void read_row(const uint8_t* row, const Grid<2>* grid, int group, int dim, float* key, float* value) {
  if (grid == nullptr) {
    const T* stored = reinterpret_cast<const T*>(row);
    for (int i = 0; i < dim; ++i) {
      key[i] = static_cast<float>(stored[i]);
      value[i] = static_cast<float>(stored[dim + i]);
    }
    return;
  }
  at::Half scale[2];
  std::memcpy(scale, row + group, sizeof(scale));
  const float most = std::numeric_limits<float>::max();
  decode_row<2>(*grid, row, static_cast<float>(scale[0]), group, key, dim, most);
  decode_row<2>(*grid, row + group / 2, static_cast<float>(scale[1]), group, value, dim, most);
}

// T: of K and V; P: of the pool.
template <typename T, typename P>
void fetch_rows(const at::Tensor& pool, const at::Tensor& rows, const at::Tensor& source, const at::Tensor& position,
                const at::Tensor& dest, const at::Tensor& frequencies, const Grid<2>* grid, int64_t items) {
  const int dim = static_cast<int>(pool.size(2) / 2), half = static_cast<int>(frequencies.size(0));
  const int64_t slots = pool.size(0) * kPageTokens, bytes = rows.size(1);
  P* pool_data = static_cast<P*>(pool.data_ptr());
  const uint8_t* row_data = rows.const_data_ptr<uint8_t>();
  const int64_t *from = source.const_data_ptr<int64_t>(), *at_position = position.const_data_ptr<int64_t>();
  const int64_t* to = dest.const_data_ptr<int64_t>();
  const float* angles = frequencies.const_data_ptr<float>();
  at::parallel_for(0, items, kFetchGrain, [&](int64_t begin, int64_t end) {
    float key[kHiggsMaxGroup], value[kHiggsMaxGroup];
    for (int64_t item = begin; item < end; ++item) {
      if (from[item] == -1) {
        continue;
      }
      TORCH_CHECK_INDEX(from[item] >= 0 && from[item] < rows.size(0), "fetch_tokens: row ", from[item],
                        " is outside a host pool of ", rows.size(0));
      TORCH_CHECK_INDEX(to[item] >= 0 && to[item] < slots, "fetch_tokens: token slot ", to[item],
                        " is outside a pool of ", slots);
      read_row<T>(row_data + from[item] * bytes, grid, static_cast<int>(bytes - 4), dim, key, value);
      rotate(key, angles, half, at_position[item]);
      P* out = pool_data + to[item] * 2 * dim;
      store<T>(out, key, dim);
      store<T>(out + dim, value, dim);
    }
  });
}

void fetch_tokens(const at::Tensor& pool, const at::Tensor& rows, const at::Tensor& source, const at::Tensor& position,
                  const at::Tensor& dest, const at::Tensor& frequencies, const std::optional<at::Tensor>& grid,
                  at::ScalarType dtype, const std::optional<at::Tensor>& count) {
  check_fetch(pool, rows, source, position, dest, frequencies, grid, dtype, count);
  const int64_t given = count.has_value() ? *count->const_data_ptr<int32_t>() : source.size(0);
  const int64_t items = std::min(given, source.size(0));
  std::optional<Grid<2>> table;
  if (grid.has_value()) {
    table.emplace(grid->const_data_ptr<at::Half>());
  }
  const Grid<2>* codes = table.has_value() ? &*table : nullptr;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, dtype, "fetch_tokens", [&] {
    if (pool.scalar_type() == dtype) {
      fetch_rows<scalar_t, scalar_t>(pool, rows, source, position, dest, frequencies, codes, items);
    } else {
      fetch_rows<scalar_t, c10::Float8_e4m3fn>(pool, rows, source, position, dest, frequencies, codes, items);
    }
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(vllm_kvplug, CPU, m) {
  m.impl("fetch_tokens", &fetch_tokens);
}

}  // namespace kvplug
