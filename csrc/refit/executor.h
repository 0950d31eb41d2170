// The work on slots and tensors, in the memory of a link: at once on a host, on a stream on a
// device. The pipeline is written against it once. Calls are carried out in order.
#pragma once

#include <cstdint>

#include "csrc/common/status.h"
#include "csrc/refit/deadline.h"
#include "csrc/refit/digest.h"
#include "csrc/refit/pack.h"

namespace tandem {

class Executor {
 public:
  virtual ~Executor() = default;
  // Whether calls are done when they return; if not, results are there after Wait.
  virtual bool is_immediate() const = 0;
  // `items` is in host memory and may be reused on return; numel of bytes-only copies: see RawCopy.
  virtual Status Copy(const CopyItem* items, int64_t num_items) = 0;
  // Bits without a dtype, `bytes` each; for the dtypes that CopyItem does not know.
  virtual Status RawCopy(void* target, const void* source, int64_t bytes) = 0;
  // `items` in host memory, `digests` [num_items] in the executor's memory.
  virtual Status Digest(const DigestItem* items, int64_t num_items, uint64_t* digests) = 0;
  // Host to executor's memory and back. What ToHost writes is there after Wait.
  virtual Status FromHost(void* target, const void* source, int64_t bytes) = 0;
  virtual Status ToHost(void* target, const void* source, int64_t bytes) = 0;
  // Executor memory that lives as long as the executor; made at the start, never per bucket.
  virtual Status Allocate(int64_t bytes, void** memory) = 0;
  virtual Status Wait(const Deadline& deadline) = 0;
};

// The calling thread, on host memory.
Executor* HostExecutor();

}  // namespace tandem
