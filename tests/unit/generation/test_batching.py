"""The batching loop over a toy forward pass: joining, stopping, pausing, versions, failures."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest
import torch

from rl.core.errors import CompletionError, InfraError, WeightSyncError
from rl.core.types import Completion, FinishReason, VersionSpan
from rl.generation.batching import BatchLoop, _resolve
from rl.generation.generator import SamplingParams

WAIT_S = 20.0


class Counter:
    """A model that always says last token + 1; each forward pass waits for a permit while `gated`."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.gated = False
        self.entered = threading.Semaphore(0)
        self.permits = threading.Semaphore(0)
        self.failure: Exception | None = None
        self.spoiled: set[int] = set()

    def forward(self, sequences: list[list[int]]) -> torch.Tensor:
        if self.gated:
            self.entered.release()
            assert self.permits.acquire(timeout=WAIT_S)
        if self.failure is not None:
            raise self.failure
        self.batches.append(len(sequences))
        logits = torch.full((len(sequences), 100), -50.0)
        for row, sequence in enumerate(sequences):
            logits[row, sequence[-1] + 1] = 50.0
            if sequence[-1] in self.spoiled:
                logits[row, 3] = torch.nan
        return logits

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in tokens)


@pytest.fixture
def model() -> Counter:
    return Counter()


@pytest.fixture
def loop(model: Counter) -> Iterator[BatchLoop]:
    batches = BatchLoop(model.forward, model.decode, max_batch=4, name="toy")
    batches.set_version(0)
    yield batches
    model.gated = False
    model.permits.release(100)
    batches.close(WAIT_S)


def params(max_new_tokens: int = 5, stop_ids: tuple[int, ...] = (), stops: tuple[str, ...] = ()) -> SamplingParams:
    return SamplingParams(1.0, 1.0, None, max_new_tokens, stop_ids, stops, 0)


def test_a_request_ends_at_its_budget(loop: BatchLoop) -> None:
    done = loop.submit((1,), params(3), 3, "r").result(WAIT_S)
    assert done.tokens == (2, 3, 4)
    assert done.finish_reason is FinishReason.LENGTH
    assert done.text == "cde"
    assert done.version_spans == (VersionSpan(0, 0, 3),)
    assert all(abs(value) < 1e-6 for value in done.logprobs)


def test_logits_that_are_no_numbers_fail_their_own_request_alone(model: Counter, loop: BatchLoop) -> None:
    model.spoiled = {12}
    spoiled, well = loop.submit((11,), params(3), 3, "bad"), loop.submit((1,), params(3), 3, "good")
    with pytest.raises(CompletionError, match="request bad: a logit of token 1 is not a number"):
        spoiled.result(WAIT_S)
    assert well.result(WAIT_S).tokens == (2, 3, 4)


def test_a_stop_token_is_part_of_the_tokens_and_not_of_the_text(loop: BatchLoop) -> None:
    done = loop.submit((1,), params(stop_ids=(4,)), 9, "r").result(WAIT_S)
    assert (done.tokens, done.text, done.finish_reason) == ((2, 3, 4), "cd", FinishReason.STOP)


def test_a_stop_string_ends_the_text_before_it_also_at_the_last_token(loop: BatchLoop) -> None:
    done = loop.submit((1,), params(stops=("de", "z")), 3, "r").result(WAIT_S)
    assert (done.tokens, done.text, done.finish_reason) == ((2, 3, 4), "c", FinishReason.STOP)


def test_requests_join_a_running_batch_up_to_its_size(loop: BatchLoop, model: Counter) -> None:
    model.gated = True
    futures = [loop.submit((1,), params(3), 3, "first")]
    assert model.entered.acquire(timeout=WAIT_S)
    futures += [loop.submit((1,), params(2), 2, f"r{i}") for i in range(5)]
    model.gated = False
    model.permits.release()
    assert [len(future.result(WAIT_S).tokens) for future in futures] == [3, 2, 2, 2, 2, 2]
    assert model.batches[0] == 1
    assert max(model.batches) == 4


def test_keep_freezes_and_the_rest_is_sampled_by_the_new_version(loop: BatchLoop, model: Counter) -> None:
    model.gated = True
    future = loop.submit((1,), params(4), 4, "r")
    assert model.entered.acquire(timeout=WAIT_S)
    model.permits.release()
    assert model.entered.acquire(timeout=WAIT_S)
    pausing = threading.Thread(target=loop.pause, args=("keep", WAIT_S))
    pausing.start()
    model.permits.release()
    pausing.join(WAIT_S)
    assert loop.is_paused
    assert not future.done()
    model.gated = False
    loop.set_version(1)
    loop.resume()
    assert future.result(WAIT_S).version_spans == (VersionSpan(0, 0, 2), VersionSpan(1, 2, 4))


