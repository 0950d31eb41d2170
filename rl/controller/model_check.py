"""Whether the files of a model are whole and suit the configuration; one rule for the dry run and for the start."""

from pathlib import Path

from rl.controller.config import MasterConfig
from rl.core.errors import ConfigError
from rl.data.model_files import check_model_files, context_length


def check_model_folder(config: MasterConfig, folder: Path) -> None:
    """Refuse a local Hugging Face folder with which this run cannot work. It loads nothing.

    Raises:
        ConfigError: a file is damaged, or the sequences are longer than the model's context.
    """
    check_model_files(folder)
    longest, asked = context_length(folder), config.policy.max_total_sequence_length
    if longest is not None and asked > longest:
        raise ConfigError(
            f"policy.max_total_sequence_length={asked} exceeds the model's context of {longest} tokens "
            f"({folder / 'config.json'}); lower it to {longest}"
        )
