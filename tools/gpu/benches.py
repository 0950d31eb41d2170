"""The kernel benchmarks at the shapes of three models, as parts that a time budget can leave out."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tools.bench import bench_linear_loss, bench_logprob, bench_pack, report
from tools.bench.policy_loss_case import policy_loss_case
from tools.bench.rounds import Case, Effort, measure
from tools.gpu.transfer import digest_case, unpack_case

ROWS = 16384
# Vocabulary and hidden size.
MODELS = {"SmolLM2-135M": (49152, 576), "Llama-3-8B": (128256, 4096), "Qwen3-8B": (151936, 4096)}
_DTYPE = "bfloat16"


@dataclass(frozen=True)
class Bench:
    """One table: its name, what builds it, and the seconds that it takes at least."""

    name: str
    build: Callable[[], Case]
    least_s: float


def all_benches(device: str) -> list[Bench]:
    """Return the tables, the most telling first: what comes late is left out first."""
    backward = [_logprob(device, model, "forward and backward") for model in MODELS]
    forward = [_logprob(device, model, "forward") for model in MODELS]
    linear = [_linear(device, model) for model in MODELS]
    tokens = _options(device, "SmolLM2-135M", tokens=2**20)
    pack = bench_pack.build_cases(_options(device, "Llama-3-8B", tensors=60, tiny=10000))
    small = [Bench("policy loss", lambda: policy_loss_case(tokens, {}), 6.0)]
    small += [Bench(f"pack, {name}", case, 4.0) for name, case in pack.items()]
    small += [Bench("unpack", lambda: unpack_case(torch.device(device)), 4.0)]
    small += [Bench("digests", lambda: digest_case(torch.device(device)), 3.0)]
    return [*backward, *linear, *small, *forward]


def _logprob(device: str, model: str, direction: str) -> Bench:
    cases = bench_logprob.build_cases(_options(device, model, has_compile=direction != "forward"))
    return Bench(f"logprob {direction}, {model}", cases[f"{_DTYPE} {direction}"], 8.0)


def _linear(device: str, model: str) -> Bench:
    """Compiling takes as long as all the rest: one of the models is enough."""
    cases = bench_linear_loss.build_cases(_options(device, model, has_compile=model == "Llama-3-8B"))
    return Bench(f"linear and loss, {model}", cases[_DTYPE], 10.0)


def _options(device: str, model: str, *, has_compile: bool = True, **sizes: int) -> argparse.Namespace:
    vocab, hidden = MODELS[model]
    words = ["--device", device, *([] if has_compile else ["--no-compile"])]
    return report.parse(None, "gpu", words, **{"rows": ROWS, "vocab": vocab, "hidden": hidden} | sizes)


def run_bench(bench: Bench, seconds: float, device: str) -> dict[str, Any]:
    """Measure one table within about so many seconds."""
    options = _options(device, "SmolLM2-135M")
    return {"bench": bench.name, **measure(bench.build(), Effort(20, seconds), options.device)}
