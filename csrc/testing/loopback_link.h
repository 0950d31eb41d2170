// A link inside one process, for tests of the pipeline: slots behind a mutex. It can be told to
// spoil what is posted, and works with executors that finish later than they return.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "csrc/refit/link.h"

namespace tandem {

struct LoopbackOptions {
  LinkGeometry geometry;
  Executor* send_executor = HostExecutor();
  Executor* receive_executor = HostExecutor();
  // Called with what is posted, before any reader sees it: number since Begin, memory, size.
  std::function<void(int64_t post, uint8_t* slot, int64_t* bytes)> spoil;
};

struct LoopbackEnds {
  std::unique_ptr<SendLink> sender;
  std::vector<std::unique_ptr<ReceiveLink>> readers;
};

LoopbackEnds MakeLoopback(LoopbackOptions options);

}  // namespace tandem
