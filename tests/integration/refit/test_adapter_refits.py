"""Refits of adapters leave the base as it was, bit for bit: merged or alone, at the trainer and at the generator.

Of vLLM: `test_vllm_refits.py`, with engines of one process and of two.
"""

from pathlib import Path

import torch
from torch import Tensor

from rl.core.clock import SystemClock
from rl.generation.config import HfGenerationConfig
from rl.generation.generator import GeneratorRequest
from rl.generation.hf import HfWorker, build
from rl.weights.config import RefitConfig
from rl.weights.native import digests_of
from rl.weights.receiver import InPlace, WeightReceiver
from rl.weights.sender import WeightSender
from rl.weights.source import LocalSource
from rl.weights.sync import WeightSync
from tests.support.connected_ends import ConnectedEnds
from tests.support.local_group import InProcessCluster
from tests.support.low_rank import Adapted
from tests.support.refit_model import LocalSender, TrainerModel
from tests.support.tiny_model import make_tiny_model

NAMES = ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight")


async def test_merged_adapters_never_add_up_in_a_generator_and_its_other_weights_stay(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    request = GeneratorRequest(str(folder), str(folder), "float32", 64, 0, 1, 0, False, 60.0)
    generator = await build(HfGenerationConfig(num_replicas=1), InProcessCluster("tdm-test"), request)
    adapted = Adapted(TrainerModel(folder).model, NAMES)
    sender = LocalSender(WeightSender(adapted.source()))
    sync = WeightSync(sender, generator, RefitConfig(bucket_mib=0.01, timeout_s=30.0), "tdm-test", SystemClock())
    held = worker_parameters(generator._group.workers[0])  # type: ignore[attr-defined]
    base = adapted.digests()
    try:
        await sync.connect()
        for version, seed in enumerate((0, 1, 2, 0)):
            adapted.train(seed)
            await sync.publish(version)
            wholes = adapted.wholes()
            for name in adapted.base:
                assert torch.equal(held[name], wholes[name]), (version, name)
                is_base = torch.equal(held[name], adapted.base[name])
                assert is_base == (seed == 0 or name not in NAMES), (version, name)
            assert adapted.digests() == base, "the trainer's own base is never written"
    finally:
        await sync.close()
        await generator.close()


def test_adapters_alone_are_all_that_travels_into_a_model_with_its_own_base(tmp_path: Path) -> None:
    trainer, engine = (TrainerModel(make_tiny_model(tmp_path / "tiny")).model for _ in range(2))
    adapted, served = Adapted(trainer, NAMES), Adapted(engine, NAMES)
    receiver = WeightReceiver(InPlace({**served.base, **served.adapters}, is_partial=True), "generation[0]")
    base = served.digests()
    with ConnectedEnds([WeightSender(LocalSource(lambda: adapted.adapters))], [receiver]) as ends:
        for version in range(1, 4):
            adapted.train(version)
            reports, _ = ends.refit(version)
            assert reports[0].num_bytes == sum(tensor.nbytes for tensor in adapted.adapters.values())
            assert digests_of(list(served.adapters.values())) == reports[0].digests
            assert served.digests() == base == adapted.digests()
            for name, whole in adapted.wholes().items():
                assert torch.equal(served.wholes()[name], whole)


def worker_parameters(worker: HfWorker) -> dict[str, Tensor]:
    """The model's own, as it computes with them."""
    return dict(worker._model.named_parameters())
