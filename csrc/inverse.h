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
// So forward saves a code of a few bits per element (InputCode): the branch, and a window of x's
// bit pattern. In the 16-bit formats the window is the lowest bits. In float and double it leaves
// out the lowest bits: in float, a code of 6 bits has bits 8 to 12 of the pattern. A code of one
// bit is the branch alone. Backward
//
// 1. estimates x from y and the branch;
// 2. rounds the estimate to the nearest number that has the saved bits.
//
// Far left no code determines x: Hardswish is 0 for all x <= -3, and y of the other activations
// underflows to -0. No gradient needs x there. The derivative is 0, or so small that any x far left
// gives the gradient within the tolerances, and is_flat() (entry.h) makes Hardswish's gradient 0
// even if the incoming gradient is infinite. Hardswish also has kinks, at -3 and 3: its estimate
// is on the side of them that y determines.
//
// Near the minimum x is analytic in root = +-sqrt(y - y_min), negative on the left branch. So the
// gate, a smooth function of x, is a smooth function of root too, and a polynomial P(root) can
// approximate it. In the core region, where nearly all inputs of a network are, backward therefore
// estimates x = y / gate as y / P(root). GELU's left branch has other fits (gelu.h). How exact the
// estimate is depends on the format:
//
// - In the 16-bit formats it is close enough: the saved bits determine the rest.
// - In float it is close enough around the minimum. Elsewhere a step of Newton's method follows,
//   unless the fit is exact enough in the whole core region (kFitIsExact).
// - In double it is only the start of Newton's method. At the minimum a series gives x instead.
//   Hardswish needs neither: its inverse is a square root.
//
// In the tail region, the rest of the domain, each activation has another estimate.
//
// tools/fit_inverse.py makes the fits and the constants. A comment with its name and that of the
// numbers marks each array.
//
// An activation's entry A (activations/*.h) has the formulas and fits. With T the storage format
// and C = opmath_t<T>, it defines
//
//   kMinimumX, kMinimumY, kMinimumYLow  the minimum: x, and y as the sum kMinimumY + kMinimumYLow;
//   kScale                              a divisor: the root is that of (y - y_min) / kScale, which
//                                       is limited to about 1;
//   kLeftEnd, kRightEnd                 the largest y of the core region on each branch;
//   Point                               x and what the derivatives need; also the gate, if Newton's
//                                       method is used;
//   point(x), core_point(x)             the point at any x, and at an x of the core region;
//   core_estimate(y, left)              x in the core region, in float, times kPatternScale. The
//                                       factor is free where a fit's coefficients contain it;
//   fit_point(y, left)                  the point at core_estimate(y, left);
//   kFitIsExact                         whether fit_point() needs no step of Newton's method;
//   tail_estimate(y, left)              x in the tail region, in float; the caller multiplies it by
//                                       kPatternScale;
//   recovered_point(x, y, left)         the point at an x that is recovered from any y. If y is NaN
//                                       or infinite, it replaces x by NaN or by a special value;
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

// The estimate of x on the left branch if y is -0: there y has underflowed, or x is in the flat
// part of Hardswish. The derivative at this x is 0.
constexpr float kUnderflowed = -1e4f;

// Shifted left by 13, the magnitude bits of a finite half, also of a subnormal one, are the
// magnitude bits of the float that is 2^112 times smaller. So InputCode decodes halves in patterns
// of float.
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

