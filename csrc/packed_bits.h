// k bits an element, as k bit planes: byte g of plane i holds bit i of elements 8g to 8g + 7,
// element 8g in its lowest bit. A plane of n elements has ceil(n / 8) bytes; the unused bits are
// zero.
#pragma once

#include <cstdint>

#include "number_formats.h"

namespace inplace_ops {

constexpr int kGroup = 8;  // elements that share a byte of each plane

HOST_DEVICE constexpr int64_t plane_bytes(int64_t elements) {
  return elements / kGroup + (elements % kGroup != 0);
}

// a where the mask is set, otherwise b.
HOST_DEVICE uint64_t merge(uint64_t mask, uint64_t a, uint64_t b) {
  return (a & mask) | (b & ~mask);
}

// The transpose of an 8 x 8 bit matrix with a row a byte, by swapping blocks of 1, 2 and 4
// (Warren, Hacker's Delight, section 7-3).
HOST_DEVICE uint64_t transpose8x8(uint64_t x) {
  x = merge(0x5500550055005500ull, x << 7, merge(0x00aa00aa00aa00aaull, x >> 7, x));
  x = merge(0x3333000033330000ull, x << 14, merge(0x0000cccc0000ccccull, x >> 14, x));
  return merge(0x0f0f0f0f00000000ull, x << 28, merge(0x00000000f0f0f0f0ull, x >> 28, x));
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

// On a CPU codes are packed and unpacked a block of groups at a time, in loops that the compiler
// turns into vector code. `count` of the groups are stored or read.
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

// On a GPU the codes of four elements travel in a word, a quad: a bit each where a code has one bit
// at most, otherwise a byte each, of the bits from `low` up.
template <int max_planes>
HOST_DEVICE uint32_t quad_of(const uint32_t* codes, int low) {
  constexpr int width = max_planes == 1 ? 1 : 8;
  uint32_t quad = 0;
  UNROLL
  for (int i = 0; i < 4; ++i) quad |= ((codes[i] >> low) & ((1u << width) - 1u)) << (width * i);
  return quad;
}

template <int max_planes>
HOST_DEVICE void add_quad(uint32_t* codes, uint32_t quad, int low) {
  constexpr int width = max_planes == 1 ? 1 : 8;
  UNROLL
  for (int i = 0; i < 4; ++i) codes[i] |= ((quad >> (width * i)) & ((1u << width) - 1u)) << low;
}

struct TwoQuads {
  uint32_t first, second;
};

// A group's bytes of the planes from `low` up, at most eight, from its two quads.
template <int max_planes>
HOST_DEVICE void store_planes(const PackedBits<uint8_t>& packed, int low, int64_t group,
                              TwoQuads quads) {
  if constexpr (max_planes == 1) {
    packed.at(0, group) = uint8_t(quads.first | (quads.second << 4));
  } else {
    const uint64_t planes = transpose8x8(quads.first | (uint64_t(quads.second) << 32));
    for (int plane = low; plane < packed.planes && plane < low + 8; ++plane)
      packed.at(plane, group) = uint8_t(planes >> (8 * (plane - low)));
  }
}

template <int max_planes>
HOST_DEVICE TwoQuads load_planes(const PackedBits<const uint8_t>& packed, int low, int64_t group) {
  if constexpr (max_planes == 1) {
    const uint32_t byte = packed.at(0, group);
    return {byte & 15u, byte >> 4};
  } else {
    uint64_t planes = 0;
    for (int plane = low; plane < packed.planes && plane < low + 8; ++plane)
      planes |= uint64_t(packed.at(plane, group)) << (8 * (plane - low));
    const uint64_t rows = transpose8x8(planes);
    return {uint32_t(rows), uint32_t(rows >> 32)};
  }
}

}  // namespace inplace_ops
