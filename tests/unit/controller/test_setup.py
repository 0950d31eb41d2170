"""Tests of rl.controller.setup and rl.controller.rollout_factory: what is derived from the configuration."""

import asyncio
import socket
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from rl.controller.config import MasterConfig
from rl.controller.engine_setup import LoadedModel
from rl.controller.load import load_config
from rl.controller.rollout_factory import RolloutFactory
from rl.controller.setup import (
    build_algorithm,
    build_buffer,
    build_prompts,
    build_rows,
    check_kernels,
    connect_servers,
    prompt_settings,
)
from rl.core.errors import ConfigError, InfraError
from rl.core.types import Message
from rl.data.chat import PromptTokenizer
from rl.data.columns import Row
from rl.rollout.buffer import GroupState
from tests.support.rollouts import make_completion, make_group, make_rollout
from tests.support.tiny_run import make_tiny_run


class Tokenizer:
    """Stop tokens and nothing else."""

    stop_token_ids = (256, 257)


def load(folder: Path, *overrides: str) -> MasterConfig:
    return load_config(make_tiny_run(folder).config, list(overrides))[0]


def factory(config: MasterConfig) -> RolloutFactory:
    return RolloutFactory(config, cast(Any, None), {}, cast(Any, Tokenizer()), cast(Any, None))


def test_a_prompt_may_take_what_the_completion_leaves_or_the_explicit_limit(tmp_path: Path) -> None:
    assert prompt_settings(load(tmp_path), shuffle=True).max_prompt_tokens == 26
    assert prompt_settings(load(tmp_path, "data.max_input_seq_length=9"), shuffle=True).max_prompt_tokens == 9


def test_the_models_own_stop_tokens_are_used_unless_others_are_given(tmp_path: Path) -> None:
    assert factory(load(tmp_path)).training_sampling().stop_token_ids == (256, 257)
    own = load(tmp_path, "policy.generation.stop_token_ids=[10]")
    assert factory(own).training_sampling().stop_token_ids == (10,)
    assert factory(own).validation_sampling().stop_token_ids == (10,)


def test_validation_has_its_own_sampling(tmp_path: Path) -> None:
    config = load(tmp_path, "grpo.val_temperature=0.5", "grpo.val_top_p=0.9", "grpo.val_max_new_tokens=3")
    sampling = factory(config).validation_sampling()
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.5, 0.9, 3)
    assert factory(load(tmp_path)).validation_sampling().max_new_tokens == 6


def test_several_optimizer_steps_need_the_logprobs_at_the_start_of_the_step(tmp_path: Path) -> None:
    assert load(tmp_path).sequences_per_step == 8
    assert build_algorithm(load(tmp_path)).needs == frozenset()
    several = build_algorithm(load(tmp_path, "policy.train_global_batch_size=4"))
    assert {need.value for need in several.needs} == {"prev_logprobs"}


async def test_the_buffer_follows_the_sampler(tmp_path: Path) -> None:
    buffer = build_buffer(load(tmp_path))
    assert (await buffer.reserve()).seq == 0
    assert (await buffer.reserve()).seq == 1
    waiting = asyncio.ensure_future(buffer.reserve())
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


async def test_dynamic_sampling_starts_the_surplus_and_lets_equal_rewards_go(tmp_path: Path) -> None:
    surplus = ("grpo.batch_multiplier=2", "loss_fn.use_importance_sampling_correction=true")
    buffer = build_buffer(load(tmp_path, "grpo.use_dynamic_sampling=true", *surplus))
    tickets = [await buffer.reserve() for _ in range(4)]
    turns = [((1, 2), make_completion([5]))]
    for ticket in tickets[:2]:
        rewards = (0.0, float(ticket.seq))
        await buffer.put(ticket, make_group(ticket.seq, [make_rollout(turns, reward) for reward in rewards]))
    assert (buffer.count(GroupState.FILTERED), buffer.count(GroupState.READY)) == (1, 1)


