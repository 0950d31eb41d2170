// SIMT_HD marks a function for host and device; plain C++ compilers see nothing of it.
#pragma once

#ifdef __CUDACC__
#define SIMT_HD __host__ __device__
#else
#define SIMT_HD
#endif

namespace tandem {

// std::bit_cast for device code too.
template <typename To, typename From>
SIMT_HD constexpr To BitCast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, value);
}

}  // namespace tandem
