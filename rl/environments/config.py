"""Settings of the `env` section: named environments."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from rl.core.config import ConfigModel, operational

RESULT_PLACE = "{result}"
MATH_COMPONENTS = ("correctness", "integer", "format")
_LONGEST_NAME = 64
_LARGEST_WEIGHT = 1e6


def component_name_fault(name: str) -> str:
    """Return why a reward component cannot be named like that in logs; empty when it can."""
    if not name.strip():
        return "name is empty"
    if len(name) > _LONGEST_NAME:
        return f"name {name!r:.40} has {len(name)} characters, at most {_LONGEST_NAME} are allowed"
    return "" if name.isprintable() else f"name {name!r} has characters that cannot be printed"


# Of a component in the reward.
Weight = Annotated[float, Field(ge=-_LARGEST_WEIGHT, le=_LARGEST_WEIGHT)]


class EnvConfigBase(ConfigModel):
    """What every environment has."""

    # Whether prompts need a reference answer.
    needs_answer: ClassVar[bool] = False

    @property
    def is_multi_turn(self) -> bool:
        """Whether a rollout may take several turns."""
        return False

    @property
    def component_names(self) -> tuple[str, ...]:
        """Names of the reward components, as far as the configuration tells."""
        return ()


class ScorerPoolConfig(EnvConfigBase):
    """The process pool in which rewards are computed, outside the event loop."""

    num_workers: int = operational(1, ge=1, description="Scoring processes.")
    timeout_s: float = Field(
        10.0,
        gt=0,
        description="Deadline of scoring one completion (math), one group (function) or one tool call, in seconds.",
    )


class ThinkingConfig(EnvConfigBase):
    """What is expected of a completion's form."""

    think_tags: bool = Field(
        False,
        description="Flag completions whose <think> tags are not balanced; see grpo.malformed_thinking_advantage.",
    )


class SandboxLimits(ConfigModel):
    """What one run of untrusted code may use; whoever exceeds a limit is ended or refused by the kernel."""

    wall_s: float = Field(5.0, gt=0, description="Time from the start of the program to its end, in seconds.")
    cpu_s: int = Field(5, ge=1, description="Processor time of each process, in seconds.")
    memory_mib: int = Field(512, ge=64, description="Memory of each process, and of all together, in MiB.")
    processes: int = Field(16, ge=1, description="Processes and threads at the same time.")
    open_files: int = Field(64, ge=16, description="Open files of each process.")
    file_mib: int = Field(16, ge=1, description="Size of one file, in MiB.")
    scratch_mib: int = Field(32, ge=1, description="Size of the private /tmp, the only folder to write to, in MiB.")
    scratch_files: int = Field(1000, ge=1, description="Files and folders in it; a program that makes more is ended.")
    output_kib: int = Field(64, ge=1, description="Bytes on standard output and standard error together, in KiB.")


class MathEnvConfig(ScorerPoolConfig, ThinkingConfig):
    """Single turn; 1 when the answer equals the reference by math-verify, else 0."""

    kind: Literal["math"] = "math"
    literal_answer: bool = Field(
        False,
        description="The whole completion must be one value, and must have ended by itself; expressions do not count.",
    )
    builder: ClassVar[str] = "rl.environments.math:MathEnvironment"
    needs_answer: ClassVar[bool] = True


class MathMultiRewardEnvConfig(ThinkingConfig):
    """Single turn; the weighted sum of correctness, integer and format, each 0 or 1 and a component of the reward."""

    kind: Literal["math_multi_reward"]
    answer_form: Literal["tags", "line"] = Field(
        "tags",
        description="Where the answer stands: in <answer> tags after <think> tags, or alone in the completion.",
    )
    weights: dict[Literal["correctness", "integer", "format"], Weight] = Field(
        default_factory=dict, description="Weight of each component in the reward; 1 where none is given."
    )
    builder: ClassVar[str] = "rl.environments.math_multi_reward:MathMultiRewardEnvironment"
    needs_answer: ClassVar[bool] = True

    @property
    def component_names(self) -> tuple[str, ...]:
        """The three components."""
        return MATH_COMPONENTS


