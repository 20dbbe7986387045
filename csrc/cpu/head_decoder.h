// Decode attention of the queries that share one KV head, page by page. Free of torch headers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "../layout.h"

namespace kvplug {

// e^x for x <= 0, within about 2e-7 relative. Written out because calls to expf keep a loop from being vectorised.
inline float exp_nonpositive(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts
  float y = 1.0f / 5040;
  y = y * r + 1.0f / 720;
  y = y * r + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits << 23) + 0x3f800000u;  // 2^n
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return x < -87.0f ? 0.0f : y * power;
}

// Dot products of `query` with `count` rows. Four rows at a time: one load of the query serves four sums.
inline void dot_rows(const float* query, const float* rows, int64_t stride, int64_t dim, int count, float* dots) {
  int i = 0;
  for (; i + 4 <= count; i += 4) {
    const float* r0 = rows + i * stride;
    const float *r1 = r0 + stride, *r2 = r1 + stride, *r3 = r2 + stride;
    float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t d = 0; d < dim; ++d) {
      s0 += query[d] * r0[d];
      s1 += query[d] * r1[d];
      s2 += query[d] * r2[d];
      s3 += query[d] * r3[d];
    }
    dots[i] = s0;
    dots[i + 1] = s1;
    dots[i + 2] = s2;
    dots[i + 3] = s3;
  }
  for (; i < count; ++i) {
    const float* row = rows + i * stride;
    float s = 0;
#pragma omp simd reduction(+ : s)
    for (int64_t d = 0; d < dim; ++d) {
      s += query[d] * row[d];
    }
    dots[i] = s;
  }
}

// sum += weights @ rows. Four rows at a time: one load and store of the sum serves four rows.
inline void add_rows(float* sum, const float* weights, const float* rows, int64_t stride, int64_t dim, int count) {
  int i = 0;
  for (; i + 4 <= count; i += 4) {
    const float* r0 = rows + i * stride;
    const float *r1 = r0 + stride, *r2 = r1 + stride, *r3 = r2 + stride;
    const float w0 = weights[i], w1 = weights[i + 1], w2 = weights[i + 2], w3 = weights[i + 3];
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) {
      sum[d] += (w0 * r0[d] + w1 * r1[d]) + (w2 * r2[d] + w3 * r3[d]);
    }
  }
  for (; i < count; ++i) {
    const float* row = rows + i * stride;
    const float w = weights[i];
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) {
      sum[d] += w * row[d];
    }
  }
}

// Online softmax over the pages of one KV head, for the `group` queries that share it. All arithmetic is float.
// Buffers are allocated once and serve any number of heads: start(), add_page() for each page, finish().
// T: of queries and results; P: of pages.
template <typename T, typename P>
class HeadDecoder {
 public:
  HeadDecoder(int64_t group, int64_t dim)
      : group_(group), dim_(dim), query_(group * dim), sum_(group * dim), peak_(group), total_(group),
        page_(std::is_same_v<P, float> ? 0 : kPageTokens * 2 * dim) {}

  void start(const T* query, int64_t query_stride, float scale) {
    for (int64_t g = 0; g < group_; ++g) {
      for (int64_t d = 0; d < dim_; ++d) {
        query_[g * dim_ + d] = static_cast<float>(query[g * query_stride + d]) * scale;
      }
    }
    std::fill(sum_.begin(), sum_.end(), 0.0f);
    std::fill(peak_.begin(), peak_.end(), -std::numeric_limits<float>::infinity());
    std::fill(total_.begin(), total_.end(), 0.0f);
  }

  // Reads the first `count` tokens of a page and nothing behind them.
  void add_page(const P* page, int count) {
    const float* keys = as_float(page, count * 2 * dim_);
    const float* values = keys + dim_;
    for (int64_t g = 0; g < group_; ++g) {
      float weights[kPageTokens];
      dot_rows(query_.data() + g * dim_, keys, 2 * dim_, dim_, count, weights);
      float peak = peak_[g];
#pragma omp simd reduction(max : peak)
      for (int i = 0; i < count; ++i) {
        peak = weights[i] > peak ? weights[i] : peak;
      }
      const float decay = exp_nonpositive(peak_[g] - peak);
      float total = 0;
#pragma omp simd reduction(+ : total)
      for (int i = 0; i < count; ++i) {
        weights[i] = exp_nonpositive(weights[i] - peak);
        total += weights[i];
      }
      peak_[g] = peak;
      total_[g] = total_[g] * decay + total;
      float* sum = sum_.data() + g * dim_;
      if (decay != 1.0f) {
        for (int64_t d = 0; d < dim_; ++d) {
          sum[d] *= decay;
        }
      }
      add_rows(sum, weights, values, 2 * dim_, dim_, count);
    }
  }

  // Writes zeros if no page was added.
  void finish(T* out, int64_t out_stride) const {
    for (int64_t g = 0; g < group_; ++g) {
      const float inverse = total_[g] == 0.0f ? 0.0f : 1.0f / total_[g];
      for (int64_t d = 0; d < dim_; ++d) {
        out[g * out_stride + d] = static_cast<T>(sum_[g * dim_ + d] * inverse);
      }
    }
  }

 private:
  const float* as_float(const P* source, int64_t count) {
    if constexpr (std::is_same_v<P, float>) {
      return source;
    } else {
      for (int64_t i = 0; i < count; ++i) {
        page_[i] = static_cast<float>(source[i]);
      }
      return page_.data();
    }
  }

  int64_t group_, dim_;
  std::vector<float> query_, sum_;    // [group, dim]
  std::vector<float> peak_, total_;   // [group]: largest score, sum of weights relative to it
  std::vector<float> page_;           // one page in float, for reduced-precision pools
};

}  // namespace kvplug
