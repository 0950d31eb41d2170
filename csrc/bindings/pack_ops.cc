// Operators of csrc/refit/{pack,digest}.h, namespace `tandem`: bucket copy, float8 quantisation,
// digests. Checks and calls only; plans and fake kernels stand in rl/ops/bucket_copy.py.
//
// A table is a uint8 tensor: CopyItem [num_items], then tile_prefix int64 [num_items + 1]. It holds
// addresses: whoever keeps one keeps the tensors it was made of.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <tuple>
#include <vector>

#include "csrc/bindings/backend.h"
#include "csrc/bindings/checks.h"
#include "csrc/refit/refit_kernels.h"

namespace tandem {
namespace {

using Tensors = std::vector<Tensor>;

const RefitKernels& RefitKernelsOf(const Backend& backend) {
  static const RefitKernels kCpuKernels = TANDEM_REFIT_KERNELS(cpu);
  return backend.cuda == nullptr ? kCpuKernels : backend.cuda->refit;
}

int64_t TableBytes(int64_t num_items) {
  const auto prefix_bytes = static_cast<int64_t>(sizeof(int64_t)) * (num_items + 1);
  return static_cast<int64_t>(sizeof(CopyItem)) * num_items + prefix_bytes;
}

CopyItem ItemOf(const Tensor& source, const Tensor& target, const Tensor& first) {
  CheckDevice(source, first, "sources");
  CheckDevice(target, first, "targets");
  Check(source.is_contiguous(), "sources: want contiguous tensors");
  Check(target.is_contiguous(), "targets: want contiguous tensors");
  Check(source.numel() == target.numel(), "targets: want ", source.numel(),
        " elements as the source has, got ", target.numel());
  return {source.const_data_ptr(), target.mutable_data_ptr(), source.numel(),
          DTypeOf(source, "sources"), DTypeOf(target, "targets")};
}

// On the CPU, wherever the tensors are.
Tensor BucketTableOp(const Tensors& sources, const Tensors& targets) {
  Check(sources.size() == targets.size(), "targets: want ", sources.size(),
        " tensors, one per source, got ", targets.size());
  const auto num_items = static_cast<int64_t>(sources.size());
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  Tensor table = torch::stable::empty({TableBytes(num_items)}, ScalarType::Byte, std::nullopt, cpu);
  void* memory = table.mutable_data_ptr();
  std::memset(memory, 0, static_cast<size_t>(TableBytes(num_items)));  // the first prefix, padding
  auto* items = static_cast<CopyItem*>(memory);
  auto* tile_prefix = reinterpret_cast<int64_t*>(items + num_items);
  for (int64_t i = 0; i < num_items; ++i) {
    const auto at = static_cast<size_t>(i);
    items[i] = ItemOf(sources[at], targets[at], sources.front());
    tile_prefix[i + 1] = tile_prefix[i] + (items[i].numel + kTileElements - 1) / kTileElements;
  }
  return table;
}

// `table` is where the tensors are; num_tiles is the last entry of its prefix.
void BucketCopyTableOp(const Tensor& table, int64_t num_items, int64_t num_tiles) {
  Check(num_items >= 0 && num_items <= table.numel(),
        "num_items: want a number >= 0 of items that are in the table, got ", num_items);
  CheckVector(table, ScalarType::Byte, TableBytes(num_items), table, "table");
  const auto* items = static_cast<const CopyItem*>(table.const_data_ptr());
  const auto* tile_prefix = reinterpret_cast<const int64_t*>(items + num_items);
  const Backend backend = BackendOf(table);
  RaiseUnlessOk(RefitKernelsOf(backend).bucket_copy(items, tile_prefix, num_items, num_tiles,
                                                    backend.execution));
}

void BucketCopyOp(const Tensors& sources, const Tensors& targets) {
  const Tensor table = BucketTableOp(sources, targets);
  const auto num_items = static_cast<int64_t>(sources.size());
  if (num_items == 0) return;
  int64_t num_tiles = 0;
  const auto* end = static_cast<const unsigned char*>(table.const_data_ptr()) + table.numel();
  std::memcpy(&num_tiles, end - sizeof(num_tiles), sizeof(num_tiles));
  if (sources.front().is_cpu()) return BucketCopyTableOp(table, num_items, num_tiles);
  Tensor on_device = torch::stable::new_empty(sources.front(), {table.numel()}, ScalarType::Byte);
  torch::stable::copy_(on_device, table);
  BucketCopyTableOp(on_device, num_items, num_tiles);
}

// Items in one row, where the tensors are.
Tensor DigestsOp(const Tensors& tensors) {
  Check(!tensors.empty(), "tensors: want at least one");
  const Tensor& first = tensors.front();
  const auto num_items = static_cast<int64_t>(tensors.size());
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  const auto table_bytes = static_cast<int64_t>(sizeof(DigestItem)) * num_items;
  Tensor table = torch::stable::empty({table_bytes}, ScalarType::Byte, std::nullopt, cpu);
  auto* items = static_cast<DigestItem*>(table.mutable_data_ptr());
  for (const Tensor& tensor : tensors) {
    CheckDevice(tensor, first, "tensors");
    Check(tensor.is_contiguous(), "tensors: want contiguous tensors");
    const auto bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
    *items++ = {tensor.const_data_ptr(), bytes, 0};
  }
  if (!first.is_cpu()) {
    Tensor on_device = torch::stable::new_empty(first, {table_bytes}, ScalarType::Byte);
    torch::stable::copy_(on_device, table);
    table = on_device;
  }
  Tensor digests = torch::stable::new_empty(first, {num_items}, ScalarType::Long);
  const Backend backend = BackendOf(first);
  RaiseUnlessOk(RefitKernelsOf(backend).digest(
      static_cast<const DigestItem*>(table.const_data_ptr()), num_items,
      static_cast<uint64_t*>(digests.mutable_data_ptr()), backend.execution));
  return digests;
}

std::tuple<Tensor, Tensor> QuantizeFp8Op(const Tensor& source) {
  const ConstMatrixView view = MatrixOf(source, "source");
  const auto blocks = [](int64_t count) { return (count + kFp8Block - 1) / kFp8Block; };
  Tensor codes =
      torch::stable::new_empty(source, {view.rows, view.cols}, ScalarType::Float8_e4m3fn);
  Tensor scales =
      torch::stable::new_empty(source, {blocks(view.rows), blocks(view.cols)}, ScalarType::Float);
  const Backend backend = BackendOf(source);
  RaiseUnlessOk(RefitKernelsOf(backend).quantize_fp8(
      {view, static_cast<uint8_t*>(codes.mutable_data_ptr()), scales.mutable_data_ptr<float>()},
      backend.execution));
  return {codes, scales};
}

void Implement(torch::stable::detail::StableLibrary& library) {
  library.impl("bucket_table", TORCH_BOX(&BucketTableOp));
  library.impl("bucket_copy_table", TORCH_BOX(&BucketCopyTableOp));
  library.impl("bucket_copy_", TORCH_BOX(&BucketCopyOp));
  library.impl("quantize_fp8", TORCH_BOX(&QuantizeFp8Op));
  library.impl("tensor_digests", TORCH_BOX(&DigestsOp));
}

}  // namespace
}  // namespace tandem

STABLE_TORCH_LIBRARY_FRAGMENT(tandem, library) {
  library.def("bucket_table(Tensor[] sources, Tensor[] targets) -> Tensor");
  library.def("bucket_copy_table(Tensor table, int num_items, int num_tiles) -> ()");
  library.def("bucket_copy_(Tensor[] sources, Tensor(a!)[] targets) -> ()");
  library.def("quantize_fp8(Tensor source) -> (Tensor, Tensor)");
  library.def("tensor_digests(Tensor[] tensors) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tandem, CPU, library) { tandem::Implement(library); }
STABLE_TORCH_LIBRARY_IMPL(tandem, CUDA, library) { tandem::Implement(library); }
