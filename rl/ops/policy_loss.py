"""The policy-gradient loss of a micro-batch by the fused operator of csrc/loss, with gradients and metric sums.

One pass over the tokens gives the loss, its derivatives by log-probability and entropy, and every sum behind the
metrics. The formulas stand in csrc/loss/policy_loss.h; the plain torch form, which serves as its reference and covers
what the operator does not, is `rl.algorithms.policy_gradient`. Nothing here divides by a count, and nothing here reads
a configuration: which objective is which `PolicyLossParams` is the algorithms' business.

    result = policy_loss(logprobs, entropy, tokens, params)
    result.loss.backward()
    result.named_metrics()[PolicyMetric.RATIO]
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl.core.errors import FatalError
from rl.core.native import on_load, require_native
from rl.ops.kl import KlEstimator


class RatioKind(enum.Enum):
    """What the advantage multiplies; numbers are those of csrc/loss/policy_loss.h, here and below."""

    TOKEN = 0  # exp(logprob - prev_logprob)
    ON_POLICY = 1  # 1, with the gradient of the log-probability
    NONE = 2  # the log-probability
    SEQUENCE = 3  # exp(mean over the sequence of logprob - prev_logprob); corrections are per sequence too


class SurrogateKind(enum.Enum):
    """How advantage A and ratio r make a loss; clip(r) is r within [1 - clip_low, 1 + clip_high]."""

    CLIP = 0  # max(-A r, -A clip(r)); with dual_clip c and A < 0, at most -A c
    CISPO = 1  # -A clip(r) logprob, without gradient through clip(r)
    UNCLIPPED = 2  # -A r, whatever the ratio is


class CorrectionKind(enum.Enum):
    """What becomes of the weight w = exp(prev_logprob - generation_logprob) that a token's loss is multiplied by.

    With SEQUENCE ratios the exponent is the sum over the sequence. A w that is no finite number is 0.
    """

    OFF = 0  # 1 in the loss; w is a metric only
    RAW = 1  # w
    TIS = 2  # clamp(w, correction_low, correction_high)
    ICEPOP = 3  # w where correction_low <= w <= correction_high, else 0


class PolicyMetric(enum.Enum):
    """What the operator sums up, by its place in the result: see csrc/loss/policy_loss.h.

    Sums over tokens are weighted by `weights`, unless said otherwise; the extrema are +inf and -inf where no token
    counts.
    """

    LOSS = 0
    KL_PENALTY = 1  # sum of shares x KL, its coefficient left out
    NLL = 2  # sum of nll_coefs x -logprob
    ENTROPY = 3
    RATIO = 4
    RATIO_CLAMPED = 5
    RATIO_MIN = 6
    RATIO_MAX = 7
    RATIO_CLAMPED_MIN = 8
    RATIO_CLAMPED_MAX = 9
    CLIP_LOW = 10
    CLIP_HIGH = 11
    DUAL_CLIP = 12
    CORRECTION = 13  # with SEQUENCE ratios, over sequences and weighted by sequence_weights
    OUTSIDE = 14
    MULT_PROB_ERROR = 15
    GENERATION_KL = 16
    POLICY_KL = 17
    JS_DIVERGENCE = 18
    APPROX_ENTROPY = 19
    CLAMPED_LOG_RATIOS = 20  # number of tokens, unweighted


_KL_KINDS: dict[KlEstimator, int] = {"k1": 0, "k2": 1, "k3": 2}


@dataclass(frozen=True)
class PolicyLossParams:
    """One objective.

    Clipped ratios, truncated generator weights and a KL penalty; ratios are 1 here, for there are no prev_logprobs:

        >>> params = PolicyLossParams(
        ...     ratio=RatioKind.TOKEN,
        ...     surrogate=SurrogateKind.CLIP,
        ...     clip_low=0.2,
        ...     clip_high=0.28,
        ...     dual_clip=None,
        ...     correction=CorrectionKind.TIS,
        ...     correction_low=0.0,
        ...     correction_high=2.0,
        ...     kl="k3",
        ...     kl_coef=0.01,
        ...     kl_importance_weight=False,
        ...     kl_input_clamp=20.0,
        ...     kl_output_clamp=10.0,
        ...     entropy_coef=0.0,
        ... )
        >>> logprobs, entropy = torch.tensor([-1.0, -2.0], requires_grad=True), torch.ones(2)
        >>> tokens = PolicyLossTokens(
        ...     generation_logprobs=torch.tensor([-1.0, -2.0]),
        ...     advantages=torch.tensor([1.0, -0.5]),
        ...     shares=torch.tensor([0.5, 0.5]),  # the mean over both tokens
        ...     weights=torch.ones(2),
        ...     reference_logprobs=torch.tensor([-1.0, -2.0]),
        ... )
        >>> result = policy_loss(logprobs, entropy, tokens, params)
        >>> result.loss.backward()
        >>> result.loss.item(), logprobs.grad
        (-0.25, tensor([-0.5000,  0.2500]))

    Attributes:
        ratio: What the advantage multiplies.
        surrogate: Clipped, CISPO, or neither.
        clip_low: Ratios are clipped to at least 1 - clip_low.
        clip_high: Ratios are clipped to at most 1 + clip_high.
        dual_clip: The constant of dual clip, > 1, or None; for CLIP.
        correction: What becomes of the generator weights.
        correction_low: Lower bound of TIS and ICEPOP.
        correction_high: Upper bound of TIS and ICEPOP; infinity for none.
        kl: The estimator, also that of the metrics that compare trainer and generator.
        kl_coef: Weight of the KL term; 0 where it is reported only.
        kl_importance_weight: Weigh estimates by p / p_generation instead of by 1.
        kl_input_clamp: Bound of the estimator's log-ratio, or None.
        kl_output_clamp: Bound of the estimate, or None.
        entropy_coef: Weight of the entropy bonus.
    """

    ratio: RatioKind
    surrogate: SurrogateKind
    clip_low: float
    clip_high: float
    dual_clip: float | None
    correction: CorrectionKind
    correction_low: float
    correction_high: float
    kl: KlEstimator
    kl_coef: float
    kl_importance_weight: bool
    kl_input_clamp: float | None
    kl_output_clamp: float | None
    entropy_coef: float

    def kinds(self) -> list[int]:
        """Return what an operator's argument `kinds` holds: ratio, surrogate, correction, kl, kl_importance_weight."""
        parts = (self.ratio, self.surrogate, self.correction)
        return [*(part.value for part in parts), _KL_KINDS[self.kl], int(self.kl_importance_weight)]

    def numbers(self) -> list[float]:
        """Return what an operator's argument `numbers` holds.

        clip_low, clip_high, dual_clip (0 = none), correction_low, correction_high, kl_coef, kl_input_clamp,
        kl_output_clamp (infinity = none), entropy_coef.
        """
        unbounded = float("inf")
        return [
            self.clip_low,
            self.clip_high,
            0.0 if self.dual_clip is None else self.dual_clip,
            self.correction_low,
            self.correction_high,
            self.kl_coef,
            unbounded if self.kl_input_clamp is None else self.kl_input_clamp,
            unbounded if self.kl_output_clamp is None else self.kl_output_clamp,
            self.entropy_coef,
        ]