def test_drain_finishes_what_runs_and_holds_back_what_comes(loop: BatchLoop, model: Counter) -> None:
    model.gated = True
    running = loop.submit((1,), params(2), 2, "running")
    assert model.entered.acquire(timeout=WAIT_S)
    pausing = threading.Thread(target=loop.pause, args=("drain", WAIT_S))
    pausing.start()
    model.gated = False
    model.permits.release()
    pausing.join(WAIT_S)
    assert running.result(0).tokens == (2, 3)
    late = loop.submit((1,), params(2), 2, "late")
    assert loop.is_paused
    assert not late.done()
    loop.set_version(1)
    loop.resume()
    assert late.result(WAIT_S).version_min == 1


def test_abort_fails_everything_that_had_arrived(loop: BatchLoop, model: Counter) -> None:
    model.gated = True
    futures = [loop.submit((1,), params(), 5, f"r{i}") for i in range(6)]
    assert model.entered.acquire(timeout=WAIT_S)
    pausing = threading.Thread(target=loop.pause, args=("abort", WAIT_S))
    pausing.start()
    model.gated = False
    model.permits.release()
    pausing.join(WAIT_S)
    for future in futures:
        with pytest.raises(InfraError, match="aborted by a refit"):
            future.result(WAIT_S)
    loop.resume()
    assert loop.submit((1,), params(1), 1, "after").result(WAIT_S).tokens == (2,)


def test_one_request_can_be_aborted(loop: BatchLoop, model: Counter) -> None:
    loop.pause("keep", WAIT_S)
    gone, stays = (loop.submit((1,), params(1), 1, name) for name in ("gone", "stays"))
    loop.abort("gone")
    loop.abort("unknown")
    loop.resume()
    with pytest.raises(InfraError, match="request gone was aborted"):
        gone.result(WAIT_S)
    assert stays.result(WAIT_S).tokens == (2,)


def test_a_drain_that_is_late_names_itself(loop: BatchLoop, model: Counter) -> None:
    model.gated = True
    loop.submit((1,), params(2), 2, "r")
    assert model.entered.acquire(timeout=WAIT_S)
    with pytest.raises(InfraError, match=r"pause \(drain\) did not end"):
        loop.pause("drain", 0.05)


def test_a_failing_forward_pass_fails_its_batch_and_the_loop_lives(loop: BatchLoop, model: Counter) -> None:
    model.failure = RuntimeError("no memory")
    with pytest.raises(InfraError, match="no memory"):
        loop.submit((1,), params(), 5, "r").result(WAIT_S)
    model.failure = None
    assert loop.submit((1,), params(1), 1, "r").result(WAIT_S).tokens == (2,)


def test_weights_without_a_version_sample_nothing(model: Counter) -> None:
    batches = BatchLoop(model.forward, model.decode, max_batch=4, name="toy")
    with pytest.raises(WeightSyncError, match="publish"):
        batches.submit((1,), params(), 5, "r").result(WAIT_S)
    batches.close(WAIT_S)


def test_closing_fails_what_waits_and_refuses_more(loop: BatchLoop) -> None:
    loop.pause("keep", WAIT_S)
    future = loop.submit((1,), params(), 5, "r")
    loop.close(WAIT_S)
    loop.close(WAIT_S)
    with pytest.raises(InfraError, match="ended with its engine"):
        future.result(WAIT_S)
    with pytest.raises(InfraError, match="closed"):
        loop.submit((1,), params(), 5, "r")


class Contested(Future[Completion]):
    """A request that another thread settles just after this one asked whether it is done."""

    def done(self) -> bool:
        before = super().done()
        if not before:
            self.set_exception(InfraError("was aborted"))
        return before

    def set_result(self, result: Completion) -> None:
        if not super().done():
            self.set_exception(InfraError("was aborted"))
        super().set_result(result)


def test_the_last_token_loses_against_an_abort_in_the_same_moment() -> None:
    future = Contested()
    _resolve(future, Completion((1,), (-0.5,), FinishReason.STOP, (VersionSpan(0, 0, 1),), ""))
    with pytest.raises(InfraError, match="was aborted"):
        future.result(0)
