// Argument checks of the operators, and tensors as csrc's views. A message names the argument and
// says what is wanted; nothing here computes.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "csrc/common/status.h"
#include "csrc/common/tensor_view.h"

namespace tandem {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Becomes a RuntimeError with this text. Not torch's STD_TORCH_CHECK, whose messages begin with the
// place in this source, which tells a user nothing.
template <typename... Parts>
[[noreturn]] void Raise(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

template <typename... Parts>
void Check(bool condition, const Parts&... parts) {
  if (!condition) [[unlikely]] {
    Raise(parts...);
  }
}

inline void RaiseUnlessOk(const Status& status) { Check(status.ok(), status.message()); }

inline const char* NameOf(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    default:
      return "another dtype";
  }
}

inline bool IsOnSameDevice(const Tensor& tensor, const Tensor& like) {
  return tensor.is_cpu() == like.is_cpu() && tensor.is_cuda() == like.is_cuda() &&
         tensor.get_device_index() == like.get_device_index();
}

inline void CheckDevice(const Tensor& tensor, const Tensor& like, const char* name) {
  Check(IsOnSameDevice(tensor, like), name, ": want a tensor on the device of the first argument");
}

// The dtypes that csrc computes with.
inline DType DTypeOf(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      Raise(name, ": want float32, bfloat16 or float16, got ", NameOf(tensor.scalar_type()));
  }
}

// A sharded parameter whose storage has been given back has a shape, but no memory.
inline void CheckMemory(const Tensor& tensor, const char* name) {
  Check(tensor.numel() == 0 || tensor.const_data_ptr() != nullptr, name,
        ": its storage has been freed");
}

// [rows, cols] of such a dtype with adjacent columns and rows that may lie apart, not overlap.
inline ConstMatrixView MatrixOf(const Tensor& tensor, const char* name) {
  Check(tensor.dim() == 2, name, ": want 2 dimensions, got ", tensor.dim());
  const DType dtype = DTypeOf(tensor, name);
  const int64_t rows = tensor.size(0);
  const int64_t cols = tensor.size(1);
  Check(cols <= 1 || rows == 0 || tensor.stride(1) == 1, name,
        ": want adjacent columns (stride 1), got stride ", tensor.stride(1));
  Check(rows <= 1 || tensor.stride(0) >= cols, name,
        ": want rows that do not overlap, got row stride ", tensor.stride(0), " for ", cols,
        " columns");
  CheckMemory(tensor, name);
  // The stride of a single row says nothing; torch may leave anything there.
  return {tensor.const_data_ptr(), rows, cols, rows <= 1 ? cols : tensor.stride(0), dtype};
}

inline MatrixView MutableMatrixOf(const Tensor& tensor, const char* name) {
  const ConstMatrixView view = MatrixOf(tensor, name);
  return {tensor.mutable_data_ptr(), view.rows, view.cols, view.row_stride, view.dtype};
}

inline void CheckShape(const Tensor& tensor, int64_t rows, int64_t cols, const char* name) {
  Check(tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == cols, name, ": want [",
        rows, ", ", cols, "]");
}

// A contiguous [count] of one dtype on the device of `like`.
inline void CheckVector(const Tensor& vector, ScalarType dtype, int64_t count, const Tensor& like,
                        const char* name) {
  CheckDevice(vector, like, name);
  Check(vector.scalar_type() == dtype, name, ": want ", NameOf(dtype), ", got ",
        NameOf(vector.scalar_type()));
  Check(vector.dim() == 1 && vector.size(0) == count, name, ": want [N] with N = ", count);
  Check(vector.is_contiguous(), name, ": want a contiguous tensor");
  CheckMemory(vector, name);
}

inline const float* FloatsOf(const Tensor& vector, int64_t count, const Tensor& like,
                             const char* name) {
  CheckVector(vector, ScalarType::Float, count, like, name);
  return vector.const_data_ptr<float>();
}

inline const float* FloatsOrNull(const std::optional<Tensor>& vector, int64_t count,
                                 const Tensor& like, const char* name) {
  return vector.has_value() ? FloatsOf(*vector, count, like, name) : nullptr;
}

inline const int64_t* IntegersOf(const Tensor& vector, int64_t count, const Tensor& like,
                                 const char* name) {
  CheckVector(vector, ScalarType::Long, count, like, name);
  return vector.const_data_ptr<int64_t>();
}

inline const int64_t* IntegersOrNull(const std::optional<Tensor>& vector, int64_t count,
                                     const Tensor& like, const char* name) {
  return vector.has_value() ? IntegersOf(*vector, count, like, name) : nullptr;
}

inline float PositiveFloat(double value, const char* name) {
  Check(std::isfinite(value) && value > 0, name, ": want a finite number > 0, got ", value);
  return static_cast<float>(value);
}

}  // namespace tandem
