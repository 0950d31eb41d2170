#include "csrc/cuda/cublaslt_gemm.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "csrc/common/cuda_check.h"

namespace tandem {
namespace {

Status CublasError(cublasStatus_t error, const char* call) {
  return Status(StatusCode::kDeviceError, std::string(call) + ": " + cublasLtGetStatusName(error) +
                                              ": " + cublasLtGetStatusString(error));
}

#define TANDEM_RETURN_IF_CUBLAS_ERROR(call)                                             \
  do {                                                                                  \
    const cublasStatus_t tandem_error = (call);                                         \
    if (tandem_error != CUBLAS_STATUS_SUCCESS) return CublasError(tandem_error, #call); \
  } while (false)

cudaDataType_t DataType(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return CUDA_R_16BF;
    case DType::kFloat16:
      return CUDA_R_16F;
    case DType::kFloat32:
      break;
  }
  return CUDA_R_32F;
}

// Owns a cuBLASLt descriptor.
template <typename Handle, cublasStatus_t (*destroy)(Handle)>
struct Descriptor {
  Handle handle = nullptr;
  Descriptor() = default;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (handle != nullptr) destroy(handle);
  }
};
using Operation = Descriptor<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Descriptor<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Descriptor<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

// One row has no stride, whatever the view says; cuBLASLt looks at it anyway.
template <typename View>
int64_t LeadingDimension(const View& view) {
  return view.rows <= 1 ? std::max(view.row_stride, view.cols) : view.row_stride;
}

// A product of row-major matrices, seen column by column: c^T = op(b)^T op(a)^T, so cuBLASLt's
// first operand is our b. Built per call: host work of about a microsecond.
struct Problem {
  Operation operation;
  Layout first, second, result;
};

Status Build(const ConstMatrixView& a, bool transpose_a, const ConstMatrixView& b, bool transpose_b,
             const MatrixView& c, Problem* problem) {
  TANDEM_RETURN_IF_CUBLAS_ERROR(
      cublasLtMatmulDescCreate(&problem->operation.handle, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const cublasOperation_t first = transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t second = transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  TANDEM_RETURN_IF_CUBLAS_ERROR(cublasLtMatmulDescSetAttribute(
      problem->operation.handle, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof(first)));
  TANDEM_RETURN_IF_CUBLAS_ERROR(cublasLtMatmulDescSetAttribute(
      problem->operation.handle, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof(second)));
  TANDEM_RETURN_IF_CUBLAS_ERROR(cublasLtMatrixLayoutCreate(
      &problem->first.handle, DataType(b.dtype), b.cols, b.rows, LeadingDimension(b)));
  TANDEM_RETURN_IF_CUBLAS_ERROR(cublasLtMatrixLayoutCreate(
      &problem->second.handle, DataType(a.dtype), a.cols, a.rows, LeadingDimension(a)));
  TANDEM_RETURN_IF_CUBLAS_ERROR(cublasLtMatrixLayoutCreate(
      &problem->result.handle, DataType(c.dtype), c.cols, c.rows, LeadingDimension(c)));
  return OkStatus();
}

// The power of two, up to 256, that a pointer is a multiple of.
uint32_t AlignmentOf(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer) | 256u;
  return static_cast<uint32_t>(address & -address);
}

// Everything that the choice of an algorithm depends on.
using ShapeKey = std::array<int64_t, 14>;

ShapeKey KeyOf(const ConstMatrixView& a, bool transpose_a, const ConstMatrixView& b,
               bool transpose_b, float beta, const MatrixView& c) {
  return {a.rows,
          a.cols,
          a.row_stride,
          transpose_a,
          b.rows,
          b.cols,
          b.row_stride,
          transpose_b,
          c.row_stride,
          static_cast<int64_t>(a.dtype) * 4 + static_cast<int64_t>(c.dtype),
          beta != 0.0f,
          AlignmentOf(a.data),
          AlignmentOf(b.data),
          AlignmentOf(c.data)};
}

// One device's handle, and the algorithms that were chosen on it.
class Device {
 public:
  Status Open() {
    TANDEM_RETURN_IF_CUBLAS_ERROR(cublasLtCreate(&handle_));
    return OkStatus();
  }

  cublasLtHandle_t handle() const { return handle_; }

  Status Choose(const Problem& problem, const ShapeKey& key, cublasLtMatmulAlgo_t* algorithm) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = algorithms_.find(key);
    if (known != algorithms_.end()) {
      *algorithm = known->second;
      return OkStatus();
    }
    Status status = Ask(problem, key, algorithm);
    if (status.ok()) algorithms_.emplace(key, *algorithm);
    return status;
  }

 private:
  Status Ask(const Problem& problem, const ShapeKey& key, cublasLtMatmulAlgo_t* algorithm) {
    Preference preference;
    TANDEM_RETURN_IF_CUBLAS_ERROR(cublasLtMatmulPreferenceCreate(&preference.handle));
    const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      return cublasLtMatmulPreferenceSetAttribute(preference.handle, attribute, &value,
                                                  sizeof(value));
    };
    TANDEM_RETURN_IF_CUBLAS_ERROR(set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                      static_cast<uint64_t>(kCublasLtScratchBytes)));
    // Partial sums stay float32, whatever c is.
    TANDEM_RETURN_IF_CUBLAS_ERROR(
        set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
            static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)));
    TANDEM_RETURN_IF_CUBLAS_ERROR(
        set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(key[12])));
    TANDEM_RETURN_IF_CUBLAS_ERROR(
        set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(key[11])));
    TANDEM_RETURN_IF_CUBLAS_ERROR(
        set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(key[13])));
    TANDEM_RETURN_IF_CUBLAS_ERROR(
        set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(key[13])));
    cublasLtMatmulHeuristicResult_t result = {};
    int count = 0;
    TANDEM_RETURN_IF_CUBLAS_ERROR(cublasLtMatmulAlgoGetHeuristic(
        handle_, problem.operation.handle, problem.first.handle, problem.second.handle,
        problem.result.handle, problem.result.handle, preference.handle, 1, &result, &count));
    if (count == 0)
      return CublasError(CUBLAS_STATUS_NOT_SUPPORTED, "cublasLtMatmulAlgoGetHeuristic");
    *algorithm = result.algo;
    return OkStatus();
  }

  cublasLtHandle_t handle_ = nullptr;
  std::mutex mutex_;
  std::map<ShapeKey, cublasLtMatmulAlgo_t> algorithms_;
};

