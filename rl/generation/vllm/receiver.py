"""Tandem's weight transfer engine inside vLLM's own worker processes.

A refit runs through vLLM's own verbs: init, start, one update, finish. The whole transfer happens within that update,
in every process of the engine, each with a receiver of its own; so a process that fails tells the sender, and with it
the others. Weights go through the model's own loader, which knows its names, fused layers and slices, into layers that
`reload` opened.

On a CPU (vLLM 0.32) there is no accelerator to synchronise, and packed linear layers hide their weights: only the other
parameters can be read back here, the hidden ones are shown by `products`.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from rl.core.errors import WeightSyncError
from rl.generation.vllm import worker_calls
from rl.generation.vllm.abort_line import AbortLine
from rl.generation.vllm.layer_products import layer_products
from rl.generation.vllm.loading import load_tensors, refuse_another_model
from rl.generation.vllm.reload import LayerReload
from rl.generation.vllm.wire import RankReport, fault_values, marked, reader_rank, transfer_info
from rl.weights.manifest import torch_dtype
from rl.weights.native import digests_of
from rl.weights.receiver import Received, Staged, WeightReceiver
from rl.weights.transport import DIGEST_BYTES, RefitStart, TensorSpec

_log = logging.getLogger(__name__)


@dataclass
class RefitInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """What `wire.init_values` made; vLLM builds it from the payload."""

    transport: str
    addresses: list[str]
    plan: str
    plan_digest: str
    num_slots: int
    readers: list[str]
    timeout_s: float
    link: dict[str, Any]
    first_reader: int
    abort_line: str


@dataclass
class RefitUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which refit to receive; see `wire.update_values`."""

    epoch: int
    version: int
    timeout_s: float


