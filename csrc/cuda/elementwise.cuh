// Runs a functor over tensors on a CUDA device.
//
// A warp works on a tile. Each of its lanes makes kAccesses accesses to every tensor, of 16 bytes
// where the tensors are dense and aligned and of one element elsewhere, and neighbouring lanes
// access neighbouring memory. All loads of a lane come before its arithmetic, so that all of them
// are under way at once.
//
// Bandwidth. Bytes moved an element of s bytes with k kept bits: 2s forward, 2s + k/8 forward that
// keeps, 2s + k/8 backward from bits, 3s backward from the output, 3s + k/8 from both: every byte
// once. By Little's law an H200 (4.3 TB/s over 132 multiprocessors, 1 us under load) needs 32 KiB
// under way in each multiprocessor, half of it loads: two 16-byte loads a lane with a quarter of
// the 2048 lanes resident. So: two accesses a lane, which also hides their latency; blocks of 256,
// of which eight fit at 32 registers and four at 64; one tile a warp rather than a loop over few
// blocks, since the hardware hands out blocks faster than they finish (8 KiB each) and a small
// tensor then spreads over all multiprocessors; no streaming hints, since the next layer reads what
// this one writes. benchmarks/tune_cuda.py compares the alternatives.
//
// The bodies take their indices as arguments and compile for the host too, where tests run them:
// Lanes holds the state of one lane on a GPU, and of a whole warp on the host.
#pragma once

#include <limits>
#include <type_traits>

#include "../functors.h"
#include "../geometry.h"
#include "../packed_bits.h"

namespace inplace_ops {

#ifndef INPLACE_OPS_ACCESSES  // benchmarks/tune_cuda.py compares others, and an INPLACE_OPS_LOAD
#define INPLACE_OPS_ACCESSES 2
#define INPLACE_OPS_STORE "st.global"
#endif

constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr int kAccesses = INPLACE_OPS_ACCESSES;
constexpr int kVectorBytes = 16;

// The layout of tensors that lie one element after the other, where Geometry walks all others.
struct Dense {
  template <class Index>
  HOST_DEVICE int64_t offset(int, Index element) const {
    return element;
  }
};

// Elements in an access to aligned dense tensors: 16 bytes, or one of the formats of 1 and 8 bytes.
template <class T>
constexpr int kVectorElements = sizeof(T) == 2 || sizeof(T) == 4 ? kVectorBytes / sizeof(T) : 1;

struct alignas(kVectorBytes) Vector {
  uint32_t a, b, c, d;
};

template <class T, int count>
HOST_DEVICE void load_vector(T (&values)[count], const T* data) {
  static_assert(sizeof(values) == sizeof(Vector));
#if defined(__CUDA_ARCH__) && defined(INPLACE_OPS_LOAD)  // not always: it costs registers
  Vector vector;
  asm volatile(INPLACE_OPS_LOAD ".v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(vector.a), "=r"(vector.b), "=r"(vector.c), "=r"(vector.d)
               : "l"(__cvta_generic_to_global(data)));
#else
  const Vector vector = *reinterpret_cast<const Vector*>(data);
#endif
  memcpy(values, &vector, sizeof(vector));
}

template <class T, int count>
HOST_DEVICE void store_vector(T* data, const T (&values)[count]) {
  static_assert(sizeof(values) == sizeof(Vector));
  Vector vector;
  memcpy(&vector, values, sizeof(vector));
#ifdef __CUDA_ARCH__
  // nvcc 13.0 makes four accesses of four bytes of an assignment.
  asm volatile(INPLACE_OPS_STORE
               ".v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(data)),
               "r"(vector.a), "r"(vector.b), "r"(vector.c), "r"(vector.d)
               : "memory");
#else
  *reinterpret_cast<Vector*>(data) = vector;
#endif
}

// The steps of a warp: what each lane does by itself, and how lanes pass words to each other.
template <class State>
class Lanes {
 public:
#ifdef __CUDA_ARCH__
  template <class Work>
  __device__ __forceinline__ void each(const Work& work) {
    work(state_, threadIdx.x % kLanes);
  }
  // Lanes 2i and 2i + 1 exchange the word.
  __device__ __forceinline__ void swap_neighbours(uint32_t State::* word) {
    state_.*word = __shfl_xor_sync(0xffffffffu, state_.*word, 1);
  }
  // Bit i is the lowest bit of lane i's word.
  __device__ __forceinline__ uint32_t vote(uint32_t State::* word) {
    return __ballot_sync(0xffffffffu, state_.*word & 1u);
  }

