"""Short ways to cut a batch into the micro-batches of one rank, and to train on them."""

from typing import Any

import torch
from torch import Tensor

from rl.core.batch import TrainBatch
from rl.trainer.batching import Batching
from rl.trainer.config import PolicySettings
from rl.trainer.forward_backward import Work, compute_logprobs
from rl.trainer.layout import lay_out
from rl.trainer.loss_path import ForwardSettings
from rl.trainer.model import CausalModel
from rl.trainer.two_passes import logprobs_and_entropy


def cut(batch: TrainBatch, counted: Tensor | None = None, **settings: Any) -> list[Work]:
    """Cut as the settings of the `policy` section say; prefixes are shared only if they say share_prefixes=on."""
    chosen = PolicySettings(**({"model_name": "tiny", "share_prefixes": "off"} | settings))
    batching = Batching.for_training(chosen, can_share=True)
    [works] = batching.cut(batch, batch.token_weights > 0 if counted is None else counted, 1)
    return works


def logprobs_with_graph(
    model: CausalModel, work: Work, settings: ForwardSettings, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the sampled tokens of one micro-batch, [T] each."""
    layout = lay_out(work.batch, work.rows, work.batch.loss_mask, work.width)
    return logprobs_and_entropy(model, layout, work.batch.loss_mask, settings, entropy_gradient=entropy_gradient)


def score(model: CausalModel, batch: TrainBatch, temperature: float = 1.0, **settings: Any) -> Tensor:
    """Log-probabilities of the sampled tokens, [T], in the order of the batch."""
    works = cut(batch, batch.loss_mask, **settings)
    parts = compute_logprobs(model, works, ForwardSettings(temperature, "torch"))
    logprobs = torch.zeros(batch.num_tokens, dtype=parts[0].dtype if parts else torch.float32)
    for work, part in zip(works, parts, strict=True):
        logprobs[batch.positions_of(work.numbers)] = part
    return logprobs
