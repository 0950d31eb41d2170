"""Every native operator on the GPU against the CPU's and float64; skipped where there is no GPU.

tools/gpu_check --compile-only && RL_NATIVE_DIR=/tmp/tandem_native python3 -m pytest tests/gpu
"""

import pytest
import torch

from tools.gpu.parity import CHECKS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("name", CHECKS)
def test_agrees(name: str) -> None:
    result = CHECKS[name]()
    assert result.ok, f"{result.worst} is more than {result.tolerance}"
