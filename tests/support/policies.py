"""Policies over the tiny model, and batches that a policy can train on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rl.algorithms.assembly import build_algorithm
from rl.algorithms.config import GRPOConfig, LossConfig
from rl.cluster.config import ClusterConfig
from rl.cluster.local import LocalCluster, LocalWorkerGroup
from rl.core.batch import TrainBatch
from rl.core.resources import RunResources
from rl.trainer.config import OptimizerConfig, OptimizerKwargs, PolicySettings
from rl.trainer.policy import PolicyRequest, WorkerPolicy, start_policy
from rl.trainer.worker import PolicyWorker
from tests.support.rollouts import random_groups


def make_settings(model: Path, *, lr: float = 1e-3, **changes: Any) -> PolicySettings:
    """Settings for the tiny model: plain torch log-probabilities, no weight decay."""
    kwargs = OptimizerKwargs(lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    base = {"model_name": str(model), "logprob_impl": "torch", "optimizer": OptimizerConfig(kwargs=kwargs)}
    return PolicySettings(**(base | changes))


def make_request(model: Path, **changes: Any) -> PolicyRequest:
    """A request for one-thread workers and a step of 16 sequences."""
    base: dict[str, Any] = {
        "model_path": model,
        "tokenizer_path": model,
        "temperature": 1.0,
        "seed": 0,
        "sequences_per_step": 16,
        "needs_reference": False,
        "num_threads": 1,
        "gpus_per_worker": 0,
        "call_timeout_s": 60.0,
        "version": 0,
    }
    return PolicyRequest(**(base | changes))


async def make_policy(
    settings: PolicySettings, request: PolicyRequest, note: Callable[[str], None] = lambda _: None
) -> WorkerPolicy:
    """A policy whose workers are threads of this process."""
    cluster = LocalCluster(ClusterConfig(kind="local"), RunResources(tag="test", temp_dir=request.model_path))
    policy = await start_policy(cluster, settings, request, note)
    assert isinstance(policy, WorkerPolicy)
    return policy


def make_batch(seed: int = 0, num_groups: int = 4, group_size: int = 4) -> TrainBatch:
    """A batch with advantages."""
    batch = TrainBatch.from_groups(random_groups(seed, num_groups, group_size))
    return batch.with_columns(**build_algorithm(GRPOConfig(), LossConfig(), True).advantages(batch))


async def weights_of(policy: WorkerPolicy, rank: int = 0) -> dict[str, torch.Tensor]:
    """A copy of a worker's weights."""
    tensors = worker_of(policy, rank)._model.named_tensors()
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def worker_of(policy: WorkerPolicy, rank: int = 0) -> PolicyWorker:
    """The worker object itself, for a look inside."""
    assert isinstance(policy.group, LocalWorkerGroup)
    worker = policy.group._slots[rank].worker
    assert isinstance(worker, PolicyWorker)
    return worker


def first_moments(policy: WorkerPolicy, rank: int = 0) -> dict[int, torch.Tensor]:
    """Adam's first moments: after one step, a tenth of the clipped gradient."""
    state = worker_of(policy, rank)._optimizer.state_dict()["adamw"]["state"]
    return {key: value["exp_avg"] for key, value in state.items()}
