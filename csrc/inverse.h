// Inverts y = x * gate(x), a smooth activation with one minimum (SiLU, GELU, Hardswish, Mish):
// backward reconstructs x from y and a few saved bits of x.
//
// NOTE [Inverting a smooth activation]
//
// In-place forward overwrites x with y, but the gradient needs x, and y alone does not determine x:
//
// 1. The function is not one-to-one. It decreases to its minimum and increases from there, so that
//    every y between the minimum and 0 has two preimages: one on each branch, left and right of the
//    minimum.
// 2. y is rounded. Many neighboring x share one y, most of all where the function is flat.
//
// So forward saves a code of a few bits per element (InputCode): the branch, and low-order bits of
// x's bit pattern. Backward
//
// 1. estimates x from y and the branch;
// 2. rounds the estimate to the nearest number that has the saved bits.
//
// Near the minimum x is analytic in root = +-sqrt(y - y_min), negative on the left branch. In the
// core region, where nearly all inputs of a network are, the estimate is therefore y / P(root),
// with a polynomial P that is fitted to the gate. How exact that is depends on the format:
//
// - In the 16-bit formats the estimate is close enough: the saved bits determine the rest.
// - In float it is close enough around the minimum. Elsewhere a step of Newton's method follows.
// - In double it is only the start of Newton's method. At the minimum a series gives x instead.
//
// In the tail region, the rest of the domain, each activation has another estimate.
//
// An activation's entry A (activations/*.h) has the formulas and fits. With T the storage format
// and C = opmath_t<T>, it defines
//
//   kMinimumX, kMinimumY, kMinimumYLow  the minimum: x, and y as the sum kMinimumY + kMinimumYLow;
//   kScale                              y - y_min where the scaled root is 1;
//   kLeftEnd, kRightEnd                 the largest y of the core region on each branch;
//   Point                               x and what the derivatives need; also the gate, if Newton's
//                                       method is used;
//   point(x), core_point(x)             the point at any x, and at an x of the core region;
//   core_estimate(y, left)              x in the core region, in float, times kPatternScale;
//   fit_point(y, left)                  the point at core_estimate(y, left);
//   kFitIsExact                         whether fit_point() needs no step of Newton's method;
//   tail_estimate(y, left)              x in the tail region, in float;
//   tail_point(x, y, left)              the point at that x;
//   nearby_point(point, step)           the point at point.x + step, for a small step;
//   derivative(point), second_derivative(point);
//   inverse(y, left)                    x in double, mostly by newton_inverse(), which needs
//   kLowestX                            a lower bound of x, at which the gate is not yet 0.
#pragma once

#include "elementary_functions.h"

