"""Check who imports whom in rl/: the layers of ARCHITECTURE.md and the homes of the big foreign packages.

It reads the source and imports nothing. Bazel's visibility says the same by packages; this check also sees imports
inside functions, modules of ours that are named in strings, single modules, and what a config.py drags in.

    python3 tools/check_layers.py            # exit code 1 and one line per violation
"""

import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.python_imports import Import, Module, read_tree, resolve

LAYERS = {
    "core": 0,
    "ops": 1,
    "algorithms": 1,
    "cluster": 1,
    "weights": 1,
    "telemetry": 1,
    "data": 1,
    "trainer": 2,
    "generation": 2,
    "environments": 2,
    "rollout": 3,
    "controller": 4,
    "cli": 5,  # of the same layer as the controller, which it may import but not the other way round
}
ENTRY_POINT_LAYER = 6

SIBLINGS = {("algorithms", "ops")}

# What the rollout layer may see of the layer below it.
PROTOCOL_MODULES = {"rl.generation.generator", "rl.environments.base"}

# The only files that may import these packages. An empty list of files means: nobody.
FOREIGN_HOMES = {
    "ray": ["rl/cluster/ray.py"],
    "vllm": [
        "rl/generation/vllm/worker.py",
        "rl/generation/vllm/refit.py",
        "rl/generation/vllm/plugin.py",
        "rl/generation/vllm/extension.py",
        "rl/generation/vllm/receiver.py",
        "rl/generation/vllm/reload.py",
        "rl/generation/vllm/layer_products.py",
        "rl/generation/vllm/worker_calls.py",
    ],
    "transformers": [
        "rl/trainer/model.py",
        "rl/generation/hf.py",
        "rl/data/chat.py",
        "rl/data/pretrained.py",
        "rl/environments/reward_model.py",
    ],
}

# Our own modules that may be named in a string, for import_object or `python -m`, and by whom: what a configuration
# chooses, and what is too heavy for a command line that only reads one. Anything else is imported in plain sight.
NAMED_IN_STRINGS = {
    "rl/__main__.py": ["rl/cli/app.py"],
    "rl/cli/doctor.py": ["rl/controller/doctor.py"],
    "rl/cli/eval.py": ["rl/controller/evaluation.py"],
    "rl/cli/selftest.py": ["rl/controller/selftest.py"],
    "rl/cli/train.py": ["rl/controller/run.py"],
    "rl/cluster/host.py": ["rl/cluster/rendezvous.py"],
    "rl/cluster/local.py": ["rl/cluster/rendezvous.py"],
    "rl/cluster/virtual_cluster.py": ["rl/cluster/ray.py"],
    "rl/controller/doctor.py": ["rl/core/native.py", "rl/weights/refit_library.py"],
    "rl/controller/setup.py": ["rl/generation/vllm/http_receiver.py"],
    "rl/data/datasets.py": ["rl/data/hf_dataset.py", "rl/data/reasoning_gym_dataset.py"],
    "rl/environments/config.py": [
        "rl/environments/calculator.py",
        "rl/environments/code.py",
        "rl/environments/function.py",
        "rl/environments/math.py",
        "rl/environments/math_multi_reward.py",
        "rl/environments/python_tool.py",
        "rl/environments/reasoning_gym.py",
        "rl/environments/reward_model.py",
        "rl/environments/sliding_puzzle.py",
        "rl/environments/tools.py",
    ],
    "rl/environments/scorer_worker.py": ["rl/environments/scorer_worker.py"],
    "rl/generation/config.py": ["rl/generation/hf.py", "rl/generation/vllm/generator.py"],
    "rl/generation/vllm/worker.py": ["rl/generation/vllm/extension.py"],
    "rl/generation/vllm/plugin.py": ["rl/generation/vllm/receiver.py"],
}
TORCH_IN_CORE = {"rl/core/batch.py", "rl/core/native.py"}

# A command line that only reads and checks a configuration imports these; they stay light.
LIGHT_MODULES = ["rl/__init__.py", "rl/*/config.py", "rl/*/*/config.py"]
HEAVY_PACKAGES = {"torch", "ray", "vllm", "transformers"}


