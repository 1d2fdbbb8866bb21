// Runs a functor over tensors on the CPU, in parallel over blocks of elements.
//
// The buffers of a block stay in the L1 cache. So what the compiler cannot vectorize together with
// the functor has a pass of its own over the block. For each block run_blocks()
//
// 1. gathers strided inputs (strided_io.h), and converts halves to float (simd.h);
// 2. recomputes the output of a norm (block_affine.h), or unpacks the codes (bit_plane_io.h);
// 3. calls the functor for each element, in a loop that the compiler vectorizes: compute(), or the
//    loops of tail_region.h;
// 4. packs the codes, converts results to half, and scatters them.
//
// All of this is compiled for several instruction sets (instruction_sets.h), of which Cpu::run()
// takes one.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <functional>

#include "../functors.h"
#include "../strided_layout.h"
#include "bit_plane_io.h"
#include "block.h"
#include "block_affine.h"
#include "channel_sums.h"
#include "instruction_sets.h"
#include "simd.h"
#include "strided_io.h"
#include "tail_region.h"

namespace inplace_ops {

constexpr int64_t kGrainBlocks = 32768 / kBlock;  // PyTorch's grain size of elementwise kernels

// The loop over the elements of a block. The output may alias the first input, element by element.
// The functor is passed by value: otherwise the compiler assumes that a write to the output may
// change its members.
template <class Functor, class T = typename Functor::Scalar>
HOST_DEVICE void compute(const Functor functor, functor_result_t<Functor>* out,
                         BlockInputs<Functor> in, code_t<Functor>* codes, int bits, int count) {
#pragma GCC ivdep
  for (int i = 0; i < count; ++i) {
    Element<T> element[Functor::kInputs];
    load_elements(element, in, i);
    uint32_t code = Functor::kPackedBits == PackedBitsUse::kRead ? codes[i] : 0u;
    out[i] = to_result<T>(functor(element, code, bits));
    if (Functor::kPackedBits == PackedBitsUse::kWritten) codes[i] = code_t<Functor>(code);
  }
}

// The loop without codes, for functors that have none and for forward functors that save nothing.
// The compiler omits the arithmetic of the codes.
template <class Out, class Functor, class T = typename Functor::Scalar>
HOST_DEVICE void compute_without_codes(const Functor functor,
                                       result_t<Out, typename Functor::C>* out,
                                       BlockInputs<Functor> in, int count) {
#pragma GCC ivdep
  for (int i = 0; i < count; ++i) {
    Element<T> element[Functor::kInputs];
    load_elements(element, in, i);
    uint32_t code;
    out[i] = to_result<Out>(functor(element, code, 1));
  }
}

template <class Instructions, class Functor>
HOST_DEVICE void run_blocks(const Functor& functor, const StridedLayout& strided,
                            const Operands<Functor>& operands, int64_t first_block,
                            int64_t last_block) {
  using T = typename Functor::Scalar;
  using In = typename Functor::In;
  using Out = typename Functor::Out;
  constexpr bool converts_inputs = kConvertsHalf<In, typename Functor::C>;
  constexpr bool converts_results = kConvertsHalf<Out, typename Functor::C>;
  constexpr bool writes_bits = Operands<Functor>::kWritesBits;
  bool is_dense[Functor::kInputs + 1];
  for (int k = 0; k <= Functor::kInputs; ++k) is_dense[k] = strided.is_dense(k);
  const int bits = operands.packed.planes;
  In gathered[Functor::kInputs][kBlock];
  opmath_t<In> as_float[Functor::kInputs][kConvertsHalf<In> ? kBlock : 1];
  T z[Functor::kNormalizes ? kBlock : 1];
  Out out_buffer[kBlock];
  opmath_t<Out> float_results[converts_results && !converts_inputs ? kBlock : 1];
  for (int64_t block = first_block; block < last_block; ++block) {
    const int64_t first = block * kBlock;
    const int count = int(std::min<int64_t>(kBlock, strided.elements - first));

    const In* stored[Functor::kInputs];
    BlockInputOf<Functor> in[Functor::kInputs];
    for (int k = 0; k < Functor::kInputs; ++k) {
      if (!is_dense[k + 1]) gather(gathered[k], operands.in[k], strided, k + 1, first, count);
      stored[k] = is_dense[k + 1] ? operands.in[k] + first : gathered[k];
      if constexpr (converts_inputs)
        CompiledFor<Instructions>::half_to_float(as_float[k], stored[k], count);
      if constexpr (std::is_same_v<In, T>) in[k] = {stored[k], as_float[k]};
    }
    Out* const out = is_dense[0] ? operands.out + first : out_buffer;
    functor_result_t<Functor>* results;
    if constexpr (converts_inputs)
      results = as_float[0];
    else if constexpr (converts_results)
      results = float_results;
    else
      results = out;

    if constexpr (Functor::kNormalizes) {
      constexpr int last = Functor::kInputs - 1;
      const BlockInput<In> x{stored[last], as_float[last]};
      if constexpr (kConvertsHalf<In> && !converts_inputs)
        CompiledFor<Instructions>::half_to_float(as_float[last], x.stored, count);
      if constexpr (kConvertsHalf<T>) {
        CompiledFor<Instructions>::normalize(z, as_float[last], x, operands.affine, first, count);
        if (converts_inputs) CompiledFor<Instructions>::half_to_float(as_float[last], z, count);
      } else {
        CompiledFor<Instructions>::normalize(z, z, x, operands.affine, first, count);
      }
      in[last] = {z, as_float[last]};
      compute_without_codes<Out>(functor.inner(), results, in, count);
    } else if constexpr (Functor::kPackedBits == PackedBitsUse::kNone) {
      compute_without_codes<Out>(functor, results, in, count);
    } else {
      code_t<Functor> codes[kBlock];
      const int64_t first_group = first / kGroup;
      const int groups = int(plane_bytes(count));
      if constexpr (!writes_bits)
        CompiledFor<Instructions>::unpack(codes, operands.packed, first_group, groups);
      if constexpr (Functor::kSplitsRegions) {
        compute_by_region<Instructions>(functor, results, in, codes, bits, count);
      } else if (writes_bits && bits == 0) {
        compute_without_codes<Out>(functor, results, in, count);
      } else {
        compute(functor, results, in, codes, bits, count);
      }
      if constexpr (writes_bits) {
        std::fill(codes + count, codes + kBlock, 0);
        CompiledFor<Instructions>::pack(codes, operands.packed, first_group, groups);
      }
    }
    if constexpr (converts_results) CompiledFor<Instructions>::float_to_half(out, results, count);
    if (!is_dense[0]) scatter(operands.out, out, strided, first, count);
  }
}

// Defines the functions of CompiledFor<Instructions>. `attributes` compiles them, and everything
// that is inlined into them, for that instruction set. They are run_blocks(), and the parts of it
// that are the same for all functors and therefore compile once.
#define INPLACE_OPS_COMPILE_FOR(Instructions, attributes)                                          \
  template <>                                                                                      \
  struct CompiledFor<Instructions> {                                                               \
    template <class Functor>                                                                       \
    attributes static void run_blocks(const Functor& functor, const StridedLayout& strided,        \
                                      const Operands<Functor>& operands, int64_t first,            \
                                      int64_t last) {                                              \
      inplace_ops::run_blocks<Instructions>(functor, strided, operands, first, last);              \
    }                                                                                              \
    NO_INLINE attributes static void half_to_float(float* to, const Half* from, int count) {       \
      Instructions::half_to_float(to, from, count);                                                \
    }                                                                                              \
    NO_INLINE attributes static void float_to_half(Half* to, const float* from, int count) {       \
      Instructions::float_to_half(to, from, count);                                                \
    }                                                                                              \
    template <class T, class In>                                                                   \
    NO_INLINE attributes static void normalize(T* z, result_t<T>* values, const BlockInput<In>& x, \
                                               const NormAffine<opmath_t<T>>& affine,              \
                                               int64_t first, int count) {                         \
      inplace_ops::normalize<Instructions>(z, values, x, affine, first, count);                    \
    }                                                                                              \
    template <class T, class C>                                                                    \
    NO_INLINE attributes static void sum_block(const T* g, const T* x,                             \
                                               const NormAffine<C>& affine,                        \
                                               const BatchNormBackward<C>& norm, int64_t piece,    \
                                               int64_t first, int count) {                         \
      inplace_ops::sum_block<Instructions>(g, x, affine, norm, piece, first, count);               \
    }                                                                                              \
    template <class T, class C>                                                                    \
    NO_INLINE attributes static void correct_block(T* out, const T* x,                             \
                                                   const NormAffine<C>& affine,                    \
                                                   const BatchNormBackward<C>& norm,               \
                                                   int64_t first, int count) {                     \
      inplace_ops::correct_block<Instructions>(out, x, affine, norm, first, count);                \
    }                                                                                              \
    template <class Code>                                                                          \
    NO_INLINE attributes static void pack(const Code (&codes)[kBlock],                             \
                                          const PackedBits<uint8_t>& packed, int64_t first_group,  \
                                          int groups) {                                            \
      inplace_ops::pack<Instructions>(codes, packed, first_group, groups);                         \
    }                                                                                              \
    template <class Code>                                                                          \
    NO_INLINE attributes static void unpack(Code (&codes)[kBlock],                                 \
                                            const PackedBits<const uint8_t>& packed,               \
                                            int64_t first_group, int groups) {                     \
      inplace_ops::unpack<Instructions>(codes, packed, first_group, groups);                       \
    }                                                                                              \
  };
INPLACE_OPS_COMPILE_FOR(Portable, )
#ifdef __x86_64__
INPLACE_OPS_COMPILE_FOR(Avx2, __attribute__((target("avx2,fma,f16c"))))
INPLACE_OPS_COMPILE_FOR(Avx512,
                        __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))))
