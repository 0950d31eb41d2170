#include "csrc/refit/nccl_api.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>

namespace tandem::nccl {
namespace {

Status Unavailable(const std::string& path, const std::string& why) {
  return Status(StatusCode::kUnavailable, "NCCL library " + path + ": " + why);
}

// Fills members one after the other; remembers the first required symbol that is missing.
class Symbols {
 public:
  explicit Symbols(void* library) : library_(library) {}

  template <typename Function>
  void Take(const char* name, Function* function) {
    TakeIfThere(name, function);
    if (*function == nullptr && missing_.empty()) missing_ = name;
  }
  template <typename Function>
  void TakeIfThere(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library_, name));
  }
  const std::string& missing() const { return missing_; }

 private:
  void* library_;
  std::string missing_;
};

Status Fill(const std::string& path, void* library, Api* api) {
  Symbols symbols(library);
  symbols.Take("ncclGetVersion", &api->get_version);
  symbols.Take("ncclGetUniqueId", &api->get_unique_id);
  symbols.Take("ncclCommInitRankConfig", &api->comm_init_rank_config);
  symbols.Take("ncclCommFinalize", &api->comm_finalize);
  symbols.Take("ncclCommDestroy", &api->comm_destroy);
  symbols.Take("ncclCommAbort", &api->comm_abort);
  symbols.Take("ncclCommGetAsyncError", &api->comm_get_async_error);
  symbols.Take("ncclGetErrorString", &api->get_error_string);
  symbols.Take("ncclGetLastError", &api->get_last_error);
  symbols.Take("ncclBroadcast", &api->broadcast);
  symbols.Take("ncclAllReduce", &api->all_reduce);
  symbols.TakeIfThere("ncclMemAlloc", &api->mem_alloc);
  symbols.TakeIfThere("ncclMemFree", &api->mem_free);
  symbols.TakeIfThere("ncclCommRegister", &api->comm_register);
  symbols.TakeIfThere("ncclCommDeregister", &api->comm_deregister);
  if (!symbols.missing().empty()) return Unavailable(path, "it has no " + symbols.missing());
  int version = 0;
  const Result result = api->get_version(&version);
  if (result != kSuccess) {
    return Unavailable(path, std::string("ncclGetVersion: ") + api->get_error_string(result));
  }
  if (version < kOldestVersion) {
    return Unavailable(path, "version " + std::to_string(version) + " is older than " +
                                 std::to_string(kOldestVersion) + ", the oldest that will do");
  }
  return OkStatus();
}

}  // namespace

Status LoadApi(const std::string& path, const Api** api) {
  static std::mutex mutex;
  // Never destroyed: communicators may outlive static objects.
  static auto* opened = new std::map<std::string, std::unique_ptr<Api>>;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Api>& slot = (*opened)[path];
  if (slot == nullptr) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* error = dlerror();
      return Unavailable(path, error == nullptr ? "it cannot be opened" : error);
    }
    auto filled = std::make_unique<Api>();
    if (Status status = Fill(path, library, filled.get()); !status.ok()) {
      dlclose(library);
      return status;
    }
    slot = std::move(filled);
  }
  *api = slot.get();
  return OkStatus();
}

}  // namespace tandem::nccl
