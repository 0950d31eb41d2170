import json
import logging
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.core.errors import ConfigError, DataError
from rl.core.types import Message
from rl.data.columns import Row
from rl.data.prompts import PromptSettings, PromptSource, Skipped


@dataclass(frozen=True)
class Bytes:
    """One token per byte."""

    def messages(self, row_messages):
        return tuple(row_messages)

    def encode(self, row_messages):
        text = "".join(message.content for message in row_messages)
        if "refused" in text:
            raise DataError(f"the chat template refuses {text}")
        return tuple(text.encode())


def rows(count, length=3):
    return [Row(f"r{i}", (Message("text", f"{i:0{length}}"),), {"answer": str(i)}) for i in range(count)]


def source(count_or_rows=7, shuffle=True, seed=1, max_prompt_tokens=10, overlong="skip"):
    own = rows(count_or_rows) if isinstance(count_or_rows, int) else count_or_rows
    return PromptSource(own, Bytes(), PromptSettings("math", max_prompt_tokens, overlong, shuffle, seed))


def take(prompts, count):
    return [prompts.next().prompt_id for _ in range(count)]


def test_a_prompt_carries_everything_of_its_row():
    prompt = source(1).next()
    assert prompt.prompt_id == "r0" and prompt.environment == "math"
    assert prompt.token_ids == tuple(b"000") and prompt.metadata == {"answer": "0"}


def test_every_epoch_holds_every_row_once_in_a_new_order():
    prompts = source(20)
    epochs = [take(prompts, 20) for _ in range(3)]
    assert all(sorted(epoch) == sorted(row.row_id for row in rows(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_depends_on_the_seed_alone():
    assert take(source(20), 50) == take(source(20), 50)
    assert take(source(20), 20) != take(source(20, seed=2), 20)
    assert take(source(4, shuffle=False), 6) == ["r0", "r1", "r2", "r3", "r0", "r1"]


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 9), before=st.integers(0, 30), after=st.integers(1, 30), shuffle=st.booleans())
def test_a_restored_source_goes_on_exactly(count, before, after, shuffle):
    straight = source(count, shuffle)
    take(straight, before)
    state = json.loads(json.dumps(straight.state_dict()))
    restored = source(count, shuffle)
    restored.load_state_dict(state)
    assert take(restored, after) == take(straight, after)
    assert restored.state_dict() == straight.state_dict()


def test_a_state_of_other_data_is_refused():
    state = source(7).state_dict()
    for other in (source(8), source(7, seed=2), source(7, shuffle=False), source(rows(7, length=4))):
        with pytest.raises(ConfigError, match="dataset or its order changed"):
            other.load_state_dict(state)


def test_overlong_prompts_are_skipped_and_counted():
    mixed = [*rows(3), Row("long", (Message("text", "x" * 20),), {})]
    prompts = source(mixed, max_prompt_tokens=16)
    assert sorted(take(prompts, 6)) == ["r0", "r0", "r1", "r1", "r2", "r2"]
    prompts.next()
    assert prompts.skipped.overlong in (2, 3)
    held_out = prompts.held_out(None)
    assert [prompt.prompt_id for prompt in held_out.prompts] == ["r0", "r1", "r2"]
    assert held_out.skipped == Skipped(overlong=1)
    assert list(prompts.overlong_rows.values()) == [20]


def test_a_prompt_of_exactly_the_limit_fits():
    assert source([Row("r", (Message("text", "x" * 16),), {})], max_prompt_tokens=16).next().prompt_id == "r"


def test_an_overlong_prompt_can_be_an_error():
    prompts = source([Row("long", (Message("text", "x" * 20),), {})], overlong="error")
    with pytest.raises(ConfigError, match="row long is too long: 20 tokens, the limit is 10"):
        prompts.next()


def test_a_dataset_of_only_overlong_prompts_ends_in_an_error_and_not_in_a_loop():
    prompts = source(rows(5, length=12))
    for find in (prompts.next, lambda: prompts.held_out(None)):
        with pytest.raises(ConfigError, match="all 5 prompts are longer than 10 tokens .the shortest has 12"):
            find()


def test_validation_sees_each_prompt_once_and_moves_nothing():
    prompts = source(5)
    first = take(source(5), 1)
    assert [prompt.prompt_id for prompt in prompts.held_out(None).prompts] == ["r0", "r1", "r2", "r3", "r4"]
    assert take(prompts, 1) == first


def test_no_rows_is_an_error():
    with pytest.raises(ConfigError, match="no rows"):
        source([])


class Lazy(list):
    """Rows of which one cannot be read."""

    def __getitem__(self, index):
        if index == 1:
            raise DataError("file[1]: the row cannot be read")
        return super().__getitem__(index)


def test_faulty_rows_are_skipped_counted_and_told_once_per_kind(caplog):
    refused = [Row(f"bad{i}", (Message("text", f"refused {i}"),), {}) for i in range(3)]
    prompts = source(Lazy([*rows(2), *refused, *rows(2, length=4)]), max_prompt_tokens=16, shuffle=False)
    with caplog.at_level(logging.INFO):
        assert take(prompts, 6) == ["r0", "r0", "r1", "r0", "r0", "r1"]
    assert prompts.skipped == Skipped(faulty=8)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        "row 1 of the dataset is skipped, it cannot be read: file[1]: the row cannot be read",
        "row 2 of the dataset is skipped, it cannot be tokenized: the chat template refuses refused 0",
    ]
    assert len(caplog.records) == 8
    restored = source(Lazy([*rows(2), *refused, *rows(2, length=4)]), max_prompt_tokens=16, shuffle=False)
    restored.load_state_dict(prompts.state_dict())
    assert restored.skipped == prompts.skipped


def test_a_dataset_of_only_faulty_rows_is_a_data_error_and_not_a_loop():
    refused = [Row(f"bad{i}", (Message("text", f"refused {i}"),), {}) for i in range(2)]
    prompts = source([*refused, Row("long", (Message("text", "x" * 20),), {})], shuffle=False)
    for find in (prompts.next, lambda: prompts.held_out(None)):
        with pytest.raises(DataError, match="none of the 3 rows .* 2 are faulty and 1 too long; .*refuses refused"):
            find()


def test_no_more_is_tokenized_than_the_validation_asks_for():
    prompts = source([*rows(3), Row("bad", (Message("text", "refused"),), {})], shuffle=False)
    held_out = prompts.held_out(2)
    assert [prompt.prompt_id for prompt in held_out.prompts] == ["r0", "r1"]
    assert held_out.skipped == Skipped()


def test_the_only_usable_row_is_found_wherever_the_order_puts_it():
    prompts = source([*rows(1), *[Row(f"long{i}", (Message("text", "x" * 20),), {}) for i in range(6)]])
    assert take(prompts, 40) == ["r0"] * 40
