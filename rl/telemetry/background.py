"""BackgroundSink: a sink in its own thread behind a bounded queue, so that it can neither slow, hang nor end training.

Consumes: values of `log`. Produces: calls of the sink. Waits for: the queue. Unblocked by: `log`, `close`.
What goes wrong is told once, as one warning. A sink that raised is off; one that hangs loses the steps that no longer
fit into the queue.
"""

import logging
import queue
import threading
from collections.abc import Mapping

from rl.telemetry.sinks import RunInfo, Sink, SinkOpener

_log = logging.getLogger(__name__)

QUEUE_STEPS = 256
CLOSE_TIMEOUT_S = 15.0


class BackgroundSink:
    """Feeds one sink."""

    def __init__(self, name: str, open_sink: SinkOpener, run: RunInfo, queue_steps: int = QUEUE_STEPS) -> None:
        """Open the sink in the background.

        Args:
            name: For messages.
            open_sink: Opens it; may take long or raise.
            run: What it tells about the run.
            queue_steps: Waiting steps held at most.
        """
        self._name = name
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(queue_steps)
        self._failed = threading.Event()
        self._told = False
        self._thread = threading.Thread(target=self._serve, args=(open_sink, run), name=f"sink-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over the values of a step; never blocks, never raises."""
        if not self._failed.is_set():
            self._put((step, dict(metrics)))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Give the sink `timeout_s` seconds to write what waits; a sink that hangs is left behind."""
        if not self._failed.is_set():
            self._put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive() and not self._failed.is_set():
            self._tell(f"did not finish within {timeout_s:g} s; what it had not written is only in metrics.jsonl")

    def _put(self, item: tuple[int, dict[str, float]] | None) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._tell(f"is {self._queue.maxsize} steps behind; new steps are left out there until it moves")

    def _serve(self, open_sink: SinkOpener, run: RunInfo) -> None:
        """The boundary to foreign code: whatever it raises turns this sink off, and nothing else."""
        try:
            sink = open_sink(run)
            self._feed(sink)
            sink.close()
        except Exception as error:
            self._failed.set()
            self._tell(f"failed and is off from now on ({type(error).__name__}: {error}); training goes on")

    def _feed(self, sink: Sink) -> None:
        while (item := self._queue.get()) is not None:
            step, metrics = item
            sink.log(step, metrics)

    def _tell(self, what: str) -> None:
        if not self._told:
            self._told = True
            _log.warning("the %s logger %s", self._name, what)
