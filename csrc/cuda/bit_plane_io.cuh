// Writes the codes of a warp's tile to the bit planes, and reads them.
//
// A byte of a plane has one bit each of eight elements (../bit_planes.h). A lane has codes, which
// are all bits of one element. How codes become bytes depends on the elements of an access:
//
// - With eight (16-bit formats) a lane has all codes of a byte, and transposes their bits.
// - With four (float) two lanes exchange half of their codes first.
// - With one, the lanes vote: a vote collects one bit of each of the 32 lanes.
#pragma once

#include <cstdint>
#include <cstring>

#include "../bit_planes.h"
#include "../host_device.h"
#include "tile.cuh"
#include "warp.cuh"

namespace inplace_ops {

// Swaps the bits in `mask` with the bits `distance` positions above them.
HOST_DEVICE uint32_t swap_bits(uint32_t x, int distance, uint32_t mask) {
  const uint32_t differ = (x ^ (x >> distance)) & mask;
  return x ^ differ ^ (differ << distance);
}

// Transposes each 4 x 4 half of a 4 x 8 bit matrix, whose rows are bytes.
HOST_DEVICE uint32_t transpose4x4(uint32_t x) {
  return swap_bits(swap_bits(x, 7, 0x00aa00aau), 14, 0x0000ccccu);
}

struct TwoWords {
  uint32_t first, second;

  HOST_DEVICE uint8_t byte(int i) const {
    return uint8_t((i < 4 ? first : second) >> (8 * (i % 4)));
  }
};

// Transposes an 8 x 8 bit matrix, whose rows are bytes, by swapping blocks of 1, 2 and 4 (Warren,
// Hacker's Delight, section 7-3), in the 32-bit words of a GPU.
HOST_DEVICE TwoWords transpose8x8(TwoWords x) {
  constexpr uint32_t low = 0x0f0f0f0fu;
  x = {transpose4x4(x.first), transpose4x4(x.second)};
  return {(x.first & low) | ((x.second << 4) & ~low), ((x.first >> 4) & low) | (x.second & ~low)};
}

// Packs the codes of four elements into a word: one bit per element if there is one
// plane, otherwise one byte per element, of the code's bits from `low` up.
template <int planes>
HOST_DEVICE uint32_t word_of_four(const uint32_t* codes, int low) {
  constexpr int width = planes == 1 ? 1 : 8;
  uint32_t word = 0;
  UNROLL
  for (int i = 0; i < 4; ++i) word |= ((codes[i] >> low) & ((1u << width) - 1u)) << (width * i);
  return word;
}

// Unpacks such a word, and adds its bits to the codes of four elements.
template <int planes>
HOST_DEVICE void add_word_of_four(uint32_t* codes, uint32_t word, int low) {
  UNROLL
  for (int i = 0; i < 4; ++i)
    codes[i] |= (planes == 1 ? (word >> i) & 1u : byte_of(word, i)) << low;
}

// Stores a group's bytes of up to eight planes, from plane `low` up. `words` has the codes of the
// group's first and last four elements.
template <int planes>
HOST_DEVICE void store_planes(const PackedBits<uint8_t>& packed, int low, int64_t group,
                              TwoWords words) {
  if constexpr (planes == 1) {
    packed.at(0, group) = uint8_t(words.first | (words.second << 4));
  } else {
    const TwoWords bytes = transpose8x8(words);
    UNROLL
    for (int i = 0; i < 8; ++i)
      if (low + i < planes) packed.at(low + i, group) = bytes.byte(i);
  }
}

// Loads a group's bytes of up to eight planes, from plane `low` up, as store_planes() stores them.
template <int planes>
HOST_DEVICE TwoWords load_planes(const PackedBits<const uint8_t>& packed, int low, int64_t group) {
  if constexpr (planes == 1) {
    const uint32_t byte = packed.at(0, group);
    return {byte & 15u, byte >> 4};
  } else {
    uint8_t bytes[8] = {};
    UNROLL
    for (int i = 0; i < 8; ++i)
      if (low + i < planes) bytes[i] = packed.at(low + i, group);
    TwoWords words;
    memcpy(&words, bytes, sizeof(words));
    return transpose8x8(words);
  }
}

// Writes the codes of a tile to the bit planes, and reads them. The number of planes is a
// compile-time constant, except for accesses of one element.
template <int count>
struct TileBits;

// The eight elements of an access share a byte of each plane.
template <>
struct TileBits<8> {
  template <int planes, class Functor>
  HOST_DEVICE static void write(Lanes<LaneState<Functor, 8>>& lanes,
                                const PackedBits<uint8_t>& packed, const Tile& tile) {
    lanes.each([&](auto& my, unsigned lane) {
      UNROLL
      for (int a = 0; a < kAccesses; ++a) {
        UNROLL
        for (int low = 0; low < planes; low += 8)
          store_planes<planes>(
              packed, low, tile.group(index_in_tile<8>(a, lane)),
              {word_of_four<planes>(my.codes[a], low), word_of_four<planes>(my.codes[a] + 4, low)});
      }
    });
  }

