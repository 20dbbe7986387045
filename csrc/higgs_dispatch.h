// Turns the dtype of values and the width of a grid into template arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <type_traits>

namespace kvplug {

template <int P>
using Width = std::integral_constant<int, P>;

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
  switch (values.scalar_type()) {
    case at::kFloat:
      return with_width(float{});
    case at::kBFloat16:
      return with_width(at::BFloat16{});
    default:
      return with_width(at::Half{});
  }
}

}  // namespace kvplug
