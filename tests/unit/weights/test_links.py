"""Which stream a transfer works on."""

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rl.weights.links import on_default_stream


@dataclass(frozen=True)
class Stream:
    """Notes who waits for whom."""

    name: str
    events: list[str]

    def wait_stream(self, other: "Stream") -> None:
        self.events.append(f"{self.name} waits for {other.name}")


def test_a_transfer_on_a_device_works_on_its_default_stream_between_what_the_engine_does_on_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    @contextmanager
    def use(stream: Stream) -> Any:
        events.append(f"on {stream.name}")
        yield
        events.append(f"off {stream.name}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("the engine's", events))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream("the default", events))
    monkeypatch.setattr(torch.cuda, "stream", use)
    with on_default_stream(torch.device("cpu")):
        pass
    assert events == []
    with pytest.raises(KeyError), on_default_stream(torch.device("cuda", 1)):
        events.append("transfer")
        raise KeyError
    assert events == [
        "the default waits for the engine's", "on the default", "transfer", "the engine's waits for the default",
    ]  # fmt: skip
