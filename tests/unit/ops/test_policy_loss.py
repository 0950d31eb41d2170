"""The native policy loss against its torch form: values, gradients, metrics; and what torch asks of an operator."""

import dataclasses
import doctest
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import rl.ops.policy_loss
from rl.algorithms.counted_tokens import CountedTokens
from rl.algorithms.native_loss import NativePolicyLoss, native_form
from rl.algorithms.policy_gradient import PolicyGradientLoss
from rl.core.batch import TrainBatch
from rl.core.errors import FatalError
from rl.core.metrics import Metric
from rl.core.native import require_native
from rl.ops.policy_loss import (
    CorrectionKind,
    PolicyLossParams,
    PolicyLossTokens,
    PolicyMetric,
    RatioKind,
    SurrogateKind,
    policy_loss,
    sequence_reduce,
)
from tests.support.losses import objective
from tests.support.rollouts import loss_batch, scatter_sampled

# Each group is one part of an objective.
RATIOS: list[dict[str, Any]] = [
    {},
    {"use_cispo": True},
    {"ratio_clip_c": 1.2, "ratio_clip_min": 0.1, "ratio_clip_max": 0.3},
    {"disable_ppo_ratio": True},
    {"force_on_policy_ratio": True},
    {"sequence_level_importance_ratios": True, "token_level_loss": False},
    {"sequence_level_importance_ratios": True, "token_level_loss": False, "use_cispo": True},
]
_BOUNDS = {"truncated_importance_sampling_ratio": 1.1, "truncated_importance_sampling_ratio_min": 0.9}
CORRECTIONS: list[dict[str, Any]] = [
    {},
    {"use_importance_sampling_correction": True},
    {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis", **_BOUNDS},
    {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "icepop", **_BOUNDS},
]
KLS: list[dict[str, Any]] = [
    {},
    {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": "k1"},
    {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": "k2", "kl_output_clamp_value": 0.05},
    {"reference_policy_kl_penalty": 0.3, "kl_input_clamp_value": 0.3},
    {"reference_policy_kl_penalty": 0.3, "use_on_policy_kl_approximation": True, "kl_output_clamp_value": None},
    {"reference_policy_kl_penalty": 0.3, "use_kl_in_reward": True},
]
TERMS: list[dict[str, Any]] = [
    {},
    {"entropy_coef": 0.1, "positive_example_nll_weight": 0.2},
    {"token_level_loss": False, "sequence_loss_divisor": 7, "entropy_coef": 0.1},
]
LENGTHS = [5, 1, 9, 3]
SAMPLE_WEIGHTS = [1.0, 0.5, 1.0, 0.0]


def _batch(spread: float = 0.2, seed: int = 0, has_prev: bool = True) -> tuple[TrainBatch, Tensor, Tensor]:
    """A batch of four sequences, the last without weight; with log-probabilities and entropies of all its tokens."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)

    def near(values: Tensor) -> Tensor:
        return values + spread * torch.randn(count, generator=generator)

    logprobs = -2 + 0.5 * torch.randn(count, generator=generator)
    prev = near(logprobs)
    batch = loss_batch(
        near(prev).tolist(),
        advantages=torch.randn(count, generator=generator).tolist(),
        prev_logprobs=prev.tolist() if has_prev else None,
        reference_logprobs=near(logprobs).tolist(),
        lengths=LENGTHS,
        sample_weights=SAMPLE_WEIGHTS,
    ).with_columns(rewards=torch.tensor([1.0, -1.0, 0.5, 1.0]))
    entropy = torch.rand(count, generator=generator)
    return (
        batch.with_counts(batch.count()).at_version(0),
        scatter_sampled(batch.loss_mask, logprobs),
        scatter_sampled(batch.loss_mask, entropy),
    )


def _native(loss: PolicyGradientLoss) -> NativePolicyLoss:
    form = native_form(loss)
    assert isinstance(form, NativePolicyLoss), form
    return form


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A loss, its gradients by every token's log-probability and entropy, and its metrics."""

    loss: float
    grad_logprobs: Tensor
    grad_entropy: Tensor
    metrics: dict[str, Metric]


def _by_torch(loss: PolicyGradientLoss, batch: TrainBatch, logprobs: Tensor, entropy: Tensor) -> Outcome:
    leaves = [column.clone().requires_grad_() for column in (logprobs, entropy)]
    sums = loss(leaves[0], leaves[1], batch)
    grads = torch.autograd.grad(sums.loss, leaves, allow_unused=True)
    dense = [torch.zeros_like(logprobs) if grad is None else grad for grad in grads]
    return Outcome(sums.loss.item(), dense[0], dense[1], dict(sums.metrics))


def _by_operator(loss: PolicyGradientLoss, batch: TrainBatch, logprobs: Tensor, entropy: Tensor) -> Outcome:
    native = _native(loss)
    leaves = [column.clone().requires_grad_() for column in (logprobs, entropy)]
    index = CountedTokens.of(batch, logprobs, needs_prev=False).index
    result = policy_loss(leaves[0][index], leaves[1][index], native.tokens(batch), native.params)
    grads = torch.autograd.grad(result.loss, leaves)
    sums = native.sums(result.metrics, logprobs, batch)
    return Outcome(result.loss.item(), grads[0], grads[1], dict(sums.metrics))


def _assert_agree(got: Outcome, want: Outcome, term: float = 1.0) -> None:
    """`term` is the size of the terms of either sign that the loss, and the KL penalty, are sums of."""
    for mine, other in ((got.grad_logprobs, want.grad_logprobs), (got.grad_entropy, want.grad_entropy)):
        largest = max(1.0, other.abs().max().item())
        torch.testing.assert_close(mine.double(), other.double(), rtol=1e-5, atol=1e-5 * largest)
    assert got.loss == pytest.approx(want.loss, rel=1e-5, abs=1e-5 * term)
    assert got.metrics.keys() == want.metrics.keys()
    for name, metric in want.metrics.items():
        assert got.metrics[name].per is metric.per, name
        bound = 1e-5 * (term if name in ("loss", "kl_penalty") else 1.0)
        assert got.metrics[name].value == pytest.approx(metric.value, rel=1e-5, abs=bound), name


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_objective_agrees_with_its_torch_form(ratio: dict[str, Any], correction: dict[str, Any]) -> None:
    # Terms are added to what else there is; the sampled test below has them beside every penalty.
    with_prev = [*((kl, TERMS[0]) for kl in KLS), *((KLS[0], terms) for terms in TERMS[1:])]
    cases = [*((True, *case) for case in with_prev), *((False, kl, TERMS[0]) for kl in KLS)]
    for has_prev, kl, terms in cases:
        loss = objective(not has_prev, **(terms | kl | correction | ratio))
        columns = _batch(has_prev=has_prev)
        _assert_agree(_by_operator(loss, *columns), _by_torch(loss, *columns))


_GAP = st.floats(-2, 2, width=32)
_LARGE_GAP = st.one_of(_GAP, st.sampled_from([0.0, 20.5, -20.5, 23.0]))
# logprob, then the gaps: prev - logprob, generation - prev, reference - logprob; advantage, entropy.
_TOKEN = st.tuples(
    st.floats(-30, 0, width=32), _LARGE_GAP, _GAP, _GAP, st.floats(-3, 3, width=32), st.floats(0, 2, width=32)
)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.lists(_TOKEN, min_size=1, max_size=6), min_size=1, max_size=4),
    weights=st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=4, max_size=4),
    parts=st.tuples(*[st.sampled_from(group) for group in (TERMS, KLS, CORRECTIONS, RATIOS)]),
)
def test_any_values_agree_with_the_torch_form_in_float64(
    tokens: list[list[tuple[float, ...]]], weights: list[float], parts: tuple[dict[str, Any], ...]
) -> None:
    rows = torch.tensor([token for sequence in tokens for token in sequence])
    logprobs, entropy = rows[:, 0], rows[:, 5]
    prev = logprobs + rows[:, 1]
    batch = loss_batch(
        (prev + rows[:, 2]).tolist(),
        advantages=rows[:, 4].tolist(),
        prev_logprobs=prev.tolist(),
        reference_logprobs=(logprobs + rows[:, 3]).tolist(),
        lengths=[len(sequence) for sequence in tokens],
        sample_weights=weights[: len(tokens)],
    )
    batch = batch.with_counts(batch.count())
    options = {key: value for part in parts for key, value in part.items()}
    loss = objective(**options)
    columns = [scatter_sampled(batch.loss_mask, column) for column in (logprobs, entropy)]
    want = _by_torch(loss, batch, *(column.double() for column in columns))
    # Advantages are at most 3; weights of sequences, and those of a KL on other tokens, are exponentials of gaps.
    weight = want.metrics["sampling_importance_ratio"].value
    term = 1 + want.grad_logprobs.abs().sum().item() + 10 * weight
    if loss.kl.on_policy_weight:
        term += 10 * math.exp(max(0.0, (-rows[:, 1] - rows[:, 2]).max().item()))
    _assert_agree(_by_operator(loss, batch, *columns), want, term)


