"""A vocabulary in shards on two gloo ranks: the same numbers as one rank with all of it."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor

from rl.core.errors import ConfigError
from rl.ops.logprobs import IGNORE_INDEX, LogprobImpl, token_logprobs
from rl.ops.vocab_parallel import GatherGroup, VocabShard, linear_vocab_parallel_logprobs, vocab_parallel_logprobs

IMPLS: tuple[LogprobImpl, ...] = ("native", "torch")
# Vocabulary, and where it is cut in two: in the middle, off every block size, and into a whole and an empty shard.
CUTS = [(257, 128), (1000, 1), (1024, 512), (32001, 16000), (151936, 75968), (1000, 1000), (257, 0)]
Result = TypeVar("Result")
Numbers = tuple[Tensor, Tensor, Tensor]


class Ranks:
    """Two ranks as threads, each with its own end of a gloo group."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2)
        store = c10d.HashStore()
        self._groups: list[GatherGroup] = list(self._pool.map(lambda rank: self._join(store, rank), range(2)))

    def _join(self, store: Any, rank: int) -> GatherGroup:
        gloo: Any = c10d.ProcessGroupGloo  # torch's stubs lack its options
        options = gloo._Options()
        options._timeout = timedelta(seconds=60)
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        group: GatherGroup = gloo(store, rank, 2, options)
        return group

    def run(self, work: Callable[[int, GatherGroup], Result]) -> list[Result]:
        """Return what both ranks give."""
        return list(self._pool.map(work, range(2), self._groups))

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture(scope="module")
def ranks() -> Any:
    both = Ranks()
    yield both
    both.close()


