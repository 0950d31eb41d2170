"""Every native operator on the GPU against the CPU's and against float64, as named checks.

    for name, check in CHECKS.items():
        result = check()       # Result(worst=2.1e-7, tolerance=1e-5, ...)

They need a GPU, torch and rl.ops. Inputs are drawn on the CPU, so that both sides see the same.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.ops.bucket_copy import BucketPlan, bucket_copy, quantize_fp8, tensor_digests
from rl.ops.linear_logprobs import linear_policy_loss_, linear_token_logprobs
from rl.ops.logprobs import token_logprobs
from rl.ops.native_logprobs import native_logits_threshold
from rl.ops.policy_loss import PolicyLossTokens, PolicyMetric, policy_loss, sequence_reduce
from tools.bench.policy_loss_case import PARAMS, Tokens, minimal_loss

CUDA = torch.device("cuda")
VOCABULARIES = (257, 1000, 1024, 32001, 49152, 151936)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Of gradients that are stored in these; everything else is float32.
_STORED = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}
_FLOAT32 = 1e-5


@dataclass(frozen=True)
class Result:
    """What a check found: the worst difference, relative to the largest magnitude, and what is allowed."""

    worst: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether it is small enough; NaN is not."""
        return self.worst <= self.tolerance


@dataclass(frozen=True)
class Row:
    """Outputs of a log-probability operator."""

    logprobs: Tensor
    entropy: Tensor
    gradient: Tensor


def difference(value: Tensor, reference: Tensor) -> float:
    """Return the largest difference relative to the reference's largest magnitude; infinities must stand alike."""
    own, other = value.detach().cpu().double().flatten(), reference.detach().cpu().double().flatten()
    finite = torch.isfinite(other)
    if not torch.equal(own[~finite], other[~finite]):
        return math.inf
    own, other = own[finite], other[finite]
    if own.numel() == 0:
        return 0.0
    worst = float((own - other).abs().max())
    return worst / max(1.0, float(other.abs().max()))


def exact(values: Sequence[Tensor], references: Sequence[Tensor]) -> Result:
    """Return whether tensors agree to the bit."""
    same = all(
        torch.equal(
            value.detach().cpu().contiguous().view(torch.uint8), other.detach().cpu().contiguous().view(torch.uint8)
        )
        for value, other in zip(values, references, strict=True)
    )
    return Result(0.0 if same else math.inf, 0.0)


def draw_logits(rows: int, vocab: int, dtype: torch.dtype, padding: int = 0) -> tuple[Tensor, Tensor]:
    """Return logits whose rows lie apart by `padding` columns, with some -inf, and targets with an ignored one."""
    generator = torch.Generator().manual_seed(vocab)
    wide = (4 * torch.randn(rows, vocab + padding, generator=generator)).to(dtype)
    logits = wide[:, :vocab]
    targets = torch.randint(vocab, (rows,), generator=generator)
    logits[0, 1:] = -math.inf
    targets[0], targets[1] = 0, -100
    return logits, targets


def run_rows(logits: Tensor, targets: Tensor, *, impl: str, consume: bool = False) -> Row:
    """Return outputs and the gradient for fixed upstream gradients of both."""
    leaf = logits.detach().requires_grad_()
    logprobs, entropy = token_logprobs(leaf, targets, 0.7, impl=impl, consume_logits=consume)  # type: ignore[arg-type]
    upstream = torch.linspace(-1.0, 2.0, targets.numel(), device=logits.device, dtype=logprobs.dtype)
    torch.autograd.backward([logprobs, entropy], [upstream, 0.1 * upstream])
    assert leaf.grad is not None
    return Row(logprobs, entropy, leaf.grad)


