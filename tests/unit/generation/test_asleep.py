"""What sleeps is refused by name until it wakes."""

import pytest

from rl.core.errors import WeightSyncError
from rl.generation.asleep import Asleep
from rl.generation.generator import WAKE_TAGS


def test_what_needs_something_that_sleeps_is_refused_by_name() -> None:
    asleep = Asleep("generation[1]")
    asleep.check_awake(WAKE_TAGS, "generate")
    assert asleep.among(WAKE_TAGS) == []
    asleep.fall_asleep()
    with pytest.raises(
        WeightSyncError, match=r"generation\[1\] cannot take version 3: it sleeps \(weights, kv_cache\)"
    ):
        asleep.check_awake(WAKE_TAGS, "take version 3")
    asleep.woken(("weights",))
    assert asleep.among(WAKE_TAGS) == ["kv_cache"]
    asleep.check_awake(("weights",), "take version 3")
    with pytest.raises(WeightSyncError, match=r"cannot generate: it sleeps \(kv_cache\)"):
        asleep.check_awake(WAKE_TAGS, "generate")
    asleep.woken(WAKE_TAGS)
    asleep.check_awake(WAKE_TAGS, "generate")