namespace inplace_ops {

// Kernels may treat the two regions separately: in a warp all lanes pay for the tail's code as soon
// as one lane needs it, and the CPU kernels first collect the elements of the tail.
enum class Region { kAny, kCore, kTail };

// Replaces any x on the left branch whose y has underflowed to -0. The derivative there is 0.
constexpr float kUnderflowed = -1e4f;

template <class C>
HOST_DEVICE C larger(C a, C b) {
  return a > b ? a : b;
}

template <class C>
HOST_DEVICE C smaller(C a, C b) {
  return a < b ? a : b;
}

// The bit pattern of a half, also of a subnormal one, is contained in the pattern of the float that
// is 2^112 times smaller.
template <class T>
constexpr float kPatternScale = std::is_same_v<T, Half> ? 0x1p-112f : 1.0f;

// The spacing of the format's numbers next to the minimum of y.
template <class A, class T = typename A::Scalar>
constexpr double kSpacing =
    (A::kMinimumY < -0.25 ? 1.0 : 0.5) * (sizeof(T) == 8            ? 0x1p-54
                                          : sizeof(T) == 4          ? 0x1p-25
                                          : std::is_same_v<T, Half> ? 0x1p-12
                                                                    : 0x1p-9);

constexpr double constexpr_sqrt(double x) {
  double root = 1.0;
  for (int step = 0; step < 30; ++step) root = 0.5 * (root + x / root);
  return root;
}

// Corrects y - y_min for the rounding of y. Where the activation is flat, a wide interval of x
// shares one y. The best estimate is the interval's midpoint, whose root is that of a little less
// than y - y_min.
//
// Let w be a 16-bit output, as a distance from y_min in units of the outputs' spacing. Exact values
// from w - 1/2, though not below 0, to w + 1/2 round to w. The midpoint's root is the mean of the
// roots of both ends. Its square is (w + 1/2) / 4 at the lowest output, and
// second_lowest_midpoint() at the next one. Outputs in float and double also have errors other than
// rounding: their constants are fixed.
template <class A>
struct IntervalMidpoint {
  static_assert(-0.5 < A::kMinimumY && A::kMinimumY < -0.125,
                "kSpacing covers only this range of the minimum");
  static constexpr bool kIs16Bit = sizeof(typename A::Scalar) == 2;
  static constexpr double kMinimumInUnits = -A::kMinimumY / kSpacing<A>;
  static constexpr double kLowestOutput =
      kIs16Bit ? kMinimumInUnits - double(int64_t(kMinimumInUnits + 0.5)) : 0.0;
  static constexpr double second_lowest_midpoint() {
    return 0.5 * (1.0 + kLowestOutput) +
           0.5 * constexpr_sqrt((1.5 + kLowestOutput) * (0.5 + kLowestOutput));
  }
  // The corrected value is max(y - y_min - kOffset, 0) + kMinRadicand. It is never 0, so that the
  // estimate stays on its branch. The factor 0.98 makes it a little less than the midpoint's
  // square, since the derivative changes faster on the right.
  static constexpr double kMinRadicand =
      (kIs16Bit ? 0.01 + 0.25 * (kLowestOutput + 0.5) : 0.06) * kSpacing<A>;
  static constexpr double kOffset =
      (kIs16Bit ? 1.0 + kLowestOutput - 0.98 * second_lowest_midpoint() : 0.15) * kSpacing<A> +
      kMinRadicand;
};

// Returns (y - y_min) / kScale, corrected by IntervalMidpoint and limited to about 1.
template <class A>
HOST_DEVICE float radicand(float y) {
  constexpr double scale = 1.0 / A::kScale, lowest = A::kMinimumY + IntervalMidpoint<A>::kOffset;
  constexpr float high = sizeof(typename A::Scalar) == 2 ? 0.0f : float(A::kMinimumY);
  constexpr float low = float(lowest - double(high));
  const float above = saturate((y - high) * float(scale) - float(scale * low));
  return above + float(scale * IntervalMidpoint<A>::kMinRadicand);
}

// Returns the root of the radicand, negative on the left branch.
template <class A>
HOST_DEVICE float signed_root(float y, bool left) {
  return negate_if(left, approx_sqrt(radicand<A>(y)));
}

// Whether the core region covers the whole left branch, down to where y underflows. Then the tail
// region has no finite y except huge ones.
template <class A>
constexpr bool kCoreCoversLeft = A::kLeftEnd > 0.0f;

// Whether y is in the tail region. NaN and infinity are.
template <class A>
HOST_DEVICE bool is_in_tail(float y, bool left) {
  return !(y <= (left ? A::kLeftEnd : A::kRightEnd));
}

// Returns y at x: from a series near the minimum, and otherwise `elsewhere`, which the activation's
// formula gives. Where the function is flat, the inverse needs a more exact y than the formula's.
// The series is off by half a unit in the last place.
template <class A, class C, int terms>
HOST_DEVICE C value_near_minimum(C x, const C (&c)[terms], C elsewhere) {
  constexpr C high = C(A::kMinimumY);
  constexpr C low = C(A::kMinimumY - double(high) + A::kMinimumYLow);
  const C d = x - C(A::kMinimumX), square = d * d;
  const C series = high + (square * polynomial(c, d) + low);
  if constexpr (sizeof(C) == 8) return square < 0x1p-30 ? series : elsewhere;
  return select(square < C(0x1p-12), float(series), float(elsewhere));
}

template <class A, class C>
HOST_DEVICE bool is_near_minimum(C x, C distance) {
  const C difference = x - C(A::kMinimumX);
  return (difference < C(0) ? -difference : difference) < distance;
}

// The code of an input x, which forward saves in `bits` bits and backward decodes. The highest bit
// is the branch, 1 on the left. The others are bits - 1 bits of x's bit pattern, from bit `shift`
// up.
//
// The patterns that agree in all bits from `shift` up are a cell, of 2^shift patterns. The saved
// bits repeat with a period of 2^(shift + bits - 1) patterns. To be decoded, an estimate of x must
// be off by less than half a period: how exact the estimates are fixes shift + bits.
template <class A>
class InputCode {
 public:
  using T = typename A::Scalar;
  using C = opmath_t<T>;

