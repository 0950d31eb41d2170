"""Tools of every kind, good and bad, for tests of the tools environment."""

import functools
import time


def greet(name: str, times: int = 1, *, loud: bool = False) -> str:
    text = " ".join([f"hello {name}"] * times)
    return text.upper() if loud else text


async def look_up(key: str, table: dict[str, int] | None = None) -> dict[str, object]:
    return {"key": key, "value": (table or {}).get(key)}


class Counter:
    def __call__(self, numbers: list[float]) -> float:
        return sum(numbers)


count = Counter()
double = functools.partial(lambda factor, number: factor * number, 2)


def anything(**arguments):
    return sorted(arguments)


def fails(text: str) -> str:
    raise KeyError(text)


def hangs() -> str:
    while True:
        time.sleep(1)


def speaks_long() -> str:
    return "x" * 5000


def gives_no_json() -> object:
    return {1, 2} - {1}


def gives_half_a_pair() -> str:
    return "a\ud800b"
