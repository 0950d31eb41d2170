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

#define TANDEM_INLINE inline __attribute__((always_inline))
