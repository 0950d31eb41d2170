"""Rows of several sequences give each token what it would get alone, in value and gradient, and leak nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl.core.batch import TrainBatch
from rl.trainer.layout import lay_out, visible
from rl.trainer.loss_path import ForwardSettings
from rl.trainer.model import CausalModel
from rl.trainer.siblings import Segment, Unit
from tests.support.micro_batches import cut, logprobs_with_graph, score
from tests.support.rollouts import make_completion, make_group, make_rollout, random_groups

MODES: dict[str, dict[str, Any]] = {
    "one by one": {"train_micro_batch_size": 1},
    "padded": {"train_micro_batch_size": 16},
    "padded by tokens": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 40, "sequence_length_round": 4}},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 40}},
    "shared": {"share_prefixes": "on"},
    "shared and split": {"share_prefixes": "on", "max_total_sequence_length": 16, "train_micro_batch_size": 1},
    "shared and packed": {"share_prefixes": "on", "sequence_packing": {"enabled": True, "train_mb_tokens": 40}},
}


def load(path: Path, dtype: torch.dtype = torch.float32) -> CausalModel:
    model = CausalModel(path, precision=torch.float32, device="cpu", trust_remote_code=False, seed=0)
    model.module.to(dtype)
    return model


def two_turns() -> TrainBatch:
    """Three siblings whose tools answered alike and differently, beside a stranger."""
    rollouts = []
    for answer, observed, last in ((70, [80, 81], [71, 72]), (70, [80, 81], [73]), (74, [82], [71])):
        turns = [((65, 66), make_completion([answer])), ((65, 66, answer, *observed), make_completion(last))]
        rollouts.append(make_rollout(turns, reward=1.0))
    stranger = make_rollout([((65, 66), make_completion([70, 75]))], reward=1.0)
    return TrainBatch.from_groups([make_group(0, rollouts), make_group(1, [stranger])])


@pytest.mark.parametrize("make", [two_turns, lambda: TrainBatch.from_groups(random_groups(5))], ids=["turns", "random"])
@pytest.mark.parametrize("mode", MODES)
def test_logprobs_and_gradients_equal_those_of_each_sequence_alone(tiny_model: Path, mode: str, make: Any) -> None:
    batch = make()
    weights = torch.linspace(-1, 1, batch.num_tokens, dtype=torch.float64) * batch.loss_mask
    results = []
    for chosen in ("one by one", mode):
        model = load(tiny_model, torch.float64)
        logprobs = torch.zeros(batch.num_tokens, dtype=torch.float64)
        for work in cut(batch, batch.loss_mask, **MODES[chosen]):
            part, entropy = logprobs_with_graph(model, work, ForwardSettings(0.7, "torch"), entropy_gradient=True)
            places = batch.positions_of(work.numbers)
            ((part + 0.1 * entropy) * weights[places]).sum().backward()
            logprobs[places] = part.detach()
        results.append((logprobs, [parameter.grad for parameter in model.parameters()]))
    (expected, wanted), (got, gradients) = results
    assert torch.allclose(got, expected, atol=1e-12, rtol=0)
    for gradient, want in zip(gradients, wanted, strict=True):
        assert gradient is not None and want is not None
        # Not to the last digit: the library's norms are float32 whatever the weights are.
        assert (gradient - want).abs().max() <= 1e-6 * want.abs().max()


@pytest.mark.parametrize("mode", MODES)
def test_float32_logprobs_equal_those_of_each_sequence_alone_to_rounding(tiny_model: Path, mode: str) -> None:
    batch, model = TrainBatch.from_groups(random_groups(6)), load(tiny_model)
    alone = score(model, batch, train_micro_batch_size=1)
    assert torch.allclose(score(model, batch, **MODES[mode]), alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", ["packed", "shared"])
def test_in_bfloat16_masked_rows_are_as_exact_as_plain_ones(tiny_model: Path, mode: str) -> None:
    batch = TrainBatch.from_groups(random_groups(6))
    exact = score(load(tiny_model), batch, train_micro_batch_size=1)
    low = CausalModel(tiny_model, precision=torch.bfloat16, device="cpu", trust_remote_code=False, seed=0)
    plain = (score(low, batch, train_micro_batch_size=1) - exact).abs()
    masked = (score(low, batch, **MODES[mode]) - exact).abs()
    assert masked.max() < 1.5 * plain.max()
    assert masked.mean() < 1.2 * plain.mean()


@pytest.mark.parametrize("share", [False, True])
def test_a_changed_token_of_one_sequence_leaves_its_neighbours_in_the_row_bit_equal(
    tiny_model: Path, share: bool
) -> None:
    answers = [[70, 71, 72], [70, 73], [74, 75]]
    batch = TrainBatch.from_groups([make_group(0, [make_rollout([((65, 66), make_completion(a))]) for a in answers])])
    row = [Unit((0, 1, 2), 6)] if share else [Unit((number,), 4) for number in range(3)]
    changed_tokens = batch.tokens.clone()
    changed_tokens[4] = 99  # the last answer token of sequence 0 but one: a neighbour's past in a leaking row
    model, parts = load(tiny_model), []
    for tokens in (batch.tokens, changed_tokens):
        layout = lay_out(batch.with_columns(tokens=tokens), [row], batch.loss_mask, 16)
        with torch.no_grad():
            logits = model.logits_at(layout.tokens, layout.places, layout.position_ids, layout.mask)
        logprobs = logits.log_softmax(-1).gather(1, layout.targets[:, None])[:, 0][layout.pairs]
        parts.append(torch.zeros(batch.num_tokens).masked_scatter(batch.loss_mask, logprobs))
    before, after = parts
    others = batch.sequence_ids > 0
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[~others], after[~others])


def test_a_row_of_one_sequence_needs_neither_mask_nor_positions(tiny_model: Path) -> None:
    batch = TrainBatch.from_groups(random_groups(2))
    for work in cut(batch):
        layout = lay_out(work.batch, work.rows, work.batch.loss_mask, work.width)
        assert (layout.mask, layout.position_ids) == (None, None)


def test_siblings_that_say_the_same_are_computed_once_and_predicted_once() -> None:
    same = [make_rollout([((65, 66), make_completion([70, 71]))]) for _ in range(3)]
    batch = TrainBatch.from_groups([make_group(0, same)])
    [work] = cut(batch, batch.loss_mask, share_prefixes="on")
    layout = lay_out(work.batch, work.rows, work.batch.loss_mask, work.width)
    assert layout.tokens.tolist() == [[65, 66, 70]]
    assert (layout.places.tolist(), layout.targets.tolist(), layout.pairs.tolist()) == ([1, 2], [70, 71], [0, 1] * 3)


def test_the_last_prompt_token_predicts_the_first_token_of_every_sibling() -> None:
    answers = [make_rollout([((65, 66), make_completion([token]))]) for token in (72, 70, 71)]
    batch = TrainBatch.from_groups([make_group(0, answers)])
    [work] = cut(batch, batch.loss_mask, share_prefixes="on")
    layout = lay_out(work.batch, work.rows, work.batch.loss_mask, work.width)
    assert (layout.places.tolist(), layout.targets.tolist()) == ([1, 1, 1], [70, 71, 72])
    assert layout.targets[layout.pairs].tolist() == [72, 70, 71]


def test_a_position_sees_itself_its_past_and_its_parents_and_padding_sees_padding() -> None:
    segments = [Segment((0, 1), 0, 2, -1), Segment((0,), 2, 3, 0), Segment((1,), 2, 3, 0), Segment((2,), 0, 1, -1)]
    assert visible(segments, 6).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_a_counted_token_outside_the_rows_and_a_row_beyond_the_width_are_refused() -> None:
    batch = two_turns()
    with pytest.raises(ValueError, match="counted token is in no row"):
        lay_out(batch, [[Unit((0,), 6)]], batch.loss_mask, 8)
    with pytest.raises(ValueError, match="a row of 6 positions does not fit in a width of 5"):
        lay_out(batch, [[Unit((0,), 6)]], batch.loss_mask, 5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("settings", "way"),
    [
        (ForwardSettings(1.0, "torch"), "logits_at"),
        (ForwardSettings(1.0, "native"), "hidden_at"),
        (ForwardSettings(1.0, "native", head_fault="it has a bias"), "logits_at"),
    ],
    ids=["torch", "native", "native logits"],
)
def test_tokens_of_the_environment_get_no_logits_and_so_no_gradient_on_any_path(
    untied_model: Path, mode: str, settings: ForwardSettings, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = load(untied_model), two_turns()
    for place in (batch.tokens == 80).nonzero().squeeze(1).tolist():
        assert not batch.loss_mask[place]
    predicted: list[int] = []
    original = getattr(model, way)

    def watch(tokens: Tensor, places: Tensor, *rest: Tensor | None) -> Tensor:
        predicted.extend(tokens.flatten()[places].tolist())
        return original(tokens, places, *rest)

    monkeypatch.setattr(model, way, watch)
    for work in cut(batch, batch.loss_mask, **MODES[mode]):
        logprobs, _ = logprobs_with_graph(model, work, settings, entropy_gradient=False)
        logprobs.sum().backward()
        assert (logprobs[~work.batch.loss_mask] == 0).all()
    # 70 and 74 precede the tool's tokens, 80 precedes 81: what they would predict was not sampled. 70 in the stranger
    # and the last observed token do predict.
    assert set(predicted) == {66, 70, 71, 81, 82}
    assert predicted.count(70) == 1
