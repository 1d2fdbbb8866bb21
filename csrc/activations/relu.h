#pragma once

#include "entry.h"

namespace inplace_ops {

// relu(x) = max(x, 0). Special cases match PyTorch's: NaN stays NaN, with gradient 1; -0.0 stays
// -0.0; the gradient is selected, not multiplied, so that an infinite incoming gradient gives 0
// where the input is negative.
template <class T>
struct ReLU : WithoutArguments {
  using Scalar = T;
  using C = comparison_t<T>;
  static constexpr Kind kKind = Kind::kPiecewiseLinear;
  static constexpr const char* kName = "relu";

  HOST_DEVICE C value(C x) const { return less_than_zero(x) ? C{} : x; }
  HOST_DEVICE bool mask(C x) const { return !at_most_zero(x); }
  HOST_DEVICE C gradient(C grad, bool mask) const { return mask ? grad : C{}; }
};

}  // namespace inplace_ops
