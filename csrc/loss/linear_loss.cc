#include "csrc/loss/linear_loss.h"

#include <algorithm>
#include <cmath>

#include "csrc/common/scalar_types.h"

namespace tandem {
namespace {

// Pieces of one block of memory, each aligned to 256 bytes. Without a block it only counts.
class Carver {
 public:
  explicit Carver(void* data) : data_(static_cast<char*>(data)) {}

  void* Take(int64_t bytes) {
    void* piece = data_ == nullptr ? nullptr : data_ + used_;
    used_ += (bytes + 255) / 256 * 256;
    return piece;
  }

  int64_t used() const { return used_; }

 private:
  char* data_;
  int64_t used_ = 0;
};

// Elements between rows of logits are a multiple of this, so that every row is aligned for vectors.
constexpr int64_t kStrideMultiple = 64;

// What exists of one chunk of rows at a time.
struct ChunkBuffers {
  MatrixView logits;
  MatrixView grad_logits;  // the memory of logits where the dtypes agree
  RowStats stats;
  TokenLogprobs logprobs;  // for outputs that the caller does not want
  float* grad_logprobs = nullptr;
  float* grad_entropy = nullptr;
  Workspace kernels;  // of the functions that are called
  int64_t bytes = 0;
};

ChunkBuffers Carve(const LinearRows& rows, const LinearPlan& plan, const LossKernels& kernels,
                   int64_t num_tokens, void* data) {
  const int64_t count = std::min(plan.chunk_rows, std::max<int64_t>(rows.hidden.rows, 1));
  const int64_t vocab = rows.weight.rows;
  const int64_t stride = (vocab + kStrideMultiple - 1) / kStrideMultiple * kStrideMultiple;
  Carver carver(data);
  const auto matrix = [&](DType dtype) {
    return MatrixView{carver.Take(count * stride * SizeOf(dtype)), count, vocab, stride, dtype};
  };
  const auto floats = [&] { return static_cast<float*>(carver.Take(count * sizeof(float))); };
  ChunkBuffers buffers;
  buffers.logits = matrix(plan.logits_dtype);
  buffers.grad_logits =
      plan.logits_dtype == rows.hidden.dtype ? buffers.logits : matrix(rows.hidden.dtype);
  buffers.stats = {floats(), floats(), floats(), floats()};
  buffers.logprobs = {floats(), floats(), floats()};
  buffers.grad_logprobs = floats();
  buffers.grad_entropy = floats();
  const int64_t bytes = std::max(kernels.logits_stats_workspace_bytes(count, vocab),
                                 kernels.policy_loss_workspace_bytes(num_tokens, 0));
  buffers.kernels = {carver.Take(bytes), bytes};
  buffers.bytes = carver.used();
  return buffers;
}

ConstMatrixView AsConst(const MatrixView& view) {
  return {view.data, view.rows, view.cols, view.row_stride, view.dtype};
}

MatrixView RowsOf(const MatrixView& view, int64_t begin, int64_t count) {
  char* data = static_cast<char*>(view.data) + begin * view.row_stride * SizeOf(view.dtype);
  return {data, count, view.cols, view.row_stride, view.dtype};
}

ConstMatrixView RowsOf(const ConstMatrixView& view, int64_t begin, int64_t count) {
  const char* data =
      static_cast<const char*>(view.data) + begin * view.row_stride * SizeOf(view.dtype);
  return {data, count, view.cols, view.row_stride, view.dtype};
}

// The first `cols` columns.
template <typename View>
View ColsOf(View view, int64_t cols) {
  view.cols = cols;
  return view;
}

template <typename T>
bool AllFinite(const void* row, int64_t count) {
  const T* values = static_cast<const T*>(row);
  return std::all_of(values, values + count, [](T x) { return std::isfinite(ToFloat(x)); });
}

bool IsFiniteRow(const ConstMatrixView& matrix, int64_t i) {
  const void* row = RowsOf(matrix, i, 1).data;
  if (matrix.dtype == DType::kFloat32) return AllFinite<float>(row, matrix.cols);
  return matrix.dtype == DType::kBFloat16 ? AllFinite<BFloat16>(row, matrix.cols)
                                          : AllFinite<Float16>(row, matrix.cols);
}

template <typename T>
T* Shift(T* pointer, int64_t count) {
  return pointer == nullptr ? nullptr : pointer + count;
}

Status CheckRows(const LinearRows& rows, const LinearPlan& plan) {
  if (plan.chunk_rows <= 0) {
    return InvalidArgument("chunk_rows: want at least 1, got %lld",
                           static_cast<long long>(plan.chunk_rows));
  }
  if (rows.hidden.cols != rows.weight.cols || rows.hidden.dtype != rows.weight.dtype) {
    return InvalidArgument("weight: want [V, %lld] of the dtype of hidden, got %lld columns",
                           static_cast<long long>(rows.hidden.cols),
                           static_cast<long long>(rows.weight.cols));
  }
  if (plan.logits_dtype != DType::kFloat32 && plan.logits_dtype != rows.hidden.dtype) {
    return InvalidArgument("logits_dtype: want float32 or the dtype of hidden");
  }
  return OkStatus();
}

Status CheckGradients(const LinearRows& rows, const LinearGradients& gradients) {
  const MatrixView& hidden = gradients.hidden;
  const MatrixView& weight = gradients.weight;
  if (hidden.rows != rows.hidden.rows || hidden.cols != rows.hidden.cols ||
      hidden.dtype != rows.hidden.dtype) {
    return InvalidArgument("gradient of hidden: want the shape and dtype of hidden");
  }
  if (weight.rows != rows.weight.rows || weight.cols != rows.weight.cols ||
      weight.dtype != DType::kFloat32) {
    return InvalidArgument("gradient of weight: want the shape of weight, and float32");
  }
  return OkStatus();
}

// One call over rows: chunks share its buffers, and its gradient of the weight.
class LinearCall {
 public:
  LinearCall(const LinearRows& rows, const LinearPlan& plan, const LinearBackend& backend)
      : rows_(rows), plan_(plan), backend_(backend) {}

