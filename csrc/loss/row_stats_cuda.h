// What the CUDA backend of row_stats.h has beyond it.
#pragma once

#include <cstdint>

#include "csrc/loss/row_stats.h"

namespace tandem::cuda {

// Logits are reduced in segments of this many columns. It decides in which order sums are added,
// so it is one constant for every device.
inline constexpr int kSegmentColumns = 32768;

// LogitsStats and LogitsGradient on grids of at most `max_blocks` blocks: for the test that the
// grid does not matter.
Status LogitsStatsOnGrid(const LogitRows& rows, const RowStats& stats, const Workspace& workspace,
                         const Execution& execution, int64_t max_blocks);
Status LogitsGradientOnGrid(const LogitRows& rows, const TokenLogprobGradients& gradients,
                            const MatrixView& grad_logits, const Execution& execution,
                            int64_t max_blocks);

}  // namespace tandem::cuda
