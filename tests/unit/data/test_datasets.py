import datetime
import json
import os
import subprocess
import sys

import datasets
import pytest

from rl.core.errors import ConfigError, DataError
from rl.core.types import Message
from rl.data.config import FewShotAdditionDataset, HfDataset, JsonlDataset, ReasoningGymDataset
from rl.data.datasets import check_dataset, load_rows


def jsonl(tmp_path, *lines, **keys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return JsonlDataset(kind="jsonl", path=str(path), **keys)


def saved(tmp_path, columns, **keys):
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder))
    return HfDataset(kind="hf", path=str(folder), **keys)


def test_jsonl_rows_keep_prompt_answer_and_other_columns(tmp_path):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    config = jsonl(
        tmp_path, {"prompt": "1+1=", "answer": 2, "level": 3}, "", {"prompt": chat, "answer": "x", "tags": ["a"]}
    )
    check_dataset(config)
    first, second = load_rows(config)
    assert first.messages == (Message("text", "1+1="),) and first.metadata == {"answer": 2, "level": 3}
    assert second.messages == (Message("system", "s"), Message("user", "u"))
    assert [first.row_id, second.row_id] == ["rows:1", "rows:3"]


def test_own_column_names_and_no_answer(tmp_path):
    (row,) = load_rows(jsonl(tmp_path, {"question": "why"}, prompt_key="question", answer_key=None))
    assert row.messages[0].content == "why" and row.metadata == {}


def test_missing_columns_show_what_was_found_expected_and_an_example(tmp_path):
    config = jsonl(tmp_path, {"question": "what is " + "very " * 50 + "long", "solution": "4"})
    for find in (check_dataset, load_rows):
        with pytest.raises(ConfigError) as caught:
            find(config)
        text = str(caught.value)
        assert "rows.jsonl:1 lacks the columns 'prompt', 'answer'" in text
        assert "columns found:    question, solution" in text
        assert "columns expected: prompt" in text and "example row:" in text and '"solution": "4"' in text
        assert max(map(len, text.splitlines())) < 340


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a", "answer"', "rows.jsonl:2: broken JSON"),
        ("[1, 2]", "rows.jsonl:2: each line must be a JSON object, got list"),
        ({"prompt": "", "answer": "1"}, "rows.jsonl:2: the prompt is empty"),
        ({"prompt": 5, "answer": "1"}, "rows.jsonl:2: the prompt must be text or a list"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "rows.jsonl:2: a message must have role and content"),
    ],
)
def test_a_faulty_line_is_named_by_file_and_line(tmp_path, line, words):
    config = jsonl(tmp_path, {"prompt": "a", "answer": "1"}, line)
    with pytest.raises(DataError, match=words):
        load_rows(config)
    with pytest.raises(ConfigError, match=words):
        check_dataset(config)


def test_a_missing_or_empty_file_is_a_configuration_error(tmp_path):
    for find in (check_dataset, load_rows):
        with pytest.raises(ConfigError, match="does not exist"):
            find(JsonlDataset(kind="jsonl", path=str(tmp_path / "no.jsonl")))
        with pytest.raises(ConfigError, match="is empty"):
            find(jsonl(tmp_path))


def test_a_saved_folder_is_read_lazily_with_json_values(tmp_path):
    columns = {
        "prompt": ["a", "b"],
        "answer": ["1", "2"],
        "when": [datetime.datetime(2024, 5, 1)] * 2,
        "n": [[1, 2], [3]],
    }
    config = saved(tmp_path, columns)
    check_dataset(config)
    rows = load_rows(config)
    assert len(rows) == 2 and rows[1].row_id == "train:1" and rows[-1] == rows[1]
    assert rows[0].metadata == {"answer": "1", "when": "2024-05-01T00:00:00", "n": [1, 2]}
    assert [row.messages[0].content for row in rows[:2]] == ["a", "b"]
    json.dumps(rows[0].metadata)


def test_a_saved_folder_without_the_columns_is_refused_with_an_example(tmp_path):
    config = saved(tmp_path, {"text": ["a"], "label": [1]})
    with pytest.raises(ConfigError, match="columns found:    label, text"):
        check_dataset(config)
    with pytest.raises(ConfigError, match='example row:      {"text": "a", "label": 1}'):
        load_rows(config)


def test_splits_are_chosen_by_name(tmp_path):
    table = datasets.Dataset.from_dict({"prompt": ["a"], "answer": ["1"]})
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "both"))
    assert len(load_rows(HfDataset(kind="hf", path=str(tmp_path / "both"), split="test"))) == 1
    wrong = HfDataset(kind="hf", path=str(tmp_path / "both"), split="dev")
    for find in (check_dataset, load_rows):
        with pytest.raises(ConfigError, match="no split 'dev'; it has train, test"):
            find(wrong)


