// Sizes of HIGGS codes, shared by the CPU and CUDA. Free of torch headers.
#pragma once

#ifdef __CUDACC__
#define KVPLUG_BOTH __host__ __device__
#else
#define KVPLUG_BOTH
#endif

namespace kvplug {

constexpr int kHiggsCodes = 256;     // code vectors of a grid
constexpr int kHiggsMaxGroup = 256;  // values of a row, padded to a power of two
constexpr float kHalfMax = 65504.0f;

// Within [-most, most]; a NaN stays one.
KVPLUG_BOTH inline float clamp(float x, float most) {
  return x > most ? most : x < -most ? -most : x;
}

}  // namespace kvplug
