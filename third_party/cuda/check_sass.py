"""Hold the machine code of CUDA kernels to a file of budgets.

    python3 check_sass.py --cuobjdump PATH --budgets FILE OBJECT...

For every architecture in the objects, each kernel must use no local memory (no spilled register, no stack), must have
exactly one row in the budgets, and must keep it; a row without a kernel is an error too. A row is a TOML table whose
name is a pattern over kernel names such as "StatsKernel<float, *>":

    registers  most registers per thread, on any architecture
    loads      fewest 16-byte loads that one straight piece of code inside a loop has under way together (default 0)
    ex2        most exponentials in the code: the elements of an unrolled body and a few for rescaling (default: none)

What it does not see: whether a kernel is right, or fast.
"""

import argparse
import ctypes
import fnmatch
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

_ARCH = re.compile(r"^arch = sm_(\w+)$")
_FUNCTION = re.compile(r"^\s*Function\s*:?\s*(\S+?):?$")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
_BRANCHES = ("BRA", "BRX", "JMP", "EXIT", "RET", "CALL", "BREAK", "WARPSYNC.COLLECTIVE")
_VECTOR_LOAD = re.compile(r"^LDG\.E(?=.*\.(?:128|256)\b)")
_LOCAL_ACCESS = re.compile(r"^(?:LDL|STL)\b")


@dataclass(frozen=True)
class Instruction:
    """One line of machine code; `target` is where a branch goes."""

    address: int
    opcode: str
    target: int | None = None


@dataclass
class Kernel:
    """What a kernel's machine code on one architecture uses."""

    name: str
    arch: str
    registers: int = 0
    stack: int = 0
    local: int = 0
    instructions: list[Instruction] = field(default_factory=list)

    @property
    def ex2(self) -> int:
        """Count the exponentials in the code."""
        return sum(step.opcode.startswith("MUFU.EX2") for step in self.instructions)

    @property
    def vector_loads(self) -> int:
        """Count the 16-byte loads in the code."""
        return sum(bool(_VECTOR_LOAD.match(step.opcode)) for step in self.instructions)

    @property
    def local_accesses(self) -> int:
        """Count reads and writes of local memory."""
        return sum(bool(_LOCAL_ACCESS.match(step.opcode)) for step in self.instructions)

    @property
    def loads_under_way(self) -> int:
        """Return the most 16-byte loads in a piece of code without branches that lies inside a loop."""
        loops = [
            (step.target, step.address)
            for step in self.instructions
            if step.target is not None and step.target <= step.address and step.opcode.startswith("BRA")
        ]
        targets = {step.target for step in self.instructions}
        most = count = 0
        for step in self.instructions:
            if step.address in targets:
                count = 0
            if _VECTOR_LOAD.match(step.opcode) and any(start <= step.address <= end for start, end in loops):
                count += 1
                most = max(most, count)
            if step.opcode.startswith(_BRANCHES):
                count = 0
        return most


@dataclass(frozen=True)
class Budget:
    """A row of the budgets."""

    pattern: str
    registers: int
    loads: int = 0
    ex2: int = 0


def demangle(symbol: str) -> str:
    """Return a kernel's name without namespaces and parameters: `_ZN1a1KIfEEvT_` is `K<float>`."""
    runtime = ctypes.CDLL("libstdc++.so.6")
    runtime.__cxa_demangle.restype = ctypes.c_void_p
    runtime.__cxa_demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    answer = runtime.__cxa_demangle(symbol.encode(), None, None, None)
    text = symbol if answer is None else ctypes.string_at(answer).decode()
    text = text.replace("(anonymous namespace)::", "")
    text = text.split("(", maxsplit=1)[0].removeprefix("void ")
    return re.sub(r"\b(?:\w+::)+", "", text)


