"""The strict NCCL on host memory, for refits of tests; it serves as the library of the device too."""

from pathlib import Path
from typing import Literal

from rl.weights.transport import LinkSettings

Dialect = Literal["broadcast", "allreduce"]
DIALECTS: tuple[Dialect, ...] = ("broadcast", "allreduce")
_LIBRARY = Path("csrc") / "testing" / "nccl" / "libtandem_test_nccl.so"


def strict_nccl() -> str:
    """Its path."""
    here = Path(__file__).absolute()
    places = [here.parents[2] / _LIBRARY, here.resolve().parents[2] / "bazel-bin" / _LIBRARY]
    return str(next(place for place in places if place.is_file()))


def nccl_link(dialect: Dialect = "broadcast") -> LinkSettings:
    """What both ends of a refit are told."""
    library = strict_nccl()
    return LinkSettings(20.0, nccl_library=library, device_library=library, nccl_dialect=dialect)
