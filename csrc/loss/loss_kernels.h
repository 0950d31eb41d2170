// The kernels of one backend as a table: what linear_loss.h works with, and what the CUDA library,
// which is found at run time, hands over.
#pragma once

#include <cstdint>

#include "csrc/loss/logits_threshold.h"
#include "csrc/loss/policy_loss.h"
#include "csrc/loss/row_stats.h"

namespace tandem {

struct LossKernels {
  decltype(&cpu::LogitsStatsWorkspaceBytes) logits_stats_workspace_bytes;
  decltype(&cpu::LogitsStats) logits_stats;
  decltype(&cpu::StatsFinish) stats_finish;
  decltype(&cpu::LogitsGradient) logits_gradient;
  decltype(&cpu::PolicyLossWorkspaceBytes) policy_loss_workspace_bytes;
  decltype(&cpu::PolicyLoss) policy_loss;
  decltype(&cpu::SequenceReduce) sequence_reduce;
  decltype(&cpu::LogitsThresholdWorkspaceBytes) logits_threshold_workspace_bytes;
  decltype(&cpu::LogitsThreshold) logits_threshold;
};

// A namespace's functions as a table: TANDEM_LOSS_KERNELS(cpu), TANDEM_LOSS_KERNELS(cuda).
#define TANDEM_LOSS_KERNELS(backend)                                                        \
  ::tandem::LossKernels {                                                                   \
    &backend::LogitsStatsWorkspaceBytes, &backend::LogitsStats, &backend::StatsFinish,      \
        &backend::LogitsGradient, &backend::PolicyLossWorkspaceBytes, &backend::PolicyLoss, \
        &backend::SequenceReduce, &backend::LogitsThresholdWorkspaceBytes,                  \
        &backend::LogitsThreshold                                                           \
  }

}  // namespace tandem
