"""The peer of bench_step.py: the same training with TRL's GRPOTrainer. It runs in TRL's own environment and imports
nothing of ours.

python tools/bench/trl_grpo.py task.json times.json      bench_step.py writes the first and reads the second
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Stopwatch(TrainerCallback):  # type: ignore[misc]  # the library is untyped
    """Records when each step begins and ends."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.rewards: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._began = time.perf_counter()
        self.steps.append({"generation": 0.0})

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop it."""
        self.steps[-1]["total"] = time.perf_counter() - self._began

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        """Keep the reward of the step."""
        if logs and "reward" in logs:
            self.rewards.append(logs["reward"])


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]  # the library is untyped
    """Times rollouts (generation and scoring) apart from training."""

    stopwatch: Stopwatch

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        began = time.perf_counter()
        try:
            return super()._generate_and_score_completions(inputs)
        finally:
            self.stopwatch.steps[-1]["generation"] += time.perf_counter() - began


def exact_answer(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the completion is the answer, else 0."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def configure(task: dict[str, Any], folder: str) -> GRPOConfig:
    """The same batch, lengths, sampling and optimizer; nothing logged, saved or evaluated beside the step's line."""
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        seed=task["seed"],
        max_steps=task["steps"],
        per_device_train_batch_size=task["prompts_per_step"] * task["generations"],
        num_generations=task["generations"],
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        max_completion_length=task["max_new_tokens"],
        temperature=1.0,
        loss_type="dapo",
        beta=0.0,
        learning_rate=task["lr"],
        adam_beta1=task["betas"][0],
        adam_beta2=task["betas"][1],
        weight_decay=0.0,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def main() -> None:
    """Train, and write {"steps": [{"total", "generation"}], "rewards": [...]}, in seconds."""
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(task["threads"])
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    # The trainer ends and masks completions at the tokenizer's own end token.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(task["stop_token_id"])
    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32, attn_implementation="sdpa")
    model.generation_config.eos_token_id = task["stop_token_id"]
    stopwatch = Stopwatch()
    trainer = TimedTrainer(
        model=model,
        args=configure(task, str(Path(sys.argv[2]).parent / "trl")),
        processing_class=tokenizer,
        reward_funcs=exact_answer,
        train_dataset=Dataset.from_list(task["rows"]),
        callbacks=[stopwatch],
    )
    trainer.stopwatch = stopwatch
    trainer.train()
    Path(sys.argv[2]).write_text(json.dumps({"steps": stopwatch.steps, "rewards": stopwatch.rewards}))


if __name__ == "__main__":
    main()
