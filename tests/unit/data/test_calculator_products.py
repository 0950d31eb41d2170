from rl.data.config import CalculatorProductsDataset
from rl.data.datasets import check_dataset, load_rows


def rows(**settings):
    config = CalculatorProductsDataset(kind="calculator_products", **settings)
    check_dataset(config)
    return load_rows(config)


def test_prompts_end_with_the_question_after_worked_examples_with_calls():
    (row,) = rows(size=1)
    text = row.messages[0].content
    assert text.endswith(f"\n\nQ: {row.row_id}\n") and row.messages[0].role == "text"
    a, b = map(int, row.row_id.split("*"))
    assert row.metadata == {"answer": str(a * b)}
    assert text.count("<tool_call>") == text.count("<tool_response>") == text.count("A: ") >= 2


def test_no_pair_occurs_twice_or_in_both_parts_in_either_order():
    train, heldout = rows(), rows(part="heldout")
    pairs = [{tuple(sorted(map(int, row.row_id.split("*")))) for row in part} for part in (train, heldout)]
    assert pairs[0].isdisjoint(pairs[1])
    assert len({row.row_id for row in train}) == len(train) == 1000
    assert len({row.row_id for row in heldout}) == len(heldout) == 1000
    assert not {(37, 29), (84, 51)} & {tuple(map(int, row.row_id.split("*"))) for row in train + heldout}


def test_rows_follow_from_the_seed():
    assert rows(size=5) == rows(size=9)[:5]
    assert rows(size=5) != rows(size=5, seed=1)
    assert [row.row_id for row in rows(size=3)] == FIRST_OF_SEED_0


FIRST_OF_SEED_0 = ["85*60", "27*64", "23*88"]
