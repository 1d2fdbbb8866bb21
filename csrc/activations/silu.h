// silu(x) = x * sigmoid(x) (Elfwing, Uchibe, Doya, 2017; swish in Ramachandran, Zoph, Le, 2017).
//
// The inverse is x = y + W(y exp(-y)) with Lambert's W: W_0 right of the minimum, W_-1 left of it
// (Corless, Gonnet, Hare, Jeffrey, Knuth, "On the Lambert W function", 1996). The tests
// use this formula as the reference.
#pragma once

#include "../inverse.h"
#include "entry.h"

namespace inplace_ops {

template <class T>
struct SiLU : SmoothActivation {
  using Scalar = T;
  using C = opmath_t<T>;
  static constexpr const char* kName = "silu";
  static constexpr int kDefaultBits = kTypicalBits<T>;
  static constexpr double kMinimumX = -1.2784645427610737, kMinimumY = -0.2784645427610738;
  static constexpr double kMinimumYLow = 1.5523606315812798e-18;
  static constexpr double kLowestDerivative = -0.09983932012886691;
  static constexpr double kHighestDerivative = 1.099839320128867;

  // x, sigmoid(x), and 1 - sigmoid(x) computed as sigmoid(-x), without cancellation.
  struct Point {
    C x, gate, complement;
  };

  HOST_DEVICE static C gate_derivative(Point point) { return point.gate * point.complement; }

  HOST_DEVICE static C derivative(Point point) {
    return point.gate * (C(1) + point.x * point.complement);
  }

  HOST_DEVICE static C second_derivative(Point point) {
    return gate_derivative(point) * (C(2) + point.x * (point.complement - point.gate));
  }

  HOST_DEVICE static Point point(C x) {
#ifdef INPLACE_OPS_HARDWARE
    if constexpr (sizeof(T) == 2) {
      // Computes a quarter of the denominator 1 + exp(-x): its reciprocal is a normal number as
      // long as exp(-x) is finite.
      const float quarter = approx_power(x * -kNatural - 2.0f);
      const float reciprocal = approx_reciprocal(quarter + 0.25f);
      return {x, 0.25f * reciprocal, smaller(quarter * reciprocal, 1.0f)};
    }
#endif
    const C e = exp_of(-x), s = approx_reciprocal(C(1) + e);
    return {x, s, smaller(e * s, C(1))};  // 1 where e is infinite
  }

  HOST_DEVICE static C value(C x) {
    if constexpr (sizeof(T) == 2) return x * point(x).gate;
    const C value = quotient(x, C(1) + exp_of(-x));
    // tools/fit_inverse.py: silu.value
    constexpr C c[] = {C(0.10890585285990005), C(0.04888293233231563)};
    return value_near_minimum<SiLU>(x, c, value);
  }

  // The core region: x > -4.5, where exp(-x) does not overflow. On a CPU, which collects the
  // elements of the tail, a smaller core region is faster in float: -2.2 < x < 2.6, where the fit
  // needs no step of Newton's method.
#ifdef INPLACE_OPS_HARDWARE
  static constexpr bool kFitIsExact = false;
#else
  static constexpr bool kFitIsExact = std::is_same_v<T, float>;
#endif
  static constexpr float kFitLeftEnd = -0.0494412412f, kFitRightEnd = 1e30f;
  static constexpr float kLeftEnd = kFitIsExact ? -0.219451076f : kFitLeftEnd;
  static constexpr float kRightEnd = kFitIsExact ? 2.42024011f : kFitRightEnd;
  static constexpr double kScale = 5.75;  // from x = 5.5 on the gate is nearly 1
  static constexpr double kLowestX = -709.0;

  HOST_DEVICE static Point core_point(float x) {
    const float e = approx_exp(-x), s = approx_reciprocal(1.0f + e);
    return {x, s, e * s};
  }

  HOST_DEVICE static Point nearby_point(Point point, C step) {
    C difference = step * gate_derivative(point);
    if constexpr (!kFitIsExact)
      difference *= C(1) + C(0.5) * step * (point.complement - point.gate);
    return {point.x + step, point.gate + difference, point.complement - difference};
  }

