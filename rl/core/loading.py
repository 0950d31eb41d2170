"""One model load at a time in a process.

Loading a model changes process-wide state for a while (the default device and dtype, the random state). Workers of the
local cluster share one process and start side by side, so they take turns here; in a process of its own a worker never
waits.

    with model_loading():
        module = AutoModelForCausalLM.from_pretrained(path)
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.Lock()


@contextmanager
def model_loading() -> Iterator[None]:
    """Hold the process's turn for the `with` block."""
    with _LOCK:
        yield
