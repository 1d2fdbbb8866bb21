// The lanes of a warp.
//
// The body of a kernel consists of steps: Lanes::each() calls a lambda with the state of the lane,
// which its Lanes object stores, and between two steps lanes exchange numbers.
#pragma once

#include <cstdint>

#include "../host_device.h"

namespace inplace_ops {

constexpr int kWarpSize = 32;

// The steps of a warp: work that each lane does by itself, and exchanges between lanes.
template <class State>
class Lanes {
 public:
#ifdef __CUDA_ARCH__
  template <class Work>
  __device__ __forceinline__ void each(const Work& work) {
    work(state_, threadIdx.x % kWarpSize);
  }
  // Lanes 2i and 2i + 1 exchange the word.
  __device__ __forceinline__ void swap_neighbors(uint32_t State::* word) {
    state_.*word = __shfl_xor_sync(0xffffffffu, state_.*word, 1);
  }
  // Bit i is the lowest bit of lane i's word.
  __device__ __forceinline__ uint32_t vote(uint32_t State::* word) {
    return __ballot_sync(0xffffffffu, state_.*word & 1u);
  }
  // Each lane adds the first numbers of an array of the lane whose number differs in one bit.
  template <int numbers, class Number, int count>
  __device__ __forceinline__ void add_across(Number (State::*array)[count], int bit) {
    UNROLL
    for (int i = 0; i < numbers; ++i)
      (state_.*array)[i] += __shfl_xor_sync(0xffffffffu, (state_.*array)[i], bit);
  }

 private:
  State state_;
#else  // no kernel runs on the host, which only compiles their code
  template <class Work>
  void each(const Work& work);
  void swap_neighbors(uint32_t State::* word);
  uint32_t vote(uint32_t State::* word);
  template <int numbers, class Number, int count>
  void add_across(Number (State::*array)[count], int bit);
#endif
};

}  // namespace inplace_ops
