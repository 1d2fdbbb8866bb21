// Runs a functor over tensors on the CPU: in parallel over blocks of elements, each block a loop that
// the compiler vectorizes, compiled for baseline x86-64 and for AVX2 and chosen at run time.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "../functors.h"
#include "../geometry.h"
#include "../packed_bits.h"

namespace inplace_ops {

constexpr int kBlock = 512;  // elements; the block's buffers stay in the L1 cache
constexpr int kBlockGroups = kBlock / kGroup;
constexpr int64_t kGrainBlocks = 32768 / kBlock;  // PyTorch's own grain for elementwise work

// Calls visit(position, length, offset, stride) for each run along the innermost dimension of the
// elements first to first + count - 1 of one operand.
template <class Visit>
void for_each_run(const Geometry& geometry, int operand, int64_t first, int64_t count,
                  const Visit& visit) {
  const int inner = geometry.dims - 1;
  const int64_t size = geometry.dims > 0 ? geometry.sizes[inner] : 1;
  const int64_t stride = geometry.dims > 0 ? geometry.strides[operand][inner] : 1;
  for (int64_t position = 0; position < count;) {
    const int64_t element = first + position;
    const int64_t length = std::min(count - position, size - element % size);
    visit(position, length, geometry.offset(operand, element), stride);
    position += length;
  }
}

template <class T>
void gather(T* buffer, const T* data, const Geometry& geometry, int operand, int64_t first,
            int64_t count) {
  for_each_run(geometry, operand, first, count,
               [&](int64_t position, int64_t length, int64_t offset, int64_t stride) {
                 for (int64_t i = 0; i < length; ++i)
                   buffer[position + i] = data[offset + i * stride];
               });
}

template <class T>
void scatter(T* data, const T* buffer, const Geometry& geometry, int64_t first, int64_t count) {
  for_each_run(geometry, 0, first, count,
               [&](int64_t position, int64_t length, int64_t offset, int64_t stride) {
                 for (int64_t i = 0; i < length; ++i)
                   data[offset + i * stride] = buffer[position + i];
               });
}

// The loop over the elements of one block. The output may be the first input, element by element. The
// kernel is a copy: its members could otherwise be thought to change with the output.
template <class Kernel>
HOST_DEVICE void compute(const Kernel kernel, typename Kernel::Scalar* out,
                         const typename Kernel::Scalar* const (&in)[Kernel::kInputs],
                         uint32_t* codes, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    typename Kernel::Scalar args[Kernel::kInputs];
    for (int k = 0; k < Kernel::kInputs; ++k) args[k] = in[k][i];
    out[i] = kernel(args, codes[i]);
  }
}

template <class Kernel>
HOST_DEVICE void run_blocks(const Kernel& kernel, const Geometry& geometry,
                            const Operands<Kernel>& operands, int64_t first_block,
                            int64_t last_block) {
  using T = typename Kernel::Scalar;
  const bool is_dense = geometry.is_dense();
  uint32_t codes[kBlock];
  T buffers[Kernel::kInputs][kBlock];
  for (int64_t block = first_block; block < last_block; ++block) {
    const int64_t first = block * kBlock;
    const int64_t count = std::min<int64_t>(kBlock, geometry.elements - first);
    const int groups = int(plane_bytes(count));

    const T* in[Kernel::kInputs];
    for (int k = 0; k < Kernel::kInputs; ++k) {
      if (!is_dense) gather(buffers[k], operands.in[k], geometry, k + 1, first, count);
      in[k] = is_dense ? operands.in[k] + first : buffers[k];
    }
    T* out = is_dense ? operands.out + first : buffers[0];

    if constexpr (Kernel::kBits == Bits::kRead)
      unpack<kBlockGroups>(codes, operands.bits, first / kGroup, groups);
    compute(kernel, out, in, codes, count);
    if constexpr (Kernel::kBits == Bits::kWritten) {
      std::fill(codes + count, codes + kBlock, 0u);
      pack<kBlockGroups>(codes, operands.bits, first / kGroup, groups);
    }
    if (!is_dense) scatter(operands.out, out, geometry, first, count);
  }
}

template <class Kernel>
void run_blocks_baseline(const Kernel& kernel, const Geometry& geometry,
                         const Operands<Kernel>& operands, int64_t first, int64_t last) {
  run_blocks(kernel, geometry, operands, first, last);
}

#ifdef __x86_64__
template <class Kernel>
__attribute__((target("avx2,fma"))) void run_blocks_avx2(const Kernel& kernel,
                                                         const Geometry& geometry,
                                                         const Operands<Kernel>& operands,
                                                         int64_t first, int64_t last) {
  run_blocks(kernel, geometry, operands, first, last);
}
#endif

// INPLACE_OPS_CPU=baseline runs the code for processors without AVX2, to test it.
inline bool has_avx2() {
#ifdef __x86_64__
  static const bool result = [] {
    const char* wanted = std::getenv("INPLACE_OPS_CPU");
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           !(wanted && std::string_view(wanted) == "baseline");
  }();
  return result;
#else
  return false;
#endif
}

struct Cpu {
  template <class Kernel>
  static void run(const Kernel& kernel, const Geometry& geometry, const Operands<Kernel>& operands,
                  int /*device*/) {
    auto* run_range = &run_blocks_baseline<Kernel>;
#ifdef __x86_64__
    if (has_avx2()) run_range = &run_blocks_avx2<Kernel>;
#endif
    const int64_t blocks = (geometry.elements + kBlock - 1) / kBlock;
    torch::stable::parallel_for(0, blocks, kGrainBlocks, [&](int64_t first, int64_t last) {
      run_range(kernel, geometry, operands, first, last);
    });
  }
};

}  // namespace inplace_ops
