"""The native operators as torch sees them: registration, compilation, memory, threads, errors."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rl.core import native
from rl.core.errors import FatalError
from rl.core.native import LIBRARY_DIR_VARIABLE, library_candidates, require_native
from rl.ops.native_logprobs import native_token_logprobs


@pytest.fixture
def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(0, 257, (9,), generator=generator)
    targets[4] = -100
    return torch.randn(9, 257, generator=generator), targets


@pytest.fixture
def thread_count() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def backward(logits: Tensor, targets: Tensor, consume_logits: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    logprobs, entropy = native_token_logprobs(leaf * 1, targets, 0.7, consume_logits=consume_logits)
    (logprobs.sum() + 0.3 * entropy.sum()).backward()
    assert leaf.grad is not None
    return logprobs.detach(), entropy.detach(), leaf.grad


def test_the_library_is_found_and_loads() -> None:
    require_native()
    assert torch.ops.tandem.token_logprobs_fwd.default is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_passes_for_every_operator(rows: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    require_native()
    logits, targets = rows[0].to(dtype), rows[1]
    _, entropy, lse = torch.ops.tandem.token_logprobs_fwd(logits, targets, 0.7)
    torch.library.opcheck(torch.ops.tandem.token_logprobs_fwd.default, (logits.clone().requires_grad_(), targets, 0.7))
    ones = torch.ones(9)
    for operator in (torch.ops.tandem.token_logprobs_bwd, torch.ops.tandem.token_logprobs_bwd_):
        for upstream in ((ones, ones), (ones, None), (None, ones)):
            torch.library.opcheck(operator.default, (logits.clone(), targets, lse, entropy, *upstream, 0.7))


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_whole_graph_compiles_and_gives_the_same_numbers(rows: tuple[Tensor, Tensor], is_dynamic: bool) -> None:
    require_native()
    logits, targets = rows

    def loss(x: Tensor, t: Tensor) -> Tensor:
        logprobs, entropy = native_token_logprobs(x * 1, t, 0.7, consume_logits=True)
        return logprobs.sum() + 0.3 * entropy.sum()

    leaf = logits.clone().requires_grad_()
    torch.compile(loss, fullgraph=True, dynamic=is_dynamic)(leaf, targets).backward()
    torch.testing.assert_close(leaf.grad, backward(logits, targets)[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_bitwise_equal_on_one_and_two_threads(thread_count: None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(33, 32001, generator=generator).to(dtype)
    targets = torch.randint(0, 32001, (33,), generator=generator)
    results = []
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        results.append(backward(logits, targets))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_consuming_backward_writes_the_gradient_over_the_logits(rows: tuple[Tensor, Tensor]) -> None:
    leaf = rows[0].clone().requires_grad_()
    logits = leaf * 1
    address, seen = logits.data_ptr(), []
    logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    logprobs, _ = native_token_logprobs(logits, rows[1], 0.7, consume_logits=True)
    logprobs.sum().backward()
    assert seen == [address]
    expected = rows[0].clone().requires_grad_()
    native_token_logprobs(expected, rows[1], 0.7)[0].sum().backward()
    assert leaf.grad is not None
    assert expected.grad is not None
    assert torch.equal(leaf.grad, expected.grad)


def test_a_second_walk_over_consumed_logits_is_refused_clearly(rows: tuple[Tensor, Tensor]) -> None:
    leaf = rows[0].clone().requires_grad_()
    loss = native_token_logprobs(leaf * 1, rows[1], 0.7, consume_logits=True)[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(FatalError, match="consume_logits=False"):
        loss.backward()


def test_another_user_of_consumed_logits_is_caught_by_autograd(rows: tuple[Tensor, Tensor]) -> None:
    leaf = rows[0].clone().requires_grad_()
    logits = leaf * 1
    squares = logits.square().sum()  # saves the logits for its own backward
    native_token_logprobs(logits, rows[1], 0.7, consume_logits=True)[0].sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


def test_gradients_of_several_uses_of_the_logits_add_up(rows: tuple[Tensor, Tensor]) -> None:
    gradients = []
    for consume_logits in (False, True):
        leaf = rows[0].clone().requires_grad_()
        logits = leaf * 1
        logprobs, entropy = native_token_logprobs(logits, rows[1], 0.7, consume_logits=consume_logits)
        (logprobs.sum() + entropy.sum() + 2 * logits.sum()).backward()
        gradients.append(leaf.grad)
    assert gradients[0] is not None
    assert torch.equal(*gradients)


def test_second_derivatives_are_refused_clearly(rows: tuple[Tensor, Tensor]) -> None:
    leaf = rows[0].clone().requires_grad_()
    logprobs, entropy = native_token_logprobs(leaf, rows[1], 0.7)
    (gradient,) = torch.autograd.grad((logprobs * entropy).sum(), leaf, create_graph=True)
    with pytest.raises(FatalError, match="second derivative"):
        gradient.sum().backward()


def test_no_gradient_is_made_when_none_is_wanted(rows: tuple[Tensor, Tensor]) -> None:
    with torch.no_grad():
        logprobs, _ = native_token_logprobs(rows[0].clone().requires_grad_(), rows[1], 0.7, consume_logits=True)
    assert not logprobs.requires_grad


def test_bad_arguments_are_named(rows: tuple[Tensor, Tensor]) -> None:
    logits, targets = rows
    cases: list[tuple[Tensor, Tensor, str]] = [
        (logits.double(), targets, "logits: want float32 or bfloat16"),
        (logits[0], targets, r"logits: want \[N, V\]"),
        (logits.t().contiguous().t(), targets, "logits: want adjacent columns"),
        (logits, targets.int(), "targets: want int64"),
        (logits, targets[:3], r"targets: want \[N\] with N = 9"),
        (logits, targets[:, None].expand(9, 2)[:, 0], "targets: want a contiguous tensor"),
        (logits, targets + 300, "targets: row 0 holds"),
    ]
    for bad_logits, bad_targets, message in cases:
        if message.endswith("contiguous tensor"):
            bad_targets = torch.stack([targets, targets], dim=1)[:, 0]
        with pytest.raises(RuntimeError, match=message):
            native_token_logprobs(bad_logits, bad_targets, 1.0)
    with pytest.raises(RuntimeError, match="temperature: want a finite number > 0, got nan"):
        native_token_logprobs(logits, targets, math.nan)


def test_logits_whose_rows_share_memory_are_read_but_never_overwritten(rows: tuple[Tensor, Tensor]) -> None:
    require_native()
    shared = rows[0][:1].expand(9, 257)
    _, entropy, lse = torch.ops.tandem.token_logprobs_fwd(shared, rows[1], 1.0)
    with pytest.raises(RuntimeError, match="logits: want rows that do not overlap"):
        torch.ops.tandem.token_logprobs_bwd_(shared, rows[1], lse, entropy, torch.ones(9), None, 1.0)


def test_a_missing_library_is_explained_with_the_places_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIBRARY_DIR_VARIABLE, str(tmp_path))
    assert library_candidates() == [tmp_path / "libtandem_loss.so"]
    failure = native._load_failure.__wrapped__()
    assert failure is not None
    assert str(tmp_path) in failure
    assert "policy.logprob_impl=torch" in failure


def test_a_broken_library_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libtandem_loss.so").write_bytes(b"not a library")
    monkeypatch.setenv(LIBRARY_DIR_VARIABLE, str(tmp_path))
    failure = native._load_failure.__wrapped__()
    assert failure is not None
    assert "does not load" in failure