def parse_usage(text: str) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Read `cuobjdump -res-usage`: (arch, symbol) to registers, stack and local bytes."""
    usage = {}
    arch = symbol = ""
    for line in text.splitlines():
        if match := _ARCH.match(line):
            arch = match[1]
        elif match := _USAGE.search(line):
            usage[arch, symbol] = (int(match[1]), int(match[2]), int(match[4]))
        elif match := _FUNCTION.match(line):
            symbol = match[1]
    return usage


def parse_instructions(text: str) -> dict[tuple[str, str], list[Instruction]]:
    """Read `cuobjdump -sass`: (arch, symbol) to the code."""
    code: dict[tuple[str, str], list[Instruction]] = {}
    arch = ""
    current: list[Instruction] = []
    for line in text.splitlines():
        if match := _ARCH.match(line):
            arch = match[1]
        elif match := _FUNCTION.match(line):
            current = code.setdefault((arch, match[1]), [])
        elif match := _INSTRUCTION.match(line):
            target = re.search(r"0x([0-9a-f]+)\)?\s*$", match[3]) if match[2].startswith(_BRANCHES) else None
            current.append(Instruction(int(match[1], 16), match[2], int(target[1], 16) if target else None))
    return code


def read_kernels(usage: str, sass: str) -> list[Kernel]:
    """Join both outputs of cuobjdump on one object."""
    resources = parse_usage(usage)
    return [
        Kernel(demangle(symbol), arch, *resources[arch, symbol], instructions)
        for (arch, symbol), instructions in parse_instructions(sass).items()
    ]


def read_budgets(text: str) -> list[Budget]:
    """Read the TOML; an unknown key is a TypeError."""
    return [Budget(pattern, **row) for pattern, row in tomllib.loads(text).items()]


def find_faults(kernels: list[Kernel], budgets: list[Budget]) -> list[str]:
    """Return one sentence per broken rule."""
    faults = []
    used = set()
    for kernel in kernels:
        where = f"{kernel.name} on sm_{kernel.arch}"
        if kernel.stack or kernel.local or kernel.local_accesses:
            faults.append(
                f"{where} uses local memory: {kernel.stack} bytes of stack, {kernel.local} local, "
                f"{kernel.local_accesses} accesses"
            )
        rows = [budget for budget in budgets if fnmatch.fnmatchcase(kernel.name, budget.pattern)]
        if len(rows) != 1:
            names = ", ".join(row.pattern for row in rows) or "none"
            faults.append(f"{where} needs exactly one row in the budgets, has {names}")
            continue
        (budget,) = rows
        used.add(budget.pattern)
        if kernel.registers > budget.registers:
            faults.append(f"{where} uses {kernel.registers} registers, {budget.registers} are allowed")
        if kernel.loads_under_way < budget.loads:
            faults.append(f"{where} has {kernel.loads_under_way} vector loads under way, wanted are {budget.loads}")
        if kernel.ex2 > budget.ex2:
            faults.append(f"{where} has {kernel.ex2} exponentials in its code, {budget.ex2} are allowed")
    faults += [f"budget {budget.pattern} has no kernel" for budget in budgets if budget.pattern not in used]
    return faults


def table(kernels: list[Kernel]) -> str:
    """Lay out what every kernel uses."""
    width = max((len(kernel.name) for kernel in kernels), default=0)
    lines = [f"{'kernel':{width}}  arch  registers  stack  local  vector loads (under way)  ex2"]
    lines += [
        f"{kernel.name:{width}}  {kernel.arch:>4}  {kernel.registers:9}  {kernel.stack:5}  {kernel.local_accesses:5}"
        f"  {kernel.vector_loads:12} {f'({kernel.loads_under_way})':>11}  {kernel.ex2:3}"
        for kernel in sorted(kernels, key=lambda kernel: (kernel.name, int(kernel.arch)))
    ]
    return "\n".join(lines)


def run(cuobjdump: Path, option: str, path: Path) -> str:
    """Run cuobjdump, which looks for nvdisasm on PATH."""
    environment = {**os.environ, "PATH": f"{cuobjdump.resolve().parent}:{os.environ.get('PATH', '')}"}
    command = [str(cuobjdump.resolve()), option, str(path)]
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    ).stdout


def main(arguments: list[str]) -> int:
    """Parse the command line, read every object, print the table and the faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuobjdump", required=True, type=Path)
    parser.add_argument("--budgets", required=True, type=Path)
    parser.add_argument("objects", nargs="*", type=Path)
    options = parser.parse_args(arguments)
    if not options.objects:
        sys.stderr.write("no CUDA object in this build: add --config=cuda\n")
        return 1
    kernels = []
    for path in options.objects:
        kernels += read_kernels(run(options.cuobjdump, "-res-usage", path), run(options.cuobjdump, "-sass", path))
    sys.stdout.write(f"{table(kernels)}\n")
    faults = find_faults(kernels, read_budgets(options.budgets.read_text()))
    sys.stderr.write("".join(f"{fault}\n" for fault in faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
