// Turns a failed CUDA runtime call into a Status that names the call and its place. For .cu files
// only.
//
//   TANDEM_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(...));
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "csrc/common/status.h"

namespace tandem {

inline Status CudaError(cudaError_t error, const char* call, const char* file, int line) {
  return Status(StatusCode::kDeviceError, std::string(file) + ":" + std::to_string(line) + ": " +
                                              call + ": " + cudaGetErrorName(error) + ": " +
                                              cudaGetErrorString(error));
}

}  // namespace tandem

#define TANDEM_RETURN_IF_CUDA_ERROR(call)                                  \
  do {                                                                     \
    const cudaError_t tandem_error = (call);                               \
    if (tandem_error != cudaSuccess) {                                     \
      return ::tandem::CudaError(tandem_error, #call, __FILE__, __LINE__); \
    }                                                                      \
  } while (false)
