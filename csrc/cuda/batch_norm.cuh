// Runs the two passes of ../batch_norm.h over tensors on a CUDA device.
//
// Both passes compute g, the gradient of the norm's output, from the gradient and x. To store it in
// between would move two more tensors. The first pass sums g and g * (x - mean) in each channel,
// and moves 2s bytes per element of s bytes. The second turns g into grad_x, and moves 3s bytes.
// Between them a small kernel adds the partial sums.
//
// The elements of a channel are neighbors in one memory format, and far apart in another. One loop
// serves both formats, and both passes. Each lane makes accesses of `count` elements to the same
// channels from beginning to end: it reads their scale, shift and mean once, and its sums stay in
// registers. A tensor has
//
//   planes   as in NCHW: a channel has `inner` > 1 neighbors in each block. All elements of an
//            access have the same channel. A warp has one channel, and its lanes make neighboring
//            accesses.
//   rows     as in channels_last and (N, C): a channel has one element in each block, which is a
//            row. The elements of an access have consecutive channels. The lanes of a warp cover
//            128 bytes of each of several rows; with accesses of one element, 32 elements of a row.
//
// Accesses have 16 bytes where the tensors are aligned, and a plane or a row is a whole number of
// such accesses. Otherwise they have one element.
//
// Where there are fewer channels than warps that a GPU needs, a channel has several pieces, and its
// accesses go to the pieces in turn. At the end the lanes of a warp add their sums by shuffles, and
// one of them writes the partial sum of a channel in a piece. No sum has two writers, and the order
// of all additions is fixed.
//
// A lane issues the loads of a burst of accesses before it computes, so that all of them are in
// flight. These are 128 bytes a lane. By Little's law (elementwise.cuh) the loads of 256 lanes on a
// multiprocessor suffice; the registers leave room for 512.
//
// A lane's next access is a constant number of accesses ahead. So its address follows by additions.
// A division would take some twenty instructions, and IntDivider is limited to 2^31 elements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../batch_norm.h"
#include "../functors.h"
#include "elementwise.cuh"
#include "path_choice.cuh"
#include "tile.cuh"
#include "warp.cuh"

namespace inplace_ops {

// The accesses of a burst, to each tensor. With accesses of one element there is room for more.
constexpr int burst_of(int count) { return count > 1 ? 4 : 8; }

// Lanes of a multiprocessor for which there are enough registers.
constexpr int kResidentLanes = 512;

// At most so many lanes run the first pass, and the second, unless there are more channels. All
// lanes of the first are resident on an H200 at once, which has 132 multiprocessors: a few more
// would run alone at the end. The second pass has several times as many, of which those at the end
// are a small part.
constexpr int64_t kSummingLanes = 1 << 16, kCorrectingLanes = 1 << 18;
// A lane of the first pass makes at least so many accesses to a tensor, as partial sums are stored
// and loaded too.
constexpr int64_t kSummedAccesses = 8;

// Offsets in elements: in x and out, which are dense, and in the gradient.
struct ChannelOffsets {
  int64_t dense, grad;

  HOST_DEVICE ChannelOffsets operator+(ChannelOffsets other) const {
    return {dense + other.dense, grad + other.grad};
  }
  HOST_DEVICE ChannelOffsets operator*(int64_t factor) const {
    return {dense * factor, grad * factor};
  }
};

// How warps share the channels and the accesses to them. These form runs, in which they are equally
// far apart: a run is a plane, or in rows the whole channel.
struct ChannelLoop {
  int64_t channels, inner;
  int channels_of_access;  // 1, or `count` in rows
  int width_log2;          // a warp makes 2^width_log2 accesses next to each other in a row
  int64_t channel_groups;  // a group has the channels of a warp
  int64_t accesses;        // to a channel
  int64_t accesses_of_run;
  ChannelOffsets access, run;  // from an access or a run to the next
  // What depends on the number of pieces: see divide().
  int64_t pieces;
  int64_t step;                            // from an access of a lane to its next
  int64_t accesses_of_lane, longer_lanes;  // the first `longer_lanes` lanes make one access more
  int64_t step_in_run;
  ChannelOffsets step_offsets;
  ChannelOffsets carry_offsets;  // added if the step passes the end of a run

