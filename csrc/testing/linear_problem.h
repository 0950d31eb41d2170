// Problems of the linear layer's tests: matrices with gaps, and what a call should give, in
// float64.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "csrc/common/tensor_view.h"
#include "csrc/loss/linear_loss.h"
#include "csrc/testing/naive_gemm.h"

namespace tandem {

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// A matrix with a gap behind each row, which must stay NaN.
struct Matrix {
  Matrix(int64_t rows, int64_t cols, DType dtype)
      : rows(rows), cols(cols), stride(cols + 3), dtype(dtype), bytes(rows * stride * 4) {
    for (int64_t i = 0; i < rows * stride; ++i) StoreDouble(kNaN, bytes.data(), i, dtype);
  }
  double at(int64_t i, int64_t j) const { return LoadDouble(bytes.data(), i * stride + j, dtype); }
  void set(int64_t i, int64_t j, double value) {
    StoreDouble(value, bytes.data(), i * stride + j, dtype);
  }
  MatrixView view() { return {bytes.data(), rows, cols, stride, dtype}; }
  ConstMatrixView view() const { return {bytes.data(), rows, cols, stride, dtype}; }
  void ExpectGapsUntouched() const {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = cols; j < stride; ++j) ASSERT_TRUE(std::isnan(at(i, j)));
    }
  }

  int64_t rows, cols, stride;
  DType dtype;
  std::vector<char> bytes;
};

struct Shape {
  int64_t n = 0, v = 0, h = 0;
  DType dtype = DType::kFloat32;
};

// Inputs of a call, and what it should give in float64.
struct Problem {
  explicit Problem(const Shape& shape, uint32_t seed = 1)
      : shape(shape), hidden(shape.n, shape.h, shape.dtype), weight(shape.v, shape.h, shape.dtype) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < shape.n; ++i) {
      for (int64_t k = 0; k < shape.h; ++k) hidden.set(i, k, normal(random));
    }
    for (int64_t j = 0; j < shape.v; ++j) {
      for (int64_t k = 0; k < shape.h; ++k) weight.set(j, k, normal(random) * 0.7);
    }
    for (int64_t i = 0; i < shape.n; ++i) {
      targets.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(shape.v)));
      grad_logprobs.push_back(static_cast<float>(normal(random)));
      grad_entropy.push_back(static_cast<float>(normal(random)));
    }
  }

  LinearRows rows() const {
    LinearRows rows;
    rows.hidden = hidden.view();
    rows.weight = weight.view();
    rows.targets = targets.data();
    rows.temperature = temperature;
    rows.vocab_size = vocab_size;
    return rows;
  }

  int64_t live() const { return std::min(vocab_size, shape.v); }

  Shape shape;
  Matrix hidden, weight;
  std::vector<int64_t> targets;
  std::vector<float> grad_logprobs, grad_entropy;
  float temperature = 0.8f;
  int64_t vocab_size = std::numeric_limits<int64_t>::max();
};

struct Reference {
  std::vector<double> logprobs, entropy, hidden, weight;
};

// Softmax of one row at the temperature: log-probabilities of the live columns.
inline std::vector<double> LogSoftmax(const Problem& p, int64_t i) {
  std::vector<double> z(p.live());
  for (int64_t j = 0; j < p.live(); ++j) {
    double dot = 0;
    for (int64_t k = 0; k < p.shape.h; ++k) dot += p.hidden.at(i, k) * p.weight.at(j, k);
    z[j] = dot / p.temperature;
  }
  const double max = *std::max_element(z.begin(), z.end());
  double sum = 0;
  for (double value : z) sum += std::exp(value - max);
  for (double& value : z) value -= max + std::log(sum);
  return z;
}

inline Reference Expected(const Problem& p) {
  const auto [n, v, h, dtype] = p.shape;
  Reference out{std::vector<double>(n), std::vector<double>(n), std::vector<double>(n * h),
                std::vector<double>(v * h)};
  for (int64_t i = 0; i < n; ++i) {
    const std::vector<double> log_p = LogSoftmax(p, i);
    double entropy = 0;
    for (double value : log_p) entropy -= std::exp(value) * value;
    out.entropy[i] = entropy;
    if (p.targets[i] == kIgnoreIndex) continue;
    out.logprobs[i] = log_p[p.targets[i]];
    for (int64_t j = 0; j < p.live(); ++j) {
      const double q = std::exp(log_p[j]);
      const double grad = (p.grad_logprobs[i] * ((j == p.targets[i]) - q) -
                           p.grad_entropy[i] * q * (log_p[j] + entropy)) /
                          p.temperature;
      for (int64_t k = 0; k < h; ++k) {
        out.hidden[i * h + k] += grad * p.weight.at(j, k);
        out.weight[j * h + k] += grad * p.hidden.at(i, k);
      }
    }
  }
  return out;
}

}  // namespace tandem
