"""Look at the files of a local Hugging Face folder without loading them: are they whole, and how long is the context?

It imports nothing heavy. Whether an architecture is known is the model loader's business.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.core.errors import ConfigError

_CONFIG = "config.json"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own bound


def check_model_files(folder: Path) -> None:
    """Refuse a folder whose configuration or weight files are damaged, as after a download that broke off.

    Raises:
        ConfigError: names the file.
    """
    read_model_config(folder)
    for file in sorted(folder.glob("*.safetensors")):
        expected = _expected_bytes(file)
        size = file.stat().st_size
        if expected is None:
            raise ConfigError(f"{file} is damaged: it has no readable safetensors header; fetch the model again")
        if size != expected:
            raise ConfigError(
                f"{file} is damaged: it has {size} bytes and its header names {expected}; fetch the model again"
            )


def weights_digest(folder: Path) -> str:
    """Return the SHA-256, in hex, of the model's configuration and of all its weight files, by name and content."""
    digest = hashlib.sha256()
    for file in sorted({folder / _CONFIG, *folder.glob("*.safetensors"), *folder.glob("*.bin")}):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def context_length(folder: Path) -> int | None:
    """Return the longest sequence that the model was made for; None when its configuration does not say plainly."""
    values = read_model_config(folder)
    text = values.get("text_config")
    if isinstance(text, Mapping):
        values = text
    scaling = values.get("rope_scaling") or values.get("rope_parameters")
    if isinstance(scaling, Mapping) and "factor" in scaling:
        return None  # which length such a factor gives depends on the architecture
    length = values.get("max_position_embeddings")
    return length if isinstance(length, int) else None


def read_model_config(folder: Path) -> Mapping[str, Any]:
    """Return the content of config.json.

    Raises:
        ConfigError: it cannot be read, or is no JSON object.
    """
    file = folder / _CONFIG
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the model's {file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"the model's {file} must hold a JSON object, not {type(values).__name__}")
    return values


def safetensors_header(file: Path) -> Mapping[str, Any] | None:
    """Return the tensors that a safetensors file names, by name; None when it has no readable header.

    Each has its "shape" and its "data_offsets".
    """
    content = _read_header(file)
    return None if content is None else content[0]


def _read_header(file: Path) -> tuple[Mapping[str, Any], int] | None:
    """Return the tensors and where their data begins."""
    with file.open("rb") as stream:
        start = stream.read(_LENGTH_BYTES)
        if len(start) < _LENGTH_BYTES:
            return None
        (length,) = struct.unpack("<Q", start)
        if length > _MAX_HEADER_BYTES:
            return None
        try:
            values = json.loads(stream.read(length))
        except (ValueError, RecursionError):
            return None
    if not isinstance(values, dict):
        return None
    tensors = {name: entry for name, entry in values.items() if name != "__metadata__"}
    is_whole = all(isinstance(entry, dict) and {"shape", "data_offsets"} <= set(entry) for entry in tensors.values())
    return (tensors, _LENGTH_BYTES + int(length)) if is_whole else None


def _expected_bytes(file: Path) -> int | None:
    """Return the size that the header of a safetensors file names, or None when there is no readable header."""
    content = _read_header(file)
    if content is None:
        return None
    tensors, begin = content
    try:
        return begin + max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except (ValueError, TypeError, IndexError):
        return None
