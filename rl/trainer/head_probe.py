"""Are a model's logits the product of hidden states and one matrix? Fused passes, which never make logits, need that.

The question is put to the model itself, in two small forward passes, and not to a list of names: a bias, a soft cap, a
scale, an adapter or a mask over the vocabulary all answer no, and the model's own logits are then used.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rl.core.errors import FatalError, first_line
from rl.trainer.model import CausalModel

_NUM_TOKENS = 8
# The hidden states are scaled until logits reach this: below it, a soft cap would hide in the rounding.
_LARGEST_LOGIT = 100.0
# What another order of the sum may do, as a share of the largest logit.
_ROUNDING = 1e-5


def find_head_fault(model: CausalModel) -> str | None:
    """Return why the model's logits are not hidden states times the output layer's matrix, or None where they are.

    Args:
        model: Loaded; float32 arithmetic is used whatever its precision.
    """
    head = model.head
    if type(head) is not nn.Linear:
        return f"its output layer is no plain matrix but {type(head).__name__}"
    bias: Any = head.bias  # torch's stubs deny that it may be missing
    if bias is not None:
        return "its output layer has a bias"
    if head.weight.dtype != torch.float32:
        return f"its output layer is {head.weight.dtype} and not float32"
    try:
        with torch.no_grad():
            deviation = _deviation(model, head.weight)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, AssertionError, FatalError) as error:
        return f"its output layer is not called in the usual way: {first_line(error)}"
    if deviation <= _ROUNDING:
        return None
    return f"its logits differ from the output layer's product by {deviation:.1e} of the largest"


def _deviation(model: CausalModel, weight: Tensor) -> float:
    """Return the largest difference between the model's logits and the product, as a share of the largest logit."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.vocab_size, (1, _NUM_TOKENS), generator=generator).to(model.device)
    hidden = model.hidden_at(tokens, torch.arange(_NUM_TOKENS, device=model.device), exact=True)
    plain = hidden @ weight.T
    hidden = hidden * (_LARGEST_LOGIT / plain.abs().max().clamp(min=torch.finfo(plain.dtype).tiny))
    expected = hidden @ weight.T
    return float((model.logits_of(hidden) - expected).abs().max() / expected.abs().max())
