"""The schedule has the documented shape; steps divide once, clip, and skip what they must."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from rl.core.errors import ConfigError
from rl.trainer.config import OptimizerConfig, OptimizerKwargs, SchedulerConfig
from rl.trainer.optimizer import Optimizer, schedule_factor


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [1, 1, 1]),
        ({"warmup_steps": 2, "warmup_start_factor": 0.5}, [0.5, 0.75, 1, 1]),
        ({"name": "linear", "decay_steps": 4}, [1, 0.75, 0.5, 0.25, 0, 0]),
        ({"name": "linear", "decay_steps": 2, "min_factor": 0.2}, [1, 0.6, 0.2, 0.2]),
        ({"name": "cosine", "decay_steps": 2}, [1, 0.5, 0, 0]),
        ({"name": "linear", "decay_steps": 2, "warmup_steps": 1, "warmup_start_factor": 0.1}, [0.1, 1, 0.5, 0]),
    ],
)
def test_schedule(changes: dict[str, Any], expected: list[float]) -> None:
    config = SchedulerConfig(**changes)
    assert [schedule_factor(config, step) for step in range(len(expected))] == pytest.approx(expected)


def make(value: list[float], max_grad_norm: float | None = None, **kwargs: Any) -> tuple[Optimizer, nn.Parameter]:
    parameter = nn.Parameter(torch.tensor(value))
    config = OptimizerConfig(kwargs=OptimizerKwargs(**({"lr": 0.1, "weight_decay": 0.0} | kwargs)))
    return Optimizer([parameter], config, SchedulerConfig(), max_grad_norm), parameter


def test_a_decaying_schedule_without_its_length_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="decay_steps"):
        Optimizer([nn.Parameter(torch.zeros(1))], OptimizerConfig(), SchedulerConfig(name="cosine"), None)


def test_gradients_are_divided_once_and_the_norm_is_of_the_mean() -> None:
    optimizer, parameter = make([0.0, 0.0])
    parameter.grad = torch.tensor([30.0, 40.0])
    step = optimizer.step(10.0)
    assert step.grad_norm == pytest.approx(5.0)
    assert parameter.tolist() == pytest.approx([-0.1, -0.1])
    assert parameter.grad is None


@pytest.mark.parametrize(("bound", "moment"), [(None, 3.0), (1.0, 0.6), (10.0, 3.0)])
def test_clipping_bounds_the_gradient_that_adam_sees(bound: float | None, moment: float) -> None:
    optimizer, parameter = make([0.0, 0.0], bound, betas=(0.0, 0.9))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert optimizer.step(1.0).grad_norm == pytest.approx(5.0)
    assert optimizer.state_dict()["adamw"]["state"][0]["exp_avg"][0] == pytest.approx(moment, rel=1e-5)


def test_an_empty_step_moves_nothing_not_even_by_weight_decay() -> None:
    optimizer, parameter = make([1.0], weight_decay=0.5)
    step = optimizer.step(0.0)
    assert (step.skipped_empty, step.grad_norm, parameter.tolist()) == (True, None, [1.0])
    assert optimizer.state_dict()["adamw"]["state"] == {}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_moves_nothing_and_is_forgotten(bad: float) -> None:
    optimizer, parameter = make([1.0, 1.0], 1.0, weight_decay=0.5)
    parameter.grad = torch.tensor([bad, 1.0])
    step = optimizer.step(1.0)
    assert (step.skipped_nonfinite, step.grad_norm, parameter.tolist()) == (True, None, [1.0, 1.0])
    assert parameter.grad is None


@pytest.mark.parametrize("changes", [{"lr": 0.2}, {"betas": (0.5, 0.999)}, {"betas": (0.9, 0.5)}, {"eps": 1.0}])
def test_every_knob_of_the_optimizer_changes_its_path(changes: dict[str, Any]) -> None:
    paths = []
    for kwargs in ({}, changes):
        optimizer, parameter = make([1.0], **kwargs)
        for gradient in (1.0, -0.3, 0.2):
            parameter.grad = torch.tensor([gradient])
            optimizer.step(1.0)
        paths.append(parameter.item())
    assert paths[0] != pytest.approx(paths[1], rel=1e-4)


def test_weight_decay_is_decoupled() -> None:
    optimizer, parameter = make([1.0], weight_decay=0.5)
    parameter.grad = torch.tensor([0.0])
    optimizer.step(1.0)
    assert parameter.item() == pytest.approx(1 - 0.1 * 0.5)