class FunctionEnvConfig(ScorerPoolConfig, ThinkingConfig):
    """Your own reward: `function(prompts, completions, **columns) -> list of rewards`, called once per group.

    A reward is a number, or a mapping {component: number}. The reward of a sample is then the weighted sum of its
    components. A sample whose component is missing, None or not finite has no reward at all and does not vote in its
    group's baseline: it never counts as zero.
    """

    kind: Literal["function"]
    target: str | None = Field(None, description="module:function")
    targets: dict[str, str] = Field(
        default_factory=dict, description="Instead of target: one module:function for each reward component, by name."
    )
    weights: dict[str, Weight] = Field(
        default_factory=dict,
        description="Weight of every reward component, by name; empty = 1 each, or plain numbers as rewards.",
    )
    builder: ClassVar[str] = "rl.environments.function:FunctionEnvironment"

    @property
    def component_names(self) -> tuple[str, ...]:
        """The components named by targets or weights."""
        return tuple(self.targets) or tuple(self.weights)

    @model_validator(mode="after")
    def _components_can_be_logged(self) -> Self:
        for name in self.component_names:
            if fault := component_name_fault(name):
                raise ValueError(f"a reward component's {fault}")
        return self

    @model_validator(mode="after")
    def _one_source_of_rewards(self) -> Self:
        if (self.target is None) == (not self.targets):
            raise ValueError("needs either target (module:function) or targets ({component: module:function})")
        if self.targets and self.weights and set(self.weights) != set(self.targets):
            names = f"weights names {', '.join(self.weights)} and targets {', '.join(self.targets)}"
            raise ValueError(f"{names}; every component needs one function and one weight (0 to only log it)")
        return self


class ReasoningGymEnvConfig(ScorerPoolConfig, ThinkingConfig):
    """Scores with the reasoning-gym task that made the prompt."""

    kind: Literal["reasoning_gym"]
    builder: ClassVar[str] = "rl.environments.reasoning_gym:ReasoningGymEnvironment"


class SlidingPuzzleEnvConfig(EnvConfigBase):
    """Multi-turn; 1 when the tiles stand in order, else 0. A completion holds a move as <action>up</action>."""

    kind: Literal["sliding_puzzle"]
    max_moves: int = Field(
        20, ge=1, description="Completions after which a puzzle that is not solved ends; faulty ones count too."
    )
    answer_role: Literal["tool", "user"] = Field("user", description="Role of the message that shows the new board.")
    builder: ClassVar[str] = "rl.environments.sliding_puzzle:SlidingPuzzleEnvironment"

    @property
    def is_multi_turn(self) -> bool:
        """A move per turn."""
        return True


class ToolConfigBase(ConfigModel):
    """What every tool has, beside the `target` that is called: module:function."""

    # A function that is called once in each process before the first call; empty = none.
    preparation: ClassVar[str] = ""

    def settings(self) -> dict[str, Any]:
        """Arguments of the function that no call may give."""
        return {}


class CalculatorToolConfig(ToolConfigBase):
    """Arithmetic: {"expression": "2*(3+4)"}; numbers, + - * / // % ** and abs, min, max, round, sqrt."""

    kind: Literal["calculator"]
    target: ClassVar[str] = "rl.environments.calculator:calculate"


class PythonToolConfig(ToolConfigBase):
    """Python: {"code": "print(2*3)"}; a new program each time, in a sandbox, answered with what it printed."""

    kind: Literal["python"]
    limits: SandboxLimits = Field(SandboxLimits(), description="What a program may use.")
    target: ClassVar[str] = "rl.environments.python_tool:run_python"
    preparation: ClassVar[str] = "rl.environments.python_tool:prepare_python"

    def settings(self) -> dict[str, Any]:
        """Arguments of the function that no call may give."""
        return {"limits": self.limits}


class FunctionToolConfig(ToolConfigBase):
    """Your own tool: the arguments of a call are those of the function, checked against its annotations."""

    kind: Literal["function"]
    target: str = Field(description="module:function")


ToolConfig = Annotated[CalculatorToolConfig | PythonToolConfig | FunctionToolConfig, Field(discriminator="kind")]
FinalScorerConfig = Annotated[MathEnvConfig | MathMultiRewardEnvConfig | FunctionEnvConfig, Field(discriminator="kind")]


