// What a GPU computes by instructions of its own, and how exactly, in units in the last place or
// relatively: the instructions' descriptions in "PTX ISA". Arguments and results that are subnormal
// count as 0, but for expf's and the conversions'. On the host tests/emulated_hardware.h takes the
// place of this file, with errors as large as these.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace inplace_ops::hardware {

// 2 units.
__device__ __forceinline__ float exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 2^-22 absolutely for 1/2 < x < 2, otherwise relatively.
__device__ __forceinline__ float log2(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 unit.
__device__ __forceinline__ float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 2^-23 relatively.
__device__ __forceinline__ float sqrt(float x) {
  float result;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// CUDA's own, which is made of exp2.
__device__ __forceinline__ float exp(float x) { return expf(x); }

// Costs nothing: a part of the instruction before it.
__device__ __forceinline__ float saturate(float x) { return __saturatef(x); }

// In one instruction, where nvcc makes two of a shift and a mask.
__device__ __forceinline__ uint32_t byte_of(uint32_t word, int i) {
  return __byte_perm(word, 0, 0x4440 + i);
}

// Exact, or rounded to nearest with ties to even.
__device__ __forceinline__ float from_half(uint16_t bits) {
  return __half2float(__ushort_as_half(bits));
}
__device__ __forceinline__ uint16_t to_half(float x) {
  return __half_as_ushort(__float2half_rn(x));
}
__device__ __forceinline__ uint16_t to_bfloat16(float x) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

// The same, as a float: what two numbers are converted to if the other one, the lower half, is 0.
// Such instructions have four times the rate of those that convert one.
__device__ __forceinline__ float round_to_bfloat16(float x) {
#if __CUDA_ARCH__ >= 800
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(x), "f"(0.0f));
#else
  const uint32_t bits = uint32_t(to_bfloat16(x)) << 16;
#endif
  return __uint_as_float(bits);
}

}  // namespace inplace_ops::hardware
