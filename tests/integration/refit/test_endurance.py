"""Two hundred refits: memory, open files and shared memory stay where they were."""

from pathlib import Path

import psutil
import pytest
import torch

from rl.core.clock import SystemClock
from rl.generation.config import HfGenerationConfig
from rl.generation.generator import GeneratorRequest
from rl.generation.hf import build
from rl.weights.config import RefitConfig
from rl.weights.sync import WeightSync
from rl.weights.transport import RefitStart, TransportName
from tests.support.local_group import InProcessCluster
from tests.support.refit_model import TrainerModel
from tests.support.refit_processes import (
    TIMEOUT_S,
    WAIT_S,
    ReceiverProcess,
    SenderProcess,
    channel_name,
    connect,
    refit,
    request_of,
    segments,
)
from tests.support.tiny_model import make_tiny_model

NUM_REFITS = 200
DEADLINE_S = 240.0
# Of a process that holds 2 MiB of weights; an allocation that is lost at every refit would be 50 MiB and more.
GROWTH_BYTES = 4 << 20


def assert_flat(usages: list[tuple[int, int]]) -> None:
    """From the second tenth on nothing grows."""
    (first_bytes, first_files), later = usages[1], usages[2:]
    assert max(files for _, files in later) <= first_files, usages
    assert max(size for size, _ in later) - first_bytes < GROWTH_BYTES, usages


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_two_hundred_refits_over_one_set_of_links_leave_every_process_as_it_was(transport: TransportName) -> None:
    before = segments()
    with (
        SenderProcess() as sender,
        ReceiverProcess("generation[0]") as in_place,
        ReceiverProcess("generation[1]", is_staged=True) as staged,
    ):
        ends = (sender, in_place, staged)
        connect(sender, [in_place, staged], request_of(transport, 2))
        calls = [end.call("repeat", RefitStart(1, 1, DEADLINE_S), NUM_REFITS) for end in ends]
        results = [call.result(DEADLINE_S) for call in calls]
        assert len({held for _, held in results}) == 1
        for usages, _ in results:
            assert_flat(usages)
        sender.call("close").result(WAIT_S)
    assert segments() == before


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_links_that_are_made_anew_again_and_again_leave_nothing_behind(transport: TransportName) -> None:
    before = segments()
    with SenderProcess() as sender, ReceiverProcess("generation[0]") as receiver:
        usages: dict[str, list[tuple[int, int]]] = {"sender": [], "receiver": []}
        for epoch in range(1, 41):
            connect(sender, [receiver], request_of(transport, 1))
            refit(sender, [receiver], RefitStart(epoch, epoch, TIMEOUT_S))
            if epoch % 4 == 0:
                usages["sender"].append(sender.call("usage").result(WAIT_S))
                usages["receiver"].append(receiver.call("usage").result(WAIT_S))
        for one in usages.values():
            assert_flat(one)
        sender.call("close").result(WAIT_S)
    assert segments() == before


async def test_two_hundred_refits_of_real_models_leave_the_process_as_it_was(tmp_path: Path) -> None:
    folder, tag = make_tiny_model(tmp_path), channel_name()
    request = GeneratorRequest(str(folder), str(folder), "float32", 48, 0, 1, 0, False, 30.0)
    generator = await build(HfGenerationConfig(num_replicas=2), InProcessCluster(tag), request)
    trainer = TrainerModel(folder)
    sync = WeightSync(trainer.handle, generator, RefitConfig(bucket_mib=0.01), tag, SystemClock())
    await sync.connect()
    process, usages, shared = psutil.Process(), [], segments()
    for version in range(NUM_REFITS):
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(1.001)
        report = await sync.publish(version)
        assert (report.replicas, report.attempts, generator.version) == (2, 1, version)
        if (version + 1) % (NUM_REFITS // 10) == 0:
            usages.append((process.memory_info().rss, process.num_fds()))
    assert_flat(usages)
    assert segments() == shared
    await sync.close()
    await generator.close()
    assert segments() == set()
