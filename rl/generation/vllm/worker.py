"""One vLLM engine in a worker process: token ids in, token ids with log-probabilities and version spans out.

The engine (vLLM's AsyncLLM; its core and its model run in processes of their own) lives on an event loop in a thread of
the worker, so the worker's methods are plain and may be called by many threads. vLLM is imported when a worker is
built: the driver needs this class only to name its methods. What the engine prints goes to a log file of the run, and
its last lines into the error when it does not start.
"""

import asyncio
import contextlib
import gc
import logging
import os
import re
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, TypeVar

from rl.cluster.worker_group import WorkerContext
from rl.core.errors import ConfigError, InfraError, WeightSyncError
from rl.core.types import Completion, PolicyVersion, VersionSpan
from rl.generation.completion import completion_budget, make_completion
from rl.generation.generator import GeneratorRequest, SamplingParams, WakeTag
from rl.generation.refit_lock import RefitLock
from rl.generation.vllm.config import VllmEngineConfig
from rl.generation.vllm.refit import EngineRefit
from rl.generation.vllm.wire import BACKEND, PAUSE_MODES
from rl.weights.transport import Ack, PauseMode, RefitStart, TransferInfo

T = TypeVar("T")

_EXTENSION_MODULE = "rl.generation.vllm.extension"
# A phase of a refit outlives its deadline in the engine's processes, so that their own error arrives.
_MARGIN_S = 10.0
_LOG_LINES = 30
_SHUTDOWN_S = 15.0
_ERROR_LINE = re.compile(r"(?:^|\] )((?:\w+\.)*\w*(?:Error|Exception): .+)$")


