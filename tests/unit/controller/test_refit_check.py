"""The probe: what passes, what fails, and what the failure names."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from rl.controller.refit_check import CheckParts, CheckSettings, RefitCheck, probe_tokens
from rl.core.batch import TrainBatch
from rl.core.clock import SystemClock
from rl.core.errors import FatalError, InfraError
from rl.weights.config import RefitConfig
from rl.weights.report import SyncReport

VOCABULARY = 50
TOKENS = tuple((7 * index) % VOCABULARY for index in range(32))


class Model:
    """Logits that depend on the token before alone."""

    def __init__(self, seed: int = 0) -> None:
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))

    def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        logits = torch.log_softmax(self.table / temperature, dim=-1)
        return [float(logits[before, token]) for before, token in zip(tokens, tokens[1:], strict=False)]


class Trainer:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.num_scored = 0

    async def logprobs_at(self, batch: TrainBatch, temperature: float) -> torch.Tensor:
        self.num_scored += 1
        assert batch.num_sequences == 1 and not bool(batch.loss_mask[0])
        return torch.tensor([0.0, *self.model.score(batch.tokens.tolist(), temperature)])


class Engines:
    """A generator of engines that score as they are told."""

    def __init__(self, scores: list[list[float]]) -> None:
        self.scores = scores

    async def score(self, tokens: Sequence[int], timeout_s: float) -> dict[str, list[float]]:
        assert tuple(tokens) == TOKENS
        return {f"generation[{index}]": row for index, row in enumerate(self.scores)}


class Remote:
    """A server of others, which has an answer or is gone."""

    def __init__(self, replica: str, answer: list[float] | Exception) -> None:
        self.replica = replica
        self._answer = answer

    async def score(self, tokens: Sequence[int]) -> list[float]:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class Sync:
    def __init__(self, cause: str | None = None) -> None:
        self.cause = cause
        self.servers: list[Any] = []

    async def explain(self, precision: str) -> str | None:
        assert precision in ("float32", "bfloat16")
        return self.cause


def report(version: int, changed: int = 3) -> SyncReport:
    return SyncReport(version, 0.5, 100, 3, 1, changed, 1, {})


async def probed(check: RefitCheck, seen: SyncReport) -> dict[str, float]:
    check.begin(seen)
    return await check.end()


def check_of(
    scores: list[list[float]], every: int = 1, cause: str | None = None, tolerance: float | None = None
) -> RefitCheck:
    parts: Any = CheckParts(cast(Any, Trainer(Model())), cast(Any, Engines(scores)), cast(Any, Sync(cause)))
    limit = RefitConfig(check_tolerance=tolerance).tolerance_for("float32")
    return RefitCheck(parts, CheckSettings(TOKENS, every, limit, "float32", 10.0), SystemClock())


async def test_engines_that_compute_the_same_pass_with_the_worst_gap() -> None:
    right = Model().score(TOKENS)
    metrics = await probed(check_of([right, [value + 5e-5 for value in right]]), report(0))
    assert metrics["probe_gap"] == pytest.approx(5e-5, rel=2e-2)
    assert metrics["probe_s"] > 0


async def test_a_probe_is_due_at_the_first_refit_and_at_every_nth() -> None:
    check = check_of([Model().score(TOKENS)], every=3)
    due = [bool(await probed(check, report(version))) for version in range(7)]
    assert due == [True, False, False, True, False, False, True]


async def test_a_tensor_that_differs_is_named() -> None:
    scores = [Model().score(TOKENS), Model(1).score(TOKENS)]
    check = check_of(scores, cause="generation[1] computes with another tensor than the trainer: 'w' (layer 3)")
    with pytest.raises(
        FatalError, match=r"probe of version 4 failed: generation\[1\] and the trainer .*'w' \(layer 3\)"
    ):
        await probed(check, report(4))


async def test_a_server_that_is_gone_does_not_end_the_run_and_one_that_is_there_is_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    right = Model().score(TOKENS)
    check = check_of([right])
    servers = check._parts.weight_sync.servers
    servers.append(cast(Any, Remote("server http://gone:1", InfraError("http://gone:1 cannot be reached"))))
    assert (await probed(check, report(0)))["probe_gap"] < 1e-6
    assert "server http://gone:1 did not score the probe: http://gone:1 cannot be reached" in caplog.text
    servers.append(cast(Any, Remote("http://here:1", Model(1).score(TOKENS))))
    with pytest.raises(FatalError, match="http://here:1 and the trainer differ"):
        await probed(check, report(1))


@pytest.mark.parametrize("temperature", [0.7, 2.0])
async def test_another_temperature_is_named_where_the_weights_agree(temperature: float) -> None:
    check = check_of([Model().score(TOKENS, temperature)])
    with pytest.raises(FatalError, match=rf"agree, but the engine's temperature is {temperature} where it should be 1"):
        await probed(check, report(1))


async def test_a_temperature_is_named_through_the_rounding_of_bfloat16() -> None:
    """Measured: up to 0.11 nats of rounding, 0.4 and more of a temperature of 0.7."""
    scores = [value + 0.11 for value in Model().score(TOKENS, 0.7)]
    settings = CheckSettings(TOKENS, 1, RefitConfig().tolerance_for("bfloat16"), "bfloat16", 10.0)
    parts: Any = CheckParts(cast(Any, Trainer(Model())), cast(Any, Engines([scores])), cast(Any, Sync()))
    with pytest.raises(FatalError, match="in bfloat16 stays below 0.3: .*temperature is 0.7 where it should be 1"):
        await probed(RefitCheck(parts, settings, SystemClock()), report(1))


async def test_a_value_that_belongs_to_the_token_before_is_named() -> None:
    right = Model().score(TOKENS)
    with pytest.raises(FatalError, match="the value of the one before"):
        await probed(check_of([[right[0], *right[:-1]]]), report(1))


async def test_weights_that_are_trained_but_not_sent_are_named() -> None:
    """The trainer computes with an adapter that does not travel: both ends agree on the base, and it never changes."""
    with pytest.raises(FatalError, match="no tensor has changed since .*adapter that is neither merged nor sent"):
        await probed(check_of([Model(1).score(TOKENS)]), report(2, changed=0))
    with pytest.raises(FatalError, match="no temperature and no shift explains it"):
        await probed(check_of([Model(1).score(TOKENS)]), report(2))


async def test_a_tolerance_below_rounding_is_blamed_itself_where_nothing_else_is_wrong() -> None:
    rounded = [value + 5e-5 for value in Model().score(TOKENS)]
    with pytest.raises(FatalError) as caught:
        await probed(check_of([rounded], tolerance=1e-6), report(3))
    text = str(caught.value)
    assert (
        "differ by 5" in text
        and "e-05 nats per token on average, where policy.generation.refit_cfg.check_tolerance=1e-06 is the" in text
    )
    assert (
        "rounding in float32 alone may make up to 0.0001; set policy.generation.refit_cfg.check_tolerance=null" in text
    )
    assert "tokenizer" not in text
    # A tensor that differs is still named, and so is another cause of a larger difference.
    with pytest.raises(FatalError, match="generation.0. computes with another tensor"):
        await probed(check_of([rounded], tolerance=1e-6, cause="generation[0] computes with another tensor"), report(3))
    with pytest.raises(FatalError, match=r"check_tolerance=1e-06 is the limit: .*temperature is 0.7"):
        await probed(check_of([Model().score(TOKENS, 0.7)], tolerance=1e-6), report(3))


async def test_the_limit_is_the_settings_own_or_that_of_rounding() -> None:
    shifted = [value + 5e-4 for value in Model().score(TOKENS)]
    with pytest.raises(FatalError, match="where rounding in float32 stays below 0.0001: "):
        await probed(check_of([shifted]), report(3))
    assert (await probed(check_of([shifted], tolerance=1e-3), report(3)))["probe_gap"] < 1e-3


async def test_an_engine_that_scores_nothing_or_no_number_fails() -> None:
    with pytest.raises(FatalError, match="no engine scored"):
        await probed(check_of([]), report(0))
    with pytest.raises(FatalError, match="failed"):
        await probed(check_of([[*Model().score(TOKENS)[:-1], float("nan")]]), report(0))


def test_the_probe_repeats_a_short_prompt_and_fits_the_context() -> None:
    assert probe_tokens(range(100), 512) == tuple(range(32))
    assert probe_tokens([1, 2, 3], 512) == ((1, 2, 3) * 11)[:32]
    assert len(probe_tokens([5], 17)) == 16
