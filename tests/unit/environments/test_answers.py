import pytest

from rl.environments.answers import judge_answer, judge_literal_answer, literal_value


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        (r"So it is \boxed{\frac13}.", "1/3"),
        ("The answer is 0.5", "1/2"),
        (r"\boxed{x^2+2x+1}", "$(x+1)^2$"),
        (r"\boxed{7}", r"\boxed{7}"),
        ("1,000", "1000"),
    ],
)
def test_equal_answers_are_right(text, reference):
    judgement = judge_answer(text, reference)
    assert judgement.is_correct and not judgement.fault


@pytest.mark.parametrize("text", ["", "I do not know", r"\boxed{4}", "8 or 9"])
def test_other_answers_are_wrong(text):
    assert not judge_answer(text, "7").is_correct


def test_a_reference_that_cannot_be_read_is_a_fault_and_no_verdict():
    assert "not a mathematical value" in judge_answer("7", "").fault


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", "8"),
        (" 8\n", "8"),
        ("-3.50", "-3.50"),
        ("1,234", "1,234"),
        ("3/4", "3/4"),
        (r"\frac{3}{4}", r"\frac{3}{4}"),
        (r"$\boxed{12}$", "12"),
        ("2e5", "2e5"),
        ("50%", "50%"),
        ("Paris", "Paris"),
    ],
)
def test_one_value_is_a_literal(text, value):
    assert literal_value(text) == value


@pytest.mark.parametrize(
    "text", ["", "3+5", "8 9", "2*4", "8=8", "the answer is 8", "8\n1+1=2", "2^3", "sqrt(64)", "4--4"]
)
def test_expressions_and_sentences_are_no_literals(text):
    assert literal_value(text) is None
    assert not judge_literal_answer(text, "8").is_correct


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [("8\n", "8", True), ("8.0", "8", True), ("9", "8", False), ("3/4", "0.75", True), ("Paris", "Paris", True)],
)
def test_a_literal_must_equal_the_reference(text, reference, right):
    assert judge_literal_answer(text, reference).is_correct is right
