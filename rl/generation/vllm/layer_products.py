"""What vLLM's layers make of the probe vectors of `rl.weights.signature`, tensor by tensor, as this process holds them.

Packed linear layers hide their weights; what they answer to x shows them all the same. A checkpoint's tensor is found
in the model by the model's own table of names; fused layers and tensor-parallel slices give the rows or columns that
are theirs. A tensor that cannot be found or is quantised gives no share. It changes nothing in the model.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.utils import WeightsMapper

from rl.generation.vllm.shares import Share
from rl.weights.signature import probe_vector, products_of
from rl.weights.transport import TensorSpec

ShardId = str | int | None


@runtime_checkable
class _Renames(Protocol):
    """A model with a table from the checkpoint's names to its own."""

    hf_to_vllm_mapper: WeightsMapper


@runtime_checkable
class _Packs(Protocol):
    """A model with a table of its fused layers."""

    packed_modules_mapping: Mapping[str, list[str]]


class _Slice:
    """Where the rows of one checkpoint tensor lie: n rows at `offset` of the layer, at `start` of the tensor."""

    def __init__(self, offset: int, rows: int, start: int, copies: int = 1) -> None:
        self.local = slice(offset, offset + rows)
        self.start = start
        self.whole = slice(start, start + rows)
        self.weight = 1 / copies


def layer_products(model: torch.nn.Module, specs: Iterable[TensorSpec], tp_size: int) -> dict[str, Share]:
    """Return this process's share of W x for every tensor that it can be told for.

    Args:
        model: vLLM's.
        specs: Whole tensors, by the checkpoint's names.
        tp_size: Tensor-parallel processes.
    """
    shares = {}
    modules = dict(model.named_modules())
    with torch.inference_mode():
        for spec in specs:
            share = _share(model, modules, spec, tp_size)
            if share is not None:
                shares[spec.name] = share
    return shares


def _share(
    model: torch.nn.Module, modules: Mapping[str, torch.nn.Module], spec: TensorSpec, tp_size: int
) -> Share | None:
    place, shard = _place(model, spec.name)
    path, _, leaf = place.rpartition(".")
    module = modules.get(path)
    if module is None or 0 in spec.shape:
        return None
    if isinstance(module, LinearBase) and len(spec.shape) == 2 and leaf == "weight":
        return _of_linear(module, spec, shard, tp_size)
    if isinstance(module, VocabParallelEmbedding) and leaf == "weight":
        return _of_vocabulary(module, spec)
    parameter = module._parameters.get(leaf)
    if parameter is None:
        return None
    if isinstance(module, ColumnParallelLinear) and len(spec.shape) == 1:
        part = _rows(module, shard)
        x = probe_vector(spec.name, spec.shape[0])[part.whole]
        dot = parameter.detach()[part.local].to("cpu", torch.float64) @ x
        return Share(0, 1, part.weight, dot.reshape(1))
    if tuple(parameter.shape) != spec.shape:
        return None
    y = products_of(spec.name, parameter)
    return Share(0, y.numel(), 1 / tp_size, y)


def _place(model: Any, name: str) -> tuple[str, ShardId]:
    """Return the model's own name of a checkpoint's tensor, and which part of a fused layer it is."""
    mapper = model.hf_to_vllm_mapper if isinstance(model, _Renames) else WeightsMapper()
    mapped = list(mapper.apply([(name, torch.empty(0))]))
    if len(mapped) != 1:
        return "", None
    place, marker = mapped[0]
    shard: ShardId = vars(marker).get("shard_id")
    path, _, leaf = place.rpartition(".")
    parent, _, layer = path.rpartition(".")
    if shard is None and isinstance(model, _Packs):
        for fused, parts in model.packed_modules_mapping.items():
            if layer in parts and layer != fused:
                index = parts.index(layer)
                return f"{parent}.{fused}.{leaf}".removeprefix("."), "qkv"[index] if len(parts) == 3 else index
    return place, shard


def _rows(layer: ColumnParallelLinear, shard: ShardId) -> _Slice:
    if isinstance(layer, QKVParallelLinear) and isinstance(shard, str):
        q, kv = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
        copies = layer.num_kv_head_replicas
        v = layer.num_kv_heads * layer.v_head_size
        group = layer.tp_rank // copies
        return {
            "q": _Slice(0, q, layer.tp_rank * q),
            "k": _Slice(q, kv, group * kv, copies),
            "v": _Slice(q + kv, v, group * v, copies),
        }[shard]
    if isinstance(layer, MergedColumnParallelLinear) and isinstance(shard, int):
        rows = layer.output_sizes[shard] // layer.tp_size
        return _Slice(sum(layer.output_sizes[:shard]) // layer.tp_size, rows, layer.tp_rank * rows)
    rows = layer.output_size_per_partition
    return _Slice(0, rows, layer.tp_rank * rows)


def _of_linear(layer: LinearBase, spec: TensorSpec, shard: ShardId, tp_size: int) -> Share | None:
    if type(layer.quant_method) is not UnquantizedLinearMethod:
        return None
    rows, width = spec.shape
    x = probe_vector(spec.name, width)
    if isinstance(layer, RowParallelLinear):
        part = layer.input_size_per_partition
        y = _answer(layer, x[layer.tp_rank * part : (layer.tp_rank + 1) * part])
        return Share(0, rows, 1.0, y)
    y = _answer(layer, x)
    if isinstance(layer, ColumnParallelLinear):
        rows_here = _rows(layer, shard)
        return Share(rows_here.start, rows, rows_here.weight, y[rows_here.local])
    return Share(0, rows, 1 / tp_size, y)


def _of_vocabulary(layer: VocabParallelEmbedding, spec: TensorSpec) -> Share | None:
    if type(layer.quant_method) is not UnquantizedEmbeddingMethod:
        return None
    indices = layer.shard_indices
    start, count = indices.org_vocab_start_index, indices.num_org_elements
    if isinstance(layer, ParallelLMHead):
        y = _answer(layer, probe_vector(spec.name, spec.shape[1]))
    else:
        y = products_of(spec.name, layer.weight[:count])
    return Share(start, spec.shape[0], 1.0, y[:count])


def _answer(layer: Any, x: Tensor) -> Tensor:
    """Return the layer's own product with x, without its bias; every kernel that it may have takes a row of inputs."""
    row = x.to(layer.weight.device, layer.weight.dtype).reshape(1, -1)
    answer: Tensor = layer.quant_method.apply(layer, row, None)
    return answer.reshape(-1).to("cpu", torch.float64)
