// CUDA's names that need no emulation: vector types, bit and mathematical functions, qualifiers.
#pragma once

#include <math.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))

using std::max;
using std::min;

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x = 1, y = 1, z = 1;

  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

#define SIMT_VECTOR_TYPES(scalar, name)                                                        \
  struct alignas(2 * sizeof(scalar)) name##2 { scalar x, y; };                                 \
  struct alignas(sizeof(scalar) > 4 ? 16 : 4 * sizeof(scalar)) name##4 { scalar x, y, z, w; }; \
  inline name##2 make_##name##2(scalar x, scalar y) { return {x, y}; }                         \
  inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }

SIMT_VECTOR_TYPES(float, float)
SIMT_VECTOR_TYPES(double, double)
SIMT_VECTOR_TYPES(int, int)
SIMT_VECTOR_TYPES(unsigned, uint)
SIMT_VECTOR_TYPES(unsigned short, ushort)
SIMT_VECTOR_TYPES(unsigned char, uchar)
SIMT_VECTOR_TYPES(long long, longlong)
SIMT_VECTOR_TYPES(unsigned long long, ulonglong)
#undef SIMT_VECTOR_TYPES

inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline int32_t __float_as_int(float x) { return std::bit_cast<int32_t>(x); }
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int32_t x) { return std::bit_cast<float>(x); }

inline int __popc(uint32_t x) { return std::popcount(x); }
inline int __popcll(uint64_t x) { return std::popcount(x); }
inline int __clz(uint32_t x) { return std::countl_zero(x); }
inline int __clzll(uint64_t x) { return std::countl_zero(x); }
inline int __ffs(uint32_t x) { return x == 0 ? 0 : std::countr_zero(x) + 1; }
inline int __ffsll(uint64_t x) { return x == 0 ? 0 : std::countr_zero(x) + 1; }

template <typename T>
T __ldg(const T* address) {
  return *address;
}
