"""Whether the disk has room for the checkpoints and the export of a run: one rule for the dry run and for the start."""

from pathlib import Path

from rl.controller.checkpoint import check_free_space
from rl.controller.config import MasterConfig
from rl.controller.model_size import checkpoint_bytes, parameter_count

_CHECKPOINTS_AT_ONCE = 2  # a new one is written beside the old one


def needed_bytes(config: MasterConfig, model_path: Path) -> int | None:
    """Return what a run of this model may write at once; None when the files do not tell how large the model is."""
    parameters = parameter_count(model_path)
    if parameters is None:
        return None
    saving = config.checkpointing
    checkpoints = _CHECKPOINTS_AT_ONCE * checkpoint_bytes(parameters, saving.save_optimizer) if saving.enabled else 0
    bytes_per_weight = 4 if config.policy.precision == "float32" else 2
    return checkpoints + (parameters * bytes_per_weight if saving.export_hf else 0)


def check_disk(config: MasterConfig, model_path: Path, folder: Path) -> None:
    """Refuse a run whose checkpoints and export do not fit on the disk of `folder`.

    Raises:
        FatalError: names what is needed and what is free.
    """
    check_free_space(folder, needed_bytes(config, model_path) or 0)
