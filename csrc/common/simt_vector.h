// Sixteen bytes of a row at a time, for kernel files: the widest load that every supported device
// has, and what it takes to compute on it in float32. Comes with csrc/common/simt.h.
//
//   const simt::Vector<T> packed = simt::LoadVector(row + offset);  // 16-byte aligned
//   float x[simt::Vector<T>::kLanes];
//   simt::Unpack(packed, x);
//   simt::StoreVector(simt::Pack<T>(x), out + offset);
#pragma once

#include <cstdint>
#include <type_traits>

#include "csrc/common/scalar_types.h"
#include "csrc/common/simt_qualifiers.h"

namespace simt {

inline constexpr int kVectorBytes = 16;

template <typename T>
struct alignas(kVectorBytes) Vector {
  static constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));
  T lanes[kLanes];
};

// What the lanes of a float32 vector become in 16 bits: 8 bytes.
template <typename T>
struct alignas(kVectorBytes / 2) HalfVector {
  static constexpr int kLanes = kVectorBytes / 2 / static_cast<int>(sizeof(T));
  T lanes[kLanes];
};

// True where a vector may be loaded from or stored to.
SIMT_HD inline bool IsVectorAligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
}

// Through uint4, because compilers split a copy of a struct of small members into its members.
template <typename T>
SIMT_DEVICE Vector<T> LoadVector(const T* pointer) {
#ifdef __CUDA_ARCH__
  return tandem::BitCast<Vector<T>>(*reinterpret_cast<const uint4*>(pointer));
#else
  return *reinterpret_cast<const Vector<T>*>(pointer);
#endif
}

template <typename T>
SIMT_DEVICE void StoreVector(const Vector<T>& vector, T* pointer) {
#ifdef __CUDA_ARCH__
  *reinterpret_cast<uint4*>(pointer) = tandem::BitCast<uint4>(vector);
#else
  *reinterpret_cast<Vector<T>*>(pointer) = vector;
#endif
}

template <typename T>
SIMT_DEVICE void StoreVector(const HalfVector<T>& vector, T* pointer) {
#ifdef __CUDA_ARCH__
  *reinterpret_cast<uint2*>(pointer) = tandem::BitCast<uint2>(vector);
#else
  *reinterpret_cast<HalfVector<T>*>(pointer) = vector;
#endif
}

// ToFloat with the device's own instruction where that gives the same value.
template <typename T>
SIMT_DEVICE float Widen(T value) {
  return tandem::ToFloat(value);
}
#ifdef __CUDA_ARCH__
SIMT_DEVICE float Widen(tandem::Float16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}
#endif

// StoreFloat likewise: round to nearest even; NaNs stay NaNs (of another payload perhaps).
template <typename T>
SIMT_DEVICE T Narrow(float value) {
  T result;
  tandem::StoreFloat(value, &result);
  return result;
}
#ifdef __CUDA_ARCH__
template <>
SIMT_DEVICE tandem::BFloat16 Narrow<tandem::BFloat16>(float value) {
  tandem::BFloat16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}
template <>
SIMT_DEVICE tandem::Float16 Narrow<tandem::Float16>(float value) {
  tandem::Float16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}
#endif

// The larger of both; NaN where x is NaN (fmaxf would give `bound`).
SIMT_DEVICE float MaxOrNaN(float x, float bound) {
#ifdef __CUDA_ARCH__
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(bound));
  return result;
#else
  return x < bound ? bound : x;
#endif
}

template <typename T>
SIMT_DEVICE void Unpack(const Vector<T>& vector, float* lanes) {
  SIMT_UNROLL
  for (int i = 0; i < Vector<T>::kLanes; ++i) lanes[i] = Widen(vector.lanes[i]);
}

// Into a Vector or a HalfVector.
template <typename Packed>
SIMT_DEVICE Packed PackInto(const float* lanes) {
  Packed vector;
  SIMT_UNROLL
  for (int i = 0; i < Packed::kLanes; ++i) {
    vector.lanes[i] = Narrow<std::remove_reference_t<decltype(vector.lanes[0])>>(lanes[i]);
  }
  return vector;
}

template <typename T>
SIMT_DEVICE Vector<T> Pack(const float* lanes) {
  return PackInto<Vector<T>>(lanes);
}

}  // namespace simt
