// The storage formats of the dtypes float64, float32, float16 and bfloat16, which are double,
// float, Half and BFloat16, and the type that each is computed in.
#pragma once

#include <type_traits>

#include "host_device.h"

namespace inplace_ops {

struct Half {
  uint16_t pattern;
  static constexpr uint16_t kInfinity = 0x7c00;
};

struct BFloat16 {
  uint16_t pattern;
  static constexpr uint16_t kInfinity = 0x7f80;
};

// The type that a format is computed in: float for the 16-bit formats, otherwise the format itself.
template <class T>
struct OpMathType {
  using type = T;
};
template <>
struct OpMathType<Half> {
  using type = float;
};
template <>
struct OpMathType<BFloat16> {
  using type = float;
};
template <class T>
using opmath_t = typename OpMathType<T>::type;

template <class T>
using pattern_t = std::conditional_t<sizeof(T) == 8, uint64_t,
                                     std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;

template <class T>
HOST_DEVICE opmath_t<T> load(T value) {
  return value;
}

HOST_DEVICE float load(Half value) {
#ifdef INPLACE_OPS_HARDWARE
  return hardware::from_half(value.pattern);
#else
  const uint32_t magnitude = (value.pattern & 0x7fffu) << 13;
  const uint32_t sign = (value.pattern & 0x8000u) << 16;
  const uint32_t normal = magnitude + (112u << 23);
  const uint32_t infinite = magnitude + (224u << 23);
  const float subnormal =
      bit_cast<float>(magnitude + (113u << 23)) - bit_cast<float>(uint32_t(113u << 23));
  const uint32_t finite = select(magnitude < (1u << 23), bit_cast<uint32_t>(subnormal), normal);
  return bit_cast<float>(sign | select(magnitude >= (31u << 23), infinite, finite));
#endif
}

HOST_DEVICE float load(BFloat16 value) { return bit_cast<float>(uint32_t(value.pattern) << 16); }

// Converts to the storage format, rounding to nearest, ties to even.
template <class T, class Value>
HOST_DEVICE T store(Value value) {
  static_assert(std::is_same_v<Value, T> || std::is_same_v<Value, opmath_t<T>>);
  if constexpr (std::is_same_v<Value, T>) {
    return value;
  } else if constexpr (std::is_same_v<T, Half>) {
#ifdef INPLACE_OPS_HARDWARE
    return Half{hardware::to_half(value)};
#else
    const uint32_t pattern = bit_cast<uint32_t>(value);
    const uint32_t magnitude = pattern & 0x7fffffffu;
    const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - (126u << 23);
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t quiet_nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    const uint32_t special = select(magnitude > (255u << 23), quiet_nan, 0x7c00u);
    const uint32_t finite = select(magnitude < (113u << 23), subnormal, normal);
    const uint32_t rounded = select(magnitude >= (143u << 23), special, finite);
    return Half{uint16_t(rounded | ((pattern >> 16) & 0x8000u))};
#endif
  } else if constexpr (std::is_same_v<T, BFloat16>) {
#ifdef INPLACE_OPS_HARDWARE
    return BFloat16{hardware::to_bfloat16(value)};
#else
    const uint32_t pattern = bit_cast<uint32_t>(value);
    const uint32_t rounded = pattern + 0x7fffu + ((pattern >> 16) & 1u);
    const uint32_t quiet_nan = pattern | (1u << 22);
    return BFloat16{uint16_t(select(value != value, quiet_nan, rounded) >> 16)};
#endif
  }
}

// The type for arithmetic that only compares with 0 and selects. On a CPU it is the storage format,
// since vectors have room for twice as many 16-bit elements. On a GPU it is the type of the values,
// which takes fewer instructions. Unlike in PyTorch, 16-bit subnormals therefore compare by their
// value under torch.set_flush_denormal, too.
#ifdef INPLACE_OPS_HARDWARE
template <class T>
using comparison_t = opmath_t<T>;
#else
template <class T>
using comparison_t = T;
#endif

template <class T>
HOST_DEVICE bool less_than_zero(T x) {
  if constexpr (sizeof(T) == 2)
    return uint16_t(x.pattern - 0x8001u) < T::kInfinity;
  else
    return x < T(0);
}

template <class T>
HOST_DEVICE bool greater_than_zero(T x) {
  if constexpr (sizeof(T) == 2)
    return uint16_t(x.pattern - 1u) < T::kInfinity;
  else
    return x > T(0);
}

template <class T>
HOST_DEVICE bool at_most_zero(T x) {
  if constexpr (sizeof(T) == 2)
    return less_than_zero(x) || (x.pattern & 0x7fffu) == 0;
  else
    return x <= T(0);
}

// An element of a tensor: as it is stored, and its value in the type that it is computed in.
template <class T>
struct Element {
  T stored;
  opmath_t<T> value;

