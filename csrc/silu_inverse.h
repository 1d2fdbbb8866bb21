// x from y = silu(x), from the branch (left or right of silu's minimum) and a few bits of x.
//
// x = y + W(y exp(-y)) with Lambert's W: W_0 on the right branch, W_-1 on the left (Corless,
// Gonnet, Hare, Jeffrey, Knuth, "On the Lambert W function", 1996). Evaluated in three regions of
// p = +-sqrt(y - y_min), in which x is analytic at the minimum, the branch point of W.
#pragma once

#include "number_formats.h"

namespace inplace_ops {

// The minimum of silu: silu'(kMinimumX) = 0, kMinimumY = silu(kMinimumX) = kMinimumX + 1.
constexpr double kMinimumX = -1.2784645427610738;
constexpr double kMinimumY = -0.2784645427610738;
constexpr double kMinimumYLow = 1.5523606315812798e-18;  // the rest of it

// What stands for an x on the left whose y has underflowed to -0: silu' is 0 there.
constexpr float kUnderflowed = -1e4f;

template <class T>
struct SiluFit;

// Minimax fits, ascending powers, each to what its format needs: core, for low <= p <= high, is
// sigmoid(x) of p; left is 1 / |x| of v = sqrt(x_min - ln(-y)); right is W(z) / z of z = y exp(-y).
// ulp is the spacing of y in [-1/2, -1/4).
template <>
struct SiluFit<float> {
  static constexpr float low = -0.25f, high = 1.5f;
  static constexpr double ulp = 0x1p-25;
  HOST_DEVICE static float core(float p) {
    constexpr float c[] = {.550738424f,    .514502764f,     -.0784921795f,   -.0720168129f,
                           .00932671782f,  -.000534789346f, .0035590718f,    .000224183808f,
                           .00106902746f,  -.00138421776f,  -.000490803272f, .0010155905f,
                           .000558009779f, -.000702388468f};
    return polynomial(c, p - 0.625f);
  }
  HOST_DEVICE static float left(float v) {
    constexpr float c[] = {.116771802f, 1.27455866f, 4.28501034f,  1.54569292f,  -15.1126881f,
                           45.5967941f, 339.664246f, -1069.11938f, -4170.81738f, 15204.3486f};
    return polynomial(c, rough_reciprocal(v + 2.0f) - 0.234375f);
  }
  HOST_DEVICE static float right(float z) {
    constexpr float c[] = {.999999881f, -.999960959f, 1.49753559f, -2.60724783f,
                           4.49828672f, -6.05956078f, 4.22740507f};
    return polynomial(c, z);
  }
};
template <>
struct SiluFit<Half> {
  static constexpr float low = -0.3f, high = 1.5f;
  static constexpr double ulp = 0x1p-12;
  HOST_DEVICE static float core(float p) {
    constexpr float c[] = {.217800032f,  .516361497f,   .0911090416f, -.127176883f,
                           .0514463609f, -.0273730828f, .0069206343f};
    return polynomial(c, p);
  }
  HOST_DEVICE static float left(float v) {
    constexpr float c[] = {.116754725f, 1.27844516f, 4.20964872f, 1.08268376f};
    return polynomial(c, rough_reciprocal(v + 2.0f) - 0.234375f);
  }
  HOST_DEVICE static float right(float z) {
    constexpr float c[] = {.999992013f, -.998399138f, 1.44782043f, -2.0395968f, 1.67252827f};
    return polynomial(c, z);
  }
};
template <>
struct SiluFit<BFloat16> {
  static constexpr float low = -0.4f, high = 1.8f;
  static constexpr double ulp = 0x1p-9;
  HOST_DEVICE static float core(float p) {
    constexpr float c[] = {.217554763f,  .515615455f,  .0981903015f,
                           -.125948781f, .0250742278f, -.00190267887f};
    return polynomial(c, p);
  }
  HOST_DEVICE static float left(float v) {
    constexpr float c[] = {.117391826f, 1.26369229f, 4.09614474f, 2.99636683f};
    return polynomial(c, rough_reciprocal(v + 2.0f) - 0.234375f);
  }
  HOST_DEVICE static float right(float z) {
    constexpr float c[] = {.999821603f, -.977129102f, 1.05023682f};
    return polynomial(c, z);
  }
};

template <>
struct SiluFit<double> {
  static constexpr double ulp = 0x1p-54;
};

template <class C>
HOST_DEVICE C larger(C a, C b) {
  return a > b ? a : b;
}

template <class C>
HOST_DEVICE C smaller(C a, C b) {
  return a < b ? a : b;
}

// A point of the curve: x and sigmoid(x).
template <class C>
struct SiluPoint {
  C x, sigmoid;
};

// +-sqrt(y - y_min) for the middle of the inputs that share a y: near the minimum, where silu is
// flat, that is a wide interval, and a little less than y has its middle. NaN gives the smallest.
template <class T>
HOST_DEVICE compute_t<T> silu_root(compute_t<T> y, bool left) {
  using C = compute_t<T>;
  constexpr double ulp = SiluFit<T>::ulp, shift = sizeof(T) == 2 ? 0.15 * ulp : 0.0;
  constexpr C high = C(kMinimumY + shift);
  constexpr C low = sizeof(T) == 2 ? C(0) : C(kMinimumY - double(high) + kMinimumYLow + 0.15 * ulp);
  const C p = rough_sqrt(larger((y - high) - low, C(0.06 * ulp)));
  return left ? -p : p;
}

// The inverse for a float y that was stored as T, in two parts: the core, where nearly all inputs
// of a network lie, and the tails, to which all that is not finite belongs.
template <class T>
HOST_DEVICE bool is_silu_tail(float y, bool left) {
  using Fit = SiluFit<T>;
  constexpr float left_end = float(kMinimumY + double(Fit::low) * double(Fit::low));
  constexpr float right_end = float(kMinimumY + double(Fit::high) * double(Fit::high));
  return !(y <= (left ? left_end : right_end));
}

template <class T>
HOST_DEVICE SiluPoint<float> silu_inverse_core(float y, bool left) {
  const float s = SiluFit<T>::core(silu_root<T>(y, left));
  return {y * rough_reciprocal(s), s};
}

template <class T>
HOST_DEVICE SiluPoint<float> silu_inverse_tail(float y, bool left) {
  using Fit = SiluFit<T>;
  const float e = rough_exp(-y);
  const float right_denominator = 1.0f + e * Fit::right(y * e);  // x / y

  const float depth = larger(float(kMinimumX) - rough_log(-y), 0.0f);
  const float v = rough_sqrt(depth < 107.0f ? depth : 107.0f);
  const float left_inverse = -Fit::left(v);

  const float reciprocal = rough_reciprocal(select(left, left_inverse, right_denominator));
  const float left_x = select(y == 0.0f, kUnderflowed, reciprocal);
  const float nan_if_not_finite = y - y;
  return {select(left, left_x, y * right_denominator) + nan_if_not_finite,
          select(left, y * left_inverse, reciprocal)};
}

enum class SiluRegion { kAny, kCore, kTail };

template <class T, SiluRegion region>
HOST_DEVICE SiluPoint<float> silu_inverse(float y, bool left) {
  if constexpr (region == SiluRegion::kCore) return silu_inverse_core<T>(y, left);
  if constexpr (region == SiluRegion::kTail) return silu_inverse_tail<T>(y, left);
  if (is_silu_tail<T>(y, left)) return silu_inverse_tail<T>(y, left);
  return silu_inverse_core<T>(y, left);
}

// In double: a series at the minimum, otherwise Newton's steps, in log coordinates in the left
// tail.
template <class T, SiluRegion>
HOST_DEVICE SiluPoint<double> silu_inverse(double y, bool left) {
  const double p = silu_root<double>(y, left);
  double x;
  if (!(y <= 40.0)) {
    x = y;  // NaN, or sigmoid(y) rounds to 1
  } else if (p > -0.02 && p < 0.02) {
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
    x = polynomial(series, p);
  } else if (p < -0.25 && y == 0.0) {
    x = kUnderflowed;
  } else if (p < -0.25) {
    const double log_y = log_of(-y);
    x = log_y - log_of(-log_y);
    for (int step = 0; step < 4; ++step) {
      const double s = sigmoid<double>(x);
      x -= (log_of(-x * s) - log_y) / (1.0 / x + 1.0 - s);
    }
  } else {
    x = silu_inverse<float, SiluRegion::kAny>(float(y), left).x;
    for (int step = 0; step < 2; ++step) {
      const double s = sigmoid<double>(x);
      x -= (x * s - y) / (s * (1.0 + x * (1.0 - s)));
    }
  }
  return {x, sigmoid<double>(x)};
}

// What silu keeps of an input x in `bits` bits: which branch it lies on, and from its pattern the
// bits - 1 bits from bit `shift` up. The highest of these is fixed by how far the inverse can be
// off: half of 2^(shift + bits - 1) patterns.
template <class T>
class SiluCode {
 public:
  using C = compute_t<T>;

