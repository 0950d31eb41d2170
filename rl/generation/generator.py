"""The generator's contract: token ids in, token ids with log-probabilities and version spans out.

A generator knows no chat template. Protocol module: imports core and weights.transport only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rl.core.types import Completion, PolicyVersion
from rl.weights.transport import ReceiverHandle

# Parts of an engine that sleep and wake.
WakeTag = Literal["weights", "kv_cache"]
WAKE_TAGS: tuple[WakeTag, ...] = ("weights", "kv_cache")


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is sampled.

    Attributes:
        temperature: 0 = greedy (validation only; training needs > 0).
        top_p: Nucleus mass in (0, 1]; 1 = off.
        top_k: Keep the k most likely tokens; None = off.
        max_new_tokens: Upper bound of sampled tokens.
        stop_token_ids: Token ids that end the completion; the stop token is part of it and is trained on.
        stop_strings: Strings that end the completion.
        seed: Seed of this sample; every (prompt, sample, attempt) has its own.
    """

    temperature: float
    top_p: float
    top_k: int | None
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    seed: int


@dataclass(frozen=True)
class GeneratorRequest:
    """What a backend's `build(config, cluster, request)` needs beside its own section.

    Attributes:
        model_path: Local folder in Hugging Face format.
        tokenizer_path: Local folder of the tokenizer; that of the model unless another one was asked for.
        precision: Torch dtype name of weights and arithmetic ("float32", "bfloat16").
        max_model_len: Longest prompt + completion, in tokens.
        seed: Engine seed.
        num_threads: CPU threads of each engine.
        gpus_per_replica: GPUs of each engine.
        trust_remote_code: Whether model code from the folder may run.
        call_timeout_s: Deadline of one worker call, in seconds.
        loaded_version: Version that the weights in the folder are; None = nothing is sampled before the first refit.
        can_sleep: Whether the engines' memory is to be given up now and then; on a CPU nothing depends on it.
    """

    model_path: str
    tokenizer_path: str
    precision: str
    max_model_len: int
    seed: int
    num_threads: int
    gpus_per_replica: int
    trust_remote_code: bool
    call_timeout_s: float
    loaded_version: PolicyVersion | None = None
    can_sleep: bool = False


class Generator(Protocol):
    """A fleet of one or more replicas that share one version."""

    @property
    def version(self) -> PolicyVersion:
        """The version that every replica holds, as the engines report it."""
        ...

    async def generate(
        self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str, session: str
    ) -> Completion:
        """Sample one completion.

        Raises:
            InfraError: the engine died, the request was aborted, or its deadline passed; retry.
            DataError: the prompt cannot be served (too long for the context).
        """
        ...

    async def sleep(self) -> int:
        """Finish requests in flight, stay paused, and give up the memory of weights and caches.

        Later requests wait for `resume`. A replica that cannot be reached does not hinder the others.

        Returns:
            Bytes that left the devices of all replicas; 0 where there is no device.

        Raises:
            InfraError: none could be reached.
        """
        ...

    async def wake(self, tags: Sequence[WakeTag]) -> int:
        """Take memory again for what the tags name; nothing is generated before `resume`. What is awake stays so.

        Weights are those of before, caches are empty. A replica that cannot be reached does not hinder the others.

        Returns:
            Bytes that entered the devices of all replicas; 0 where there is no device.

        Raises:
            InfraError: none could be reached.
        """
        ...

    def weight_receivers(self) -> list[ReceiverHandle]:
        """One handle per replica."""
        ...

    @property
    def num_replicas(self) -> int:
        """Replicas that are left."""
        ...

    async def remove_replica(self, name: str, reason: str) -> None:
        """Give up the replica that its receiver calls `name`: nothing is sent to it any more.

        Raises:
            InfraError: it was the last one.
        """
        ...

    async def score(self, tokens: Sequence[int], timeout_s: float) -> dict[str, list[float]]:
        """Return the log-probability of each token but the first given those before, at temperature 1, by replica.

        The replicas must not be paused. One that is dead, or has not answered after `timeout_s`, is left out.

        Raises:
            InfraError: none answered.
            DataError: the tokens do not fit into the context.
        """
        ...

    async def close(self) -> None:
        """End the engines; idempotent."""
        ...
