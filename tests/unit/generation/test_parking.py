"""Memory that is given up and taken again: the same tensors, the same values, each byte counted once."""

import torch
from torch import nn

from rl.generation.parking import ParkedTensors


def test_the_same_tensors_hold_the_same_values_after_their_memory_was_away() -> None:
    torch.manual_seed(0)
    first, second = nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(3).to(torch.bfloat16))
    views = [first.detach(), first.detach().t(), second.detach()[1:]]
    before = [tensor.clone() for tensor in (first, second, *views)]
    parked = ParkedTensors([first, second])
    assert parked.park() == 7 * 5 * 4 + 3 * 2
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 0
    assert parked.park() == 0, "it is away already"
    assert parked.unpark() == 7 * 5 * 4 + 3 * 2
    assert parked.unpark() == 0
    for tensor, value in zip((first, second, *views), before, strict=True):
        assert torch.equal(tensor, value)
    with torch.no_grad():
        first.add_(1.0)
    assert torch.equal(views[1], first.detach().t()), "they still share one memory"


def test_tied_weights_count_once() -> None:
    embedding, head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
    head.weight = embedding.weight
    parked = ParkedTensors([embedding.weight, head.weight, embedding.weight.detach()[:3]])
    assert parked.park() == parked.unpark() == 11 * 4 * 4


def test_nothing_to_park_is_nothing_moved() -> None:
    parked = ParkedTensors([])
    assert (parked.park(), parked.unpark()) == (0, 0)
