// Runs a functor over tensors on the CPU: in parallel over blocks of elements, each block a loop
// that the compiler vectorizes, compiled for several instruction sets and chosen at run time.
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
constexpr int kVector = 16;                       // elements of the widest vector
constexpr int64_t kGrainBlocks = 32768 / kBlock;  // PyTorch's own grain for elementwise work

// Calls visit(position, length, offsets) for each run along the innermost dimension of the elements
// first to first + count - 1, with where it begins in each of the operands.
template <int max_operands, int max_dims, class Visit>
void for_each_run(const GeometryOf<max_operands, max_dims>& geometry, int64_t first, int64_t count,
                  const Visit& visit) {
  const int inner = geometry.dims - 1;
  const auto& sizes = geometry.sizes;
  const auto& strides = geometry.strides;
  int64_t offsets[max_operands] = {};
  if (inner < 0) return visit(int64_t(0), count, offsets);
  int64_t index[max_dims], rest = first;
  for (int d = inner; d >= 0; --d) {
    index[d] = d > 0 ? rest % sizes[d] : rest;
    rest /= sizes[d];
    for (int k = 0; k < geometry.operands; ++k) offsets[k] += index[d] * strides[k][d];
  }
  for (int64_t position = 0; position < count;) {
    const int64_t length = std::min(count - position, sizes[inner] - index[inner]);
    visit(position, length, offsets);
    position += length;
    index[inner] += length;
    for (int k = 0; k < geometry.operands; ++k) offsets[k] += length * strides[k][inner];
    for (int d = inner; d > 0 && index[d] == sizes[d]; --d) {
      index[d] = 0;
      ++index[d - 1];
      for (int k = 0; k < geometry.operands; ++k)
        offsets[k] += strides[k][d - 1] - sizes[d] * strides[k][d];
    }
  }
}

template <int max_operands, int max_dims>
int64_t innermost_stride(const GeometryOf<max_operands, max_dims>& geometry, int operand) {
  return geometry.dims > 0 ? geometry.strides[operand][geometry.dims - 1] : 1;
}

template <class T, int max_operands, int max_dims>
void gather(T* buffer, const T* data, const GeometryOf<max_operands, max_dims>& geometry,
            int operand, int64_t first, int64_t count) {
  const int64_t stride = innermost_stride(geometry, operand);
  for_each_run(geometry, first, count, [&](int64_t position, int64_t length, auto& offsets) {
    const T* const from = data + offsets[operand];
    for (int64_t i = 0; i < length; ++i) buffer[position + i] = from[i * stride];
  });
}

template <class T>
void scatter(T* data, const T* buffer, const Geometry& geometry, int64_t first, int64_t count) {
  const int64_t stride = innermost_stride(geometry, 0);
  for_each_run(geometry, first, count, [&](int64_t position, int64_t length, auto& offsets) {
    T* const to = data + offsets[0];
    for (int64_t i = 0; i < length; ++i) to[i * stride] = buffer[position + i];
  });
}

// The maps of a block's elements, in runs: each with one map, or with a map for each element.
template <class C>
class BlockAffine {
 public:
  struct Run {
    int64_t position, length;
    const C *scale, *shift;
  };
  Run runs[kBlock / kVector + 2];
  int count = 0;
  bool is_one_map = false;

  HOST_DEVICE BlockAffine(const Affine<C>& affine, int64_t first, int elements) {
    const auto& geometry = affine.geometry;
    const int64_t stride = innermost_stride(geometry, 0);
    const bool is_long = geometry.dims > 0 && geometry.sizes[geometry.dims - 1] >= kVector &&
                         innermost_stride(geometry, 1) == 0;
    is_one_map = is_long && stride == 0;
    if (is_long && stride == 1 && !affine.has_rows()) {
      for_each_run(geometry, first, elements, [&](int64_t position, int64_t length, auto& offsets) {
        runs[count++] = {position, length, affine.channels.scale + offsets[0],
                         affine.channels.shift + offsets[0]};
      });
      return;
    }
    C row_scale[kBlock], row_shift[kBlock];
    int maps = elements;
    if (is_one_map) {
      for_each_run(geometry, first, elements, [&](int64_t position, int64_t length, auto& offsets) {
        runs[count] = {position, length, scale_ + count, shift_ + count};
        scale_[count] = affine.channels.scale[offsets[0]];
        shift_[count] = affine.channels.shift[offsets[0]];
        if (affine.has_rows()) {
          row_scale[count] = affine.rows.scale[offsets[1]];
          row_shift[count] = affine.rows.shift[offsets[1]];
        }
        ++count;
      });
      maps = count;
    } else {
      gather(scale_, affine.channels.scale, geometry, 0, first, elements);
      gather(shift_, affine.channels.shift, geometry, 0, first, elements);
      if (affine.has_rows()) {
        gather(row_scale, affine.rows.scale, geometry, 1, first, elements);
        gather(row_shift, affine.rows.shift, geometry, 1, first, elements);
      }
      runs[count++] = {0, elements, scale_, shift_};
    }
    if (!affine.has_rows()) return;
    for (int i = 0; i < maps; ++i) {
      const auto map = composed<C>({row_scale[i], row_shift[i]}, {scale_[i], shift_[i]});
      scale_[i] = map.scale;
      shift_[i] = map.shift;
    }
  }

