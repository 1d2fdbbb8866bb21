// k bits an element, as k bit planes: byte g of plane i holds bit i of elements 8g to 8g + 7,
// element 8g in its lowest bit. A plane of n elements has ceil(n / 8) bytes; the unused bits are
// zero.
#pragma once

#include <cstdint>

#include "number_formats.h"

namespace inplace_ops {

constexpr int kGroup = 8;  // elements that share a byte of each plane

HOST_DEVICE constexpr int64_t plane_bytes(int64_t elements) {
  return (elements + kGroup - 1) / kGroup;
}

// The transpose of an 8 x 8 bit matrix with a row a byte, by swapping blocks of 1, 2 and 4
// (Warren, Hacker's Delight, section 7-3).
HOST_DEVICE uint64_t transpose8x8(uint64_t x) {
  uint64_t swap = (x ^ (x >> 7)) & 0x00aa00aa00aa00aaull;
  x ^= swap ^ (swap << 7);
  swap = (x ^ (x >> 14)) & 0x0000cccc0000ccccull;
  x ^= swap ^ (swap << 14);
  swap = (x ^ (x >> 28)) & 0x00000000f0f0f0f0ull;
  return x ^ swap ^ (swap << 28);
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

// Codes are packed and unpacked `groups` at a time: one a thread on a GPU, a block of them on a
// CPU, where the compiler turns these loops into vector code. `count` of the groups are stored or
// read.
template <int groups>
HOST_DEVICE void pack(const uint32_t (&codes)[groups * kGroup], PackedBits<uint8_t> packed,
                      int64_t first_group, int count) {
  for (int low = 0; low < packed.planes; low += 8) {
    uint8_t bytes[groups * kGroup];
    for (int i = 0; i < groups * kGroup; ++i) bytes[i] = uint8_t(codes[i] >> low);
    uint64_t rows[groups];
    memcpy(rows, bytes, sizeof(rows));
    for (int g = 0; g < groups; ++g) rows[g] = transpose8x8(rows[g]);
    for (int plane = low; plane < packed.planes && plane < low + 8; ++plane) {
      uint8_t* bits = &packed.at(plane, first_group);
      for (int g = 0; g < count; ++g) bits[g] = uint8_t(rows[g] >> (8 * (plane - low)));
    }
  }
}

template <int groups>
HOST_DEVICE void unpack(uint32_t (&codes)[groups * kGroup], PackedBits<const uint8_t> packed,
                        int64_t first_group, int count) {
  for (int i = 0; i < groups * kGroup; ++i) codes[i] = 0;
  for (int low = 0; low < packed.planes; low += 8) {
    uint64_t rows[groups];
    for (int g = 0; g < groups; ++g) rows[g] = 0;
    for (int plane = low; plane < packed.planes && plane < low + 8; ++plane) {
      const uint8_t* bits = &packed.at(plane, first_group);
      for (int g = 0; g < count; ++g) rows[g] |= uint64_t(bits[g]) << (8 * (plane - low));
    }
    for (int g = 0; g < groups; ++g) rows[g] = transpose8x8(rows[g]);
    uint8_t bytes[groups * kGroup];
    memcpy(bytes, rows, sizeof(rows));
    for (int i = 0; i < groups * kGroup; ++i) codes[i] |= uint32_t(bytes[i]) << low;
  }
}

}  // namespace inplace_ops
