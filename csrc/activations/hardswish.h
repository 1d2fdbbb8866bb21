// hardswish(x) = x * clamp(x + 3, 0, 6) / 6 (Howard et al., "Searching for MobileNetV3", 2019).
//
// Its inverse is that of a parabola, and the gate is linear in the root.
// As PyTorch's: +inf where x * 6 overflows, with gradient 1; NaN at -inf, with gradient 0, which
// the branch tells from NaN; gradient 0 at -3 and 1 at 3. At NaN it is NaN, as in PyTorch's
// vectorized float code, where its scalar code says 1.
#pragma once

#include "../inverse.h"
#include "entry.h"

namespace inplace_ops {

template <class T>
struct Hardswish : SmoothActivation {
  using Scalar = T;
  using C = opmath_t<T>;
  static constexpr const char* kName = "hardswish";
  static constexpr int kDefaultBits = sizeof(T) == 8 ? 1 : std::is_same_v<T, BFloat16> ? 5 : 6;
  static constexpr double kMinimumX = -1.5, kMinimumY = -0.375, kMinimumYLow = 0.0;
  static constexpr double kLowestDerivative = -0.5, kHighestDerivative = 1.5;

  struct Point {
    C x;
  };

  // Never 0 inside, as double backward divides by it; in half the quotient would overflow.
  HOST_DEVICE static C derivative(Point at) {
    constexpr C more = C(std::is_same_v<T, BFloat16> ? 0x1p-21 : 0.0);
    C inside = (at.x + C(1.5)) * C(1.0 / 3) + more;  // 0, but for that, at the minimum
    if constexpr (sizeof(T) > 2)
      inside = inside == C(0) ? C(sizeof(T) == 8 ? 0x1p-50 : 0x1p-21) : inside;
    return is_flat(at) ? C(0) : at.x >= C(3) ? C(1) : inside;
  }

  HOST_DEVICE static bool is_flat(Point at) { return at.x <= C(-3); }

  HOST_DEVICE static C second_derivative(Point at) {
    return at.x > C(-3) && at.x < C(3) ? C(1.0 / 3) : C(0);
  }

  HOST_DEVICE static Point point(C x) { return {x}; }

  HOST_DEVICE static C value(C x) {
    const C above = larger(x + C(3), C(0));
    const C value = x * smaller(above, C(6)) * C(1.0 / 6);
    if constexpr (sizeof(T) == 2) return value;
    constexpr C c[] = {C(1.0 / 6), C(0)};  // it is a parabola, and a polynomial has two terms
    return near_minimum<Hardswish>(x, c, value);
  }

  // The core is all that is finite.
  static constexpr float kLeftEnd = 3e38f, kRightEnd = 3e38f;
  static constexpr double kScale = 3.375;  // from x = 3 on the gate is 1
  static constexpr bool kFitIsExact = true;

  HOST_DEVICE static Point core_point(float x) { return {x}; }
  HOST_DEVICE static Point fitted(float y, bool left) { return {estimate(y, left)}; }
  HOST_DEVICE static Point moved(Point at, C step) { return {at.x + step}; }
  HOST_DEVICE static Point tail_point(C x, C y, bool left) {
    return {y - y == C(0) ? x : left ? C(-INFINITY) : y};
  }

  // Without cancellation at 0 and at -3, and on y's side of -3 and of 3, where the derivative
  // jumps.
  template <class Y>
  HOST_DEVICE static Y from_gate(Y gate, Y y, bool left) {
    constexpr Y inside = sizeof(Y) == 8 ? Y(2.9999999999999996) : Y(2.9999998f);
    const Y on_left = y < Y(0) ? larger(Y(6) * gate - Y(3), -inside) : Y(kUnderflowed);
    const Y on_right = y < Y(3) ? smaller(y * rough_reciprocal(gate), inside) : y;
    return left ? on_left : on_right;
  }

  HOST_DEVICE static float estimate(float y, bool left) {
    const float gate = 0.25f + 0.75f * signed_root<Hardswish>(y, left);
    return from_gate(gate, y, left) * kPatternScale<T>;
  }

  HOST_DEVICE static float tail_estimate(float y, bool) { return y; }

  HOST_DEVICE static double inverse(double y, bool left) {
    constexpr double sqrt_6 = 2.449489742783178;
    return from_gate(0.25 + signed_root_in_double<Hardswish>(y, left) / sqrt_6, y, left);
  }
};

}  // namespace inplace_ops
