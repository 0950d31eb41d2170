"""Calls on vLLM's workers for which vLLM has no verb: what a refit delivered, why it failed, how weights compute.

They become methods of vLLM's worker base class, so that `collective_rpc` (and its HTTP form) finds them by name, with a
plug-in as with `worker_extension_cls`. Each reads what the process's weight transfer engine knows.
"""

from typing import Any

import torch
from vllm.v1.worker.worker_base import WorkerBase


def tandem_end_session(worker: Any) -> None:
    """Forget a refit that was given up half-way, so that the next start is accepted."""
    worker._weight_update_active = False
    worker.weight_transfer_engine.reset_weight_update_target()


def tandem_received(worker: Any) -> dict[str, Any]:
    """Return the `RankReport` of the last refit that was finished."""
    report: dict[str, Any] = worker.weight_transfer_engine.report()
    return report


def tandem_fault(worker: Any) -> dict[str, Any]:
    """Return the last failure, see `wire.fault_values`."""
    fault: dict[str, Any] = worker.weight_transfer_engine.fault()
    return fault


def tandem_products(worker: Any) -> dict[str, Any]:
    """Return this process's share of W x of every tensor, see `layer_products`."""
    products: dict[str, Any] = worker.weight_transfer_engine.products()
    return products


def tandem_sleep(worker: Any) -> int:
    """Give up the memory of weights, which the host keeps, and of caches; return how much more of the device is free.

    vLLM's verbs for engines would do too much: they resume the scheduler with the last part that wakes.
    """
    free = _free_bytes()
    worker.sleep(level=1)
    return _free_bytes() - free


def tandem_wake(worker: Any, tags: list[str]) -> int:
    """Take memory again; return how much less of the device is free."""
    free = _free_bytes()
    worker.wake_up(tags)
    return free - _free_bytes()


def _free_bytes() -> int:
    """Free memory of the device; 0 without one."""
    return int(torch.accelerator.get_memory_info()[0]) if torch.accelerator.is_available() else 0


def install() -> None:
    """Make them methods of every worker."""
    calls = (tandem_end_session, tandem_received, tandem_fault, tandem_products, tandem_sleep, tandem_wake)
    for call in calls:
        setattr(WorkerBase, call.__name__, call)
