"""Distillation from a teacher's top-K logits with one vocabulary (Hinton et al. 2015; for sampled text, Agarwal 2024).

With q the teacher's distribution over its K tokens (normalised over them) and p the student's, per counted token:

    forward = sum_K q (log q - log p)      reverse = sum_K p (log p - log q)      mixed = a forward + (1 - a) reverse

p is the student's true probability, so mass outside the K tokens shows; the reverse divergence then sets the teacher's
log-mass outside to -100 and adds sum_rest p log p + 100 P_rest. `zero_outside_topk=False` normalises the student over
the K tokens too: cheaper to reason about, and blind to what stands outside.

Distillation on the student's own samples from single tokens is a policy gradient: see `rl.algorithms.reinforce`.

    sums = TopKDistillation("forward")(student_logits, teacher_logits, teacher_indices, batch)
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rl.algorithms.algorithm import LossSums
from rl.core.batch import TrainBatch
from rl.core.metrics import Metric, Per

_LOG_MASS_OUTSIDE = -100.0


@dataclass(frozen=True)
class TopKDistillation:
    """The loss.

    Attributes:
        kind: Direction of the divergence.
        mixed_weight: a, the weight of the forward one in `mixed`.
        zero_outside_topk: Compare with the student's true probabilities.
    """

    kind: Literal["forward", "reverse", "mixed"] = "mixed"
    mixed_weight: float = 0.5
    zero_outside_topk: bool = True

    def __call__(
        self, student_logits: Tensor, teacher_logits: Tensor, teacher_indices: Tensor, batch: TrainBatch
    ) -> LossSums:
        """Return the sum over tokens.

        Args:
            student_logits: [T, V] float with gradient; row t predicts token t.
            teacher_logits: [T, K] float, of the teacher's K most likely tokens at the same places.
            teacher_indices: [T, K] int64, which tokens those are.
            batch: the micro-batch.

        Raises:
            ValueError: K is 0, or the teacher's two columns differ in shape.
        """
        if teacher_logits.shape != teacher_indices.shape or teacher_logits.shape[-1] == 0:
            shapes = f"{list(teacher_logits.shape)} and {list(teacher_indices.shape)}"
            raise ValueError(f"teacher logits and indices must both be [T, K] with K >= 1, got {shapes}")
        index = (batch.token_weights > 0).nonzero().squeeze(1)
        weights = batch.token_weights[index].to(student_logits.dtype)
        log_q = teacher_logits[index].to(student_logits.dtype).log_softmax(-1)
        losses = self._divergence(student_logits[index], log_q, teacher_indices[index])
        loss = (weights * losses).sum()
        valid = Metric(batch.sample_weights.sum().item(), Per.NONE)
        return LossSums(loss, Per.TOKENS, {"loss": Metric(loss.item(), Per.TOKENS), "num_valid_samples": valid})

    def _divergence(self, logits: Tensor, log_q: Tensor, indices: Tensor) -> Tensor:
        if self.zero_outside_topk:
            log_all = logits.log_softmax(-1)
            log_p = log_all.gather(-1, indices)
        else:
            log_p = logits.gather(-1, indices).log_softmax(-1)
        forward = (log_q.exp() * (log_q - log_p)).sum(-1)
        if self.kind == "forward":
            return forward
        p = log_p.exp()
        reverse = (p * (log_p - log_q)).sum(-1)
        if self.zero_outside_topk:
            # Entropy of the rest as a difference: gathering the complement of K tokens would cost another [T, V].
            inside = (p * log_p).sum(-1)
            reverse = reverse + (log_all.exp() * log_all).sum(-1) - inside
            reverse = reverse - _LOG_MASS_OUTSIDE * (1 - p.sum(-1))
        if self.kind == "reverse":
            return reverse
        return self.mixed_weight * forward + (1 - self.mixed_weight) * reverse