 private:
  State state_;
#else
  template <class Work>
  void each(const Work& work) {
    for (unsigned lane = 0; lane < kLanes; ++lane) work(states_[lane], lane);
  }
  void swap_neighbours(uint32_t State::* word) {
    for (int lane = 0; lane < kLanes; lane += 2) {
      const uint32_t given = states_[lane].*word;
      states_[lane].*word = states_[lane + 1].*word;
      states_[lane + 1].*word = given;
    }
  }
  uint32_t vote(uint32_t State::* word) {
    uint32_t votes = 0;
    for (int lane = 0; lane < kLanes; ++lane) votes |= (states_[lane].*word & 1u) << lane;
    return votes;
  }

 private:
  State states_[kLanes];
#endif
};

// What a lane holds of a tile, in accesses of `count` elements each.
template <class Kernel, int count>
struct LaneState {
  using T = typename Kernel::Scalar;
  T in[Kernel::kInputs][kAccesses][count];
  T out[kAccesses][count];
  uint32_t codes[kAccesses][count];
  uint32_t kept, word;
};

template <int count>
constexpr int kTileElements = kLanes * kAccesses * count;

// The first element of a lane's access.
template <int count, class Index>
HOST_DEVICE Index first_element(Index tile, int access, unsigned lane) {
  return tile * kTileElements<count> + (access * kLanes + lane) * count;
}

// The group of the first of a lane's elements, without a division of the large index.
template <int count, class Index>
HOST_DEVICE int64_t first_group(Index tile, unsigned lane) {
  return tile * (kTileElements<count> / kGroup) + lane * count / kGroup;
}

// How the codes of a tile, of `max` bits at most, get to their bytes in the bit planes and back.
template <int count>
struct TileBits;

// A lane's eight elements share the bytes.
template <>
struct TileBits<8> {
  template <int max, class Kernel, class Index>
  HOST_DEVICE static void write(Lanes<LaneState<Kernel, 8>>& lanes,
                                const PackedBits<uint8_t>& packed, Index, Index tile) {
    lanes.each([&](auto& my, unsigned lane) {
      UNROLL
      for (int a = 0; a < kAccesses; ++a) {
        const int64_t group = first_group<8>(tile, lane) + a * kLanes;
        for (int low = 0; low < (max > 8 ? packed.planes : 1); low += 8)
          store_planes<max>(packed, low, group,
                            {quad_of<max>(my.codes[a], low), quad_of<max>(my.codes[a] + 4, low)});
      }
    });
  }

  template <int max, class Kernel, class Index>
  HOST_DEVICE static void read(Lanes<LaneState<Kernel, 8>>& lanes,
                               const PackedBits<const uint8_t>& packed, Index, Index tile) {
    lanes.each([&](auto& my, unsigned lane) {
      UNROLL
      for (int a = 0; a < kAccesses; ++a) {
        const int64_t group = first_group<8>(tile, lane) + a * kLanes;
        for (int low = 0; low < (max > 8 ? packed.planes : 1); low += 8) {
          const TwoWords quads = load_planes<max>(packed, low, group);
          add_quad<max>(my.codes[a], quads.first, low);
          add_quad<max>(my.codes[a] + 4, quads.second, low);
        }
      }
    });
  }
};

// Two neighbouring lanes have four each. Of every two accesses the even lane handles the bytes of
// the first and the odd lane those of the second, and they exchange the quads that this needs.
template <>
struct TileBits<4> {
  template <class Index>
  HOST_DEVICE static int64_t group(Index tile, int access, unsigned lane) {
    return first_group<4>(tile, (lane % 2) * kLanes + lane) + access * (kLanes / 2);
  }

  template <int max, class Kernel, class Index>
  HOST_DEVICE static void write(Lanes<LaneState<Kernel, 4>>& lanes,
                                const PackedBits<uint8_t>& packed, Index, Index tile) {
    UNROLL
    for (int a = 0; a < kAccesses; a += 2) {
      for (int low = 0; low < (max > 8 ? packed.planes : 1); low += 8) {
        lanes.each([&](auto& my, unsigned lane) {
          const uint32_t first = quad_of<max>(my.codes[a], low);
          const uint32_t second = quad_of<max>(my.codes[a + 1], low);
          my.kept = lane % 2 ? second : first;
          my.word = lane % 2 ? first : second;
        });
        lanes.swap_neighbours(&LaneState<Kernel, 4>::word);
        lanes.each([&](auto& my, unsigned lane) {
          const TwoWords quads = lane % 2 ? TwoWords{my.word, my.kept} : TwoWords{my.kept, my.word};
          store_planes<max>(packed, low, group(tile, a, lane), quads);
        });
      }
    }
  }

