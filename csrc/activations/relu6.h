#pragma once

#include "entry.h"

namespace inplace_ops {

// relu6(x) = min(max(x, 0), 6). NaN stays NaN, with gradient 1 as in ReLU. PyTorch's gradient there
// is 0 or 1, depending on how its code is vectorized. At 0 and at 6 the gradient is 0.
template <class T>
struct ReLU6 : WithoutArguments {
  using Scalar = T;
  using C = opmath_t<T>;
  static constexpr Kind kKind = Kind::kPiecewiseLinear;
  static constexpr const char* kName = "relu6";

  HOST_DEVICE C value(C x) const { return x < C(0) ? C(0) : x > C(6) ? C(6) : x; }
  HOST_DEVICE bool mask(C x) const { return !(x <= C(0)) && !(x >= C(6)); }
  HOST_DEVICE C gradient(C grad, bool mask) const { return mask ? grad : C(0); }
};

}  // namespace inplace_ops
