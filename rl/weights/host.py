"""The shared-memory ring: a few slots of one bucket each, between processes of one host.

A segment is a file of the kernel's shared-memory filesystem. Its name starts with the run's tag, so that whoever
reaps a dead run finds it. The sender creates and removes it; receivers attach. No resource tracker is involved: the
one of the standard library removes a segment when any process that attached ends. This module neither plans nor
checks bytes.
"""

import contextlib
import errno
import mmap
import os
from pathlib import Path

import torch

from rl.core.errors import WeightSyncError
from rl.core.reaper import SHARED_MEMORY


class SharedRing:
    """`num_slots` slots of `slot_bytes` bytes; `slot(i)` is the slot of bucket i as a uint8 tensor without a copy."""

    def __init__(self, path: Path, mapping: mmap.mmap, slot_bytes: int, num_slots: int, owner: bool) -> None:
        self._path = path
        self._mapping: mmap.mmap | None = mapping
        self._memory: torch.Tensor | None = torch.frombuffer(mapping, dtype=torch.uint8)
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots
        self._owner = owner

    @classmethod
    def create(cls, channel: str, slot_bytes: int, num_slots: int) -> "SharedRing":
        """Create the segment `channel` and reserve its pages.

        Raises:
            WeightSyncError: the name is taken, or the shared-memory filesystem is too small.
        """
        path = SHARED_MEMORY / channel
        size = slot_bytes * num_slots
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise WeightSyncError(f"shared memory segment {path} exists; another refit has its name") from error
        try:
            # Reserved now: a full filesystem would otherwise end the process with SIGBUS at the first write.
            os.posix_fallocate(descriptor, 0, size)
            mapping = mmap.mmap(descriptor, size)
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            found = os.statvfs(SHARED_MEMORY)
            free = found.f_bavail * found.f_frsize
            raise WeightSyncError(
                f"{SHARED_MEMORY} has {free >> 20} MiB free, the refit needs {size >> 20} MiB; "
                "lower policy.generation.refit_cfg.bucket_mib or enlarge the shared memory"
            ) from error
        finally:
            os.close(descriptor)
        return cls(path, mapping, slot_bytes, num_slots, owner=True)

    @classmethod
    def attach(cls, channel: str, slot_bytes: int, num_slots: int) -> "SharedRing":
        """Map the segment that the sender created.

        Raises:
            WeightSyncError: it does not exist on this host, or has another size.
        """
        path = SHARED_MEMORY / channel
        size = slot_bytes * num_slots
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise WeightSyncError(
                f"no shared memory segment {path} on this host; transport shm needs trainer and generator on one host"
            ) from error
        try:
            actual = os.fstat(descriptor).st_size
            if actual != size:
                raise WeightSyncError(f"shared memory segment {path} has {actual} bytes, the plan needs {size}")
            mapping = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        return cls(path, mapping, slot_bytes, num_slots, owner=False)

    def slot(self, bucket: int) -> torch.Tensor:
        """Return the slot of bucket number `bucket`, [slot_bytes] uint8."""
        if self._memory is None:
            raise WeightSyncError(f"shared memory segment {self._path} is closed")
        start = bucket % self._num_slots * self._slot_bytes
        return self._memory[start : start + self._slot_bytes]

    def close(self) -> None:
        """Unmap; the owner also removes the name. Idempotent."""
        self._memory = None
        if self._mapping is not None:
            # A tensor that still views the mapping keeps it alive; the pages go when that tensor goes.
            with contextlib.suppress(BufferError):
                self._mapping.close()
            self._mapping = None
        if self._owner:
            self._path.unlink(missing_ok=True)
            self._owner = False