  // Minimax fits, in ascending powers of signed_root, of the gate divided by kPatternScale. Their
  // errors are at most 0.8% of x, which Newton's step or the saved bits correct. Further, in
  // - 16 bits: at most 5e-4 for |x - x_min| < 0.2. They change the derivative by at most 3.2e-4,
  //   and for inputs from N(0, 1) by less than 1e-8 on average;
  // - float: between x = -2.2 and 2.6 they change the derivative by at most 3e-7.
  HOST_DEVICE static float gate_fit(float root) {
    if constexpr (sizeof(T) == 2) {
      constexpr float scale = 1.0f / kPatternScale<T>;
      // tools/fit_inverse.py: silu.gate.16
      constexpr float c[] = {scale * 0.21787994f, scale * 1.2371898f, scale * 0.47113183f,
                             scale * -1.6870245f, scale * 3.080444f,  scale * -7.4770575f,
                             scale * 8.250818f,   scale * -3.1010354f};
      return polynomial(c, root);
    } else {
      // tools/fit_inverse.py: silu.gate.32
      constexpr float c[] = {0.5985355f,  1.193676f,   -0.56561446f, -0.9455266f,
                             0.3066649f,  0.18783025f, 1.0657444f,   -1.1855748f,
                             -5.4445558f, 13.764003f,  47.715797f,   -93.616684f,
                             -189.24748f, 303.1352f,   304.55933f,   -441.16632f};
      return polynomial(c, root - 0.3f);
    }
  }

  HOST_DEVICE static float core_estimate(float y, bool left) {
    return y * approx_reciprocal(gate_fit(signed_root<SiLU>(y, left)));
  }

  HOST_DEVICE static Point fit_point(float y, bool left) {
    if constexpr (!kFitIsExact) return core_point(core_estimate(y, left));
    const float gate = gate_fit(signed_root<SiLU>(y, left));
    return {y * approx_reciprocal(gate), gate, 1.0f - gate};
  }

  HOST_DEVICE static float tail_estimate(float y, bool left) {
    // 1 / |x| as a polynomial in 1 / (v + 2) - 0.234375, with v = sqrt(x_min - ln(-y)).
    // tools/fit_inverse.py: silu.tail
    constexpr float c[] = {0.116773725f, 1.2743933f, 4.285562f, 1.6536303f, -15.843737f,
                           23.471603f,   433.96817f, 794.0841f, -4410.926f, -15608.225f};
    const float depth = larger(float(kMinimumX) - approx_log(-y), 0.0f);
    const float v = approx_sqrt(smaller(depth, 87.0f));
    const float x = -approx_reciprocal(polynomial(c, approx_reciprocal(v + 2.0f) - 0.234375f));
    const float tail = select(left, select(y == 0.0f, kUnderflowed, x), y);
    if constexpr (!kFitIsExact) return tail;
    const Point point = core_point(core_estimate(y, left));
    const float newton = (point.x * point.gate - y) / derivative(point);
    return select(y <= (left ? kFitLeftEnd : kFitRightEnd), point.x - newton, tail);
  }

  HOST_DEVICE static Point recovered_point(C x, C y, bool) {
    const C nan_if_not_finite = y - y;
    return point(x + nan_if_not_finite);
  }

  HOST_DEVICE static double inverse(double y, bool left) {
    // tools/fit_inverse.py: silu.inverse
    constexpr double series[] = {kMinimumX,
                                 3.0302216013580994,
                                 -2.06074765111241476,
                                 2.90081780557014534,
                                 -3.98644528060386959,
                                 6.03466916846034026,
                                 -9.45983958017323796,
                                 15.2858473906355159,
                                 -25.2291157597082491,
                                 42.3279957510526701,
                                 -71.9389859178529584};
    return newton_inverse<SiLU>(y, left, series);
  }
};

}  // namespace inplace_ops