def rows_check(vocab: int, dtype: torch.dtype, padding: int) -> Callable[[], Result]:
    """Return the check of log-probabilities, entropies and gradients of one shape."""

    def check() -> Result:
        logits, targets = draw_logits(17, vocab, dtype, padding)
        wide = torch.empty(17, vocab + padding, dtype=dtype, device=CUDA)
        wide[:, :vocab] = logits
        own = run_rows(wide[:, :vocab], targets.to(CUDA), impl="native")
        exact_row = run_rows(logits.double(), targets, impl="torch")
        cpu = run_rows(logits, targets, impl="native")
        worst = max(
            difference(own.logprobs, exact_row.logprobs),
            difference(own.entropy, exact_row.entropy),
            difference(own.logprobs, cpu.logprobs),
            difference(own.entropy, cpu.entropy),
        )
        # Scaled, so that the one tolerance serves float32 values and stored gradients.
        gradient = max(difference(own.gradient, exact_row.gradient), difference(own.gradient, cpu.gradient))
        return Result(max(worst, gradient * _FLOAT32 / _STORED[dtype]), _FLOAT32)

    return check


def check_in_place() -> Result:
    """The gradient over the logits equals the one beside them."""
    logits, targets = (tensor.to(CUDA) for tensor in draw_logits(33, 32001, torch.bfloat16))
    beside = run_rows(logits, targets, impl="native")
    over = run_rows(logits.clone(), targets, impl="native", consume=True)
    return exact([over.logprobs, over.entropy, over.gradient], [beside.logprobs, beside.entropy, beside.gradient])


def check_repeats() -> Result:
    """Three runs give the same bits, whatever else the device does."""
    logits, targets = (tensor.to(CUDA) for tensor in draw_logits(64, 151936, torch.bfloat16))
    runs = [run_rows(logits, targets, impl="native") for _ in range(3)]
    parts = [[run.logprobs, run.entropy, run.gradient] for run in runs]
    return exact(parts[1] + parts[2], parts[0] + parts[0])


def check_large_offsets() -> Result:
    """Rows beyond 2^31 elements equal the same rows alone."""
    vocab, rows = 151936, 14200
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device=CUDA)
    last, targets = (tensor.to(CUDA) for tensor in draw_logits(5, vocab, torch.bfloat16))
    logits[-5:] = last
    all_targets = torch.full((rows,), -100, device=CUDA)
    all_targets[-5:] = targets
    whole = token_logprobs(logits, all_targets, 0.7, impl="native")
    alone = token_logprobs(last, targets, 0.7, impl="native")
    return exact([column[-5:] for column in whole], alone)


