"""What a configuration makes of a refit, its services, its evaluation and a whole run. As `knob_probes`."""

import asyncio
import json
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from rl.controller.engine_setup import generator_request, load_model
from rl.controller.eval_plan import EvalOptions, plan_evaluation
from rl.controller.evaluator import build_questions
from rl.controller.options import RunOptions
from rl.controller.phases import Phases
from rl.controller.run import run_training
from rl.controller.setup import build_residency
from rl.core.clock import SystemClock
from rl.core.errors import WeightSyncError
from rl.core.imports import import_object
from rl.environments.config import CodeEnvConfig
from rl.environments.sandbox import run_code
from rl.telemetry.sinks import RunInfo, configured_sinks
from rl.weights.sync import WeightSync
from rl.weights.transport import OpenRequest, TensorSpec, TransferInfo
from tests.support.knob_workshop import Case

OPEN_FILES = """
held = []
try:
    while True:
        held.append(open("/dev/null"))
except OSError:
    print(len(held))
"""
MANY_FILES = """
import time
for number in range(200):
    open(f"/tmp/{number}", "w").close()
time.sleep(1.0)
print("made")
"""


class RefitSeen(Exception):
    """Ends a refit once its generator was asked to pause."""


class AskedRefit:
    """Sender, replica and generator of a refit that ends at its pause; keeps what they were told."""

    replica = "generation[0]"
    num_readers = num_replicas = 1

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def manifest(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(f"w{index}", "float32", (512, 1024)) for index in range(4))

    async def open(self, request: OpenRequest) -> TransferInfo:
        self.told.append((request.transport, request.bucket_bytes, request.num_slots, request.link))
        timeout_s, link = request.timeout_s, request.link
        return TransferInfo(request.transport, ("a",), b"", "", request.num_slots, request.readers, timeout_s, link)

    async def join(self) -> None:
        pass

    async def init(self, info: TransferInfo, first_reader: int) -> None:
        pass

    async def abort(self, reason: str) -> None:
        pass

    async def pause(self, mode: str) -> None:
        self.told.append(mode)
        raise RefitSeen

    def weight_receivers(self) -> list[Any]:
        return [self]


def refitted(case: Case) -> Any:
    """The links of a refit, and how it stops the generators."""
    asked: Any = AskedRefit()
    sync = WeightSync(asked, asked, case.config.policy.generation.refit_cfg, "tag", SystemClock())

    async def refit() -> None:
        await sync.connect()
        await sync.publish(0)

    with suppress(RefitSeen, WeightSyncError):
        asyncio.run(refit())
    assert len(asked.told) >= 2
    return asked.told[:2]


def checked(case: Case) -> Any:
    """How often a refit is probed, and how strictly."""
    refit = case.config.policy.generation.refit_cfg
    return [refit.check_every_for(on_gpus=False), refit.tolerance_for(case.config.policy.precision)]


def shared(case: Case) -> Any:
    """Who is on the devices, and whether engines are built to make room there."""
    nobody: Any = None
    clock = SystemClock()
    residency = build_residency(case.config, nobody, nobody, Phases(clock, lambda _: None), clock)
    request = generator_request(case.config, load_model(case.config, lambda _: None), 1)
    return [type(residency).__name__, request.can_sleep]


class _KeepsArguments:
    """A cluster that starts nobody and keeps what workers would have been built with."""

    def __init__(self) -> None:
        self.arguments: list[Any] = []

    async def start_workers(self, worker_class: Any, request: Any, *arguments: Any) -> Any:
        self.arguments = [worker_class.__name__, *arguments]
        return SimpleNamespace(world_size=request.num_workers)


def engine_built(case: Case) -> Any:
    """What the engines' workers are built with beside their section and the request."""
    cluster: Any = _KeepsArguments()
    model = load_model(case.config, lambda _: None)
    build = import_object(case.config.policy.generation.builder)
    asyncio.run(build(case.config.policy.generation, cluster, generator_request(case.config, model, 1)))
    name, _, _, *rest = cluster.arguments
    return [name, *rest]


def asked(case: Case) -> Any:
    """The questions of an evaluation: task, prompt and environment of each."""
    plan = plan_evaluation(case.config, EvalOptions("knob", None, None))
    questions, _ = build_questions(plan, load_model(case.config, lambda _: None).tokenizer)
    return [[question.task, question.prompt.prompt_id, question.prompt.environment] for question in questions]


def confined(case: Case) -> Any:
    """How many files a program in the sandbox may open, and what becomes of one that makes many."""
    section = case.config.env[case.config.data.env_name]
    assert isinstance(section, CodeEnvConfig)
    outcomes = [run_code(program, section.limits) for program in (OPEN_FILES, MANY_FILES)]
    return [[outcome.ending.value, outcome.stdout] for outcome in outcomes]


class Service:
    """Stands for the packages of logging services: takes every call and keeps it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(f"{name}{args}{sorted(kwargs.items())}")
            return SimpleNamespace(info=SimpleNamespace(run_id="r"), experiment_id="e")

        return called


def logged(case: Case) -> Any:
    """Which services are told of a run, and in which words."""
    client, service = Service(), Service()
    modules = {
        "wandb": service,
        "mlflow.tracking": SimpleNamespace(
            MlflowClient=lambda tracking_uri: (client.calls.append(tracking_uri), client)[1]
        ),
        "mlflow.entities": SimpleNamespace(Param=lambda key, value: key),
    }
    run = RunInfo(case.folder / "exp_007", {})
    run.folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl.telemetry.sinks._remembered", lambda run, name, make: "r" if "wandb" in name else make())
        sinks = configured_sinks(case.config.logger)
        patch.setattr("rl.telemetry.sinks.importlib.import_module", modules.__getitem__)
        for name, opener in sinks.items():
            if name != "tensorboard":
                opener(run)
    return [sorted(sinks), service.calls, client.calls]


class DeadlineSeen(Exception):
    """Carries how long a stop waits."""


def stopped(case: Case) -> Any:
    """How long a run that was asked to stop leaves the phase under way."""

    def interrupts(stop: Any, note: Any, close: Any, deadline_s: float) -> Any:
        raise DeadlineSeen(deadline_s)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(DeadlineSeen) as seen:
        patch.setattr("rl.controller.run.Interrupts", interrupts)
        run_training(case.config, case.tree, RunOptions(resume="never", config_name="knob"))
    return seen.value.args


def ran(case: Case) -> Any:
    """The rollouts, the metrics' names and the files of a whole run, and how long its steps are."""
    report = run_training(case.config, case.tree, RunOptions(resume="never", config_name="knob"))
    folder = report.run_folder
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "events.out" not in path.name)
    rollouts = [
        [record["prompt_id"], record["token_ids"], record["reward"]]
        for path in sorted((folder / "rollouts").glob("*.jsonl"))
        for record in map(json.loads, path.read_text().splitlines())
    ]
    counted = {key: line[key] for line in lines for key in line if key.startswith("validation/num")}
    return [files, rollouts, [[line["step"], sorted(line)] for line in lines], counted]