#endif
#undef INPLACE_OPS_COMPILE_FOR

// Returns choose(CompiledFor<Instructions>{}) for the processor's instruction set.
template <class Choose>
auto for_processor(const Choose& choose) {
#ifdef __x86_64__
  if (instruction_set() == InstructionSet::kAvx512) return choose(CompiledFor<Avx512>{});
  if (instruction_set() == InstructionSet::kAvx2) return choose(CompiledFor<Avx2>{});
#endif
  return choose(CompiledFor<Portable>{});
}

inline int64_t blocks_of(int64_t elements) { return (elements + kBlock - 1) / kBlock; }

struct Cpu {
  template <class C>
  static void write_affine(const Statistics<C>& statistics, C* scale, C* shift, int64_t channels,
                           int /*device*/) {
    for (int64_t i = 0; i < channels; ++i) {
      const auto scale_shift = statistics.affine(i);
      scale[i] = scale_shift.scale;
      shift[i] = scale_shift.shift;
    }
  }

  template <class Functor>
  static void run(const Functor& functor, const StridedLayout& strided,
                  const Operands<Functor>& operands, int /*device*/) {
    auto* const run_range = run_blocks_of<Functor>();
    const int64_t blocks = blocks_of(strided.elements);
    if (blocks <= kGrainBlocks) return run_range(functor, strided, operands, 0, blocks);
    torch::stable::parallel_for(0, blocks, kGrainBlocks, [&](int64_t first, int64_t last) {
      run_range(functor, strided, operands, first, last);
    });
  }

