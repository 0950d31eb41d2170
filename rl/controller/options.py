"""What the command line tells a run beside its configuration; free of torch, so that it starts at once."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RunOptions:
    """Options of one run.

    Attributes:
        resume: `auto` (go on in the latest unfinished run folder of the same semantic configuration), `never`, or the
            path of a run folder or checkpoint.
        config_name: name of the configuration file without its suffix; the default `logger.log_dir` is results/<this>.
    """

    resume: str
    config_name: str