def make_rows(vocab: int, dtype: torch.dtype, rows: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    targets[1], targets[2], targets[3] = 0, vocab - 1, IGNORE_INDEX
    return (4 * torch.randn(rows, vocab, generator=generator)).to(dtype), targets


def differentiate(logprobs: Tensor, entropy: Tensor) -> None:
    weights = torch.linspace(-1, 1, logprobs.shape[0])
    ((weights * logprobs).sum() + 0.1 * (weights * entropy).sum()).backward()


def whole(logits: Tensor, targets: Tensor, impl: LogprobImpl, **options: Any) -> Numbers:
    """Logprobs, entropy and gradient of one rank."""
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = token_logprobs(leaf * 1, targets, 0.7, impl=impl, **options)
    differentiate(logprobs, entropy)
    assert leaf.grad is not None
    return logprobs.detach(), entropy.detach(), leaf.grad


def sharded(ranks: Ranks, logits: Tensor, targets: Tensor, cut: int, impl: LogprobImpl, **options: Any) -> Numbers:
    """The same of two ranks, which must agree to the bit; their gradients side by side."""
    vocab_size = options.pop("vocab_size", None)

    def work(rank: int, group: GatherGroup) -> Numbers:
        start = rank * cut
        part = logits[:, :cut] if rank == 0 else logits[:, cut:]
        leaf = part.clone().requires_grad_()
        shard = VocabShard(start, group, vocab_size)
        logprobs, entropy = vocab_parallel_logprobs(leaf * 1, targets, 0.7, shard, impl=impl, **options)
        differentiate(logprobs, entropy)
        assert leaf.grad is not None
        return logprobs.detach(), entropy.detach(), leaf.grad

    first, second = ranks.run(work)
    for left, right in zip(first[:2], second[:2], strict=True):
        assert torch.equal(left.view(torch.int32), right.view(torch.int32))
    return first[0], first[1], torch.cat([first[2], second[2]], dim=1)


@pytest.mark.parametrize("consume_logits", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab", "cut"), CUTS)
def test_two_shards_give_the_numbers_of_one(
    ranks: Ranks, vocab: int, cut: int, dtype: torch.dtype, impl: LogprobImpl, consume_logits: bool
) -> None:
    logits, targets = make_rows(vocab, dtype)
    got = sharded(ranks, logits, targets, cut, impl, consume_logits=consume_logits)
    want = whole(logits, targets, "native")
    torch.testing.assert_close(got[0], want[0], atol=4e-6, rtol=1e-6)
    torch.testing.assert_close(got[1], want[1], atol=1e-5, rtol=2e-6)
    # One unit in the last place of the gradient's dtype, where the statistics' last bits move it over an edge.
    torch.testing.assert_close(got[2], want[2], atol=6e-6 if dtype == torch.float32 else 1e-2, rtol=0)
    assert got[2].dtype == dtype
    assert (got[2][3] == 0).all()


@pytest.mark.parametrize("vocab", [257, 1000])
def test_an_empty_shard_changes_no_bit(ranks: Ranks, vocab: int) -> None:
    logits, targets = make_rows(vocab, torch.float32)
    for cut in (0, vocab):
        for got, want in zip(
            sharded(ranks, logits, targets, cut, "native"), whole(logits, targets, "native"), strict=True
        ):
            assert torch.equal(got, want)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("padded", [260, 400])
def test_padded_columns_count_as_absent_whatever_they_hold(ranks: Ranks, impl: LogprobImpl, padded: int) -> None:
    """The padding is the end of the second shard, or with it all of what lies behind the first."""
    logits, targets = make_rows(257, torch.float32)
    wide = torch.full((5, padded), 100.0)
    wide[:, :257] = logits
    wide[0, 258] = math.nan
    want = whole(logits, targets, "native")
    for cut in (130, 257):
        got = sharded(ranks, wide, targets, cut, impl, vocab_size=257)
        torch.testing.assert_close(got[0], want[0], atol=2e-6, rtol=1e-6)
        torch.testing.assert_close(got[1], want[1], atol=4e-6, rtol=1e-6)
        torch.testing.assert_close(got[2][:, :257], want[2], atol=2e-6, rtol=0)
        assert (got[2][:, 257:] == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_masked_logits_and_thresholds_hold_over_the_shards(ranks: Ranks, impl: LogprobImpl) -> None:
    logits, targets = make_rows(257, torch.float32)
    logits[:, 3:200] = -math.inf  # all of the first shard but three columns
    targets[:] = torch.tensor([1, 2, 250, IGNORE_INDEX, 220])
    thresholds = torch.tensor([-math.inf, -50.0, -1.0, 0.0, -2.0])
    got = sharded(ranks, logits, targets, 128, impl, thresholds=thresholds)
    want = whole(logits, targets, "native", thresholds=thresholds)
    torch.testing.assert_close(got[0], want[0], atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(got[1], want[1], atol=4e-6, rtol=1e-6)
    torch.testing.assert_close(got[2], want[2], atol=2e-6, rtol=0, equal_nan=True)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_of_minus_infinity_everywhere_stays_visible(ranks: Ranks, impl: LogprobImpl) -> None:
    logits, targets = make_rows(257, torch.float32)
    logits[0] = -math.inf
    logprobs, entropy, _ = sharded(ranks, logits, targets, 128, impl)
    assert torch.isnan(logprobs).tolist() == torch.isnan(entropy).tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("impl", IMPLS)
def test_one_process_with_all_columns_needs_no_group(impl: LogprobImpl) -> None:
    logits, targets = make_rows(1000, torch.float32)
    logprobs, entropy = vocab_parallel_logprobs(logits, targets, 0.7, VocabShard(), impl=impl)
    want = whole(logits, targets, "native")
    torch.testing.assert_close(logprobs, want[0], atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(entropy, want[1], atol=4e-6, rtol=1e-6)


def test_consumed_logits_cannot_be_walked_twice() -> None:
    logits, targets = make_rows(257, torch.float32)
    leaf = logits.requires_grad_()
    logprobs, _ = vocab_parallel_logprobs(leaf * 1, targets, 0.7, VocabShard(), impl="native", consume_logits=True)
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_the_reference_steps_have_the_gradient_of_their_values() -> None:
    """The plain steps against numerical differences of themselves, entropy included."""
    logits, targets = make_rows(7, torch.float32)
    logits = logits / 4
    _, _, gradient = whole(logits, targets, "torch")
    leaf = logits.clone().requires_grad_()
    differentiate(*vocab_parallel_logprobs(leaf * 1, targets, 0.7, VocabShard(), impl="torch"))
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, gradient, atol=1e-6, rtol=1e-6)


def linear_whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprobs, entropy and both gradients in float64."""
    inputs = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logprobs, entropy = token_logprobs(inputs[0] @ inputs[1].t(), targets, 0.7, impl="torch")
    differentiate(logprobs, entropy)
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    return logprobs.detach(), entropy.detach(), inputs[0].grad, inputs[1].grad


@pytest.mark.parametrize("chunk_rows", [2, 5, 100])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("vocab", "cut"), [(257, 128), (1000, 1000)])
def test_a_sharded_head_gives_the_numbers_and_gradients_of_a_whole_one(
    ranks: Ranks, vocab: int, cut: int, dtype: torch.dtype, tolerance: float, impl: LogprobImpl, chunk_rows: int
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    hidden = torch.randn(5, 24, generator=generator).to(dtype)
    weight = torch.randn(vocab, 24, generator=generator).to(dtype)
    targets = make_rows(vocab, dtype)[1]

    def work(rank: int, group: GatherGroup) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows = hidden.clone().requires_grad_()
        part = (weight[:cut] if rank == 0 else weight[cut:]).clone().requires_grad_()
        shard = VocabShard(rank * cut, group)
        logprobs, entropy = linear_vocab_parallel_logprobs(
            rows, part, targets, 0.7, shard, impl=impl, chunk_rows=chunk_rows
        )
        differentiate(logprobs, entropy)
        assert rows.grad is not None
        assert part.grad is not None
        return logprobs.detach(), entropy.detach(), rows.grad, part.grad

    first, second = ranks.run(work)
    want = linear_whole(hidden, weight, targets)
    for index in range(3):
        assert torch.equal(first[index], second[index])
    # Values are float32 in both dtypes: products of 16-bit numbers are exact there.
    torch.testing.assert_close(first[0].double(), want[0], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(first[1].double(), want[1], atol=2e-5, rtol=1e-6)
    scale = want[2].abs().max()
    torch.testing.assert_close(first[2].double() / scale, want[2] / scale, atol=tolerance, rtol=0)
    got_weight = torch.cat([first[3], second[3]]).double()
    torch.testing.assert_close(got_weight / want[3].abs().max(), want[3] / want[3].abs().max(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("impl", ["native", "torch"])
def test_masked_rows_and_padding_of_a_head_may_hold_anything(impl: LogprobImpl) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(9, 8, generator=generator), torch.randn(16, 8, generator=generator)
    targets = torch.randint(12, (9,), generator=generator)
    targets[3] = -100

    def gradients(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, _ = linear_vocab_parallel_logprobs(
            *leaves, targets, 0.8, VocabShard(vocab_size=12), impl=impl, chunk_rows=4
        )
        return logprobs.detach(), *torch.autograd.grad(logprobs.sum(), leaves)

    want = gradients(hidden, weight)
    hidden[3], weight[12:] = math.nan, math.inf
    for got, expected in zip(gradients(hidden, weight), want, strict=True):
        assert torch.equal(got, expected)


def test_unusable_settings_are_refused_by_name() -> None:
    logits, targets = make_rows(9, torch.float32)
    other: Any = "triton"
    with pytest.raises(ConfigError, match="triton"):
        vocab_parallel_logprobs(logits, targets, 1.0, VocabShard(), impl=other)
    with pytest.raises(ConfigError, match="temperature=0"):
        vocab_parallel_logprobs(logits, targets, 0.0, VocabShard(), impl="torch")
    with pytest.raises(ConfigError, match="chunk_rows=0"):
        linear_vocab_parallel_logprobs(logits, logits, targets, 1.0, VocabShard(), impl="torch", chunk_rows=0)