def check_shards() -> Result:
    """Statistics of four shards, one without columns, merge into those of the whole vocabulary."""
    logits, targets = (tensor.to(CUDA) for tensor in draw_logits(17, 49152, torch.float32))
    whole = torch.ops.tandem.token_logprobs_fwd(logits, targets, 0.7)
    bounds = [0, 10001, 10001, 30000, 49152]
    stats = [
        torch.ops.tandem.logits_stats(logits[:, begin:end], targets, 0.7, None, begin)
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    merged = torch.ops.tandem.stats_finish(torch.stack(stats), targets)
    return Result(max(difference(a, b) for a, b in zip(merged, whole, strict=True)), _FLOAT32)


def check_thresholds() -> Result:
    """The cut of top-k and top-p is the CPU's."""
    logits, _ = draw_logits(17, 32001, torch.float32)
    arguments = (50, 0.9, 0.7)
    own, cpu = (native_logits_threshold(x, *arguments) for x in (logits.to(CUDA), logits))
    return Result(difference(own, cpu), _FLOAT32)


def _columns(tokens: Tokens, device: torch.device) -> PolicyLossTokens:
    weights = tokens.weights.to(device)
    return PolicyLossTokens(
        generation_logprobs=tokens.generation_logprobs.to(device),
        advantages=tokens.advantages.to(device),
        shares=weights,
        weights=weights,
        prev_logprobs=tokens.prev_logprobs.to(device),
        reference_logprobs=tokens.reference_logprobs.to(device),
    )


def _policy_outputs(tokens: Tokens, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    logprobs, entropy = (x.detach().to(device).requires_grad_() for x in (tokens.logprobs, tokens.entropy))
    result = policy_loss(logprobs, entropy, _columns(tokens, device), PARAMS)
    result.loss.backward()
    assert logprobs.grad is not None and entropy.grad is not None
    return logprobs.grad, entropy.grad, result.metrics


def check_policy_loss() -> Result:
    """Loss, derivatives and metrics against the CPU's, the loss against plain float64."""
    tokens = Tokens.random(100_003, torch.device("cpu"))
    own, cpu = (_policy_outputs(tokens, torch.device(name)) for name in ("cuda", "cpu"))
    wide = Tokens(**{name: column.double() for name, column in vars(tokens).items()})
    loss = minimal_loss(wide.logprobs, wide.entropy, wide)
    metrics = [difference(a, b) for a, b in zip(own[2], cpu[2], strict=True)]
    worst = max(difference(own[0], cpu[0]), difference(own[1], cpu[1]), *metrics)
    return Result(max(worst, difference(own[2][PolicyMetric.LOSS.value], loss)), _FLOAT32)


def check_policy_loss_repeats() -> Result:
    """Three runs of the policy loss give the same bits."""
    tokens = Tokens.random(1_000_003, torch.device("cpu"))
    first, second, third = (_policy_outputs(tokens, CUDA) for _ in range(3))
    return exact([*second, *third], [*first, *first])


def check_sequence_reduce() -> Result:
    """Means over sequences against the CPU's."""
    values, offsets = torch.randn(1000), torch.tensor([0, 1, 1, 400, 1000])
    own = sequence_reduce(values.to(CUDA), None, offsets.to(CUDA), mean=True)
    return Result(difference(own, sequence_reduce(values, None, offsets, mean=True)), _FLOAT32)


def linear_check(dtype: torch.dtype) -> Callable[[], Result]:
    """Return the check of the linear layer: two passes and one, against float64."""

    def check() -> Result:
        generator = torch.Generator().manual_seed(3)
        hidden = torch.randn(301, 576, generator=generator).to(dtype)
        weight = (0.08 * torch.randn(5001, 576, generator=generator)).to(dtype)
        targets = torch.randint(5001, (301,), generator=generator)
        tokens = Tokens.random(301, torch.device("cpu"))
        wide_hidden, wide_weight = (x.double().requires_grad_() for x in (hidden, weight))
        logprobs, entropy = linear_token_logprobs(wide_hidden, wide_weight, targets, 1.0, impl="torch")
        wide = Tokens(**{name: column.double() for name, column in vars(tokens).items()})
        minimal_loss(logprobs, entropy, wide).backward()
        assert wide_hidden.grad is not None and wide_weight.grad is not None
        device_hidden, device_weight, device_targets = (x.to(CUDA) for x in (hidden, weight, targets))
        grad_weight = torch.zeros(weight.shape, device=CUDA)
        one = linear_policy_loss_(
            device_hidden, device_weight, device_targets, 1.0, _columns(tokens, CUDA), PARAMS, grad_weight=grad_weight
        )
        two, _ = linear_token_logprobs(device_hidden, device_weight, device_targets, 1.0)
        gradients = max(difference(one.grad_hidden, wide_hidden.grad), difference(grad_weight, wide_weight.grad))
        values = max(difference(one.logprobs, logprobs), difference(two, logprobs))
        # torch lets float32 products run on tensor cores only where it is told to; ours accumulate in float32.
        return Result(max(values, gradients), 2e-4 if dtype == torch.float32 else 2e-2)

    return check


def check_bucket_copy() -> Result:
    """Packing all pairs of dtypes gives the CPU's bits, at odd sizes and offsets."""
    sources, dtypes = [], list(DTYPES.values())
    for i, size in enumerate((0, 1, 7, 8191, 8192, 100_001, 33, 9, 70_000)):
        sources.append((100 * torch.randn(size + i % 4)).to(dtypes[i % 3])[i % 4 :])
    targets = [[torch.zeros_like(source, dtype=dtypes[i // 3]) for i, source in enumerate(sources)] for _ in range(2)]
    device_sources = [source.to(CUDA) for source in sources]
    device_targets = [target.to(CUDA) for target in targets[1]]
    bucket_copy(sources, targets[0])
    BucketPlan(device_sources, device_targets).run()
    return exact(device_targets, targets[0])


def check_digests() -> Result:
    """Digests are the CPU's: dtypes of every width, odd sizes, odd addresses, many small tensors and a large one."""
    tensors = [torch.randn(size + 3)[size % 4 :] for size in (1, 7, 255, 256, 257, 8191, 100_001, 5_000_000)]
    tensors += [torch.randint(0, 256, (size + 5,), dtype=torch.uint8)[size % 5 :] for size in range(0, 3000, 7)]
    tensors += [torch.randn(1000).to(dtype) for dtype in DTYPES.values()] + [torch.empty(0), torch.tensor(3.0)]
    on_device = []
    for tensor in tensors:
        base = torch.empty(tensor.numel() + 3, dtype=tensor.dtype, device=CUDA)
        on_device.append(base[tensor.numel() % 4 :][: tensor.numel()].copy_(tensor.view(-1)))
    return exact([tensor_digests(on_device)], [tensor_digests(tensors)])


def check_fp8() -> Result:
    """Codes and scales are the CPU's to the bit: ragged edges, zeros, infinities."""
    matrix = torch.randn(300, 515)
    matrix[:128, :128] = 0.0
    matrix[200, 300] = math.inf
    pairs = [(quantize_fp8(matrix.to(dtype).to(CUDA)), quantize_fp8(matrix.to(dtype))) for dtype in DTYPES.values()]
    return exact([part for own, _ in pairs for part in own], [part for _, cpu in pairs for part in cpu])


def check_graph_capture() -> Result:
    """Operators in a captured graph give what they give outside, on new inputs."""
    logits, targets = (tensor.to(CUDA) for tensor in draw_logits(33, 32001, torch.bfloat16))
    packed = torch.zeros(33 * 32001, device=CUDA)
    plan = BucketPlan([logits.contiguous()], [packed])
    source = plan.sources[0].view(33, 32001)

    def work() -> tuple[Tensor, ...]:
        plan.run()
        outputs = torch.ops.tandem.token_logprobs_fwd(source, targets, 0.7)
        logprobs, entropy, lse = outputs
        gradient = torch.ops.tandem.token_logprobs_bwd(source, targets, lse, entropy, logprobs, entropy, 0.7)
        return (*outputs, gradient, *quantize_fp8(source), packed)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    source.mul_(0.5)
    graph.replay()
    replayed = [output.clone() for output in captured]
    return exact(replayed, work())


def all_checks() -> dict[str, Callable[[], Result]]:
    """Return every check by name."""
    rows = {
        f"logprobs {name} V={vocab}{f' stride +{padding}' if padding else ''}": rows_check(vocab, dtype, padding)
        for name, dtype in DTYPES.items()
        for vocab in VOCABULARIES
        for padding in ((0, 3) if vocab in (1000, 32001) else (0,))
    }
    linear = {f"linear layer {name}": linear_check(dtype) for name, dtype in DTYPES.items()}
    return (
        rows
        | linear
        | {
            "gradient in place": check_in_place,
            "same bits over repeats": check_repeats,
            "rows beyond 2^31 elements": check_large_offsets,
            "shards of the vocabulary": check_shards,
            "sampling thresholds": check_thresholds,
            "policy loss": check_policy_loss,
            "policy loss, same bits over repeats": check_policy_loss_repeats,
            "sequence reduction": check_sequence_reduce,
            "bucket copy": check_bucket_copy,
            "float8": check_fp8,
            "digests": check_digests,
            "captured graph": check_graph_capture,
        }
    )


CHECKS = all_checks()