 private:
  C scale_[kBlock], shift_[kBlock];
};

template <class Functor>
using Inputs = const typename Functor::Scalar* const (&)[Functor::kInputs];

template <class T, int inputs>
HOST_DEVICE void fetch(T (&element)[inputs], const T* const (&in)[inputs], int64_t i) {
  for (int k = 0; k < inputs; ++k) element[k] = in[k][i];
}

// The loop over the elements of one block. The output may be the first input, element by element.
// The functor is a copy: its members could otherwise be thought to change with the output.
template <class Functor>
HOST_DEVICE void compute(const Functor functor, typename Functor::Scalar* out, Inputs<Functor> in,
                         uint32_t* codes, int bits, int count) {
#pragma GCC ivdep
  for (int i = 0; i < count; ++i) {
    typename Functor::Scalar element[Functor::kInputs];
    fetch(element, in, i);
    out[i] = functor(element, codes[i], bits);
  }
}

// The same where no codes are kept, which the compiler then does not compute.
template <class Functor>
HOST_DEVICE void compute_without_codes(const Functor functor, typename Functor::Scalar* out,
                                       Inputs<Functor> in, int count) {
#pragma GCC ivdep
  for (int i = 0; i < count; ++i) {
    typename Functor::Scalar element[Functor::kInputs];
    fetch(element, in, i);
    uint32_t code;
    out[i] = functor(element, code, 1);
  }
}

// The same of normalized elements.
template <class Functor, class C>
HOST_DEVICE void compute_normalized(const Functor functor, typename Functor::Scalar* out,
                                    Inputs<Functor> in, const BlockAffine<C>& maps) {
  typename Functor::Scalar element[Functor::kInputs];
  for (int r = 0; r < maps.count; ++r) {
    const auto [first, length, scale, shift] = maps.runs[r];
    if (maps.is_one_map) {
      const ScaleAndShift<C> map{*scale, *shift};
#pragma GCC ivdep
      for (int64_t i = first; i < first + length; ++i) {
        fetch(element, in, i);
        out[i] = functor(element, map);
      }
    } else {
#pragma GCC ivdep
      for (int64_t i = 0; i < length; ++i) {
        fetch(element, in, first + i);
        out[first + i] = functor(element, {scale[i], shift[i]});
      }
    }
  }
}

// The same in two parts, the far elements collected first, so that no vector works on both.
template <class Functor>
HOST_DEVICE void compute_in_parts(const Functor functor, typename Functor::Scalar* out,
                                  Inputs<Functor> in, const uint32_t* codes, int bits, int count) {
  using T = typename Functor::Scalar;
  uint8_t is_far[kBlock] = {};
  for (int i = 0; i < count; ++i) {
    T element[Functor::kInputs];
    fetch(element, in, i);
    is_far[i] = functor.is_far(element, codes[i], bits);
  }

  int found = 0;
  int places[kBlock];
  for (int first = 0; first < count; first += 8) {
    uint64_t any;
    memcpy(&any, is_far + first, sizeof(any));
    if (any == 0) continue;
    for (int i = first; i < first + 8; ++i) {
      places[found] = i;  // counts only if it is one
      found += is_far[i];
    }
  }
  // In whole vectors, the last one filled up: a part of one costs as much as many.
  int padded = found;
  while (padded % kVector != 0) places[padded++] = places[0];
  T far_in[Functor::kInputs][kBlock];
  uint32_t far_codes[kBlock];
  for (int i = 0; i < padded; ++i) {
    for (int k = 0; k < Functor::kInputs; ++k) far_in[k][i] = in[k][places[i]];
    far_codes[i] = codes[places[i]];
  }

#pragma GCC ivdep
  for (int i = 0; i < count; ++i) {
    T element[Functor::kInputs];
    fetch(element, in, i);
    out[i] = functor.near(element, codes[i], bits);
  }

  T results[kBlock];
  for (int first = 0; first < padded; first += kVector) {
    for (int i = first; i < first + kVector; ++i) {
      T element[Functor::kInputs];
      for (int k = 0; k < Functor::kInputs; ++k) element[k] = far_in[k][i];
      results[i] = functor.far(element, far_codes[i], bits);
    }
  }
  for (int i = 0; i < found; ++i) out[places[i]] = results[i];
}