class VllmWorker:
    """Owns one engine. See `rl.generation.pool.GenerationWorker` for what its methods promise.

    Args:
        context: The worker's place.
        config: Engine arguments.
        request: Derived settings.
        keeps_caches: Whether requests that a refit froze go on with keys and values of the old weights.

    Raises:
        ConfigError: vLLM refuses the engine arguments.
        InfraError: the engine did not start; carries its own last lines.
    """

    def __init__(
        self, context: WorkerContext, config: VllmEngineConfig, request: GeneratorRequest, keeps_caches: bool = False
    ) -> None:
        self._replica = f"{context.name}[{context.rank}]"
        self._config = config
        self._request = request
        self._keeps_caches = keeps_caches
        self._salt = "loaded"
        self._refit_lock = RefitLock(self._replica, request.call_timeout_s)
        self._log_path = engine_log_path(context)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{self._replica}-engine", daemon=True)
        self._thread.start()
        self._engine: Any = None
        self._update_s = request.call_timeout_s
        try:
            self._start(context)
        except BaseException:
            self._stop_loop()
            raise
        self._refit = EngineRefit(
            self._engine, self._replica, config.tensor_parallel_size, clears_caches=not keeps_caches
        )

    def generate(self, prompt_tokens: tuple[int, ...], params: SamplingParams, request_id: str) -> Completion:
        """Sample one completion; waits while the engine is paused.

        Raises:
            InfraError: the engine died, the request was aborted, its deadline passed, or its answer is unusable.
            DataError: the prompt leaves no room in the context.
            WeightSyncError: no refit has given the engine a version yet.
        """
        budget = completion_budget(request_id, prompt_tokens, params.max_new_tokens, self._request.max_model_len)
        work = self._complete(prompt_tokens, sampling_arguments(params, budget), request_id)
        return self._call(work, self._config.request_timeout_s, f"request {request_id}")

    def score(self, tokens: tuple[int, ...]) -> list[float]:
        """Return the log-probability of each token but the first, at temperature 1; the engine must not be paused.

        Raises:
            InfraError: the engine died, or the deadline passed.
            DataError: too few tokens, or too many for the context.
        """
        completion_budget("score", tokens, 1, self._request.max_model_len)
        name = f"score-{secrets.token_hex(6)}"
        return self._call(self._score(tokens, name), self._config.request_timeout_s, f"request {name}")

    def abort(self, request_id: str) -> None:
        """Give up a request; an unknown one is ignored."""
        self._call(self._engine.abort(request_id), self._request.call_timeout_s, f"abort of {request_id}")

    def pause(self, mode: PauseMode) -> None:
        """Stop generating and forget cached prefixes. `keep` freezes requests; they go on after `resume`."""
        clears = not (self._keeps_caches and mode == "keep")
        work = self._engine.pause_generation(mode=PAUSE_MODES[mode], clear_cache=clears)
        self._call(work, self._request.call_timeout_s, f"pause ({mode})")

    def resume(self) -> None:
        """Generate again.

        Raises:
            WeightSyncError: something is asleep.
        """
        self._refit.check_awake()
        self._call(self._engine.resume_generation(), self._request.call_timeout_s, "resume")

    def sleep(self) -> int:
        """Finish requests, stay paused, give up the memory of weights and caches in every process of the engine."""
        return self._run_phase("sleep", self._request.call_timeout_s, self._refit.sleep)

    def wake(self, tags: tuple[WakeTag, ...]) -> int:
        """Take memory again; generates nothing before `resume`."""
        return self._run_phase("wake", self._request.call_timeout_s, self._refit.wake, tags)

    def init_transfer(self, info: TransferInfo, first_reader: int) -> None:
        """Join the links in every process of the engine."""
        self._run_phase("init", info.timeout_s, self._refit.init, info, first_reader)

    def start_update(self, start: RefitStart) -> None:
        """Begin a refit; one that was given up before is forgotten.

        Raises:
            WeightSyncError: the engine is not paused.
        """
        self._update_s = start.timeout_s
        self._run_phase("start", start.timeout_s, self._refit.start, start)

    def update(self) -> None:
        """Receive and load all buckets."""
        self._run_phase("update", self._update_s, self._refit.update)

    def finish_update(self, version: PolicyVersion) -> Ack:
        """Finalise the layers, set the engine's version, drop its caches; return what every process of it loaded."""
        ack = self._run_phase("finish", self._request.call_timeout_s, self._refit.finish, version)
        self._salt = str(ack.version)
        return ack

    def abort_update(self, reason: str) -> None:
        """Let the engine's processes give up a transfer; from any thread, beside a call that waits for it."""
        self._refit.abort(reason)

    def signatures(self) -> dict[str, tuple[float, ...]]:
        """Return `rl.weights.signature` of every tensor as the layers compute with it."""
        return self._run_phase("signatures", self._request.call_timeout_s, self._refit.signatures)

    def close(self) -> None:
        """End the engine's processes; idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            # First the tasks that listen to the engine: they would report its end as a failure.
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(_SHUTDOWN_S)
            engine.shutdown(timeout=_SHUTDOWN_S)
            self._stop_loop()
            self._refit.release()
            # The engine is part of reference cycles; left to the interpreter's end its destructor fails noisily.
            del engine
            gc.collect()

    def _start(self, context: WorkerContext) -> None:
        # Not even a local name of the engine: an import here leaves this frame in a cycle of vLLM's.
        environment = engine_environment(context, self._config, self._log_path.parent.parent)
        with engine_output(self._log_path), _environment(environment):
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            try:
                arguments = AsyncEngineArgs(**engine_arguments(context, self._config, self._request))
                work = self._build(AsyncLLM, arguments, arguments.create_engine_config())
                self._engine = asyncio.run_coroutine_threadsafe(work, self._loop).result(self._config.start_timeout_s)
                if self._request.loaded_version is not None:
                    naming = self._engine.update_weight_version(str(self._request.loaded_version))
                    self._call(naming, self._request.call_timeout_s, "naming the loaded weights")
            except (ValueError, TypeError) as error:
                raise ConfigError(
                    f"vLLM refuses the model {self._request.model_path} or the arguments of "
                    f"policy.generation.vllm_cfg: {error}"
                ) from error
            except Exception as error:
                raise InfraError(
                    f"the vLLM engine of {self._replica} did not start: {engine_words(self._log_path, error)} "
                    f"(model {self._request.model_path})"
                ) from error
        _log_to(self._log_path)

    @staticmethod
    async def _build(engine_class: Any, arguments: Any, vllm_config: Any) -> Any:
        from vllm.v1.executor import Executor

        return engine_class(
            vllm_config=vllm_config,
            executor_class=Executor.get_class(vllm_config),
            log_requests=False,
            log_stats=not arguments.disable_log_stats,
        )

    async def _complete(self, prompt_tokens: tuple[int, ...], arguments: dict[str, Any], request_id: str) -> Completion:
        return completion_of(request_id, (await self._answer(prompt_tokens, arguments, request_id)).outputs[0])

    async def _answer(self, prompt_tokens: tuple[int, ...], arguments: dict[str, Any], request_id: str) -> Any:
        from vllm import SamplingParams as EngineParams
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        final = None
        try:
            # Blocks of other weights have another salt: they can never be taken for a prefix of this prompt.
            prompt = tokens_input(list(prompt_tokens), cache_salt=self._salt)
            async for output in self._engine.generate(prompt, EngineParams(**arguments), request_id):
                final = output
        except (EngineDeadError, EngineGenerateError) as error:
            raise InfraError(
                f"{self._replica} failed at request {request_id}: {engine_words(self._log_path, error)}"
            ) from error
        if final is None:
            raise InfraError(f"{self._replica} gave no answer to request {request_id}; retry it")
        return final

    async def _score(self, tokens: tuple[int, ...], request_id: str) -> list[float]:
        arguments = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "output_kind": _final_only()}
        output = await self._answer(tokens, arguments, request_id)
        tables = (output.prompt_logprobs or [])[1:]
        if len(tables) != len(tokens) - 1:
            raise InfraError(
                f"{self._replica} scored {len(tables)} of {len(tokens) - 1} tokens of request {request_id}"
            )
        return [float(table[token].logprob) for table, token in zip(tables, tokens[1:], strict=True)]

    def _run_phase(
        self, phase: str, seconds: float, begin: Callable[..., Coroutine[Any, Any, T]], *arguments: object
    ) -> T:
        """Run one phase of a refit; one at a time."""
        with self._refit_lock.held(phase):
            work = self._refit.while_alive(phase, begin(*arguments))
            return self._call(work, seconds + _MARGIN_S, phase)

    def _call(self, work: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
        from vllm.v1.engine.exceptions import EngineDeadError

        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except FutureTimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise InfraError(f"{self._replica}: {what} did not end within {seconds:g} s") from error
        except EngineDeadError as error:
            raise InfraError(f"{self._replica}: {what} failed: the engine is dead ({error})") from error

    def _stop_loop(self) -> None:
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(_SHUTDOWN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_SHUTDOWN_S)
        self._loop.close()


async def _cancel_others() -> None:
    """End what an engine left on the loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def sampling_arguments(params: SamplingParams, max_new_tokens: int) -> dict[str, Any]:
    """Return vLLM's sampling parameters for ours; every field of ours appears.

    The stop tokens are exactly those asked for (the model's own end tokens stop nothing by themselves), and log-probs
    are asked of the sampled token alone.
    """
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": 0 if params.top_k is None else params.top_k,
        "max_tokens": max_new_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        "stop": list(params.stop_strings),
        "seed": params.seed,
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": True,
        "output_kind": _final_only(),
    }


