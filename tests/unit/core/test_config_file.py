"""Files inherit, are validated, and every error says where it is and what to do."""

from pathlib import Path

import pytest

from rl.controller.config import MasterConfig
from rl.core.config_file import CLASS_DEFAULT, COMMAND_LINE, build, load, unknown_keys
from rl.core.errors import ConfigError

COMPLETE = """\
policy:
  model_name: some/model
data:
  train: {kind: few_shot_addition}
env:
  math: {kind: math}
"""


def _write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    _write(tmp_path, complete=COMPLETE)
    return tmp_path


def _errors(text: str, *overrides: str) -> str:
    """The message for a file that adds `text` to a complete one; its first line is line 2."""
    Path("x.yaml").write_text("defaults: complete.yaml\n" + text)
    with pytest.raises(ConfigError) as caught:
        build(load(Path("x.yaml"), overrides, MasterConfig), MasterConfig, allow_unknown=False)
    return str(caught.value)


def test_sections_merge_and_lists_replace(folder: Path) -> None:
    _write(folder, parent="a: 1\nb: {c: 2}\nl: [1, 2]\n", child="defaults: parent.yaml\nb: {d: 3}\nl: [3]\n")
    assert load(folder / "child.yaml", []).values == {"a": 1, "b": {"c": 2, "d": 3}, "l": [3]}


def test_the_override_mark_replaces_at_any_depth(folder: Path) -> None:
    _write(
        folder,
        parent="b: {c: 2, deep: {x: 1}}\n",
        shallow="defaults: parent.yaml\nb: {_override_: true, d: 3}\n",
        deep="defaults: parent.yaml\nb: {deep: {_override_: true, y: 2}}\n",
    )
    assert load(folder / "shallow.yaml", []).values == {"b": {"d": 3}}
    assert load(folder / "deep.yaml", []).values == {"b": {"c": 2, "deep": {"y": 2}}}


def test_later_parents_override_and_the_child_overrides_all(folder: Path) -> None:
    (folder / "sub").mkdir()
    _write(folder, one="a: 1\nb: 1\nc: 1\n", two="a: 2\nb: 2\n", child="defaults: [one.yaml, two.yaml]\na: 3\n")
    _write(folder / "sub", grandchild="defaults: ../child.yaml\n")
    assert load(folder / "sub" / "grandchild.yaml", []).values == {"a": 3, "b": 2, "c": 1}


def test_what_is_derived_follows_a_childs_change(folder: Path) -> None:
    _write(folder, parent="base: 42\nderived: ${base}\n", child="defaults: parent.yaml\nbase: 43\n")
    assert load(folder / "child.yaml", []).values["derived"] == 43
    assert load(folder / "child.yaml", ["base=44"]).values["derived"] == 44


def test_two_ways_to_the_same_parent_are_fine(folder: Path) -> None:
    _write(
        folder,
        top="a: 1\n",
        left="defaults: top.yaml\n",
        right="defaults: top.yaml\n",
        child="defaults: [left.yaml, right.yaml]\n",
    )
    assert load(folder / "child.yaml", []).values == {"a": 1}


def test_a_circle_of_parents_is_an_error_that_names_it(folder: Path) -> None:
    _write(folder, a="defaults: b.yaml\n", b="defaults: c.yaml\n", c="defaults: a.yaml\n")
    with pytest.raises(ConfigError, match=r"circle: a.yaml -> b.yaml -> c.yaml -> a.yaml"):
        load(Path("a.yaml"), [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: nowhere.yaml\n", r"x.yaml:1: parent 'nowhere.yaml' does not exist"),
        ("defaults: {a: b}\n", r"x.yaml:1: 'defaults' must be the path"),
        ("- 1\n", r"a configuration is a mapping"),
    ],
)
def test_a_broken_file_is_an_error_with_its_line(folder: Path, text: str, message: str) -> None:
    _write(folder, x=text)
    with pytest.raises(ConfigError, match=message):
        load(Path("x.yaml"), [])


def test_a_missing_or_binary_file_is_an_error(folder: Path) -> None:
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="nowhere.yaml does not exist"):
        load(Path("nowhere.yaml"), [])
    with pytest.raises(ConfigError, match="binary.yaml cannot be read"):
        load(Path("binary.yaml"), [])