@pytest.mark.parametrize(
    ("kind", "factors"),
    [
        (CorrectionKind.OFF, [1.0, 1.0, 1.0]),
        (CorrectionKind.RAW, [0.5, 1.0, 4.0]),
        (CorrectionKind.TIS, [0.75, 1.0, 2.0]),
        (CorrectionKind.ICEPOP, [0.0, 1.0, 0.0]),
    ],
)
def test_a_correction_multiplies_the_loss_as_its_kind_says(kind: CorrectionKind, factors: list[float]) -> None:
    prev, ones = torch.full((3,), -1.0), torch.ones(3)
    generation = prev - torch.tensor([0.5, 1.0, 4.0]).log()
    tokens = PolicyLossTokens(generation, advantages=ones, shares=ones, weights=ones, prev_logprobs=prev)
    params = _params(correction=kind, correction_low=0.75, correction_high=2.0, entropy_coef=0.0)
    leaf = prev.clone().requires_grad_()
    loss = policy_loss(leaf, ones, tokens, params).loss
    (grad,) = torch.autograd.grad(loss, [leaf])
    assert grad.tolist() == pytest.approx([-factor for factor in factors])
    assert loss.item() == pytest.approx(-sum(factors))


def test_log_ratios_beyond_the_clamp_count_and_learn_nothing_in_both_forms() -> None:
    batch = loss_batch([-1.0, -1.0], [1.0, 1.0], [-25.0, -1.0], [-1.0, -1.0])
    columns = (batch, *(scatter_sampled(batch.loss_mask, torch.tensor(v)) for v in ([-1.0, -1.2], [0.1, 0.2])))
    loss = objective(use_cispo=False)
    outcomes = _by_operator(loss, *columns), _by_torch(loss, *columns)
    _assert_agree(*outcomes)
    for outcome in outcomes:
        assert outcome.grad_logprobs[1] == 0.0
        assert outcome.metrics["num_clamped_log_ratios"].value == 1.0


