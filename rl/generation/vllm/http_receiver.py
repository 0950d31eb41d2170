"""Refits a vLLM server that Tandem did not start, over HTTP: vLLM's verbs of its development mode.

The server must know Tandem's weight transfer (the plug-in of the wheel, see `plugin`) and be told to use it:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "tandem"}'

    server = await HttpReceiver.connect("http://10.0.0.7:8000", call_timeout_s=60, keeps_caches=False)

Only words travel over HTTP; weights come by the refit's own links. The caller pauses and resumes. It sends no requests
but the probe: whose requests the server answers is not Tandem's business.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from rl.core.errors import InfraError, WeightSyncError
from rl.core.types import PolicyVersion
from rl.generation.vllm.abort_line import new_name, send_abort
from rl.generation.vllm.refit import ack_of
from rl.generation.vllm.shares import signatures_of
from rl.generation.vllm.wire import (
    PAUSE_MODES,
    RankReport,
    first_fault,
    init_values,
    located,
    unwrapped,
    update_values,
)
from rl.weights.transport import Ack, PauseMode, RefitStart, TransferInfo

# A host that answers at all accepts a connection within it; calls themselves may take long.
_CONNECT_S = 10.0
# A phase outlives its deadline in the server's processes, so that their own error arrives.
_MARGIN_S = 10.0
_HOW_TO_START = (
    'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "tandem"}\', where tandem-rl is '
    "installed (docs/refit.md)"
)


class _Refused(Exception):
    """The server answered with an error."""

    def __init__(self, status: int, body: str) -> None:
        text = unwrapped(body)
        # A page is what some other server shows to people.
        shown = "" if text.lstrip().startswith("<") else f": {text[:500]}"
        super().__init__(f"HTTP {status}{shown}")
        self.status = status


class HttpReceiver:
    """One server's end of a refit.

    Args:
        url: Of the server.
        num_readers: Its processes.
        call_timeout_s: Deadline of a call that has no deadline of its own, in seconds.
        keeps_caches: Whether requests that a refit froze go on with keys and values of the old weights.
    """

    def __init__(self, url: str, num_readers: int, call_timeout_s: float, keeps_caches: bool) -> None:
        self._url = url.rstrip("/")
        self._num_readers = num_readers
        self._call_timeout_s = call_timeout_s
        self._keeps_caches = keeps_caches
        self._abort_line = new_name()
        self._first_reader = 0
        self._start: RefitStart | None = None

    @classmethod
    async def connect(cls, url: str, call_timeout_s: float, keeps_caches: bool) -> "HttpReceiver":
        """Ask a server for its processes.

        Raises:
            WeightSyncError: it is no vLLM server in development mode, or has data-parallel engines.
            InfraError: it cannot be reached.
        """
        server = cls(url, 0, call_timeout_s, keeps_caches)
        async with server._phase("the first call"):
            all_engines, one_engine = [
                (await server._get("get_world_size", include_dp=flag))["world_size"] for flag in ("true", "false")
            ]
        if all_engines != one_engine:
            # Only the first engine answers a collective call: what the others loaded could not be confirmed.
            raise WeightSyncError(
                f"{server.replica} has {all_engines // one_engine} data-parallel engines; serve each by itself"
            )
        server._num_readers = int(one_engine)
        return server

    @property
    def replica(self) -> str:
        """A name for messages."""
        return f"server {self._url}"

    @property
    def num_readers(self) -> int:
        """Processes that receive."""
        return self._num_readers

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; see `ReceiverHandle.pause`."""
        clears = not (self._keeps_caches and mode == "keep")
        async with self._phase(f"pause ({mode})"):
            await self._post("pause", params={"mode": PAUSE_MODES[mode], "clear_cache": str(clears).lower()})

    async def resume(self) -> None:
        """Generate again."""
        async with self._phase("resume"):
            await self._post("resume")

    async def init(self, info: TransferInfo, first_reader: int) -> None:
        """Join the links; see `ReceiverHandle.init`."""
        self._first_reader = first_reader
        self._start = None
        async with self._phase("init"):
            await self._collective("tandem_end_session")
            values = init_values(info, first_reader, self._abort_line)
            await self._post("init_weight_transfer_engine", {"init_info": values}, info.timeout_s + _MARGIN_S)
            await self._check()

    async def start(self, start: RefitStart) -> None:
        """Begin a refit.

        Raises:
            WeightSyncError: the server is not paused.
        """
        async with self._phase("start"):
            if not (await self._get("is_paused"))["is_paused"]:
                raise WeightSyncError(f"it is not paused; weights of version {start.version} cannot be loaded")
            await self._collective("tandem_end_session")
            await self._post("start_weight_update")
            await self._check()
            self._start = start

    async def update(self) -> None:
        """Receive and load all buckets; see `ReceiverHandle.update`."""
        start, self._start = self._start, None
        async with self._phase("update"):
            if start is None:
                raise WeightSyncError("update without start")
            await self._post("update_weights", {"update_info": update_values(start)}, start.timeout_s + _MARGIN_S)
            await self._check()

    async def finish(self, version: PolicyVersion) -> Ack:
        """Commit; see `ReceiverHandle.finish`."""
        async with self._phase("finish"):
            await self._post("finish_weight_update", {"weight_version": None})
            await self._check()
            await self._post("update_weight_version", {"new_version": str(version)})
            received = await self._collective("tandem_received")
            if not self._keeps_caches:
                await self._post("reset_prefix_cache")
            reported = (await self._get("weight_info"))["weight_version"]
            return ack_of(self.replica, reported, [RankReport.of(values) for values in received])

    async def abort(self, reason: str) -> None:
        """Let a server on this host give up at once; elsewhere the sender's own abort crosses the links."""
        for rank in range(self._num_readers):
            send_abort(self._abort_line, self._first_reader + rank, reason)

    async def signatures(self) -> Mapping[str, Sequence[float]]:
        """Return what the layers compute; see `ReceiverHandle.signatures`."""
        async with self._phase("signatures"):
            return signatures_of(await self._collective("tandem_products"))

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first; the server must not be paused.

        Raises:
            InfraError: it cannot be reached.
            WeightSyncError: it refuses.
        """
        async with self._phase("score"):
            model = (await self._get("v1/models"))["data"][0]["id"]
            request = {"model": model, "prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": 0}
            answer = await self._post("v1/completions", request)
            tables = answer["choices"][0]["prompt_logprobs"][1:]
            return [float(table[str(token)]["logprob"]) for table, token in zip(tables, tokens[1:], strict=True)]

    async def _check(self) -> None:
        """Ask every process whether the verb before failed there: engines of several cannot raise, see `receiver`."""
        fault = first_fault(await self._collective("tandem_fault"))
        if fault is not None:
            raise fault

    async def _collective(self, method: str) -> list[Any]:
        answer: Any = await self._post("collective_rpc", {"method": method})
        results: list[Any] = answer["results"]
        return results

    async def _get(self, path: str, **params: str) -> Any:
        return await self._exchange("GET", path, None, params, self._call_timeout_s)

    async def _post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = 0.0,
        params: Mapping[str, str] | None = None,
    ) -> Any:
        return await self._exchange("POST", path, body, params or {}, timeout_s or self._call_timeout_s)

    async def _exchange(
        self, verb: str, path: str, body: Mapping[str, Any] | None, params: Mapping[str, str], timeout_s: float
    ) -> Any:
        """One exchange; each has a connection of its own, because a refit needs few."""
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.request(verb, f"{self._url}/{path}", json=body, params=dict(params)) as response,
        ):
            if response.status >= 400:
                raise _Refused(response.status, await response.text())
            return await response.json(content_type=None)

    @asynccontextmanager
    async def _phase(self, phase: str) -> AsyncIterator[None]:
        """Turn what HTTP knows into what the server's processes mean."""
        where = f"{self.replica} failed at {phase}"
        try:
            yield
        except WeightSyncError as error:
            raise located(where, error) from error
        except aiohttp.ConnectionTimeoutError as error:
            raise InfraError(f"{where}: it cannot be reached within {_CONNECT_S:g} s") from error
        except TimeoutError as error:
            raise InfraError(f"{where}: no answer in time") from error
        except aiohttp.ClientError as error:
            raise InfraError(f"{where}: it cannot be reached: {error}") from error
        except _Refused as error:
            raise await self._explained(where, error) from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise WeightSyncError(f"{where}: its answer is not that of a vLLM server: {error!r}") from error

    async def _explained(self, where: str, refused: _Refused) -> Exception:
        if refused.status == 404:
            return WeightSyncError(f"{where}: {refused}; it is no vLLM server in development mode: {_HOW_TO_START}")
        try:
            fault = first_fault(await self._collective("tandem_fault"))
        except (TimeoutError, aiohttp.ClientError) as silence:
            return InfraError(f"{where}: {refused}; after that: {silence or 'no answer'}")
        except _Refused:
            return WeightSyncError(f"{where}: {refused}; does it know Tandem's weight transfer? {_HOW_TO_START}")
        return located(where, fault or WeightSyncError(str(refused)))
