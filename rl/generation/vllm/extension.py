"""The module that engines started by Tandem import in every worker process (`worker_extension_cls`).

vLLM resolves the class there before the worker is built, which registers the weight transfer without any installation.
It also lets the CPU attention take small blocks. Calls for which vLLM has no verb are in `worker_calls`.
"""

from typing import Any

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from rl.generation.vllm.plugin import register


class RefitExtension:
    """Nothing to mix in: importing the module is what counts."""


def _small_cpu_blocks(kv_cache_spec: Any = None) -> list[Any]:
    """Block sizes of vLLM's CPU attention. Its kernels take multiples of 16; the class declares multiples of 32 only.

    A block is the unit of prefix sharing: with 32 tokens the samples of a short prompt would share nothing.
    """
    return [MultipleOf(16)]


CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(_small_cpu_blocks)
register()
