"""Proves that every rank of every engine holds what the trainer sent, and names the first tensor that differs.

A digest is 64 bits per tensor. The sender's are of the bytes that left, a reader's of its loaded parameters where they
can be read, else of the bytes that arrived. Where digests differ, what a reader holds instead is often known too: the
bytes of another tensor, or of the version before. Signatures (`rl.weights.signature`) show weights that no digest
sees; they are asked for only when a probe fails. Pure; it neither transfers nor scores.
"""

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl.core.errors import WeightSyncError
from rl.core.types import PolicyVersion
from rl.weights.signature import first_deviation
from rl.weights.transport import DIGEST_BYTES, Ack, TensorSpec

Table = tuple[int, ...]
_LAYER = re.compile(r"\.(\d+)\.")
_QUOTED = re.compile(r"'([^']+)'")
# Of signatures, relative: what packing and the order of a sum may change.
_SIGNATURE_TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Sent:
    """What a version consisted of.

    Attributes:
        version: Of the policy.
        manifest: Its tensors.
        table: One digest per tensor.
    """

    version: PolicyVersion
    manifest: tuple[TensorSpec, ...]
    table: Table

    @classmethod
    def of(cls, version: PolicyVersion, manifest: tuple[TensorSpec, ...], digests: bytes) -> "Sent":
        """Read the sender's digests.

        Raises:
            WeightSyncError: there is not one per tensor.
        """
        return cls(version, manifest, _table("the trainer", digests, len(manifest)))

    def num_changed(self, before: "Sent | None") -> int:
        """Return the number of tensors whose bytes are others than `before`; all of them where there is none."""
        if before is None or before.manifest != self.manifest:
            return len(self.table)
        return sum(now != then for now, then in zip(self.table, before.table, strict=True))


def check_ack(ack: Ack | None, replica: str, num_readers: int, sent: Sent, before: Sent | None) -> None:
    """Compare what a replica confirms with what was sent; nothing is taken for granted.

    Args:
        ack: Of the replica.
        replica: Its name.
        num_readers: Ranks of its engine.
        sent: The version of this refit.
        before: The version of the refit before, for the name of what a reader holds instead.

    Raises:
        WeightSyncError: it confirms nothing, another version, too little, or other bytes; names the first tensor.
    """
    total = len(sent.manifest)
    if ack is None:
        raise WeightSyncError(f"{replica} confirms nothing; a refit without a confirmation is no success")
    if ack.version != sent.version:
        raise WeightSyncError(f"{replica} confirms version {ack.version}, published was {sent.version}")
    if ack.num_tensors != total or not total:
        raise WeightSyncError(f"{replica} loaded {ack.num_tensors} of {total} tensors")
    if len(ack.digests) != num_readers or not ack.digests:
        raise WeightSyncError(f"{replica} has {num_readers} readers, {len(ack.digests)} of them gave digests")
    for reader, digests in enumerate(ack.digests):
        where = replica if num_readers == 1 else f"{replica}.{reader}"
        table = _table(where, digests, total)
        if table != sent.table:
            raise WeightSyncError(_first_difference(where, table, sent, before))


def layer_of(name: str) -> str:
    """Return the layer that a tensor belongs to, for messages: "layer 3", or what it is outside of them."""
    found = _LAYER.search(name)
    return "no numbered layer" if found is None else f"layer {found.group(1)}"


def deviating_tensor(
    expected: Mapping[str, Sequence[float]], actual: Mapping[str, Sequence[float]], precision: str
) -> str | None:
    """Name the first tensor with which an engine computes otherwise than the trainer, and its layer; None: none.

    Args:
        expected: Signatures of the trainer.
        actual: Of an engine.
        precision: Torch dtype name of the arithmetic.

    Raises:
        WeightSyncError: they have no tensor in common, so nothing was compared.
    """
    if not expected.keys() & actual.keys():
        raise WeightSyncError("trainer and engine signed no tensor in common; there is nothing to compare")
    text = first_deviation(expected, actual, _SIGNATURE_TOLERANCE[precision])
    named = None if text is None else _QUOTED.search(text)
    return text if text is None or named is None else f"{text} ({layer_of(named.group(1))})"


def _table(where: str, digests: bytes, total: int) -> Table:
    if len(digests) != total * DIGEST_BYTES:
        raise WeightSyncError(
            f"{where} gave {len(digests)} bytes of digests for {total} tensors of {DIGEST_BYTES} bytes each"
        )
    return struct.unpack(f"<{total}Q", digests)


def _first_difference(where: str, table: Table, sent: Sent, before: Sent | None) -> str:
    differing = [index for index, (right, held) in enumerate(zip(sent.table, table, strict=True)) if right != held]
    index = differing[0]
    spec = sent.manifest[index]
    others = "" if len(differing) == 1 else f"; {len(differing)} tensors differ in all"
    return (
        f"{where} holds other bytes than were sent in '{spec.name}' ({spec.dtype} {list(spec.shape)}, "
        f"{layer_of(spec.name)}): {_held(table[index], index, sent, before)}{others}"
    )


def _held(digest: int, index: int, sent: Sent, before: Sent | None) -> str:
    """What a wrong digest is the right one of."""
    if before is not None and before.manifest == sent.manifest and before.table[index] == digest:
        return f"it is stale, the bytes are those of version {before.version}"
    twins = [spec.name for spec, right in zip(sent.manifest, sent.table, strict=True) if right == digest]
    if twins:
        return f"the bytes are those of '{twins[0]}', so names were swapped"
    return f"digest {digest:016x}, sent was {sent.table[index]:016x}, which is no other tensor's and not the last one's"
