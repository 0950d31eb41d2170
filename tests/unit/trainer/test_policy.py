"""Training is invariant to how a batch is cut, skips what it must, and continues exactly from a checkpoint."""

import json
import math
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl.algorithms.algorithm import LossSums
from rl.algorithms.config import LossConfig
from rl.algorithms.objective import parse_objective
from rl.algorithms.policy_gradient import PolicyGradientLoss
from rl.core.batch import TrainBatch
from rl.core.errors import ConfigError, FatalError
from rl.core.metrics import Per
from rl.trainer.config import SchedulerConfig, TokenizerConfig
from rl.trainer.worker import PolicyWorker
from tests.support.micro_batches import cut
from tests.support.policies import (
    first_moments,
    make_batch,
    make_policy,
    make_request,
    make_settings,
    weights_of,
    worker_of,
)
from tests.support.tiny_model import make_tiny_model

PLAIN = parse_objective(LossConfig(reference_policy_kl_penalty=0.0), single_update=True)


@dataclass(frozen=True)
class _NonFiniteLoss:
    """A loss whose gradient is not finite."""

    uses_entropy: bool = False

    def contributes(self, batch: TrainBatch) -> Tensor:
        return batch.sample_weights > 0

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TrainBatch) -> LossSums:
        return LossSums((logprobs * math.inf).sum(), Per.TOKENS, {})


@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize(("num_workers", "micro_batch_size"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 3), (2, 16)])
async def test_loss_and_gradients_do_not_depend_on_micro_batches_or_ranks(
    tiny_model: Path, token_level: bool, num_workers: int, micro_batch_size: int
) -> None:
    config = LossConfig(reference_policy_kl_penalty=0.0, token_level_loss=token_level)
    loss = parse_objective(config, single_update=True)
    batch = make_batch().with_columns(sample_weights=torch.tensor([1.0, 0.0] + [1.0] * 14))
    whole = await make_policy(make_settings(tiny_model, train_micro_batch_size=16), make_request(tiny_model))
    cut = await make_policy(
        make_settings(tiny_model, train_micro_batch_size=micro_batch_size, num_workers=num_workers),
        make_request(tiny_model),
    )
    expected, got = await whole.train(batch, loss), await cut.train(batch, loss)
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)
    wanted = first_moments(whole)
    for rank in range(num_workers):
        moments = first_moments(cut, rank)
        assert all(torch.allclose(moments[key], wanted[key], atol=1e-6) for key in wanted)


async def test_both_ranks_hold_equal_weights_also_when_one_has_no_sequence(tiny_model: Path) -> None:
    policy = await make_policy(make_settings(tiny_model, num_workers=2), make_request(tiny_model))
    for batch in (make_batch(1), make_batch(2).select([3])):
        result = await policy.train(batch, PLAIN)
    assert result.metrics["global_valid_seqs"] == 1.0
    first, second = await weights_of(policy, 0), await weights_of(policy, 1)
    assert all(torch.equal(first[name], second[name]) for name in first)


async def test_ranks_with_unequal_numbers_of_micro_batches_finish_together(tiny_model: Path) -> None:
    settings = make_settings(tiny_model, num_workers=2, train_micro_batch_size=1, share_prefixes="off")
    policy = await make_policy(settings, make_request(tiny_model))
    for numbers in ([0, 1, 2, 3, 4], [0, 1, 2], [0]):
        result = await policy.train(make_batch().select(numbers), PLAIN)
        assert result.metrics["global_valid_seqs"] == len(numbers)
        assert (await policy.logprobs(make_batch().select(numbers))).numel() > 0
    first, second = await weights_of(policy, 0), await weights_of(policy, 1)
    assert all(torch.equal(first[name], second[name]) for name in first)


async def test_streamed_chunks_and_one_step_equal_one_accumulation(tiny_model: Path) -> None:
    streamed = await make_policy(make_settings(tiny_model), make_request(tiny_model))
    other = await make_policy(make_settings(tiny_model), make_request(tiny_model))
    batch = make_batch()
    await other.train(batch, PLAIN)
    for chunk in batch.split(5):
        await streamed.group.call(0, PolicyWorker.accumulate, cut(chunk), PLAIN)
    await streamed.group.call(0, PolicyWorker.apply_step, float(batch.token_weights.sum()))
    left, right = first_moments(streamed), first_moments(other)
    assert all(torch.allclose(left[key], right[key], atol=1e-6) for key in right)


async def test_an_all_masked_batch_has_loss_zero_moves_nothing_and_is_counted(tiny_model: Path) -> None:
    policy = await make_policy(make_settings(tiny_model), make_request(tiny_model))
    before = await weights_of(policy)
    batch = make_batch()
    empty = batch.with_columns(sample_weights=torch.zeros(16))
    result = await policy.train(empty, PLAIN)
    assert (result.version, result.metrics["loss"], result.metrics["steps_skipped_empty"]) == (1, 0.0, 1.0)
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert not {"grad_norm", "probs_ratio", "entropy"} & set(result.metrics)
    after = await weights_of(policy)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (await policy.train(batch, PLAIN)).metrics["steps_skipped_empty"] == 0.0


