"""check_sass.py on machine code of a few lines, in the form that cuobjdump prints."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tools.wheel import make_wheel

SCRIPT = Path(make_wheel.__file__).parents[2] / "third_party/cuda/check_sass.py"
SYMBOL = (
    "_ZN6tandem4cuda50_GLOBAL__N__214dcf6e_17_row_stats_cuda_cu_8c16f2b7"
    "11StatsKernelIfLb0EEEvNS1_4RowsIT_EENS_8RowStatsES6_"
)
USAGE = f"""
Fatbin elf code:
================
arch = sm_80
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function {SYMBOL}:
  REG:32 STACK:0 SHARED:96 LOCAL:0 CONSTANT[0]:480 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_90
 Function {SYMBOL}:
  REG:48 STACK:8 SHARED:1120 LOCAL:0 CONSTANT[0]:600 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = f"""
arch = sm_80
	code for sm_80
		Function : {SYMBOL}
	.headerflags	@"EF_CUDA_SM80"
        /*0000*/                   LDG.E.128 R4, [R2.64] ;              /* 0x00000a00ff017624 */
                                                                        /* 0x000fe400078e00ff */
        /*0010*/                   LDG.E.128.CONSTANT R8, [R2.64] ;     /* 0x00000a00ff017624 */
        /*0020*/                   LDG.E.U16 R12, [R2.64] ;             /* 0x00000a00ff017624 */
        /*0030*/                   MUFU.EX2 R5, R5 ;                    /* 0x00000a00ff017624 */
        /*0040*/              @!P0 BRA 0x60 ;                           /* 0x00000a00ff017624 */
        /*0050*/                   LDG.E.ENL2.256 R16, R20, [R2.64] ;   /* 0x00000a00ff017624 */
        /*0060*/               @P1 BRA 0x0 ;                            /* 0x00000a00ff017624 */
        /*0070*/                   LDG.E.128 R4, [R2.64] ;              /* 0x00000a00ff017624 */
        /*0080*/                   EXIT ;                               /* 0x00000a00ff017624 */
arch = sm_90
		Function : {SYMBOL}
        /*0000*/                   STL [R1], R4 ;                       /* 0x00000a00ff017624 */
        /*0010*/                   EXIT ;                               /* 0x00000a00ff017624 */
"""


@pytest.fixture(scope="module")
def check_sass() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_sass", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_reads_both_architectures(check_sass: ModuleType) -> None:
    kernels = check_sass.read_kernels(USAGE, SASS)
    assert [(kernel.name, kernel.arch, kernel.registers, kernel.stack) for kernel in kernels] == [
        ("StatsKernel<float, false>", "80", 32, 0),
        ("StatsKernel<float, false>", "90", 48, 8),
    ]


def test_counts_loads_that_are_under_way_together_in_a_loop(check_sass: ModuleType) -> None:
    first, second = check_sass.read_kernels(USAGE, SASS)
    assert first.vector_loads == 4  # one behind the loop, one behind a branch, and not the two bytes
    assert first.loads_under_way == 2
    assert first.ex2 == 1
    assert (first.local_accesses, second.local_accesses) == (0, 1)


def test_a_branch_target_ends_a_piece_of_code(check_sass: ModuleType) -> None:
    sass = SASS.replace("BRA 0x0 ;", "BRA 0x10 ;")
    assert check_sass.read_kernels(USAGE, sass)[0].loads_under_way == 1


def test_a_kernel_within_its_budget_has_no_fault(check_sass: ModuleType) -> None:
    kernel = check_sass.read_kernels(USAGE, SASS)[0]
    budgets = check_sass.read_budgets('["StatsKernel<float, *>"]\nregisters = 32\nloads = 2\nex2 = 1\n')
    assert check_sass.find_faults([kernel], budgets) == []


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("registers = 31\nloads = 2\nex2 = 1", "uses 32 registers, 31 are allowed"),
        ("registers = 32\nloads = 3\nex2 = 1", "has 2 vector loads under way, wanted are 3"),
        ("registers = 32\nloads = 2", "has 1 exponentials in its code, 0 are allowed"),
    ],
)
def test_a_broken_budget_is_named(check_sass: ModuleType, row: str, fault: str) -> None:
    kernel = check_sass.read_kernels(USAGE, SASS)[0]
    faults = check_sass.find_faults([kernel], check_sass.read_budgets(f'["StatsKernel<*>"]\n{row}\n'))
    assert faults == [f"StatsKernel<float, false> on sm_80 {fault}"]


def test_local_memory_is_a_fault_whatever_the_budget(check_sass: ModuleType) -> None:
    kernel = check_sass.read_kernels(USAGE, SASS)[1]
    faults = check_sass.find_faults([kernel], check_sass.read_budgets('["*"]\nregisters = 255\n'))
    assert faults == ["StatsKernel<float, false> on sm_90 uses local memory: 8 bytes of stack, 0 local, 1 accesses"]


def test_kernels_and_rows_must_match_one_to_one(check_sass: ModuleType) -> None:
    kernel = check_sass.read_kernels(USAGE, SASS)[0]
    budgets = check_sass.read_budgets("[OtherKernel]\nregisters = 32\n")
    faults = check_sass.find_faults([kernel], budgets)
    assert faults == [
        "StatsKernel<float, false> on sm_80 needs exactly one row in the budgets, has none",
        "budget OtherKernel has no kernel",
    ]
    twice = check_sass.read_budgets('["Stats*"]\nregisters = 32\n["*"]\nregisters = 32\n')
    assert check_sass.find_faults([kernel], twice)[0].endswith("has Stats*, *")


def test_an_unknown_key_is_refused(check_sass: ModuleType) -> None:
    with pytest.raises(TypeError, match="smem"):
        check_sass.read_budgets("[A]\nregisters = 1\nsmem = 2\n")


def test_names_lose_namespaces_and_parameters(check_sass: ModuleType) -> None:
    assert check_sass.demangle("_ZN1a1KIfEEvT_") == "K<float>"
    assert check_sass.demangle(SYMBOL) == "StatsKernel<float, false>"
    assert check_sass.demangle("plain_c") == "plain_c"