// Corrects y - y_min for the rounding of y. Near the minimum, where the activation is flat, all x
// of a wide interval have the same rounded y. The best estimate of x is the interval's midpoint.
// Below, w is the distance of a 16-bit y from y_min, in units of kSpacing.
//
// 1. The exact distances that round to w are those from max(w - 1/2, 0) to w + 1/2.
// 2. x - x_min is nearly proportional to the root of the exact distance. So the midpoint's root is
//    r = (sqrt(max(w - 1/2, 0)) + sqrt(w + 1/2)) / 2, and the corrected distance is r^2.
// 3. r^2 is (w + 1/2) / 4 at the lowest output, where w = kLowestOutput, and
//    second_lowest_midpoint() at the next output, where w = kLowestOutput + 1. At larger outputs it
//    approaches w: there the correction matters little.
// 4. So the kernels do not compute r^2. They subtract a constant that is right at the second-lowest
//    output. The difference is at least kMinRadicand, which is right at the lowest output.
//
// kLowestOutput is between -1/2 and 1/2. It is negative if y_min rounds down. Outputs in float and
// double also have errors other than rounding: their constants do not depend on y_min.
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
  // estimate stays on its branch: 0.01 ensures this for kLowestOutput = -1/2. 0.98, 0.06 and 0.15
  // are empirical, chosen so that the largest error of a derivative from one saved bit is small
  // (docs/accuracy.md has these errors).
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

// Whether the core region covers the whole left branch, down to where y underflows. If true, only
// NaN, infinity and very large y are in the tail region.
template <class A>
constexpr bool kCoreCoversLeft = A::kLeftEnd > 0.0f;

// Whether y is in the tail region. NaN and +infinity are.
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

// The code of an input x, which forward saves in `bits` bits and backward decodes. `bits` is 1, the
// activation's kDefaultBits, or 8. The highest bit is the branch, 1 on the left. The others are
// bits - 1 bits of x's bit pattern, from bit `shift` up.
//
// The patterns that agree in all bits from `shift` up are a cell, of 2^shift patterns. The saved
// bits repeat with a period of 2^(shift + bits - 1) patterns. To be decoded, an estimate of x must
// be off by less than half a period. How exact the estimates are determines the shortest period:
//
// - In float and double it fixes shift + bits, at 14 and at 29. More bits make the cells smaller.
// - In the 16-bit formats shift is 0, so that a cell is one pattern and x is recovered exactly.
//   kDefaultBits is the number of bits that this takes.
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
    // Codes of the 16-bit formats are decoded in the pattern of float. A code of one bit, the
    // branch alone, leaves the estimate unchanged.
    constexpr int float_shift = std::is_same_v<T, Half> ? 13 : std::is_same_v<T, BFloat16> ? 16 : 0;
    if (bits == 1) return;
    cell_shift_ = shift_ + float_shift;
    half_cell_ = sizeof(T) == 2 ? 0u : (1u << shift_) / 2u;
    const uint32_t half_period = 1u << (cell_shift_ + bits - 2);
    period_mask_ = 2u * half_period - 1u;
    // A pattern is a sign and a magnitude: a step up leads away from 0, and a step down must not
    // lead past 0. None does, since x itself has the saved bits: an estimate that is off by less
    // than half_period leads to x. Of two numbers that are half_period away decode() chooses the
    // one farther from 0: a step up may be half_period, a step down is less.
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
    // The saved bits repeat every period_mask_ + 1 patterns. In `target` the branch bit is just
    // above the period, and period_mask_ removes it.
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

// Returns the point at x in the core region. In float it is the point at the estimate, moved to x,
// which takes fewer instructions than core_point(x).
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

// Returns the point at x in the tail region.
template <class A>
HOST_DEVICE auto recover_tail(float y, bool left, const InputCode<A>& input_code, uint32_t code) {
  using T = typename A::Scalar;
  const float estimate = A::tail_estimate(y, left) * kPatternScale<T>;
  const auto point = A::recovered_point(input_code.decode(estimate, code), y, left);
  if constexpr (sizeof(T) == 2 || kCoreCoversLeft<A>) {
    return point;
  } else {
    // On the left y determines the point more exactly than the rounded x does: the function
    // amplifies x's rounding error. A step of Newton's method corrects the point. Above -2^-118 the
    // gate is close to the subnormal numbers, which the functions in float may replace by 0, and
    // such a step may be wrong.
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
    return A::recovered_point(input_code.decode(A::inverse(y, left), code), y, left);
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
