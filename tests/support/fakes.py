"""Fakes of what the rollout layer and the controller talk to. They compute nothing and take virtual time."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rl.algorithms.algorithm import LossFunction, LossSums, Need
from rl.controller.step import StepReport
from rl.controller.validation import ValidationReport
from rl.core.batch import TrainBatch
from rl.core.clock import Clock
from rl.core.errors import FatalError, WeightSyncError
from rl.core.types import Completion, FinishReason, Message, Prompt, RolloutStatus, VersionSpan
from rl.data.conversation import Conversations
from rl.data.prompts import Skipped
from rl.environments.base import Episode, StepResult
from rl.generation.generator import SamplingParams
from rl.trainer.policy import TrainResult
from rl.weights.report import SyncReport
from rl.weights.sync import BeforeResume
from rl.weights.transport import PauseMode


def make_prompt(index: int, environment: str = "echo", tokens: int = 3) -> Prompt:
    """A prompt with `tokens` token ids."""
    return Prompt(f"p{index}", (Message("user", f"question {index}"),), environment, {}, tuple(range(1, tokens + 1)))


def make_completion(
    version: int, tokens: Sequence[int] = (5, 6), end_version: int | None = None, text: str = "text"
) -> Completion:
    """A completion sampled by `version`; its second half by `end_version` when that is given and differs."""
    spans: tuple[VersionSpan, ...] = (VersionSpan(version, 0, len(tokens)),)
    if end_version is not None and end_version != version and len(tokens) > 1:
        middle = len(tokens) // 2
        spans = (VersionSpan(version, 0, middle), VersionSpan(end_version, middle, len(tokens)))
    return Completion(tuple(tokens), tuple(-0.5 for _ in tokens), FinishReason.STOP, spans, text)


class FakeTokenizer:
    """Knows no text: every piece of text of N characters is N times the token 9."""

    def encode_text(self, text: str) -> tuple[int, ...]:
        return (9,) * len(text)

    def encode_after(self, token: int, text: str) -> tuple[int, ...]:
        return self.encode_text(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "?" * len(token_ids)

    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        return "".join(message.content for message in messages)

    def is_special(self, token: int) -> bool:
        return False


def plain_conversations() -> Conversations:
    """Conversations without a template, over a FakeTokenizer."""
    return Conversations(FakeTokenizer(), is_raw=True, rewritten_history="error")


@dataclass(frozen=True)
class Request:
    """One call that a FakeGenerator saw."""

    request_id: str
    session: str
    prompt_tokens: tuple[int, ...]
    params: SamplingParams
    version: int


class FakeGenerator:
    """Completes at once or after `latency(request_id)` virtual seconds; fails as `failure(request_id)` says."""

    def __init__(
        self,
        clock: Clock,
        latency: Callable[[str], float] = lambda _: 0.0,
        failure: Callable[[str], Exception | None] = lambda _: None,
    ) -> None:
        self.version = 0
        self.requests: list[Request] = []
        self.running = 0
        self.max_running = 0
        self.closed = False
        self._clock = clock
        self._latency = latency
        self._failure = failure
        self._resumed = asyncio.Event()
        self._resumed.set()

    async def generate(
        self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str, session: str
    ) -> Completion:
        await self._resumed.wait()
        start = self.version
        self.requests.append(Request(request_id, session, tuple(prompt_tokens), params, start))
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            seconds = self._latency(request_id)
            if seconds > 0:
                await self._clock.sleep(seconds)
        finally:
            self.running -= 1
        failure = self._failure(request_id)
        if failure is not None:
            raise failure
        return make_completion(start, end_version=self.version)

    async def pause(self, mode: PauseMode) -> None:
        self._resumed.clear()

    async def resume(self) -> None:
        self._resumed.set()

    def weight_receivers(self) -> list[Any]:
        return []

    async def close(self) -> None:
        self.closed = True


class EchoEnvironment:
    """Scores with `reward(index of the completion)`; answers `turns - 1` times before it is done."""

    def __init__(
        self,
        reward: Callable[[int], float] = float,
        turns: int = 1,
        status: Callable[[int], RolloutStatus] = lambda _: RolloutStatus.OK,
    ) -> None:
        self.calls = 0
        self.closed = False
        self._reward = reward
        self._turns = turns
        self._status = status

    async def step(self, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
        self.calls += 1
        done = self.calls % self._turns == 0
        messages = () if done else (Message("user", "."),)
        return [
            StepResult(
                messages,
                self._reward(i) if self._status(i) is RolloutStatus.OK else float("nan"),
                done,
                self._status(i),
            )
            for i in range(len(episodes))
        ]

    async def close(self) -> None:
        self.closed = True


@dataclass
class FakePromptSource:
    """Endless numbered prompts."""

    position: int = 0
    environment: str = "echo"
    skipped: Skipped = field(default_factory=Skipped)

    def next(self) -> Prompt:
        self.position += 1
        return make_prompt(self.position - 1, self.environment)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = int(state["position"])


@dataclass
class SavedText:
    """A Saveable that keeps one string."""

    text: str
    restored: list[str] = field(default_factory=list)

    async def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "text.txt").write_text(self.text)

    async def restore(self, folder: Path) -> None:
        self.restored.append((folder / "text.txt").read_text())


class FakePolicy:
    """A policy whose weights are its version; training takes virtual time."""

    def __init__(self, clock: Clock, seconds: float = 1.0) -> None:
        self.version = 0
        self.batches: list[TrainBatch] = []
        self.scored: list[str] = []
        self.fail: Exception | None = None
        self._clock = clock
        self._seconds = seconds

    async def train(self, batch: TrainBatch, loss: LossFunction) -> TrainResult:
        await self._clock.sleep(self._seconds)
        if self.fail is not None:
            raise self.fail
        self.batches.append(batch)
        self.version += 1
        return TrainResult(self.version, {"loss": 0.5})

    async def logprobs(self, batch: TrainBatch) -> torch.Tensor:
        self.scored.append("policy")
        return torch.zeros(batch.num_tokens)

    async def logprobs_at(self, batch: TrainBatch, temperature: float) -> torch.Tensor:
        return torch.zeros(batch.num_tokens)

    async def explain_gap(self, batch: TrainBatch) -> str:
        return "the fake says nothing"

    async def reference_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        self.scored.append("reference")
        return torch.zeros(batch.num_tokens)

    def weight_sender(self) -> Any:
        return None

    async def save(self, folder: Path, with_optimizer: bool) -> None:
        (folder / "version.txt").write_text(str(self.version))

    async def restore(self, folder: Path) -> None:
        self.version = int((folder / "version.txt").read_text())

    async def export(self, folder: Path) -> None:
        folder.mkdir()

    async def close(self) -> None:
        pass


class FakeWeightSync:
    """Sets the generator's version, or fails as told."""

    def __init__(self, generator: FakeGenerator) -> None:
        self.published: list[int] = []
        self.fail_at: int | None = None
        self._generator = generator

    async def publish(self, version: int, before_resume: BeforeResume) -> SyncReport:
        await self._generator.pause("drain")
        if version == self.fail_at:
            raise WeightSyncError(f"refit of version {version} failed")
        self._generator.version = version
        self.published.append(version)
        await before_resume()
        await self._generator.resume()
        return SyncReport(version, 0.5, 2**20, 3, 1, 3, 1, {"transfer": 0.25, "digest": 0.05})