# Without a stop-gradient in the formula, so that finite differences see what autograd sees.
DIFFERENTIABLE: list[dict[str, Any]] = [
    {},
    {"ratio_clip_c": 1.2},
    {"disable_ppo_ratio": True, "entropy_coef": 0.1},
    {"sequence_level_importance_ratios": True, "token_level_loss": False},
    CORRECTIONS[2],
    {"positive_example_nll_weight": 0.2},
    KLS[4],
]


@pytest.mark.parametrize("options", DIFFERENTIABLE)
def test_the_torch_form_passes_gradcheck_in_float64(options: dict[str, Any]) -> None:
    batch, logprobs, entropy = _batch()
    loss = objective(**options)
    leaves = (logprobs.double().requires_grad_(), entropy.double().requires_grad_())
    assert torch.autograd.gradcheck(lambda x, h: loss(x, h, batch).loss + 0 * h.sum(), leaves)


def _params(**changes: Any) -> PolicyLossParams:
    params = PolicyLossParams(
        ratio=RatioKind.TOKEN,
        surrogate=SurrogateKind.CLIP,
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=None,
        correction=CorrectionKind.TIS,
        correction_low=0.0,
        correction_high=2.0,
        kl="k3",
        kl_coef=0.1,
        kl_importance_weight=False,
        kl_input_clamp=20.0,
        kl_output_clamp=None,
        entropy_coef=0.01,
    )
    return dataclasses.replace(params, **changes)


def _columns(count: int = 64) -> tuple[Tensor, Tensor, PolicyLossTokens]:
    generator = torch.Generator().manual_seed(1)
    logprobs = -2 + torch.randn(count, generator=generator)

    def near() -> Tensor:
        return logprobs + 0.2 * torch.randn(count, generator=generator)

    tokens = PolicyLossTokens(
        generation_logprobs=near(),
        advantages=torch.randn(count, generator=generator),
        shares=torch.rand(count, generator=generator),
        weights=(torch.rand(count, generator=generator) > 0.2).float(),
        prev_logprobs=near(),
        reference_logprobs=near(),
        nll_coefs=0.1 * torch.rand(count, generator=generator),
    )
    return logprobs, torch.rand(count, generator=generator), tokens


def _with_sequences(tokens: PolicyLossTokens) -> PolicyLossTokens:
    count = tokens.weights.numel()
    return dataclasses.replace(tokens, sequence_offsets=torch.tensor([0, 3, 3, count]), sequence_weights=torch.ones(3))


