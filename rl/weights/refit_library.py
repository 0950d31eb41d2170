"""The functions of libtandem_refit.so (csrc/refit/refit_abi.h) as ctypes sees them.

It declares and opens the library and turns its errors into `TransferError`; the objects that Python works with are in
`rl.weights.native`.
"""

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, c_char, c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p
from typing import Any, Final

import torch

from rl.core.errors import FatalError
from rl.core.native import REFIT_LIBRARY, native_library
from rl.weights.faults import NO_BUCKET, NO_RANK, FaultKind, TransferError

# Of refit_abi.h; the library is refused when its own differs.
ABI_VERSION: Final = 1
UNIQUE_ID_BYTES: Final = 128
TRANSPORTS: Final = {"shm": 0, "tcp": 1, "nccl": 2}
NCCL_DIALECTS: Final = {"broadcast": 0, "allreduce": 1}
# tandem::WireType by number.
WIRE_DTYPES: Final = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
WIRE_NUMBERS: Final = {dtype: number for number, dtype in enumerate(WIRE_DTYPES)}
WIRE_NAMES: Final = tuple(str(dtype).removeprefix("torch.") for dtype in WIRE_DTYPES)
# tandem::StatusCode by number.
_KINDS: Final[tuple[FaultKind, ...]] = (
    "invalid",  # 0 is success and never asked for
    "invalid",
    "device",
    "deadline",
    "peer lost",
    "aborted",
    "mismatch",
    "data loss",
    "unavailable",
)
_CODES: Final = {kind: code for code, kind in enumerate(_KINDS) if code}
_MESSAGE_BYTES: Final = 488


class ErrorRecord(ctypes.Structure):
    """TandemRefitError."""

    _fields_ = (("code", c_int32), ("rank", c_int32), ("bucket", c_int64), ("message", c_char * _MESSAGE_BYTES))

    @classmethod
    def of(cls, reason: str, kind: FaultKind, rank: int, bucket: int) -> "ErrorRecord":
        """Return the record of a fault; the reason is cut to what fits, at a character."""
        text = reason.encode()[: _MESSAGE_BYTES - 1].decode(errors="ignore").replace("\0", " ")
        return cls(_CODES[kind], rank, bucket, text.encode())


class TimesRecord(ctypes.Structure):
    """TandemRefitTimes."""

    _fields_ = tuple((name, c_double) for name in ("copy", "digest", "wire", "total"))


class LinkRecord(ctypes.Structure):
    """TandemRefitLink."""

    _fields_ = (
        ("transport", c_int32),
        ("num_slots", c_int32),
        ("num_readers", c_int32),
        ("reader", c_int32),
        ("root", c_int32),
        ("has_digests", c_int32),
        ("addresses", POINTER(c_char_p)),
        ("port", c_int32),
        ("silence_s", c_double),
        ("nccl_library", c_char_p),
        ("device_library", c_char_p),
        ("unique_ids", c_char_p),
        ("nccl_dialect", c_int32),
        ("device", c_int32),
    )


