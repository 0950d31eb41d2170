"""Settings of the `policy.generation` section."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from rl.core.config import ConfigModel, operational
from rl.generation.vllm.config import VllmEngineConfig
from rl.weights.config import RefitConfig


class GenerationBase(ConfigModel):
    """What every backend has."""

    max_new_tokens: int = Field(256, ge=1, description="Upper bound of sampled tokens of one completion.")
    temperature: float = Field(1.0, gt=0, description="Temperature of training rollouts; the trainer uses it too.")
    top_p: float = Field(
        1.0, ge=1.0, le=1.0, description="Nucleus sampling is refused in training until the trainer can replay it."
    )
    top_k: None = Field(None, description="Top-k sampling is refused in training until the trainer can replay it.")
    stop_token_ids: list[int] | None = Field(None, description="Ids that end a completion; null = the model's own.")
    stop_strings: list[str] = Field(default_factory=list, description="Strings that end a completion.")
    num_replicas: int = operational(1, ge=1, description="Engines.")
    refit_cfg: RefitConfig = RefitConfig()

    @property
    def ranks_per_replica(self) -> int:
        """Devices of one engine."""
        return 1


class VllmGenerationConfig(GenerationBase):
    """vLLM in its own worker process."""

    backend: Literal["vllm"] = "vllm"
    vllm_cfg: VllmEngineConfig = VllmEngineConfig()
    builder: ClassVar[str] = "rl.generation.vllm.generator:build"

    @property
    def ranks_per_replica(self) -> int:
        """Devices of one engine: its tensor-parallel ranks."""
        return self.vllm_cfg.tensor_parallel_size


class HfGenerationConfig(GenerationBase):
    """transformers' own generation: no vLLM needed; for tests and debugging."""

    backend: Literal["hf"] = "hf"
    request_timeout_s: float = operational(300.0, gt=0, description="Deadline of one request, in seconds.")
    builder: ClassVar[str] = "rl.generation.hf:build"


def _backend(section: Any) -> str | None:
    """The discriminator; a section that names no backend means vLLM, and what is no section has none."""
    if isinstance(section, Mapping):
        return str(section.get("backend", "vllm"))
    return section.backend if isinstance(section, VllmGenerationConfig | HfGenerationConfig) else None


GenerationConfig = Annotated[
    Annotated[VllmGenerationConfig, Tag("vllm")] | Annotated[HfGenerationConfig, Tag("hf")],
    Discriminator(_backend),
]