  Status Open(const Workspace& workspace, int64_t num_tokens) {
    if (Status status = CheckRows(rows_, plan_); !status.ok()) return status;
    buffers_ = Carve(rows_, plan_, *backend_.kernels, num_tokens, workspace.data);
    if (workspace.bytes < buffers_.bytes || workspace.data == nullptr) {
      return InvalidArgument("workspace: want %lld bytes, got %lld",
                             static_cast<long long>(buffers_.bytes),
                             static_cast<long long>(workspace.bytes));
    }
    return OkStatus();
  }

  // Walks the chunks: body(begin, count).
  template <typename Body>
  Status ForEachChunk(Body&& body) {
    const int64_t total = rows_.hidden.rows;
    for (int64_t begin = 0; begin < total; begin += plan_.chunk_rows) {
      const int64_t count = std::min(plan_.chunk_rows, total - begin);
      if (Status status = body(begin, count); !status.ok()) return status;
    }
    return OkStatus();
  }

  // logits = hidden weight^T for a chunk. Columns of padding are not written: nobody looks at them.
  Status MakeLogits(int64_t begin, int64_t count) {
    return backend_.gemm->Multiply(RowsOf(rows_.hidden, begin, count), false, LiveWeight(), true,
                                   0.0f, ColsOf(RowsOf(buffers_.logits, 0, count), NumLive()),
                                   backend_.execution);
  }

  // Log-probabilities of a chunk from its logits, which stay; fields of `out` may be null.
  Status Logprobs(int64_t begin, int64_t count, const TokenLogprobs& out) {
    const RowStats& stats = buffers_.stats;
    Status status = backend_.kernels->logits_stats(ChunkRows(begin, count), stats, buffers_.kernels,
                                                   backend_.execution);
    if (!status.ok()) return status;
    return backend_.kernels->stats_finish({stats.max, stats.sum, stats.shifted, stats.target, 1, 0},
                                          count, rows_.targets + begin, rows_.ignore_index, out,
                                          backend_.execution);
  }

  // Where a chunk's log-probabilities go: to the caller's memory, or to scratch.
  TokenLogprobs Outputs(const TokenLogprobs& out, int64_t begin) const {
    const TokenLogprobs& scratch = buffers_.logprobs;
    return {out.logprobs == nullptr ? scratch.logprobs : out.logprobs + begin,
            out.lse == nullptr ? scratch.lse : out.lse + begin,
            out.entropy == nullptr ? scratch.entropy : out.entropy + begin};
  }

  bool HasGradient(int64_t begin, int64_t count, const TokenLogprobGradients& upstream) const {
    if (!backend_.is_host_memory) return true;
    for (int64_t i = 0; i < count; ++i) {
      if (RowHasGradient(begin, i, upstream)) return true;
    }
    return false;
  }

  // Both gradients of a chunk from its logits, which are lost.
  Status Gradients(int64_t begin, int64_t count, const TokenLogprobGradients& upstream,
                   const LinearGradients& out) {
    const MatrixView slab = RowsOf(buffers_.grad_logits, 0, count);
    Status status = backend_.kernels->logits_gradient(ChunkRows(begin, count), upstream, slab,
                                                      backend_.execution);
    if (!status.ok()) return status;
    status = backend_.gemm->Multiply(ColsOf(AsConst(slab), NumLive()), false, LiveWeight(), false,
                                     0.0f, RowsOf(out.hidden, begin, count), backend_.execution);
    if (!status.ok()) return status;
    return AddRowsToWeight(begin, count, upstream, out);
  }

