"""Two trainer processes of a real Ray train like one in-process worker, bit by bit of the protocol."""

from pathlib import Path

import pytest
import torch

from rl.algorithms.config import LossConfig
from rl.algorithms.objective import parse_objective
from rl.cluster.config import ClusterConfig
from rl.cluster.virtual_cluster import build_cluster
from rl.core.errors import ConfigError
from rl.core.resources import RunResources
from rl.trainer.policy import start_policy
from tests.support.policies import make_batch, make_policy, make_request, make_settings
from tests.support.tiny_model import make_tiny_model

LOSS = parse_objective(LossConfig(reference_policy_kl_penalty=0.0), single_update=True)


async def test_two_ranks_over_ray_train_like_one_and_save_what_one_can_restore(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    request = make_request(model)
    alone = await make_policy(make_settings(model), request)
    batches = [make_batch(0), make_batch(1)]
    config = ClusterConfig(kind="ray", start_timeout_s=120.0, object_store_mib=80)
    with RunResources.create() as run:
        cluster = await build_cluster(config, run)
        try:
            pair = await start_policy(cluster, make_settings(model, num_workers=2), request)
            for batch in batches:
                expected, got = await alone.train(batch, LOSS), await pair.train(batch, LOSS)
                assert got.version == expected.version
                assert got.metrics == pytest.approx(expected.metrics, rel=1e-3, abs=1e-4)
            logprobs = await pair.logprobs(batches[0])
            names = [spec.name for spec in await pair.weight_sender().manifest()]
            await pair.save(tmp_path / "checkpoint", with_optimizer=True)
            with pytest.raises(ConfigError, match="no optimizer"):
                await pair.restore(tmp_path / "nothing")
            await pair.close()
        finally:
            await cluster.shutdown()
    assert len(names) == len(set(names)) and "lm_head.weight" not in names
    restored = await make_policy(make_settings(model), request)
    await restored.restore(tmp_path / "checkpoint")
    assert restored.version == 2
    assert torch.allclose(await restored.logprobs(batches[0]), logprobs, atol=1e-6)