_ERROR = POINTER(ErrorRecord)
_END = (c_void_p, _ERROR)
_TRANSFER = (c_void_p, c_int64, c_int64, POINTER(c_void_p), POINTER(c_int32), _ERROR)
_FINISH = (c_void_p, POINTER(c_uint64), POINTER(TimesRecord), _ERROR)
_OPEN = (c_void_p, POINTER(LinkRecord), POINTER(c_void_p), _ERROR)
_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "tandem_refit_abi_version": (c_int32, ()),
    "tandem_plan_build": (
        c_int32,
        (POINTER(c_char_p), POINTER(c_int32), POINTER(c_int32), POINTER(c_int64), c_int64, c_int64, c_int32)
        + (POINTER(c_void_p), _ERROR),
    ),
    "tandem_plan_parse": (c_int32, (c_char_p, c_int64, POINTER(c_void_p), _ERROR)),
    "tandem_plan_free": (None, (c_void_p,)),
    "tandem_plan_serialize": (c_int64, (c_void_p, c_char_p, c_int64)),
    "tandem_plan_digest": (c_uint64, (c_void_p,)),
    "tandem_plan_counts": (None, (c_void_p, POINTER(c_int64))),
    "tandem_plan_pieces": (None, (c_void_p, POINTER(c_int64))),
    "tandem_plan_tensor": (
        c_char_p,
        (c_void_p, c_int64, POINTER(c_int32), POINTER(c_int32), POINTER(POINTER(c_int64))),
    ),
    "tandem_sender_open": (c_int32, _OPEN),
    "tandem_sender_address": (c_int64, (c_void_p, c_char_p, c_int64)),
    "tandem_sender_join": (c_int32, (c_void_p, c_double, _ERROR)),
    "tandem_sender_begin": (c_int32, (c_void_p, c_uint64, c_uint64, c_double, _ERROR)),
    "tandem_sender_send": (c_int32, _TRANSFER),
    "tandem_sender_finish": (c_int32, _FINISH),
    "tandem_sender_abort": (None, _END),
    "tandem_sender_free": (None, (c_void_p,)),
    "tandem_receiver_open": (c_int32, _OPEN),
    "tandem_receiver_join": (c_int32, (c_void_p, c_double, _ERROR)),
    "tandem_receiver_begin": (c_int32, (c_void_p, c_uint64, c_uint64, c_double, _ERROR)),
    "tandem_receiver_receive": (c_int32, _TRANSFER),
    "tandem_receiver_finish": (c_int32, _FINISH),
    "tandem_receiver_abort": (None, _END),
    "tandem_receiver_free": (None, (c_void_p,)),
    "tandem_digest": (None, (POINTER(c_void_p), POINTER(c_int64), c_int64, POINTER(c_uint64))),
    "tandem_nccl_unique_id": (c_int32, (c_char_p, c_char_p, _ERROR)),
}


@functools.cache
def refit_library() -> Mapping[str, Callable[..., Any]]:
    """Open the library once per process and return its functions by name. Calls release the GIL.

    Raises:
        FatalError: it is nowhere, does not load, or is of another version.
    """
    path = native_library(REFIT_LIBRARY)
    try:
        library = ctypes.CDLL(str(path))
        functions = {name: library[name] for name in _SIGNATURES}
    except (OSError, AttributeError) as error:
        raise FatalError(f"the native library {path} does not load: {error}; build or install it again") from error
    for name, (result, arguments) in _SIGNATURES.items():
        functions[name].restype = result
        functions[name].argtypes = arguments
    version = functions["tandem_refit_abi_version"]()
    if version != ABI_VERSION:
        raise FatalError(
            f"the native library {path} has interface version {version}, this release needs {ABI_VERSION}; "
            "build or install it again"
        )
    return functions


def call(name: str, *arguments: Any) -> None:
    """Call a function that reports errors, with `arguments` before its error record.

    Raises:
        TransferError: the call failed.
    """
    record = ErrorRecord(rank=NO_RANK, bucket=NO_BUCKET)
    code = refit_library()[name](*arguments, ctypes.byref(record))
    if code:
        kind: FaultKind = _KINDS[code] if 0 < code < len(_KINDS) else "device"
        raise TransferError(record.message.decode(errors="replace"), kind, record.rank, record.bucket)


def int64s(values: Sequence[int]) -> "ctypes.Array[c_int64]":
    """Return an array for a call; empty ones have an address too."""
    return (c_int64 * max(1, len(values)))(*values)


def int32s(values: Sequence[int]) -> "ctypes.Array[c_int32]":
    """Return an array for a call."""
    return (c_int32 * max(1, len(values)))(*values)


def pointers(values: Sequence[int]) -> "ctypes.Array[c_void_p]":
    """Return an array of addresses for a call."""
    return (c_void_p * max(1, len(values)))(*values)
