"""What travels between driver and ranks survives JSON, and errors keep their words through vLLM's."""

import json

import pytest

from rl.core.errors import WeightSyncError
from rl.generation.vllm.wire import (
    RankReport,
    fault_values,
    first_fault,
    init_values,
    located,
    marked,
    reader_rank,
    transfer_info,
    unwrapped,
    update_values,
)
from rl.weights.faults import TransferError
from rl.weights.transport import LinkSettings, RefitStart, TransferInfo

INFO = TransferInfo(
    transport="tcp",
    addresses=("[::1]:4000", "10.0.0.1:4001"),
    plan=bytes(range(256)),
    plan_digest="0123456789abcdef",
    num_slots=3,
    readers=("generation[0].0", "generation[0].1"),
    timeout_s=12.5,
    link=LinkSettings(7.5, digests=False, host="::1"),
)


@pytest.mark.parametrize(("dp", "tp", "pp", "first"), [(1, 1, 1, 0), (1, 2, 1, 3), (2, 2, 1, 0), (2, 2, 3, 5)])
def test_every_process_of_a_replica_is_another_reader(dp: int, tp: int, pp: int, first: int) -> None:
    ranks = [reader_rank(first, engine, tp * pp, rank) for engine in range(dp) for rank in range(tp * pp)]
    assert ranks == list(range(first, first + dp * tp * pp))


@pytest.mark.parametrize(("first", "dp_index", "per_engine", "rank"), [(0, 0, 2, 2), (0, -1, 2, 0), (-1, 0, 2, 0)])
def test_a_rank_that_cannot_be_is_refused(first: int, dp_index: int, per_engine: int, rank: int) -> None:
    with pytest.raises(WeightSyncError, match=f"rank {rank} of {per_engine}"):
        reader_rank(first, dp_index, per_engine, rank)


def test_a_transfer_survives_json() -> None:
    values = json.loads(json.dumps(init_values(INFO, 7, "line")))
    assert (values["first_reader"], values["abort_line"]) == (7, "line")
    assert transfer_info(values) == INFO


@pytest.mark.parametrize("missing", ["plan", "link", "num_slots"])
def test_a_payload_of_another_version_is_refused(missing: str) -> None:
    values = init_values(INFO, 0, "")
    del values[missing]
    with pytest.raises(WeightSyncError, match="not of this version"):
        transfer_info(values)


def test_start_and_report_survive_json() -> None:
    assert json.loads(json.dumps(update_values(RefitStart(3, 2, 1.5)))) == {
        "epoch": 3,
        "version": 2,
        "timeout_s": 1.5,
    }
    report = RankReport(1, 2, bytes(range(16)), {"wire": 0.5})
    assert RankReport.of(json.loads(json.dumps(report.values()))) == report


def test_the_rank_that_failed_by_itself_explains_the_others() -> None:
    told = fault_values(TransferError("reader 1 gave up", "aborted", 65537, 4))
    own = fault_values(WeightSyncError("no such tensor"))
    assert first_fault([{}, {}]) is None
    assert type(first_fault([told, own])) is WeightSyncError
    assert str(first_fault([told, own])) == "no such tensor"
    error = located("generation[0] failed at update", first_fault([{}, told]) or WeightSyncError(""))
    assert isinstance(error, TransferError)
    assert (error.kind, error.rank, error.bucket) == ("aborted", 65537, 4)
    assert str(error) == "generation[0] failed at update: reader 1 gave up"


def test_a_message_is_found_in_the_words_around_it() -> None:
    error = WeightSyncError("tensor 'a' is late [[sic]]")
    assert unwrapped(f"Worker failed with error '{marked(error)}', please check") == str(error)
    assert unwrapped("something else") == "something else"
