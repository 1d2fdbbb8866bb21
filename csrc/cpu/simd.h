// Conversions between half and float, and packing of bits into bit planes, by instructions that the
// compiler does not generate from loops. Every instruction set has the same functions, each for a
// block of elements.
#pragma once

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "../bit_planes.h"
#include "../dtypes.h"

namespace inplace_ops {

struct Portable {
  static constexpr int kRegister = 16;  // bytes

  HOST_DEVICE static void half_to_float(float* to, const Half* from, int count) {
    for (int i = 0; i < count; ++i) to[i] = load(from[i]);
  }

  HOST_DEVICE static void float_to_half(Half* to, const float* from, int count) {
    for (int i = 0; i < count; ++i) to[i] = store<Half>(from[i]);
  }

  // Packs bit `bit` of each byte into a bit plane, which has a byte for each group.
  HOST_DEVICE static void pack(uint8_t* plane, const uint8_t* bytes, int bit, int groups) {
    for (int g = 0; g < groups; ++g) {
      uint64_t row;
      memcpy(&row, bytes + g * kGroup, sizeof(row));
      row = (row >> bit) & 0x0101010101010101ull;
      plane[g] = uint8_t((row * 0x0102040810204080ull) >> 56);  // bit 0 of byte i to bit 56 + i
    }
  }

  // Unpacks a bit plane to bit `bit` of each byte, where it must be 0 before.
  HOST_DEVICE static void unpack(uint8_t* bytes, const uint8_t* plane, int bit, int groups) {
    for (int g = 0; g < groups; ++g) {
      uint64_t row;
      memcpy(&row, bytes + g * kGroup, sizeof(row));
      const uint64_t spread = (plane[g] * 0x0101010101010101ull) & 0x8040201008040201ull;
      row |= (((spread + 0x7f7f7f7f7f7f7f7full) >> 7) & 0x0101010101010101ull) << bit;
      memcpy(bytes + g * kGroup, &row, sizeof(row));
    }
  }
};

#ifdef __x86_64__
struct Avx2 {
  static constexpr int kRegister = 32;

#define INPLACE_OPS_AVX2 __attribute__((target("avx2,f16c")))
  INPLACE_OPS_AVX2 static void half_to_float(float* to, const Half* from, int count) {
    int i = 0;
#pragma GCC unroll 4
    for (; i + 8 <= count; i += 8)
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
    Portable::half_to_float(to + i, from + i, count - i);
  }

  INPLACE_OPS_AVX2 static void float_to_half(Half* to, const float* from, int count) {
    int i = 0;
#pragma GCC unroll 4
    for (; i + 8 <= count; i += 8) {
      const __m256 eight = _mm256_loadu_ps(from + i);
      _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(eight, _MM_FROUND_TO_NEAREST_INT));
    }
    Portable::float_to_half(to + i, from + i, count - i);
  }

  INPLACE_OPS_AVX2 static void pack(uint8_t* plane, const uint8_t* bytes, int bit, int groups) {
    const __m128i shift_to_top = _mm_cvtsi32_si128(7 - bit);
    int g = 0;
    for (; g + 4 <= groups; g += 4) {
      const __m256i four = _mm256_loadu_si256((const __m256i*)(bytes + g * kGroup));
      const int packed = _mm256_movemask_epi8(_mm256_sll_epi64(four, shift_to_top));
      memcpy(plane + g, &packed, sizeof(packed));
    }
    Portable::pack(plane + g, bytes + g * kGroup, bit, groups - g);
  }

  INPLACE_OPS_AVX2 static void unpack(uint8_t* bytes, const uint8_t* plane, int bit, int groups) {
    const __m256i byte_index =
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit_mask = _mm256_set1_epi64x(int64_t(0x8040201008040201));
    const __m256i value = _mm256_set1_epi8(char(1 << bit));
    int g = 0;
    for (; g + 4 <= groups; g += 4) {
      int packed;
      memcpy(&packed, plane + g, sizeof(packed));
      const __m256i copies = _mm256_shuffle_epi8(_mm256_set1_epi32(packed), byte_index);
      const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(copies, bit_mask), bit_mask);
      auto* const four = (__m256i*)(bytes + g * kGroup);
      const __m256i previous = _mm256_loadu_si256(four);
      _mm256_storeu_si256(four, _mm256_or_si256(previous, _mm256_and_si256(is_set, value)));
    }
    Portable::unpack(bytes + g * kGroup, plane + g, bit, groups - g);
  }
#undef INPLACE_OPS_AVX2
};

struct Avx512 : Avx2 {
  static constexpr int kRegister = 64;

#define INPLACE_OPS_AVX512 __attribute__((target("avx512f")))
  // g++ 12 warns without reason about the intrinsics that take no mask.
  static constexpr __mmask16 kAllLanes = 0xffff;

  INPLACE_OPS_AVX512 static void half_to_float(float* to, const Half* from, int count) {
    int i = 0;
#pragma GCC unroll 4
    for (; i + 16 <= count; i += 16)
      _mm512_storeu_ps(
          to + i, _mm512_maskz_cvtph_ps(kAllLanes, _mm256_loadu_si256((const __m256i*)(from + i))));
    Portable::half_to_float(to + i, from + i, count - i);
  }

  INPLACE_OPS_AVX512 static void float_to_half(Half* to, const float* from, int count) {
    int i = 0;
#pragma GCC unroll 4
    for (; i + 16 <= count; i += 16) {
      const __m512 sixteen = _mm512_loadu_ps(from + i);
      _mm256_storeu_si256((__m256i*)(to + i),
                          _mm512_maskz_cvtps_ph(kAllLanes, sixteen, _MM_FROUND_TO_NEAREST_INT));
    }
    Portable::float_to_half(to + i, from + i, count - i);
  }
#undef INPLACE_OPS_AVX512
};
#endif

}  // namespace inplace_ops