def _final_only() -> Any:
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind.FINAL_ONLY


def completion_of(request_id: str, output: Any) -> Completion:
    """Read vLLM's CompletionOutput: log-probabilities by the sampled token's id, versions from its own spans."""
    tokens = [int(token) for token in output.token_ids]
    tables = output.logprobs or []
    if tokens and len(tables) != len(tokens):
        raise InfraError(f"request {request_id}: vLLM returned {len(tables)} logprobs for {len(tokens)} tokens")
    entries = [table.get(token) for table, token in zip(tables, tokens, strict=True)]
    logprobs = [None if entry is None else entry.logprob for entry in entries]
    versions = output.weight_versions or ()
    spans = [VersionSpan(_version(request_id, span.version), span.start, span.end) for span in versions]
    return make_completion(request_id, tokens, logprobs, output.finish_reason, spans, output.text)


def _version(request_id: str, label: str) -> PolicyVersion:
    try:
        return int(label)
    except ValueError as error:
        raise WeightSyncError(
            f"request {request_id} was sampled by weights of version '{label}': publish the policy's weights first"
        ) from error


def engine_arguments(context: WorkerContext, config: VllmEngineConfig, request: GeneratorRequest) -> dict[str, Any]:
    """Return the engine arguments; `vllm_kwargs` come last and win."""
    memory: dict[str, Any] = {"gpu_memory_utilization": config.gpu_memory_utilization}
    if request.can_sleep and context.device != "cpu":
        memory["enable_sleep_mode"] = True  # vLLM refuses it on a CPU, where there is nothing to give up
    if context.device == "cpu":
        # An explicit size also spares the warm-up pass that would measure it.
        memory = {"kv_cache_memory_bytes": int(config.kv_cache_gib * (1 << 30))}
        if config.tensor_parallel_size == 1:
            # vLLM starts a further process so as to pin its threads. Ours are counted, not pinned: run the model in the
            # engine core's process, which starts sooner and answers faster.
            memory["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    return {
        "model": request.model_path,
        "tokenizer": request.tokenizer_path,
        "dtype": request.precision,
        "seed": request.seed + context.rank,
        "max_model_len": request.max_model_len,
        "trust_remote_code": request.trust_remote_code,
        "tensor_parallel_size": config.tensor_parallel_size,
        "block_size": config.block_size,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enforce_eager": config.enforce_eager,
        "max_num_seqs": config.max_num_seqs,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": f"{_EXTENSION_MODULE}.RefitExtension",
        **memory,
        **config.vllm_kwargs,
    }


