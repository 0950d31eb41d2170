"""What of an engine sleeps: it gave the memory up, and neither computes with it nor receives into it until it wakes.

It moves nothing: the engines' workers do.
"""

from collections.abc import Sequence

from rl.core.errors import WeightSyncError
from rl.generation.generator import WAKE_TAGS, WakeTag


class Asleep:
    """The tags of one engine that are asleep; none at first.

    Args:
        replica: Whose they are, for messages.
    """

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._tags: set[WakeTag] = set()

    def fall_asleep(self) -> None:
        """Note that everything is asleep, or about to be."""
        self._tags = set(WAKE_TAGS)

    def among(self, tags: Sequence[WakeTag]) -> list[WakeTag]:
        """Return those that are asleep: to wake what is awake is no error."""
        return [tag for tag in tags if tag in self._tags]

    def woken(self, tags: Sequence[WakeTag]) -> None:
        """Note that they are awake."""
        self._tags -= set(tags)

    def check_awake(self, tags: Sequence[WakeTag], wanted: str) -> None:
        """Refuse what needs them.

        Raises:
            WeightSyncError: one is asleep.
        """
        asleep = self.among(tags)
        if asleep:
            raise WeightSyncError(f"{self._replica} cannot {wanted}: it sleeps ({', '.join(asleep)}); wake it first")
