"""Whether a run that has begun can go on as it is asked to. It reads files and changes none; free of torch."""

from pathlib import Path

from rl.controller.checkpoint import Checkpoint, check_optimizer_state, find_checkpoint
from rl.controller.config import MasterConfig
from rl.controller.run_folder import CHECKPOINTS, RunState, given_run, read_status
from rl.core.errors import ConfigError
from rl.core.fingerprint import semantic_fingerprint


def check_resume(config: MasterConfig, given: Path) -> str:
    """Check the target of --resume PATH; return in words where the run goes on.

    Raises:
        ConfigError: nothing can go on from there.
    """
    path, chosen = given_run(given, semantic_fingerprint(config))
    checkpoint = find_checkpoint(path / CHECKPOINTS, chosen)
    has_nothing_left(config, path, checkpoint)
    return f"{path}, after step {0 if checkpoint is None else checkpoint.step}"


def has_nothing_left(config: MasterConfig, path: Path, checkpoint: Checkpoint | None) -> bool:
    """Whether the run in `path`, whose latest checkpoint is given, is finished and has all the steps asked for.

    Raises:
        ConfigError: it has more steps than asked for, is finished without a checkpoint to go on from, or its checkpoint
            has no optimizer state.
    """
    done, asked = 0 if checkpoint is None else checkpoint.step, config.grpo.max_num_steps
    if done > asked:
        raise ConfigError(
            f"{path}: this run already has {done} steps, {asked} were asked for (grpo.max_num_steps={asked}); ask for "
            "more to go on, or start a new run with --resume never"
        )
    status = read_status(path)
    is_finished = status is not None and status.state is RunState.FINISHED
    if is_finished and checkpoint is None:
        raise ConfigError(
            f"{path}: this run is finished and has no checkpoint to go on from; start a new run with --resume never"
        )
    is_done = is_finished and done == asked
    if checkpoint is not None and not is_done:
        check_optimizer_state(checkpoint)
    return is_done
