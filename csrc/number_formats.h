// The storage formats (double, float, Half, BFloat16, integers), the type each is computed in, and
// the elementary functions, for host and device. Includes neither torch nor, on the host, CUDA.
//
// INPLACE_OPS_HARDWARE names the header with the hardware's functions where there are any: on a GPU
// cuda/hardware.h, in tests on the host its emulation.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __CUDA_ARCH__
#define INPLACE_OPS_HARDWARE "cuda/hardware.h"
#endif
#ifdef INPLACE_OPS_HARDWARE
#include INPLACE_OPS_HARDWARE
#endif

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")
#else
// Forced, so that the caller's instruction set (cpu/elementwise.h) is that of all it calls.
#define HOST_DEVICE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define NO_UNROLL
#endif

namespace inplace_ops {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

template <class To, class From>
HOST_DEVICE To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

// condition ? a : b, in bits on the host: a compiler that sees the choice moves the work of one
// side behind a branch, and then does not vectorize the loop.
HOST_DEVICE uint32_t select(bool condition, uint32_t a, uint32_t b) {
#ifdef INPLACE_OPS_HARDWARE
  return condition ? a : b;
#else
  const uint32_t mask = 0u - uint32_t(condition);
  return (a & mask) | (b & ~mask);
#endif
}

HOST_DEVICE float select(bool condition, float a, float b) {
  return bit_cast<float>(select(condition, bit_cast<uint32_t>(a), bit_cast<uint32_t>(b)));
}

// Byte i of a word, the lowest first.
HOST_DEVICE uint32_t byte_of(uint32_t word, int i) {
#ifdef INPLACE_OPS_HARDWARE
  return hardware::byte_of(word, i);
#else
  return (word >> (8 * i)) & 0xffu;
#endif
}

// The type a format is computed in: float for the 16-bit floats, otherwise the format itself.
template <class T>
struct ComputeType {
  using type = T;
};
template <>
struct ComputeType<Half> {
  using type = float;
};
template <>
struct ComputeType<BFloat16> {
  using type = float;
};
template <class T>
using compute_t = typename ComputeType<T>::type;

template <class T>
using pattern_t = std::conditional_t<sizeof(T) == 8, uint64_t,
                                     std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;

template <class T>
HOST_DEVICE compute_t<T> load(T value) {
  return value;
}

HOST_DEVICE float load(Half value) {
#ifdef INPLACE_OPS_HARDWARE
  return hardware::from_half(value.bits);
#else
  const uint32_t magnitude = (value.bits & 0x7fffu) << 13;
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const uint32_t normal = magnitude + (112u << 23);
  const uint32_t infinite = magnitude + (224u << 23);
  const float subnormal =
      bit_cast<float>(magnitude + (113u << 23)) - bit_cast<float>(uint32_t(113u << 23));
  const uint32_t finite = select(magnitude < (1u << 23), bit_cast<uint32_t>(subnormal), normal);
  return bit_cast<float>(sign | select(magnitude >= (31u << 23), infinite, finite));
#endif
}

HOST_DEVICE float load(BFloat16 value) { return bit_cast<float>(uint32_t(value.bits) << 16); }

// Rounds to nearest, ties to even.
template <class T>
HOST_DEVICE T store(compute_t<T> value) {
  if constexpr (std::is_same_v<T, Half>) {
#ifdef INPLACE_OPS_HARDWARE
    return Half{hardware::to_half(value)};
#else
    const uint32_t pattern = bit_cast<uint32_t>(value);
    const uint32_t magnitude = pattern & 0x7fffffffu;
    const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - (126u << 23);
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t special = select(magnitude > (255u << 23), 0x7e00u, 0x7c00u);
    const uint32_t finite = select(magnitude < (113u << 23), subnormal, normal);
    const uint32_t rounded = select(magnitude >= (143u << 23), special, finite);
    return Half{uint16_t(rounded | ((pattern >> 16) & 0x8000u))};
#endif
  } else if constexpr (std::is_same_v<T, BFloat16>) {
#ifdef INPLACE_OPS_HARDWARE
    return BFloat16{hardware::to_bfloat16(value)};
#else
    const uint32_t pattern = bit_cast<uint32_t>(value);
    const uint32_t rounded = (pattern + 0x7fffu + ((pattern >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (pattern >> 16) | 0x40u;
    return BFloat16{uint16_t((pattern & 0x7fffffffu) > (255u << 23) ? quiet_nan : rounded)};
#endif
  } else {
    return value;
  }
}

HOST_DEVICE double exp_of(double x) { return exp(x); }
HOST_DEVICE double log_of(double x) { return log(x); }

// c[0] + c[1] x + ... A GPU hides the latency of Horner's chain behind other threads; a CPU core
// does better with two shorter chains, of the even and the odd powers.
template <class C, int terms>
HOST_DEVICE C polynomial(const C (&c)[terms], C x) {
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

// Within [0, 1]; 0 for NaN.
HOST_DEVICE float saturate(float x) {
#ifdef INPLACE_OPS_HARDWARE
  return hardware::saturate(x);
#else
  x = x > 0.0f ? x : 0.0f;
  return x < 1.0f ? x : 1.0f;
#endif
}

// exp in float. The host's is branch-free, so that the compiler vectorizes the loop around it:
// x = n ln 2 + r, exp(r) by a Chebyshev fit on |r| <= ln(2) / 2; largest error 1.5 ulp, subnormal
// results are 0.
HOST_DEVICE float exp_of(float x) {
#ifdef INPLACE_OPS_HARDWARE
  return hardware::exp(x);
#else
  constexpr float c[] = {0.5f, 0.1666657685f, 0.04166655444f, 0.008363202972f, 0.001392621347f};
  constexpr float round_to_int = 12582912.0f;  // 1.5 * 2^23
  const float shifted = x * 1.44269504f + round_to_int;
  const uint32_t n = bit_cast<uint32_t>(shifted) - bit_cast<uint32_t>(round_to_int);
  const float whole = shifted - round_to_int;
  const float r = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
  const float mantissa = 1.0f + (r + r * r * polynomial(c, r));
  const float result = bit_cast<float>(bit_cast<uint32_t>(mantissa) + (n << 23));
  return x > 88.72283f ? INFINITY : x < -87.3f ? 0.0f : result;
#endif
}

// The rough functions are within a few units in the last place on a GPU, in one or two instructions
// without a slow path: for what is rounded to 16 bits or corrected afterwards.
HOST_DEVICE float rough_exp(float x) {
#ifdef INPLACE_OPS_HARDWARE
  return hardware::exp2(x * 1.44269504f);
#else
  return exp_of(x);
#endif
}

// ln of a positive normal float; of 0 and below, on the host, about -88.
HOST_DEVICE float rough_log(float x) {
#ifdef INPLACE_OPS_HARDWARE
  return hardware::log2(x) * 0.693147181f;
#else
  constexpr float c[] = {0.3333333118f,  -0.2499999696f, 0.2000071575f,
                         -0.1666780232f, 0.1424905765f,  -0.1242568733f,
                         0.1168541992f,  -0.1147973385f, 0.06971611471f};
  const uint32_t pattern = bit_cast<uint32_t>(x);  // its sums wrap where x is negative
  // x = 2^n (1 + f), 1 + f in [sqrt(1/2), sqrt(2))
  const int32_t n = int32_t(pattern - 0x3f3504f3u) >> 23;
  const float f = bit_cast<float>(pattern - (uint32_t(n) << 23)) - 1.0f;
  const float tail = f * f * (f * polynomial(c, f) - 0.5f);
  const float whole = float(n);
  return (f + (tail + whole * 1.42860677e-6f)) + whole * 0.693145752f;
#endif
}

HOST_DEVICE float rough_reciprocal(float x) {
#ifdef INPLACE_OPS_HARDWARE
  return hardware::reciprocal(x);
#else
  return 1.0f / x;
#endif
}

HOST_DEVICE double rough_reciprocal(double x) { return 1.0 / x; }

HOST_DEVICE float rough_sqrt(float x) {
#ifdef INPLACE_OPS_HARDWARE
  return hardware::sqrt(x);
#else
  return sqrtf(x);
#endif
}

HOST_DEVICE double rough_sqrt(double x) { return sqrt(x); }

}  // namespace inplace_ops
