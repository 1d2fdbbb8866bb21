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
  static constexpr double kMinimumX = -1.2784645427610738, kMinimumY = -0.2784645427610738;
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
      const float quarter = hardware::exp2(x * -1.44269504f - 2.0f);
      const float reciprocal = approx_reciprocal(quarter + 0.25f);
      return {x, 0.25f * reciprocal, smaller(quarter * reciprocal, 1.0f)};
    }
#endif
    const C e = exp_of(-x), s = approx_reciprocal(C(1) + e);
    return {x, s, smaller(e * s, C(1))};  // 1 where e is infinite
  }

  HOST_DEVICE static C value(C x) {
    if constexpr (sizeof(T) == 2) return x * point(x).gate;
    const C value = x / (C(1) + exp_of(-x));
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
  // - 16 bits: at most 5e-4 for |x - x_min| < 0.2. Elsewhere they change the derivative by at most
  //   3.2e-4, and for inputs from N(0, 1) these changes add up to 0;
  // - float: between x = -2.2 and 2.6 they change the derivative by at most 4e-7.
  HOST_DEVICE static float gate_fit(float root) {
    if constexpr (sizeof(T) == 2) {
      constexpr float scale = 1.0f / kPatternScale<T>;
      constexpr float c[] = {scale * 0.217878118f, scale * 1.23711264f, scale * 0.47054261f,
                             scale * -1.68373525f, scale * 3.08919191f, scale * -7.54011822f,
                             scale * 8.34901142f,  scale * -3.1479528f};
      return polynomial(c, root);
    } else {
      constexpr float c[] = {0.598535478f, 1.19367969f,  -0.56560719f, -0.94592607f,
                             0.305622578f, 0.200449362f, 1.09733295f,  -1.36923337f,
                             -5.85346842f, 15.1729136f,  50.3197861f,  -99.4709473f,
                             -197.188995f, 315.692993f,  313.603668f,  -452.624939f};
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
    constexpr float c[] = {0.116773717f, 1.27439272f, 4.28557062f, 1.65434301f,  -15.8441229f,
                           23.2307835f,  432.51358f,  816.036011f, -4152.12305f, -14872.8008f};
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
