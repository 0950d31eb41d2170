"""Are the native kernels there that a policy will use? Asked before models load and engines start."""

from rl.core.errors import ConfigError
from rl.core.native import cuda_library_failure, require_native
from rl.ops.logprobs import LogprobImpl


def require_kernels(impl: LogprobImpl, *, on_gpu: bool) -> None:
    """Load the operators that `policy.logprob_impl` asks for; plain torch asks for none.

    Raises:
        FatalError: the library of operators is missing.
        ConfigError: the library of CUDA kernels is missing, and the policy is trained on a GPU.
    """
    if impl == "torch":
        return
    require_native()
    failure = cuda_library_failure() if on_gpu else None
    if failure is not None:
        raise ConfigError(
            f"policy.logprob_impl=native trains on a GPU with CUDA kernels that cannot be loaded: {failure}; set "
            "policy.logprob_impl=torch to train without them"
        )