def test_a_folder_of_something_else_and_a_missing_folder_are_refused(tmp_path):
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="not a folder written by datasets.save_to_disk"):
        check_dataset(HfDataset(kind="hf", path=str(tmp_path / "other")))
    with pytest.raises(ConfigError, match="does not exist"):
        check_dataset(HfDataset(kind="hf", path=str(tmp_path / "missing")))


def test_an_unreachable_hub_is_told_in_seconds(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    check_dataset(HfDataset(kind="hf", path="someone/some-dataset"))
    with pytest.raises(ConfigError, match="hub could not be reached"):
        load_rows(HfDataset(kind="hf", path="someone/some-dataset"))


def test_a_reasoning_gym_task_gives_its_rows_and_an_unknown_one_an_error():
    config = ReasoningGymDataset(kind="reasoning_gym", task="leg_counting", size=30, seed=1)
    check_dataset(config)
    rows = load_rows(config)
    assert [row.row_id for row in rows] == [f"leg_counting:1:{index}" for index in range(30)]
    assert rows == load_rows(config) and rows[0].metadata["answer"].isdigit()
    other = load_rows(config.model_copy(update={"seed": 2}))
    assert {row.messages for row in rows}.isdisjoint(row.messages for row in other)
    with pytest.raises(ConfigError, match="leg_countin"):
        check_dataset(config.model_copy(update={"task": "leg_countin"}))
    with pytest.raises(ConfigError, match="no_such_setting"):
        check_dataset(config.model_copy(update={"kwargs": {"no_such_setting": 1}}))


def test_the_embedded_task_splits_into_62_and_19_prompts_that_share_no_pair():
    train = load_rows(FewShotAdditionDataset(kind="few_shot_addition"))
    heldout = load_rows(FewShotAdditionDataset(kind="few_shot_addition", part="heldout"))
    assert (len(train), len(heldout)) == (62, 19)

    def pairs(rows):
        return {tuple(sorted(map(int, row.row_id.split("+")))) for row in rows}

    assert len(pairs(heldout)) == 11 and pairs(heldout).isdisjoint(pairs(train))
    assert {(2, 3), (1, 4), (2, 6)} <= pairs(train)
    for row in [*train, *heldout]:
        a, b = map(int, row.row_id.split("+"))
        assert row.messages == (Message("text", f"2+3=5\n4+1=5\n6+2=8\n{a}+{b}="),)
        assert row.metadata == {"answer": str(a + b)}


def test_the_checks_of_embedded_and_jsonl_data_load_nothing_heavy(tmp_path):
    path = jsonl(tmp_path, {"prompt": "a", "answer": "1"}).path
    script = f"""
import sys
from rl.data.config import FewShotAdditionDataset, JsonlDataset
from rl.data.datasets import check_dataset, load_rows
load_rows(JsonlDataset(kind="jsonl", path={path!r}))
check_dataset(FewShotAdditionDataset(kind="few_shot_addition"))
print([name for name in ("torch", "transformers", "datasets", "reasoning_gym", "numpy") if name in sys.modules])
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=_environment())
    assert done.stdout.strip() == "[]"


def _environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def test_half_a_character_in_a_prompt_names_the_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "a \\ud83d", "answer": "1"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:2: character 2 of the prompt is '.ud83d'"):
        load_rows(JsonlDataset(kind="jsonl", path=str(path)))


def test_endless_nesting_names_the_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": ' + "[" * 100000 + "]" * 100000 + "}\n")
    with pytest.raises(DataError, match=r"rows.jsonl:1: the JSON is nested too deeply"):
        load_rows(JsonlDataset(kind="jsonl", path=str(path)))


@pytest.mark.parametrize(
    ("task", "kwargs"),
    [
        ("basic_arithmetic", {}),
        ("chain_sum", {"min_terms": 2, "max_terms": 3}),
        ("gcd", {}),
        ("base_conversion", {}),
        ("letter_counting", {}),
        ("number_sorting", {}),
        ("word_sorting", {}),
        ("prime_factorization", {}),
        ("simple_equations", {}),
        ("caesar_cipher", {}),
        ("maze", {}),
        ("propositional_logic", {}),
    ],
)
def test_a_task_of_any_kind_gives_the_same_rows_each_time(task, kwargs):
    config = ReasoningGymDataset(kind="reasoning_gym", task=task, size=3, seed=1, kwargs=kwargs)
    check_dataset(config)
    rows = load_rows(config)
    assert [row.row_id for row in rows] == [f"{task}:1:{index}" for index in range(3)]
    assert [row.messages for row in rows] == [row.messages for row in load_rows(config)]
    json.dumps([row.metadata for row in rows])


@pytest.mark.parametrize(
    ("kwargs", "words"), [({"min_terms": 5, "max_terms": 2}, "chain_sum"), ({"min_terms": "many"}, "chain_sum")]
)
def test_settings_that_a_task_refuses_are_a_configuration_error(kwargs, words):
    config = ReasoningGymDataset(kind="reasoning_gym", task="chain_sum", kwargs=kwargs)
    with pytest.raises(ConfigError, match=words):
        check_dataset(config)
