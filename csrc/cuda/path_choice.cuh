// Chooses the accesses and the layout with which kernels run over an op's operands.
//
// An access of 16 bytes needs elements that are neighbors in memory, in every operand, and the
// offset of the first of them in few instructions. A StridedLayout offers neither. So before each
// launch the host looks for a layout that offers both: dense tensors, or rows. Kernels are compiled
// for each of these layouts and, with accesses of one element, for StridedLayout.
#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>

#include "../functors.h"
#include "../strided_layout.h"
#include "affine_layout.h"
#include "tile.cuh"

namespace inplace_ops {

// Of a block: elementwise.cuh says why.
constexpr int kThreads = 128;

// The layout of dense tensors: an element's offset is its index. The layouts of vector accesses
// return the address of an element of an operand, the output or input `operand - 1`.
struct Dense {
  template <class T>
  HOST_DEVICE T* address(T* data, int, uint64_t element) const {
    return data + element;
  }
};

// The layout of tensors whose rows are a whole number of accesses, with a gap between rows that may
// differ between operands. Some of the channels of a larger tensor have this layout, such as the
// gradient of an input of torch.cat. Any other tensor has a StridedLayout and accesses of one
// element.
struct Rows {
  IntDivider size;  // divides by the elements of a row; dense tensors have one row, always row 0
  int32_t gap_bytes[kMaxOperands] = {};

  // 32 bits suffice for the index: with gaps there are less than 2^31 elements, and after a norm
  // less than 2^32 (affine_layout()). The gap is in bytes so that a GPU adds each of the two
  // products to the address by one instruction.
  template <class T>
  HOST_DEVICE T* address(T* data, int operand, uint32_t element) const {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    const int64_t gaps = int64_t(int32_t(size.div(element))) * gap_bytes[operand];
    return reinterpret_cast<T*>(reinterpret_cast<Byte*>(data + element) + gaps);
  }
};

// Kernels after a norm are bound by memory, so one kernel serves dense tensors and rows.
struct RowsOfNormalized : Rows {
  AffineLayout affine;
};

// Returns the rows if the operands are dense or in rows that are a whole number of vector accesses,
// otherwise nullopt.
template <class Functor>
std::optional<Rows> rows_of(const StridedLayout& strided) {
  constexpr int count = kVectorElements<typename Functor::In>;
  constexpr int64_t sizes[] = {sizeof(typename Functor::Out), sizeof(typename Functor::In)};
  Rows rows;
  if (strided.is_dense()) return rows;
  if (strided.dims != 2 || strided.elements > INT32_MAX) return std::nullopt;
  const int64_t size = strided.sizes[1];
  if (size % count != 0) return std::nullopt;
  rows.size = IntDivider(size);
  for (int k = 0; k < strided.operands; ++k) {
    const int64_t gap = strided.strides[k][0] - size;
    const int64_t bytes = gap * sizes[k > 0];
    if (strided.strides[k][1] != 1 || gap % count != 0 || bytes != int32_t(bytes))
      return std::nullopt;
    rows.gap_bytes[k] = int32_t(bytes);
  }
  return rows;
}

// Calls launch(layout) with the layout for accesses of several elements, if the operands have one:
//   - dense tensors;
//   - Rows, if the functor has kVectorizesRows or kNormalizes;
//   - in addition, after a norm, an AffineLayout.
// Otherwise does not call it.
template <class Functor, class Launch>
void with_vector_layout(const StridedLayout& strided, const Operands<Functor>& operands,
                        const Launch& launch) {
  constexpr int count = kVectorElements<typename Functor::In>;
  if constexpr (Functor::kNormalizes) {
    const auto rows = rows_of<Functor>(strided);
    const auto affine = affine_layout<count>(operands.affine, kVectorBytes);
    if (rows && affine) launch(RowsOfNormalized{*rows, *affine});
  } else if (strided.is_dense()) {
    launch(Dense{});
  } else if constexpr (Functor::kVectorizesRows) {
    if (const auto rows = rows_of<Functor>(strided)) launch(*rows);
  }
}

// Whether the operands are aligned to a vector, and there is a version for their number of bits.
template <class Functor, int... planes>
bool can_vectorize(const Operands<Functor>& operands, std::integer_sequence<int, planes...>) {
  uintptr_t addresses = reinterpret_cast<uintptr_t>(operands.out);
  for (const auto* in : operands.in) addresses |= reinterpret_cast<uintptr_t>(in);
  return addresses % kVectorBytes == 0 && ((operands.packed.planes == planes) || ...);
}

// With fewer whole tiles than this, a second launch for the remaining elements would cost more than
// accesses of one element to all elements.
constexpr int kFewTiles = 128;

// Calls launch(count, layout, begin, end) with the elements of an access and the layout to use from
// `begin` to `end`. Whole tiles have vector accesses. Accesses have one element, with any layout,
//   - where the format is double,
//   - where the operands are not aligned, or their number of bits is not in FastBits,
//   - where they have no layout for vector accesses (with_vector_layout()),
//   - where there are fewer than `few_tiles` whole tiles and a rest, and
//   - in the rest at the end, which is less than a tile.
// Tests pass another `few_tiles`, so that small tensors take both paths.
template <class Functor, class Launch>
void choose_path(const StridedLayout& strided, const Operands<Functor>& operands,
                 const Launch& launch, int64_t few_tiles = kFewTiles) {
  constexpr int vector = kVectorElements<typename Functor::In>;
  const int64_t elements = strided.elements;
  int64_t begin = 0;
  if constexpr (vector > 1) {
    constexpr int tile = kTileElements<vector>;
    const bool is_worth_it = elements % tile == 0 || elements / tile >= few_tiles;
    if (is_worth_it && can_vectorize(operands, typename Functor::FastBits{})) {
      with_vector_layout(strided, operands, [&](const auto& layout) {
        begin = elements / tile * tile;
        launch(std::integral_constant<int, vector>{}, layout, int64_t(0), begin);
      });
    }
  }
  if (begin < elements) launch(std::integral_constant<int, 1>{}, strided, begin, elements);
}

}  // namespace inplace_ops
