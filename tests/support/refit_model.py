"""The trainer's side of refit tests: a Hugging Face model, its sender, and the logprobs that are right for it."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rl.core.types import PolicyVersion
from rl.weights.sender import WeightSender
from rl.weights.source import LocalSource
from rl.weights.transport import OpenRequest, RefitStart, SendReport, TensorSpec, TransferInfo

_CALL_S = 60.0


class LocalSender:
    """A SenderHandle over a WeightSender of one rank in this process; its calls run in threads."""

    def __init__(self, sender: WeightSender) -> None:
        self.sender = sender

    async def manifest(self) -> tuple[TensorSpec, ...]:
        return await asyncio.to_thread(self.sender.manifest)

    async def open(self, request: OpenRequest) -> TransferInfo:
        blob, digest = self.sender.plan(request)
        address = await asyncio.to_thread(self.sender.open, blob, digest, request)
        return TransferInfo(
            transport=request.transport,
            addresses=(address,),
            plan=blob,
            plan_digest=digest,
            num_slots=request.num_slots,
            readers=request.readers,
            timeout_s=request.timeout_s,
            link=request.link,
        )

    async def join(self) -> None:
        await asyncio.to_thread(self.sender.join)

    async def send(self, start: RefitStart) -> SendReport:
        return await asyncio.to_thread(self.sender.send, start)

    async def abort(self, reason: str) -> None:
        self.sender.abort(reason)

    async def signatures(self) -> Mapping[str, Sequence[float]]:
        return await asyncio.to_thread(self.sender.signatures, _CALL_S)

    async def close(self) -> None:
        await asyncio.to_thread(self.sender.close)


class TrainerModel:
    """A float32 model that can be changed and asked for logprobs."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._first: list[torch.Tensor] = []
        self.handle = LocalSender(WeightSender(LocalSource(lambda: dict(self.model.named_parameters()))))

    def reset(self) -> None:
        """Return to the weights of the first call: many perturbations on top of each other only grow."""
        with torch.no_grad():
            if not self._first:
                self._first = [parameter.clone() for parameter in self.model.parameters()]
            for parameter, first in zip(self.model.parameters(), self._first, strict=True):
                parameter.copy_(first)

    def perturb(self, seed: PolicyVersion, scale: float) -> None:
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

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` most likely tokens after `prompt`, one after the other."""
        ids = torch.tensor([list(prompt)])
        with torch.no_grad():
            for _ in range(count):
                ids = torch.cat([ids, self.model(ids).logits[:, -1:].argmax(-1)], dim=1)
        return [int(token) for token in ids[0, len(prompt) :]]
