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

  // Chosen apart from the product: or the compiler rounds both of its results to 16 bits.
  HOST_DEVICE C slope(bool mask) const {
    if constexpr (sizeof(C) == 8) return mask ? C(1) : negative_slope;
    return select(mask, 1.0f, float(negative_slope));
  }

  HOST_DEVICE C value(C x) const { return x * slope(mask(x)); }
  HOST_DEVICE bool mask(C x) const { return x > C(0); }
  HOST_DEVICE C gradient(C grad, bool mask) const { return grad * slope(mask); }
};

}  // namespace inplace_ops