async def test_a_non_finite_gradient_moves_nothing_and_is_counted(tiny_model: Path) -> None:
    policy = await make_policy(make_settings(tiny_model), make_request(tiny_model))
    before = await weights_of(policy)
    result = await policy.train(make_batch(), _NonFiniteLoss())
    assert (result.version, result.metrics["steps_skipped_nonfinite"]) == (1, 1.0)
    after = await weights_of(policy)
    assert all(torch.equal(before[name], after[name]) for name in before)


async def test_learning_rate_zero_changes_nothing(tiny_model: Path) -> None:
    policy = await make_policy(make_settings(tiny_model, lr=0.0), make_request(tiny_model))
    before = await weights_of(policy)
    await policy.train(make_batch(), PLAIN)
    after = await weights_of(policy)
    assert all(torch.equal(before[name], after[name]) for name in before)


async def test_several_optimizer_steps_are_one_version_and_one_schedule_position(tiny_model: Path) -> None:
    scheduler = SchedulerConfig(name="linear", decay_steps=10)
    settings = make_settings(tiny_model, train_global_batch_size=4, scheduler=scheduler)
    policy = await make_policy(settings, make_request(tiny_model))
    loss = parse_objective(LossConfig(reference_policy_kl_penalty=0.0), single_update=False)
    for step in range(2):
        batch = make_batch(step)
        batch = batch.with_columns(prev_logprobs=await policy.logprobs(batch))
        result = await policy.train(batch, loss)
        assert result.version == step + 1
        assert result.metrics["lr"] == pytest.approx(1e-3 * (1 - step / 10))
    assert result.metrics["global_valid_seqs"] == 4.0
    assert result.metrics["probs_ratio_min"] < 1.0 < result.metrics["probs_ratio_max"]


async def test_a_batch_size_that_does_not_divide_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="train_global_batch_size=5 does not divide the 16"):
        await make_policy(make_settings(tiny_model, train_global_batch_size=5), make_request(tiny_model))


async def test_logprobs_have_the_batch_order_over_two_ranks(tiny_model: Path) -> None:
    batch = make_batch(3, num_groups=3, group_size=3)
    one = await make_policy(make_settings(tiny_model), make_request(tiny_model))
    two = await make_policy(make_settings(tiny_model, num_workers=2), make_request(tiny_model))
    assert torch.allclose(await one.logprobs(batch), await two.logprobs(batch), atol=1e-6)


async def test_the_on_policy_logprob_gap_is_zero_for_the_trainers_own_samples(tiny_model: Path) -> None:
    policy = await make_policy(make_settings(tiny_model), make_request(tiny_model))
    batch = make_batch()
    batch = batch.with_columns(generation_logprobs=await policy.logprobs(batch))
    first = await policy.train(batch, PLAIN)
    assert first.metrics["max_logprob_diff"] < 1e-5
    # Now the tokens are of an older version, so there is nothing to compare.
    assert "max_logprob_diff" not in (await policy.train(batch, PLAIN)).metrics


async def test_the_reference_stays_frozen(tiny_model: Path) -> None:
    policy = await make_policy(make_settings(tiny_model), make_request(tiny_model, needs_reference=True))
    batch = make_batch()
    start = await policy.logprobs(batch)
    assert torch.equal(await policy.reference_logprobs(batch), start)
    loss = parse_objective(LossConfig(reference_policy_kl_penalty=0.1), single_update=True)
    result = await policy.train(batch.with_columns(reference_logprobs=start), loss)
    assert result.metrics["kl_penalty"] == pytest.approx(0.0, abs=1e-6)
    assert torch.equal(await policy.reference_logprobs(batch), start)
    assert not torch.equal(await policy.logprobs(batch), start)


async def test_asking_for_a_reference_that_was_not_ordered_is_an_error(tiny_model: Path) -> None:
    policy = await make_policy(make_settings(tiny_model), make_request(tiny_model))
    with pytest.raises(FatalError, match="needs_reference=False"):
        await policy.reference_logprobs(make_batch())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
async def test_ten_steps_equal_five_a_restore_and_five_bit_for_bit(
    tiny_model: Path, tmp_path: Path, precision: str
) -> None:
    scheduler = SchedulerConfig(name="cosine", decay_steps=12, warmup_steps=3)
    settings = make_settings(tiny_model, scheduler=scheduler, precision=precision)
    straight = await make_policy(settings, make_request(tiny_model, version=2))
    history = [await straight.train(make_batch(step), PLAIN) for step in range(5)]
    await straight.save(tmp_path, with_optimizer=True)
    history += [await straight.train(make_batch(step), PLAIN) for step in range(5, 10)]
    resumed = await make_policy(settings, make_request(tiny_model))
    await resumed.restore(tmp_path)
    assert resumed.version == 7
    again = [await resumed.train(make_batch(step), PLAIN) for step in range(5, 10)]
    assert again == history[5:]
    left, right = await weights_of(straight), await weights_of(resumed)
    assert all(torch.equal(left[name], right[name]) for name in left)


