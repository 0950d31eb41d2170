"""Rows, columns and copies of a matrix in several processes give the signature of the whole."""

import json

import torch

from rl.generation.vllm.shares import Share, signatures_of
from rl.weights.signature import first_deviation, probe_vector, signature_of

NAME = "layer.weight"


def signature_from(*shares: Share) -> dict[str, tuple[float, ...]]:
    return signatures_of([json.loads(json.dumps({NAME: share.plain()})) for share in shares])


def test_slices_and_copies_add_up() -> None:
    weight = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = probe_vector(NAME, 6)
    right = {NAME: signature_of(NAME, weight)}
    rows = [Share(start, 12, 1.0, weight[start : start + 4] @ x) for start in (0, 4, 8)]
    columns = [Share(0, 12, 1.0, weight[:, part] @ x[part]) for part in (slice(0, 2), slice(2, 6))]
    copies = [Share(0, 12, 0.5, weight @ x) for _ in range(2)]
    for shares in (rows, columns, copies):
        assert first_deviation(right, signature_from(*shares), 1e-12) is None


def test_a_copy_that_differs_shows() -> None:
    weight = torch.ones(3, 4, dtype=torch.float64)
    x = probe_vector(NAME, 4)
    other = weight.clone()
    other[1, 2] = 2
    shares = [Share(0, 3, 0.5, weight @ x), Share(0, 3, 0.5, other @ x)]
    assert first_deviation({NAME: signature_of(NAME, weight)}, signature_from(*shares), 1e-3) is not None


def test_a_tensor_without_numbers_is_an_empty_share() -> None:
    assert signature_from(Share(0, 0, 1.0, torch.zeros(0, dtype=torch.float64))) == {NAME: (0.0, 0.0)}
