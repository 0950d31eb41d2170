"""Puts y = W x together again from the shares that the processes of an engine hold of W. Imports no vLLM.

Rows of W that lie in several processes give parts of y, columns give summands of it, and copies give the same y several
times, of which the mean is taken: a copy that differs shows too.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl.weights.signature import numbers_of


@dataclass(frozen=True)
class Share:
    """What one process adds to y.

    Attributes:
        start: First row of y that it holds.
        rows: Rows of the whole y.
        weight: 1 / number of processes that hold the same.
        values: [n] float64.
    """

    start: int
    rows: int
    weight: float
    values: Tensor

    def plain(self) -> list[Any]:
        """As plain values."""
        data = self.values.to("cpu", torch.float64).contiguous().numpy().tobytes()
        return [self.start, self.rows, self.weight, base64.b64encode(data).decode()]

    @staticmethod
    def of(plain: Sequence[Any]) -> "Share":
        """From plain values."""
        start, rows, weight, data = plain
        values = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.float64) if data else torch.zeros(0)
        return Share(int(start), int(rows), float(weight), values)


def signatures_of(processes: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, ...]]:
    """Return the signature of every tensor of which some process holds a share.

    Args:
        processes: Plain shares by name, one mapping per process.
    """
    whole: dict[str, Tensor] = {}
    for process in processes:
        for name, plain in process.items():
            share = Share.of(plain)
            y = whole.setdefault(name, torch.zeros(share.rows, dtype=torch.float64))
            y[share.start : share.start + share.values.numel()] += share.weight * share.values
    return {name: numbers_of(y) for name, y in whole.items()}
