"""The trained model: load a causal language model from a Hugging Face folder, run it where it counts, write it back.

Weights are float32 whatever the precision: an optimizer step is often smaller than bfloat16 can add to a weight. A
lower precision is that of the arithmetic (autocast), of the wire and of exports. Dropout is off (evaluation mode): a
training step draws no random numbers. Batching, losses and optimizers are not here.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from rl.core.errors import ConfigError, FatalError, first_line
from rl.core.loading import model_loading

_WEIGHT_PATTERNS = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.gguf",
    "*.index.json",
    "config.json",
)
_TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "spiece.model",
)
_CHAT_TEMPLATE_FILE = "chat_template.jinja"


class CausalModel:
    """A Hugging Face causal language model that computes logits, or what they are made of, at chosen positions only.

    Args:
        path: Local Hugging Face folder.
        precision: Dtype of the arithmetic, of logits and of exports; weights are float32.
        device: "cpu" or "cuda:i".
        trust_remote_code: Run model code found in the folder.
        seed: Seeds weights that the folder lacks, so that every rank makes the same.

    Raises:
        ConfigError: the folder does not hold a causal language model that this installation can load.
    """

    def __init__(self, path: Path, *, precision: torch.dtype, device: str, trust_remote_code: bool, seed: int) -> None:
        self.path = path
        self.device = torch.device(device)
        self.precision = precision
        self._trust_remote_code = trust_remote_code
        with model_loading(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self._load(path)
        self.module: nn.Module = module.to(self.device).eval()
        self._head: nn.Module = module.get_output_embeddings()

    def logits_at(
        self,
        tokens: Tensor,
        places: Tensor,
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        exact: bool = False,
    ) -> Tensor:
        """Return the next-token logits at the given places.

        Rows that are only padded on the right need no attention mask: attention is causal, so no real token looks at
        padding.

        Args:
            tokens: [B, S] int64.
            places: [D] int64, indices into the B x S positions in row-major order; may repeat.
            position_ids: [B, S] int64; None = 0, 1, ... in each row.
            mask: [B, 1, S, S] bool, whether a position (third axis) sees another (fourth); None = causal.
            exact: Compute in float32 whatever the precision.

        Returns:
            [D, V] in the model's precision. The [B, S, V] logits never exist.
        """

        # The model's own forward runs, so that whatever it does to its logits (scaling, soft caps) is kept.
        return self._run(tokens, position_ids, mask, lambda hidden: hidden.flatten(0, 1)[places], exact=exact)

    def hidden_at(
        self,
        tokens: Tensor,
        places: Tensor,
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        exact: bool = False,
    ) -> Tensor:
        """Return what the output layer would turn into `logits_at` of the same arguments, [D, H]; no logits exist.

        In the model's precision, as the output layer would take it; with graph.
        """
        taken: list[Tensor] = []

        def take(hidden: Tensor) -> Tensor:
            taken.append(hidden.flatten(0, 1)[places])
            return hidden.flatten(0, 1)[:0]

        self._run(tokens, position_ids, mask, take, exact=exact)
        if len(taken) != 1:
            raise FatalError(f"the model calls its output layer {len(taken)} times in one pass, not once")
        return taken[0] if exact else taken[0].to(self.precision)

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Return the logits that the model's forward makes of the output layer's input [D, H]; in float32."""
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        return self._run(tokens, None, None, lambda _: hidden, exact=True)

    @property
    def head(self) -> nn.Module:
        """The output layer."""
        return self._head

    @property
    def head_weight(self) -> Tensor:
        """The output layer's matrix [V, H], float32; a leaf that is trained unless frozen."""
        weight: Any = self._head.weight
        return torch.as_tensor(weight)

    def head_gradient(self) -> Tensor:
        """Return the float32 tensor in which the gradient of the output layer's matrix adds up.

        Where the embedding is the same matrix, its share of the gradient is added to the same tensor. A frozen matrix
        has one that nobody will look at.
        """
        weight: Any = self._head.weight
        if not weight.requires_grad:
            return torch.zeros_like(weight)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        gradient: Tensor = weight.grad
        return gradient

    def _run(
        self,
        tokens: Tensor,
        position_ids: Tensor | None,
        mask: Tensor | None,
        at_head: Callable[[Tensor], Tensor],
        *,
        exact: bool,
    ) -> Tensor:
        """Run the model's own forward with the output layer's input replaced by what `at_head` makes of it."""
        given = {"position_ids": position_ids, "attention_mask": mask}
        optional = {name: value for name, value in given.items() if value is not None}
        is_low = self.precision != torch.float32 and not exact
        hook = self._head.register_forward_pre_hook(lambda _, inputs: (at_head(inputs[0]), *inputs[1:]))
        try:
            with torch.autocast(self.device.type, self.precision, enabled=is_low):
                logits: Tensor = self.module(input_ids=tokens, use_cache=False, **optional).logits
        finally:
            hook.remove()
        return logits

    @contextmanager
    def in_other_precision(self) -> Iterator[str]:
        """Compute in bfloat16 instead of float32, or the other way round; yield the name of that precision."""
        own = self.precision
        self.precision = torch.bfloat16 if own == torch.float32 else torch.float32
        try:
            yield dtype_name(self.precision)
        finally:
            self.precision = own

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        model: Any = self.module
        return int(model.get_input_embeddings().num_embeddings)

    @property
    def attention_window(self) -> int | None:
        """How many tokens back some layer sees, by the model's configuration; None = all."""
        model: Any = self.module
        config = model.config.get_text_config().to_dict()
        if config.get("use_sliding_window") is False:
            return None
        sizes = [config.get("sliding_window"), config.get("attention_chunk_size")]
        return min((size for size in sizes if isinstance(size, int)), default=None)

    def freeze(self) -> "CausalModel":
        """Stop training this model; return it."""
        self.module.requires_grad_(False)
        return self

    def parameters(self) -> list[nn.Parameter]:
        """Return every trained tensor once, in a fixed order."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def named_tensors(self) -> Mapping[str, Tensor]:
        """Return all weights under their Hugging Face names; tied ones once."""
        return dict(self.module.named_parameters())

    def save(self, folder: Path) -> None:
        """Write the float32 weights and config.json into `folder` (created when missing)."""
        saved: Any = self.module
        saved.save_pretrained(folder)

    def export(self, folder: Path) -> None:
        """Write what `save` writes, with weights in the precision."""
        if self.precision == torch.float32:
            self.save(folder)
            return
        saved: Any = self.module
        # Names of one tied weight must lead to one tensor, or it is written twice.
        cast: dict[int, Tensor] = {}
        state = self.module.state_dict()
        for tensor in state.values():
            cast.setdefault(tensor.data_ptr(), _in_precision(tensor, self.precision))
        saved.save_pretrained(folder, state_dict={name: cast[tensor.data_ptr()] for name, tensor in state.items()})
        config = folder / "config.json"
        entries = json.loads(config.read_text(encoding="utf-8")) | {"dtype": dtype_name(self.precision)}
        config.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def load_weights(self, folder: Path) -> None:
        """Replace the weights by those that `save` wrote, bit for bit."""
        self.module.load_state_dict(self._load(folder).state_dict())

    def _load(self, path: Path) -> Any:
        disable_progress_bar()  # a worker's output is a log, not a terminal
        try:
            return AutoModelForCausalLM.from_pretrained(
                path,
                dtype=torch.float32,
                attn_implementation="sdpa",
                trust_remote_code=self._trust_remote_code,
                local_files_only=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise ConfigError(
                f"cannot load a causal language model from {path}: {first_line(error)}; it must be a Hugging Face "
                "folder with config.json and weights (own model code needs policy.trust_remote_code=true)"
            ) from error


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32, and so on."""
    return str(dtype).removeprefix("torch.")


