// exp, log, 1/x, square roots and polynomials, for host and device. On the host the float functions
// are branch-free, so that the compiler vectorizes the loop around them. On a device they are
// hardware instructions.
#pragma once

#include <algorithm>
#include <cmath>

#include "dtypes.h"

namespace inplace_ops {

HOST_DEVICE double exp_of(double x) { return exp(x); }
HOST_DEVICE double log_of(double x) { return log(x); }

// Returns c[0] + c[1] x + ... A GPU hides the latency of Horner's chain behind other threads. A CPU
// core is faster with two shorter chains, of the even and of the odd powers.
template <class C, int terms>
HOST_DEVICE C polynomial(const C (&c)[terms], C x) {
  static_assert(terms >= 2);
#ifdef INPLACE_OPS_HARDWARE
  C sum = c[terms - 1];
  UNROLL
  for (int i = terms - 2; i >= 0; --i) sum = sum * x + c[i];
  return sum;
#else
  constexpr int last_even = (terms - 1) / 2 * 2, last_odd = terms / 2 * 2 - 1;
  const C square = x * x;
  C even = c[last_even], odd = c[last_odd];
  UNROLL
  for (int i = last_even - 2; i >= 0; i -= 2) even = even * square + c[i];
  UNROLL
  for (int i = last_odd - 2; i >= 0; i -= 2) odd = odd * square + c[i];
  return odd * x + even;
#endif
}

// Clamps x to [0, 1]. NaN, too, gives a number in [0, 1]. The host compares bit patterns, which
// from 0 up are ordered like the numbers: for two selections in float the compiler generates four.
HOST_DEVICE float saturate(float x) {
#ifdef INPLACE_OPS_HARDWARE
  return hardware::saturate(x);
#else
  const int32_t pattern = std::max(bit_cast<int32_t>(x), 0);
  return bit_cast<float>(std::min(pattern, bit_cast<int32_t>(1.0f)));
#endif
}

// Returns exp(x) in float. On the host, x = n ln 2 + r, and exp(r) is a minimax fit on
// |r| <= ln(2) / 2. The largest error is 1.5 ulp. Subnormal results are 0.
HOST_DEVICE float exp_of(float x) {
#ifdef INPLACE_OPS_HARDWARE
  return hardware::exp(x);
#else
  // tools/fit_inverse.py: exp
  constexpr float c[] = {0.49999994f, 0.16666523f, 0.041668292f, 0.008368532f, 0.0013818296f};
  constexpr float round_to_int = 12582912.0f;  // 1.5 * 2^23
  const float shifted = x * 1.44269504f + round_to_int;
  const uint32_t n = bit_cast<uint32_t>(shifted) - bit_cast<uint32_t>(round_to_int);
  const float whole = shifted - round_to_int;
  const float r = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
  const float mantissa = 1.0f + (r + r * r * polynomial(c, r));
  const float result = bit_cast<float>(bit_cast<uint32_t>(mantissa) + (n << 23));
  return select(x > 88.72283f, INFINITY, select(x < -87.3f, 0.0f, result));
#endif
}

// The approx_ functions are for values that are rounded to 16 bits or corrected afterwards. On a
// GPU they are off by a few units in the last place, and take one or two instructions without a
// slow path.

// exp(x) is approx_power(kNatural * x): a power of 2 on a GPU, and of e on the host. Where x has a
// constant factor, their product is one constant, and kNatural takes no instruction.
#ifdef INPLACE_OPS_HARDWARE
constexpr float kNatural = 1.44269504f;
HOST_DEVICE float approx_power(float x) { return hardware::exp2(x); }
#else
constexpr float kNatural = 1.0f;
HOST_DEVICE float approx_power(float x) { return exp_of(x); }
#endif

HOST_DEVICE float approx_exp(float x) { return approx_power(kNatural * x); }

// Returns ln(x) of a positive normal float. On the host 0 and positive subnormals give about -88,
// and negative arguments give finite numbers without meaning.
HOST_DEVICE float approx_log(float x) {
#ifdef INPLACE_OPS_HARDWARE
  return hardware::log2(x) * 0.693147181f;
#else
  // tools/fit_inverse.py: log
  constexpr float c[] = {0.33333313f,   -0.2500001f,  0.20002072f,   -0.1666799f, 0.14220363f,
                         -0.124062076f, 0.118834704f, -0.116701916f, 0.06749554f};
  const uint32_t pattern = bit_cast<uint32_t>(x);  // unsigned: the sums below wrap if x is negative
  // x = 2^n (1 + f), 1 + f in [sqrt(1/2), sqrt(2))
  const int32_t n = int32_t(pattern - 0x3f3504f3u) >> 23;
  const float f = bit_cast<float>(pattern - (uint32_t(n) << 23)) - 1.0f;
  const float tail = f * f * (f * polynomial(c, f) - 0.5f);
  const float whole = float(n);
  return (f + (tail + whole * 1.42860677e-6f)) + whole * 0.693145752f;
#endif
}

HOST_DEVICE float approx_reciprocal(float x) {
#ifdef INPLACE_OPS_HARDWARE
  return hardware::reciprocal(x);
#else
  return 1.0f / x;
#endif
}

HOST_DEVICE double approx_reciprocal(double x) { return 1.0 / x; }

HOST_DEVICE double quotient(double x, double y) { return x / y; }

// Returns x / y, for y >= 1. On a GPU it takes no branch, unlike the compiler's division: a
// reciprocal gives an estimate, which the remainder corrects. The result is exact to half a unit
// and a little, and to two units for |x| < 1e-37. The factors of 1/4 keep the reciprocal a normal
// number for every finite y. The remainder has the sign that gives -0.0 / y = -0.0.
HOST_DEVICE float quotient(float x, float y) {
#ifdef INPLACE_OPS_HARDWARE
  const float quarter = 0.25f * y, dividend = 0.25f * x;
  const float reciprocal = hardware::reciprocal(quarter);
  const float estimate = dividend * reciprocal;
  const float excess = fmaf(quarter, estimate, -dividend);  // not finite if x or y is not
  return fabsf(excess) < INFINITY ? fmaf(-excess, reciprocal, estimate) : estimate;
#else
  return x / y;
#endif
}

HOST_DEVICE float approx_sqrt(float x) {
#ifdef INPLACE_OPS_HARDWARE
  return hardware::sqrt(x);
#else
  return sqrtf(x);
#endif
}

}  // namespace inplace_ops
