"""Settings of the `policy.generation` section."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator

from rl.core.config import ConfigModel, operational
from rl.generation.vllm.config import VllmEngineConfig
from rl.weights.config import RefitConfig


class GenerationBase(ConfigModel):
    """What every backend has."""

    max_new_tokens: int = Field(256, ge=1, description="Upper bound of sampled tokens of one completion.")
    temperature: float = Field(
        1.0, description="Temperature of training rollouts, above 0; the trainer divides its logits by it too."
    )
    top_p: float = Field(
        1.0, description="Nucleus mass; training takes 1 alone, because the trainer cannot repeat the truncation."
    )
    top_k: int | None = Field(None, description="Top-k; training takes null alone, for the same reason.")
    stop_token_ids: list[int] | None = Field(None, description="Ids that end a completion; null = the model's own.")
    stop_strings: list[str] = Field(default_factory=list, description="Strings that end a completion.")
    num_replicas: int = operational(1, ge=1, description="Engines.")
    colocated: bool = operational(
        False,
        description="Trainer and engines take turns on the same devices: engines sleep while the model trains. Not yet "
        "with GPUs; on a CPU both stay in memory.",
    )
    refit_cfg: RefitConfig = RefitConfig()

    @property
    def ranks_per_replica(self) -> int:
        """Devices of one engine."""
        return 1

    @field_validator("temperature")
    @classmethod
    def _explores(cls, value: float) -> float:
        if value <= 0:
            raise ValueError(
                "training needs a temperature above 0: the most likely token alone has no ratio and no gradient to "
                "learn from; use for example 1.0 (grpo.val_temperature=0 and eval.temperature=0 are greedy)"
            )
        return value

    @field_validator("top_p", "top_k")
    @classmethod
    def _keeps_the_whole_distribution(cls, value: float | int | None, info: ValidationInfo) -> float | int | None:
        name = str(info.field_name)
        if value != cls.model_fields[name].default:
            default = "1.0" if name == "top_p" else "null"
            raise ValueError(
                f"training takes {default} alone: generators would give log-probabilities of the truncated "
                "distribution, the trainer computes those of the whole one, and every ratio would be wrong; remove it "
                f"(validation and evaluation have keys of their own: grpo.val_{name}, eval.{name})"
            )
        return value


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
