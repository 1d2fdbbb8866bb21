// Runs a functor over tensors on a CUDA device.
//
// A warp works on a tile. Each of its lanes makes kAccesses accesses to every tensor, and
// neighboring lanes access neighboring memory. All loads of a lane from the inputs come before its
// arithmetic, so that all of them are in flight at once.
//
// Where possible an access has 16 bytes: mostly in whole tiles of tensors that are aligned, and
// dense or rows of a larger tensor. Elsewhere it has one element. path_choice.cuh has the exact
// conditions. Results that are cast to half the width are stored 8 bytes at a time.
//
// Bandwidth. Every byte moves once. Bytes moved per element of s bytes with k saved bits:
//
// - 2s for a forward that saves nothing;
// - 2s + k/8 for a forward that saves bits, and for a backward from bits;
// - 3s for a backward from the output;
// - 3s + k/8 for a backward from both.
//
// By Little's law an H200 (4.3 TB/s over 132 multiprocessors, 1 us under load) needs 32 KiB in
// flight in each multiprocessor, 16 KiB of it loads. With two 16-byte loads a lane from one tensor,
// this requires 512 resident lanes, a quarter of the most that a multiprocessor can have.
// tests/cuda/test_cuda_code.py checks that the registers suffice. Hence these choices:
//
// - Two accesses a lane to each tensor, which also hides their latency.
// - Blocks of 128 lanes. At 32 registers a lane, sixteen blocks fit, which are all 2048 lanes. At
//   64 registers eight blocks fit.
// - One tile a warp, rather than a loop over few blocks. The hardware hands out blocks, of 4 KiB of
//   each tensor, faster than they finish, and a small tensor then spreads over all multiprocessors.
// - No streaming hints, since the next layer reads what this one writes.
//
// After a norm each element also has a scale and a shift. In whole tiles affine_layout.h finds them
// in few instructions. A division would take as many instructions as the activation of several
// elements.
//
// ../functors.h defines Operands, FastBits (the numbers of bits with a vectorized path) and
// kSplitsRegions (core and tail region). ../bit_planes.h defines kGroup: eight elements, which
// share a byte of each bit plane. tile.cuh has loads and stores, bit_plane_io.cuh those of codes.
//
// The kernel bodies take their indices as arguments and compile for the host too, where tests run
// them (warp.cuh).
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "../functors.h"
#include "affine_layout.h"
#include "bit_plane_io.cuh"
#include "tile.cuh"
#include "warp.cuh"

