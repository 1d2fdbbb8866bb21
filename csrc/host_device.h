// Attributes, bit operations, minimum and maximum for code that compiles for the host and for a
// device. Includes neither torch nor, on the host, CUDA.
//
// INPLACE_OPS_HARDWARE names a header of functions that a GPU has instructions for:
// cuda/intrinsics.h on a GPU, and its emulation in tests on the host. Other host code leaves it
// undefined.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDA_ARCH__
#define INPLACE_OPS_HARDWARE "cuda/intrinsics.h"
#endif
#ifdef INPLACE_OPS_HARDWARE
#include INPLACE_OPS_HARDWARE
#endif

#define NO_INLINE __attribute__((noinline))
#define ALWAYS_INLINE __attribute__((always_inline))  // of a lambda
#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")
#else
#ifndef HOST_DEVICE  // tests under sanitizers define it as inline, which compiles faster
// Always inlined, so that functions compile for their caller's instruction set
// (cpu/instruction_sets.h).
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

// Returns condition ? a : b. The host selects bitwise: where the compiler recognizes a choice, it
// moves the work of one side behind a branch, and then does not vectorize the loop.
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

// Returns condition ? -x : x. The host computes it bitwise, for the same reason.
HOST_DEVICE float negate_if(bool condition, float x) {
#ifdef INPLACE_OPS_HARDWARE
  return condition ? -x : x;
#else
  return bit_cast<float>(bit_cast<uint32_t>(x) ^ select(condition, 0x80000000u, 0u));
#endif
}

// Returns byte i of a word. Byte 0 is the lowest.
HOST_DEVICE uint32_t byte_of(uint32_t word, int i) {
#ifdef INPLACE_OPS_HARDWARE
  return hardware::byte_of(word, i);
#else
  return (word >> (8 * i)) & 0xffu;
#endif
}

// Return the larger and the smaller of two numbers, and b if one of them is NaN.
template <class C>
HOST_DEVICE C larger(C a, C b) {
  return a > b ? a : b;
}

template <class C>
HOST_DEVICE C smaller(C a, C b) {
  return a < b ? a : b;
}

}  // namespace inplace_ops
