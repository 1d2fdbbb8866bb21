// What host and device code share: their attributes, and bits. Includes neither torch nor, on the
// host, CUDA.
//
// INPLACE_OPS_HARDWARE names the header with the hardware's functions where there are any: on a GPU
// cuda/hardware.h, in tests on the host its emulation.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDA_ARCH__
#define INPLACE_OPS_HARDWARE "cuda/hardware.h"
#endif
#ifdef INPLACE_OPS_HARDWARE
#include INPLACE_OPS_HARDWARE
#endif

#define NO_INLINE __attribute__((noinline))
#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")
#else
#ifndef HOST_DEVICE  // tests under sanitizers define it as inline, which compiles faster
// Forced, so that the caller's instruction set (cpu/elementwise.h) is that of all it calls.
#define HOST_DEVICE inline __attribute__((always_inline))
#endif
#define UNROLL _Pragma("GCC unroll 16")
#define NO_UNROLL
#endif

namespace inplace_ops {

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

// condition ? -x : x, in which a compiler sees a choice too.
HOST_DEVICE float negate_if(bool condition, float x) {
#ifdef INPLACE_OPS_HARDWARE
  return condition ? -x : x;
#else
  return bit_cast<float>(bit_cast<uint32_t>(x) ^ select(condition, 0x80000000u, 0u));
#endif
}

// Byte i of a word, the lowest first.
HOST_DEVICE uint32_t byte_of(uint32_t word, int i) {
#ifdef INPLACE_OPS_HARDWARE
  return hardware::byte_of(word, i);
#else
  return (word >> (8 * i)) & 0xffu;
#endif
}

}  // namespace inplace_ops
