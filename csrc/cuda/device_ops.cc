// The table of a CUDA device (csrc/refit/device_ops.h).
#include "csrc/refit/device_ops.h"

#include <cuda_runtime_api.h>

#include "csrc/common/cuda_check.h"

namespace tandem {
namespace {

cudaEvent_t EventOf(Event event) { return static_cast<cudaEvent_t>(event); }
cudaStream_t StreamOf(Stream stream) { return static_cast<cudaStream_t>(stream); }

Status UseDevice(int device) {
  TANDEM_RETURN_IF_CUDA_ERROR(cudaSetDevice(device));
  return OkStatus();
}

Status CreateStream(bool is_ordered_with_default, Stream* stream) {
  cudaStream_t made = nullptr;
  const unsigned flags = is_ordered_with_default ? cudaStreamDefault : cudaStreamNonBlocking;
  // Weights wait for nobody's activations: the highest priority that there is.
  int lowest = 0;
  int highest = 0;
  TANDEM_RETURN_IF_CUDA_ERROR(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  TANDEM_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithPriority(&made, flags, highest));
  *stream = made;
  return OkStatus();
}

void DestroyStream(Stream stream) {
  (void)cudaStreamSynchronize(StreamOf(stream));
  (void)cudaStreamDestroy(StreamOf(stream));
}

Status CreateEvent(Event* event) {
  cudaEvent_t made = nullptr;
  TANDEM_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
  *event = made;
  return OkStatus();
}

void DestroyEvent(Event event) { (void)cudaEventDestroy(EventOf(event)); }

Status Record(Event event, Stream stream) {
  TANDEM_RETURN_IF_CUDA_ERROR(cudaEventRecord(EventOf(event), StreamOf(stream)));
  return OkStatus();
}

Status StreamWait(Stream stream, Event event) {
  TANDEM_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(StreamOf(stream), EventOf(event), 0));
  return OkStatus();
}

Status IsDone(Event event, bool* done) {
  const cudaError_t error = cudaEventQuery(EventOf(event));
  *done = error == cudaSuccess;
  if (error == cudaSuccess || error == cudaErrorNotReady) return OkStatus();
  return CudaError(error, "cudaEventQuery", __FILE__, __LINE__);
}

Status Allocate(int64_t bytes, void** memory) {
  TANDEM_RETURN_IF_CUDA_ERROR(cudaMalloc(memory, static_cast<size_t>(bytes)));
  return OkStatus();
}

void Release(void* memory) { (void)cudaFree(memory); }

Status AllocatePinned(int64_t bytes, void** memory) {
  TANDEM_RETURN_IF_CUDA_ERROR(
      cudaHostAlloc(memory, static_cast<size_t>(bytes), cudaHostAllocDefault));
  return OkStatus();
}

void ReleasePinned(void* memory) { (void)cudaFreeHost(memory); }

Status Copy(void* target, const void* source, int64_t bytes, Stream stream) {
  TANDEM_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(target, source, static_cast<size_t>(bytes),
                                              cudaMemcpyDefault, StreamOf(stream)));
  return OkStatus();
}

}  // namespace
}  // namespace tandem

extern "C" __attribute__((visibility("default"))) const tandem::DeviceOps* TandemDeviceOps() {
  using namespace tandem;  // NOLINT: a table of this file's functions
  static const DeviceOps ops = {
      .size_bytes = sizeof(DeviceOps),
      .name = "cuda",
      .use_device = &UseDevice,
      .create_stream = &CreateStream,
      .destroy_stream = &DestroyStream,
      .create_event = &CreateEvent,
      .destroy_event = &DestroyEvent,
      .record = &Record,
      .stream_wait = &StreamWait,
      .is_done = &IsDone,
      .allocate = &Allocate,
      .release = &Release,
      .allocate_pinned = &AllocatePinned,
      .release_pinned = &ReleasePinned,
      .copy = &Copy,
      .bucket_copy = &cuda::BucketCopy,
      .digest = &cuda::Digest,
  };
  return &ops;
}
