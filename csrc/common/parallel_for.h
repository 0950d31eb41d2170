// Threads come from the caller: csrc starts none of its own, so that a process has one pool and one
// thread count.
//
// A ParallelFor splits [0, count) into contiguous ranges of at least `grain` items (the last may be
// shorter), runs the body on each, and returns when all are done. Kernels give results that do not
// depend on the split.
#pragma once

#include <cstdint>
#include <type_traits>

namespace tandem {

using RangeBody = void (*)(void* context, int64_t begin, int64_t end);

struct ParallelFor {
  void (*run)(void* pool, int64_t count, int64_t grain, RangeBody body, void* context) = nullptr;
  void* pool = nullptr;  // handed back to `run` untouched
};

// The body of SerialFor; a function with a name, as nvcc does not take a lambda there.
inline void RunInOneRange(void*, int64_t count, int64_t, RangeBody body, void* context) {
  if (count > 0) body(context, 0, count);
}

// Runs everything on the calling thread.
inline ParallelFor SerialFor() { return {&RunInOneRange, nullptr}; }

// Adapts any callable `body(begin, end)` to the C-style pair above.
template <typename Body>
void RunParallel(const ParallelFor& parallel, int64_t count, int64_t grain, Body&& body) {
  using Callable = std::remove_reference_t<Body>;
  parallel.run(
      parallel.pool, count, grain,
      [](void* context, int64_t begin, int64_t end) {
        (*static_cast<Callable*>(context))(begin, end);
      },
      &body);
}

}  // namespace tandem