  template <int max, class Kernel, class Index>
  HOST_DEVICE static void read(Lanes<LaneState<Kernel, 4>>& lanes,
                               const PackedBits<const uint8_t>& packed, Index, Index tile) {
    UNROLL
    for (int a = 0; a < kAccesses; a += 2) {
      for (int low = 0; low < (max > 8 ? packed.planes : 1); low += 8) {
        lanes.each([&](auto& my, unsigned lane) {
          const TwoWords quads = load_planes<max>(packed, low, group(tile, a, lane));
          my.kept = lane % 2 ? quads.second : quads.first;
          my.word = lane % 2 ? quads.first : quads.second;
        });
        lanes.swap_neighbours(&LaneState<Kernel, 4>::word);
        lanes.each([&](auto& my, unsigned lane) {
          add_quad<max>(my.codes[a], lane % 2 ? my.word : my.kept, low);
          add_quad<max>(my.codes[a + 1], lane % 2 ? my.kept : my.word, low);
        });
      }
    }
  }
};

// 32 lanes with one each vote on four bytes.
template <>
struct TileBits<1> {
  template <int max, class Kernel, class Index>
  HOST_DEVICE static void write(Lanes<LaneState<Kernel, 1>>& lanes,
                                const PackedBits<uint8_t>& packed, Index elements, Index tile) {
    UNROLL
    for (int a = 0; a < kAccesses; ++a) {
      for (int plane = 0; plane < packed.planes; ++plane) {
        lanes.each([&](auto& my, int) { my.word = my.codes[a][0] >> plane; });
        const uint32_t votes = lanes.vote(&LaneState<Kernel, 1>::word);
        lanes.each([&](auto&, unsigned lane) {
          const Index first = first_element<1>(tile, a, lane * kGroup);
          if (lane < kLanes / kGroup && first < elements)
            packed.at(plane, first / kGroup) = uint8_t(votes >> (lane * kGroup));
        });
      }
    }
  }