  // A chunk to which no gradient comes.
  Status ZeroHidden(int64_t begin, int64_t count, const LinearGradients& out) {
    return backend_.gemm->Multiply(ColsOf(AsConst(RowsOf(buffers_.grad_logits, 0, count)), 0),
                                   false, RowsOf(rows_.weight, 0, 0), false, 0.0f,
                                   RowsOf(out.hidden, begin, count), backend_.execution);
  }

  // At the end: without a chunk that had a gradient, nobody has overwritten the weight's yet.
  Status Close(const LinearGradients& out) {
    if (out.accumulate || is_weight_written_) return OkStatus();
    return AddToWeight(AsConst(RowsOf(buffers_.grad_logits, 0, 0)), RowsOf(rows_.hidden, 0, 0),
                       out);
  }

  const ChunkBuffers& buffers() const { return buffers_; }

 private:
  LogitRows ChunkRows(int64_t begin, int64_t count) const {
    LogitRows rows;
    rows.logits = AsConst(RowsOf(buffers_.logits, 0, count));
    rows.targets = rows_.targets + begin;
    rows.temperature = rows_.temperature;
    rows.ignore_index = rows_.ignore_index;
    // The whole vocabulary is here: no target is beyond it.
    rows.vocab_size = std::min(rows_.vocab_size, rows_.weight.rows);
    return rows;
  }

  // Rows of the weight before its padding, which may hold anything: 0 x NaN would be NaN.
  int64_t NumLive() const { return std::clamp<int64_t>(rows_.vocab_size, 0, rows_.weight.rows); }
  ConstMatrixView LiveWeight() const { return RowsOf(rows_.weight, 0, NumLive()); }

  bool RowHasGradient(int64_t begin, int64_t i, const TokenLogprobGradients& upstream) const {
    const auto is_zero = [i](const float* values) {
      return values == nullptr || values[i] == 0.0f;
    };
    if (rows_.targets[begin + i] == rows_.ignore_index) return false;
    return !is_zero(upstream.grad_logprobs) || !is_zero(upstream.grad_entropy);
  }

  // Adds a chunk's rows. A row without gradient must not harm the others, for instance by a NaN
  // among its hidden states: where the host can look, such rows are left out.
  Status AddRowsToWeight(int64_t begin, int64_t count, const TokenLogprobGradients& upstream,
                         const LinearGradients& out) {
    const ConstMatrixView slab = AsConst(RowsOf(buffers_.grad_logits, 0, count));
    const ConstMatrixView hidden = RowsOf(rows_.hidden, begin, count);
    int64_t first = 0;
    for (int64_t i = 0; i <= count; ++i) {
      const bool is_taken =
          i < count && (!backend_.is_host_memory || RowHasGradient(begin, i, upstream) ||
                        IsFiniteRow(hidden, i));
      if (is_taken) continue;
      const Status status = first == i ? OkStatus()
                                       : AddToWeight(RowsOf(slab, first, i - first),
                                                     RowsOf(hidden, first, i - first), out);
      if (!status.ok()) return status;
      first = i + 1;
    }
    return OkStatus();
  }

  Status AddToWeight(const ConstMatrixView& slab, const ConstMatrixView& hidden,
                     const LinearGradients& out) {
    const float beta = out.accumulate || is_weight_written_ ? 1.0f : 0.0f;
    is_weight_written_ = true;
    return backend_.gemm->Multiply(slab, true, hidden, false, beta, out.weight, backend_.execution);
  }

