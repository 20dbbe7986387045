#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "../higgs_checks.h"
#include "../higgs_dispatch.h"
#include "higgs_rows.h"

namespace kvplug {
namespace {

// Rows worth waking a thread for: encoding takes microseconds a row, decoding a tenth of that.
constexpr int64_t kEncodeGrain = 16;
constexpr int64_t kDecodeGrain = 256;
constexpr int64_t kScoreGrain = 512;

void higgs_encode(const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& x, const at::Tensor& grid) {
  check_higgs_rows("higgs_encode", x, codes, scale, grid);
  dispatch_higgs(x, grid, [&](auto zero, auto width) {
    using T = decltype(zero);
    const Grid<width> table(grid.const_data_ptr<at::Half>());
    const int dim = static_cast<int>(x.size(1));
    const int pieces = static_cast<int>(codes.size(1));
    const T* x_data = x.const_data_ptr<T>();
    uint8_t* codes_data = codes.mutable_data_ptr<uint8_t>();
    at::Half* scale_data = scale.mutable_data_ptr<at::Half>();
    at::parallel_for(0, x.size(0), kEncodeGrain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        scale_data[row] = encode_row<width, at::Half>(table, x_data + row * x.stride(0), dim, pieces * width,
                                                      codes_data + row * pieces);
      }
    });
  });
}

void higgs_decode(const at::Tensor& out, const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& grid) {
  check_higgs_rows("higgs_decode", out, codes, scale, grid);
  dispatch_higgs(out, grid, [&](auto zero, auto width) {
    using T = decltype(zero);
    const Grid<width> table(grid.const_data_ptr<at::Half>());
    const int dim = static_cast<int>(out.size(1));
    const int pieces = static_cast<int>(codes.size(1));
    const float most = static_cast<float>(std::numeric_limits<T>::max());
    const uint8_t* codes_data = codes.const_data_ptr<uint8_t>();
    const at::Half* scale_data = scale.const_data_ptr<at::Half>();
    T* out_data = out.mutable_data_ptr<T>();
    at::parallel_for(0, out.size(0), kDecodeGrain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        decode_row<width>(table, codes_data + row * pieces, static_cast<float>(scale_data[row]), pieces * width,
                          out_data + row * out.stride(0), dim, most);
      }
    });
  });
}

void higgs_scores(const at::Tensor& out, const at::Tensor& lut, const at::Tensor& codes, const at::Tensor& scale) {
  check_higgs_scores(out, lut, codes, scale);
  const int64_t queries = lut.size(1);
  const int64_t tokens = codes.size(1);
  const int pieces = static_cast<int>(codes.size(2));
  const float* lut_data = lut.const_data_ptr<float>();
  const uint8_t* codes_data = codes.const_data_ptr<uint8_t>();
  const at::Half* scale_data = scale.const_data_ptr<at::Half>();
  float* out_data = out.mutable_data_ptr<float>();
  at::parallel_for(0, lut.size(0) * tokens, kScoreGrain, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t head = item / tokens;
      const int64_t token = item % tokens;
      const uint8_t* key = codes_data + head * codes.stride(0) + token * codes.stride(1);
      const float key_scale = static_cast<float>(scale_data[head * scale.stride(0) + token * scale.stride(1)]);
      for (int64_t query = head * queries; query < (head + 1) * queries; ++query) {
        out_data[query * tokens + token] = score_key(lut_data + query * pieces * kHiggsCodes, key, pieces, key_scale);
      }
    }
  });
}

void landmark_scores(const at::Tensor& out, const at::Tensor& lut, const at::Tensor& pages, const at::Tensor& page,
                     int64_t page_tokens) {
  check_landmark_scores(out, lut, pages, page, page_tokens);
  const int64_t queries = lut.size(2), per_head = page.size(2), tokens = out.size(3);
  const int pieces = static_cast<int>(lut.size(3));
  const float* lut_data = lut.const_data_ptr<float>();
  const uint8_t* page_data = pages.const_data_ptr<uint8_t>();
  const int64_t* ids = page.const_data_ptr<int64_t>();
  float* out_data = out.mutable_data_ptr<float>();
  at::parallel_for(0, page.numel(), std::max<int64_t>(kScoreGrain / page_tokens, 1), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      TORCH_CHECK_INDEX(ids[item] >= 0 && ids[item] < pages.size(0), "landmark_scores: page ", ids[item],
                        " is outside a pool of ", pages.size(0));
      const uint8_t* codes = page_data + ids[item] * pages.size(1);
      const auto* scale = reinterpret_cast<const at::Half*>(codes + page_tokens * pieces);
      const int64_t head = item / per_head, first = item % per_head * page_tokens;
      for (int64_t query = head * queries; query < (head + 1) * queries; ++query) {
        for (int64_t token = 0; token < page_tokens; ++token) {
          out_data[query * tokens + first + token] = score_key(
              lut_data + query * pieces * kHiggsCodes, codes + token * pieces, pieces, static_cast<float>(scale[token]));
        }
      }
    }
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(vllm_kvplug, CPU, m) {
  m.impl("higgs_encode", &higgs_encode);
  m.impl("higgs_decode", &higgs_decode);
  m.impl("higgs_scores", &higgs_scores);
  m.impl("landmark_scores", &landmark_scores);
}

}  // namespace kvplug
