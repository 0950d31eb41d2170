"""Does a model honour an attention mask and position ids of ours? Packed rows and shared prefixes need both.

The question is put to the model itself, in one small forward pass, and not to a list of names.
"""

import torch
from torch import Tensor

from rl.core.errors import first_line
from rl.trainer.layout import visible
from rl.trainer.model import CausalModel
from rl.trainer.siblings import Segment

# A prompt, two answers to it, and a stranger in the same row.
_SEGMENTS = [
    Segment((0, 1), 0, 5, -1),
    Segment((0,), 5, 8, 0),
    Segment((1,), 5, 9, 0),
    Segment((2,), 0, 4, -1),
]
_ROW_LENGTH = 16
# What rounding may do in float32: so much, and this share of what strangers do when no mask keeps them out, which tells
# how far the model's log-probabilities are from constant.
_ROUNDING = 1e-6
_ROUNDING_SHARE = 1e-4


def find_mask_fault(model: CausalModel, max_length: int) -> str | None:
    """Return why rows of several sequences would be computed wrongly, or None where they are not.

    Args:
        model: Loaded; float32 arithmetic is used whatever its precision.
        max_length: The longest sequence that will be trained on, in tokens.
    """
    window = model.attention_window
    if window is not None and window < max_length:
        return (
            f"its layers see {window} tokens back, less than policy.max_total_sequence_length={max_length}, and an "
            "attention mask of ours would replace that window"
        )
    try:
        with torch.no_grad():
            shared, alone, unmasked = _forward_passes(model)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, AssertionError) as error:
        return f"it does not take a 4-D attention mask with position ids: {first_line(error)}"
    deviation, leak = _distance(shared, alone), _distance(unmasked, alone)
    if deviation <= _ROUNDING + _ROUNDING_SHARE * leak:
        return None
    return (
        f"log-probabilities of sequences that share a row differ by {deviation:.1e} from those of each alone "
        f"({leak:.1e} without any mask): it does not honour a 4-D attention mask with position ids"
    )


def _forward_passes(model: CausalModel) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits of the row with our mask, of its sequences alone, and of the row without mask; [16, V] each."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(model.vocab_size, (_ROW_LENGTH,), generator=generator)
    position_ids = torch.cat([torch.arange(segment.start, segment.end) for segment in _SEGMENTS])
    mask = visible(_SEGMENTS, _ROW_LENGTH)[None, None]
    prompt, first, second, stranger = torch.split(row, [s.end - s.start for s in _SEGMENTS])
    shared = _logits(model, row, position_ids[None].to(model.device), mask.to(model.device))
    with_first, with_second = (_logits(model, torch.cat([prompt, answer])) for answer in (first, second))
    alone = torch.cat([with_first, with_second[len(prompt) :], _logits(model, stranger)])
    return shared, alone, _logits(model, row)


def _logits(
    model: CausalModel, tokens: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    places = torch.arange(tokens.numel(), device=model.device)
    return model.logits_at(tokens[None].to(model.device), places, position_ids, mask, exact=True)


def _distance(left: Tensor, right: Tensor) -> float:
    return float((left.log_softmax(-1) - right.log_softmax(-1)).abs().max())
