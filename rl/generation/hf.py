"""The transformers backend: the same contract as vLLM's, from a plain forward pass; for tests and debugging.

    policy.generation.backend: hf

No key-value cache, no packing, nothing that can differ from the trainer's own model.
"""

from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from rl.cluster.worker_group import Cluster, WorkerContext
from rl.core.errors import ConfigError, InfraError, WeightSyncError, first_line
from rl.core.loading import model_loading
from rl.core.types import Completion, PolicyVersion
from rl.generation.batching import BatchLoop
from rl.generation.completion import completion_budget
from rl.generation.config import HfGenerationConfig
from rl.generation.generator import GeneratorRequest, PauseMode, SamplingParams
from rl.generation.pool import PooledGenerator, replicas_of
from rl.generation.refit_lock import RefitLock
from rl.weights.manifest import torch_dtype
from rl.weights.receiver import WeightReceiver, checksum_of
from rl.weights.transport import Ack, TransferInfo

MAX_BATCH = 256


class HfWorker:
    """One model in a worker process. See `rl.generation.pool.GenerationWorker` for what its methods promise.

    Raises:
        ConfigError: the folder holds no model that can be loaded, or the context asked for is longer than the model's.
    """

    def __init__(self, context: WorkerContext, config: HfGenerationConfig, request: GeneratorRequest) -> None:
        torch.set_num_threads(context.num_threads)
        self._replica = f"{context.name}[{context.rank}]"
        self._config = config
        self._request = request
        self._device = torch.device(context.device)
        self._model = _load_model(request).to(self._device)
        self._model.eval()
        self._tokenizer = AutoTokenizer.from_pretrained(
            request.tokenizer_path, trust_remote_code=request.trust_remote_code
        )
        longest = self._model.config.max_position_embeddings
        if request.max_model_len > longest:
            raise ConfigError(
                f"policy.max_total_sequence_length={request.max_model_len} exceeds the model's context of {longest}"
            )
        # Both names of tied weights lead to the one tensor.
        self._parameters = dict(self._model.named_parameters(remove_duplicate=False))
        self._receiver = WeightReceiver(self._load, keeps_tensors=False)
        self._info: TransferInfo | None = None
        self._refit_lock = RefitLock(self._replica, request.call_timeout_s)
        self._batches = BatchLoop(self._next_logits, self._decode, MAX_BATCH, self._replica)
        if request.loaded_version is not None:
            self._batches.set_version(request.loaded_version)

    def generate(self, prompt_tokens: tuple[int, ...], params: SamplingParams, request_id: str) -> Completion:
        """Sample one completion; waits while paused. See `Generator.generate` for what it raises."""
        budget = completion_budget(request_id, prompt_tokens, params.max_new_tokens, self._request.max_model_len)
        future = self._batches.submit(prompt_tokens, params, budget, request_id)
        try:
            return future.result(self._config.request_timeout_s)
        except FutureTimeoutError as error:
            self._batches.abort(request_id)
            raise InfraError(
                f"{self._replica}: request {request_id} did not end within {self._config.request_timeout_s:g} s"
            ) from error

    def abort(self, request_id: str) -> None:
        """Give up a request; an unknown one is ignored."""
        self._batches.abort(request_id)

    def pause(self, mode: PauseMode) -> None:
        """Stop sampling."""
        self._batches.pause(mode, self._request.call_timeout_s)

    def resume(self) -> None:
        """Sample again."""
        self._batches.resume()

    def init_transfer(self, info: TransferInfo) -> None:
        """Open the transport.

        Raises:
            WeightSyncError: the tensors are not this model's; names the first that differs.
        """
        with self._refit_lock.held("init"):
            self._check_manifest(info)
            self._receiver.init(info)
            self._info = info

    def start_update(self, version: PolicyVersion) -> None:
        """Begin a refit.

        Raises:
            WeightSyncError: the generator is not paused.
        """
        with self._refit_lock.held("start"):
            if not self._batches.is_paused:
                raise WeightSyncError(f"{self._replica} is not paused; weights of version {version} cannot be loaded")
            self._receiver.start()

    def update(self, bucket: int) -> None:
        """Load one bucket."""
        with self._refit_lock.held(f"update with bucket {bucket}"):
            self._receiver.update(bucket)

    def finish_update(self, version: PolicyVersion) -> Ack:
        """Commit; the checksum is that of the model's own parameters where they have the wire's dtype."""
        with self._refit_lock.held("finish"):
            received = self._receiver.finish()
            assert self._info is not None
            specs = self._info.tensors
            loaded = [self._parameters[spec.name] for spec in specs]
            same = all(tensor.dtype == torch_dtype(spec) for tensor, spec in zip(loaded, specs, strict=True))
            checksum = checksum_of(loaded) if same else received.checksum
            self._batches.set_version(version)
            return Ack(self._replica, version, received.num_tensors, checksum)

    def close(self) -> None:
        """End the sampling thread; idempotent."""
        self._batches.close(self._request.call_timeout_s)
        self._receiver.close()

    @torch.inference_mode()
    def _next_logits(self, sequences: list[list[int]]) -> torch.Tensor:
        """Next-token logits [N, vocabulary] float32; padded on the left, so that all end at the last column."""
        longest = max(len(sequence) for sequence in sequences)
        ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
        mask = torch.zeros(len(sequences), longest, dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            ids[row, longest - len(sequence) :] = torch.tensor(sequence)
            mask[row, longest - len(sequence) :] = 1
        output = self._model(
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            position_ids=(mask.cumsum(1) - 1).clamp_min(0).to(self._device),
            use_cache=False,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1].float().cpu()
        return logits

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    @torch.no_grad()
    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self._parameters[name].copy_(tensor)

    def _check_manifest(self, info: TransferInfo) -> None:
        sent: set[int] = set()
        for spec in info.tensors:
            parameter = self._parameters.get(spec.name)
            if parameter is None or tuple(parameter.shape) != spec.shape:
                own = "no such tensor" if parameter is None else f"shape {list(parameter.shape)}"
                raise WeightSyncError(
                    f"{self._replica} cannot take '{spec.name}' of shape {list(spec.shape)}: its model has {own}"
                )
            sent.add(id(parameter))
        missing = [name for name, parameter in self._model.named_parameters() if id(parameter) not in sent]
        if missing:
            raise WeightSyncError(f"{self._replica}: the trainer does not send '{missing[0]}' ({len(missing)} in all)")


def _load_model(request: GeneratorRequest) -> Any:
    disable_progress_bar()  # a worker's output is a log, not a terminal
    try:
        with model_loading():
            return AutoModelForCausalLM.from_pretrained(
                request.model_path,
                dtype=vars(torch)[request.precision],
                trust_remote_code=request.trust_remote_code,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"cannot load a causal language model from {request.model_path}: {first_line(error)}"
        ) from error


async def build(config: HfGenerationConfig, cluster: Cluster, request: GeneratorRequest) -> PooledGenerator[HfWorker]:
    """Start the models of the `policy.generation` section.

    Raises:
        ConfigError: the context is longer than the model's, or the cluster lacks the resources.
    """
    longest_s = max(request.call_timeout_s, config.request_timeout_s)
    workers = replicas_of(request, config.num_replicas, MAX_BATCH, longest_s)
    group = await cluster.start_workers(HfWorker, workers, config, request)
    return PooledGenerator(group, HfWorker, request, MAX_BATCH)
