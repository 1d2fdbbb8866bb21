// Emulates csrc/cuda/intrinsics.h on the host: each function returns its exact value plus the
// largest error that the PTX ISA allows (9.1, sections 9.7.3.13, 15, 20 and 21), or a multiple of
// it. Subnormals count as 0, as with .ftz.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace inplace_ops::hardware {

enum Function { kExp2, kLog2, kReciprocal, kSqrt, kFunctions };

// Multiples of the documented errors. With a seed, the error of each argument is multiplied by a
// random number as well: between -1 and 1 for an even seed, -1 or 1 for an odd one.
struct Errors {
  double multiples[kFunctions] = {};
  uint64_t seed = 0;
};
inline Errors errors;

inline double random_factor(Function function, float x) {
  if (errors.seed == 0) return 1.0;
  uint32_t pattern;
  memcpy(&pattern, &x, sizeof(pattern));
  // Vigna, "splitmix64".
  uint64_t z = errors.seed + 0x9e3779b97f4a7c15ull * ((uint64_t(pattern) << 2) + function + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  const double factor = double(int64_t(z ^ (z >> 31))) * 0x1p-63;
  return errors.seed % 2 == 0 ? factor : factor < 0.0 ? -1.0 : 1.0;
}

template <class To, class From>
To pattern_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

inline float flushed(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

// The spacing of floats at x, from the exponent of x.
inline double unit_in_the_last_place(double x) {
  constexpr uint64_t exponent = 0x7ffull << 52, digits = 23ull << 52;
  return pattern_cast<double>((pattern_cast<uint64_t>(x) & exponent) - digits);
}

// Returns the exact value plus the error, as a float whose rounding does not make the error larger.
inline float disturbed(Function function, float x, double exact, double largest_error) {
  if (!std::isfinite(exact) || exact == 0.0) return float(exact);
  const double error = errors.multiples[function] * random_factor(function, x) * largest_error;
  float result = float(exact + error);
  if (error != 0.0 && std::fabs(result - exact) > std::fabs(error)) {
    const bool too_large = std::fabs(result) > std::fabs(exact);
    result = pattern_cast<float>(pattern_cast<uint32_t>(result) + (too_large ? -1 : 1));
  }
  return flushed(result);
}

// At most 2 units in the last place from the correctly rounded result.
inline float exp2(float x) {
  const double exact = std::exp2(double(flushed(x)));
  const double rounded = float(exact);
  return disturbed(kExp2, x, rounded, 2.0 * unit_in_the_last_place(exact));
}

inline float log2(float x) {
  const double exact = std::log2(double(flushed(x)));
  const bool near_one = x > 0.5f && x < 2.0f;
  return disturbed(kLog2, x, exact, near_one ? 0x1p-22 : 0x1p-22 * std::fabs(exact));
}

inline float reciprocal(float x) {
  const double exact = 1.0 / double(flushed(x));
  return disturbed(kReciprocal, x, exact, unit_in_the_last_place(exact));
}

inline float sqrt(float x) {
  const double exact = std::sqrt(double(flushed(x)));
  return disturbed(kSqrt, x, exact, 0x1p-23 * exact);
}

// Computes exp as CUDA's expf does: exp2 of the fractional part of x / ln 2, scaled by a power
// of 2.
inline float exp(float x) {
  const double scaled = double(x) * 1.4426950408889634;
  const double whole = std::floor(scaled);
  if (!(std::fabs(whole) < 1000.0)) return std::exp(x);
  return float(std::ldexp(double(exp2(float(scaled - whole))), int(whole)));
}

inline float saturate(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

inline uint32_t byte_of(uint32_t word, int i) { return word >> (8 * i) & 0xffu; }

inline float from_half(uint16_t bits) { return float(pattern_cast<_Float16>(bits)); }
inline uint16_t to_half(float x) { return pattern_cast<uint16_t>(_Float16(x)); }

// Rounds to nearest, ties to even, between the two neighboring values.
inline uint16_t to_bfloat16(float x) {
  if (std::isnan(x)) return 0x7fff;
  const uint32_t pattern = pattern_cast<uint32_t>(x);
  const uint32_t below = pattern >> 16, rest = pattern & 0xffffu;
  const bool up = rest > 0x8000u || (rest == 0x8000u && below % 2 == 1);
  return uint16_t(below + up);
}

inline uint32_t to_halves(float low, float high) {
  return to_half(low) | uint32_t(to_half(high)) << 16;
}
inline uint32_t to_bfloat16s(float low, float high) {
  return to_bfloat16(low) | uint32_t(to_bfloat16(high)) << 16;
}

inline float round_to_bfloat16(float x) {
  return pattern_cast<float>(uint32_t(to_bfloat16(x)) << 16);
}

}  // namespace inplace_ops::hardware
