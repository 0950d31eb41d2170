"""List the GPU architectures for which object files hold machine code, and fail when a wanted one is missing.

Reads the container that nvcc embeds in an object (section .nv_fatbin) itself, as a toolkit without cuobjdump is common.

    python3 list_archs.py OBJECT... [--want 80 90 100]
"""

import argparse
import struct
import sys
from pathlib import Path

_REGION_MAGIC = struct.pack("<I", 0xBA55ED50)
_REGION_HEADER = struct.Struct("<IHHQ")  # magic, version, header size, size of the entries
_ENTRY_HEADER = struct.Struct("<HHIQIIHHI")  # kind, version, header size, padded size, ..., architecture
_KINDS = {1: "ptx", 2: "sass"}


def find_entries(content: bytes) -> list[tuple[str, int]]:
    """Return (kind, architecture) of every piece of device code in an object file, in order."""
    entries = []
    position = content.find(_REGION_MAGIC)
    while position >= 0:
        _, _, header_size, size = _REGION_HEADER.unpack_from(content, position)
        entry = position + header_size
        end = entry + size
        while entry < min(end, len(content) - _ENTRY_HEADER.size):
            kind, _, entry_header_size, padded_size, _, _, _, _, arch = _ENTRY_HEADER.unpack_from(content, entry)
            if entry_header_size == 0:
                break
            entries.append((_KINDS.get(kind, f"kind {kind}"), arch))
            entry += entry_header_size + padded_size
        position = content.find(_REGION_MAGIC, max(end, position + 1))
    return entries


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="List the device code in object files.")
    parser.add_argument("objects", nargs="*", type=Path)
    parser.add_argument("--want", nargs="*", type=int, default=[], help="architectures that every object must hold")
    options = parser.parse_args(arguments)
    if not options.objects:
        sys.stderr.write("no CUDA object in this build: add --config=cuda\n")
        return 1
    failed = False
    for path in options.objects:
        entries = find_entries(path.read_bytes())
        lines = [f"  {kind:5s} {'compute' if kind == 'ptx' else 'sm'}_{arch}" for kind, arch in entries]
        sys.stdout.write("\n".join([str(path), *lines, ""]))
        missing = sorted(set(options.want) - {arch for kind, arch in entries if kind == "sass"})
        if missing:
            sys.stderr.write(f"  missing: {', '.join(f'sm_{arch}' for arch in missing)}\n")
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