def engine_environment(context: WorkerContext, config: VllmEngineConfig, run_folder: Path) -> dict[str, str]:
    """Return the environment of the engine's processes: threads, sockets, logs, usage statistics."""
    threads = str(max(1, context.num_threads // config.tensor_parallel_size))
    environment = {
        "OMP_NUM_THREADS": threads,
        # vLLM's own choice keeps one core free and pins the rest, which leaves half of a two-core machine idle.
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        # Threads that wait by spinning take the cores from trainer and driver: ten times slower where these are few.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, int(config.start_timeout_s))),
        "VLLM_RPC_BASE_PATH": str(run_folder),
        "VLLM_LOGGING_COLOR": "0",
    }
    if config.enforce_eager and context.device == "cpu":
        # A helper of the sampler is compiled all the same: 6 s in the first request of every run, and a C++ compiler.
        environment["TORCH_COMPILE_DISABLE"] = os.environ.get("TORCH_COMPILE_DISABLE", "1")
    if not config.collect_usage_stats:
        environment |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return environment


def engine_log_path(context: WorkerContext) -> Path:
    """Return the log file of an engine, in the run's temporary folder (which is TMPDIR of the run's processes)."""
    temporary = Path(tempfile.gettempdir())
    folder = (temporary if temporary.name == context.run_tag else temporary / context.run_tag) / "log"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{context.name}-{context.rank}-vllm.log"


def engine_words(path: Path, error: BaseException) -> str:
    """Return what the engine itself said: its first error, which later ones hide, and its last lines."""
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    causes = [found.group(1) for found in map(_ERROR_LINE.search, lines) if found is not None]
    reason = causes[0] if causes else str(error) or type(error).__name__
    last = "\n".join(lines[-_LOG_LINES:])
    return f"{reason}\nlast lines of {path}:\n{last}"


@contextlib.contextmanager
def engine_output(path: Path) -> Iterator[None]:
    """Let processes that start within the block inherit `path` as standard output and error."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, original in zip((1, 2), saved, strict=True):
            os.dup2(original, descriptor)
            os.close(original)
        os.close(target)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the block: the engine's processes inherit them, this process keeps its own."""
    saved = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _log_to(path: Path) -> None:
    """Send what vLLM's front end in this process logs to the engine's file too; vLLM replaces handlers at its start."""
    logger = logging.getLogger("vllm")
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(name)s:%(lineno)d] %(message)s"))
    logger.handlers = [handler]
    logger.propagate = False
