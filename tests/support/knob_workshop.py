"""Models, datasets and a tiny run on disk, over which settings are looked at; `$W` in an override is its folder."""

import json
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, DatasetDict

from rl.controller.config import MasterConfig
from rl.controller.load import load_config
from rl.core.config_tree import ConfigTree
from tests.support.tiny_classifier import make_classifier
from tests.support.tiny_model import make_tiny_model, make_tiny_tokenizer
from tests.support.tiny_run import TinyRun, make_tiny_run

# Other words for the same roles, so that texts differ.
OTHER_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
MODEL_CLASS = "AutoModelForSequenceClassification"


@dataclass(frozen=True)
class Case:
    """A checked configuration, where its values were written, and the files that it names."""

    config: MasterConfig
    tree: ConfigTree
    folder: Path


@dataclass(frozen=True)
class Workshop:
    """The files."""

    folder: Path
    run: TinyRun

    def load(self, overrides: tuple[str, ...]) -> Case:
        """The tiny run's configuration with these overrides, checked."""
        config, tree = load_config(self.run.config, [text.replace("$W", str(self.folder)) for text in overrides])
        return Case(config, tree, self.folder)


def make_workshop(folder: Path) -> Workshop:
    """Write everything into `folder`."""
    run = make_tiny_run(folder)
    for name, template in (("other", OTHER_TEMPLATE), ("silent", None)):
        make_tiny_model(folder / name, seed=1)
        tokenizer = make_tiny_tokenizer()
        tokenizer.chat_template = template or tokenizer.chat_template
        tokenizer.save_pretrained(folder / name)
    make_classifier(folder / "classifier")
    make_classifier(folder / "judge", seed=5)
    _bring_code(make_classifier(folder / "coded"))
    rows = [
        {"prompt": "q" * (index % 5 + 1), "question": f"why {index}", "answer": str(index), "gold": f"g{index}"}
        for index in range(6)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits = {"train": Dataset.from_list(rows), "test": Dataset.from_list(rows[:3])}
    DatasetDict(splits).save_to_disk(str(folder / "saved"))
    splits["test"].save_to_disk(str(folder / "short"))
    return Workshop(folder, run)


def _bring_code(folder: Path) -> None:
    """Let a classifier's folder name a class of its own."""
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", MODEL_CLASS: "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForSequenceClassification\n\n\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n\n\n"
        "class OwnModel(LlamaForSequenceClassification):\n    config_class = OwnConfig\n"
    )