class ToolsEnvConfig(ScorerPoolConfig):
    """Multi-turn; a completion calls tools by JSON between tags, and one without a call is the final answer."""

    kind: Literal["tools"]
    tools: dict[str, ToolConfig] = Field(min_length=1, description="Tools by the name that a call gives.")
    scorer: FinalScorerConfig = Field(MathEnvConfig(), description="What scores the final answer.")
    answer_prefix: str = Field(
        "", description="Text that stands before the final answer; a completion without it has no answer."
    )
    max_tool_calls: int = Field(4, ge=1, description="Most calls of one rollout; further ones get an error.")
    call_open: str = Field("<tool_call>", min_length=1, description="Opens a call.")
    call_close: str = Field("</tool_call>", min_length=1, description="Closes a call.")
    result_role: Literal["tool", "user"] = Field("tool", description="Role of the message that answers a call.")
    result_template: str = Field(RESULT_PLACE, description="Text of that message; {result} is what the tool gave.")
    max_result_chars: int = Field(1000, ge=1, description="Longest result in characters; longer ones are cut.")
    builder: ClassVar[str] = "rl.environments.tools:ToolsEnvironment"

    @property
    def is_multi_turn(self) -> bool:
        """A turn per call."""
        return True

    @property
    def component_names(self) -> tuple[str, ...]:
        """The components of the scorer."""
        return self.scorer.component_names

    @model_validator(mode="after")
    def _calls_begin_and_end(self) -> Self:
        if self.call_open == self.call_close:
            raise ValueError(f"call_open and call_close are both {self.call_open!r}; a call needs two different tags")
        return self

    @model_validator(mode="after")
    def _programs_end_before_their_call(self) -> Self:
        for name, tool in self.tools.items():
            if isinstance(tool, PythonToolConfig) and tool.limits.wall_s >= self.timeout_s:
                raise ValueError(
                    f"tools.{name}.limits.wall_s={tool.limits.wall_s:g} must be below timeout_s={self.timeout_s:g}, "
                    "or the model is never told that its program was too slow; raise timeout_s"
                )
        return self

    @field_validator("result_template")
    @classmethod
    def _shows_the_result(cls, value: str) -> str:
        if RESULT_PLACE not in value:
            raise ValueError(f"{value!r} does not contain {RESULT_PLACE}, so no tool could answer")
        return value


class CodeEnvConfig(ScorerPoolConfig, ThinkingConfig):
    """The program in a completion is run in a sandbox against the row's tests, its column `tests`."""

    kind: Literal["code"]
    reward: Literal["all", "share"] = Field(
        "all", description="1 when all tests pass, else 0 (later tests are left out); or the share that passes."
    )
    open_tag: str = Field("", description="Text before the program; empty: it is the last fenced block.")
    close_tag: str = Field("", description="Text after it; set together with open_tag.")
    max_attempts: int = Field(1, ge=1, description="Programs per rollout; a failed one is answered with why.")
    feedback_role: Literal["tool", "user"] = Field("user", description="Role of the message that answers a failure.")
    max_feedback_chars: int = Field(1000, ge=2, description="Longest answer in characters; the middle is cut out.")
    timeout_s: float = Field(
        20.0, gt=0, description="Time for all tests of one program, in seconds; tests without time left fail."
    )
    limits: SandboxLimits = Field(SandboxLimits(), description="What a program may use in each test.")
    builder: ClassVar[str] = "rl.environments.code:CodeEnvironment"

    @property
    def is_multi_turn(self) -> bool:
        """A turn per attempt."""
        return self.max_attempts > 1

    @model_validator(mode="after")
    def _tags_and_times_fit(self) -> Self:
        if bool(self.open_tag) != bool(self.close_tag):
            raise ValueError("open_tag and close_tag are set together, or neither is")
        if self.limits.wall_s > self.timeout_s:
            raise ValueError(f"limits.wall_s={self.limits.wall_s:g} exceeds timeout_s={self.timeout_s:g}; lower it")
        return self


class RewardModelEnvConfig(ScorerPoolConfig, ThinkingConfig):
    """Single turn; the reward is the score of a sequence classifier with one output."""

    kind: Literal["reward_model"]
    model_name: str = Field(description="Hugging Face folder or hub id of the classifier.")
    device: str = operational("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="Where it runs: cpu, cuda or cuda:1.")
    precision: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Its weights and arithmetic.")
    micro_batch_size: int = operational(8, ge=1, description="Conversations of a group that are scored at once.")
    trust_remote_code: bool = Field(False, description="Run code that the model's folder brings.")
    timeout_s: float = Field(120.0, gt=0, description="Deadline of scoring one group, in seconds.")
    builder: ClassVar[str] = "rl.environments.reward_model:RewardModelEnvironment"


EnvironmentConfig = Annotated[
    MathEnvConfig
    | MathMultiRewardEnvConfig
    | FunctionEnvConfig
    | ReasoningGymEnvConfig
    | SlidingPuzzleEnvConfig
    | ToolsEnvConfig
    | CodeEnvConfig
    | RewardModelEnvConfig,
    Field(discriminator="kind"),
]
EnvConfig = dict[str, EnvironmentConfig]
