#pragma once

#include "entry.h"

namespace inplace_ops {

// x where x > 0, otherwise negative_slope * x. The gradient is multiplied, as PyTorch's: a slope of
// 0 times an infinite gradient is NaN.
template <class T>
struct LeakyReLU {
  using Scalar = T;
  using C = opmath_t<T>;
  using Arguments = Types<double>;
  static constexpr Kind kKind = Kind::kMask;
  static constexpr const char* kName = "leaky_relu";
  static constexpr const char* kSchema = ", float negative_slope";
  C negative_slope;

  HOST_DEVICE explicit LeakyReLU(double slope) : negative_slope(C(slope)) {}

  HOST_DEVICE C value(C x) const { return multiply_unless(mask(x), x, negative_slope); }
  HOST_DEVICE bool mask(C x) const { return x > C(0); }
  HOST_DEVICE C gradient(C grad, bool mask) const {
    return multiply_unless(mask, grad, negative_slope);
  }
};

}  // namespace inplace_ops