// Made at the first use of a device, and kept until the process ends: at that time the driver may
// be gone already, so nothing is destroyed.
Status CurrentDevice(Device** device) {
  static std::mutex mutex;
  static auto* devices = new std::map<int, std::unique_ptr<Device>>;
  int index = 0;
  TANDEM_RETURN_IF_CUDA_ERROR(cudaGetDevice(&index));
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Device>& slot = (*devices)[index];
  if (slot == nullptr) {
    auto opened = std::make_unique<Device>();
    if (Status status = opened->Open(); !status.ok()) return status;
    slot = std::move(opened);
  }
  *device = slot.get();
  return OkStatus();
}

Status CheckShapes(const ConstMatrixView& a, bool transpose_a, const ConstMatrixView& b,
                   bool transpose_b, const MatrixView& c) {
  const int64_t inner_a = transpose_a ? a.rows : a.cols;
  const int64_t inner_b = transpose_b ? b.cols : b.rows;
  const int64_t rows = transpose_a ? a.cols : a.rows;
  const int64_t cols = transpose_b ? b.rows : b.cols;
  if (inner_a != inner_b || rows != c.rows || cols != c.cols) {
    return InvalidArgument("product: [%lld, %lld] x [%lld, %lld] does not give [%lld, %lld]",
                           static_cast<long long>(rows), static_cast<long long>(inner_a),
                           static_cast<long long>(inner_b), static_cast<long long>(cols),
                           static_cast<long long>(c.rows), static_cast<long long>(c.cols));
  }
  if (a.dtype != b.dtype || (c.dtype != DType::kFloat32 && c.dtype != a.dtype)) {
    return InvalidArgument("product: want operands of one dtype, and a result of it or float32");
  }
  return OkStatus();
}

class CublasLtGemm : public Gemm {
 public:
  CublasLtGemm(Device* device, const Workspace& scratch) : device_(device), scratch_(scratch) {}

  Status Multiply(const ConstMatrixView& a, bool transpose_a, const ConstMatrixView& b,
                  bool transpose_b, float beta, const MatrixView& c,
                  const Execution& execution) override {
    if (Status status = CheckShapes(a, transpose_a, b, transpose_b, c); !status.ok()) return status;
    if (c.rows == 0 || c.cols == 0) return OkStatus();
    const auto stream = static_cast<cudaStream_t>(execution.stream);
    if ((transpose_a ? a.rows : a.cols) == 0) return Empty(beta, c, stream);
    Problem problem;
    if (Status status = Build(a, transpose_a, b, transpose_b, c, &problem); !status.ok()) {
      return status;
    }
    cublasLtMatmulAlgo_t algorithm;
    Status status =
        device_->Choose(problem, KeyOf(a, transpose_a, b, transpose_b, beta, c), &algorithm);
    if (!status.ok()) return status;
    const float alpha = 1.0f;
    TANDEM_RETURN_IF_CUBLAS_ERROR(cublasLtMatmul(
        device_->handle(), problem.operation.handle, &alpha, b.data, problem.first.handle, a.data,
        problem.second.handle, &beta, c.data, problem.result.handle, c.data, problem.result.handle,
        &algorithm, scratch_.data, static_cast<size_t>(scratch_.bytes), stream));
    return OkStatus();
  }

 private:
  static Status Empty(float beta, const MatrixView& c, cudaStream_t stream) {
    if (beta != 0.0f) return OkStatus();
    const auto size = static_cast<size_t>(SizeOf(c.dtype));
    TANDEM_RETURN_IF_CUDA_ERROR(cudaMemset2DAsync(
        c.data, LeadingDimension(c) * size, 0, c.cols * size, static_cast<size_t>(c.rows), stream));
    return OkStatus();
  }

  Device* device_;
  Workspace scratch_;
};

}  // namespace

Status MakeCublasLtGemm(const Workspace& scratch, Gemm** gemm) {
  if (scratch.bytes < kCublasLtScratchBytes) {
    return InvalidArgument("scratch of the product: want %lld bytes, got %lld",
                           static_cast<long long>(kCublasLtScratchBytes),
                           static_cast<long long>(scratch.bytes));
  }
  Device* device = nullptr;
  if (Status status = CurrentDevice(&device); !status.ok()) return status;
  *gemm = new CublasLtGemm(device, scratch);
  return OkStatus();
}

}  // namespace tandem
