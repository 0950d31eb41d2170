"""All ranks of the trainer behind one handle: every root sends its part, an abort reaches a send that is under way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rl.cluster.config import ClusterConfig
from rl.cluster.local import LocalCluster
from rl.core.errors import FatalError, WeightSyncError
from rl.core.resources import RunResources
from rl.trainer.policy import WorkerPolicy, start_policy
from rl.trainer.weight_sender import merge_reports
from rl.weights.faults import TransferError
from rl.weights.receiver import InPlace, Received, WeightReceiver
from rl.weights.signature import signature_of
from rl.weights.transport import LinkSettings, OpenRequest, RefitStart, SendReport, TransferInfo
from tests.support.policies import make_request, make_settings, worker_of

TIMEOUT_S = 20.0


@asynccontextmanager
async def started(model: Path, num_workers: int, precision: str = "float32") -> AsyncIterator[tuple[WorkerPolicy, str]]:
    with RunResources.create() as run:
        cluster = LocalCluster(ClusterConfig(kind="local"), run)
        try:
            settings = make_settings(model, num_workers=num_workers, precision=precision)
            yield await start_policy(cluster, settings, make_request(model)), run.tag
        finally:
            await cluster.shutdown()


def request_of(tag: str, num_roots: int = 0) -> OpenRequest:
    link = LinkSettings(TIMEOUT_S, host="127.0.0.1")
    return OpenRequest("shm", f"{tag}-refit", 1 << 16, 2, ("generation[0]",), TIMEOUT_S, link, num_roots)


async def receive(receiver: WeightReceiver, start: RefitStart) -> Received:
    receiver.start(start)
    await asyncio.to_thread(receiver.update)
    return receiver.finish()


def blank(policy: WorkerPolicy) -> dict[str, Tensor]:
    tensors = worker_of(policy)._model.named_tensors()
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


async def joined(policy: WorkerPolicy, request: OpenRequest, receiver: WeightReceiver) -> TransferInfo:
    handle = policy.weight_sender()
    info = await handle.open(request)
    await asyncio.gather(handle.join(), asyncio.to_thread(receiver.init, info, 0))
    return info


@pytest.mark.parametrize("num_roots", [0, 2])
async def test_one_rank_sends_unless_more_are_asked_for_and_all_bytes_arrive(tiny_model: Path, num_roots: int) -> None:
    async with started(tiny_model, num_workers=2) as (policy, tag):
        handle = policy.weight_sender()
        targets = blank(policy)
        receiver = WeightReceiver(InPlace(targets), "generation[0]")
        info = await joined(policy, request_of(tag, num_roots), receiver)
        assert len(info.addresses) == (num_roots or 1)
        start = RefitStart(1, policy.version, TIMEOUT_S)
        report, received = await asyncio.gather(handle.send(start), receive(receiver, start))
        assert report.digests == received.digests
        assert report.num_bytes == sum(tensor.nbytes for tensor in targets.values())
        assert [spec.name for spec in await handle.manifest()] == list(targets)
        signatures = await handle.signatures()
        assert signatures == {name: signature_of(name, tensor) for name, tensor in targets.items()}
        receiver.close()
        await handle.close()
        await handle.close()


async def test_the_wire_has_the_precision_of_the_policy(tiny_model: Path) -> None:
    async with started(tiny_model, num_workers=1, precision="bfloat16") as (policy, tag):
        whole = blank(policy)
        targets = {name: tensor.bfloat16() for name, tensor in whole.items()}
        receiver = WeightReceiver(InPlace(targets), "generation[0]")
        await joined(policy, request_of(tag), receiver)
        start = RefitStart(1, policy.version, TIMEOUT_S)
        report, _ = await asyncio.gather(policy.weight_sender().send(start), receive(receiver, start))
        assert report.num_bytes == sum(tensor.nbytes for tensor in targets.values())
        receiver.close()


async def test_an_abort_ends_a_send_that_waits_and_the_next_refit_works(tiny_model: Path) -> None:
    async with started(tiny_model, num_workers=2) as (policy, tag):
        handle = policy.weight_sender()
        receiver = WeightReceiver(InPlace(blank(policy)), "generation[0]")
        await joined(policy, request_of(tag, 2), receiver)
        sending = asyncio.ensure_future(handle.send(RefitStart(1, policy.version, TIMEOUT_S)))
        await asyncio.sleep(0)  # the calls are under way; nobody receives
        await handle.abort("the driver gave up")
        with pytest.raises(TransferError, match="the driver gave up") as caught:
            await asyncio.wait_for(sending, 5.0)
        assert caught.value.kind == "aborted"
        await joined(policy, request_of(tag, 2), receiver)
        start = RefitStart(2, policy.version, TIMEOUT_S)
        await asyncio.gather(handle.send(start), receive(receiver, start))
        receiver.close()


async def test_another_version_is_refused_and_the_cause_is_told_before_its_consequences(tiny_model: Path) -> None:
    async with started(tiny_model, num_workers=2) as (policy, tag):
        receiver = WeightReceiver(InPlace(blank(policy)), "generation[0]")
        await joined(policy, request_of(tag, 2), receiver)
        worker_of(policy, rank=1)._version += 1  # it has gone ahead
        with pytest.raises(WeightSyncError, match="version 0 asked for, but the trainer holds 1"):
            await asyncio.wait_for(policy.weight_sender().send(RefitStart(1, 0, TIMEOUT_S)), 5.0)
        receiver.close()


def test_reports_of_roots_add_up_and_the_slowest_counts() -> None:
    first = SendReport(b"\x01" * 8 + bytes(8), 10, {"wire": 1.0, "gather": 0.5})
    second = SendReport(bytes(8) + b"\x02" * 8, 20, {"wire": 2.0})
    merged = merge_reports([first, second])
    assert merged == SendReport(b"\x01" * 8 + b"\x02" * 8, 30, {"gather": 0.5, "wire": 2.0})
    with pytest.raises(FatalError, match="different manifests"):
        merge_reports([first, SendReport(bytes(8), 0, {})])
