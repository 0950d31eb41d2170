"""The trainer's side of refit tests: a Hugging Face model, its sender, and the logprobs that are right for it."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rl.core.types import PolicyVersion
from rl.weights.sender import WeightSender
from rl.weights.transport import TensorSpec, TransferInfo


class LocalSender:
    """A SenderHandle over a WeightSender in this process."""

    def __init__(self, sender: WeightSender) -> None:
        self.sender = sender

    async def manifest(self) -> tuple[TensorSpec, ...]:
        return self.sender.manifest()

    async def open(self, info: TransferInfo) -> None:
        self.sender.open(info)

    async def start(self, version: PolicyVersion) -> None:
        self.sender.start(version)

    async def pack(self, bucket: int) -> None:
        self.sender.pack(bucket)

    async def finish(self) -> str:
        return self.sender.finish()

    async def close(self) -> None:
        self.sender.close()


class TrainerModel:
    """A float32 model that can be changed and asked for logprobs."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.handle = LocalSender(WeightSender(lambda: dict(self.model.named_parameters())))

    def perturb(self, seed: int, scale: float) -> None:
        """Add noise of `scale` times its own spread to every tensor."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                spread = parameter.std() if parameter.numel() > 1 else parameter.abs().mean()
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise, alpha=scale * float(spread.clamp_min(0.01)))

    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """log p of each of `tokens` after `prompt`."""
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            logits = self.model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
        table = torch.log_softmax(logits, dim=-1)
        return [float(table[position, token]) for position, token in enumerate(tokens)]