template <class Functor>
HOST_DEVICE void run_blocks(const Functor& functor, const Geometry& geometry,
                            const Operands<Functor>& operands, int64_t first_block,
                            int64_t last_block) {
  using T = typename Functor::Scalar;
  constexpr bool writes_bits = Operands<Functor>::kWritesBits;
  const bool is_dense = geometry.is_dense();
  const int bits = operands.packed.planes;
  uint32_t codes[kBlock];
  T buffers[Functor::kInputs][kBlock];
  for (int64_t block = first_block; block < last_block; ++block) {
    const int64_t first = block * kBlock;
    const int count = int(std::min<int64_t>(kBlock, geometry.elements - first));
    const int groups = int(plane_bytes(count));

    const T* in[Functor::kInputs];
    for (int k = 0; k < Functor::kInputs; ++k) {
      if (!is_dense) gather(buffers[k], operands.in[k], geometry, k + 1, first, count);
      in[k] = is_dense ? operands.in[k] + first : buffers[k];
    }
    T* out = is_dense ? operands.out + first : buffers[0];

    if constexpr (Functor::kPackedBits == PackedBitsUse::kRead)
      unpack<kBlockGroups>(codes, operands.packed, first / kGroup, groups);
    if constexpr (Functor::kNormalizes) {
      compute_normalized(functor, out, in, BlockAffine(operands.affine, first, count));
    } else if constexpr (IsSplit<Functor>::value) {
      compute_in_parts(functor, out, in, codes, bits, count);
    } else if (writes_bits && bits == 0) {
      compute_without_codes(functor, out, in, count);
    } else {
      compute(functor, out, in, codes, bits, count);
    }
    if constexpr (writes_bits) {
      std::fill(codes + count, codes + kBlock, 0u);
      pack<kBlockGroups>(codes, operands.packed, first / kGroup, groups);
    }
    if (!is_dense) scatter(operands.out, out, geometry, first, count);
  }
}

// run_blocks for each instruction set. What it calls is inlined into it, and so compiled for it.
#define INPLACE_OPS_RUN_BLOCKS(name, attributes)                                         \
  template <class Functor>                                                               \
  attributes void name(const Functor& functor, const Geometry& geometry,                 \
                       const Operands<Functor>& operands, int64_t first, int64_t last) { \
    run_blocks(functor, geometry, operands, first, last);                                \
  }
INPLACE_OPS_RUN_BLOCKS(run_blocks_baseline, )
#ifdef __x86_64__
INPLACE_OPS_RUN_BLOCKS(run_blocks_avx2, __attribute__((target("avx2,fma"))))
INPLACE_OPS_RUN_BLOCKS(run_blocks_avx512,
                       __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))))
#endif
#undef INPLACE_OPS_RUN_BLOCKS

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

// The best that the processor has, or less: INPLACE_OPS_CPU=baseline or avx2, to test the others.
inline InstructionSet instruction_set() {
#ifdef __x86_64__
  static const InstructionSet result = [] {
    const char* variable = std::getenv("INPLACE_OPS_CPU");
    const std::string_view limit = variable ? variable : "";
    if (limit == "baseline" || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
      return InstructionSet::kBaseline;
    if (limit == "avx2" || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
      return InstructionSet::kAvx2;
    return InstructionSet::kAvx512;
  }();
  return result;
#else
  return InstructionSet::kBaseline;
#endif
}

struct Cpu {
  template <class C>
  static void write_maps(const Statistics<C>& statistics, C* scale, C* shift, int64_t channels,
                         int /*device*/) {
    for (int64_t i = 0; i < channels; ++i) {
      const auto map = statistics.map(i);
      scale[i] = map.scale;
      shift[i] = map.shift;
    }
  }

  template <class Functor>
  static void run(const Functor& functor, const Geometry& geometry,
                  const Operands<Functor>& operands, int /*device*/) {
    auto* run_range = &run_blocks_baseline<Functor>;
#ifdef __x86_64__
    if (instruction_set() == InstructionSet::kAvx2) run_range = &run_blocks_avx2<Functor>;
    if (instruction_set() == InstructionSet::kAvx512) run_range = &run_blocks_avx512<Functor>;
#endif
    const int64_t blocks = (geometry.elements + kBlock - 1) / kBlock;
    if (blocks <= kGrainBlocks) return run_range(functor, geometry, operands, 0, blocks);
    torch::stable::parallel_for(0, blocks, kGrainBlocks, [&](int64_t first, int64_t last) {
      run_range(functor, geometry, operands, first, last);
    });
  }
};

}  // namespace inplace_ops