async def test_small_steps_move_the_weights_in_bfloat16_as_in_float32(tiny_model: Path) -> None:
    moved = {}
    for precision in ("float32", "bfloat16"):
        settings = make_settings(tiny_model, lr=1e-6, precision=precision)
        policy = await make_policy(settings, make_request(tiny_model))
        before = await weights_of(policy)
        for step in range(10):
            await policy.train(make_batch(step), PLAIN)
        after = await weights_of(policy)
        moved[precision] = sum(float((after[name] - before[name]).abs().sum()) for name in after)
    assert moved["bfloat16"] == pytest.approx(moved["float32"], rel=0.05)


async def test_a_checkpoint_without_optimizer_state_is_refused_with_the_way_out(
    tiny_model: Path, tmp_path: Path
) -> None:
    policy = await make_policy(make_settings(tiny_model), make_request(tiny_model))
    await policy.save(tmp_path, with_optimizer=False)
    with pytest.raises(ConfigError, match="save_optimizer=false"):
        await policy.restore(tmp_path)
    fresh = await make_policy(make_settings(tmp_path / "model"), make_request(tmp_path / "model"))
    batch = make_batch()
    assert torch.equal(await fresh.logprobs(batch), await policy.logprobs(batch))


_CLEAN_LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
logits = model(torch.tensor([[1, 2, 3]])).logits[0, -1].tolist()
chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
print(json.dumps({"logits": logits, "chat": chat, "eos": model.generation_config.eos_token_id}))
"""


@pytest.mark.parametrize(("tied", "template"), [(True, None), (False, "custom {{ messages[0]['content'] }}")])
async def test_an_export_loads_in_a_clean_process_with_equal_logits(
    tmp_path: Path, tied: bool, template: str | None
) -> None:
    source = make_tiny_model(tmp_path / "source", tie_embeddings=tied)
    settings = make_settings(source, tokenizer=TokenizerConfig(chat_template=template))
    policy = await make_policy(settings, make_request(source))
    await policy.train(make_batch(), PLAIN)
    await policy.export(tmp_path / "export")
    command = [sys.executable, "-c", _CLEAN_LOAD, str(tmp_path / "export")]
    loaded = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    model = worker_of(policy)._model
    with torch.no_grad():
        expected = model.logits_at(torch.tensor([[1, 2, 3]]), torch.tensor([2]))[0]
    assert torch.allclose(torch.tensor(loaded["logits"]), expected, atol=1e-6)
    assert loaded["chat"] == ("custom hi" if template else "<|user|>hi")
    assert loaded["eos"] == 256
    for name in ["generation_config.json", "tokenizer.json"] + ([] if template else ["chat_template.jinja"]):
        assert (tmp_path / "export" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize(
    ("settings", "loss", "line"),
    [
        ({"logprob_impl": "torch"}, PLAIN, "plain torch: .*policy.logprob_impl=torch"),
        ({"logprob_impl": "native"}, PLAIN, "one pass: loss and gradients"),
    ],
    ids=["torch", "native"],
)
async def test_the_way_of_the_loss_is_logged_once(
    tiny_model: Path, settings: dict[str, Any], loss: PolicyGradientLoss, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = await make_policy(make_settings(tiny_model, **settings), make_request(tiny_model))
    with caplog.at_level("INFO", logger="rl.trainer.policy"):
        for _ in range(3):
            await policy.train(make_batch(), loss)
    assert len(caplog.messages) == 1
    assert re.match(f"training: {line}", caplog.messages[0])


async def test_a_head_that_is_no_plain_matrix_trains_over_the_models_own_logits(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = await make_policy(make_settings(tiny_model), make_request(tiny_model))
    monkeypatch.setattr("rl.trainer.worker.find_head_fault", lambda _: "its output layer has a bias")
    native = await make_policy(make_settings(tiny_model, logprob_impl="native"), make_request(tiny_model))
    monkeypatch.setattr(worker_of(native)._model, "hidden_at", lambda *_: pytest.fail("taken for a plain matrix"))
    with caplog.at_level("INFO", logger="rl.trainer.policy"):
        expected, got = await plain.train(make_batch(), PLAIN), await native.train(make_batch(), PLAIN)
    assert caplog.messages[1] == "training: two passes over the model's own logits: its output layer has a bias"
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-5)


async def test_the_native_operator_trains_like_plain_torch(tiny_model: Path) -> None:
    plain = await make_policy(make_settings(tiny_model), make_request(tiny_model, temperature=0.7))
    native = await make_policy(
        make_settings(tiny_model, logprob_impl="native"), make_request(tiny_model, temperature=0.7)
    )
    expected, got = await plain.train(make_batch(), PLAIN), await native.train(make_batch(), PLAIN)
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)
    left, right = first_moments(plain), first_moments(native)
    assert all(torch.allclose(left[key], right[key], atol=1e-6) for key in left)
