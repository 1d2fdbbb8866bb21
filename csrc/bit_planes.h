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

}  // namespace inplace_ops