def _package(dotted: str) -> str:
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else ""


def _layer_fault(module: Module, target: str) -> str | None:
    source, wanted = _package(module.dotted), _package(target)
    if source == wanted or not wanted:
        return None
    if wanted not in LAYERS:
        return f"{target} is an entry point; nothing imports those" if source in LAYERS else None
    upper, lower = LAYERS.get(source, ENTRY_POINT_LAYER), LAYERS[wanted]
    if (source, wanted) in SIBLINGS:
        return None
    if upper <= lower:
        return f"{source} (layer {upper}) must not import {target} (layer {lower})"
    if source == "rollout" and lower == 2 and target not in PROTOCOL_MODULES:
        return f"rollout sees only {', '.join(sorted(PROTOCOL_MODULES))} of layer 2, not {target}"
    return None


def _foreign_fault(module: Module, imported: Import) -> str | None:
    package = imported.module.split(".")[0]
    homes = FOREIGN_HOMES.get(package)
    if homes is not None and not imported.for_types_only and module.path not in homes:
        return f"only {', '.join(homes)} may import {package}"
    if package == "torch" and module.path.startswith("rl/core/") and module.path not in TORCH_IN_CORE:
        return f"in rl/core only {', '.join(sorted(TORCH_IN_CORE))} may import torch"
    return None


def _faults_of_strings(module: Module, modules: dict[str, Module]) -> Iterator[str]:
    allowed = NAMED_IN_STRINGS.get(module.path, [])
    named = {modules[dotted].path: dotted for dotted in module.import_paths if dotted in modules}
    for path, dotted in named.items():
        if path not in allowed:
            yield f"{dotted} is named in a string; import it, or add it to NAMED_IN_STRINGS in tools/check_layers.py"
        if fault := _layer_fault(module, dotted):
            yield f"in a string: {fault}"
    for path in set(allowed) - set(named):
        yield f"{path} is no longer named here; take it out of NAMED_IN_STRINGS in tools/check_layers.py"


def _heavy_path(start: str, modules: dict[str, Module]) -> list[str] | None:
    """Return a chain of imports from `start` to a heavy package, if there is one."""
    queue, seen = [[start]], {start}
    while queue:
        chain = queue.pop(0)
        for imported in modules[chain[-1]].imports:
            if imported.in_function or imported.for_types_only:
                continue
            if imported.module.split(".")[0] in HEAVY_PACKAGES:
                return [*chain, imported.module]
            target = resolve(imported, modules)
            if target and target not in seen:
                seen.add(target)
                queue.append([*chain, target])
    return None


def find_violations(root: Path) -> Iterator[str]:
    """Yield one line per violation: `file:line: what is wrong`."""
    modules = read_tree(root, "rl")
    for module in modules.values():
        package = _package(module.dotted)
        if package and "/" in module.path.removeprefix("rl/") and package not in LAYERS:
            yield f"{module.path}:1: package {package} has no layer; add it to LAYERS in tools/check_layers.py"
            continue
        for imported in module.imports:
            target = resolve(imported, modules)
            where = f"{module.path}:{imported.line}"
            if target is None and (fault := _foreign_fault(module, imported)):
                yield f"{where}: {fault}"
            if target and imported.in_function:
                yield f"{where}: import of {target} inside a function; imports of our own code stand at the top"
            if target and module.path.endswith("/__init__.py"):
                yield f"{where}: a package's __init__.py imports nothing of ours, so that importing a part stays cheap"
            if target and (fault := _layer_fault(module, target)):
                yield f"{where}: {fault}"
        yield from (f"{module.path}:1: {fault}" for fault in _faults_of_strings(module, modules))
        if any(fnmatch(module.path, pattern) for pattern in LIGHT_MODULES):
            chain = _heavy_path(module.dotted, modules)
            if chain:
                yield f"{module.path}:1: must stay free of {chain[-1]}; imported through {' -> '.join(chain)}"


def main() -> int:
    """Print the violations of the tree that this file stands in."""
    violations = sorted(set(find_violations(Path(__file__).resolve().parent.parent)))
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