  template <int planes, class Functor>
  HOST_DEVICE static void read(Lanes<LaneState<Functor, 8>>& lanes,
                               const PackedBits<const uint8_t>& packed, const Tile& tile) {
    lanes.each([&](auto& my, unsigned lane) {
      UNROLL
      for (int a = 0; a < kAccesses; ++a) {
        UNROLL
        for (int low = 0; low < planes; low += 8) {
          const int64_t group = tile.group(index_in_tile<8>(a, lane));
          const TwoWords words = load_planes<planes>(packed, low, group);
          add_word_of_four<planes>(my.codes[a], words.first, low);
          add_word_of_four<planes>(my.codes[a] + 4, words.second, low);
        }
      }
    });
  }
};

// A byte belongs to two neighboring lanes, with four elements each. Of every two accesses the even
// lane handles the bytes of the first and the odd lane the bytes of the second, and the lanes
// exchange the words that this requires. So kAccesses must be even for formats of 32 bits.
template <>
struct TileBits<4> {
  // The first element of the group that a lane handles.
  HOST_DEVICE static int index(int access, unsigned lane) {
    return index_in_tile<4>(access + lane % 2, lane - lane % 2);
  }

  template <int planes, class Functor>
  HOST_DEVICE static void write(Lanes<LaneState<Functor, 4>>& lanes,
                                const PackedBits<uint8_t>& packed, const Tile& tile) {
    UNROLL
    for (int a = 0; a < kAccesses; a += 2) {
      UNROLL
      for (int low = 0; low < planes; low += 8) {
        lanes.each([&](auto& my, unsigned lane) {
          const uint32_t first = word_of_four<planes>(my.codes[a], low);
          const uint32_t second = word_of_four<planes>(my.codes[a + 1], low);
          my.own = lane % 2 ? second : first;
          my.word = lane % 2 ? first : second;
        });
        lanes.swap_neighbors(&LaneState<Functor, 4>::word);
        lanes.each([&](auto& my, unsigned lane) {
          const TwoWords words = lane % 2 ? TwoWords{my.word, my.own} : TwoWords{my.own, my.word};
          store_planes<planes>(packed, low, tile.group(index(a, lane)), words);
        });
      }
    }
  }

  template <int planes, class Functor>
  HOST_DEVICE static void read(Lanes<LaneState<Functor, 4>>& lanes,
                               const PackedBits<const uint8_t>& packed, const Tile& tile) {
    UNROLL
    for (int a = 0; a < kAccesses; a += 2) {
      UNROLL
      for (int low = 0; low < planes; low += 8) {
        lanes.each([&](auto& my, unsigned lane) {
          const TwoWords words = load_planes<planes>(packed, low, tile.group(index(a, lane)));
          my.own = lane % 2 ? words.second : words.first;
          my.word = lane % 2 ? words.first : words.second;
        });
        lanes.swap_neighbors(&LaneState<Functor, 4>::word);
        lanes.each([&](auto& my, unsigned lane) {
          add_word_of_four<planes>(my.codes[a], lane % 2 ? my.word : my.own, low);
          add_word_of_four<planes>(my.codes[a + 1], lane % 2 ? my.own : my.word, low);
        });
      }
    }
  }
};

// The lanes of a warp, with one element each, form four bytes of a plane by a vote.
template <>
struct TileBits<1> {
  template <int, class Functor>
  HOST_DEVICE static void write(Lanes<LaneState<Functor, 1>>& lanes,
                                const PackedBits<uint8_t>& packed, const Tile& tile) {
    UNROLL
    for (int a = 0; a < kAccesses; ++a) {
      NO_UNROLL
      for (int plane = 0; plane < packed.planes; ++plane) {
        lanes.each([&](auto& my, int) { my.word = my.codes[a][0] >> plane; });
        const uint32_t votes = lanes.vote(&LaneState<Functor, 1>::word);
        lanes.each([&](auto&, unsigned lane) {
          const int index = index_in_tile<1>(a, lane * kGroup);
          if (lane < kWarpSize / kGroup && index < tile.elements)
            packed.at(plane, tile.group(index)) = uint8_t(votes >> (lane * kGroup));
        });
      }
    }
  }

  template <int, class Functor>
  HOST_DEVICE static void read(Lanes<LaneState<Functor, 1>>& lanes,
                               const PackedBits<const uint8_t>& packed, const Tile& tile) {
    lanes.each([&](auto& my, unsigned lane) {
      UNROLL
      for (int a = 0; a < kAccesses; ++a) {
        const int index = smaller(index_in_tile<1>(a, lane), tile.elements - 1);
        NO_UNROLL
        for (int plane = 0; plane < packed.planes; ++plane) {
          const uint32_t byte = packed.at(plane, tile.group(index));
          my.codes[a][0] |= ((byte >> (index % kGroup)) & 1u) << plane;
        }
      }
    });
  }
};

}  // namespace inplace_ops
