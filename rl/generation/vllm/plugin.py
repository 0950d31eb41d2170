"""Makes vLLM know Tandem's weight transfer, in every process of an engine.

Installed from the wheel, it is an entry point of the group `vllm.general_plugins`, so that a server which others
started can be refitted:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "tandem"}'

Engines that Tandem starts come here through `worker_extension_cls` (see `extension`) and need no installation. It
changes nothing for engines of other backends: the receiver is imported when an engine asks for this one.
"""

from rl.generation.vllm.wire import BACKEND


def register() -> None:
    """Register the engine with vLLM's factory; idempotent, as vLLM asks of plug-ins."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "rl.generation.vllm.receiver", "TandemWeightEngine")
