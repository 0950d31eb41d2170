// SIMT_HD marks a function for host and device, SIMT_DEVICE one that kernels call, SIMT_UNROLL a
// loop of constant length that must become straight code (its arrays are registers then),
// SIMT_NO_UNROLL one that must stay a loop. Plain C++ compilers see nothing of it.
#pragma once

#ifdef __CUDACC__
#define SIMT_HD __host__ __device__
#define SIMT_DEVICE __device__ __forceinline__
#define SIMT_UNROLL _Pragma("unroll")
#define SIMT_NO_UNROLL _Pragma("unroll 1")
#else
#define SIMT_HD
#define SIMT_DEVICE inline
#define SIMT_UNROLL
#define SIMT_NO_UNROLL
#endif

namespace tandem {

// std::bit_cast for device code too.
template <typename To, typename From>
SIMT_HD constexpr To BitCast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, value);
}

}  // namespace tandem
