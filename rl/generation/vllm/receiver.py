"""Tandem's weight transfer engine inside vLLM's own worker processes.

vLLM resolves `worker_extension_cls` in every worker process; importing this module there registers the engine with
vLLM's factory, so no plug-in entry point and no installation is needed. The refit then runs through vLLM's own verbs:
init, start, update*, finish. Weights are loaded layer by layer (vLLM's layerwise reload), which keeps the storage that
graphs captured and packs linear layers anew.

Three things need care on a CPU (vLLM 0.32): there is no accelerator to synchronise; a tied output layer keeps a packed
copy of the old embeddings unless it is packed again; and packed linear layers hide their weights from checksums, so
only the remaining parameters can be read back here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from rl.core.errors import WeightSyncError
from rl.generation.vllm.head_check import largest_difference
from rl.weights.receiver import Received, WeightReceiver, checksum_of
from rl.weights.transport import TensorSpec, TransferInfo

BACKEND = "tandem"


@dataclass
class RefitInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """`rl.weights.transport.TransferInfo` as vLLM ships it: plain lists and numbers."""

    channel: str
    tensors: list[list[Any]]
    bucket_bytes: int
    num_slots: int
    plan_digest: str

    def transfer_info(self) -> TransferInfo:
        """Return the typed form."""
        tensors = tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in self.tensors)
        return TransferInfo(self.channel, tensors, self.bucket_bytes, self.num_slots, self.plan_digest)


@dataclass
class RefitUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which bucket to load."""

    bucket: int


class TandemWeightEngine(WeightTransferEngine):  # type: ignore[misc]
    """Receives through Tandem's transport and loads through vLLM's layerwise reload."""

    init_info_cls = RefitInitInfo
    update_info_cls = RefitUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        # Layerwise reload keeps tensors until their layer is complete.
        self._receiver = WeightReceiver(self._load, keeps_tensors=True)
        self._loaded: set[str] = set()
        self._sent: dict[str, str] = {}
        self._num_refits = 0
        self.received: Received | None = None

    def init_transfer_engine(self, init_info: RefitInitInfo) -> None:
        """Attach to the transport; checks the plan's digest."""
        self._receiver.init(init_info.transfer_info())

    def start_weight_update(self) -> None:
        """Open all layers for loading."""
        self.discard_unfinished()
        self.received = None
        self._loaded = set()
        self._sent = {}
        self._receiver.start()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket. Overridden because the base class synchronises an accelerator even where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: RefitUpdateInfo) -> None:
        """Load one bucket."""
        self._receiver.update(update_info.bucket)

    def finish_weight_update(self) -> None:
        """Finalise every layer, pack tied output layers again, and read back what can be read.

        Raises:
            WeightSyncError: a layer got no weights, or a parameter does not hold the bytes that were sent.
        """
        received = self._receiver.finish()
        tied = self.tied_heads()
        missing = self._layers_without_weights(tied)
        if missing:
            raise WeightSyncError(f"no weights arrived for {', '.join(missing[:5])} ({len(missing)} layers in all)")
        finalize_layerwise_reload(self.model, self.model_config)
        self.pack_heads(tied)
        self._check_heads()
        self._check_parameters()
        self.received = received

    def shutdown(self) -> None:
        """Detach from the transport."""
        self._receiver.close()

    def discard_unfinished(self) -> None:
        """Put back the storage of layers that an abandoned refit left open; what it holds is for the next refit."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                _restore_storage(layer, info)
            info.reset()

    def tied_heads(self) -> list[torch.nn.Module]:
        """Output layers whose weight is an embedding's; during a refit the storage kept for its end counts."""
        tables = [module for module in self.model.modules() if isinstance(module, VocabParallelEmbedding)]
        embeddings = {id(_weight_of(module)) for module in tables if not isinstance(module, ParallelLMHead)}
        heads = [module for module in tables if isinstance(module, ParallelLMHead)]
        return [head for head in heads if id(_weight_of(head)) in embeddings]

    def pack_heads(self, heads: Iterable[torch.nn.Module]) -> None:
        """Pack tied output layers anew: the reload leaves out layers that got no tensor of their own."""
        for head in heads:
            head.quant_method.process_weights_after_loading(head)  # type: ignore[operator,union-attr]

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.model.named_parameters())
        for name, tensor in tensors:
            target = parameters.get(name)
            if target is not None and target.shape == tensor.shape and target.dtype == tensor.dtype:
                self._sent[name] = checksum_of([tensor])
        self._loaded |= set(self.model.load_weights(iter(tensors)) or ())

    def _layers_without_weights(self, exempt: list[torch.nn.Module]) -> list[str]:
        missing = []
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            open_parameters = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
            untouched = info.can_load() and open_parameters > 0 and info.load_numel <= 0
            if untouched and layer not in exempt and not is_deferred_attention_layer(layer):
                missing.append(name)
        return missing

    def _check_heads(self) -> None:
        """Compare every output layer that kept its weights beside a packed copy with what it computes."""
        for name, head in self.model.named_modules():
            if not isinstance(head, ParallelLMHead) or head.weight.numel() == 0 or head.weight.device.type != "cpu":
                continue
            if not head.weight.is_floating_point():
                continue
            gap = largest_difference(head.weight, partial(head.quant_method.apply, head), self._num_refits)
            if gap != 0.0:
                raise WeightSyncError(f"output layer '{name}' computes with other weights (they differ by {gap:.3g})")
        self._num_refits += 1

    def _check_parameters(self) -> None:
        for name, parameter in self.model.named_parameters():
            if name in self._sent and parameter.numel() and checksum_of([parameter.data]) != self._sent[name]:
                raise WeightSyncError(f"parameter '{name}' does not hold the bytes that were sent")


class RefitExtension:
    """Mixed into vLLM's worker class: the calls for which vLLM has no verb."""

    weight_transfer_engine: TandemWeightEngine
    _weight_update_active: bool

    def tandem_end_session(self) -> None:
        """Forget a refit that was given up half-way, so that the next start is accepted."""
        self._weight_update_active = False
        self.weight_transfer_engine.reset_weight_update_target()

    def tandem_received(self) -> list[Any]:
        """Return (tensors, bytes, checksum) of the last finished refit."""
        received = self.weight_transfer_engine.received
        if received is None:
            raise WeightSyncError("no refit was finished in this worker")
        return [received.num_tensors, received.num_bytes, received.checksum]


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


def _small_cpu_blocks(kv_cache_spec: Any = None) -> list[Any]:
    """Block sizes of vLLM's CPU attention. Its kernels take multiples of 16; the class declares multiples of 32 only.

    A block is the unit of prefix sharing: with 32 tokens the samples of a short prompt would share nothing.
    """
    return [MultipleOf(16)]


CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(_small_cpu_blocks)
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, TandemWeightEngine)
