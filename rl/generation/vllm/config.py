"""Settings of the vLLM engine (`policy.generation.vllm_cfg`)."""

from typing import Any

from pydantic import Field

from rl.core.config import ConfigModel, operational


class VllmEngineConfig(ConfigModel):
    """Engine arguments that Tandem sets; anything else goes through `vllm_kwargs`."""

    tensor_parallel_size: int = operational(1, ge=1, description="Tensor-parallel ranks of each engine.")
    kv_cache_gib: float = operational(1.0, gt=0, description="KV cache on a CPU, in GiB.")
    gpu_memory_utilization: float = operational(0.6, gt=0, le=1, description="Share of a GPU's memory for the engine.")
    block_size: int = operational(16, ge=1, description="Tokens per KV block; small ones share short prefixes.")
    enable_prefix_caching: bool = operational(True, description="Compute shared prompt prefixes once between refits.")
    enforce_eager: bool = operational(True, description="Skip graph capture and compilation.")
    max_num_seqs: int = operational(256, ge=1, description="Sequences that the engine runs at once.")
    start_timeout_s: float = operational(600.0, gt=0, description="Deadline of the engine's start, in seconds.")
    request_timeout_s: float = operational(900.0, gt=0, description="Deadline of one request, in seconds.")
    collect_usage_stats: bool = operational(False, description="Let vLLM report usage statistics.")
    vllm_kwargs: dict[str, Any] = Field(default_factory=dict, description="Further engine arguments; they win.")
