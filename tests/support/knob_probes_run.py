"""What a configuration makes of prompts, requests, processes, environments, the buffer and a whole run.

As `knob_probes`; nothing here needs a gradient.
"""

import asyncio
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl.cluster.ray import own_settings
from rl.cluster.threads import thread_plan
from rl.cluster.worker_group import WorkerContext, WorkerRequest
from rl.controller.engine_setup import generator_request, load_model, start_generator
from rl.controller.rollout_factory import RolloutFactory
from rl.controller.run_sampler import run_sampler
from rl.controller.setup import build_buffer, build_prompts, build_refill, build_rows
from rl.core.errors import ConfigError
from rl.core.resources import RunResources
from rl.core.types import Dropped, Prompt, Turn
from rl.environments.base import Episode
from rl.environments.config import RewardModelEnvConfig
from rl.environments.registry import build_environment
from rl.environments.reward_model import score_conversations
from rl.generation.config import VllmGenerationConfig
from rl.generation.vllm.worker import engine_arguments, engine_environment, sampling_arguments
from rl.rollout.ticket import Ticket
from rl.trainer.policy import PolicyRequest, start_policy
from tests.support.clock import FakeClock
from tests.support.completions import completion, text_prompt
from tests.support.fakes import EchoEnvironment, FakeGenerator, make_prompt
from tests.support.knob_workshop import Case
from tests.support.letters_game import LettersGame

_DEVICE = {False: "cpu", True: "cuda:0"}


class Started(Exception):
    """Carries the worker group that was asked for."""

    def __init__(self, request: WorkerRequest) -> None:
        super().__init__(request.name)
        self.request = request


class AskedCluster:
    """Starts nothing: raises what it was asked to start."""

    async def start_workers(
        self, worker_class: Callable[..., Any], request: WorkerRequest, *args: Any, **kwargs: Any
    ) -> Any:
        raise Started(request)

    async def shutdown(self) -> None:
        pass


def _quiet(_: str) -> None:
    pass


def prompted(case: Case) -> Any:
    """The first prompts of training and validation with their ids and columns; or the words of the refusal."""
    try:
        rows, held_out = build_rows(case.config)
        source, validation = build_prompts(case.config, load_model(case.config, _quiet), rows, held_out)
        prompts = [source.next() for _ in range(8)] + validation.prompts
    except ConfigError as error:
        return str(error)
    counts = [len(rows), source.skipped.overlong]
    return [counts, [[p.prompt_id, p.environment, repr(p.messages), p.token_ids, repr(p.metadata)] for p in prompts]]


def requested(case: Case) -> Any:
    """What the engines are started with, and every request of training, validation and evaluation."""
    model = load_model(case.config, _quiet)
    request = generator_request(case.config, model, _threads(case).generation)
    factory = RolloutFactory(case.config, FakeGenerator(FakeClock()), {}, model.tokenizer, FakeClock())
    sampling = [factory.training_sampling(), factory.validation_sampling(), factory.evaluation_sampling()]
    section = case.config.policy.generation
    if not isinstance(section, VllmGenerationConfig):
        return ["hf", dataclasses.asdict(request), [dataclasses.asdict(params) for params in sampling]]
    context = WorkerContext("generation", 0, 1, 0, "", _DEVICE[case.config.cluster.gpus_per_node > 0], 2, "tag")
    engine = engine_arguments(context, section.vllm_cfg, request)
    environment = engine_environment(context, section.vllm_cfg, Path("/run"))
    return ["vllm", engine, environment, [sampling_arguments(params, params.max_new_tokens) for params in sampling]]


def started(case: Case) -> Any:
    """The worker groups of trainer and generator: processes, threads, GPUs, calls at once, deadlines."""
    threads = _threads(case)
    model = load_model(case.config, _quiet)
    request = PolicyRequest(
        model_path=model.path,
        tokenizer_path=model.tokenizer.path,
        temperature=case.config.policy.generation.temperature,
        seed=case.config.grpo.seed,
        sequences_per_step=case.config.sequences_per_step,
        needs_reference=False,
        num_threads=threads.policy,
        gpus_per_worker=min(case.config.cluster.gpus_per_node, 1),
        call_timeout_s=case.config.cluster.call_timeout_s,
        version=0,
    )
    found = []
    for start in (
        lambda: start_policy(AskedCluster(), case.config.policy, request),
        lambda: start_generator(
            case.config,
            AskedCluster(),
            generator_request(case.config, model, threads.generation),
            None,  # type: ignore[arg-type]
        ),
    ):
        try:
            asyncio.run(start())  # type: ignore[arg-type]
        except Started as asked:
            found.append(dataclasses.asdict(asked.request))
    assert len(found) == 2
    return found


def _threads(case: Case) -> Any:
    return thread_plan(
        case.config.cluster.threads,
        overlapping=run_sampler(case.config).max_staleness > 0,
        policy_workers=case.config.policy.num_workers,
        generation_workers=case.config.policy.generation.num_replicas,
        cores=8,
    )


def admitted(case: Case) -> Any:
    """How many groups may start before a version ends, what is held, and how a step is filled."""
    sampler, prompts = run_sampler(case.config), case.config.grpo.num_prompts_per_step
    buffer = build_buffer(case.config)
    gate = [[sampler.may_admit(groups, version, prompts) for groups in range(40)] for version in range(3)]
    return [
        sampler.max_staleness,
        sampler.required_capacity(prompts),
        gate,
        repr(build_refill(case.config)),
        asyncio.run(_reserved(buffer)),
    ]


