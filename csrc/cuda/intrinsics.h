// Functions that a GPU computes by hardware instructions. Comments give the largest errors, in
// units in the last place or relative, from the instructions' descriptions in "PTX ISA". Subnormal
// arguments and results count as 0, except those of expf and of the conversions. Tests on the host
// replace this file by tests/cuda/emulated_hardware.h, which has errors as large as these.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

namespace inplace_ops::hardware {

// Error: 2 units in the last place.
__device__ __forceinline__ float exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Error: 2^-22, absolute for 1/2 < x < 2, otherwise relative.
__device__ __forceinline__ float log2(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Error: 1 unit in the last place.
__device__ __forceinline__ float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Relative error: 2^-23.
__device__ __forceinline__ float sqrt(float x) {
  float result;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// CUDA's own function, which uses exp2.
__device__ __forceinline__ float exp(float x) { return expf(x); }

// Free: a modifier of the instruction that computes x.
__device__ __forceinline__ float saturate(float x) { return __saturatef(x); }

// One instruction, where nvcc compiles a shift and a mask to two.
__device__ __forceinline__ uint32_t byte_of(uint32_t word, int i) {
  return __byte_perm(word, 0, 0x4440 + i);
}

// Conversions: exact, or rounded to nearest with ties to even.
__device__ __forceinline__ float from_half(uint16_t bits) {
  return __half2float(__ushort_as_half(bits));
}
__device__ __forceinline__ uint16_t to_half(float x) {
  return __half_as_ushort(__float2half_rn(x));
}
__device__ __forceinline__ uint16_t to_bfloat16(float x) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

// Two conversions by one instruction. `low` goes to the lower half of the word.
__device__ __forceinline__ uint32_t to_halves(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}
__device__ __forceinline__ uint32_t to_bfloat16s(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}

// The bfloat16 nearest to x, as a float. The instruction converts two numbers; the other one, in
// the lower half, is 0. Its rate is four times that of an instruction that converts one number.
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