class TandemWeightEngine(WeightTransferEngine):  # type: ignore[misc]
    """Receives through Tandem's transport and loads through vLLM's layerwise reload."""

    init_info_cls = RefitInitInfo
    update_info_cls = RefitUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reader = 0
        self._name = f"rank {self.parallel_config.rank}"
        self._receiver: WeightReceiver | None = None
        self._abort_line: AbortLine | None = None
        self.reload = LayerReload(model)
        self._manifest: tuple[TensorSpec, ...] = ()
        self._last_epoch = -1
        self._report: RankReport | None = None
        self._fault: BaseException | None = None
        worker_calls.install()

    def init_transfer_engine(self, init_info: RefitInitInfo) -> None:
        """Leave earlier links, check the plan, and join as this process's reader.

        Raises:
            WeightSyncError: the plan is damaged, or not every end shows up in time.
        """
        with self._failing():
            self.shutdown()
            parallel = self.parallel_config
            self._reader = reader_rank(
                init_info.first_reader, parallel.data_parallel_index, parallel.world_size, parallel.rank
            )
            info = transfer_info(vars(init_info))
            self._name = info.readers[self._reader] if self._reader < len(info.readers) else f"reader {self._reader}"
            # The reload keeps tensors until their layer is complete.
            sink = Staged(lambda tensors: self._load(tensors), keeps_tensors=True, check=self._check)
            receiver = WeightReceiver(sink, self._name, self.device)
            self._receiver = receiver
            if init_info.abort_line:
                self._abort_line = AbortLine(init_info.abort_line, self._reader, receiver.abort)
            receiver.init(info, self._reader)
            self._manifest = receiver.manifest

    def start_weight_update(self) -> None:
        """Open all layers for loading."""
        with self._failing():
            self._report = None
            self.reload.begin()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load all buckets. Overridden: the base class synchronises an accelerator even where none is."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: RefitUpdateInfo) -> None:
        """Receive and load all buckets of one refit.

        Raises:
            WeightSyncError: the transfer or the model's loader failed; every other end learns why.
        """
        with self._failing():
            receiver = self._joined("update")
            if update_info.epoch <= self._last_epoch:
                raise WeightSyncError(
                    f"{self._name}: epoch {update_info.epoch} of version {update_info.version} is old; "
                    f"{self._last_epoch} was the last"
                )
            self._last_epoch = update_info.epoch  # every set of links has a receiver of its own, which forgets it
            receiver.start(RefitStart(update_info.epoch, update_info.version, update_info.timeout_s))
            receiver.update()

    def finish_weight_update(self) -> None:
        """Close every layer and read back what can be read.

        Raises:
            WeightSyncError: a layer got no weights, or an output layer computes with other weights.
        """
        with self._failing():
            received = self._joined("finish").finish()
            self.reload.finish(self.model_config)
            digests = self._read_back(received)
            self._report = RankReport(self._reader, received.num_tensors, digests, received.seconds)

    def shutdown(self) -> None:
        """Leave the links; idempotent."""
        receiver, self._receiver = self._receiver, None
        line, self._abort_line = self._abort_line, None
        if line is not None:
            line.close()
        if receiver is not None:
            receiver.close()
        self._fault = None

    def report(self) -> dict[str, Any]:
        """Return the last finished refit's `RankReport`, as plain values."""
        assert self._report is not None, "asked after a finish without a fault"
        return self._report.values()

    def fault(self) -> dict[str, Any]:
        """Return the last failure since `init`, as plain values."""
        return fault_values(self._fault)

    def products(self) -> dict[str, Any]:
        """Return this process's share of W x of every tensor, as plain values."""
        shares = layer_products(self.model, self._manifest, self.parallel_config.tensor_parallel_size)
        return {name: share.plain() for name, share in shares.items()}

    def _check(self, manifest: Sequence[TensorSpec]) -> None:
        if self.parallel_config.tensor_parallel_size == 1:
            refuse_another_model(self.model, manifest)

    def _load(self, tensors: list[tuple[str, Tensor]]) -> None:
        load_tensors(self.model, tensors)

    def _read_back(self, received: Received) -> bytes:
        """Digests as they arrived, but of the model's own parameters where these are the whole tensors."""
        parameters = dict(self.model.named_parameters())
        digests = bytearray(received.digests)
        for index, spec in enumerate(self._manifest):
            own = _same_tensor(parameters.get(spec.name), spec)
            if own is not None:
                digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] = digests_of([own])
        return bytes(digests)

    def _joined(self, phase: str) -> WeightReceiver:
        if self._receiver is None:
            raise WeightSyncError(f"{self._name}: {phase} before init")
        return self._receiver

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Keep the first failure for the driver, tell the other ends, and mark its text within vLLM's words.

        An engine of several processes gives up a collective call at the first answer that is an error and leaves the
        other answers in their queues, where the next call takes them for its own (vLLM 0.32). So there a failure is
        kept until the driver asks for it with `tandem_fault`, which it does after every verb.
        """
        try:
            yield
        except Exception as error:
            if self._fault is None:
                self._fault = error
            if self._receiver is not None:
                self._receiver.abort(f"{self._name}: {error}")
            if self.parallel_config.world_size == 1:
                raise WeightSyncError(marked(error)) from error
            _log.exception("%s: a refit failed", self._name)


def _same_tensor(parameter: Tensor | None, spec: TensorSpec) -> Tensor | None:
    """Return the part of a parameter that is a tensor of the manifest; None when it is packed, sliced or cast.

    A vocabulary is padded at its end. What lies on a device would have to be copied first, which costs a refit more
    than it tells.
    """
    if parameter is None or parameter.device.type != "cpu":
        return None
    if parameter.dtype != torch_dtype(spec) or parameter.dim() != len(spec.shape):
        return None
    if not spec.shape or parameter.shape[0] < spec.shape[0] or tuple(parameter.shape[1:]) != spec.shape[1:]:
        return None
    part = parameter.detach()[: spec.shape[0]]
    return part if part.is_contiguous() else None
