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
constexpr float kMinimumYHigh = -0x1.1d25d0p-2f;
constexpr float kMinimumYLow = 1.29792825e-8f;  // kMinimumY - kMinimumYHigh

// What stands for an x on the left whose y has underflowed to -0: silu' is 0 there.
constexpr float kUnderflowed = -1e4f;

template <class T>
struct SiluFit;

// Minimax fits, ascending powers, each to what its format needs: core, for low <= p <= high, is
// 1 - sigmoid(x) of p; left is 1 / |x| of v = sqrt(x_min - ln(-y)); right is W(z) / z of z = y
// exp(-y).
template <>
struct SiluFit<float> {
  static constexpr float low = -0.25f, high = 1.5f;
  static constexpr float half_ulp = 0x1p-26f;  // half the spacing of y in [-1/2, -1/4)
  HOST_DEVICE static float core(float p) {
    constexpr float c[] = {.449261576f,     -.514502764f,   .0784921795f,   .0720168129f,
                           -.00932671782f,  .000534789346f, -.0035590718f,  -.000224183808f,
                           -.00106902746f,  .00138421776f,  .000490803272f, -.0010155905f,
                           -.000558009779f, .000702388468f};
    return polynomial(c, p - 0.625f);
  }
  HOST_DEVICE static float left(float v) {
    constexpr float c[] = {.116771802f, 1.27455866f, 4.28501034f,  1.54569292f,  -15.1126881f,
                           45.5967941f, 339.664246f, -1069.11938f, -4170.81738f, 15204.3486f};
    return polynomial(c, 1.0f / (v + 2.0f) - 0.234375f);
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
  static constexpr float half_ulp = 0x1p-13f;
  HOST_DEVICE static float core(float p) {
    constexpr float c[] = {.449281514f,    -.51452899f,   .0777589455f, .0716949254f,
                           -.00645606872f, .00142070418f, -.0069206343f};
    return polynomial(c, p - 0.625f);
  }
  HOST_DEVICE static float left(float v) {
    constexpr float c[] = {.116754725f, 1.27844516f, 4.20964872f, 1.08268376f};
    return polynomial(c, 1.0f / (v + 2.0f) - 0.234375f);
  }
  HOST_DEVICE static float right(float z) {
    constexpr float c[] = {.999992013f, -.998399138f, 1.44782043f, -2.0395968f, 1.67252827f};
    return polynomial(c, z);
  }
};
template <>
struct SiluFit<BFloat16> {
  static constexpr float low = -0.4f, high = 1.8f;
  static constexpr float half_ulp = 0x1p-10f;
  HOST_DEVICE static float core(float p) {
    constexpr float c[] = {.386154115f,  -.489665002f, .108595863f,
                           .0614286661f, -.017939182f, .00190267887f};
    return polynomial(c, p - 0.75f);
  }
  HOST_DEVICE static float left(float v) {
    constexpr float c[] = {.117391826f, 1.26369229f, 4.09614474f, 2.99636683f};
    return polynomial(c, 1.0f / (v + 2.0f) - 0.234375f);
  }
  HOST_DEVICE static float right(float z) {
    constexpr float c[] = {.999821603f, -.977129102f, 1.05023682f};
    return polynomial(c, z);
  }
};

template <class C>
HOST_DEVICE C larger(C a, C b) {
  return a > b ? a : b;
}

// p at the middle of the inputs that share y: y stands for [y - half_ulp, y + half_ulp], and near
// the minimum, where silu is flat, that is a wide interval of x. excess = y - kMinimumY.
template <class C>
HOST_DEVICE C middle_root(C excess, C half_ulp, bool left) {
  const C above = sqrt_of(larger(excess + half_ulp, C(0)));
  const C below = sqrt_of(larger(excess - half_ulp, C(0)));
  const C p = C(0.5) * (above + below);
  return left ? -p : p;
}

// A point of the curve: x and sigmoid(x).
template <class C>
struct SiluPoint {
  C x, sigmoid;
};

template <class C>
HOST_DEVICE C sigmoid(C x) {
  return C(1) / (C(1) + exp_of(-x));
}

// The inverse for a float y that was stored as T, in two parts: the core, where nearly all inputs
// of a network lie, and the tails. NaN lies in the core and gives NaN.
template <class T>
HOST_DEVICE bool is_silu_tail(float y, bool left) {
  using Fit = SiluFit<T>;
  constexpr float left_end = float(kMinimumY + double(Fit::low) * double(Fit::low));
  constexpr float right_end = float(kMinimumY + double(Fit::high) * double(Fit::high));
  return y > (left ? left_end : right_end);
}

template <class T>
HOST_DEVICE SiluPoint<float> silu_inverse_core(float y, bool left) {
  using Fit = SiluFit<T>;
  const float half_ulp = y < -0.125f ? Fit::half_ulp : 0.0f;
  const float p = middle_root((y - kMinimumYHigh) - kMinimumYLow, half_ulp, left);
  const float s = 1.0f - Fit::core(p);
  return {y / s, s};
}

template <class T>
HOST_DEVICE SiluPoint<float> silu_inverse_tail(float y, bool left) {
  using Fit = SiluFit<T>;
  const float e = exp_of(-y);
  const float right_x = y + y * e * Fit::right(y * e);

  const float depth = larger(float(kMinimumX) - log_of(-y), 0.0f);
  const float v = sqrt_of(depth < 107.0f ? depth : 107.0f);
  const float left_inverse = -Fit::left(v);

  const float quotient = select(left, 1.0f, y) / select(left, left_inverse, right_x);
  const float left_x = select(y == 0.0f, kUnderflowed, quotient);
  return {select(left, left_x, right_x), select(left, y * left_inverse, quotient)};
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
  const double p = middle_root(y - kMinimumY, y < -0.125 ? 0x1p-55 : 0.0, left);
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
      const double s = sigmoid(x);
      x -= (log_of(-x * s) - log_y) / (1.0 / x + 1.0 - s);
    }
  } else {
    x = silu_inverse<float, SiluRegion::kAny>(float(y), left).x;
    for (int step = 0; step < 2; ++step) {
      const double s = sigmoid(x);
      x -= (x * s - y) / (s * (1.0 + x * (1.0 - s)));
    }
  }
  return {x, sigmoid(x)};
}

