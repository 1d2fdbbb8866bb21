// k bits per element, as k bit planes: byte g of plane i holds bit i of elements 8g to 8g + 7,
// element 8g in its lowest bit. A plane of n elements has ceil(n / 8) bytes; the unused bits are
// zero.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace inplace_ops {

constexpr int kGroup = 8;  // elements that share a byte of each plane

HOST_DEVICE constexpr int64_t plane_bytes(int64_t elements) {
  return elements / kGroup + (elements % kGroup != 0);
}

// Exchanges the bits that the mask covers with those `distance` above.
HOST_DEVICE uint32_t swap_bits(uint32_t x, int distance, uint32_t mask) {
  const uint32_t differ = (x ^ (x >> distance)) & mask;
  return x ^ differ ^ (differ << distance);
}

// Within each half of a 4 x 8 bit matrix with a row a byte.
HOST_DEVICE uint32_t transpose4x4(uint32_t x) {
  return swap_bits(swap_bits(x, 7, 0x00aa00aau), 14, 0x0000ccccu);
}

struct TwoWords {
  uint32_t first, second;

  HOST_DEVICE uint8_t byte(int i) const {
    return uint8_t((i < 4 ? first : second) >> (8 * (i % 4)));
  }
};

// The transpose of an 8 x 8 bit matrix with a row a byte, by swapping blocks of 1, 2 and 4
// (Warren, Hacker's Delight, section 7-3), in words of a GPU.
HOST_DEVICE TwoWords transpose8x8(TwoWords x) {
  constexpr uint32_t low = 0x0f0f0f0fu;
  x = {transpose4x4(x.first), transpose4x4(x.second)};
  return {(x.first & low) | ((x.second << 4) & ~low), ((x.first >> 4) & low) | (x.second & ~low)};
}

// Where the packed bits of a tensor lie.
template <class Byte>
struct PackedBits {
  Byte* data = nullptr;
  int64_t plane_stride = 0;
  int planes = 0;

  HOST_DEVICE Byte& at(int plane, int64_t group) const {
    return data[plane * plane_stride + group];
  }
};

// On a GPU the codes of four elements travel in a word: a bit each where there is one plane,
// otherwise a byte each, of the bits from `low` up.
template <int planes>
HOST_DEVICE uint32_t word_of_four(const uint32_t* codes, int low) {
  constexpr int width = planes == 1 ? 1 : 8;
  uint32_t word = 0;
  UNROLL
  for (int i = 0; i < 4; ++i) word |= ((codes[i] >> low) & ((1u << width) - 1u)) << (width * i);
  return word;
}

template <int planes>
HOST_DEVICE void add_word_of_four(uint32_t* codes, uint32_t word, int low) {
  UNROLL
  for (int i = 0; i < 4; ++i)
    codes[i] |= (planes == 1 ? (word >> i) & 1u : byte_of(word, i)) << low;
}

// A group's bytes of the planes from `low` up, at most eight, from the words of its two fours.
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
