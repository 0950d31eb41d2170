// Where an operator's tensors are decides which kernels run: those linked into this library, or
// those of the CUDA library, which is opened when the first CUDA tensor arrives. Neither CUDA nor
// its headers are needed to build or to load this one.
//
//   const Backend backend = BackendOf(logits);
//   Tensor memory = NewWorkspace(logits, backend.kernels.logits_stats_workspace_bytes(n, v));
//   RaiseUnlessOk(backend.kernels.logits_stats(rows, stats, WorkspaceOf(memory),
//   backend.execution));
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "csrc/common/execution.h"
#include "csrc/cuda/tables.h"
#include "csrc/loss/loss_kernels.h"

namespace tandem {

// While it lives, the tensor's device is the current one.
struct Backend {
  const LossKernels& kernels;
  Execution execution;  // torch's thread pool, or torch's current stream of that device
  const CudaTables* cuda = nullptr;  // null on the CPU
  std::unique_ptr<torch::stable::accelerator::DeviceGuard> device_guard;
};

// Raises where the device is neither the CPU nor CUDA, and, naming the places and the remedy, where
// the CUDA library is missing.
Backend BackendOf(const torch::stable::Tensor& tensor);

// Uninitialised bytes on the device of `like`, aligned to 256.
torch::stable::Tensor NewWorkspace(const torch::stable::Tensor& like, int64_t bytes);
Workspace WorkspaceOf(const torch::stable::Tensor& workspace);

// Opens the CUDA library without a CUDA tensor: its path, or "" and why it cannot be used.
struct CudaLibrary {
  const CudaTables* tables = nullptr;
  std::string path;
  std::string failure;
};
const CudaLibrary& OpenCudaLibrary();

}  // namespace tandem
