"""Tests of rl.controller.rollout_factory: every sampling setting of training, validation and evaluation arrives."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest

from rl.controller.load import load_config
from rl.controller.rollout_factory import RolloutFactory
from rl.generation.batching import BatchLoop
from rl.generation.generator import SamplingParams
from rl.generation.vllm.worker import sampling_arguments
from rl.rollout.ticket import Ticket
from tests.support.clock import FakeClock
from tests.support.fakes import EchoEnvironment, FakeGenerator, make_prompt
from tests.support.tiny_run import make_tiny_run

ENDS = {"stop_token_ids": (3, 4), "stop_strings": ("\n",)}
SHARED = ["policy.generation.stop_token_ids=[3,4]", 'policy.generation.stop_strings=["\\n"]']
# What is set, and what the requests of each must carry; top-p and top-k of training are refused at load.
TABLE = {
    "training": (
        ["policy.generation.temperature=0.7", "policy.generation.max_new_tokens=5", "grpo.seed=9"],
        {"temperature": 0.7, "top_p": 1.0, "top_k": None, "max_new_tokens": 5, "seed": 9},
    ),
    "validation": (
        [
            "grpo.val_temperature=0.6",
            "grpo.val_top_p=0.9",
            "grpo.val_top_k=8",
            "grpo.val_max_new_tokens=3",
            "grpo.seed=8",
        ],
        {"temperature": 0.6, "top_p": 0.9, "top_k": 8, "max_new_tokens": 3, "seed": 8},
    ),
    "evaluation": (
        ["eval.temperature=0.5", "eval.top_p=0.8", "eval.top_k=7", "eval.max_new_tokens=4", "eval.seed=11"],
        {"temperature": 0.5, "top_p": 0.8, "top_k": 7, "max_new_tokens": 4, "seed": 11},
    ),
}


class Tokenizer:
    """Stop tokens and nothing else."""

    stop_token_ids = (256,)


@pytest.mark.parametrize("use", list(TABLE))
async def test_every_sampling_setting_reaches_the_request_of_each_backend(tmp_path: Path, use: str) -> None:
    overrides, expected = TABLE[use]
    assert {*expected, *ENDS} == {field.name for field in dataclasses.fields(SamplingParams)}
    config, _ = load_config(make_tiny_run(tmp_path).config, [*SHARED, *overrides])
    clock = FakeClock()
    generator = FakeGenerator(clock)
    factory = RolloutFactory(config, generator, {"echo": EchoEnvironment()}, cast(Any, Tokenizer()), clock)
    sampling = {
        "training": factory.training_sampling,
        "validation": factory.validation_sampling,
        "evaluation": factory.evaluation_sampling,
    }[use]()
    assert dataclasses.asdict(sampling) == {**expected, **ENDS}
    await clock.run(factory.manager(use, sampling).run_group(make_prompt(0), 2, Ticket(0, 0)))
    for request in generator.requests:
        assert dataclasses.replace(request.params, seed=sampling.seed) == sampling
    assert len({request.params.seed for request in generator.requests}) == 2
    check_vllm(generator.requests[0].params)
    check_hf(generator.requests[0].params)


def check_vllm(params: SamplingParams) -> None:
    """vLLM's own parameters carry every field."""
    sent = sampling_arguments(params, params.max_new_tokens)
    assert (sent["temperature"], sent["top_p"], sent["seed"]) == (params.temperature, params.top_p, params.seed)
    assert sent["top_k"] == (0 if params.top_k is None else params.top_k)
    assert (sent["max_tokens"], sent["stop"]) == (params.max_new_tokens, list(params.stop_strings))
    assert sent["stop_token_ids"] == list(params.stop_token_ids)


def check_hf(params: SamplingParams) -> None:
    """The transformers backend keeps the parameters whole, and seeds the sample with theirs."""
    loop = BatchLoop(cast(Any, None), lambda _: "", 1, "test")
    loop.pause("drain", 5.0)
    loop.submit((1,), params, params.max_new_tokens, "r")
    (waiting,) = loop._waiting
    assert (waiting.params, waiting.budget) == (params, params.max_new_tokens)
    assert waiting.generator.initial_seed() == params.seed
    loop.close(5.0)


async def test_another_seed_of_the_evaluation_gives_other_samples(tmp_path: Path) -> None:
    seeds = []
    for overrides in (["eval.seed=1"], ["eval.seed=2"], ["eval.seed=1"]):
        config, _ = load_config(make_tiny_run(tmp_path).config, [*overrides, "eval.temperature=1.0"])
        clock = FakeClock()
        generator = FakeGenerator(clock)
        factory = RolloutFactory(config, generator, {"echo": EchoEnvironment()}, cast(Any, Tokenizer()), clock)
        manager = factory.manager("eval", factory.evaluation_sampling())
        await clock.run(manager.run_group(make_prompt(0), 1, Ticket(0, 0)))
        seeds.append(generator.requests[0].params.seed)
    assert seeds[0] == seeds[2] != seeds[1]
