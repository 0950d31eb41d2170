// The largest logit of each row: the first of the row statistics that a log-probability needs.
#pragma once

#include "csrc/common/status.h"
#include "csrc/common/stream.h"
#include "csrc/common/tensor_view.h"

namespace tandem {

// Writes row_max [rows] float32, on the stream and without waiting for it; logits and row_max are
// device memory. NaN logits are skipped; an empty or all -inf row gives -inf.
Status RowMaxCuda(const ConstMatrixView& logits, float* row_max, Stream stream);

}  // namespace tandem
