"""The parts that training and evaluation share: the model's files with its tokenizer, and the engines that sample."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rl.cluster.worker_group import Cluster
from rl.controller.config import MasterConfig
from rl.controller.model_check import check_model_folder
from rl.core.imports import import_object
from rl.data.chat import PromptTokenizer
from rl.data.pretrained import resolve_model
from rl.generation.generator import Generator, GeneratorRequest

BuildGenerator = Callable[[object, Cluster, GeneratorRequest], Awaitable[Generator]]


@dataclass(frozen=True)
class LoadedModel:
    """Where the model is, and its tokenizer."""

    path: Path
    tokenizer: PromptTokenizer


def load_model(config: MasterConfig, say: Callable[[str], None]) -> LoadedModel:
    """Find the model's files, fetch them when needed, and load the tokenizer.

    Raises:
        ConfigError: there is no such model, it is damaged, or it does not suit the configuration.
    """
    policy = config.policy
    path = resolve_model(policy.model_name, progress=say)
    check_model_folder(config, path)
    name = policy.tokenizer.name
    tokenizer_path = None if name is None else resolve_model(name, progress=say)
    tokenizer = PromptTokenizer(
        path, policy.tokenizer, config.data, tokenizer_path, trust_remote_code=policy.trust_remote_code
    )
    return LoadedModel(path, tokenizer)


def generator_request(config: MasterConfig, model: LoadedModel, num_threads: int) -> GeneratorRequest:
    """What the engines are built with; nothing is sampled before their first refit."""
    section = config.policy.generation
    return GeneratorRequest(
        model_path=str(model.path),
        tokenizer_path=str(model.tokenizer.path),
        precision=config.policy.precision,
        max_model_len=config.policy.max_total_sequence_length,
        seed=config.grpo.seed,
        num_threads=num_threads,
        gpus_per_replica=section.ranks_per_replica if config.cluster.gpus_per_node > 0 else 0,
        trust_remote_code=config.policy.trust_remote_code,
        call_timeout_s=config.cluster.call_timeout_s,
        can_sleep=section.colocated,
    )


async def start_generator(
    config: MasterConfig, cluster: Cluster, request: GeneratorRequest, stack: AsyncExitStack
) -> Generator:
    """Start the engines; the stack ends them.

    Raises:
        ConfigError: the backend refuses its settings.
        InfraError: an engine did not start.
    """
    section = config.policy.generation
    build = cast(BuildGenerator, import_object(section.builder))
    generator = await build(section, cluster, request)
    stack.push_async_callback(generator.close)
    return generator
