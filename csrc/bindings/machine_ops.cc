// What this library found on the machine, for `tandem doctor`.
#include <torch/csrc/stable/library.h>

#include <string>

#include "csrc/bindings/backend.h"
#include "csrc/common/multiarch.h"

namespace tandem {
namespace {

// The same choice as the loader makes for functions marked TANDEM_MULTIARCH.
std::string CpuIsa() {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  if (__builtin_cpu_supports("x86-64-v4")) return "avx512";
  if (__builtin_cpu_supports("x86-64-v3")) return "avx2";
#endif
  return "base";
}

std::string CudaLibraryFailure() { return OpenCudaLibrary().failure; }

}  // namespace
}  // namespace tandem

STABLE_TORCH_LIBRARY_FRAGMENT(tandem, library) {
  library.def("cpu_isa() -> str");
  library.def("cuda_library_failure() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(tandem, CompositeExplicitAutograd, library) {
  library.impl("cpu_isa", TORCH_BOX(&tandem::CpuIsa));
  library.impl("cuda_library_failure", TORCH_BOX(&tandem::CudaLibraryFailure));
}