  HOST_DEVICE explicit SiluCode(int bits)
      : shift_(sizeof(T) == 8   ? 29 - bits
               : sizeof(T) == 4 ? 14 - bits
                                : 0),
        kept_((1u << (bits - 1)) - 1u),
        branch_(1u << (bits - 1)) {
    // Of a 16-bit format: in float's pattern. With the branch alone nothing is learned of the
    // estimate: it stays as it is.
    constexpr int widened = std::is_same_v<T, Half> ? 13 : std::is_same_v<T, BFloat16> ? 16 : 0;
    if (bits == 1) return;
    cell_shift_ = shift_ + widened;
    half_cell_ = sizeof(T) == 2 ? 0u : (1u << shift_) / 2u;
    half_window_ = 1u << (cell_shift_ + bits - 2);
    window_mask_ = 2u * half_window_ - 1u;
  }

  HOST_DEVICE uint32_t encode(T x) const {
    const uint32_t pattern = uint32_t(bit_cast<pattern_t<T>>(x) >> shift_);
    // In float no value lies between kMinimumX and its nearest, which is the smaller.
    const bool left = sizeof(T) == 8 ? load(x) < C(kMinimumX) : load(x) <= C(float(kMinimumX));
    return (pattern & kept_) | select(left, branch_, 0u);
  }

