// Where a kernel runs: the one argument that both backends share. The CPU backend splits its rows
// by `parallel`; the CUDA backend enqueues on `stream` and returns without waiting for it.
#pragma once

#include "csrc/common/parallel_for.h"
#include "csrc/common/stream.h"

namespace tandem {

struct Execution {
  ParallelFor parallel;
  Stream stream = nullptr;
};

// Memory that a function may overwrite while it runs, in the memory of its backend and aligned to
// 256 bytes. Kernels allocate nothing: each function that wants some has a *WorkspaceBytes query.
struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
};

}  // namespace tandem
