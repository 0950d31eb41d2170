"""Continuous batching over a plain forward pass: a thread that adds one token to every active request per step.

It recomputes the whole sequence at every step and keeps no key-value cache, so nothing can be stale after a refit and
log-probabilities are those of a plain forward pass. For tests and debugging; vLLM is the fast path. It knows neither
models nor tokenizers.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Literal

import torch

from rl.core.errors import CompletionError, InfraError, WeightSyncError
from rl.core.types import Completion, FinishReason, PolicyVersion
from rl.generation.completion import make_completion, merge_spans
from rl.generation.generator import SamplingParams
from rl.generation.sampling import sample_token
from rl.weights.transport import PauseMode

Forward = Callable[[list[list[int]]], torch.Tensor]
Decode = Callable[[Sequence[int]], str]


@dataclass
class _Request:
    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    budget: int
    generator: torch.Generator
    result: "Future[Completion]"
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)


class BatchLoop:
    """Serves requests of many threads.

    Args:
        forward: Sequences of token ids to next-token logits [N, vocabulary] float32.
        decode: Token ids to text.
        max_batch: Requests that run at the same time.
        name: Of the thread, for messages.
    """

    def __init__(self, forward: Forward, decode: Decode, max_batch: int, name: str) -> None:
        self._forward = forward
        self._decode = decode
        self._max_batch = max_batch
        self._name = name
        self._changed = threading.Condition()
        self._state: Literal["running", "draining", "frozen", "closed"] = "running"
        self._stepping = False
        self._waiting: list[_Request] = []
        self._active: list[_Request] = []
        self._version: PolicyVersion | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_paused(self) -> bool:
        """Whether nothing can be sampled until `resume`."""
        with self._changed:
            return self._state == "frozen" and not self._stepping

    def set_version(self, version: PolicyVersion) -> None:
        """Name the weights that sample from now on; call it while paused."""
        with self._changed:
            self._version = version

    def submit(
        self, prompt: tuple[int, ...], params: SamplingParams, budget: int, request_id: str
    ) -> "Future[Completion]":
        """Queue a request; it starts when the loop runs and has room."""
        generator = torch.Generator().manual_seed(params.seed)
        request = _Request(request_id, prompt, params, budget, generator, Future())
        with self._changed:
            if self._state == "closed":
                raise InfraError(f"{self._name} is closed; request {request_id} cannot be served")
            self._waiting.append(request)
            self._changed.notify_all()
        return request.result

    def abort(self, request_id: str) -> None:
        """Fail a request; an unknown one is ignored."""
        with self._changed:
            self._fail([r for r in [*self._active, *self._waiting] if r.request_id == request_id], "was aborted")

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Stop sampling. See `ReceiverHandle.pause`.

        Raises:
            InfraError: requests in flight did not end in time.
        """
        with self._changed:
            self._state = "draining" if mode == "drain" else "frozen"
            self._changed.notify_all()
            idle = self._changed.wait_for(
                lambda: not self._stepping and (mode != "drain" or not self._active), timeout=timeout_s
            )
            if not idle:
                raise InfraError(f"{self._name}: pause ({mode}) did not end within {timeout_s:g} s")
            self._state = "frozen"
            if mode == "abort":
                self._fail([*self._active, *self._waiting], "was aborted by a refit")

    def resume(self) -> None:
        """Sample again."""
        with self._changed:
            self._state = "running"
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Fail what is left and end the thread; idempotent."""
        with self._changed:
            self._state = "closed"
            self._fail([*self._active, *self._waiting], "ended with its engine")
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._state == "closed":
                    return
                if self._state == "running":
                    room = self._max_batch - len(self._active)
                    self._active += self._waiting[:room]
                    self._waiting = self._waiting[room:]
                batch, version = list(self._active), self._version
                self._stepping = True
            try:
                self._step(batch, version)
            finally:
                with self._changed:
                    self._active = [request for request in self._active if not request.result.done()]
                    self._stepping = False
                    self._changed.notify_all()

    def _has_work(self) -> bool:
        if self._state == "running":
            return bool(self._active or self._waiting)
        return self._state == "closed" or (self._state == "draining" and bool(self._active))

    def _step(self, batch: list[_Request], version: PolicyVersion | None) -> None:
        """Add one token to each request of the batch; an error fails the batch, not the loop. Logits that are no
        numbers fail their own request alone.
        """
        try:
            if version is None:
                raise WeightSyncError(f"{self._name} has no weights of a known version: publish the policy's first")
            logits = self._forward([[*request.prompt, *request.tokens] for request in batch])
            for request, row in zip(batch, logits, strict=True):
                if bool(torch.isnan(row).any()):
                    _resolve(request.result, _spoiled(request))
                    continue
                token, logprob = sample_token(row, request.params, request.generator)
                request.tokens.append(token)
                request.logprobs.append(logprob)
                request.versions.append(version)
                self._finish_if_done(request)
        except Exception as error:
            failure = error if isinstance(error, WeightSyncError) else InfraError(f"{self._name} failed: {error!r}")
            failure.__cause__ = None if failure is error else error
            for request in batch:
                _resolve(request.result, failure)

    def _finish_if_done(self, request: _Request) -> None:
        finish: FinishReason | None = None
        tokens, params = request.tokens, request.params
        text = ""
        if tokens[-1] in params.stop_token_ids:
            finish, text = FinishReason.STOP, self._decode(tokens[:-1])
        elif params.stop_strings:
            text = self._decode(tokens)
            cuts = [text.find(stop) for stop in params.stop_strings if stop in text]
            finish, text = (FinishReason.STOP, text[: min(cuts)]) if cuts else (None, text)
        if finish is None and len(tokens) == request.budget:
            finish, text = FinishReason.LENGTH, self._decode(tokens)
        if finish is None:
            return
        spans = merge_spans(request.versions)
        try:
            outcome: Completion | InfraError = make_completion(
                request.request_id, tokens, request.logprobs, finish.value, spans, text
            )
        except InfraError as error:
            outcome = error
        _resolve(request.result, outcome)

    def _fail(self, requests: list[_Request], reason: str) -> None:
        for request in requests:
            _resolve(request.result, InfraError(f"{self._name}: request {request.request_id} {reason}; retry it"))
        gone = {id(request) for request in requests}
        self._waiting = [request for request in self._waiting if id(request) not in gone]
        self._active = [request for request in self._active if id(request) not in gone]


def _spoiled(request: _Request) -> CompletionError:
    return CompletionError(
        f"request {request.request_id}: a logit of token {len(request.tokens)} is not a number; are the weights sound?"
    )


def _resolve(future: "Future[Completion]", outcome: Completion | Exception) -> None:
    """Settle a request once; whoever comes second (an abort against the last token) changes nothing."""
    # Asking first whether it is done would leave room for the other thread between the question and the answer.
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, Completion):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)
