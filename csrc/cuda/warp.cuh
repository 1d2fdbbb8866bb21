// The lanes of a warp, on a GPU and on the host.
//
// Tests run the bodies of the kernels on the host, where no lanes run at the same time. So a body
// consists of steps: Lanes::each() calls a lambda with a lane's state, and between two steps lanes
// exchange numbers. On a GPU every lane has its own Lanes object, which stores the state of that
// lane. On the host one object stores the states of the whole warp, and a step is a loop over them.
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
#else
  template <class Work>
  void each(const Work& work) {
    for (unsigned lane = 0; lane < kWarpSize; ++lane) work(states_[lane], lane);
  }
  void swap_neighbors(uint32_t State::* word) {
    for (int lane = 0; lane < kWarpSize; lane += 2) {
      const uint32_t given = states_[lane].*word;
      states_[lane].*word = states_[lane + 1].*word;
      states_[lane + 1].*word = given;
    }
  }
  uint32_t vote(uint32_t State::* word) {
    uint32_t votes = 0;
    for (int lane = 0; lane < kWarpSize; ++lane) votes |= (states_[lane].*word & 1u) << lane;
    return votes;
  }
  template <int numbers, class Number, int count>
  void add_across(Number (State::*array)[count], int bit) {
    for (int i = 0; i < numbers; ++i) {
      for (int lane = 0; lane < kWarpSize; ++lane) {
        if (lane & bit) continue;
        Number &low = (states_[lane].*array)[i], &high = (states_[lane | bit].*array)[i];
        low = high = low + high;
      }
    }
  }

 private:
  State states_[kWarpSize];
#endif
};

}  // namespace inplace_ops