  HOST_DEVICE bool is_left(uint32_t code) const { return code & branch_; }

  // Of the values that have the kept bits the one nearest to the estimate of x.
  template <bool is_finite>
  HOST_DEVICE C closest(C estimate, uint32_t code) const {
    using Pattern = pattern_t<C>;
    using Signed = std::make_signed_t<Pattern>;
    constexpr Pattern sign_bit = Pattern(1) << (8 * sizeof(C) - 1);
    // The kept bits repeat every 2 half_window_ patterns. Below 0 (of a tiny x) the closest is 0.
    // Unsigned sums, as what is not finite may come here too, in core for nothing.
    const Pattern pattern = bit_cast<Pattern>(estimate);
    Pattern magnitude = pattern & ~sign_bit;
    // A GPU's NaN is the last pattern of all; this one stays a NaN.
    if (!is_finite) magnitude = smaller(magnitude, bit_cast<Pattern>(C(NAN)));
    const uint32_t wanted = (code << cell_shift_) + half_cell_;
    const uint32_t ahead = (wanted + half_window_ - uint32_t(magnitude)) & window_mask_;
    const Pattern sum = Pattern(magnitude + ahead - half_window_);
    const Signed middle = larger(Signed(sum), Signed(0));
    Signed closest = middle;
    if constexpr (std::is_same_v<T, C>) {
      // All of the cell's 2 half_cell_ patterns are possible. Next to the minimum the estimate says
      // nothing of them.
      constexpr C flat = sizeof(T) == 8 ? C(1e-5) : C(0.03);
      const Signed first = Signed(Pattern(middle) - half_cell_);
      const Signed last = Signed(Pattern(middle) + larger(half_cell_, 1u) - 1u);
      const Signed nearest = smaller(larger(Signed(magnitude), first), last);
      const C distance = estimate - C(kMinimumX);
      closest = (distance < C(0) ? -distance : distance) < flat ? middle : nearest;
    } else if constexpr (std::is_same_v<T, Half>) {
      // Subnormal halves have other patterns in float; there the estimate is good to the last bit.
      constexpr float nearly_subnormal = 1e-4f;
      closest = magnitude < bit_cast<Pattern>(nearly_subnormal) ? Signed(magnitude) : middle;
    }
    return bit_cast<C>(Pattern(closest) | (pattern & sign_bit));
  }

 private:
  int shift_;
  uint32_t kept_, branch_;
  int cell_shift_ = 0;
  uint32_t half_cell_ = 0, half_window_ = 0, window_mask_ = 0;
};

// The point from y = silu(x) and the code of x in `bits` bits.
template <class T, SiluRegion region = SiluRegion::kAny>
HOST_DEVICE SiluPoint<compute_t<T>> silu_recover(T y, uint32_t code, int bits) {
  const SiluCode<T> kept(bits);
  const auto estimate = silu_inverse<T, region>(load(y), kept.is_left(code));
  const compute_t<T> x = kept.template closest<region == SiluRegion::kCore>(estimate.x, code);
  if constexpr (std::is_same_v<T, float>) {
    // The step is so small that the next term of sigmoid's Taylor series is lost in float.
    const float s = estimate.sigmoid, step = x - estimate.x;
    return {x, s + step * s * (1.0f - s)};
  } else {
    return {x, sigmoid<T>(x)};
  }
}

}  // namespace inplace_ops
