// Packs the codes of a block into bit planes, and unpacks them.
//
// simd.h packs one bit of each of many bytes into a plane. The codes of masks are bytes. Those of
// other functors are 32-bit words (code_t): they are split into bytes, and a byte has the bits of
// eight planes.
#pragma once

#include <cstdint>
#include <cstring>

#include "../bit_planes.h"
#include "block.h"

namespace inplace_ops {

template <class Instructions>
HOST_DEVICE void pack(const uint8_t (&codes)[kBlock], const PackedBits<uint8_t>& packed,
                      int64_t first_group, int groups, int low = 0) {
  for (int plane = low; plane < packed.planes && plane < low + 8; ++plane)
    Instructions::pack(&packed.at(plane, first_group), codes, plane - low, groups);
}

template <class Instructions>
HOST_DEVICE void pack(const uint32_t (&codes)[kBlock], const PackedBits<uint8_t>& packed,
                      int64_t first_group, int groups) {
  for (int low = 0; low < packed.planes; low += 8) {
    uint8_t bytes[kBlock];
    for (int i = 0; i < kBlock; ++i) bytes[i] = uint8_t(codes[i] >> low);
    pack<Instructions>(bytes, packed, first_group, groups, low);
  }
}

template <class Instructions>
HOST_DEVICE void unpack(uint8_t (&codes)[kBlock], const PackedBits<const uint8_t>& packed,
                        int64_t first_group, int groups, int low = 0) {
  memset(codes, 0, kBlock);
  for (int plane = low; plane < packed.planes && plane < low + 8; ++plane)
    Instructions::unpack(codes, &packed.at(plane, first_group), plane - low, groups);
}

template <class Instructions>
HOST_DEVICE void unpack(uint32_t (&codes)[kBlock], const PackedBits<const uint8_t>& packed,
                        int64_t first_group, int groups) {
  uint8_t bytes[kBlock];
  unpack<Instructions>(bytes, packed, first_group, groups);
  for (int i = 0; i < kBlock; ++i) codes[i] = bytes[i];
  for (int low = 8; low < packed.planes; low += 8) {
    unpack<Instructions>(bytes, packed, first_group, groups, low);
    for (int i = 0; i < kBlock; ++i) codes[i] |= uint32_t(bytes[i]) << low;
  }
}

}  // namespace inplace_ops
