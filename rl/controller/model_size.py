"""Estimate from the files of a model, without reading its weights, how large a checkpoint of it will be."""

from math import prod
from pathlib import Path

from rl.data.model_files import safetensors_header

# Bits per weight of GGUF files, by the name of their quantization.
_GGUF_BITS = {"Q2": 2.6, "Q3": 3.4, "Q4_0": 4.5, "Q4": 5.0, "Q5": 6.0, "Q6": 6.6, "Q8": 8.5, "F16": 16.0, "F32": 32.0}
_DEFAULT_GGUF_BITS = 5.0
_BYTES_PER_FLOAT = 4
_ADAM_MOMENTS = 2


def parameter_count(path: Path) -> int | None:
    """Return the parameters of a model folder or (about) of a GGUF file; None when there is nothing to go by."""
    if path.is_file() and path.suffix == ".gguf":
        names = [name for name in _GGUF_BITS if name in path.name.upper()]
        bits = _GGUF_BITS[max(names, key=len)] if names else _DEFAULT_GGUF_BITS
        return int(path.stat().st_size * 8 / bits)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    headers = [safetensors_header(file) for file in files]
    if any(header is None for header in headers):
        return None  # a damaged file, which is reported by the check of the model
    return sum(prod(entry["shape"]) for header in headers if header is not None for entry in header.values()) or None


def checkpoint_bytes(parameters: int, save_optimizer: bool) -> int:
    """Return the size of one checkpoint: the weights and the two moments of Adam, all float32 in any precision."""
    moments = _ADAM_MOMENTS * _BYTES_PER_FLOAT if save_optimizer else 0
    return parameters * (_BYTES_PER_FLOAT + moments)
