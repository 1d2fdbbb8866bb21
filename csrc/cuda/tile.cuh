// A warp's tile: the elements of each lane, and how a lane loads and stores them.
//
// A lane makes kAccesses accesses to a tensor, of 16 bytes where possible (elementwise.cuh).
// Neighboring lanes access neighboring memory: those of all other lanes come between two accesses
// of a lane.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../bit_planes.h"
#include "../host_device.h"
#include "warp.cuh"

namespace inplace_ops {

constexpr int kAccesses = 2;
constexpr int kVectorBytes = 16;

// Elements of a vector access: 16 bytes, or one double.
template <class T>
constexpr int kVectorElements = sizeof(T) == 8 ? 1 : kVectorBytes / sizeof(T);

struct alignas(kVectorBytes) Vector {
  uint32_t a, b, c, d;
};

template <class T, int count>
HOST_DEVICE void load_vector(T (&values)[count], const T* data) {
  static_assert(sizeof(values) == sizeof(Vector));
  // The same load in PTX costs registers.
  const Vector vector = *reinterpret_cast<const Vector*>(data);
  memcpy(values, &vector, sizeof(vector));
}

// Stores 8 bytes: results that are cast to half the width.
template <class T, int count>
HOST_DEVICE std::enable_if_t<sizeof(T[count]) == sizeof(uint64_t)> store_vector(
    T* data, const T (&values)[count]) {
  uint32_t words[2];
  memcpy(words, values, sizeof(words));
#ifdef __CUDA_ARCH__
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(data)),
               "r"(words[0]), "r"(words[1])
               : "memory");
#else
  memcpy(data, words, sizeof(words));
#endif
}

template <class T, int count>
HOST_DEVICE std::enable_if_t<sizeof(T[count]) == sizeof(Vector)> store_vector(
    T* data, const T (&values)[count]) {
  Vector vector;
  memcpy(&vector, values, sizeof(vector));
#ifdef __CUDA_ARCH__
  // nvcc 13.0 compiles an assignment to four stores of four bytes.
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(data)),
               "r"(vector.a), "r"(vector.b), "r"(vector.c), "r"(vector.d)
               : "memory");
#else
  *reinterpret_cast<Vector*>(data) = vector;
#endif
}

// The state of a lane: its part of a tile, in accesses of `count` elements.
template <class Functor, int count>
struct LaneState {
  typename Functor::In in[Functor::kInputs][kAccesses][count];
  typename Functor::Out out[kAccesses][count];
  typename Functor::Out* out_address[kAccesses];
  uint32_t codes[kAccesses][count];
  uint32_t own, word;  // in TileBits: the word that the lane uses itself, and the one it exchanges
};

template <int count>
constexpr int kTileElements = kWarpSize * kAccesses * count;

// A tile begins at a multiple of kGroup and has kTileElements elements. With accesses of one
// element the last tile may have fewer.
struct Tile {
  int64_t first;
  int elements;

  // The group of the element at an index in the tile. The divisions are unsigned, as they take
  // fewer instructions than signed ones.
  HOST_DEVICE int64_t group(unsigned index) const {
    return uint64_t(first) / kGroup + index / kGroup;
  }
};

// The index in the tile of the first element of a lane's access.
template <int count>
HOST_DEVICE int index_in_tile(int access, unsigned lane) {
  return (access * kWarpSize + lane) * count;
}

template <int count>
inline int64_t tiles_of(int64_t elements) {
  return (elements + kTileElements<count> - 1) / kTileElements<count>;
}

}  // namespace inplace_ops
