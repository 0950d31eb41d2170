"""What the vLLM worker tells the engine and how it reads its answers; no engine runs here (see tests/engine)."""

import dataclasses
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rl.cluster.worker_group import WorkerContext
from rl.core.errors import InfraError, WeightSyncError
from rl.core.types import FinishReason, VersionSpan
from rl.generation.generator import GeneratorRequest, SamplingParams
from rl.generation.vllm.config import VllmEngineConfig
from rl.generation.vllm.worker import (
    completion_of,
    engine_arguments,
    engine_environment,
    engine_output,
    engine_words,
    sampling_arguments,
)

CONTEXT = WorkerContext("generation", 1, 2, 1, "", "cpu", 2, "tdm-test")
REQUEST = GeneratorRequest("/models/x", "/models/words", "float32", 128, 5, 2, 0, True, 60.0)


def test_every_sampling_field_reaches_the_engine() -> None:
    params = SamplingParams(
        temperature=0.7, top_p=0.9, top_k=40, max_new_tokens=17, stop_token_ids=(3, 4), stop_strings=("\n",), seed=99
    )
    values = sampling_arguments(params, 11)
    seen = {
        "temperature": values["temperature"],
        "top_p": values["top_p"],
        "top_k": values["top_k"],
        "max_new_tokens": 17 if values["max_tokens"] == 11 else None,
        "stop_token_ids": tuple(values["stop_token_ids"]),
        "stop_strings": tuple(values["stop"]),
        "seed": values["seed"],
    }
    assert seen == dataclasses.asdict(params)
    assert values["logprobs"] == 0
    assert values["ignore_eos"] is True


def test_top_k_off_is_the_engines_zero() -> None:
    assert sampling_arguments(SamplingParams(0.0, 1.0, None, 1, (), (), 0), 1)["top_k"] == 0


@dataclass
class Entry:
    logprob: float


@dataclass
class Span:
    version: str
    start: int
    end: int


@dataclass
class Output:
    token_ids: list[int] = field(default_factory=lambda: [7, 8])
    logprobs: list[dict[int, Entry]] | None = None
    finish_reason: str | None = "stop"
    text: str = "x"
    weight_versions: list[Span] | None = field(default_factory=lambda: [Span("3", 0, 1), Span("4", 1, 2)])


@pytest.mark.parametrize("order", [(5, 7), (7, 5)])
def test_the_logprob_is_looked_up_by_the_sampled_token_in_any_order(order: tuple[int, int]) -> None:
    values = {5: Entry(-0.1), 7: Entry(-3.0)}
    output = Output(logprobs=[{token: values[token] for token in order}, {8: Entry(-0.2)}])
    completion = completion_of("r", output)
    assert completion.logprobs == (-3.0, -0.2)
    assert completion.version_spans == (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))
    assert completion.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    "tables",
    [None, [{7: Entry(-1.0)}], [{5: Entry(-1.0)}, {8: Entry(-1.0)}], [{7: Entry(math.nan)}, {8: Entry(-1.0)}]],
)
def test_missing_or_spoiled_logprobs_are_an_engine_fault(tables: Any) -> None:
    with pytest.raises(InfraError, match="request r"):
        completion_of("r", Output(logprobs=tables))


def test_tokens_without_a_version_are_refused() -> None:
    tables = [{7: Entry(-1.0)}, {8: Entry(-1.0)}]
    with pytest.raises(WeightSyncError, match="version 'default': publish"):
        completion_of("r", Output(logprobs=tables, weight_versions=[Span("default", 0, 2)]))
    with pytest.raises(InfraError, match="do not tile"):
        completion_of("r", Output(logprobs=tables, weight_versions=None))


def test_every_setting_of_the_section_reaches_the_engine() -> None:
    config = VllmEngineConfig(
        tensor_parallel_size=2, kv_cache_gib=0.5, block_size=32, enable_prefix_caching=False, enforce_eager=False,
        max_num_seqs=9, vllm_kwargs={"max_num_batched_tokens": 77, "seed": 1},
    )  # fmt: skip
    values = engine_arguments(CONTEXT, config, REQUEST)
    expected = {
        "model": "/models/x", "tokenizer": "/models/words", "dtype": "float32", "max_model_len": 128,
        "trust_remote_code": True, "tensor_parallel_size": 2, "kv_cache_memory_bytes": 1 << 29, "block_size": 32,
        "enable_prefix_caching": False, "enforce_eager": False,
        "max_num_seqs": 9, "max_num_batched_tokens": 77, "logprobs_mode": "processed_logprobs", "seed": 1,
    }  # fmt: skip
    assert values.items() >= expected.items()
    assert "distributed_executor_backend" not in values
    assert engine_arguments(CONTEXT, VllmEngineConfig(), REQUEST)["seed"] == 6
    gpu = engine_arguments(dataclasses.replace(CONTEXT, device="cuda:0"), VllmEngineConfig(), REQUEST)
    assert gpu["gpu_memory_utilization"] == 0.6
    assert "kv_cache_memory_bytes" not in gpu


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("can_sleep", [False, True])
def test_an_engine_is_built_to_sleep_only_where_it_must_and_can(device: str, can_sleep: bool) -> None:
    request = dataclasses.replace(REQUEST, can_sleep=can_sleep)
    values = engine_arguments(dataclasses.replace(CONTEXT, device=device), VllmEngineConfig(), request)
    assert values.get("enable_sleep_mode", False) is (can_sleep and device == "cuda:0")


def test_threads_are_explicit_and_usage_statistics_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    values = engine_environment(CONTEXT, VllmEngineConfig(start_timeout_s=90), Path("/run"))
    assert values["OMP_NUM_THREADS"] == "2"
    assert values["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert values["OMP_WAIT_POLICY"] == "PASSIVE"
    assert values["VLLM_ENGINE_READY_TIMEOUT_S"] == "90"
    assert (values["VLLM_NO_USAGE_STATS"], values["DO_NOT_TRACK"]) == ("1", "1")
    config = VllmEngineConfig(collect_usage_stats=True, tensor_parallel_size=2)
    asked = engine_environment(CONTEXT, config, Path("/run"))
    assert "VLLM_NO_USAGE_STATS" not in asked
    assert asked["OMP_NUM_THREADS"] == "1"


def test_an_eager_engine_on_the_cpu_compiles_nothing() -> None:
    eager = engine_environment(CONTEXT, VllmEngineConfig(), Path("/run"))
    assert eager["TORCH_COMPILE_DISABLE"] == "1"
    compiled = engine_environment(CONTEXT, VllmEngineConfig(enforce_eager=False), Path("/run"))
    assert "TORCH_COMPILE_DISABLE" not in compiled


def test_an_engines_first_error_comes_before_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    lines = ["(W) ERROR [x.py:1] ImportError: no module", "more", "(Core) ERROR [y.py:2] RuntimeError: see above"]
    log.write_text("\n".join(lines))
    words = engine_words(log, ValueError("hidden"))
    assert words.startswith("ImportError: no module\nlast lines of")
    assert words.endswith("RuntimeError: see above")
    assert engine_words(tmp_path / "none.log", ValueError("alone")).startswith("alone")


def test_what_starts_within_the_block_writes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    with engine_output(log):
        os.system("echo out; echo err >&2")
    assert sorted(log.read_text().split()) == ["err", "out"]
