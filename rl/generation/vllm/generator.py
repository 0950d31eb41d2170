"""The vLLM backend, driver side: starts one VllmWorker per replica."""

from rl.cluster.worker_group import Cluster
from rl.generation.config import VllmGenerationConfig
from rl.generation.generator import GeneratorRequest
from rl.generation.pool import PooledGenerator, replicas_of
from rl.generation.vllm.worker import VllmWorker


async def build(
    config: VllmGenerationConfig, cluster: Cluster, request: GeneratorRequest
) -> PooledGenerator[VllmWorker]:
    """Start the engines of the `policy.generation` section.

    Raises:
        ConfigError: vLLM refuses the arguments, or the cluster lacks the resources.
        InfraError: an engine did not start; carries its own last lines.
    """
    engine = config.vllm_cfg
    longest_s = max(request.call_timeout_s, engine.start_timeout_s, engine.request_timeout_s)
    workers = replicas_of(request, config.num_replicas, engine.max_num_seqs, longest_s)
    keeps_caches = not config.refit_cfg.recompute_kv_cache_after_weight_updates
    group = await cluster.start_workers(VllmWorker, workers, engine, request, keeps_caches)
    return PooledGenerator(group, VllmWorker, request, engine.max_num_seqs, config.ranks_per_replica)
