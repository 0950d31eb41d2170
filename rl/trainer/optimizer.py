"""AdamW with clipping by the global norm, and the learning-rate schedule. One schedule position = one RL step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rl.core.errors import ConfigError
from rl.trainer.config import OptimizerConfig, SchedulerConfig


def schedule_factor(config: SchedulerConfig, step: int) -> float:
    """Return the share of the learning rate in RL step `step` (the first is 0).

    Warm-up is linear from `warmup_start_factor` to 1; then constant, or down to `min_factor` over `decay_steps`.
    """
    if step < config.warmup_steps:
        return config.warmup_start_factor + (1 - config.warmup_start_factor) * step / config.warmup_steps
    if config.name == "constant":
        return 1.0
    if config.decay_steps is None:
        raise ConfigError(f"policy.scheduler.name={config.name} needs policy.scheduler.decay_steps")
    progress = min(1.0, (step - config.warmup_steps) / config.decay_steps)
    shape = 1 - progress if config.name == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.min_factor + (1 - config.min_factor) * shape


@dataclass(frozen=True)
class OptimizerStep:
    """What one optimizer step did.

    Attributes:
        grad_norm: Global gradient norm before clipping; None when there was nothing to step on.
        lr: Learning rate of the step.
        skipped_empty: No token counted, so nothing moved.
        skipped_nonfinite: The gradient norm was not finite, so nothing moved.
    """

    grad_norm: float | None
    lr: float
    skipped_empty: bool = False
    skipped_nonfinite: bool = False


class Optimizer:
    """AdamW over `parameters`. A skipped step leaves weights, moments and step counts untouched."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: OptimizerConfig,
        scheduler: SchedulerConfig,
        max_grad_norm: float | None,
    ) -> None:
        self._parameters = list(parameters)
        self._base_lr = optimizer.kwargs.lr
        self._scheduler = scheduler
        self._max_grad_norm = max_grad_norm
        self._rl_step = 0
        self._adamw = torch.optim.AdamW(
            self._parameters,
            lr=optimizer.kwargs.lr,
            betas=optimizer.kwargs.betas,
            eps=optimizer.kwargs.eps,
            weight_decay=optimizer.kwargs.weight_decay,
            fused=True,
        )
        schedule_factor(scheduler, scheduler.warmup_steps)  # an incomplete schedule fails here, not at its step

    @property
    def lr(self) -> float:
        """Learning rate of the current RL step."""
        return self._base_lr * schedule_factor(self._scheduler, self._rl_step)

    def gradients(self) -> list[Tensor]:
        """Return the gradient of every parameter, zeros where none was computed."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def step(self, count: float) -> OptimizerStep:
        """Divide the accumulated gradient sums by `count`, clip, step, and clear the gradients."""
        try:
            if count <= 0:
                return OptimizerStep(None, self.lr, skipped_empty=True)
            return self._step(count)
        finally:
            self._adamw.zero_grad(set_to_none=True)

    def end_rl_step(self) -> None:
        """Advance the schedule."""
        self._rl_step += 1

    def offload(self) -> int:
        """Move the moments to the host and drop gradients; return the bytes that left the device."""
        freed = sum(p.grad.nbytes for p in self._parameters if p.grad is not None and p.grad.device.type != "cpu")
        self._adamw.zero_grad(set_to_none=True)
        return freed + self._move_moments(lambda parameter: torch.device("cpu"))

    def reload(self) -> int:
        """Bring the moments back to their parameters' devices; return the bytes that moved."""
        return self._move_moments(lambda parameter: parameter.device)

    def state_dict(self) -> dict[str, Any]:
        """Return moments, step counts and the schedule's position."""
        return {"adamw": self._adamw.state_dict(), "rl_step": self._rl_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._adamw.load_state_dict(state["adamw"])
        self._rl_step = state["rl_step"]

    def _move_moments(self, place: Callable[[Tensor], torch.device]) -> int:
        moved = 0
        for parameter, state in self._adamw.state.items():
            for name, value in state.items():
                # The step counts are where AdamW wants them, on the host.
                if isinstance(value, Tensor) and value.dim() and value.device != place(parameter):
                    moved += value.nbytes
                    state[name] = value.to(place(parameter))
        return moved

    def _step(self, count: float) -> OptimizerStep:
        gradients = self.gradients()
        norm = float(torch.nn.utils.get_total_norm(gradients)) / count
        lr = self.lr
        if not math.isfinite(norm):
            return OptimizerStep(None, lr, skipped_nonfinite=True)
        scale = 1.0 / count
        if self._max_grad_norm is not None:
            scale *= min(1.0, self._max_grad_norm / (norm + 1e-6))
        torch._foreach_mul_(gradients, scale)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        return OptimizerStep(norm, lr)
