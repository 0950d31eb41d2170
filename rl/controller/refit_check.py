"""The probe after a refit: both sides score the same tokens, and a difference that is no rounding ends the run.

Digests prove that bytes arrived; the probe proves that an engine computes with them, at the trainer's temperature and
in its precision. Where it fails, the two sides are compared tensor by tensor, and then in other ways of scoring.

    check = RefitCheck(CheckParts(policy, generator, sync), CheckSettings(tokens, every=1, ...), clock)
    check.begin(report)                   # after every refit; probes at the first one, then at every `every`-th
    metrics = await check.end()           # before anything is trained

The probe runs beside the first rollouts with the new weights, while the trainer has nothing to do; nothing is trained
on what they sample until it has passed.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl.core.batch import TrainBatch
from rl.core.clock import Clock
from rl.core.concurrency import gather_or_cancel
from rl.core.errors import FatalError, InfraError
from rl.core.types import PolicyVersion
from rl.generation.generator import Generator
from rl.trainer.logprob_gap import TEMPERATURES, mean_gap, shifted_gap
from rl.trainer.policy import Policy
from rl.weights.config import rounding_below
from rl.weights.fleet import Server
from rl.weights.report import TRAINER, SyncReport
from rl.weights.sync import WeightSync

_log = logging.getLogger(__name__)

PROBE_TOKENS = 32
# Scores are of the plain distribution, whatever rollouts are sampled at.
_TEMPERATURE = 1.0
# What a way of scoring leaves of the difference, at most, where it is the cause; more where rounding may leave it.
_LEFT = 0.1
_LEFT_BY_ROUNDING = 0.5


@dataclass(frozen=True)
class CheckParts:
    """Who is compared."""

    policy: Policy
    generator: Generator
    weight_sync: WeightSync


@dataclass(frozen=True)
class CheckSettings:
    """What is compared, how often and how strictly.

    Attributes:
        tokens: The probe; see `probe_tokens`.
        every: Refits between two probes.
        tolerance: Mean difference in nats that is no rounding.
        precision: Torch dtype name of the arithmetic.
        timeout_s: After which a replica does not answer, in seconds.
    """

    tokens: tuple[int, ...]
    every: int
    tolerance: float
    precision: str
    timeout_s: float


class RefitCheck:
    """One probe at a time; see above."""

    def __init__(self, parts: CheckParts, settings: CheckSettings, clock: Clock) -> None:
        self._parts = parts
        self._settings = settings
        self._clock = clock
        self._num_refits = 0
        self._probe: asyncio.Task[dict[str, float]] | None = None

    def begin(self, report: SyncReport) -> None:
        """Probe where one is due, beside whatever comes next."""
        assert self._probe is None, "a probe is under way"
        is_due = self._num_refits % self._settings.every == 0
        self._num_refits += 1
        if is_due:
            self._probe = asyncio.ensure_future(self._compare(report))

    async def end(self) -> dict[str, float]:
        """Wait for the probe.

        Returns:
            Metrics by bare name; empty where no probe was due.

        Raises:
            FatalError: an engine computes otherwise than the trainer; names tensor and layer, or what differs else.
        """
        probe, self._probe = self._probe, None
        return {} if probe is None else await probe

    async def close(self) -> None:
        """Give up a probe that nobody waits for; idempotent."""
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)

    async def _compare(self, report: SyncReport) -> dict[str, float]:
        start = self._clock.now()
        trainers, scores = await gather_or_cancel([self._trainers(report.version), self._scores()])
        own = trainers[TRAINER]
        gaps = {name: self._gap(report.version, own, values) for name, values in scores.items()}
        if not gaps:
            raise FatalError(f"no engine scored the probe of version {report.version}; nothing was proved")
        for name, gap in gaps.items():
            # Written so that a NaN fails too.
            if not gap <= self._settings.tolerance:
                await self._fail(report, name, own, scores[name])
        return {"probe_gap": max(gaps.values()), "probe_s": self._clock.now() - start}

    async def _trainers(self, version: PolicyVersion) -> dict[str, torch.Tensor]:
        return {TRAINER: await self._own(version)}

    async def _own(self, version: PolicyVersion, temperature: float = _TEMPERATURE) -> torch.Tensor:
        """Score at the trainer, [T] float32."""
        return await self._parts.policy.logprobs_at(self._batch(version, None), temperature)

    async def _scores(self) -> dict[str, torch.Tensor]:
        """Score at every replica and server that can be reached, [T] float32; 0 at the first token.

        Nothing comes out of one that cannot, and the next refit gives it up.
        """
        rows = dict(await self._parts.generator.score(self._settings.tokens, self._settings.timeout_s))
        for more in await gather_or_cancel([self._score_at(server) for server in self._parts.weight_sync.servers]):
            rows |= more
        return {name: torch.tensor([0.0, *row]) for name, row in rows.items()}

    async def _score_at(self, server: Server) -> dict[str, list[float]]:
        try:
            return {server.replica: await server.score(self._settings.tokens)}
        except InfraError as error:
            _log.error("%s did not score the probe: %s", server.replica, error)
            return {}

    def _gap(self, version: PolicyVersion, own: torch.Tensor, values: torch.Tensor) -> float:
        """Mean difference in nats; NaN where a single value is none."""
        return mean_gap(own, self._batch(version, values)) if bool(torch.isfinite(values).all()) else math.nan

    def _batch(self, version: PolicyVersion, values: torch.Tensor | None) -> TrainBatch:
        """The probe as one sequence that `version` has sampled but for its first token."""
        total = len(self._settings.tokens)
        sampled = torch.arange(total) > 0
        return TrainBatch(
            tokens=torch.tensor(self._settings.tokens),
            offsets=torch.tensor([0, total]),
            loss_mask=sampled,
            generation_logprobs=torch.zeros(total) if values is None else values,
            token_versions=torch.where(sampled, version, -1),
            group_ids=torch.zeros(1, dtype=torch.int64),
            rewards=torch.zeros(1),
            valid=torch.ones(1, dtype=torch.bool),
            sample_weights=torch.ones(1),
            versions=torch.full((1, 2), version),
            policy_version=version,
        )

    async def _fail(self, report: SyncReport, name: str, own: torch.Tensor, values: torch.Tensor) -> None:
        """Name the cause.

        Raises:
            FatalError: always.
        """
        settings, batch = self._settings, self._batch(report.version, values)
        gap = self._gap(report.version, own, values)
        rounding, key = rounding_below(settings.precision), "policy.generation.refit_cfg.check_tolerance"
        cause = await self._parts.weight_sync.explain(settings.precision)
        if cause is None and gap <= rounding:
            cause = (
                f"all weights that can be compared agree, and rounding in {settings.precision} alone may make "
                f"up to {rounding:g}; set {key}=null, or to {rounding:g} or more"
            )
        elif cause is None:
            cause = f"all weights that can be compared agree, but {await self._other_cause(report, own, batch, gap)}"
        limit = f"rounding in {settings.precision} stays below {rounding:g}"
        if settings.tolerance != rounding:
            limit = f"{key}={settings.tolerance:g} is the limit"
        raise FatalError(
            f"the probe of version {report.version} failed: {name} and the trainer differ by {gap:.3g} nats per token "
            f"on average, where {limit}: {cause}"
        )

    async def _other_cause(self, report: SyncReport, own: torch.Tensor, batch: TrainBatch, gap: float) -> str:
        """What differs where no weight does."""
        explained = {
            "the engine gives each token the value of the one after": shifted_gap(own, batch, 1),
            "the engine gives each token the value of the one before": shifted_gap(own, batch, -1),
        }
        for temperature in TEMPERATURES:
            if temperature != _TEMPERATURE:
                scored = await self._own(report.version, temperature)
                explained[f"the engine's temperature is {temperature} where it should be {_TEMPERATURE}"] = mean_gap(
                    scored, batch
                )
        cause = min(explained, key=lambda text: explained[text])
        left, rounding = explained[cause], rounding_below(self._settings.precision)
        if left <= _LEFT * gap or left <= min(rounding, _LEFT_BY_ROUNDING * gap):
            return f"{cause} (that leaves {left:.1e} of {gap:.1e})"
        if report.changed == 0 and report.version > 0:
            return (
                f"no tensor has changed since the refit before: what the trainer computes with in version "
                f"{report.version} is not among what it sends (an adapter that is neither merged nor sent?)"
            )
        return "no temperature and no shift explains it: compare precision, tokenizer and model configuration"


def probe_tokens(prompt: Sequence[int], longest: int) -> tuple[int, ...]:
    """Return the probe: the first tokens of a prompt, repeated where it is short.

    Args:
        prompt: Token ids of a text as the run has them.
        longest: Tokens that an engine takes.
    """
    total = min(PROBE_TOKENS, longest - 1)
    repeated = tuple(prompt) * math.ceil(total / len(prompt))
    return repeated[:total]
