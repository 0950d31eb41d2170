"""The division of cores among the roles."""

from rl.cluster.config import ThreadsConfig
from rl.cluster.threads import thread_plan


def test_roles_in_turns_get_all_cores_and_overlapping_ones_share_them() -> None:
    free = ThreadsConfig()
    in_turns = thread_plan(free, overlapping=False, cores=8, generation_workers=2)
    assert (in_turns.policy, in_turns.generation) == (8, 4)
    overlapping = thread_plan(free, overlapping=True, cores=8)
    assert (overlapping.policy, overlapping.generation) == (4, 4)
    assert thread_plan(free, overlapping=True, cores=1).policy == 1
    assert in_turns.describe() == "threads: policy 8, generation 4, working in turns on 8 cores"


def test_explicit_thread_counts_win() -> None:
    plan = thread_plan(ThreadsConfig(policy=3, generation=1), overlapping=True, cores=8)
    assert (plan.policy, plan.generation) == (3, 1)
