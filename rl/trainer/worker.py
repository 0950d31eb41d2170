"""PolicyWorker: one data-parallel rank of the trained policy. A plain synchronous class; it knows nothing of Ray.

An optimizer step is any number of `accumulate` calls and one `apply_step`; an RL step is any number of optimizer steps
and one `end_train`, which raises the version by one. Checkpoint atomicity (temporary folder, fsync, rename) is the
caller's business; the files are written by rank 0 only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl.algorithms.algorithm import LossFunction
from rl.cluster.worker_group import WorkerContext
from rl.core.errors import ConfigError, FatalError, WeightSyncError
from rl.core.types import PolicyVersion
from rl.trainer.config import PolicySettings
from rl.trainer.forward_backward import ChunkReport, Work, accumulate_gradients, compute_logprobs
from rl.trainer.head_probe import find_head_fault
from rl.trainer.kernels import require_kernels
from rl.trainer.loss_path import ForwardSettings, choose_path
from rl.trainer.mask_probe import find_mask_fault
from rl.trainer.model import CausalModel, copy_model_files
from rl.trainer.optimizer import Optimizer, OptimizerStep
from rl.trainer.parallel import GradientSum
from rl.trainer.request import PolicyRequest
from rl.weights.sender import TrainerRank, WeightSender
from rl.weights.source import LocalSource
from rl.weights.transport import OpenRequest, RefitStart, SendReport, TensorSpec

MODEL_FOLDER = "model"
OPTIMIZER_FILE = "optimizer.pt"
STATE_FILE = "trainer.pt"


class PolicyWorker:
    """The model, its optimizer and its end of the refit.

    Args:
        context: Who this rank is.
        settings: The `policy` section.
        request: Derived settings.

    Raises:
        ConfigError: the CUDA kernels or the model cannot be loaded, or the schedule is incomplete.
        FatalError: the native operators are missing.
        InfraError: the other ranks do not show up.
    """

    def __init__(self, context: WorkerContext, settings: PolicySettings, request: PolicyRequest) -> None:
        self._context = context
        self._settings = settings
        self._request = request
        self._use_threads()
        require_kernels(settings.logprob_impl, on_gpu=context.device.startswith("cuda"))
        self._gradient_sum = GradientSum(context, request.call_timeout_s)
        self._model = self._load_model()
        self._reference = self._load_model().freeze() if request.needs_reference else None
        self._optimizer = Optimizer(
            self._model.parameters(), settings.optimizer, settings.scheduler, settings.max_grad_norm
        )
        head_fault = find_head_fault(self._model) if settings.logprob_impl == "native" else None
        self._forward = ForwardSettings(request.temperature, settings.logprob_impl, head_fault)
        self._version = request.version
        place = TrainerRank(
            context.rank, context.world_size, torch.device(context.device), f"{context.name}[{context.rank}]"
        )
        self._sender = WeightSender(LocalSource(self._model.named_tensors, self._model.precision), place)

    def mask_fault(self) -> str | None:
        """Return why the model cannot compute several sequences in one row, or None where it can."""
        self._use_threads()
        return find_mask_fault(self._model, self._settings.max_total_sequence_length)

    def loss_path(self, loss: LossFunction) -> str:
        """Return which way `accumulate` takes with this loss, and why, in words."""
        return choose_path(loss, self._forward).reason

    def accumulate(self, work: Sequence[Work], loss: LossFunction) -> ChunkReport:
        """Add the gradients of the loss sum over this rank's micro-batches; there may be none."""
        self._use_threads()
        return accumulate_gradients(self._model, work, loss, self._forward)

    def apply_step(self, count: float) -> OptimizerStep:
        """Sum gradients over the ranks, divide by the global `count`, clip and step.

        Args:
            count: Tokens or sequences over all ranks and chunks of the step; 0 skips the step.
        """
        self._use_threads()
        if count > 0:
            self._gradient_sum.add_over_ranks(self._optimizer.gradients())
        return self._optimizer.step(count)

    def end_train(self) -> PolicyVersion:
        """End the RL step: advance the learning-rate schedule and return the new version."""
        self._optimizer.end_rl_step()
        self._version += 1
        return self._version

    def offload(self) -> int:
        """Make room for a generator on the same device; see `Optimizer.offload`."""
        left = self._optimizer.offload()
        torch.cuda.empty_cache()  # to other processes; without a GPU it does nothing
        return left

    def reload(self) -> int:
        """Undo `offload`, but for gradients."""
        return self._optimizer.reload()

    def logprobs(self, work: Sequence[Work]) -> list[Tensor]:
        """Return log-probabilities of the sampled tokens under the current weights, [T] float32 of each micro-batch."""
        self._use_threads()
        return compute_logprobs(self._model, work, self._forward)

    def logprobs_at(self, work: Sequence[Work], temperature: float) -> list[Tensor]:
        """Return what `logprobs` would be at another sampling temperature."""
        self._use_threads()
        return compute_logprobs(self._model, work, replace(self._forward, temperature=temperature))

    def logprobs_in_other_precision(self, work: Sequence[Work]) -> list[Tensor]:
        """Return what `logprobs` would be in the precision that is not this policy's."""
        self._use_threads()
        with self._model.in_other_precision():
            return compute_logprobs(self._model, work, self._forward)

    def reference_logprobs(self, work: Sequence[Work]) -> list[Tensor]:
        """Return the same under the frozen initial weights.

        Raises:
            FatalError: the policy was started without a reference.
        """
        if self._reference is None:
            raise FatalError("reference log-probabilities were asked of a policy started with needs_reference=False")
        self._use_threads()
        return compute_logprobs(self._reference, work, self._forward)

    def save(self, folder: Path, with_optimizer: bool) -> None:
        """Write float32 weights, version and random state, and with `with_optimizer` moments and schedule."""
        self._model.save(folder / MODEL_FOLDER)
        self._copy_model_files(folder / MODEL_FOLDER)
        torch.save({"version": self._version, "rng": torch.get_rng_state()}, folder / STATE_FILE)
        if with_optimizer:
            torch.save(self._optimizer.state_dict(), folder / OPTIMIZER_FILE)

    def restore(self, folder: Path) -> PolicyVersion:
        """Continue exactly where `save(folder, with_optimizer=True)` was; return the version.

        Raises:
            ConfigError: the checkpoint has no optimizer state, or is not one.
        """
        if not (folder / OPTIMIZER_FILE).is_file():
            raise ConfigError(
                f"checkpoint {folder} has no {OPTIMIZER_FILE}, so training cannot go on exactly where it was; it was "
                f"saved with checkpointing.save_optimizer=false. To start anew from its weights, set "
                f"policy.model_name={folder / MODEL_FOLDER} and --resume never"
            )
        state: dict[str, Any] = torch.load(folder / STATE_FILE, weights_only=True)
        self._model.load_weights(folder / MODEL_FOLDER)
        # On the CPU first: the optimizer itself moves each moment to the device of its parameter.
        self._optimizer.load_state_dict(torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True))
        torch.set_rng_state(state["rng"])
        self._version = int(state["version"])
        return self._version

    def export(self, folder: Path) -> None:
        """Write a folder that `from_pretrained` loads: weights in the policy's precision, tokenizer, chat template."""
        self._model.export(folder)
        self._copy_model_files(folder)

    def sender_manifest(self) -> tuple[TensorSpec, ...]:
        """Return the tensors of a refit in wire order."""
        return self._sender.manifest()

    def sender_plan(self, request: OpenRequest) -> tuple[bytes, str]:
        """Cut the tensors into buckets; return the plan and its digest."""
        return self._sender.plan(request)

    def sender_open(self, plan: bytes, digest: str, request: OpenRequest) -> str:
        """Make this rank's link; return its address, or the empty string of a rank that does not send."""
        return self._sender.open(plan, digest, request)

    def sender_join(self) -> None:
        """Wait until every reader is there."""
        self._sender.join()

    def sender_send(self, start: RefitStart) -> SendReport:
        """Send this rank's part of a refit.

        Raises:
            WeightSyncError: the weights are not of that version, or the transfer failed.
        """
        if start.version != self._version:
            raise WeightSyncError(f"refit of version {start.version} asked for, but the trainer holds {self._version}")
        self._use_threads()
        return self._sender.send(start)

    def sender_abort(self, reason: str) -> None:
        """Give up what is under way; called beside `sender_send`."""
        self._sender.abort(reason)

    def sender_signatures(self) -> Mapping[str, Sequence[float]]:
        """Return a few numbers of each tensor by which an engine's can be compared."""
        self._use_threads()
        return self._sender.signatures(self._request.call_timeout_s)

    def sender_close(self) -> None:
        """Release the transport's memory."""
        self._sender.close()

    def _copy_model_files(self, folder: Path) -> None:
        # After the weights, so that the original generation configuration wins over the library's rewritten one.
        template = self._settings.tokenizer.chat_template
        copy_model_files(self._request.model_path, self._request.tokenizer_path, template, folder)

    def _load_model(self) -> CausalModel:
        return CausalModel(
            self._request.model_path,
            precision=torch.float32 if self._settings.precision == "float32" else torch.bfloat16,
            device=self._context.device,
            trust_remote_code=self._settings.trust_remote_code,
            seed=self._request.seed,
        )

    def _use_threads(self) -> None:
        # The count belongs to the calling thread in OpenMP, and a worker's methods may be served by different threads.
        torch.set_num_threads(self._context.num_threads)
