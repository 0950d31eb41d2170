"""A whole evaluation, from a configuration to files and numbers: training's generators and environments, no trainer.

    plan = plan_evaluation(config, EvalOptions("grpo_smollm2_cpu", Path("results/my_run/exp_001"), None))
    report = run_evaluation(plan, tree)

The folder gets samples.jsonl and results.json, each whole or not at all, and run.log. How samples are counted is the
business of `eval_results.py`.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import rl
from rl.cluster.threads import thread_plan
from rl.cluster.virtual_cluster import build_cluster
from rl.cluster.worker_group import Cluster
from rl.controller.closing import close_parts, without_masking
from rl.controller.config import MasterConfig
from rl.controller.engine_setup import LoadedModel, generator_request, load_model, start_generator
from rl.controller.eval_plan import EvalPlan, environments_of
from rl.controller.eval_results import Counting, PromptResult, Rows, TaskResult, sample_records, task_results
from rl.controller.evaluator import LOADED_VERSION, Evaluator, Question, build_questions
from rl.controller.interrupts import Interrupts
from rl.controller.rollout_factory import RolloutFactory
from rl.controller.stop import StopSignal
from rl.core.clock import Clock, SystemClock
from rl.core.concurrency import gather_or_cancel, in_thread
from rl.core.config_tree import ConfigTree
from rl.core.config_view import to_yaml
from rl.core.errors import ConfigError, FatalError, RLError
from rl.core.files import replace_atomically
from rl.core.metric_registry import check_metric_names
from rl.core.resources import RunResources
from rl.data.model_files import weights_digest
from rl.environments.base import Environment
from rl.environments.registry import build_environments
from rl.generation.generator import Generator, SamplingParams
from rl.telemetry.console import Console

__all__ = ["EvalReport", "run_evaluation"]

_log = logging.getLogger(__name__)
_PROGRESS_LINES = 10


@dataclass(frozen=True)
class EvalReport:
    """How an evaluation ended; a failure is an exception instead.

    Attributes:
        folder: Where its files are.
        tasks: Results by task, those of all together last; none when it was interrupted.
        interrupted: Whether a signal ended it.
    """

    folder: Path
    tasks: Sequence[TaskResult]
    interrupted: bool = False


@dataclass(frozen=True)
class _Session:
    """What is open during an evaluation."""

    plan: EvalPlan
    folder: Path
    resources: RunResources
    console: Console
    clock: Clock


@dataclass(frozen=True)
class _Parts:
    """What an evaluation works with."""

    questions: Sequence[Question]
    rows: Mapping[str, Rows]
    rollouts: RolloutFactory
    weights_sha256: str


def run_evaluation(plan: EvalPlan, tree: ConfigTree) -> EvalReport:
    """Evaluate as the `eval` section says.

    Args:
        plan: What is evaluated.
        tree: Where the values of the configuration were written; stored with the results.

    Raises:
        ConfigError: the evaluation could not begin.
        RLError: it failed.
    """
    clock = SystemClock()
    with ExitStack() as stack:
        try:
            folder = _make_folder(plan)
            (folder / "config.yaml").write_text(to_yaml(plan.config, tree), encoding="utf-8")
            console = Console(plan.config.logger.console, 1, folder / "run.log", clock, unit="prompts")
        except OSError as error:
            raise ConfigError(f"cannot write the results of the evaluation: {error}; give another --output") from error
        stack.callback(console.close)
        resources = RunResources.create()
        stack.callback(without_masking, "the evaluation's cleaner", resources.close)
        console.note(f"evaluating {plan.config.policy.model_name} on {', '.join(plan.tasks)}")
        session = _Session(plan, folder, resources, console, clock)
        try:
            with asyncio.Runner() as runner:
                return runner.run(_run(session))
        except Exception:
            _log.info("the evaluation failed", exc_info=True)
            raise


async def _run(session: _Session) -> EvalReport:
    """Everything that happens on the event loop. Nothing is worth waiting for: the first signal ends it."""
    stop, console = StopSignal(), session.console
    with Interrupts(stop, console.note, console.close, deadline_s=0.0) as interrupts:
        stack = AsyncExitStack()
        try:
            console.phase("loading")
            parts = await _build(session, stack)
            interrupts.set_up_is_over()
            console.phase("evaluating")
            return await _evaluate(session, parts)
        except (asyncio.CancelledError, RLError) as error:
            if not stop.requested:
                raise
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None:
                task.uncancel()
            return EvalReport(session.folder, (), interrupted=True)
        finally:
            await close_parts(stack)


async def _build(session: _Session, stack: AsyncExitStack) -> _Parts:
    """Build every part; cheap checks of the data come before anything heavy starts.

    Raises:
        ConfigError: the configuration names something that does not exist.
        InfraError: a process did not start.
    """
    config, plan = session.plan.config, session.plan
    model = await in_thread("model", lambda: load_model(config, session.console.note))
    questions, rows = await in_thread("prompts", lambda: build_questions(plan, model.tokenizer))
    used = {name: config.env[name] for name in environments_of(config, plan.tasks)}
    environments: dict[str, Environment] = await in_thread("environments", lambda: build_environments(used))
    for environment in environments.values():
        stack.push_async_callback(environment.close)
    cluster = await build_cluster(config.cluster, session.resources)
    stack.push_async_callback(cluster.shutdown)
    generator, digest = await gather_or_cancel(
        [
            _start_generator(config, cluster, model, stack),
            in_thread("fingerprint", lambda: weights_digest(model.path)),
        ]
    )
    rollouts = RolloutFactory(config, cast(Generator, generator), environments, model.tokenizer, session.clock)
    return _Parts(questions, rows, rollouts, str(digest))


async def _start_generator(
    config: MasterConfig, cluster: Cluster, model: LoadedModel, stack: AsyncExitStack
) -> Generator:
    """Start the engines with the weights of the folder: there is no trainer that would send others."""
    replicas = config.policy.generation.num_replicas
    threads = thread_plan(config.cluster.threads, overlapping=False, generation_workers=replicas)
    request = replace(generator_request(config, model, threads.generation), loaded_version=LOADED_VERSION)
    return await start_generator(config, cluster, request, stack)


async def _evaluate(session: _Session, parts: _Parts) -> EvalReport:
    """Sample, count, write.

    Raises:
        FatalError: the evaluation cannot go on, or its files cannot be written.
    """
    section, start = session.plan.config.eval, session.clock.now()
    counting = Counting(section.num_generations, tuple(section.k), section.correct_reward)
    sampling = parts.rollouts.evaluation_sampling()
    manager = parts.rollouts.manager("eval", sampling)
    results = await Evaluator(manager, counting.samples, _Progress(session.console)).run(parts.questions)
    tasks = task_results(results, parts.rows, counting)
    check_metric_names(f"eval/{name}" for task in tasks for name in task.metrics)
    summary = _summary(session, parts, sampling, tasks)
    summary["seconds"] = round(session.clock.now() - start, 3)
    try:
        await asyncio.to_thread(_write, session.folder, results, counting, summary)
    except OSError as error:
        raise FatalError(f"cannot write the results into {session.folder}: {error}") from error
    return EvalReport(session.folder, tasks)


class _Progress:
    """Moves the progress line, and adds a few lines to run.log and to plain output."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, done: int, total: int) -> None:
        """Take note of the prompts done so far."""
        self._console.counted(done, total)
        if done and done * _PROGRESS_LINES // total > (done - 1) * _PROGRESS_LINES // total:
            self._console.note(f"evaluated {done} of {total} prompts")


