"""Settings of the `policy` section (its `generation` part stands in `rl.generation.config`)."""

from typing import Annotated, Literal

from pydantic import Field

from rl.core.config import ConfigModel, operational

DecayRate = Annotated[float, Field(ge=0, lt=1)]


class OptimizerKwargs(ConfigModel):
    """Arguments of AdamW."""

    lr: float = Field(1e-6, ge=0, description="Learning rate.")
    betas: tuple[DecayRate, DecayRate] = Field((0.9, 0.999), description="Moment decay rates.")
    eps: float = Field(1e-8, gt=0, description="Denominator term.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")


class OptimizerConfig(ConfigModel):
    """The optimizer."""

    name: Literal["torch.optim.AdamW"] = "torch.optim.AdamW"
    kwargs: OptimizerKwargs = OptimizerKwargs()


class SchedulerConfig(ConfigModel):
    """Learning-rate schedule; it advances once per RL step, also when the step held several optimizer steps."""

    name: Literal["constant", "linear", "cosine"] = Field("constant", description="Shape after the warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up.")
    warmup_start_factor: float = Field(0.1, gt=0, le=1, description="Share of the rate at the first warm-up step.")
    decay_steps: int | None = Field(
        None, ge=1, description="Steps after warm-up until min_factor; needed by linear and cosine."
    )
    min_factor: float = Field(0.0, ge=0, le=1, description="Share of the rate at the end of the decay.")


class TokenizerConfig(ConfigModel):
    """The tokenizer; null = the model's own."""

    name: str | None = Field(None, description="Model name whose tokenizer is used; null = policy.model_name.")
    chat_template: str | None = Field(None, description="Jinja template that replaces the tokenizer's own.")


class DynamicBatchingConfig(ConfigModel):
    """Micro-batches of a bounded number of tokens, padding included, instead of so many sequences."""

    enabled: bool = operational(False, description="Cut micro-batches by tokens; short sequences share one.")
    train_mb_tokens: int | None = operational(
        None,
        ge=1,
        description="Rows x longest row of a training pass; null = max_total_sequence_length x train_micro_batch_size.",
    )
    logprob_mb_tokens: int | None = operational(
        None, ge=1, description="The same of a pass without gradient; null = the same product."
    )
    sequence_length_round: int = operational(1, ge=1, description="Rows are padded to a multiple of this.")


class SequencePackingConfig(ConfigModel):
    """Micro-batches of one row without padding, in which sequences do not see each other."""

    enabled: bool = operational(False, description="Pack sequences; the model must honour a 4-D attention mask.")
    train_mb_tokens: int | None = operational(
        None,
        ge=1,
        description="Tokens of a training pass; null = max_total_sequence_length x train_micro_batch_size.",
    )
    logprob_mb_tokens: int | None = operational(
        None, ge=1, description="Tokens of a pass without gradient; null = the same product."
    )


class PolicySettings(ConfigModel):
    """The trained model. MasterConfig's `policy` section is this plus `generation`."""

    model_name: str = Field(description="Hugging Face id, a folder, or package:<module>/<file>.gguf.")
    tokenizer: TokenizerConfig = TokenizerConfig()
    precision: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Dtype of arithmetic, generators and exports; trained weights and checkpoints are float32 in both.",
    )
    train_global_batch_size: int | None = Field(
        None, ge=1, description="Sequences per optimizer step; null = all of a step (prompts x generations)."
    )
    train_micro_batch_size: int = operational(
        8,
        ge=1,
        description="Sequences per forward and backward pass of one rank; where siblings share their prompt, as many "
        "tokens as these sequences would have at their longest.",
    )
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    share_prefixes: Literal["auto", "on", "off"] = operational(
        "auto",
        description="Compute what sibling sequences begin with once for all of them; auto = where the model can and "
        "it saves time.",
    )
    skip_zero_advantages: bool = operational(
        True, description="Do not compute sequences that change neither loss nor gradient; they still count."
    )
    max_total_sequence_length: int = Field(512, ge=2, description="Longest prompt + completion, in tokens.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="Gradient norm bound; null = no clipping.")
    logprob_impl: Literal["native", "torch"] = operational("native", description="Fused native op, or plain torch.")
    max_logprob_gap: float | None = operational(
        None,
        gt=0,
        description="Largest difference between trainer and generator on a token that the version in training sampled, "
        "in nats, above which the next step names the likely cause; null = 0.01 in float32, 1 in bfloat16.",
    )
    num_workers: int = operational(1, ge=1, description="Data-parallel trainer processes.")
    trust_remote_code: bool = Field(False, description="Run model and tokenizer code that comes with the model folder.")
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()

    @property
    def logprob_gap_limit(self) -> float:
        """`max_logprob_gap`, or what rounding never reaches in the precision."""
        if self.max_logprob_gap is not None:
            return self.max_logprob_gap
        return 0.01 if self.precision == "float32" else 1.0
