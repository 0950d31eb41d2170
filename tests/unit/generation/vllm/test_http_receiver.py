"""What an HTTP receiver makes of servers that answer badly; a real one is refitted in tests/integration/refit."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rl.core.errors import InfraError, WeightSyncError
from rl.generation.vllm.http_receiver import HttpReceiver
from rl.weights.faults import TransferError
from rl.weights.transport import RefitStart

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def answer(body: Any, status: int = 200) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return handle


async def world_size(request: web.Request) -> web.StreamResponse:
    return web.json_response({"world_size": 2})


@asynccontextmanager
async def serving(**handlers: Handler) -> AsyncIterator[str]:
    """A server on a free port with one handler per path."""
    app = web.Application()
    for path, handler in ({"get_world_size": world_size} | handlers).items():
        app.router.add_route("*", f"/{path}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def connected(url: str, timeout_s: float = 10.0) -> HttpReceiver:
    return await HttpReceiver.connect(url + "/", timeout_s, keeps_caches=False)


async def test_a_server_says_how_many_processes_it_has() -> None:
    async with serving() as url:
        server = await connected(url)
        assert (server.num_readers, server.replica) == (2, f"server {url}")


async def test_a_server_that_is_not_in_development_mode_is_told_how_to_start() -> None:
    async with serving(get_world_size=answer({"detail": "Not Found"}, 404)) as url:
        with pytest.raises(WeightSyncError, match="VLLM_SERVER_DEV_MODE=1"):
            await connected(url)


async def test_a_page_of_another_server_is_not_repeated() -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response(status=404, text="\n<!DOCTYPE HTML>\n<html>Nothing here</html>", content_type="text/html")

    async with serving(get_world_size=page) as url:
        with pytest.raises(WeightSyncError, match=r"HTTP 404; it is no vLLM server in development mode"):
            await connected(url)


async def test_data_parallel_engines_are_refused_because_one_alone_confirms() -> None:
    async def sizes(request: web.Request) -> web.StreamResponse:
        return web.json_response({"world_size": 4 if request.query["include_dp"] == "true" else 2})

    async with serving(get_world_size=sizes) as url:
        with pytest.raises(WeightSyncError, match="2 data-parallel engines"):
            await connected(url)


async def test_a_server_that_does_not_know_the_transfer_is_told_so() -> None:
    async with serving(collective_rpc=answer({"error": "no such method"}, 500)) as url:
        server = await connected(url)
        with pytest.raises(WeightSyncError, match="does it know Tandem's weight transfer"):
            await server.signatures()


async def test_a_server_that_is_not_paused_is_not_refitted() -> None:
    async with serving(is_paused=answer({"is_paused": False})) as url:
        server = await connected(url)
        with pytest.raises(WeightSyncError, match="is not paused; weights of version 4"):
            await server.start(RefitStart(1, 4, 10.0))


async def test_what_a_process_knows_of_its_failure_arrives_typed() -> None:
    fault = {"message": "reader 1 was lost", "kind": "peer lost", "rank": 65537, "bucket": 3, "is_own": False}

    async def collective(request: web.Request) -> web.StreamResponse:
        method = (await request.json())["method"]
        return web.json_response({"results": [{}, fault] if method == "tandem_fault" else [None, None]})

    handlers = {
        "is_paused": answer({"is_paused": True}),
        "collective_rpc": collective,
        "start_weight_update": answer({"error": "Internal Server Error"}, 500),
    }
    async with serving(**handlers) as url:
        server = await connected(url)
        with pytest.raises(TransferError, match="failed at start: reader 1 was lost") as caught:
            await server.start(RefitStart(1, 4, 10.0))
    assert (caught.value.kind, caught.value.reader, caught.value.bucket) == ("peer lost", 1, 3)


async def test_a_server_that_does_not_answer_in_time_is_gone() -> None:
    release = asyncio.Event()

    async def never(request: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.Response()

    async with serving(resume=never) as url:
        server = await connected(url, timeout_s=1.0)
        try:
            with pytest.raises(InfraError, match="no answer in time"):
                await server.resume()
        finally:
            release.set()


async def test_a_host_that_takes_no_connection_is_not_waited_for_as_long_as_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rl.generation.vllm.http_receiver._CONNECT_S", 0.3)
    with socket.socket() as full, ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):  # as many as its queue takes, and more
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        with pytest.raises(InfraError, match=f"server {url} failed at .*: it cannot be reached within 0.3 s"):
            await asyncio.wait_for(HttpReceiver.connect(url, 60.0, False), 20.0)


async def test_an_answer_of_another_kind_is_no_vllm_server() -> None:
    async with serving(get_world_size=answer(["what"])) as url:
        with pytest.raises(WeightSyncError, match="not that of a vLLM server"):
            await connected(url)


async def test_an_abort_of_a_server_elsewhere_is_quiet() -> None:
    async with serving() as url:
        await (await connected(url)).abort("the trainer is gone")