namespace inplace_ops {

// The arithmetic of one access. Where a functor splits regions, core() runs on all elements, and
// tail() then overwrites the results of those in the tail. These are rare, and one branch for all
// elements costs less than one per element.
template <class Functor, int count>
HOST_DEVICE void compute(const Functor& functor, LaneState<Functor, count>& my, int access,
                         int bits) {
  using T = typename Functor::Scalar;
  Element<T> elements[count][Functor::kInputs];
  bool any_in_tail = false;
  UNROLL
  for (int i = 0; i < count; ++i) {
    UNROLL
    for (int k = 0; k < Functor::kInputs; ++k) elements[i][k] = element_of(my.in[k][access][i]);
    uint32_t& code = my.codes[access][i];
    if constexpr (Functor::kSplitsRegions) {
      my.out[access][i] = store<T>(functor.core(elements[i], code, bits));
      any_in_tail |= functor.is_in_tail(elements[i], code, bits);
    } else {
      my.out[access][i] = store<T>(functor(elements[i], code, bits));
    }
  }
  if constexpr (Functor::kSplitsRegions) {
    if (!any_in_tail) return;
    uint32_t in_tail = 0;
    UNROLL
    for (int i = 0; i < count; ++i)
      in_tail |= uint32_t(functor.is_in_tail(elements[i], my.codes[access][i], bits)) << i;
    NO_UNROLL
    for (; in_tail != 0; in_tail &= in_tail - 1) {
      const uint32_t lowest = in_tail & (0u - in_tail);
      Element<T> element[Functor::kInputs];
      uint32_t code = 0;
      UNROLL
      for (int i = 0; i < count; ++i) {  // registers cannot be indexed
        if (lowest != 1u << i) continue;
        code = my.codes[access][i];
        UNROLL
        for (int k = 0; k < Functor::kInputs; ++k) element[k] = elements[i][k];
      }
      const T result = store<T>(functor.tail(element, code, bits));
      UNROLL
      for (int i = 0; i < count; ++i)
        if (lowest == 1u << i) my.out[access][i] = result;
    }
  }
}

// Applies a functor after a norm to the inputs of an access, with z in place of the last input.
template <class Functor, int count, class C>
HOST_DEVICE void apply_normalized(const Functor& functor,
                                  Element<typename Functor::Scalar> (&in)[Functor::kInputs][count],
                                  const C (&z)[count], typename Functor::C (&results)[count]) {
  constexpr int inputs = Functor::kInputs;
  rounded_elements(z, in[inputs - 1]);
  uint32_t no_code = 0;
  UNROLL
  for (int i = 0; i < count; ++i) {
    Element<typename Functor::Scalar> element[inputs];
    UNROLL
    for (int k = 0; k < inputs; ++k) element[k] = in[k][i];
    results[i] = functor.inner()(element, no_code, 1);
  }
}

// The arithmetic of one access after a norm. normalized(i, x) returns z, the norm's output, for
// element i of the access, whose last input is x.
template <class Functor, int count, class Normalized>
HOST_DEVICE void compute_normalized(const Functor& functor, LaneState<Functor, count>& my,
                                    int access, const Normalized& normalized) {
  using T = typename Functor::Scalar;
  constexpr int inputs = Functor::kInputs;
  Element<T> in[inputs][count];
  UNROLL
  for (int k = 0; k < inputs; ++k) load_all(my.in[k][access], in[k]);
  opmath_t<T> z[count];
  UNROLL
  for (int i = 0; i < count; ++i) z[i] = normalized(i, in[inputs - 1][i].value);
  if constexpr (Functor::kRoundsNormalized) {
    typename Functor::C results[count];
    apply_normalized(functor, in, z, results);
    store_all(results, my.out[access]);
  } else {
    store_all(z, my.out[access]);
  }
}

// With row statistics the row's mean is subtracted first, and the scale is multiplied by its rstd.
template <class C>
HOST_DEVICE C apply_affine(C x, ScaleAndShift<C> channel, RowStatistics<C> row) {
  return apply_affine(x - row.mean, {channel.scale * row.rstd, channel.shift});
}

// The arithmetic of all accesses of a lane in a whole tile; `first` is the lane's first element.
// Where an access has one or two channels, the scales and shifts of all accesses are loaded before
// any arithmetic.
template <class Functor, int count, class C>
HOST_DEVICE void compute_all_normalized(const Functor& functor, LaneState<Functor, count>& my,
                                        const AffineLayout& layout, const NormAffine<C>& affine,
                                        uint32_t first) {
  if (layout.kind == AffineLayout::kPlanes) {
    ScaleAndShift<C> channel[kAccesses];
    UNROLL
    for (int a = 0; a < kAccesses; ++a)
      channel[a] = affine.channel(layout.channel(first + index_in_tile<count>(a, 0)));
    UNROLL
    for (int a = 0; a < kAccesses; ++a)
      compute_normalized(functor, my, a, [&](int, C x) { return apply_affine(x, channel[a]); });
  } else if (layout.kind == AffineLayout::kSplitPlanes) {
    ScaleAndShift<C> channel[kAccesses], next[kAccesses];
    uint32_t remaining[kAccesses];
    UNROLL
    for (int a = 0; a < kAccesses; ++a) {
      const auto at = layout.split<count>(first + index_in_tile<count>(a, 0), affine.strided);
      channel[a] = affine.channel(at.channel);
      next[a] = affine.channel(at.next);
      remaining[a] = at.remaining;
    }
    UNROLL
    for (int a = 0; a < kAccesses; ++a) {
      // A selection of z takes fewer instructions than one of scale and shift: the second product
      // is computed under a predicate.
      compute_normalized(functor, my, a, [&](uint32_t i, C x) {
        const C z = apply_affine(x, channel[a]), next_z = apply_affine(x, next[a]);
        return i == 0 || i < remaining[a] ? z : next_z;
      });
    }
  } else {
    const auto compute_columns = [&](auto has_rows) {
      UNROLL
      for (int a = 0; a < kAccesses; ++a) {
        const auto at = layout.column(first + index_in_tile<count>(a, 0), affine.strided);
        C scale[count], shift[count];
        UNROLL
        for (int i = 0; i < count; i += 4) {
          load_vector(reinterpret_cast<C(&)[4]>(scale[i]),
                      affine.channel_affine.scale + at.channel + i);
          load_vector(reinterpret_cast<C(&)[4]>(shift[i]),
                      affine.channel_affine.shift + at.channel + i);
        }
        RowStatistics<C> row{};
        if constexpr (has_rows()) row = affine.row(at.row);
        compute_normalized(functor, my, a, [&](int i, C x) {
          const ScaleAndShift<C> channel{scale[i], shift[i]};
          return has_rows() ? apply_affine(x, channel, row) : apply_affine(x, channel);
        });
      }
    };
    if (affine.has_rows())
      compute_columns(std::true_type{});
    else
      compute_columns(std::false_type{});
  }
}

// Runs the functor on one tile. With accesses of several elements the tile is whole, and the packed
// bits have `planes` planes.
template <int count, int planes, class Functor, class Layout>
HOST_DEVICE void run_tile(const Functor& functor, const Layout& layout,
                          const Operands<Functor>& operands, const Tile& tile) {
  using T = typename Functor::Scalar;
  using In = typename Functor::In;
  auto packed = operands.packed;
  if constexpr (count > 1) packed.planes = planes;
  const int bits = packed.planes > 0 ? packed.planes : 1;  // without planes the codes are not used
  const auto is_in_tile = [&](int index) { return count > 1 || index < tile.elements; };
  Lanes<LaneState<Functor, count>> lanes;
  lanes.each([&](auto& my, unsigned lane) {
    UNROLL
    for (int a = 0; a < kAccesses; ++a) {
      const int index = index_in_tile<count>(a, lane);
      if constexpr (count > 1) {
        my.out_address[a] = layout.address(operands.out, 0, tile.first + index);
        UNROLL
        for (int k = 0; k < Functor::kInputs; ++k)
          load_vector(my.in[k][a], layout.address(operands.in[k], k + 1, tile.first + index));
      } else {
        int64_t offsets[Functor::kInputs + 1] = {};
        if (is_in_tile(index)) layout.get_offsets(uint64_t(tile.first + index), offsets);
        my.out_address[a] = operands.out + offsets[0];
        UNROLL
        for (int k = 0; k < Functor::kInputs; ++k)
          my.in[k][a][0] = is_in_tile(index) ? operands.in[k][offsets[k + 1]] : In{};
      }
      UNROLL
      for (int i = 0; i < count; ++i) my.codes[a][i] = 0;  // TileBits::read() sets bits in them
    }
  });
  if constexpr (Functor::kPackedBits == PackedBitsUse::kRead)
    TileBits<count>::template read<planes>(lanes, packed, tile);

  lanes.each([&](auto& my, unsigned lane) {
    // 32 bits suffice: affine_layout() rejects tensors of 2^32 elements or more.
    if constexpr (Functor::kNormalizes && count > 1)
      compute_all_normalized(functor, my, layout.affine, operands.affine,
                             uint32_t(tile.first) + index_in_tile<count>(0, lane));
    UNROLL
    for (int a = 0; a < kAccesses; ++a) {
      const int index = index_in_tile<count>(a, lane);
      if constexpr (!Functor::kNormalizes) {
        compute(functor, my, a, bits);
      } else if constexpr (count == 1) {
        if (is_in_tile(index)) {
          const auto& affine = operands.affine;
          int64_t offsets[2];
          affine.strided.get_offsets(uint64_t(tile.first + index), offsets);
          // A choice between two affines would keep the compiler from computing them by fma, which
          // accesses of several elements use.
          const auto channel = affine.channel(offsets[0]);
          const auto row = affine.row(offsets[1]);
          compute_normalized(functor, my, a,
                             [&](int, opmath_t<T> x) { return apply_affine(x, channel, row); });
        }
      }
      if constexpr (count > 1) {
        store_vector(my.out_address[a], my.out[a]);
      } else if (is_in_tile(index)) {
        *my.out_address[a] = my.out[a][0];
      } else {
        my.codes[a][0] = 0;  // past the end: the unused bits of a plane are 0
      }
    }
  });
  if constexpr (Functor::kPackedBits == PackedBitsUse::kWritten)
    TileBits<count>::template write<planes>(lanes, packed, tile);
}

// Runs a tile with the version of run_tile that is compiled for this number of bit planes. The last
// version also runs if none matches: for vector accesses can_vectorize() excludes this, and for
// accesses of one element the only version supports any number.
template <int count, class Functor, class Layout, int planes, int... others>
HOST_DEVICE void run_version(std::integer_sequence<int, planes, others...>, const Functor& functor,
                             const Layout& layout, const Operands<Functor>& operands,
                             const Tile& tile) {
  if constexpr (sizeof...(others) > 0) {
    if (operands.packed.planes != planes)
      return run_version<count>(std::integer_sequence<int, others...>{}, functor, layout, operands,
                                tile);
  }
  run_tile<count, planes>(functor, layout, operands, tile);
}

// Runs a warp's tile: the one with number `tile`, counted from `begin`, a multiple of kGroup. The
// last block's warps may have tiles past `end`; these do nothing.
template <int count, class Functor, class Layout>
HOST_DEVICE void run_warp(const Functor& functor, const Layout& layout,
                          const Operands<Functor>& operands, int64_t begin, int64_t end,
                          int64_t tile) {
  using AnyBits = std::integer_sequence<int, 0>;
  using Versions = std::conditional_t<count == 1, AnyBits, typename Functor::FastBits>;
  const int64_t first = begin + tile * kTileElements<count>;
  if (first >= end) return;
  const int elements = smaller(end - first, int64_t(kTileElements<count>));
  run_version<count>(Versions{}, functor, layout, operands, Tile{first, elements});
}

}  // namespace inplace_ops
