"""The vLLM backend, driver side: starts one VllmWorker per replica."""

from rl.cluster.worker_group import Cluster, WorkerRequest
from rl.generation.config import VllmGenerationConfig
from rl.generation.generator import GeneratorRequest
from rl.generation.pool import PooledGenerator
from rl.generation.vllm.worker import VllmWorker

# A call outlives the deadline that the worker keeps itself, so that the worker's own error arrives.
_MARGIN_S = 30.0


class VllmGenerator(PooledGenerator[VllmWorker]):
    """A Generator over vLLM engines."""


async def build(config: VllmGenerationConfig, cluster: Cluster, request: GeneratorRequest) -> VllmGenerator:
    """Start the engines of the `policy.generation` section.

    Raises:
        ConfigError: vLLM refuses the arguments, or the cluster lacks the resources.
        InfraError: an engine did not start; carries its own last lines.
    """
    engine = config.vllm_cfg
    longest = max(request.call_timeout_s, engine.start_timeout_s, engine.request_timeout_s)
    workers = WorkerRequest(
        name="generation",
        num_workers=config.num_replicas,
        num_threads=request.num_threads,
        gpus_per_worker=request.gpus_per_replica,
        # Calls of the refit need a free thread while every other one waits for a completion.
        concurrency=engine.max_num_seqs + 16,
        call_timeout_s=longest + _MARGIN_S,
    )
    group = await cluster.start_workers(VllmWorker, workers, engine, request)
    return VllmGenerator(group, VllmWorker, request.max_model_len)