  // `count` divides the channels in rows, and the elements of a plane otherwise.
  ChannelLoop(const ChannelLayout& layout, int count)
      : channels(layout.channels), inner(layout.inner) {
    channels_of_access = has_planes() ? 1 : count;
    accesses_of_run = has_planes() ? inner / count : 1;
    accesses = accesses_of_run * layout.outer;
    access = {count, count};
    run = {channels * inner, layout.grad_stride};
    if (accesses_of_run == 1) {  // accesses in successive blocks are equally far apart too
      accesses_of_run = accesses;
      access = run;
    }
    const int64_t neighbors = channels / channels_of_access;
    const int widest_log2 = count > 1 ? 3 : 5;  // 128 bytes, or the whole warp
    width_log2 = 0;
    while (!has_planes() && width_log2 < widest_log2 && width() < neighbors) ++width_log2;
    channel_groups = (neighbors + width() - 1) / width();
    divide(1);
  }

  // Returns the largest number of pieces with which at most `lanes` lanes make at least `least`
  // accesses each, in whole bursts; or 1.
  int64_t pieces_for(int64_t lanes, int64_t least, int burst) const {
    const auto ceil_quotient = [](int64_t n, int64_t divisor) {
      return (n + divisor - 1) / divisor;
    };
    const int64_t of_one_piece = ceil_quotient(accesses, lanes_of_channel());  // accesses of a lane
    const int64_t most = std::max<int64_t>(lanes / (channel_groups * kWarpSize), 1);
    const int64_t bursts = ceil_quotient(std::max(ceil_quotient(of_one_piece, most), least), burst);
    return ceil_quotient(of_one_piece, bursts * burst);
  }

  void divide(int64_t piece_count) {
    pieces = piece_count;
    step = pieces * lanes_of_channel();
    accesses_of_lane = accesses / step;
    longer_lanes = accesses % step;
    step_in_run = step % accesses_of_run;
    step_offsets = run * (step / accesses_of_run) + access * step_in_run;
    carry_offsets = run + access * -accesses_of_run;
  }

  HOST_DEVICE bool has_planes() const { return inner > 1; }
  HOST_DEVICE int width() const { return 1 << width_log2; }
  HOST_DEVICE int lanes_of_channel() const { return kWarpSize >> width_log2; }
  HOST_DEVICE int64_t warps() const { return channel_groups * pieces; }
  HOST_DEVICE int64_t piece(int64_t warp) const { return uint64_t(warp) / channel_groups; }

  // The first channel of a lane's accesses. Past the last channel the lane has none.
  HOST_DEVICE int64_t channel(int64_t warp, unsigned lane) const {
    const int64_t group = warp - piece(warp) * channel_groups;
    return ((group << width_log2) + (lane & (width() - 1))) * channels_of_access;
  }

  // The next access of a lane: its number in its run, its offsets, and the accesses from there on.
  struct Position {
    int64_t in_run, remaining;
    ChannelOffsets offsets;
  };

  HOST_DEVICE Position start(int64_t warp, unsigned lane) const {
    const int64_t first_channel = channel(warp, lane);
    const int64_t first = piece(warp) * lanes_of_channel() + (lane >> width_log2);
    const int64_t first_run = uint64_t(first) / accesses_of_run;
    const int64_t in_run = first - first_run * accesses_of_run;
    const ChannelOffsets channel_offsets{first_channel * inner, first_channel * inner};
    return {in_run, first_channel < channels ? accesses_of_lane + (first < longer_lanes) : 0,
            channel_offsets + run * first_run + access * in_run};
  }

  HOST_DEVICE void advance(Position& at) const {
    at.offsets = at.offsets + step_offsets;
    at.in_run += step_in_run;
    if (at.in_run >= accesses_of_run) {
      at.in_run -= accesses_of_run;
      at.offsets = at.offsets + carry_offsets;
    }
  }
};

// Returns the loop of the first pass, and that of the second.
inline ChannelLoop summing_loop(const ChannelLayout& layout, int count, int64_t pieces) {
  ChannelLoop loop(layout, count);
  loop.divide(pieces);
  return loop;
}

inline ChannelLoop correcting_loop(const ChannelLayout& layout, int count) {
  ChannelLoop loop(layout, count);
  loop.divide(loop.pieces_for(kCorrectingLanes, burst_of(count), burst_of(count)));
  return loop;
}

// Whether accesses of `count` elements are possible if all tensors are aligned.
inline bool allows_accesses_of(const ChannelLayout& layout, int64_t count) {
  const int64_t size = layout.inner > 1 ? layout.inner : layout.channels;
  return size % count == 0 && layout.grad_stride % count == 0;
}

// Returns the number of pieces for a layout. Accesses of one element may have them too: those to
// tensors that are not aligned.
inline int64_t pieces_of_layout(const ChannelLayout& layout, int64_t element_bytes) {
  const int vector = element_bytes == sizeof(double) ? 1 : kVectorBytes / element_bytes;
  const int count = allows_accesses_of(layout, vector) ? vector : 1;
  return ChannelLoop(layout, count).pieces_for(kSummingLanes, kSummedAccesses, burst_of(count));
}

// Calls launch(count) with the elements of an access.
template <class Functor, class Launch>
void choose_access(const ChannelLayout& layout, const Operands<Functor>& operands,
                   const Launch& launch) {
  constexpr int vector = kVectorElements<typename Functor::In>;
  if constexpr (vector > 1) {
    if (allows_accesses_of(layout, vector) && can_vectorize(operands, typename Functor::FastBits{}))
      return launch(std::integral_constant<int, vector>{});
  }
  launch(std::integral_constant<int, 1>{});
}

template <class T, int count>
HOST_DEVICE void load_access(T (&values)[count], const T* data) {
  if constexpr (count > 1)
    load_vector(values, data);
  else
    values[0] = *data;
}

template <class T, int count>
HOST_DEVICE void store_access(T* data, const T (&values)[count]) {
  if constexpr (count > 1)
    store_vector(data, values);
  else
    *data = values[0];
}

// A number for each element of a lane's accesses: that of its channel.
template <class C, int count>
struct OfChannels {
  C values[count];

