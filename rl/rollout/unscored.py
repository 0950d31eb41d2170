"""Tells why rollouts got no reward: each distinct reason once as a warning, every case in the log."""

import logging
import re

_log = logging.getLogger(__name__)
# "ValueError: its own text (at file:line in function)", as scoring processes describe an exception.
_EXCEPTION = re.compile(r"(?P<type>[\w.]+): .*(?P<place>\(at [^()]+:\d+ in [^()]+\))", re.DOTALL)
REASONS_TOLD = 20


class Unscored:
    """Remembers which reasons the user has been told; shared by the runners of a run."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, environment: str, rollout: str, detail: str) -> None:
        """Log that `rollout` has no reward.

        Args:
            environment: Its name.
            rollout: What was to be scored.
            detail: "subject: reason" of the environment, where the subject names function, prompt and sample. Two
                details with the same reason are told once; exceptions of one type and place are one reason, whatever
                their text says about the sample.
        """
        reason = _kind_of(detail.partition(": ")[2] or detail)
        is_new = reason not in self._told and len(self._told) < REASONS_TOLD
        if is_new:
            self._told.add(reason)
        level = logging.WARNING if is_new else logging.INFO
        _log.log(level, "environment %s gave no reward for %s: %s", environment, rollout, detail or "no reason given")
        if is_new and len(self._told) == REASONS_TOLD:
            _log.warning("%d different reasons for missing rewards were shown; more are in run.log", REASONS_TOLD)


def _kind_of(reason: str) -> str:
    found = _EXCEPTION.fullmatch(reason)
    return reason if found is None else f"{found['type']} {found['place']}"
