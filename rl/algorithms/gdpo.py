"""GDPO (Liu et al. 2026, "GDPO: Group reward-Decoupled Normalization Policy Optimization"), the estimator.

    A_i = whiten over the step ( sum_n w_n GRPO_n(i) )

where GRPO_n(i) is the group-relative advantage of the n-th reward component alone. Normalising components before they
are summed keeps combinations apart that have equal sums; whitening afterwards keeps the size of an update independent
of how many components there are.

In YAML:
    grpo:
      use_leave_one_out_baseline: false
      adv_estimator: {name: gdpo, reward_weights: {correctness: 1.0, format: 0.5}}
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.algorithms.advantages import Rollouts, by_rollout, group_advantages, spread
from rl.algorithms.algorithm import Need
from rl.algorithms.whitening import whiten_unbiased
from rl.core.batch import TrainBatch
from rl.core.errors import ConfigError


@dataclass(frozen=True)
class GDPO:
    """The estimator.

    Attributes:
        weights: Weight of each component, by name; 1 where none is given.
        leave_one_out: Whether a component's baseline is the mean of the siblings rather than of the whole group.
        normalize: Whether a component is divided by its group's standard deviation.
    """

    weights: Mapping[str, float]
    leave_one_out: bool = False
    normalize: bool = True
    needs: frozenset[Need] = frozenset()

    def __call__(self, batch: TrainBatch) -> dict[str, Tensor]:
        """Return {"advantages": [T] float32}. A rollout that lacks a component has no vote in it and adds 0.

        Raises:
            ConfigError: fewer than two components, or a weight for one that the environment does not report.
        """
        rollouts = by_rollout(batch)
        total = torch.zeros(rollouts.rows.numel(), dtype=torch.float64)
        if bool(rollouts.valid.any()):
            total = self._weighted_sum(batch, rollouts)
        return {"advantages": spread(whiten_unbiased(total, rollouts.valid, 0.0), rollouts, batch)}

    def _weighted_sum(self, batch: TrainBatch, rollouts: Rollouts) -> Tensor:
        """Return [R] float64: the weighted sum of the components' advantages."""
        components = _components(batch)
        self._check_names(batch.component_names)
        total = torch.zeros(rollouts.rows.numel(), dtype=torch.float64)
        for place, name in enumerate(batch.component_names):
            values = group_advantages(
                components[rollouts.rows, place],
                rollouts.valid,
                rollouts.group_ids,
                leave_one_out=self.leave_one_out,
                normalize=self.normalize,
            )
            total += self.weights.get(name, 1.0) * values.to(torch.float64)
        return total

    def _check_names(self, names: tuple[str, ...]) -> None:
        unknown = sorted(set(self.weights) - set(names))
        if unknown:
            raise ConfigError(
                f"grpo.adv_estimator.reward_weights names {unknown}, but the environment reports {list(names)}; use "
                "those names"
            )


def _components(batch: TrainBatch) -> Tensor:
    if batch.reward_components is None or len(batch.component_names) < 2:
        raise ConfigError(
            "grpo.adv_estimator.name=gdpo needs at least 2 reward components, but the rewards of this step have "
            f"{', '.join(batch.component_names) or 'none'}; let your function return {{component: number}} for each "
            "completion, give one function for each component in targets, or use another grpo.adv_estimator.name"
        )
    return batch.reward_components