async def test_dynamic_sampling_looks_at_components_where_the_estimator_does(tmp_path: Path) -> None:
    targets = "{a: tests.support.tiny_rewards:share_of_letters, b: tests.support.tiny_rewards:returns_none}"
    gdpo = ("grpo.adv_estimator={name: gdpo}", f"env.reward={{_override_: true, kind: function, targets: {targets}}}")
    turns = [((1, 2), make_completion([5]))]
    unlike = [replace(make_rollout(turns, 1.0), reward_components=parts) for parts in ({"a": 1.0}, {"a": 0.0})]
    for overrides, state in ((gdpo, GroupState.READY), ((), GroupState.FILTERED)):
        buffer = build_buffer(load(tmp_path, "grpo.use_dynamic_sampling=true", *overrides))
        ticket = await buffer.reserve()
        await buffer.put(ticket, make_group(ticket.seq, unlike))
        assert buffer.count(state) == 1


async def test_servers_that_others_started_are_asked_before_the_first_refit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, float, bool]] = []

    async def connect(url: str, call_timeout_s: float, keeps_caches: bool) -> str:
        asked.append((url, call_timeout_s, keeps_caches))
        return url

    monkeypatch.setattr("rl.generation.vllm.http_receiver.HttpReceiver.connect", connect)
    assert await connect_servers(load(tmp_path)) == []
    section = "policy.generation.refit_cfg"
    config = load(tmp_path, f"{section}.servers=['http://localhost:1', 'http://localhost:2']")
    assert await connect_servers(config) == ["http://localhost:1", "http://localhost:2"]
    timeout_s = config.policy.generation.refit_cfg.timeout_s
    assert timeout_s < config.cluster.call_timeout_s
    assert asked == [("http://localhost:1", timeout_s, False), ("http://localhost:2", timeout_s, False)]


async def test_a_server_that_is_not_there_is_named_with_its_key(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"  # bound, so that nobody else listens there
        config = load(tmp_path, f"policy.generation.refit_cfg.servers=['{url}']")
        with pytest.raises(InfraError, match=f"^policy.generation.refit_cfg.servers: server {url} .*cannot be reached"):
            await connect_servers(config)


async def test_a_server_that_never_answers_has_the_deadline_of_a_refit(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        section = "policy.generation.refit_cfg"
        config = load(tmp_path, f"{section}.servers=['{url}']", f"{section}.timeout_s=0.5")
        async with asyncio.timeout(20):
            with pytest.raises(InfraError, match=f"server {url} failed at the first call: no answer in time"):
                await connect_servers(config)


@pytest.mark.parametrize(("gpus", "impl", "refused"), [(0, "native", False), (2, "native", True), (2, "torch", False)])
def test_on_gpus_missing_cuda_kernels_are_seen_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, impl: str, refused: bool
) -> None:
    monkeypatch.setattr("rl.trainer.kernels.cuda_library_failure", lambda: "libtandem_cuda.so is nowhere")
    config = load(tmp_path, f"policy.logprob_impl={impl}")
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"gpus_per_node": gpus})})
    with pytest.raises(ConfigError, match="is nowhere; set policy.logprob_impl=torch") if refused else nullcontext():
        check_kernels(config)


def test_faulty_data_is_seen_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        build_rows(load(tmp_path, "data.train.path=nowhere.jsonl"))


def test_a_faulty_row_found_before_the_run_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    config = load(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "", "answer": "x"}\n')
    with pytest.raises(ConfigError, match=r"train\.jsonl:1: the prompt is empty"):
        build_rows(config)


def test_no_usable_prompt_is_an_error_of_the_configuration_before_the_run(tmp_path: Path) -> None:
    config = load(tmp_path)
    rows = [Row("broken", (Message("text", "half \ud83d"),), {})]
    tokenizer = PromptTokenizer(tmp_path / "model", config.policy.tokenizer, config.data, trust_remote_code=False)
    good = [Row("good", (Message("text", "a"),), {})]
    for train, held_out in ((rows, good), (good, rows)):
        with pytest.raises(ConfigError, match="none of the 1 rows gives a prompt"):
            build_prompts(config, LoadedModel(tmp_path / "model", tokenizer), train, held_out)