@pytest.fixture
def thread_count() -> Iterator[None]:
    """Restore the number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("by_sequence", [False, True])
def test_opcheck_passes(by_sequence: bool) -> None:
    require_native()
    logprobs, entropy, tokens = _columns()
    tokens = _with_sequences(tokens) if by_sequence else tokens
    params = _params(ratio=RatioKind.SEQUENCE if by_sequence else RatioKind.TOKEN)
    leaves = (logprobs.requires_grad_(), entropy.requires_grad_())
    torch.library.opcheck(
        torch.ops.tandem.policy_loss.default, (*leaves, *tokens.columns(), params.kinds(), params.numbers())
    )
    offsets = torch.tensor([0, 10, 64])
    torch.library.opcheck(torch.ops.tandem.sequence_reduce.default, (entropy.detach(), None, offsets, True))


def test_a_whole_graph_compiles_and_gives_the_same_numbers() -> None:
    require_native()
    logprobs, entropy, tokens = _columns()
    params = _params()

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        result = policy_loss(2 * x, h, tokens, params)
        return result.loss, result.metrics

    def outcome(function: Any) -> list[Tensor]:
        leaves = [logprobs.clone().requires_grad_(), entropy.clone().requires_grad_()]
        loss, metrics = function(*leaves)
        return [loss.detach(), metrics, *torch.autograd.grad(loss, leaves)]

    for got, want in zip(outcome(torch.compile(step, fullgraph=True)), outcome(step), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_results_are_bitwise_equal_on_one_and_two_threads(thread_count: None) -> None:
    logprobs, entropy, tokens = _columns(20_001)

    def outcome(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        leaves = [logprobs.clone().requires_grad_(), entropy.clone().requires_grad_()]
        result = policy_loss(leaves[0], leaves[1], tokens, _params())
        return [result.metrics, *torch.autograd.grad(result.loss, leaves)]

    for one, two in zip(outcome(1), outcome(2), strict=True):
        assert torch.equal(one, two)


def test_the_example_of_an_objective_says_what_comes_out() -> None:
    examples = doctest.DocTestFinder(recurse=False).find(PolicyLossParams, globs=dict(vars(rl.ops.policy_loss)))
    assert [doctest.DocTestRunner().run(example) for example in examples] == [doctest.TestResults(0, 6)]


def test_the_upstream_gradient_scales_both_gradients() -> None:
    logprobs, entropy, tokens = _columns()
    leaves = [logprobs.requires_grad_(), entropy.requires_grad_()]
    plain = torch.autograd.grad(policy_loss(leaves[0], leaves[1], tokens, _params()).loss, leaves)
    scaled = torch.autograd.grad(-4 * policy_loss(leaves[0], leaves[1], tokens, _params()).loss, leaves)
    assert all(torch.equal(-4 * a, b) for a, b in zip(plain, scaled, strict=True))
    assert plain[1].tolist() == pytest.approx((-0.01 * tokens.shares * tokens.weights).tolist())


def test_a_graph_is_walked_once() -> None:
    logprobs, entropy, tokens = _columns()
    loss = policy_loss(logprobs.requires_grad_(), entropy, tokens, _params()).loss
    torch.autograd.backward(loss, retain_graph=True)
    first = logprobs.grad
    assert first is not None and entropy.grad is None
    before = first.clone()
    with pytest.raises(FatalError, match="policy_loss: this graph has been walked"):
        torch.autograd.backward(loss)
    assert torch.equal(first, before)


@pytest.mark.parametrize("factor", [1.0, -4.0])
def test_the_gradients_of_leaves_are_the_operators_own_memory(factor: float) -> None:
    logprobs, entropy, tokens = _columns()
    leaves = [logprobs.requires_grad_(), entropy.requires_grad_()]
    loss = policy_loss(leaves[0], leaves[1], tokens, _params()).loss
    node = loss.grad_fn
    assert node is not None
    waiting = [gradient.data_ptr() for gradient in node.gradients]  # type: ignore[attr-defined]  # of the function
    torch.autograd.backward(factor * loss)
    assert [leaf.grad.data_ptr() for leaf in leaves if leaf.grad is not None] == waiting


def test_no_gradient_is_kept_where_none_is_wanted() -> None:
    logprobs, entropy, tokens = _columns()
    with torch.no_grad():
        result = policy_loss(logprobs.requires_grad_(), entropy, tokens, _params())
    assert not result.loss.requires_grad and not result.metrics.requires_grad


def test_tokens_that_share_a_row_add_to_its_gradient() -> None:
    logprobs, entropy, tokens = _columns()
    lengths = torch.arange(32) % 3
    rows = torch.repeat_interleave(torch.arange(32), lengths)
    count = rows.numel()
    parts = {
        field.name: None if value is None else value[:count]
        for field, value in zip(dataclasses.fields(tokens), _fields(tokens), strict=True)
    }
    tokens = PolicyLossTokens(**parts)
    leaves = [logprobs[:32].clone().requires_grad_(), entropy[:32].clone().requires_grad_()]
    apart = policy_loss(leaves[0][rows], leaves[1][rows], tokens, _params())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    shared = policy_loss(leaves[0], leaves[1], dataclasses.replace(tokens, row_offsets=offsets), _params())
    assert torch.equal(apart.metrics, shared.metrics)
    for want, got in zip(
        torch.autograd.grad(apart.loss, leaves), torch.autograd.grad(shared.loss, leaves), strict=True
    ):
        torch.testing.assert_close(got, want)


def _fields(tokens: PolicyLossTokens) -> list[Tensor | None]:
    return [tokens.__dict__[field.name] for field in dataclasses.fields(tokens)]


def test_metrics_have_names_and_no_tokens_give_none_of_them() -> None:
    empty = torch.zeros(0)
    tokens = PolicyLossTokens(generation_logprobs=empty, advantages=empty, shares=empty, weights=empty)
    result = policy_loss(empty, empty, tokens, _params())
    named = result.named_metrics()
    assert list(named) == list(PolicyMetric)
    assert result.loss.item() == 0.0
    extrema = {PolicyMetric.RATIO_MIN, PolicyMetric.RATIO_CLAMPED_MIN}
    assert {key for key, value in named.items() if value == math.inf} == extrema


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_what_a_token_of_weight_zero_holds_reaches_nothing(garbage: float) -> None:
    logprobs, entropy, tokens = _columns()
    is_masked = tokens.weights == 0

    def outcome(filler: float) -> list[Tensor]:
        def fill(column: Tensor) -> Tensor:
            return torch.where(is_masked, filler, column)

        parts = {
            field.name: value if value is None or field.name == "weights" else fill(value)
            for field, value in zip(dataclasses.fields(tokens), _fields(tokens), strict=True)
        }
        leaves = [fill(logprobs).requires_grad_(), fill(entropy).requires_grad_()]
        result = policy_loss(leaves[0], leaves[1], PolicyLossTokens(**parts), _params())
        return [result.metrics, *torch.autograd.grad(result.loss, leaves)]

    assert is_masked.any()
    for got, want in zip(outcome(garbage), outcome(0.0), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("mean", [False, True])
def test_sequence_reduce_agrees_with_torch(mean: bool) -> None:
    values, weights = torch.randn(10), torch.tensor([1.0, 0.5, 0.0, 2.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    values[2] = math.nan
    offsets = torch.tensor([0, 4, 6, 6, 10])
    want = []
    for begin, end in itertools.pairwise(offsets.tolist()):
        kept = weights[begin:end] > 0
        total = (weights[begin:end] * values[begin:end])[kept].sum()
        want.append(total / max(1, int(kept.sum())) if mean else total)
    torch.testing.assert_close(sequence_reduce(values, weights, offsets, mean=mean), torch.stack(want))


def test_bad_arguments_are_named() -> None:
    logprobs, entropy, tokens = _columns()
    for name in ("advantages", "prev_logprobs", "weights"):
        broken = dataclasses.replace(tokens, **{name: tokens.__dict__[name].double()})
        with pytest.raises(RuntimeError, match=f"^{name}: want float32, got float64"):
            policy_loss(logprobs, entropy, broken, _params())
    with pytest.raises(RuntimeError, match="entropy: want"):
        policy_loss(logprobs, entropy[:-1], tokens, _params())
    with pytest.raises(RuntimeError, match="row_offsets"):
        offsets = torch.zeros(65, dtype=torch.int64)
        policy_loss(logprobs, entropy, dataclasses.replace(tokens, row_offsets=offsets), _params())
    with pytest.raises(RuntimeError, match="^num_sequences"):
        policy_loss(logprobs, entropy, tokens, _params(ratio=RatioKind.SEQUENCE))
    falling = dataclasses.replace(_with_sequences(tokens), sequence_offsets=torch.tensor([0, 5, 3, 64]))
    with pytest.raises(RuntimeError, match="^sequence_offsets: want offsets that do not decrease"):
        policy_loss(logprobs, entropy, falling, _params(ratio=RatioKind.SEQUENCE))


def test_a_sequences_sum_has_no_graph() -> None:
    values = torch.ones(3, requires_grad=True)
    assert not sequence_reduce(values, None, torch.tensor([0, 3]), mean=True).requires_grad