  // The pieces of batch_norm.h are of consecutive blocks: enough of them for all cores, and so few
  // that the sums are small next to the tensors.
  static int64_t pieces_of(const ChannelLayout& /*layout*/, const Tensor& x) {
    const int64_t blocks = blocks_of(x.numel());
    return std::min<int64_t>((blocks + kGrainBlocks - 1) / kGrainBlocks, 256);
  }

  template <class Functor, class C>
  static void backward_batch_norm(const Functor& functor, const StridedLayout& strided,
                                  const Operands<Functor>& operands,
                                  const BatchNormBackward<C>& norm, int /*device*/) {
    auto* const run_range = run_blocks_of<Functor>();
    run_passes<typename Functor::Scalar>(
        operands.out, operands.in[1], operands.affine, norm, strided.elements,
        [&](int64_t block) { run_range(functor, strided, operands, block, block + 1); });
  }

 private:
  template <class Functor>
  static auto run_blocks_of() {
    return for_processor(
        [](auto compiled) { return &decltype(compiled)::template run_blocks<Functor>; });
  }

  // Runs both passes. run_backward(block) runs the activation's backward over a block, from which
  // it writes the gradient of the norm's output to `out`.
  template <class T, class C>
  static void run_passes(T* out, const T* x, const NormAffine<C>& affine,
                         const BatchNormBackward<C>& norm, int64_t elements,
                         const std::function<void(int64_t)>& run_backward) {
    const int64_t blocks = blocks_of(elements), channels = norm.layout.channels;
    const auto for_each_block = [&](int64_t piece, const auto& visit) {
      const int64_t end = (piece + 1) * blocks / norm.pieces;
      for (int64_t block = piece * blocks / norm.pieces; block < end; ++block) {
        const int64_t first = block * kBlock;
        visit(block, first, int(std::min<int64_t>(kBlock, elements - first)));
      }
    };
    const auto for_each_piece = [&](const auto& visit) {
      torch::stable::parallel_for(0, norm.pieces, 1, [&](int64_t first, int64_t last) {
        for (int64_t piece = first; piece < last; ++piece) visit(piece);
      });
    };
    auto* const sum_block =
        for_processor([](auto compiled) { return &decltype(compiled)::template sum_block<T, C>; });
    auto* const correct_block = for_processor(
        [](auto compiled) { return &decltype(compiled)::template correct_block<T, C>; });
    for_each_piece([&](int64_t piece) {
      std::fill_n(norm.sums_of_gradient(piece), channels, C(0));
      std::fill_n(norm.sums_of_product(piece), channels, C(0));
      for_each_block(piece, [&](int64_t block, int64_t first, int count) {
        run_backward(block);
        sum_block(out + first, x + first, affine, norm, piece, first, count);
      });
    });
    for (int64_t channel = 0; channel < channels; ++channel) {
      double gradient = 0, product = 0;
      for (int64_t piece = 0; piece < norm.pieces; ++piece) {
        gradient += norm.sums_of_gradient(piece)[channel];
        product += norm.sums_of_product(piece)[channel];
      }
      norm.finish_channel(channel, {C(gradient), C(product)});
    }
    for_each_piece([&](int64_t piece) {
      for_each_block(piece, [&](int64_t, int64_t first, int count) {
        correct_block(out + first, x + first, affine, norm, first, count);
      });
    });
  }
};

}  // namespace inplace_ops
