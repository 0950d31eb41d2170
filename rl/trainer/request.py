"""What a policy is asked to be, beyond its configuration section: values that the run derives. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from rl.core.types import PolicyVersion


@dataclass(frozen=True)
class PolicyRequest:
    """Derived settings of one policy.

    Attributes:
        model_path: Local Hugging Face folder of the initial (and reference) weights.
        tokenizer_path: Local folder of the tokenizer that exports carry.
        temperature: Sampling temperature of training; logits are divided by it.
        seed: Seeds weights that the folder lacks.
        sequences_per_step: Sequences of a whole RL step (prompts x generations).
        needs_reference: Whether log-probabilities of the frozen initial weights will be asked for.
        num_threads: CPU threads of each worker.
        gpus_per_worker: GPUs of each worker.
        call_timeout_s: Deadline of one worker call, in seconds.
        version: Version of the initial weights.
    """

    model_path: Path
    tokenizer_path: Path
    temperature: float
    seed: int
    sequences_per_step: int
    needs_reference: bool
    num_threads: int
    gpus_per_worker: int
    call_timeout_s: float
    version: PolicyVersion = 0