@dataclass(frozen=True, eq=False)
class PolicyLossTokens:
    """T tokens that look at R rows of log-probabilities; contiguous [T] float32 columns without gradient.

    Attributes:
        generation_logprobs: Of the generator.
        advantages: What the ratio is multiplied by.
        shares: Factor of each token's loss in the sum.
        weights: Of each token in metric sums; a token of weight 0 does not count and is not looked at.
        prev_logprobs: Of the policy at the start of the step; None: the log-probability itself, without gradient.
        reference_logprobs: Of the reference; None: no KL.
        nll_coefs: Factor of each token's negative log-likelihood in the loss; None: no such term.
        row_offsets: [R + 1] int64, tokens of row r are row_offsets[r] ... row_offsets[r + 1] - 1; None: token i has
            row i.
        sequence_offsets: [S + 1] int64 from 0 to T, with SEQUENCE ratios alone; rows are then tokens.
        sequence_weights: [S], weight of each sequence in metric sums; likewise.
    """

    generation_logprobs: Tensor
    advantages: Tensor
    shares: Tensor
    weights: Tensor
    prev_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    nll_coefs: Tensor | None = None
    row_offsets: Tensor | None = None
    sequence_offsets: Tensor | None = None
    sequence_weights: Tensor | None = None

    def columns(self) -> tuple[Tensor | None, ...]:
        """Return the tensors in the order in which operators take them."""
        return (
            self.prev_logprobs,
            self.reference_logprobs,
            self.generation_logprobs,
            self.advantages,
            self.shares,
            self.weights,
            self.nll_coefs,
            self.row_offsets,
            self.sequence_offsets,
            self.sequence_weights,
        )


@dataclass(frozen=True, eq=False)
class PolicyLossResult:
    """What one pass gives.

    Attributes:
        loss: Scalar float32; with gradient by log-probabilities and entropy.
        metrics: [len(PolicyMetric)] float64 without gradient, in the order of `PolicyMetric`.
    """

    loss: Tensor
    metrics: Tensor

    def named_metrics(self) -> dict[PolicyMetric, float]:
        """Return the metrics by name; reads the device once."""
        return name_metrics(self.metrics)


def name_metrics(metrics: Tensor) -> dict[PolicyMetric, float]:
    """Name the [len(PolicyMetric)] numbers of an operator; reads the device once."""
    return dict(zip(PolicyMetric, metrics.tolist(), strict=True))


