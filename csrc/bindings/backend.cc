#include "csrc/bindings/backend.h"

#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <vector>

#include "csrc/bindings/checks.h"
#include "csrc/common/parallel_for.h"

namespace tandem {
namespace {

constexpr char kCudaLibrary[] = "libtandem_cuda.so";
constexpr int64_t kAlignment = 256;

const LossKernels kCpuKernels = TANDEM_LOSS_KERNELS(cpu);

ParallelFor TorchParallelFor() {
  return {[](void*, int64_t count, int64_t grain, RangeBody body, void* context) {
            torch::stable::parallel_for(
                0, count, grain, [&](int64_t begin, int64_t end) { body(context, begin, end); });
          },
          nullptr};
}

// Next to this library (a wheel), in the build tree, where the user says.
std::vector<std::string> CudaLibraryCandidates() {
  std::vector<std::filesystem::path> folders;
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&CudaLibraryCandidates), &info) != 0 &&
      info.dli_fname != nullptr) {
    const std::filesystem::path here = std::filesystem::path(info.dli_fname).parent_path();
    folders = {here, here.parent_path() / "cuda"};
  }
  const char* chosen = std::getenv("RL_NATIVE_DIR");
  if (chosen != nullptr && *chosen != '\0') folders.push_back(chosen);
  std::vector<std::string> candidates;
  for (const std::filesystem::path& folder : folders) {
    const std::string path = (folder / kCudaLibrary).string();
    if (std::find(candidates.begin(), candidates.end(), path) == candidates.end()) {
      candidates.push_back(path);
    }
  }
  return candidates;
}

std::string MissingMessage(const std::vector<std::string>& candidates) {
  std::string message = std::string("the CUDA kernels ") + kCudaLibrary + " are in none of: ";
  for (size_t i = 0; i < candidates.size(); ++i) {
    message += (i == 0 ? "" : ", ") + candidates[i];
  }
  return message +
         ". Build them with `bazel build --config=cuda //csrc/cuda:tandem_cuda` (it needs nvcc), "
         "set RL_NATIVE_DIR to their folder, or choose policy.logprob_impl=torch";
}

CudaLibrary OpenAt(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* error = dlerror();
    return {nullptr, path,
            "the CUDA kernels do not load: " + std::string(error == nullptr ? path : error)};
  }
  const auto tables_of =
      reinterpret_cast<decltype(&TandemCudaTables)>(dlsym(handle, "TandemCudaTables"));
  const CudaTables* tables = tables_of == nullptr ? nullptr : tables_of();
  if (tables == nullptr || tables->size_bytes != static_cast<int64_t>(sizeof(CudaTables))) {
    return {nullptr, path,
            "the CUDA kernels " + path + " are of another build than the operators; build both"};
  }
  return {tables, path, ""};
}

CudaLibrary FindCudaLibrary() {
  const std::vector<std::string> candidates = CudaLibraryCandidates();
  for (const std::string& path : candidates) {
    std::error_code ignored;
    if (std::filesystem::exists(path, ignored)) return OpenAt(path);
  }
  return {nullptr, "", MissingMessage(candidates)};
}

// torch's CUDA half exports it; a torch without CUDA has no CUDA tensors either. The library is
// asked by name because torch loads it for itself alone.
void* CurrentCudaStream(int32_t device) {
  using Function = AOTITorchError (*)(int32_t, void**);
  static const Function get = [] {
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* scope = torch_cuda == nullptr ? RTLD_DEFAULT : torch_cuda;
    return reinterpret_cast<Function>(dlsym(scope, "aoti_torch_get_current_cuda_stream"));
  }();
  Check(get != nullptr, "this torch does not say which CUDA stream is current");
  void* stream = nullptr;
  Check(get(device, &stream) == 0, "torch gives no current stream of CUDA device ", device);
  return stream;
}

}  // namespace

const CudaLibrary& OpenCudaLibrary() {
  static const CudaLibrary library = FindCudaLibrary();
  return library;
}

Backend BackendOf(const Tensor& tensor) {
  if (tensor.is_cpu()) return {kCpuKernels, {TorchParallelFor(), nullptr}, nullptr, nullptr};
  Check(tensor.is_cuda(), "native operators run on the CPU and on CUDA devices only");
  const CudaLibrary& library = OpenCudaLibrary();
  Check(library.tables != nullptr, library.failure);
  const int32_t device = tensor.get_device_index();
  auto guard = std::make_unique<torch::stable::accelerator::DeviceGuard>(device);
  return {library.tables->loss,
          {SerialFor(), CurrentCudaStream(device)},
          library.tables,
          std::move(guard)};
}

Tensor NewWorkspace(const Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, {bytes + kAlignment}, ScalarType::Byte);
}

Workspace WorkspaceOf(const Tensor& workspace) {
  const auto address = reinterpret_cast<uintptr_t>(workspace.mutable_data_ptr());
  const auto padding = static_cast<int64_t>((kAlignment - address % kAlignment) % kAlignment);
  return {reinterpret_cast<void*>(address + padding), workspace.size(0) - kAlignment};
}

}  // namespace tandem
