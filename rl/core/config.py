"""The base of every configuration class.

A package's `config.py` holds its classes; each field carries the type, range, unit, meaning and *the* default.
This file does not read files: see `rl.core.config_file`.

    class OptimizerConfig(ConfigModel):
        lr: float = Field(1e-6, gt=0, description="Learning rate.")
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

ROLE = "role"
OPERATIONAL = "operational"


class ConfigModel(BaseModel):
    """A frozen section of the configuration; unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )


def operational(default: Any, **constraints: Any) -> Any:
    """Declare a field that says how a run is carried out, not what it computes.

    Operational fields (paths, thread counts, deadlines, logging) do not take part in the comparison by which
    `--resume auto` recognises a run of the same semantic configuration.
    """
    return Field(default, json_schema_extra={ROLE: OPERATIONAL}, **constraints)
