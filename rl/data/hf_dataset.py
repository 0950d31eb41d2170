"""Rows of a Hugging Face `datasets` folder or hub dataset; the only module that imports `datasets`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import datasets

from rl.core.errors import ConfigError, DataError
from rl.core.hub import is_hub_reachable
from rl.data.columns import Row, check_columns, row_from_columns
from rl.data.config import HfDataset


def load_hf_rows(config: HfDataset) -> Sequence[Row]:
    """Open the dataset; rows are read from its memory-mapped file when they are asked for.

    Raises:
        ConfigError: no such folder, dataset or split, no rows, missing columns, or the hub cannot be reached and the
            dataset is not in the local cache.
    """
    table = _open(config)
    if len(table) == 0:
        raise ConfigError(f"the dataset {config.path} (split {config.split}) is empty")
    check_columns(table.column_names, config.prompt_key, config.answer_key, config.path, table[0])
    return HfRows(table, config)


class HfRows(Sequence[Row]):
    """A lazy view of a `datasets.Dataset` as rows."""

    def __init__(self, table: Any, config: HfDataset) -> None:
        self._table = table
        self._config = config

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        config = self._config
        source = f"{config.path}[{position}]"
        row_id = f"{config.split}:{position}"
        try:
            columns = self._table[position]
        except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
            raise DataError(f"{source}: the row cannot be read: {error}") from error
        return row_from_columns(columns, row_id, config.prompt_key, config.answer_key, source)


def _open(config: HfDataset) -> Any:
    if Path(config.path).exists():
        return _open_folder(config)
    online = not datasets.config.HF_HUB_OFFLINE and is_hub_reachable()
    download = datasets.DownloadConfig(local_files_only=not online, max_retries=3)
    if not online:
        datasets.config.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(config.path, split=config.split, download_config=download)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        how = "" if online else " The hub could not be reached, so only the local cache was searched."
        raise ConfigError(
            f"cannot load the dataset {config.path} (split {config.split}).{how} "
            f"Give a folder written by datasets.save_to_disk, or a hub id. Cause: {error}"
        ) from error


def _open_folder(config: HfDataset) -> Any:
    try:
        opened = datasets.load_from_disk(config.path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the dataset folder {config.path}: {error}") from error
    if not isinstance(opened, datasets.DatasetDict):
        return opened
    if config.split not in opened:
        raise ConfigError(f"the dataset {config.path} has no split '{config.split}'; it has {', '.join(opened)}")
    return opened[config.split]