  template <class C>
  HOST_DEVICE C as() const {
    if constexpr (std::is_same_v<C, T>)
      return stored;
    else
      return value;
  }
};

template <class T>
HOST_DEVICE Element<T> element_of(T stored) {
  return {stored, load(stored)};
}

// Returns the element that results from storing a value. A GPU rounds to bfloat16 without leaving
// float, which takes fewer instructions.
template <class T>
HOST_DEVICE Element<T> rounded_element(opmath_t<T> value) {
#ifdef INPLACE_OPS_HARDWARE
  if constexpr (std::is_same_v<T, BFloat16>) {
    const float near = hardware::round_to_bfloat16(value);
    return {BFloat16{uint16_t(bit_cast<uint32_t>(near) >> 16)}, near};
  }
#endif
  return element_of(store<T>(value));
}

// Returns the patterns of both numbers in the storage format, `low` in the lower half.
template <class T>
HOST_DEVICE uint32_t store_pair(float low, float high) {
#ifdef INPLACE_OPS_HARDWARE
  if constexpr (std::is_same_v<T, Half>)
    return hardware::to_halves(low, high);
  else
    return hardware::to_bfloat16s(low, high);
#else
  return store<T>(low).pattern | uint32_t(store<T>(high).pattern) << 16;
#endif
}

// The functions below convert all elements of an array. A GPU converts two neighboring 16-bit
// elements in fewer instructions than one at a time.

// Loads elements of the format In, and casts them to T.
template <class T, class In, int count>
HOST_DEVICE void load_all(const In (&stored)[count], Element<T> (&elements)[count]) {
  opmath_t<In> values[count];
  if constexpr (std::is_same_v<In, BFloat16> && count % 2 == 0) {
    UNROLL
    for (int i = 0; i < count; i += 2) {
      uint32_t pair;
      memcpy(&pair, &stored[i], sizeof(pair));
      values[i] = bit_cast<float>(pair << 16);
      values[i + 1] = bit_cast<float>(pair & 0xffff0000u);
    }
  } else {
    UNROLL
    for (int i = 0; i < count; ++i) values[i] = load(stored[i]);
  }
  UNROLL
  for (int i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<T, In>)
      elements[i] = {stored[i], values[i]};
    else
      elements[i] = {values[i], values[i]};
  }
}

template <class T, int count, class Value>
HOST_DEVICE void store_all(const Value (&values)[count], T (&stored)[count]) {
  if constexpr (sizeof(T) == 2 && std::is_same_v<Value, float> && count % 2 == 0) {
    UNROLL
    for (int i = 0; i < count; i += 2) {
      const uint32_t pair = store_pair<T>(values[i], values[i + 1]);
      memcpy(&stored[i], &pair, sizeof(pair));
    }
  } else {
    UNROLL
    for (int i = 0; i < count; ++i) stored[i] = store<T>(values[i]);
  }
}

// Returns the elements that result from storing the values. Rounding to bfloat16 within float takes
// fewer instructions than a pair.
template <class T, int count>
HOST_DEVICE void rounded_elements(const opmath_t<T> (&values)[count],
                                  Element<T> (&elements)[count]) {
  if constexpr (std::is_same_v<T, Half>) {
    T stored[count];
    store_all(values, stored);
    load_all(stored, elements);
  } else {
    UNROLL
    for (int i = 0; i < count; ++i) elements[i] = rounded_element<T>(values[i]);
  }
}

}  // namespace inplace_ops
