"""What keeps weights of another model out of an engine: a server that somebody else started may serve one.

It does not load by itself, nor does it know vLLM's names: the model does.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rl.core.errors import WeightSyncError
from rl.weights.transport import TensorSpec

_IS_IT_THE_SAME = "is the model that it serves the one that is trained?"


def refuse_another_model(model: torch.nn.Module, manifest: Sequence[TensorSpec]) -> None:
    """Compare what needs no loading, before anything is touched; only for an engine whose ranks share no layer.

    Norms alone: engines fuse, pack and pad other layers. Their size is the width of the model.

    Raises:
        WeightSyncError: a norm has another size.
    """
    parameters = dict(model.named_parameters())
    for spec in manifest:
        own = parameters.get(spec.name)
        if own is not None and spec.name.endswith("norm.weight") and tuple(own.shape) != tuple(spec.shape):
            raise WeightSyncError(
                f"the engine's '{spec.name}' has shape {list(own.shape)}, the trainer's {list(spec.shape)}; "
                f"{_IS_IT_THE_SAME}"
            )


def load_tensors(model: torch.nn.Module, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Hand tensors to the model's own loader.

    Raises:
        WeightSyncError: it fails; the text says at which tensor, which a loader's own assertions do not.
    """
    place = "the first tensor"

    def given() -> Iterator[tuple[str, Tensor]]:
        nonlocal place
        for name, tensor in tensors:
            place = f"'{name}' of shape {list(tensor.shape)}"
            yield name, tensor

    try:
        model.load_weights(given())  # type: ignore[operator]
    except Exception as error:
        words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise WeightSyncError(f"the engine's loader fails at {place}: {words}; {_IS_IT_THE_SAME}") from error