async def _reserved(buffer: Any) -> int:
    """Groups that may start before anything ends."""
    count = 0
    while await _next(buffer) is not None:
        count += 1
    return count


def crowded(case: Case) -> Any:
    """How many completions are made at the same time when six groups of one sample want to run."""
    clock = FakeClock()
    model = load_model(case.config, _quiet)
    generator = FakeGenerator(clock, latency=lambda _: 1.0)
    factory = RolloutFactory(case.config, generator, {"echo": EchoEnvironment()}, model.tokenizer, clock)
    manager = factory.manager("train", factory.training_sampling())

    async def groups() -> None:
        await asyncio.gather(*(manager.run_group(make_prompt(n), 1, Ticket(n, 0)) for n in range(6)))

    asyncio.run(_run_on(clock, groups()))
    return generator.max_running


def replaced(case: Case) -> Any:
    """How many times a prompt is tried whose group is dropped again and again."""
    return asyncio.run(_replaced(build_buffer(case.config)))


async def _replaced(buffer: Any) -> list[int]:
    tried = []
    while (ticket := await _next(buffer)) is not None:
        tried.append(ticket.seq)
        await buffer.put(ticket, Dropped("data_error", 2, "bad row"))
    return tried


async def _next(buffer: Any) -> Any:
    """The next ticket, or None where there is none now."""
    reserving = asyncio.ensure_future(buffer.reserve())
    for _ in range(5):
        await asyncio.sleep(0)
    if reserving.done():
        return reserving.result()
    reserving.cancel()
    return None


def rolled(case: Case) -> Any:
    """Turns, tokens and ends of one group that plays a game of several turns."""
    clock = FakeClock()
    model = load_model(case.config, _quiet)
    generator = FakeGenerator(clock)
    factory = RolloutFactory(case.config, generator, {"echo": LettersGame()}, model.tokenizer, clock)
    manager = factory.manager("train", factory.training_sampling())
    group = asyncio.run(_run_on(clock, manager.run_group(make_prompt(0), 3, Ticket(0, 0))))
    requests = [(request.request_id, request.params.max_new_tokens) for request in generator.requests]
    return [requests, [[len(r.turns), r.end and r.end.value, r.reward, r.is_truncated] for r in group.rollouts]]


async def _run_on(clock: FakeClock, work: Any) -> Any:
    return await clock.run(work)


ANSWER = "42"
BOARD = [[1, 2], [0, 3]]
PROGRAM = "```python\nprint(int(input()) + 1)\n```"
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
TEXTS = (
    "42",
    "x = 42",
    "<think>six</think><answer>42</answer>",
    "</think><answer>7.5</answer>",
    "<think>",
    "A: 42",
    CALL,
    f"{CALL}{CALL}",
    '[call]{"name": "calculator", "arguments": {"expression": "1+1"}}[/call]',
    "<action>left</action>",
    "<action>sideways</action>",
    PROGRAM,
    PROGRAM.replace("+ 1", "+ 2"),
    "[code]print(2)[/code]",
    '<tool_call>{"name": "calculator", "arguments": {"expression": "2**2000"}}</tool_call>',
)
METADATA = {"answer": ANSWER, "board": BOARD, "tests": [{"stdin": "1", "stdout": "2"}, {"stdin": "3", "stdout": "5"}]}


def scored(case: Case) -> Any:
    """All that the environment of the prompts says of fixed completions, over up to three turns of the same text."""
    return asyncio.run(_scored(case))


async def _scored(case: Case) -> list[str]:
    name = case.config.data.env_name
    environment = build_environment(name, case.config.env[name])
    prompt: Prompt = text_prompt("six times seven?", METADATA | _entry(case))
    said = []
    try:
        waiting = [Episode(sample, (), completion(text)) for sample, text in enumerate(TEXTS)]
        for _ in range(3):
            results = await environment.step(prompt, waiting)
            said += [
                repr(dataclasses.replace(result, metrics=dict(sorted(result.metrics.items())))) for result in results
            ]
            waiting = [
                dataclasses.replace(episode, state=result.state, turns=(*episode.turns, Turn((1,), episode.completion)))
                for episode, result in zip(waiting, results, strict=True)
                if not result.done
            ]
            if not waiting:
                break
    finally:
        await environment.close()
    return said


def _entry(case: Case) -> dict[str, Any]:
    """What the dataset's own rows carry, where the environment needs it."""
    rows, _ = build_rows(case.config) if case.config.data.train.kind == "reasoning_gym" else ([], [])
    return dict(rows[0].metadata) if rows else {}


def pooled(case: Case) -> Any:
    """How many processes the environment of the prompts starts, and how long it gives a task."""
    name = case.config.data.env_name
    environment: Any = build_environment(name, case.config.env[name])
    slots = environment._pool._slots
    found = [len(slots), [slot._timeout_s for slot in slots]]
    asyncio.run(environment.close())
    return found


def classified(case: Case) -> Any:
    """The scores that a reward model gives two conversations, in this process."""
    section = case.config.env[case.config.data.env_name]
    assert isinstance(section, RewardModelEnvConfig)
    texts = [[{"role": "text", "content": text}] for text in ("6*7=42", "six times seven")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(case.folder / "modules"))
        patch.setattr("sys.path", list(sys.path))
        try:
            return score_conversations(section, "env.e.model_name", texts)
        except ConfigError as error:
            return str(error)


def joined(case: Case) -> Any:
    """How a Ray of this run alone is started."""
    settings = own_settings(case.config.cluster, RunResources(tag="tag", temp_dir=case.folder))
    return {key: repr(value) for key, value in settings.items()}