def _in_precision(tensor: Tensor, precision: torch.dtype) -> Tensor:
    return tensor.to("cpu", precision) if tensor.is_floating_point() else tensor.cpu()


def copy_model_files(model_path: Path, tokenizer_path: Path, chat_template: str | None, folder: Path) -> None:
    """Copy everything but weights and config.json, byte for byte: tokenizer, chat template, generation configuration.

    Args:
        model_path: Folder of the model that training started from.
        tokenizer_path: Folder of the tokenizer; its files win over the model's.
        chat_template: Template that replaces the tokenizer's own, or None.
        folder: Where to write.
    """
    _copy(model_path, folder, ("*",), _WEIGHT_PATTERNS)
    if tokenizer_path != model_path:
        _copy(tokenizer_path, folder, _TOKENIZER_PATTERNS, ())
    if chat_template is not None:
        (folder / _CHAT_TEMPLATE_FILE).write_text(chat_template, encoding="utf-8")


def _copy(source: Path, target: Path, wanted: tuple[str, ...], unwanted: tuple[str, ...]) -> None:
    for file in sorted(source.iterdir()):
        is_wanted = any(file.match(pattern) for pattern in wanted) and not any(file.match(p) for p in unwanted)
        if file.is_file() and is_wanted:
            shutil.copyfile(file, target / file.name)