  HOST_DEVICE explicit InputCode(int bits)
      : shift_(sizeof(T) == 8   ? 29 - bits
               : sizeof(T) == 4 ? 14 - bits
                                : 0),
        low_bits_mask_((1u << (bits - 1)) - 1u),
        branch_bit_(1u << (bits - 1)) {
    // Codes of the 16-bit formats are decoded in the pattern of float. A code of the branch alone
    // leaves the estimate unchanged.
    constexpr int float_shift = std::is_same_v<T, Half> ? 13 : std::is_same_v<T, BFloat16> ? 16 : 0;
    if (bits == 1) return;
    cell_shift_ = shift_ + float_shift;
    half_cell_ = sizeof(T) == 2 ? 0u : (1u << shift_) / 2u;
    const uint32_t half_period = 1u << (cell_shift_ + bits - 2);
    period_mask_ = 2u * half_period - 1u;
    // A step up may be half_period. So of two equally near numbers decode() chooses the one farther
    // from 0, and no step leads past 0.
    max_step_down_ = half_period - 1u;
  }

  HOST_DEVICE uint32_t encode(Element<T> x) const {
    const uint32_t pattern = uint32_t(bit_cast<pattern_t<T>>(x.stored) >> shift_);
    // C has no value between kMinimumX and `nearest`, so that a comparison with `nearest` is exact.
    constexpr C nearest = C(A::kMinimumX);
    constexpr bool nearest_is_left = double(nearest) < A::kMinimumX;
    const bool left = nearest_is_left ? x.value <= nearest : x.value < nearest;
    return (pattern & low_bits_mask_) | select(left, branch_bit_, 0u);
  }

  HOST_DEVICE bool is_left(uint32_t code) const { return code & branch_bit_; }

  // Returns the number nearest to the estimate of x that has the saved bits. The estimate is given
  // times kPatternScale.
  HOST_DEVICE C decode(C estimate, uint32_t code) const {
    using Pattern = pattern_t<C>;
    const Pattern pattern = bit_cast<Pattern>(estimate);
    // The saved bits repeat every period_mask_ + 1 patterns.
    const uint32_t target = (code << cell_shift_) + half_cell_;
    const uint32_t step_from_lowest = (target + max_step_down_ - uint32_t(pattern)) & period_mask_;
    const Pattern center = pattern + step_from_lowest - max_step_down_;
    if constexpr (std::is_same_v<T, C>) {
      // x may be any of the cell's 2 * half_cell_ patterns: take the one nearest to the estimate.
      // Next to the minimum the estimate cannot tell them apart: take the center.
      constexpr C flat = sizeof(T) == 8 ? C(1e-5) : C(0.03);
      const Pattern first = center - half_cell_;
      const Pattern last = center + larger(half_cell_, 1u) - 1u;
      const Pattern nearest = smaller(larger(pattern, first), last);
      return bit_cast<C>(is_near_minimum<A>(estimate, flat) ? center : nearest);
    } else {
      return bit_cast<C>(center) * (1.0f / kPatternScale<T>);
    }
  }

