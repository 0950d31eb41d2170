"""Reward functions of every kind, good and bad, for tests of the function environment."""

import functools
import os
import time

import numpy as np


def right_answer(prompts, completions, answer):
    assert len(prompts) == len(completions) == len(answer)
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def all_columns(prompts, completions, **columns):
    return [float(sorted(columns) == ["answer", "level"] and columns["level"] == [3] * len(completions))] * len(
        completions
    )


async def lengths(completions):
    return [len(text) for text in completions]


class Callable:
    def __call__(self, completions):
        return [1.0] * len(completions)


callable_object = Callable()
partial = functools.partial(lambda value, completions: [value] * len(completions), 0.25)
not_callable = 3


def numbers_of_many_types(completions):
    return [True, 1, np.float32(0.5), np.bool_(False)]


def as_array(completions):
    return np.ones(len(completions), dtype=np.float32)


def one_bad_sample_each(completions):
    return [0.5, None, float("nan"), float("inf"), "1.0", [1.0]]


def unusable_rewards(completions):
    return [1e19, {"": 1.0}, {"a\nb": 1.0}, {"a" * 65: 1.0}, {"a": 1e18, "b": 1e18}]


def raises(completions):
    raise KeyError("oops")


def exits(completions):
    raise SystemExit(3)


def dies(completions):
    os._exit(7)


def returns_none(completions):
    return None


def returns_one_number(completions):
    return 1.0


def too_few(completions):
    return [1.0] * (len(completions) - 1)


def hangs(completions):
    while True:
        time.sleep(1)


def needs_gold(completions, gold):
    return [1.0] * len(completions)


def where_it_runs(completions):
    return [float(os.getpid())] * len(completions)


def two_components(completions):
    return [{"correctness": 1, "format": np.float32(0.0)}] * len(completions)


def faulty_components(completions):
    return [
        {"correctness": 1.0, "format": 0.5},
        {"correctness": 1.0},
        {"correctness": None, "format": 1.0},
        {"correctness": float("nan"), "format": 1.0},
        {"correctness": 1.0, "format": 1.0, "style": 1.0},
        1.0,
    ]


def no_component(completions):
    return [{}] * len(completions)


def ones(completions):
    return [1.0] * len(completions)


def zeros(completions):
    return [0] * len(completions)