def test_every_value_has_a_source(folder: Path) -> None:
    _write(folder, x="defaults: complete.yaml\ngrpo:\n  seed: 1\n  val_period: ${.seed}\n")
    tree = load(Path("x.yaml"), ["grpo.max_num_steps=5", "policy.generation.stop_strings=[a]"])
    assert str(tree.source_of("grpo.seed")) == "x.yaml:3"
    assert str(tree.source_of("grpo.val_period")) == "x.yaml:4"
    assert str(tree.source_of("policy.model_name")) == "complete.yaml:2"
    assert str(tree.source_of("policy.generation.stop_strings.0")) == "command line"
    assert tree.source_of("grpo.max_num_steps") == COMMAND_LINE
    assert tree.source_of("grpo.val_at_end") == CLASS_DEFAULT


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "grpo:\n  num_promts_per_step: 8\n",
            "x.yaml:3: unknown key grpo.num_promts_per_step; did you mean num_prompts_per_step?",
        ),
        (
            "policy:\n  max_new_tokens: 8\n",
            "x.yaml:3: unknown key policy.max_new_tokens; it belongs to policy.generation",
        ),
        ("grpo:\n  temperature: 1.0\n", "it belongs to policy.generation or eval"),
        (
            "checkpointing:\n  checkpoint_dir: x\n",
            "x.yaml:3: unknown key checkpointing.checkpoint_dir: checkpoints stand in",
        ),
        ("grpo:\n  async_grpo:\n    enabled: true\n", "synchronous is async_rl.sampler.max_lookahead_versions: 0"),
        (
            "policy:\n  generation:\n    vllm_cfg:\n      bloc_size: 8\n",
            "unknown key policy.generation.vllm_cfg.bloc_size; did you mean block_size?",
        ),
        (
            "policy:\n  generation:\n    backend: hf\n    vllm_cfg: {}\n",
            "vllm_cfg belongs to backend vllm, but policy.generation.backend is hf (x.yaml:4)",
        ),
        ("data:\n  train:\n    kind: jsonl\n    path: x\n    part: train\n", "part belongs to kind few_shot_addition"),
        (
            "env:\n  math:\n    literal_anser: true\n",
            "unknown key env.math.literal_anser; did you mean literal_answer?",
        ),
        ("grp:\n  seed: 1\n", "x.yaml:2: unknown key grp; did you mean grpo?"),
        ("grpo:\n  zzz: 1\n", "unknown key grpo.zzz; keys here: "),
        ("grpo:\n  seed: eight\n", "x.yaml:3: grpo.seed=eight: must be int >= 0 and <= 4294967295 (Seed of"),
        ('grpo:\n  seed: "8"\n', 'x.yaml:3: grpo.seed="8": must be int >= 0'),
        ("grpo:\n  val_at_start: 1\n", "grpo.val_at_start=1: must be true or false"),
        ("grpo:\n  seed: true\n", "grpo.seed=true: must be int >= 0"),
        ("grpo:\n  max_num_steps: 0\n", "grpo.max_num_steps=0: must be int >= 1"),
        ("grpo:\n  max_num_steps: 1.5\n", "grpo.max_num_steps=1.5: must be int >= 1"),
        ("loss_fn:\n  ratio_clip_min: 1.5\n", "loss_fn.ratio_clip_min=1.5: must be float >= 0 and <= 1"),
        ("loss_fn:\n  ratio_clip_max: .nan\n", "loss_fn.ratio_clip_max=.nan: must be float >= 0"),
        (
            "policy:\n  precision: float23\n",
            "policy.precision=float23: must be float32 or bfloat16; did you mean float32?",
        ),
        ("policy:\n  optimizer:\n    kwargs: {betas: [0.9, 1.5]}\n", "betas.1=1.5: must be [float >= 0 and < 1, float"),
        ("policy:\n  optimizer:\n    kwargs: {lr: .inf}\n", "policy.optimizer.kwargs.lr=.inf: must be float >= 0"),
        ("policy:\n  optimizer:\n    kwargs:\n      betas: [0.9]\n", "policy.optimizer.kwargs.betas"),
        (
            "data:\n  train:\n    kind: jsnl\n",
            "data.train.kind=jsnl: must be one of jsonl, hf, reasoning_gym, few_shot_addition, calculator_products, "
            "sliding_puzzle; did you mean jsonl?",
        ),
        ("data:\n  validation:\n    part: heldout\n", "x.yaml:3: data.validation.kind is required: one of jsonl, hf"),
        ("policy:\n  generation:\n    backend: sglang\n", "policy.generation.backend=sglang: must be one of vllm, hf"),
        (
            "grpo:\n  num_generations_per_prompt: 100000000\n",
            "x.yaml:3: grpo.num_generations_per_prompt=100000000: must be int >= 1 and <= 10000",
        ),
        ("grpo: 3\n", "x.yaml:2: grpo=3: must be a section"),
        ("cluster:\n", "x.yaml:2: cluster=null: must be a section"),
        (
            "policy:\n  model_name: ???\n",
            "x.yaml:3: policy.model_name must be set, for example on the command line: policy.model_name=",
        ),
        ("data:\n  train:\n    _override_: true\n    kind: jsonl\n", "x.yaml:3: data.train.path is required (File"),
    ],
)
def test_a_bad_key_or_value_is_explained(text: str, message: str) -> None:
    assert message in _errors(text)


