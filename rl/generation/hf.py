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
from rl.generation.asleep import Asleep
from rl.generation.batching import BatchLoop
from rl.generation.completion import completion_budget
from rl.generation.config import HfGenerationConfig
from rl.generation.generator import WAKE_TAGS, GeneratorRequest, SamplingParams, WakeTag
from rl.generation.parking import ParkedTensors
from rl.generation.pool import PooledGenerator, replicas_of
from rl.generation.refit_lock import RefitLock
from rl.weights.manifest import torch_dtype
from rl.weights.native import digests_of
from rl.weights.receiver import InPlace, WeightReceiver
from rl.weights.signature import signature_of
from rl.weights.transport import Ack, PauseMode, RefitStart, TransferInfo

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
        self._receiver = WeightReceiver(InPlace(self._parameters), self._replica, self._device)
        self._asleep = Asleep(self._replica)
        self._parked = ParkedTensors(one for one in self._parameters.values() if one.device.type != "cpu")
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
        """Sample again.

        Raises:
            WeightSyncError: something is asleep.
        """
        self._asleep.check_awake(WAKE_TAGS, "generate")
        self._batches.resume()

    def sleep(self) -> int:
        """Finish what is sampled, and keep weights that lie on a device in host memory."""
        self.pause("drain")
        with self._refit_lock.held("sleep"):
            self._asleep.fall_asleep()
            return self._parked.park()

    def wake(self, tags: tuple[WakeTag, ...]) -> int:
        """Bring weights back to their device; there are no caches."""
        with self._refit_lock.held("wake"):
            taken = self._parked.unpark() if "weights" in self._asleep.among(tags) else 0
            self._asleep.woken(tags)
            return taken

    @torch.inference_mode()
    def score(self, tokens: tuple[int, ...]) -> list[float]:
        """Return the log-probability of each token but the first, at temperature 1.

        Raises:
            DataError: no tokens, or more than the context takes.
        """
        completion_budget("score", tokens, 1, self._request.max_model_len)
        with self._refit_lock.held("score"):
            self._asleep.check_awake(("weights",), "score")
            ids = torch.tensor([tokens], device=self._device)
            logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            table = torch.log_softmax(logits, dim=-1)
            return [float(value) for value in table.gather(1, ids[0, 1:, None])[:, 0]]

    def init_transfer(self, info: TransferInfo, first_reader: int) -> None:
        """Join the refit's links.

        Raises:
            WeightSyncError: the tensors are not this model's; names the first that differs.
        """
        with self._refit_lock.held("init"):
            self._receiver.init(info, first_reader)

    def start_update(self, start: RefitStart) -> None:
        """Begin a refit.

        Raises:
            WeightSyncError: the generator is not paused, or its weights are asleep.
        """
        with self._refit_lock.held("start"):
            self._asleep.check_awake(("weights",), f"take version {start.version}")
            if not self._batches.is_paused:
                raise WeightSyncError(
                    f"{self._replica} is not paused; weights of version {start.version} cannot be loaded"
                )
            self._receiver.start(start)

    def update(self) -> None:
        """Receive all buckets into the model's own parameters."""
        with self._refit_lock.held("update"):
            self._receiver.update()

    def finish_update(self, version: PolicyVersion) -> Ack:
        """Commit; digests are those of the model's own parameters where they have the wire's dtype."""
        with self._refit_lock.held("finish"):
            received = self._receiver.finish()
            specs = self._receiver.manifest
            loaded = [self._parameters[spec.name].detach() for spec in specs]
            same = all(tensor.dtype == torch_dtype(spec) for tensor, spec in zip(loaded, specs, strict=True))
            is_readable = same and self._device.type == "cpu"  # a device's own would have to be copied
            digests = digests_of([tensor.contiguous() for tensor in loaded]) if is_readable else received.digests
            self._batches.set_version(version)
            return Ack(self._replica, version, received.num_tensors, (digests,), received.seconds)

    def abort_update(self, reason: str) -> None:
        """Give up a transfer; from any thread, beside a call that waits for it."""
        self._receiver.abort(reason)

    def signatures(self) -> dict[str, tuple[float, ...]]:
        """Return `rl.weights.signature` of every parameter."""
        with self._refit_lock.held("signatures"):
            return {name: signature_of(name, tensor) for name, tensor in self._parameters.items()}

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
