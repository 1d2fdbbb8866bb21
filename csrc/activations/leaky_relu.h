#pragma once

#include "entry.h"

namespace inplace_ops {

// leaky_relu(x) = x where x > 0, otherwise negative_slope * x. As in PyTorch, the gradient is a
// product: a slope of 0 times an infinite gradient is NaN.
template <class T>
struct LeakyReLU {
  using Scalar = T;
  // The product needs every half as float, so that selecting stored halves would save nothing.
  using C = std::conditional_t<std::is_same_v<T, Half>, float, comparison_t<T>>;
  using Arguments = Types<double>;
  static constexpr Kind kKind = Kind::kPiecewiseLinear;
  static constexpr const char* kName = "leaky_relu";
  static constexpr const char* kSchema = ", float negative_slope";
  opmath_t<T> negative_slope;

  HOST_DEVICE explicit LeakyReLU(double slope) : negative_slope(opmath_t<T>(slope)) {}

  HOST_DEVICE C value(C x) const { return multiply_unless(mask(x), x); }
  HOST_DEVICE bool mask(C x) const { return greater_than_zero(x); }
  HOST_DEVICE C gradient(C grad, bool mask) const { return multiply_unless(mask, grad); }

 private:
  HOST_DEVICE C multiply_unless(bool condition, C x) const {
    const C product = store<C>(load(x) * negative_slope);
    return condition ? x : product;
  }
};

}  // namespace inplace_ops
