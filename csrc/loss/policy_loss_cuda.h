// What tests need of policy_loss_cuda.cu beyond policy_loss.h.
#pragma once

#include <cstdint>

#include "csrc/loss/policy_loss.h"

namespace tandem::cuda {

// PolicyLoss on grids of at most `max_blocks` blocks: for the test that the grid does not matter.
Status PolicyLossOnGrid(const PolicyLossParams& params, const PolicyLossInputs& inputs,
                        const PolicyLossOutputs& outputs, const Workspace& workspace,
                        const Execution& execution, int64_t max_blocks);

}  // namespace tandem::cuda
