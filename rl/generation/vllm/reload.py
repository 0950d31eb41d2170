"""vLLM's layerwise reload with what it leaves open on a CPU (vLLM 0.32), for one model.

Weights are loaded layer by layer, which keeps the storage that captured graphs use and packs linear layers anew. Three
things need care: a refit that was given up leaves layers open; layers that got no weights are put back silently; a tied
output layer keeps a packed copy of the old embeddings, because it gets no tensor of its own. It receives nothing.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rl.core.errors import WeightSyncError
from rl.generation.vllm.head_check import largest_difference


class LayerReload:
    """Opens a model for new weights and closes it again.

    Args:
        model: vLLM's.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._num_closed = 0

    def begin(self) -> None:
        """Open all layers for loading; what an abandoned refit left open is put back first."""
        self.discard()
        initialize_layerwise_reload(self._model)

    def discard(self) -> None:
        """Put back the storage of layers that an abandoned refit left open; what it holds is for the next refit."""
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                _restore_storage(layer, info)
            info.reset()

    def finish(self, model_config: Any) -> None:
        """Close every layer, pack tied output layers again, and check what output layers compute with.

        Raises:
            WeightSyncError: a layer got no weights, or an output layer computes with others than it shows.
        """
        tied = self.tied_heads()
        missing = self._layers_without_weights(tied)
        if missing:
            raise WeightSyncError(f"no weights arrived for {', '.join(missing[:5])} ({len(missing)} layers in all)")
        finalize_layerwise_reload(self._model, model_config)
        self.pack_heads(tied)
        self.check_heads()

    def tied_heads(self) -> list[torch.nn.Module]:
        """Output layers whose weight is an embedding's; during a refit the storage kept for its end counts."""
        tables = [module for module in self._model.modules() if isinstance(module, VocabParallelEmbedding)]
        embeddings = {id(_weight_of(module)) for module in tables if not isinstance(module, ParallelLMHead)}
        heads = [module for module in tables if isinstance(module, ParallelLMHead)]
        return [head for head in heads if id(_weight_of(head)) in embeddings]

    def pack_heads(self, heads: Iterable[torch.nn.Module]) -> None:
        """Pack tied output layers anew: the reload leaves out layers that got no tensor of their own."""
        for head in heads:
            head.quant_method.process_weights_after_loading(head)  # type: ignore[operator,union-attr]

    def check_heads(self) -> None:
        """Compare every output layer that kept its weights beside a packed copy with what it computes.

        Raises:
            WeightSyncError: it computes with others.
        """
        for name, head in self._model.named_modules():
            if not isinstance(head, ParallelLMHead) or head.weight.numel() == 0 or head.weight.device.type != "cpu":
                continue
            if not head.weight.is_floating_point():
                continue
            gap = largest_difference(head.weight, partial(head.quant_method.apply, head), self._num_closed)
            if gap != 0.0:
                raise WeightSyncError(f"output layer '{name}' computes with other weights (they differ by {gap:.3g})")
        self._num_closed += 1

    def _layers_without_weights(self, exempt: list[torch.nn.Module]) -> list[str]:
        missing = []
        for name, layer in self._model.named_modules():
            info = get_layerwise_info(layer)
            open_parameters = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
            untouched = info.can_load() and open_parameters > 0 and info.load_numel <= 0
            if untouched and layer not in exempt and not is_deferred_attention_layer(layer):
                missing.append(name)
        return missing


def _weight_of(module: torch.nn.Module) -> torch.Tensor:
    info = get_layerwise_info(module)
    if info.can_load() and info.kernel_tensors is not None and "weight" in info.kernel_tensors[0]:
        weight = info.kernel_tensors[0]["weight"]
    else:
        weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def _restore_storage(layer: torch.nn.Module, info: Any) -> None:
    parameters, buffers = info.kernel_tensors
    persistent = {name: name not in info.kernel_non_persistent_buffers for name in buffers}
    # A name registered with None (no bias) is part of the layer and stays.
    held = {**layer._parameters, **layer._buffers}
    for name in [name for name, tensor in held.items() if tensor is not None]:
        delattr(layer, name)
    for name, parameter in parameters.items():
        layer.register_parameter(name, parameter)
    for name, buffer in buffers.items():
        layer.register_buffer(name, buffer, persistent=persistent[name])