@pytest.mark.usefixtures("folder")
def test_bad_overrides_are_explained() -> None:
    assert _errors("", "grpo.sed=1") == "command line: unknown key grpo.sed; did you mean seed?"
    assert "it belongs to grpo: write grpo.num_prompts_per_step" in _errors("", "num_prompts_per_step=4")
    assert "command line: grpo.seed=-1: must be int >= 0" in _errors("", "grpo.seed=-1")


@pytest.mark.usefixtures("folder")
def test_all_errors_are_listed_at_once() -> None:
    message = _errors("grpo:\n  sed: 1\n  max_num_steps: 0\npolicy:\n  model_name: ???\n", "env.math.kind=mth")
    assert message.startswith("4 errors in the configuration:\n")
    for part in ("grpo.sed;", "grpo.max_num_steps=0", "policy.model_name must be set", "env.math.kind=mth"):
        assert part in message


@pytest.mark.usefixtures("folder")
def test_missing_sections_are_errors(folder: Path) -> None:
    _write(folder, empty="")
    with pytest.raises(ConfigError, match="empty.yaml: policy is required"):
        build(load(Path("empty.yaml"), []), MasterConfig, allow_unknown=False)


def test_unknown_keys_can_be_allowed_and_are_listed(folder: Path) -> None:
    _write(
        folder,
        x="defaults: complete.yaml\ngrpo: {sed: 1, seed: 7}\nmine: {a: 1}\npolicy: {generation: {vllm_cfg: {no: 1}}}\n",
    )
    tree = load(Path("x.yaml"), ["policy.foo=1"])
    config = build(tree, MasterConfig, allow_unknown=True)
    assert config.grpo.seed == 7
    listed = {key: str(source) for key, source in unknown_keys(tree, config)}
    assert listed == {
        "grpo.sed": "x.yaml:2",
        "mine": "x.yaml:3",
        "policy.generation.vllm_cfg.no": "x.yaml:4",
        "policy.foo": "command line",
    }


def test_allowing_unknown_keys_still_refuses_bad_values(folder: Path) -> None:
    _write(folder, x="defaults: complete.yaml\ngrpo: {sed: 1, seed: x}\n")
    with pytest.raises(ConfigError, match=r"grpo.seed=x"):
        build(load(Path("x.yaml"), []), MasterConfig, allow_unknown=True)


def test_own_keys_under_extras_are_free(folder: Path) -> None:
    config = build(load(folder / "complete.yaml", ["extras.team.name=x"]), MasterConfig, allow_unknown=False)
    assert config.extras == {"team": {"name": "x"}}


def test_a_value_of_a_shipped_file_elsewhere_has_a_short_source(folder: Path) -> None:
    _write(folder, mine="defaults: base\ndata: {env_name: mine}\n")
    tree = load(folder / "mine.yaml", [])
    assert str(tree.source_of("env.math.kind")).startswith("shipped base.yaml:")
    assert str(tree.source_of("data.env_name")) == "mine.yaml:2"


def test_a_parent_without_a_folder_that_is_not_beside_the_file_is_a_shipped_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: base\ngrpo:\n  seed: 3\n")
    tree = load(path, [])
    assert tree.values["env"]["math"]["kind"] == "math"
    assert tree.source_of("env.math.kind").origin.endswith("base.yaml")