// Which bits of x's pattern are kept beside the branch: bits - 1 of them, from bit `shift` up. The
// highest kept bit is fixed by how far the inverse can be off: half of 2^(shift + bits - 1).
template <class T>
HOST_DEVICE int kept_shift(int bits) {
  return sizeof(T) == 8 ? 29 - bits : sizeof(T) == 4 ? 14 - bits : 0;
}

template <class T>
HOST_DEVICE bool is_left_of_minimum(T x) {
  // In float no value lies between kMinimumX and its nearest, which is the smaller.
  return sizeof(T) == 8 ? load(x) < kMinimumX : load(x) <= float(kMinimumX);
}

template <class T>
HOST_DEVICE uint32_t silu_code(T x, int bits) {
  const uint32_t pattern = uint32_t(bit_cast<pattern_t<T>>(x) >> kept_shift<T>(bits));
  const uint32_t mask = (1u << (bits - 1)) - 1u;
  return uint32_t(is_left_of_minimum(x)) | ((pattern & mask) << 1);
}

// The point from y = silu(x) and silu_code(x, bits): of the values whose pattern has the kept bits
// the one nearest to the inverse of y.
template <class T, SiluRegion region = SiluRegion::kAny>
HOST_DEVICE SiluPoint<compute_t<T>> silu_recover(T y, uint32_t code, int bits) {
  using C = compute_t<T>;
  using Pattern = pattern_t<T>;
  using Signed = std::make_signed_t<Pattern>;
  const SiluPoint<C> estimate = silu_inverse<T, region>(load(y), code & 1u);

  const int shift = kept_shift<T>(bits);
  const Pattern pattern = bit_cast<Pattern>(store<T>(estimate.x));
  constexpr Pattern sign_bit = Pattern(Pattern(1) << (8 * sizeof(T) - 1));
  const Pattern magnitude = Pattern(pattern & Pattern(~sign_bit));

  // A cell is the 2^shift patterns that share all but the bits below the kept ones, and the kept
  // ones repeat every `window` patterns. Below 0 (of a tiny x) the closest is 0.
  const int32_t cell = 1 << shift, window = cell << (bits - 1);
  const int32_t middle_of_code = (int32_t(code >> 1) << shift) + cell / 2;
  const int32_t offset =
      ((middle_of_code + window / 2 - int32_t(magnitude)) & (window - 1)) - window / 2;
  const Signed middle = larger(Signed(Signed(magnitude) + Signed(offset)), Signed(0));
  const Signed first = Signed(middle - cell / 2), last = Signed(first + (cell - 1));
  // Within the cell: the middle next to the minimum, where the estimate says nothing, otherwise the
  // value nearest to the estimate.
  constexpr C flat = sizeof(T) == 8 ? C(1e-5) : C(0.03);
  const C distance = estimate.x - C(kMinimumX);
  const bool is_flat = (distance < C(0) ? -distance : distance) < flat;
  const Signed not_below = larger(Signed(magnitude), first);
  const Signed nearest = not_below < last ? not_below : last;
  const Signed closest = shift > 0 && is_flat ? middle : nearest;
  const C x = load(bit_cast<T>(Pattern(Pattern(closest) | (pattern & sign_bit))));

  // With the branch alone nothing was learned: the estimate itself, not rounded to T, is better.
  if (bits == 1) return estimate;
  if constexpr (std::is_same_v<T, float>) {
    // The step is so small that the next term of sigmoid's Taylor series is lost in float.
    const float s = estimate.sigmoid, step = x - estimate.x;
    return {x, s + step * s * (1.0f - s)};
  } else {
    return {x, sigmoid(x)};
  }
}

}  // namespace inplace_ops
