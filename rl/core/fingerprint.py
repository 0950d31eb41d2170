"""The identity of what a run computes: a hash over the semantic part of its configuration.

Fields declared with `operational(...)` (paths, threads, deadlines, logging) do not take part; everything else does,
`extras` too.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from rl.core.config import ConfigModel
from rl.core.config_schema import is_operational


def semantic_fingerprint(config: ConfigModel) -> str:
    """Return the SHA-256, in hex, of the semantic values; equal for configurations that compute the same."""
    text = json.dumps(dict(_semantic_items(config, "")), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _semantic_items(section: ConfigModel | Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    fields = type(section).model_fields if isinstance(section, ConfigModel) else {}
    for name, value in dict(section).items():
        if name in fields and is_operational(fields[name]):
            continue
        if isinstance(value, ConfigModel | Mapping):
            yield from _semantic_items(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value
