// HIGGS of single rows on a CPU: encode, decode, and scores of encoded keys. Free of torch headers.
//
// Codes must not depend on how a compiler fuses multiplications and additions. Hence what is multiplied before a sum
// has 11 bits (values are rounded to float16, grids are float16), which makes the products exact in float, and the
// squares of the norm are exact in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "../higgs.h"

namespace kvplug {

// In place. Neighbours first, then pairs, fours and so on, the same on every device.
inline void hadamard(float* x, int n) {
  for (int step = 1; step < n; step *= 2) {
    for (int start = 0; start < n; start += 2 * step) {
      for (int i = start; i < start + step; ++i) {
        const float low = x[i], high = x[i + step];
        x[i] = low + high;
        x[i + step] = low - high;
      }
    }
  }
}

// A grid [256, P] in the two orders that loops over it want.
template <int P>
struct Grid {
  float vectors[kHiggsCodes][P];
  float columns[P][kHiggsCodes];
  float bias[kHiggsCodes];  // -|c|^2 / 2

  template <typename Half>
  explicit Grid(const Half* grid) {
    for (int n = 0; n < kHiggsCodes; ++n) {
      float square = 0;
      for (int j = 0; j < P; ++j) {
        vectors[n][j] = columns[j][n] = static_cast<float>(grid[n * P + j]);
        square += vectors[n][j] * vectors[n][j];
      }
      bias[n] = -0.5f * square;
    }
  }

  // The code vector nearest to `z`, the first of equals; 0 if `z` holds a NaN.
  uint8_t nearest(const float* z) const {
    float score[kHiggsCodes];
    float best = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : best)
    for (int n = 0; n < kHiggsCodes; ++n) {
      float sum = bias[n];
      for (int j = 0; j < P; ++j) {
        sum += z[j] * columns[j][n];
      }
      score[n] = sum;
      best = sum > best ? sum : best;
    }
    int first = kHiggsCodes;
#pragma omp simd reduction(min : first)
    for (int n = 0; n < kHiggsCodes; ++n) {
      const int found = score[n] == best ? n : kHiggsCodes;
      first = found < first ? found : first;
    }
    return static_cast<uint8_t>(first % kHiggsCodes);
  }
};

// x [dim] -> codes [group / P]; returns the scale.
template <int P, typename Half, typename T>
Half encode_row(const Grid<P>& grid, const T* x, int dim, int group, uint8_t* codes) {
  float z[kHiggsMaxGroup];
  double square = 0;
  for (int i = 0; i < group; ++i) {
    z[i] = i < dim ? static_cast<float>(x[i]) : 0.0f;
    square += static_cast<double>(z[i]) * z[i];
  }
  const float norm = static_cast<float>(std::sqrt(square));
  const bool finite = square <= std::numeric_limits<double>::max();
  const Half scale(finite ? std::min(norm, kHalfMax) : std::numeric_limits<float>::quiet_NaN());
  const float divisor = static_cast<float>(scale) == 0.0f ? 1.0f : static_cast<float>(scale);
  hadamard(z, group);
  for (int i = 0; i < group; ++i) {
    z[i] = static_cast<float>(Half(clamp(z[i] / divisor, kHalfMax)));
  }
  for (int i = 0; i < group / P; ++i) {
    codes[i] = grid.nearest(z + i * P);
  }
  return scale;
}

// codes [group / P] -> out [dim]; `most` is the largest finite T.
template <int P, typename T>
void decode_row(const Grid<P>& grid, const uint8_t* codes, float scale, int group, T* out, int dim, float most) {
  float x[kHiggsMaxGroup];
  for (int i = 0; i < group / P; ++i) {
    for (int j = 0; j < P; ++j) {
      x[i * P + j] = grid.vectors[codes[i]][j];
    }
  }
  hadamard(x, group);
  const float factor = scale / static_cast<float>(group);
  for (int i = 0; i < dim; ++i) {
    out[i] = static_cast<T>(clamp(x[i] * factor, most));
  }
}

// Score of one key: scale * sum over pieces of the look-up table [pieces, 256] at the key's codes.
inline float score_key(const float* lut, const uint8_t* codes, int pieces, float scale) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < pieces; ++i) {
    sum += lut[i * kHiggsCodes + codes[i]];
  }
  return sum * scale;
}

}  // namespace kvplug