  const LinearRows& rows_;
  const LinearPlan& plan_;
  const LinearBackend& backend_;
  ChunkBuffers buffers_;
  bool is_weight_written_ = false;
};

// The tokens of rows [begin, begin + count).
PolicyLossTokens TokensOf(const LinearPolicyTokens& all, int64_t begin, int64_t count) {
  PolicyLossTokens tokens = all.tokens;
  int64_t first = begin;
  tokens.num_tokens = count;
  if (tokens.row_offsets != nullptr) {
    // Offsets count from the first token of all, so the columns stay where they are.
    tokens.row_offsets += begin;
    tokens.num_tokens = all.host_row_offsets[begin + count] - all.host_row_offsets[begin];
    first = 0;
  }
  tokens.prev_logprobs = Shift(tokens.prev_logprobs, first);
  tokens.reference_logprobs = Shift(tokens.reference_logprobs, first);
  tokens.generation_logprobs = Shift(tokens.generation_logprobs, first);
  tokens.advantages = Shift(tokens.advantages, first);
  tokens.shares = Shift(tokens.shares, first);
  tokens.weights = Shift(tokens.weights, first);
  tokens.nll_coefs = Shift(tokens.nll_coefs, first);
  return tokens;
}

Status CheckTokens(const LinearRows& rows, const PolicyLossParams& params,
                   const LinearPolicyTokens& tokens) {
  if (params.ratio == RatioKind::kSequence) {
    return InvalidArgument("ratio: a sequence's ratio needs all its tokens; take two passes");
  }
  const bool has_offsets = tokens.tokens.row_offsets != nullptr;
  if (has_offsets != (tokens.host_row_offsets != nullptr)) {
    return InvalidArgument("host_row_offsets: want them exactly where row_offsets are");
  }
  const int64_t want = has_offsets ? tokens.host_row_offsets[rows.hidden.rows] : rows.hidden.rows;
  if (tokens.tokens.num_tokens != want) {
    return InvalidArgument("num_tokens: want %lld, got %lld", static_cast<long long>(want),
                           static_cast<long long>(tokens.tokens.num_tokens));
  }
  return OkStatus();
}

}  // namespace

int64_t LinearWorkspaceBytes(const LinearRows& rows, const LinearPlan& plan,
                             const LossKernels& kernels, int64_t num_tokens) {
  return Carve(rows, plan, kernels, num_tokens, nullptr).bytes;
}

Status LinearLogprobsForward(const LinearRows& rows, const TokenLogprobs& out,
                             const LinearPlan& plan, const Workspace& workspace,
                             const LinearBackend& backend) {
  LinearCall call(rows, plan, backend);
  if (Status status = call.Open(workspace, 0); !status.ok()) return status;
  return call.ForEachChunk([&](int64_t begin, int64_t count) {
    Status status = call.MakeLogits(begin, count);
    if (!status.ok()) return status;
    return call.Logprobs(begin, count, call.Outputs(out, begin));
  });
}

Status LinearLogprobsBackward(const LinearRows& rows, const TokenLogprobGradients& upstream,
                              const LinearGradients& gradients, const LinearPlan& plan,
                              const Workspace& workspace, const LinearBackend& backend) {
  LinearCall call(rows, plan, backend);
  if (Status status = call.Open(workspace, 0); !status.ok()) return status;
  if (Status status = CheckGradients(rows, gradients); !status.ok()) return status;
  Status status = call.ForEachChunk([&](int64_t begin, int64_t count) {
    const TokenLogprobGradients chunk = {upstream.lse + begin, Shift(upstream.entropy, begin),
                                         Shift(upstream.grad_logprobs, begin),
                                         Shift(upstream.grad_entropy, begin)};
    if (!call.HasGradient(begin, count, chunk)) return call.ZeroHidden(begin, count, gradients);
    Status made = call.MakeLogits(begin, count);
    if (!made.ok()) return made;
    return call.Gradients(begin, count, chunk, gradients);
  });
  return status.ok() ? call.Close(gradients) : status;
}

Status LinearPolicyLoss(const LinearRows& rows, const PolicyLossParams& params,
                        const LinearPolicyTokens& tokens, const TokenLogprobs& out,
                        const LinearGradients& gradients, double* metrics, const LinearPlan& plan,
                        const Workspace& workspace, const LinearBackend& backend) {
  LinearCall call(rows, plan, backend);
  if (Status status = call.Open(workspace, tokens.tokens.num_tokens); !status.ok()) return status;
  if (Status status = CheckGradients(rows, gradients); !status.ok()) return status;
  if (Status status = CheckTokens(rows, params, tokens); !status.ok()) return status;
  const ChunkBuffers& buffers = call.buffers();
  const auto loss = [&](int64_t begin, int64_t count, const TokenLogprobs& logprobs) {
    return backend.kernels->policy_loss(
        params, {TokensOf(tokens, begin, count), count, logprobs.logprobs, logprobs.entropy},
        {buffers.grad_logprobs, buffers.grad_entropy, metrics, begin > 0}, buffers.kernels,
        backend.execution);
  };
  Status status = call.ForEachChunk([&](int64_t begin, int64_t count) {
    const TokenLogprobs logprobs = call.Outputs(out, begin);
    Status made = call.MakeLogits(begin, count);
    if (made.ok()) made = call.Logprobs(begin, count, logprobs);
    if (made.ok()) made = loss(begin, count, logprobs);
    if (!made.ok()) return made;
    const TokenLogprobGradients upstream = {logprobs.lse, logprobs.entropy, buffers.grad_logprobs,
                                            buffers.grad_entropy};
    if (!call.HasGradient(begin, count, upstream)) return call.ZeroHidden(begin, count, gradients);
    return call.Gradients(begin, count, upstream, gradients);
  });
  if (status.ok() && rows.hidden.rows == 0) status = loss(0, 0, call.Outputs(out, 0));
  return status.ok() ? call.Close(gradients) : status;
}

}  // namespace tandem
