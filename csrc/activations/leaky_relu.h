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

  HOST_DEVICE C value(C x) const { return multiply_unless(mask(x), x); }
  HOST_DEVICE bool mask(C x) const { return x > C(0); }
  HOST_DEVICE C gradient(C grad, bool mask) const { return multiply_unless(mask, grad); }

 private:
  // condition ? x : x * negative_slope. On the host the factor is chosen: or a compiler also does
  // on both results what follows; where that is rounding to BFloat16 it sees through a choice of
  // it.
  HOST_DEVICE C multiply_unless(bool condition, C x) const {
#ifdef INPLACE_OPS_HARDWARE
    return condition ? x : x * negative_slope;
#else
    if constexpr (std::is_same_v<T, BFloat16>)
      return x * select(condition, 1.0f, negative_slope);
    else
      return x * (condition ? C(1) : negative_slope);
#endif
  }
};

}  // namespace inplace_ops