  template <int max, class Kernel, class Index>
  HOST_DEVICE static void read(Lanes<LaneState<Kernel, 1>>& lanes,
                               const PackedBits<const uint8_t>& packed, Index elements,
                               Index tile) {
    lanes.each([&](auto& my, unsigned lane) {
      UNROLL
      for (int a = 0; a < kAccesses; ++a) {
        const Index element = first_element<1>(tile, a, lane);
        if (element >= elements) continue;
        for (int plane = 0; plane < packed.planes; ++plane) {
          const uint32_t byte = packed.at(plane, element / kGroup);
          my.codes[a][0] |= ((byte >> (element % kGroup)) & 1u) << plane;
        }
      }
    });
  }
};

// The arithmetic of one access. Where a kernel is split, the tails wait until all of the core is
// done: they are rare, and one branch costs less than one an element.
template <class Kernel, int count>
HOST_DEVICE void compute(const Kernel& kernel, LaneState<Kernel, count>& my, int access, int bits) {
  using T = typename Kernel::Scalar;
  T elements[count][Kernel::kInputs];
  bool has_tail = false;
  UNROLL
  for (int i = 0; i < count; ++i) {
    UNROLL
    for (int k = 0; k < Kernel::kInputs; ++k) elements[i][k] = my.in[k][access][i];
    uint32_t& code = my.codes[access][i];
    if constexpr (HasTail<Kernel>::value) {
      my.out[access][i] = kernel.core(elements[i], code, bits);
      has_tail |= kernel.is_tail(elements[i], code, bits);
    } else {
      my.out[access][i] = kernel(elements[i], code, bits);
    }
  }
  if constexpr (HasTail<Kernel>::value) {
    if (!has_tail) return;
    UNROLL
    for (int i = 0; i < count; ++i) {
      const uint32_t code = my.codes[access][i];
      if (kernel.is_tail(elements[i], code, bits))
        my.out[access][i] = kernel.tail(elements[i], code, bits);
    }
  }
}

// One tile, in accesses of `count` elements; of more than one only where the tile is whole.
// `planes` is the number of bit planes where the compiler is to know it, otherwise 0.
template <int count, int planes, class Kernel, class Layout, class Index>
HOST_DEVICE void run_tile(const Kernel& kernel, const Layout& layout,
                          const Operands<Kernel>& operands, Index elements, Index tile) {
  constexpr int max = planes == 0 ? Kernel::kMaxBits : planes;
  auto packed = operands.bits;
  if (planes != 0) packed.planes = planes;
  Lanes<LaneState<Kernel, count>> lanes;
  lanes.each([&](auto& my, unsigned lane) {
    UNROLL
    for (int k = 0; k < Kernel::kInputs; ++k) {
      UNROLL
      for (int a = 0; a < kAccesses; ++a) {
        const Index first = first_element<count>(tile, a, lane);
        if constexpr (count > 1) {
          load_vector(my.in[k][a], operands.in[k] + first);
        } else {
          my.in[k][a][0] = {};
          if (first < elements) my.in[k][a][0] = operands.in[k][layout.offset(k + 1, first)];
        }
      }
    }
    UNROLL
    for (int a = 0; a < kAccesses; ++a) {
      UNROLL
      for (int i = 0; i < count; ++i) my.codes[a][i] = 0;
    }
  });
  if constexpr (Kernel::kBits == Bits::kRead)
    TileBits<count>::template read<max>(lanes, packed, elements, tile);

  lanes.each([&](auto& my, unsigned lane) {
    UNROLL
    for (int a = 0; a < kAccesses; ++a) {
      compute(kernel, my, a, packed.planes);
      const Index first = first_element<count>(tile, a, lane);
      if constexpr (count > 1) {
        store_vector(operands.out + first, my.out[a]);
      } else if (first < elements) {
        operands.out[layout.offset(0, first)] = my.out[a][0];
      } else {
        my.codes[a][0] = 0;
      }
    }
  });
  if constexpr (Kernel::kBits == Bits::kWritten)
    TileBits<count>::template write<max>(lanes, packed, elements, tile);
}

template <int count>
inline int64_t tiles_of(int64_t elements) {
  return (elements + kTileElements<count> - 1) / kTileElements<count>;
}

// The tile of a warp, element by element where it is not whole. Index is as wide as the size needs.
template <int count, class Kernel, class Layout, class Index>
HOST_DEVICE void run_warp(const Kernel& kernel, const Layout& layout,
                          const Operands<Kernel>& operands, Index elements, Index tile) {
  const Index first = tile * kTileElements<count>;
  if (first >= elements) return;
  if constexpr (count > 1) {
    if (elements - first < kTileElements<count>) {
      NO_UNROLL
      for (int part = 0; part < count; ++part)
        run_tile<1, 0>(kernel, layout, operands, elements, Index(tile * count + part));
      return;
    }
    if constexpr (Kernel::kUsualBits > 0) {
      if (operands.bits.planes == Kernel::kUsualBits)
        return run_tile<count, Kernel::kUsualBits>(kernel, layout, operands, elements, tile);
    }
    if constexpr (Kernel::kTakesOneBit && Kernel::kUsualBits != 1) {
      if (operands.bits.planes == 1)
        return run_tile<count, 1>(kernel, layout, operands, elements, tile);
    }
  }
  run_tile<count, 0>(kernel, layout, operands, elements, tile);
}

template <class Kernel>
bool is_aligned(const Operands<Kernel>& operands) {
  uintptr_t addresses = reinterpret_cast<uintptr_t>(operands.out);
  for (const auto* in : operands.in) addresses |= reinterpret_cast<uintptr_t>(in);
  return addresses % kVectorBytes == 0;
}

// Calls launch(count, index, layout) with the access size, the index type and the layout to use.
template <class Kernel, class Launch>
void choose_path(const Geometry& geometry, const Operands<Kernel>& operands, const Launch& launch) {
  constexpr int vector = kVectorElements<typename Kernel::Scalar>;
  // In 32 bits no index of the last block overflows, those past the end included.
  constexpr int block_elements = kThreads / kLanes * kTileElements<1>;
  constexpr int64_t largest_small = std::numeric_limits<int32_t>::max() - block_elements;
  if (geometry.is_dense() && is_aligned(operands))
    launch(std::integral_constant<int, vector>{}, int64_t{}, Dense{});
  else if (geometry.is_dense())
    launch(std::integral_constant<int, 1>{}, int64_t{}, Dense{});
  else if (geometry.elements <= largest_small)
    launch(std::integral_constant<int, 1>{}, int32_t{}, geometry);
  else
    launch(std::integral_constant<int, 1>{}, int64_t{}, geometry);
}

}  // namespace inplace_ops
