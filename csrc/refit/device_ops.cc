#include "csrc/refit/device_ops.h"

#include <dlfcn.h>

namespace tandem {

Status LoadDeviceOps(const std::string& path, const DeviceOps** ops) {
  *ops = nullptr;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* error = dlerror();
    return Status(StatusCode::kUnavailable, "device library " + path + ": " +
                                                (error == nullptr ? "cannot be opened" : error));
  }
  const auto table =
      reinterpret_cast<decltype(&TandemDeviceOps)>(dlsym(library, "TandemDeviceOps"));
  if (table == nullptr) {
    dlclose(library);
    return Status(StatusCode::kUnavailable,
                  "device library " + path + ": it has no TandemDeviceOps; give libtandem_cuda.so");
  }
  const DeviceOps* found = table();
  if (found->size_bytes != static_cast<int64_t>(sizeof(DeviceOps))) {
    const std::string sizes = "its table has " + std::to_string(found->size_bytes) +
                              " bytes, this build's " + std::to_string(sizeof(DeviceOps));
    dlclose(library);
    return Status(StatusCode::kUnavailable,
                  "device library " + path + ": " + sizes + "; build both from one commit");
  }
  *ops = found;
  return OkStatus();
}

}  // namespace tandem
