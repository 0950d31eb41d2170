// Run-time choice of instruction set. Mark a hot function TANDEM_MULTIARCH and the loader picks the
// AVX-512, AVX2 or baseline build of it on the machine at hand; helpers that it calls must be
// TANDEM_INLINE to be built along with it.
//
// Off under sanitizers (their runtime is not ready when the loader resolves the choice) and on
// other processors.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define TANDEM_MULTIARCH \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TANDEM_MULTIARCH
#endif

// Functions written in AVX-512 by hand carry TANDEM_AVX512 and run only where HasAvx512() says so.
// Unlike the choice above they stay under sanitizers; TANDEM_WITHOUT_AVX512 leaves them out, for
// tests of what other machines run.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(TANDEM_WITHOUT_AVX512)
#define TANDEM_HAS_AVX512
#define TANDEM_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
namespace tandem {
inline bool HasAvx512() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has;
}
}  // namespace tandem
#endif

#define TANDEM_INLINE inline __attribute__((always_inline))
