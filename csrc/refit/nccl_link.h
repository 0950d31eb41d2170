// The link between GPUs: one ncclBroadcast per bucket from the sender to all readers, over libnccl
// opened at run time. Slots are device memory; copies, digests and broadcasts are ordered by events
// on streams, without waiting on the host. A watcher asks for asynchronous errors while the host
// waits, and aborts the communicator when a deadline passes or a peer gives up.
#pragma once

#include <memory>
#include <string>

#include "csrc/refit/link.h"

namespace tandem {

// How the group says hello after it is made: ours, or as vLLM's own engines expect it.
enum class NcclDialect : int32_t { kBroadcast, kAllReduce };

struct NcclOptions {
  std::string library;         // path of libnccl.so.2 (or of a library with its symbols)
  std::string device_library;  // path of the library with TandemDeviceOps(): libtandem_cuda.so, or
                               // the tests' host one
  std::string unique_id;       // 128 bytes, made by MakeNcclUniqueId on rank 0
  NcclDialect dialect = NcclDialect::kBroadcast;
  int device = 0;
};

Status MakeNcclUniqueId(const std::string& library, std::string* unique_id);
// The sender is rank 0 of a communicator of 1 + num_readers ranks, reader r is rank 1 + r.
Status CreateNcclSendLink(const NcclOptions& options, const LinkGeometry& geometry,
                          std::unique_ptr<SendLink>* link);
Status CreateNcclReceiveLink(const NcclOptions& options, const LinkGeometry& geometry,
                             int32_t reader, std::unique_ptr<ReceiveLink>* link);

}  // namespace tandem