class FakeRefitCheck:
    """Sees every report, and fails as told."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.fail_at: int | None = None

    def begin(self, report: SyncReport) -> None:
        self.seen.append(report.version)

    async def end(self) -> dict[str, float]:
        if self.seen and self.seen[-1] == self.fail_at:
            raise FatalError(f"the probe of version {self.fail_at} failed")
        return {"probe_gap": 0.0, "probe_s": 0.125}

    async def close(self) -> None:
        pass


class FakeAlgorithm:
    """Reward as advantage; needs what it is told."""

    def __init__(self, needs: frozenset[Need] = frozenset()) -> None:
        self.needs = needs
        self.losses: dict[str, LossFunction] = {"policy": _no_loss}

    def shape(self, batch: TrainBatch) -> tuple[TrainBatch, dict[str, float]]:
        return batch, {}

    def filter(self, batch: TrainBatch) -> tuple[TrainBatch, dict[str, float]]:
        return batch, {}

    def advantages(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        return {"advantages": torch.nan_to_num(batch.rewards)[batch.sequence_ids]}


def _no_loss(logprobs: torch.Tensor, entropy: torch.Tensor, batch: TrainBatch) -> LossSums:
    raise AssertionError("a fake policy computes no loss")


class FakeReporter:
    """Remembers what it was told, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.metrics: dict[int, dict[str, float]] = {}
        self.saved_seconds: dict[int, float] = {}
        self.on_step: Callable[[int], None] = lambda _: None

    async def step(self, report: StepReport, extra: dict[str, float]) -> None:
        self.events.append(f"step {report.step}")
        self.metrics[report.step] = {**report.metrics, **extra}
        self.on_step(report.step)

    async def validation(self, report: ValidationReport) -> None:
        self.events.append(f"validation {report.step}")

    async def saved(self, step: int, seconds: float) -> None:
        self.saved_seconds[step] = seconds

    def note(self, message: str) -> None:
        self.events.append(message)
