"""Cross-section checks of the `eval` section. See `rl.controller.checks`."""

from collections.abc import Iterator

from rl.controller.config import MasterConfig
from rl.controller.conflicts import Check, Conflict, inert
from rl.controller.eval_results import ALL


def k_is_at_most_n(config: MasterConfig) -> Iterator[Conflict]:
    """A subset of k samples needs k of them, and each k is reported once."""
    section, keys = config.eval, ("eval.k", "eval.num_generations")
    if min(section.k) < 1:
        yield Conflict(keys[:1], f"{keys[0]}={section.k}: every k must be at least 1", f"remove {min(section.k)}")
    if len(set(section.k)) < len(section.k):
        yield Conflict(keys[:1], f"{keys[0]}={section.k} names a k twice", f"set {keys[0]}={sorted(set(section.k))}")
    largest, samples = max(section.k), section.num_generations
    if largest > samples:
        problem = f"{keys[0]}={section.k} needs {keys[1]} >= {largest}, got {samples}"
        yield Conflict(keys, problem, f"set {keys[1]}={largest} or lower {keys[0]}")


def several_samples_differ(config: MasterConfig) -> Iterator[Conflict]:
    """Greedy samples of one prompt are all the same, and greedy decoding has no nucleus."""
    section, keys = config.eval, ("eval.num_generations", "eval.temperature", "eval.top_k")
    if section.num_generations > 1 and section.temperature == 0:
        problem = f"{keys[0]}={section.num_generations} with {keys[1]}=0 repeats one greedy sample"
        yield Conflict(keys[:2], problem, f"set {keys[1]} above 0, or {keys[0]}=1 and eval.k=[1]")
    elif section.num_generations > 1 and section.top_k == 1:
        problem = f"{keys[0]}={section.num_generations} with {keys[2]}=1 repeats one greedy sample"
        yield Conflict((keys[0], keys[2]), problem, f"raise {keys[2]}, or set {keys[0]}=1 and eval.k=[1]")
    if section.temperature == 0:
        yield from inert(section, "eval", ["top_p", "top_k"], keys[1], f"{keys[1]}=0 is greedy")


def completion_fits_the_context(config: MasterConfig) -> Iterator[Conflict]:
    """At least one token must be left for the prompt."""
    keys = ("eval.max_new_tokens", "policy.max_total_sequence_length")
    asked, total = config.eval.max_new_tokens, config.policy.max_total_sequence_length
    if asked is not None and asked >= total:
        problem = f"{keys[0]}={asked} leaves no token for a prompt within {keys[1]}={total}"
        yield Conflict(keys, problem, f"lower {keys[0]} or raise {keys[1]}")


def tasks_have_environments(config: MasterConfig) -> Iterator[Conflict]:
    """Every task's environment is one of `env`."""
    for name, task in config.eval.tasks.items():
        key = f"eval.tasks.{name}.env_name"
        if task.env_name is not None and task.env_name not in config.env:
            problem = f"{key}={task.env_name} is not among the environments of env: {', '.join(config.env) or 'none'}"
            yield Conflict((key, "env"), problem, f"add env.{task.env_name}.kind, or change {key}")


def no_task_is_called_all(config: MasterConfig) -> Iterator[Conflict]:
    """The results of all tasks together need a name of their own."""
    if ALL in config.eval.tasks:
        key = f"eval.tasks.{ALL}"
        yield Conflict((key,), f"{key}: the results of all tasks together have this name", "give it another name")


EVAL_CHECKS: list[Check] = [
    k_is_at_most_n,
    several_samples_differ,
    completion_fits_the_context,
    tasks_have_environments,
    no_task_is_called_all,
]
