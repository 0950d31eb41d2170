"""Settings of the `env` section: named environments."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rl.core.config import ConfigModel, operational


class ScorerPoolConfig(ConfigModel):
    """The process pool in which rewards are computed, outside the event loop."""

    num_workers: int = operational(1, ge=1, description="Scoring processes.")
    timeout_s: float = Field(
        10.0, gt=0, description="Deadline of scoring one completion (math) or one group (function), in seconds."
    )


class MathEnvConfig(ScorerPoolConfig):
    """Single turn; 1 when the answer equals the reference by math-verify, else 0."""

    kind: Literal["math"] = "math"
    literal_answer: bool = Field(
        False,
        description="The whole completion must be one value, and must have ended by itself; expressions do not count.",
    )
    builder: ClassVar[str] = "rl.environments.math:MathEnvironment"


class FunctionEnvConfig(ScorerPoolConfig):
    """Your own reward: `function(prompts, completions, **columns) -> list of floats`, called once per group."""

    kind: Literal["function"]
    target: str = Field(description="module:function")
    builder: ClassVar[str] = "rl.environments.function:FunctionEnvironment"


class ReasoningGymEnvConfig(ScorerPoolConfig):
    """Scores with the reasoning-gym task that made the prompt."""

    kind: Literal["reasoning_gym"]
    builder: ClassVar[str] = "rl.environments.reasoning_gym:ReasoningGymEnvironment"


EnvironmentConfig = Annotated[MathEnvConfig | FunctionEnvConfig | ReasoningGymEnvConfig, Field(discriminator="kind")]
EnvConfig = dict[str, EnvironmentConfig]
