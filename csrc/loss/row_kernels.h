// What row_stats_cpu.cc does to one row, as a table per dtype and instruction set. Private to
// csrc/loss: the public functions, their checks and their threads are in row_stats_cpu.cc.
//
// Exponents are taken in base 2, d = (x - m) * scale with scale = log2 e / temperature: one product
// does for the temperature and the change of base.
//
// A row is reduced in one fixed order by each table. Tables differ in their last bits.
#pragma once

#include <cstdint>

#include "csrc/common/multiarch.h"
#include "csrc/common/tensor_view.h"

namespace tandem::cpu {

// m = max x, s = sum 2^d, t = sum d 2^d. The empty row is {-inf, 0, 0}. A logit of NaN or +inf
// makes the sum NaN.
struct RowSums {
  float max;
  float sum;
  float shifted;
};

// What a row is read with. A logit below the threshold is -inf.
struct RowReading {
  float scale;
  float threshold;  // -inf: none
};

// grad_j = -p_j (base + slope log2 p_j); the target's own term is the caller's. The slope is 0
// unless the entropy has a gradient.
struct GradientLine {
  float scale;
  float threshold;
  float lse;  // in the units of x: the log-sum-exp times the temperature; finite or NaN
  float base;
  float slope;
};

struct RowKernels {
  RowSums (*reduce)(const void* row, int64_t count, const RowReading& reading);
  // `out` may be `row`.
  void (*gradient)(const void* row, int64_t count, const GradientLine& line, void* out);
};

// Vector code that the compiler makes of plain loops: AVX2, or what the platform always has.
const RowKernels& PortableRowKernels(DType dtype);

#ifdef TANDEM_HAS_AVX512
const RowKernels& Avx512RowKernels(DType dtype);
#endif

// The fastest table that this machine can run.
const RowKernels& RowKernelsFor(DType dtype);

}  // namespace tandem::cpu
