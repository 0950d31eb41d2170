"""A whole refit between fakes: one sender, some replicas and servers, and faults that come once or always.

Where somebody hangs the test runs in virtual time (`tests.support.virtual_loop`): deadlines then cost nothing, and no
busy machine lets them pass.
"""

import asyncio
from typing import Any, cast

from rl.core.clock import Clock, SystemClock
from rl.weights.config import RefitConfig
from rl.weights.sync import WeightSync
from tests.support.refit_fakes import NAMES, FakeFleet, FakeSender, FakeServer, word
from tests.support.virtual_loop import VirtualLoop


class Scene:
    """One sender, some replicas, the transaction between them."""

    def __init__(self, replicas: int = 2, num_readers: int = 1, servers: int = 0, **settings: Any) -> None:
        self.sender = FakeSender()
        self.fleet = FakeFleet(self.sender, replicas, num_readers)
        self.servers = [FakeServer(f"http://10.0.0.{index}", self.sender) for index in range(servers)]
        config = RefitConfig(**({"timeout_s": 20.0, "pause_mode": "keep"} | settings))
        loop = asyncio.get_running_loop()
        clock: Clock = loop if isinstance(loop, VirtualLoop) else SystemClock()
        fleet, others = cast(Any, self.fleet), cast(Any, list(self.servers))
        self.sync = WeightSync(self.sender, fleet, config, "tdm-test", clock, others)

    async def connected(self) -> "Scene":
        await self.sync.connect()
        return self

    def fail_once(self, replica: int, phase: str, error: Exception) -> None:
        def fail(at: str) -> None:
            if at == phase:
                self.fleet.replicas[replica].at = lambda phase: None
                raise error

        self.fleet.replicas[replica].at = fail

    def fail_always(self, replica: int, phase: str, error: Exception) -> None:
        def fail(at: str) -> None:
            if at == phase:
                raise error

        self.fleet.replicas[replica].at = fail

    def assert_loaded(self, version: int) -> None:
        assert not self.fleet.is_paused
        assert self.sync.state == "CLEAN" and self.sync.version == version
        assert not any(server.is_paused for server in self.servers)
        for replica in [*self.fleet.replicas, *self.servers]:
            assert replica.version == version
            assert replica.weights == {name: word(name, version) for name in NAMES}

    async def assert_next_works(self, version: int) -> None:
        """The failure left everything paused; without its cause the same call succeeds in full."""
        assert self.fleet.is_paused
        assert self.sync.version != version
        self.sender.at, self.sender.hang_at = (lambda phase: None), None
        for replica in self.fleet.replicas:
            replica.heal()
        await self.sync.publish(version)
        self.assert_loaded(version)