def _summary(session: _Session, parts: _Parts, sampling: SamplingParams, tasks: Sequence[TaskResult]) -> dict[str, Any]:
    config = session.plan.config
    return {
        "tandem": rl.__version__,
        "model": {"name": config.policy.model_name, "weights_sha256": parts.weights_sha256},
        "sampling": asdict(sampling) | {"num_generations": config.eval.num_generations},
        "tasks": {task.name: {"counts": dict(task.counts), "metrics": dict(task.metrics)} for task in tasks},
        "overlong_rows": {name: dict(rows.overlong) for name, rows in parts.rows.items()},
        "config": config.model_dump(mode="json"),
    }


def _write(folder: Path, results: Sequence[PromptResult], counting: Counting, summary: Mapping[str, Any]) -> None:
    records = sample_records(results, counting)
    lines = [json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records]
    replace_atomically(folder / "samples.jsonl", "".join(lines))
    text = json.dumps(summary, ensure_ascii=False, allow_nan=False, indent=2)
    replace_atomically(folder / "results.json", text + "\n")


def _make_folder(plan: EvalPlan) -> Path:
    """Make the folder of the results; one process alone gets a number.

    Raises:
        OSError: it cannot be made.
    """
    if plan.options.output is not None:
        plan.options.output.mkdir(parents=True)
        return plan.options.output.absolute()
    parent = plan.parent.absolute()
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / f"eval_{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder
