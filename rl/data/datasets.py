"""Load the rows of a dataset, and check it before any model loads.

It knows no tokenizer, and imports `datasets` or `reasoning_gym` only when the configuration names such a dataset.

    rows = load_rows(JsonlDataset(kind="jsonl", path="train.jsonl"))
    rows[0].messages, rows[0].metadata["answer"]
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from rl.core.errors import ConfigError, DataError
from rl.core.imports import import_object
from rl.data.calculator_products import calculator_product_rows
from rl.data.columns import Row, check_columns, row_from_columns, shorten
from rl.data.config import (
    CalculatorProductsDataset,
    DatasetConfig,
    FewShotAdditionDataset,
    HfDataset,
    JsonlDataset,
    ReasoningGymDataset,
    SlidingPuzzleDataset,
)
from rl.data.few_shot_addition import few_shot_addition_rows
from rl.data.sliding_puzzle import sliding_puzzle_rows

_ROWS_CHECKED = 100


def load_rows(config: DatasetConfig) -> Sequence[Row]:
    """Load all rows, in file order.

    Raises:
        ConfigError: the dataset is missing, empty or lacks columns; the message shows what was found.
        DataError: a row is faulty; the message names file and line.
    """
    match config:
        case JsonlDataset():
            return _all_jsonl_rows(config)
        case HfDataset():
            return cast(Callable[[HfDataset], Sequence[Row]], import_object("rl.data.hf_dataset:load_hf_rows"))(config)
        case ReasoningGymDataset():
            return cast(
                Callable[[ReasoningGymDataset], Sequence[Row]],
                import_object("rl.data.reasoning_gym_dataset:load_reasoning_gym_rows"),
            )(config)
        case FewShotAdditionDataset():
            return few_shot_addition_rows(config.part)
        case CalculatorProductsDataset():
            return calculator_product_rows(config)
        case SlidingPuzzleDataset():
            return sliding_puzzle_rows(config)


def check_dataset(config: DatasetConfig) -> None:
    """Find out cheaply whether a dataset can be loaded; reads at most its first rows and no network.

    Raises:
        ConfigError: the file or folder is missing, empty, broken or lacks columns, or the task does not exist.
    """
    match config:
        case JsonlDataset():
            try:
                if not list(islice(_jsonl_rows(config), _ROWS_CHECKED)):
                    raise ConfigError(f"the dataset {config.path} is empty; it needs one JSON object per line")
            except DataError as error:
                raise ConfigError(str(error)) from error
        case HfDataset():
            _check_saved_dataset(config)
        case ReasoningGymDataset():
            cast(Callable[[ReasoningGymDataset], None], import_object("rl.data.reasoning_gym_dataset:check_task"))(
                config
            )
        case FewShotAdditionDataset() | CalculatorProductsDataset() | SlidingPuzzleDataset():
            pass


def known_columns(config: DatasetConfig) -> frozenset[str] | None:
    """Return the columns that the first row gives to reward functions; None where that is not known without loading.

    Raises:
        ConfigError: as in `check_dataset`, which goes before.
        DataError: the row is faulty.
    """
    if not isinstance(config, JsonlDataset):
        return None
    row = next(_jsonl_rows(config), None)
    return None if row is None else frozenset(row.metadata)


def _all_jsonl_rows(config: JsonlDataset) -> list[Row]:
    rows = list(_jsonl_rows(config))
    if not rows:
        raise ConfigError(f"the dataset {config.path} is empty; it needs one JSON object per line")
    return rows


def _jsonl_rows(config: JsonlDataset) -> Iterator[Row]:
    path = Path(config.path)
    if not path.is_file():
        raise ConfigError(f"the dataset {config.path} does not exist (looked for the file {path.absolute()})")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _jsonl_row(line, f"{config.path}:{number}", f"{path.stem}:{number}", config)


def _jsonl_row(line: bytes, source: str, row_id: str, config: JsonlDataset) -> Row:
    try:
        columns = json.loads(line)
    except ValueError as error:
        raise DataError(f"{source}: broken JSON: {error}; the line begins {line[:80]!r}") from error
    except RecursionError as error:
        raise _too_deep(source, line) from error
    if not isinstance(columns, dict):
        raise DataError(f"{source}: each line must be a JSON object, got {type(columns).__name__}: {line[:80]!r}")
    check_columns(columns, config.prompt_key, config.answer_key, source, columns)
    try:
        return row_from_columns(columns, row_id, config.prompt_key, config.answer_key, source)
    except RecursionError as error:
        raise _too_deep(source, line) from error


def _too_deep(source: str, line: bytes) -> DataError:
    return DataError(f"{source}: the JSON is nested too deeply; the line begins {line[:80]!r}")


def _check_saved_dataset(config: HfDataset) -> None:
    """Check a `save_to_disk` folder by the JSON files in it; a hub id can only be checked by loading it."""
    folder = Path(config.path)
    if not folder.exists():
        if config.path.startswith((".", "/", "~")) or config.path.count("/") > 1:
            raise ConfigError(f"the dataset folder {config.path} does not exist (looked for {folder.absolute()})")
        return
    if (folder / "dataset_dict.json").is_file():
        splits = _read_json(folder / "dataset_dict.json").get("splits", [])
        if config.split not in splits:
            raise ConfigError(
                f"the dataset {config.path} has no split '{config.split}'; it has {', '.join(splits) or 'none'}"
            )
        folder = folder / config.split
    if not (folder / "dataset_info.json").is_file():
        raise ConfigError(
            f"{folder} is not a folder written by datasets.save_to_disk (no dataset_info.json in it); "
            "for plain JSON lines use kind: jsonl"
        )
    features = _read_json(folder / "dataset_info.json").get("features") or {}
    check_columns(features, config.prompt_key, config.answer_key, str(folder), None)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: broken JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {shorten({'content': content})}")
    return content
