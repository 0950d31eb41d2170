"""PromptSource: an endless, resumable stream of tokenized prompts over the rows of a dataset.

The order of an epoch depends on (seed, epoch) alone, so the position is two integers and a restored source goes on
exactly. It does not know groups, steps or generators.

    source = PromptSource(rows, tokenizer, PromptSettings(environment="math", max_prompt_tokens=256, ...))
    prompt = source.next()
"""

import hashlib
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from rl.core.errors import ConfigError, DataError
from rl.core.types import Message, Prompt
from rl.data.columns import Row

_log = logging.getLogger(__name__)
_ROWS_IN_FINGERPRINT = 64


class PromptEncoder(Protocol):
    """The part of a PromptTokenizer that is needed here."""

    def messages(self, row_messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return the conversation that the model sees."""
        ...

    def encode(self, row_messages: Sequence[Message]) -> tuple[int, ...]:
        """Return its token ids."""
        ...


@dataclass(frozen=True)
class PromptSettings:
    """How rows become prompts.

    Attributes:
        environment: Name of the environment that scores them.
        max_prompt_tokens: Longest prompt, in tokens.
        overlong: What happens to longer ones: skipped and counted, or a ConfigError.
        shuffle: New order in every epoch.
        seed: Seed of the order.
    """

    environment: str
    max_prompt_tokens: int
    overlong: Literal["skip", "error"]
    shuffle: bool
    seed: int


@dataclass
class Skipped:
    """Rows that gave no prompt.

    Attributes:
        overlong: Prompts longer than the limit.
        faulty: Rows that cannot be read or tokenized.
    """

    overlong: int = 0
    faulty: int = 0

    def add(self, other: "Skipped") -> None:
        """Count what `other` has counted."""
        self.overlong += other.overlong
        self.faulty += other.faulty


@dataclass(frozen=True)
class HeldOut:
    """The prompts of a validation, and what was skipped on the way to them."""

    prompts: list[Prompt]
    skipped: Skipped


class PromptSource:
    """Hands out prompts for ever, epoch after epoch. A row that gives no prompt is skipped and counted.

    Attributes:
        skipped: Over-long and faulty rows so far, counted again in every epoch.
    """

    def __init__(self, rows: Sequence[Row], encoder: PromptEncoder, settings: PromptSettings) -> None:
        """Stand before the first prompt of epoch 0.

        Raises:
            ConfigError: there are no rows.
        """
        if not rows:
            raise ConfigError("the dataset has no rows")
        self._rows = rows
        self._encoder = encoder
        self._settings = settings
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)
        self.skipped = Skipped()
        self._overlong_rows: dict[str, int] = {}
        self._faults: dict[str, str] = {}

    @property
    def overlong_rows(self) -> Mapping[str, int]:
        """Ids of the rows whose prompt was too long so far, with its tokens."""
        return dict(self._overlong_rows)

    def next(self) -> Prompt:
        """Return the next prompt; a new epoch begins when the rows are exhausted.

        Raises:
            ConfigError: a prompt is too long and the policy is "error", or every prompt of an epoch is too long.
            DataError: no row of an epoch gives a prompt, and some are faulty.
        """
        skipped = Skipped()
        # The rest of this epoch and a whole new one: another order may put the only usable row last.
        for _ in range(2 * len(self._rows)):
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            index = self._order[self._position]
            self._position += 1
            prompt = self._prompt(index, skipped)
            if prompt is not None:
                self.skipped.add(skipped)
                return prompt
        raise self._no_prompt()

    def held_out(self, limit: int | None) -> HeldOut:
        """Return the first `limit` prompts in dataset order (None = all), for validation; the position does not move.

        Raises:
            ConfigError: as in `next`.
            DataError: as in `next`.
        """
        prompts: list[Prompt] = []
        skipped = Skipped()
        for index in range(len(self._rows)):
            if len(prompts) == limit:
                break
            prompt = self._prompt(index, skipped)
            if prompt is not None:
                prompts.append(prompt)
        if not prompts:
            raise self._no_prompt()
        return HeldOut(prompts, skipped)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "num_skipped": self.skipped.overlong,
            "num_faulty": self.skipped.faulty,
            "seed": self._settings.seed,
            "shuffle": self._settings.shuffle,
            "num_rows": len(self._rows),
            "first_rows": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            ConfigError: the state belongs to other rows, another seed or another order.
        """
        mine = self.state_dict()
        differing = [key for key in ("num_rows", "first_rows", "seed", "shuffle") if state[key] != mine[key]]
        if differing:
            pairs = ", ".join(f"{key}: saved {state[key]}, now {mine[key]}" for key in differing)
            raise ConfigError(f"cannot resume the data position: the dataset or its order changed ({pairs})")
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self.skipped = Skipped(int(state["num_skipped"]), int(state["num_faulty"]))
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> Sequence[int]:
        if not self._settings.shuffle:
            return range(len(self._rows))
        order = list(range(len(self._rows)))
        random.Random(f"{self._settings.seed}/{epoch}").shuffle(order)
        return order

    def _prompt(self, index: int, skipped: Skipped) -> Prompt | None:
        """Read and tokenize a row; None, counted in `skipped`, when it gives no prompt."""
        try:
            row = self._rows[index]
        except DataError as error:
            self._faulty(index, "read", error, skipped)
            return None
        try:
            token_ids = self._encoder.encode(row.messages)
            messages = self._encoder.messages(row.messages)
        except DataError as error:
            self._faulty(index, "tokenized", error, skipped)
            return None
        if len(token_ids) > self._settings.max_prompt_tokens:
            self._overlong(row.row_id, len(token_ids), skipped)
            return None
        return Prompt(
            prompt_id=row.row_id,
            messages=messages,
            environment=self._settings.environment,
            metadata=row.metadata,
            token_ids=token_ids,
        )

    def _overlong(self, row_id: str, num_tokens: int, skipped: Skipped) -> None:
        limit = f"{num_tokens} tokens, the limit is {self._settings.max_prompt_tokens}"
        if self._settings.overlong == "error":
            raise ConfigError(
                f"the prompt of row {row_id} is too long: {limit}; set data.overlong_prompts: skip to leave it out"
            )
        if not self._overlong_rows:
            _log.warning(
                "row %s is skipped, its prompt is too long: %s; further ones: run.log, num_skipped_prompts",
                row_id,
                limit,
            )
        elif row_id not in self._overlong_rows:
            _log.info("row %s is skipped, its prompt is too long: %s", row_id, limit)
        self._overlong_rows[row_id] = num_tokens
        skipped.overlong += 1

    def _faulty(self, index: int, what: str, error: DataError, skipped: Skipped) -> None:
        """Count a faulty row; the first of its kind is a warning, the others stand in the log alone."""
        level = logging.INFO if what in self._faults else logging.WARNING
        _log.log(level, "row %d of the dataset is skipped, it cannot be %s: %s", index, what, error)
        self._faults.setdefault(what, str(error))
        skipped.faulty += 1

    def _no_prompt(self) -> ConfigError | DataError:
        """Say why none of the rows gives a prompt."""
        overlong = len(self._overlong_rows)
        if self._faults:
            faults = "; ".join(f"cannot be {what}: {error}" for what, error in self._faults.items())
            counts = f"{len(self._rows) - overlong} are faulty and {overlong} too long"
            return DataError(f"none of the {len(self._rows)} rows gives a prompt, {counts}; the first {faults}")
        shortest = min(self._overlong_rows.values())
        return ConfigError(
            f"all {len(self._rows)} prompts are longer than {self._settings.max_prompt_tokens} tokens (the shortest has"
            f" {shortest}); raise data.max_input_seq_length or policy.max_total_sequence_length, or lower "
            "policy.generation.max_new_tokens"
        )

    @cached_property
    def _fingerprint(self) -> str:
        """A digest of the first row ids and prompts: enough to notice another dataset, cheap for a huge one."""
        digest = hashlib.sha256()
        for index in range(min(len(self._rows), _ROWS_IN_FINGERPRINT)):
            try:
                row = self._rows[index]
            except DataError:
                digest.update(b"faulty")  # its reason is told when its turn comes
            else:
                digest.update(repr((row.row_id, row.messages)).encode())
        return digest.hexdigest()[:16]
