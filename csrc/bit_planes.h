// Packed bits: k bits per element of a tensor, in k bit planes. Byte g of plane i has bit i of the
// elements 8g to 8g + 7, with element 8g in the lowest bit. A plane of n elements has ceil(n / 8)
// bytes. Its unused bits are zero.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace inplace_ops {

constexpr int kGroup = 8;  // elements that share a byte of each plane

HOST_DEVICE constexpr int64_t plane_bytes(int64_t elements) {
  return elements / kGroup + (elements % kGroup != 0);
}

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

// A view of a tensor's packed bits.
template <class Byte>
struct PackedBits {
  Byte* data = nullptr;
  int64_t plane_stride = 0;
  int planes = 0;

  HOST_DEVICE Byte& at(int plane, int64_t group) const {
    return data[plane * plane_stride + group];
  }
};

// Packs the codes of four elements into a word, for a GPU: one bit per element if there is one
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

}  // namespace inplace_ops
