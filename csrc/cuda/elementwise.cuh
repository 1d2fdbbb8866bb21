// Runs a functor over tensors on a CUDA device. A thread works on one group of eight elements: it
// owns their byte in each bit plane, and reads them with 16-byte accesses where the tensors are
// dense and aligned.
//
// The bodies (run_group) take their indices as arguments and compile for the host too, where tests
// run them over a virtual grid.
//
// Why one group a thread and nothing cleverer: the kernels are bound by memory, and a full
// multiprocessor (2048 threads) with one 16-byte load each in flight has 32 KiB under way, more
// than the 23 KiB that 4.3 TB/s over 132 multiprocessors at 700 ns latency need.
#pragma once

#include "../functors.h"
#include "../geometry.h"
#include "../packed_bits.h"

namespace inplace_ops {

constexpr int kThreads = 256;

// The layout of tensors that lie one element after the other, where Geometry walks all others.
struct Dense {
  template <class Index>
  HOST_DEVICE int64_t offset(int, Index element) const {
    return element;
  }
};

template <int bytes>
struct alignas(bytes) Chunk {
  uint32_t words[bytes / 4];
};

template <class T>
constexpr int kChunkBytes = kGroup * sizeof(T) < 16 ? kGroup * sizeof(T) : 16;

template <class T>
HOST_DEVICE void load_group(T (&values)[kGroup], const T* data) {
  using Vector = Chunk<kChunkBytes<T>>;
  constexpr int count = kGroup * sizeof(T) / kChunkBytes<T>;
  Vector chunks[count];
  for (int i = 0; i < count; ++i) chunks[i] = reinterpret_cast<const Vector*>(data)[i];
  memcpy(values, chunks, sizeof(values));
}

template <class T>
HOST_DEVICE void store_group(T* data, const T (&values)[kGroup]) {
  using Vector = Chunk<kChunkBytes<T>>;
  constexpr int count = kGroup * sizeof(T) / kChunkBytes<T>;
  Vector chunks[count];
  memcpy(chunks, values, sizeof(values));
  for (int i = 0; i < count; ++i) reinterpret_cast<Vector*>(data)[i] = chunks[i];
}

// The elements 8 group to 8 group + 7, fewer at the end. Vectors are for aligned dense tensors.
// Index is as wide as the size needs.
template <bool vectors, class Kernel, class Layout, class Index>
HOST_DEVICE void run_group(const Kernel& kernel, const Layout& layout,
                           const Operands<Kernel>& operands, Index elements, Index group) {
  using T = typename Kernel::Scalar;
  constexpr int inputs = Kernel::kInputs;
  const Index first = group * kGroup;
  const int count = elements - first < kGroup ? int(elements - first) : kGroup;
  const bool is_whole = vectors && count == kGroup;

  T in[inputs][kGroup] = {};
  UNROLL
  for (int k = 0; k < inputs; ++k) {
    if (is_whole) {
      load_group(in[k], operands.in[k] + first);
    } else {
      UNROLL
      for (int i = 0; i < kGroup; ++i)
        if (i < count) in[k][i] = operands.in[k][layout.offset(k + 1, Index(first + i))];
    }
  }

  uint32_t codes[kGroup];
  if constexpr (Kernel::kBits == Bits::kRead) unpack<1>(codes, operands.bits, group, 1);
  T out[kGroup];
  UNROLL
  for (int i = 0; i < kGroup; ++i) {
    T element[inputs];
    UNROLL
    for (int k = 0; k < inputs; ++k) element[k] = in[k][i];
    out[i] = kernel(element, codes[i]);
    if (Kernel::kBits == Bits::kWritten && i >= count) codes[i] = 0;
  }
  if constexpr (Kernel::kBits == Bits::kWritten) pack<1>(codes, operands.bits, group, 1);

  if (is_whole) {
    store_group(operands.out + first, out);
  } else {
    UNROLL
    for (int i = 0; i < kGroup; ++i)
      if (i < count) operands.out[layout.offset(0, Index(first + i))] = out[i];
  }
}

template <class Kernel>
bool is_aligned(const Operands<Kernel>& operands) {
  constexpr uintptr_t bytes = kChunkBytes<typename Kernel::Scalar>;
  uintptr_t addresses = reinterpret_cast<uintptr_t>(operands.out);
  for (const auto* in : operands.in) addresses |= reinterpret_cast<uintptr_t>(in);
  return addresses % bytes == 0;
}

}  // namespace inplace_ops