def policy_loss(
    logprobs: Tensor, entropy: Tensor, tokens: PolicyLossTokens, params: PolicyLossParams
) -> PolicyLossResult:
    """Return the loss of the tokens, and the sums behind its metrics.

    Outside torch.compile the graph can be walked once, because the gradients are scaled in place.

    Args:
        logprobs: [R] float32, of the trained policy.
        entropy: [R] float32; its gradient is that of the entropy bonus.
        tokens: the T tokens, on the device of `logprobs`.
        params: the objective.

    Raises:
        FatalError: the native library is missing; or, in the backward, the graph has already been walked.
        RuntimeError: a column has the wrong shape, dtype, device or layout; the message names it.
    """
    arguments = (*tokens.columns(), params.kinds(), params.numbers())
    require_native()
    if torch.compiler.is_compiling():
        _, _, metrics = torch.ops.tandem.policy_loss(logprobs, entropy, *arguments)
        return PolicyLossResult(metrics[PolicyMetric.LOSS.value].to(torch.float32), metrics.detach())
    loss, metrics = _ReadyGradients.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        logprobs, entropy, arguments
    )
    return PolicyLossResult(loss, metrics)


def sequence_reduce(values: Tensor, weights: Tensor | None, sequence_offsets: Tensor, *, mean: bool) -> Tensor:
    """Sum or average values x weights over each sequence, without gradient.

    Args:
        values: [T] float32; values of weight 0 are not read.
        weights: [T] float32, or None for ones.
        sequence_offsets: [S + 1] int64.
        mean: divide by the number of tokens whose weight is not 0; a sequence without any gives 0.

    Returns:
        [S] float32.
    """
    require_native()
    reduced: Tensor = torch.ops.tandem.sequence_reduce(values.detach(), weights, sequence_offsets, mean)
    return reduced


class _ReadyGradients(torch.autograd.Function):
    """The operator whose gradients wait in the graph, and become those of the leaves without a copy."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, entropy: Tensor, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        *ctx.gradients, metrics = torch.ops.tandem.policy_loss(logprobs, entropy, *arguments)
        ctx.mark_non_differentiable(metrics)
        ctx.set_materialize_grads(False)
        return metrics[PolicyMetric.LOSS.value].to(torch.float32), metrics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        return *hand_out_gradients(ctx, grad_loss, "policy_loss"), None


def hand_out_gradients(ctx: Any, upstream: Tensor | None, function: str) -> list[Tensor | None]:
    """Scale the gradients that an autograd function has kept in `ctx.gradients`, where they stand, and forget them.

    Forgotten they belong to whom they are handed: autograd then takes their memory for a leaf's `grad`.

    Args:
        ctx: of the function; `gradients` are those of its first arguments.
        upstream: the gradient of its scalar; None: there is none, and nothing happens.
        function: whose graph it is, for the message.

    Raises:
        FatalError: they have been handed out.
    """
    if ctx.gradients is None:
        raise FatalError(
            f"{function}: this graph has been walked, and its gradients are used up; compute the loss again"
        )
    gradients, wanted = ctx.gradients, ctx.needs_input_grad
    if upstream is None:
        return [None] * len(gradients)
    ctx.gradients = None
    # A product with 1 is not made where looking costs nothing; a device would have to be waited for.
    is_one = upstream.device.type == "cpu" and upstream.item() == 1.0
    kept = [gradient if wants else None for gradient, wants in zip(gradients, wanted, strict=False)]
    return [gradient if gradient is None or is_one else gradient.mul_(upstream) for gradient in kept]


def _register_formulas() -> None:
    torch.library.register_fake("tandem::policy_loss", _fake_policy_loss)
    torch.library.register_fake("tandem::sequence_reduce", _fake_sequence_reduce)
    torch.library.register_autograd("tandem::policy_loss", _backward_formula, setup_context=_save_for_backward)


def _fake_policy_loss(logprobs: Tensor, entropy: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    metrics = logprobs.new_empty((len(PolicyMetric),), dtype=torch.float64)
    return torch.empty_like(logprobs), torch.empty_like(entropy), metrics


def _fake_sequence_reduce(values: Tensor, _: Tensor | None, sequence_offsets: Tensor, mean: bool) -> Tensor:
    return values.new_empty((sequence_offsets.shape[0] - 1,))


def _save_for_backward(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor, Tensor]) -> None:
    grad_logprobs, grad_entropy, _ = output
    ctx.save_for_backward(grad_logprobs, grad_entropy)
    ctx.mark_non_differentiable(grad_logprobs, grad_entropy)
    ctx.num_constants = len(inputs) - 2


@once_differentiable
def _backward_formula(ctx: Any, _: Tensor | None, __: Tensor | None, grad_metrics: Tensor) -> tuple[Any, ...]:
    """The loss alone is differentiated: the gradients were computed with it."""
    upstream = grad_metrics[PolicyMetric.LOSS.value].to(torch.float32)
    grad_logprobs, grad_entropy = ctx.saved_tensors
    return upstream * grad_logprobs, upstream * grad_entropy, *[None] * ctx.num_constants


on_load(_register_formulas)
