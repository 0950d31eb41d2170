"""The tensors of two models, as a refit carries them: names, dtypes and shapes without weights.

`divide` makes a model of the same form and smaller extents, for tests.
"""

from collections.abc import Iterator

from rl.weights.transport import TensorSpec

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def smollm2_135m(divide: int = 1) -> tuple[TensorSpec, ...]:
    """Return SmolLM2-135M in float32, as the default recipe trains it: 272 tensors, 538 MB; the head is tied."""
    return _specs(_smollm2(vocab=49152 // divide, hidden=576 // divide, inner=1536 // divide, layers=30), "float32")


def experts_1b(divide: int = 1) -> tuple[TensorSpec, ...]:
    """Return a mixture of 256 small experts in bfloat16: 18,432 matrices of 64 KiB, a few large ones, 2.0 GB."""
    shapes = _experts(vocab=152064 // divide, hidden=1024 // divide, experts=256 // divide, layers=24)
    return _specs(shapes, "bfloat16")


def _smollm2(vocab: int, hidden: int, inner: int, layers: int) -> Shapes:
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", hidden), ("k", hidden // 3), ("v", hidden // 3), ("o", hidden)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{prefix}mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner)
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def _experts(vocab: int, hidden: int, experts: int, layers: int) -> Shapes:
    inner = 32
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in ("q", "k", "v", "o"):
            yield f"{prefix}self_attn.{name}_proj.weight", (hidden, hidden)
        yield f"{prefix}mlp.gate.weight", (experts, hidden)
        for expert in range(experts):
            yield f"{prefix}mlp.experts.{expert}.gate_proj.weight", (inner, hidden)
            yield f"{prefix}mlp.experts.{expert}.up_proj.weight", (inner, hidden)
            yield f"{prefix}mlp.experts.{expert}.down_proj.weight", (hidden, inner)
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def _specs(shapes: Shapes, dtype: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, dtype, shape) for name, shape in shapes)
