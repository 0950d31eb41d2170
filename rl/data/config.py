"""Settings of the `data` section."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rl.core.config import ConfigModel


class JsonlDataset(ConfigModel):
    """One JSON object per line."""

    kind: Literal["jsonl"]
    path: str = Field(description="File, relative to where the command runs.")
    prompt_key: str = Field("prompt", description="Column of the prompt: a string, or a list of {role, content}.")
    answer_key: str | None = Field("answer", description="Column of the reference answer; null = none.")


class HfDataset(ConfigModel):
    """A folder written by `datasets.save_to_disk`, or a hub id."""

    kind: Literal["hf"]
    path: str = Field(description="Folder, or dataset id on the hub.")
    split: str = Field("train", description="Split.")
    prompt_key: str = Field("prompt", description="Column of the prompt: a string, or a list of {role, content}.")
    answer_key: str | None = Field("answer", description="Column of the reference answer; null = none.")


class ReasoningGymDataset(ConfigModel):
    """A reasoning-gym task by name; scored by the task itself (use `env_name: reasoning_gym`)."""

    kind: Literal["reasoning_gym"]
    task: str = Field(description="Name, for example leg_counting.")
    size: int = Field(1000, ge=1, description="Rows.")
    seed: int = Field(0, ge=0, description="Seed of the rows; use another one for validation.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Settings of the task.")


class FewShotAdditionDataset(ConfigModel):
    """Sums of two digits after three worked examples; the embedded default task."""

    kind: Literal["few_shot_addition"]
    part: Literal["train", "heldout"] = Field("train", description="Pairs of one part never occur in the other.")


class CalculatorProductsDataset(ConfigModel):
    """Products of two-digit numbers after worked examples that call a calculator; scored by an environment of tools."""

    kind: Literal["calculator_products"]
    part: Literal["train", "heldout"] = Field("train", description="Pairs of one part never occur in the other.")
    size: int = Field(1000, ge=1, le=1000, description="Rows.")
    seed: int = Field(0, ge=0, description="Seed of the choice and order of the rows.")


class SlidingPuzzleDataset(ConfigModel):
    """Boards of the sliding puzzle that can be solved; scored by the environment of the same name."""

    kind: Literal["sliding_puzzle"]
    rows: int = Field(3, ge=2, le=10, description="Rows of the board.")
    columns: int = Field(3, ge=2, le=10, description="Columns of the board.")
    shuffle_moves: int = Field(4, ge=1, description="Moves by which the solved board is shuffled.")
    size: int = Field(1000, ge=1, description="Rows of the dataset.")
    seed: int = Field(0, ge=0, description="Seed of the boards; use another one for validation.")


DatasetConfig = Annotated[
    JsonlDataset
    | HfDataset
    | ReasoningGymDataset
    | FewShotAdditionDataset
    | CalculatorProductsDataset
    | SlidingPuzzleDataset,
    Field(discriminator="kind"),
]


class DataConfig(ConfigModel):
    """Prompts for training and validation."""

    train: DatasetConfig
    validation: DatasetConfig | None = Field(None, description="Held-out prompts; needed when validation is on.")
    env_name: str = Field("math", description="Entry of the `env` section that scores these prompts.")
    prompt_format: Literal["chat", "raw"] = Field(
        "chat", description="Apply the chat template, or tokenize the text as it is."
    )
    system_prompt: str | None = Field(None, description="System message put first; chat format only.")
    shuffle: bool = Field(True, description="New order in every epoch, from the seed.")
    max_input_seq_length: int | None = Field(
        None, ge=1, description="Longest prompt in tokens; null = context minus policy.generation.max_new_tokens."
    )
    overlong_prompts: Literal["skip", "error"] = Field(
        "skip", description="What happens to longer prompts; skipped ones are counted."
    )
    rewritten_history: Literal["error", "fork"] = Field(
        "error",
        description="What happens when the chat template rewrites earlier turns (drops old reasoning, say): an error, "
        "or the turn is trained as a sequence of its own, over the conversation as the template writes it then.",
    )