  HOST_DEVICE OfChannels(const ChannelLoop& loop, int64_t channel, const C* data) {
    const int next = loop.has_planes() ? 0 : 1;
    UNROLL
    for (int i = 0; i < count; ++i) values[i] = data[channel + i * next];
  }
  HOST_DEVICE C operator[](int i) const { return values[i]; }
};

// What both passes read of a lane's channels.
template <class C, int count>
struct LaneChannels {
  OfChannels<C, count> scale, shift, mean;

  template <class Functor>
  HOST_DEVICE LaneChannels(const ChannelLoop& loop, int64_t channel,
                           const Operands<Functor>& operands, const BatchNormBackward<C>& norm)
      : scale(loop, channel, operands.affine.channel_affine.scale),
        shift(loop, channel, operands.affine.channel_affine.shift),
        mean(loop, channel, norm.mean) {}
};

// An access of a lane, with g and x - mean of its elements.
template <class C, int count>
struct ChannelAccess {
  C g[count], centered[count];
  int64_t offset;  // in x and out
};

// Calls visit(access) for each access of a lane from `at` on. The last burst may lack accesses.
// Zeros in their place would not do: z would be the shift, which may be infinite in float16.
template <int count, class Functor, class C, class Visit>
HOST_DEVICE void visit_accesses(const Functor& functor, const ChannelLoop& loop,
                                const Operands<Functor>& operands,
                                const LaneChannels<C, count>& channels, ChannelLoop::Position at,
                                const Visit& visit) {
  using T = typename Functor::Scalar;
  constexpr int burst = burst_of(count);
  NO_UNROLL
  for (; at.remaining > 0; at.remaining -= burst) {
    const int existing = int(smaller(at.remaining, int64_t(burst)));
    T grad[burst][count], x[burst][count];
    int64_t offsets[burst];
    UNROLL
    for (int a = 0; a < burst; ++a) {
      offsets[a] = at.offsets.dense;
      if (a < existing) {
        load_access(grad[a], operands.in[0] + at.offsets.grad);
        load_access(x[a], operands.in[1] + at.offsets.dense);
      }
      loop.advance(at);
    }
    UNROLL
    for (int a = 0; a < burst; ++a) {
      if (a >= existing) continue;
      ChannelAccess<C, count> access;
      access.offset = offsets[a];
      Element<T> in[2][count];
      load_all(grad[a], in[0]);
      load_all(x[a], in[1]);
      C z[count];
      UNROLL
      for (int i = 0; i < count; ++i) {
        const ScaleAndShift<C> affine{channels.scale[i], channels.shift[i]};
        z[i] = apply_affine(in[1][i].value, affine);
        access.centered[i] = in[1][i].value - channels.mean[i];
      }
      apply_normalized(functor, in, z, access.g);
      visit(access);
    }
  }
}

// The sums of a lane, by the elements of an access.
template <class C, int count>
struct SumsOfLane {
  C gradient[count], product[count];
};

// Adds the first `entries` sums of all lanes of a warp whose numbers differ by a multiple of
// `width`.
template <int entries, class C, int count>
HOST_DEVICE void add_sums_of_lanes(Lanes<SumsOfLane<C, count>>& lanes, int width) {
  NO_UNROLL
  for (int bit = kWarpSize / 2; bit >= width; bit /= 2) {
    lanes.template add_across<entries>(&SumsOfLane<C, count>::gradient, bit);
    lanes.template add_across<entries>(&SumsOfLane<C, count>::product, bit);
  }
}

// Writes the partial sums of a warp, which are those of `entries` channels for each access.
template <int entries, class C, int count>
HOST_DEVICE void write_sums(Lanes<SumsOfLane<C, count>>& lanes, const ChannelLoop& loop,
                            const BatchNormBackward<C>& norm, int64_t warp) {
  add_sums_of_lanes<entries>(lanes, loop.width());
  lanes.each([&](const auto& my, unsigned lane) {
    const int64_t channel = loop.channel(warp, lane), piece = loop.piece(warp);
    if (lane >= unsigned(loop.width()) || channel >= loop.channels) return;
    UNROLL
    for (int i = 0; i < entries; ++i) {
      norm.sums_of_gradient(piece)[channel + i] = my.gradient[i];
      norm.sums_of_product(piece)[channel + i] = my.product[i];
    }
  });
}

// The first pass: writes a warp's partial sums. The last block may have warps past the last one.
template <int count, class Functor, class C>
HOST_DEVICE void sum_warp(const Functor& functor, const ChannelLoop& loop,
                          const Operands<Functor>& operands, const BatchNormBackward<C>& norm,
                          int64_t warp) {
  if (warp >= loop.warps()) return;
  Lanes<SumsOfLane<C, count>> lanes;
  lanes.each([&](auto& my, unsigned lane) {
    my = {};
    const auto start = loop.start(warp, lane);
    if (start.remaining == 0) return;
    const LaneChannels<C, count> channels(loop, loop.channel(warp, lane), operands, norm);
    visit_accesses<count>(functor, loop, operands, channels, start,
                          [&](const ChannelAccess<C, count>& access) {
                            UNROLL
                            for (int i = 0; i < count; ++i) {
                              my.gradient[i] += access.g[i];
                              my.product[i] += access.g[i] * access.centered[i];
                            }
                          });
  });
  if (count > 1 && loop.has_planes()) {
    lanes.each([](auto& my, unsigned) {
      UNROLL
      for (int i = 1; i < count; ++i) {
        my.gradient[0] += my.gradient[i];
        my.product[0] += my.product[i];
      }
    });
    write_sums<1>(lanes, loop, norm, warp);
  } else {
    write_sums<count>(lanes, loop, norm, warp);
  }
}

// Adds the partial sums of a channel.
template <class C>
HOST_DEVICE void finish_warp(const BatchNormBackward<C>& norm, int64_t channel) {
  Lanes<SumsOfLane<C, 1>> lanes;
  lanes.each([&](auto& my, unsigned lane) {
    my = {};
    for (int64_t piece = lane; piece < norm.pieces; piece += kWarpSize) {
      my.gradient[0] += norm.sums_of_gradient(piece)[channel];
      my.product[0] += norm.sums_of_product(piece)[channel];
    }
  });
  add_sums_of_lanes<1>(lanes, 1);
  lanes.each([&](const auto& my, unsigned lane) {
    if (lane == 0) norm.finish_channel(channel, {my.gradient[0], my.product[0]});
  });
}

struct NoState {};

// The second pass: writes grad_x where a warp has accesses.
template <int count, class Functor, class C>
HOST_DEVICE void correct_warp(const Functor& functor, const ChannelLoop& loop,
                              const Operands<Functor>& operands, const BatchNormBackward<C>& norm,
                              int64_t warp) {
  using T = typename Functor::Scalar;
  if (warp >= loop.warps()) return;
  Lanes<NoState> lanes;
  lanes.each([&](auto&, unsigned lane) {
    const auto start = loop.start(warp, lane);
    if (start.remaining == 0) return;
    const int64_t channel = loop.channel(warp, lane);
    const LaneChannels<C, count> channels(loop, channel, operands, norm);
    const OfChannels<C, count> slope(loop, channel, norm.slope);
    const OfChannels<C, count> offset(loop, channel, norm.offset);
    visit_accesses<count>(
        functor, loop, operands, channels, start, [&](const ChannelAccess<C, count>& access) {
          C results[count];
          UNROLL
          for (int i = 0; i < count; ++i) {
            const Correction<C> correction{slope[i], offset[i]};
            results[i] = correction.gradient(access.g[i], access.centered[i], channels.scale[i]);
          }
          T stored[count];
          store_all(results, stored);
          store_access(operands.out + access.offset, stored);
        });
  });
}

}  // namespace inplace_ops
