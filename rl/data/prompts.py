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
from typing import Any, Literal, Protocol

from rl.core.errors import ConfigError
from rl.core.types import Message, Prompt
from rl.data.columns import Row

_log = logging.getLogger(__name__)


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


class PromptSource:
    """Hands out prompts for ever, epoch after epoch."""

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
        self._num_skipped = 0
        self._overlong_rows: dict[str, int] = {}

    @property
    def epoch(self) -> int:
        """Epochs begun before the current one."""
        return self._epoch

    @property
    def num_skipped(self) -> int:
        """Over-long prompts skipped so far, counted again in every epoch."""
        return self._num_skipped

    def next(self) -> Prompt:
        """Return the next prompt; a new epoch begins when the rows are exhausted.

        Raises:
            ConfigError: a prompt is too long and the policy is "error", or every prompt of an epoch is too long.
            DataError: a row cannot be tokenized.
        """
        for _ in range(len(self._rows) + 1):
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            row = self._rows[self._order[self._position]]
            self._position += 1
            prompt = self._prompt(row)
            if prompt is not None:
                return prompt
            self._num_skipped += 1
        raise self._all_too_long()

    def all_prompts(self) -> list[Prompt]:
        """Return every prompt exactly once in dataset order, for validation; the position does not move.

        Raises:
            ConfigError: as in `next`.
            DataError: a row cannot be tokenized.
        """
        prompts = [prompt for row in self._rows if (prompt := self._prompt(row)) is not None]
        if not prompts:
            raise self._all_too_long()
        if len(prompts) < len(self._rows):
            _log.warning("%d of %d prompts are too long and left out", len(self._rows) - len(prompts), len(self._rows))
        return prompts

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "num_skipped": self._num_skipped,
            "seed": self._settings.seed,
            "shuffle": self._settings.shuffle,
            "num_rows": len(self._rows),
            "first_rows": self._fingerprint(),
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
        self._num_skipped = int(state["num_skipped"])
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> Sequence[int]:
        if not self._settings.shuffle:
            return range(len(self._rows))
        order = list(range(len(self._rows)))
        random.Random(f"{self._settings.seed}/{epoch}").shuffle(order)
        return order

    def _prompt(self, row: Row) -> Prompt | None:
        """Tokenize a row; None when it is too long and the policy is to skip."""
        token_ids = self._encoder.encode(row.messages)
        if len(token_ids) <= self._settings.max_prompt_tokens:
            return Prompt(
                prompt_id=row.row_id,
                messages=self._encoder.messages(row.messages),
                environment=self._settings.environment,
                metadata=row.metadata,
                token_ids=token_ids,
            )
        limit = f"{len(token_ids)} tokens, the limit is {self._settings.max_prompt_tokens}"
        if self._settings.overlong == "error":
            raise ConfigError(
                f"the prompt of row {row.row_id} is too long: {limit}; set data.overlong_prompts: skip to leave it out"
            )
        if row.row_id not in self._overlong_rows:
            _log.info("row %s is skipped, its prompt is too long: %s", row.row_id, limit)
        self._overlong_rows[row.row_id] = len(token_ids)
        return None

    def _all_too_long(self) -> ConfigError:
        shortest = min(self._overlong_rows.values())
        return ConfigError(
            f"all {len(self._rows)} prompts are longer than {self._settings.max_prompt_tokens} tokens (the shortest has"
            f" {shortest}); raise data.max_input_seq_length or policy.max_total_sequence_length, or lower "
            "policy.generation.max_new_tokens"
        )

    def _fingerprint(self) -> str:
        """A digest of the first row ids and prompts: enough to notice another dataset, cheap for a huge one."""
        digest = hashlib.sha256()
        for row in self._rows[:64]:
            digest.update(repr((row.row_id, row.messages)).encode())
        return digest.hexdigest()[:16]