 private:
  int shift_;
  uint32_t low_bits_mask_, branch_bit_;
  int cell_shift_ = 0;
  uint32_t half_cell_ = 0, period_mask_ = 0, max_step_down_ = 0;
};

// Returns signed_root() in double, without kScale.
template <class A>
HOST_DEVICE double signed_root_in_double(double y, bool left) {
  const double above = y - A::kMinimumY - (A::kMinimumYLow + IntervalMidpoint<A>::kOffset);
  const double root = sqrt(larger(above, 0.0) + IntervalMidpoint<A>::kMinRadicand);
  return left ? -root : root;
}

// Returns x in double. At the minimum it is a series in signed_root_in_double(). Elsewhere Newton's
// method starts from the estimate in float. On the left, where y is small, it works on ln(-y).
template <class A, int terms>
HOST_DEVICE double newton_inverse(double y, bool left, const double (&series)[terms]) {
  const double p = signed_root_in_double<A>(y, left);
  if (!(y <= 40.0)) return y;  // NaN, or the gate rounds to 1
  if (p > -0.02 && p < 0.02) return polynomial(series, p);
  const float seed = float(y);
  double x =
      is_in_tail<A>(seed, left) ? A::tail_estimate(seed, left) : A::core_estimate(seed, left);
  if (p < -0.25) {
    if (y == 0.0) return kUnderflowed;
    const double log_y = log_of(-y);
    NO_UNROLL
    for (int step = 0; step < 6; ++step) {
      x = larger(x, A::kLowestX);
      const auto point = A::point(x);
      const double value = x * point.gate;
      x -= (log_of(-value) - log_y) * (value / A::derivative(point));
    }
  } else {
    NO_UNROLL
    for (int step = 0; step < 3; ++step) {
      const auto point = A::point(x);
      x -= (x * point.gate - y) / A::derivative(point);
    }
  }
  return x;
}

// Returns x in the core region. In the 16-bit formats core_point() computes the point from x alone.
template <class A>
HOST_DEVICE float recover_core_input(float y, uint32_t code, int bits) {
  const InputCode<A> input_code(bits);
  return input_code.decode(A::core_estimate(y, input_code.is_left(code)), code);
}

template <class A>
HOST_DEVICE auto recover_core(float y, uint32_t code, int bits) {
  if constexpr (sizeof(typename A::Scalar) == 2) {
    return A::core_point(recover_core_input<A>(y, code, bits));
  } else {
    const InputCode<A> input_code(bits);
    const auto point = A::fit_point(y, input_code.is_left(code));
    float x = point.x;
    if constexpr (!A::kFitIsExact) {
      const float newton = (point.x * point.gate - y) * approx_reciprocal(A::derivative(point));
      // Around the minimum the step is less exact than the fit. Far left, where the derivative
      // approaches 0, the step may be NaN.
      const float limited = kCoreCoversLeft<A> ? smaller(larger(newton, -0.1f), 0.1f) : newton;
      x -= select(is_near_minimum<A>(point.x, 0.25f), 0.0f, limited);
    }
    x = input_code.decode(x, code);
    auto result = A::nearby_point(point, x - point.x);
    result.x = x;
    return result;
  }
}

template <class A>
HOST_DEVICE auto recover_tail(float y, bool left, const InputCode<A>& input_code, uint32_t code) {
  using T = typename A::Scalar;
  const float estimate = A::tail_estimate(y, left) * kPatternScale<T>;
  const auto point = A::tail_point(input_code.decode(estimate, code), y, left);
  if constexpr (sizeof(T) == 2 || kCoreCoversLeft<A>) {
    return point;
  } else {
    // On the left y determines the point more exactly than the rounded x does: the function
    // amplifies x's rounding error. A step of Newton's method corrects the point.
    const float newton = (point.x * point.gate - y) * approx_reciprocal(A::derivative(point));
    return A::nearby_point(point, select(left & (y < -0x1p-118f), -newton, 0.0f));
  }
}

// Returns the point at x, from y and the code of x in `bits` bits.
template <class A, Region region = Region::kAny>
HOST_DEVICE auto recover(opmath_t<typename A::Scalar> y, uint32_t code, int bits) {
  const InputCode<A> input_code(bits);
  const bool left = input_code.is_left(code);
  if constexpr (std::is_same_v<decltype(y), double>) {
    return A::tail_point(input_code.decode(A::inverse(y, left), code), y, left);
  } else if constexpr (region == Region::kCore) {
    return recover_core<A>(y, code, bits);
  } else if constexpr (region == Region::kTail) {
    return recover_tail<A>(y, left, input_code, code);
  } else {
    return is_in_tail<A>(y, left) ? recover_tail<A>(y, left, input_code, code)
                                  : recover_core<A>(y, code, bits);
  }
}

}  // namespace inplace_ops
