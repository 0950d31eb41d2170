"""Micro-batches give each sampled token what it would get alone; observed tokens get no gradient."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl.algorithms.config import LossConfig
from rl.algorithms.objective import parse_objective
from rl.core.batch import TrainBatch
from rl.core.metrics import Counts, Metric, Per
from rl.trainer.forward_backward import (
    ChunkReport,
    accumulate_gradients,
    compute_logprobs,
    merge_reports,
)
from rl.trainer.loss_path import ForwardSettings
from rl.trainer.model import CausalModel
from tests.support.micro_batches import cut, score
from tests.support.rollouts import make_completion, make_group, make_rollout, random_groups

LOSS = parse_objective(LossConfig(reference_policy_kl_penalty=0.0), single_update=True)


def load(path: Path) -> CausalModel:
    return CausalModel(path, precision=torch.float32, device="cpu", trust_remote_code=False, seed=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 16])
def test_logprobs_equal_those_of_each_sequence_alone(
    tiny_model: Path, temperature: float, micro_batch_size: int
) -> None:
    batch = TrainBatch.from_groups(random_groups(5))
    got = score(load(tiny_model), batch, temperature, train_micro_batch_size=micro_batch_size)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    for sequence in range(batch.num_sequences):
        start, end = batch.offsets[sequence : sequence + 2].tolist()
        tokens = batch.tokens[start:end]
        scores = (plain(tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)
        expected = scores.gather(1, tokens[1:, None]).squeeze(1) * batch.loss_mask[start + 1 : end]
        assert torch.allclose(got[start + 1 : end], expected, atol=1e-5)
        assert got[start] == 0


def _two_turns(observation: list[int], logprob: float) -> TrainBatch:
    first, second = make_completion([70]), make_completion([71, 72], [logprob, -1.0])
    turns = [((65, 66), first), ((65, 66, 70, *observation), second)]
    batch = TrainBatch.from_groups([make_group(0, [make_rollout(turns, reward=1.0)])])
    return batch.with_columns(advantages=torch.ones(batch.num_tokens))


def test_logits_of_observed_tokens_are_never_computed_let_alone_trained_on(
    untied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(untied_model)
    rows: list[int] = []
    original = model.logits_at

    def count(tokens: Tensor, places: Tensor, *rest: Tensor | None) -> Tensor:
        logits = original(tokens, places, *rest)
        rows.append(logits.shape[0])
        return logits

    monkeypatch.setattr(model, "logits_at", count)
    batch = _two_turns([80, 81, 82], -1.0)
    report = accumulate_gradients(model, cut(batch), LOSS, ForwardSettings(1.0, "torch"))
    assert rows == [3]
    assert (report.computed, report.num_positions, report.per) == (Counts(3.0, 1.0, 3.0), 7, Per.TOKENS)


def test_a_batch_without_counted_tokens_runs_no_model_and_leaves_no_gradient(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny_model)
    monkeypatch.setattr(model, "logits_at", lambda *_: pytest.fail("the model ran for nothing"))
    batch = _two_turns([80], -1.0).with_columns(sample_weights=torch.zeros(1))
    assert accumulate_gradients(model, cut(batch), LOSS, ForwardSettings(1.0, "torch")) == ChunkReport()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_no_sequences_give_an_empty_report(tiny_model: Path) -> None:
    batch = TrainBatch.from_groups(random_groups(0)).select([])
    settings = ForwardSettings(1.0, "torch")
    assert accumulate_gradients(load(tiny_model), cut(batch), LOSS, settings) == ChunkReport()
    assert compute_logprobs(load(tiny_model), cut(batch), settings) == []


def test_reports_add_up_and_mixed_denominators_are_refused() -> None:
    one = ChunkReport(1.5, Counts(2.0, 1.0), 4, Per.TOKENS, {"loss": Metric(3.0, Per.TOKENS)})
    assert merge_reports([one, ChunkReport(), one]) == ChunkReport(
        3.0, Counts(4.0, 2.0), 8, Per.TOKENS, {"loss": Metric(6.0, Per.TOKENS)}
    )
    with pytest.raises(ValueError, match="sequences.*tokens"):
        merge_reports([one, ChunkReport(per=Per.SEQUENCES)])
