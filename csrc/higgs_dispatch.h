// Turns the dtype of values, the width of a grid and the size of a group into template arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <type_traits>

namespace kvplug {

template <int P>
using Width = std::integral_constant<int, P>;

// Calls run(zero of the values' type); the checks have refused everything else.
template <typename Run>
void dispatch_values(at::ScalarType dtype, const Run& run) {
  switch (dtype) {
    case at::kFloat:
      return run(float{});
    case at::kBFloat16:
      return run(at::BFloat16{});
    default:
      return run(at::Half{});
  }
}

// Calls run(Width<group>{}); the checks have refused everything else.
template <typename Run>
void dispatch_group(int64_t group, const Run& run) {
  switch (group) {
    case 16:
      return run(Width<16>{});
    case 32:
      return run(Width<32>{});
    case 64:
      return run(Width<64>{});
    case 128:
      return run(Width<128>{});
    default:
      return run(Width<256>{});
  }
}

// Calls run(zero of the values' type, Width<P>{}); the checks have refused everything else.
template <typename Run>
void dispatch_higgs(const at::Tensor& values, const at::Tensor& grid, const Run& run) {
  const auto with_width = [&](auto zero) {
    switch (grid.size(1)) {
      case 2:
        return run(zero, Width<2>{});
      case 4:
        return run(zero, Width<4>{});
      default:
        return run(zero, Width<8>{});
    }
  };
  dispatch_values(values.scalar_type(), with_width);
}

}  // namespace kvplug
