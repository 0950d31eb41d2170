"""What workers inherit of the driver's environment."""

import os
import sys
import sysconfig

from rl.cluster.environment import (
    exchanged_environment,
    import_variables,
    quiet_variables,
    thread_variables,
    worker_environment,
)
from rl.core.native import LIBRARY_DIR_VARIABLE


def test_secrets_and_strangers_are_not_inherited():
    driver = {
        "PATH": "/bin",
        "WANDB_API_KEY": "s",
        "HF_TOKEN": "s",
        "VLLM_API_KEY": "s",
        "AWS_SECRET_ACCESS_KEY": "s",
        "MY_APP": "x",
        "HF_HOME": "/models",
        "TOKENIZERS_PARALLELISM": "false",
        "NCCL_DEBUG": "INFO",
        "RAY_AUTH_TOKEN": "needed by ray itself",
    }
    assert set(worker_environment(driver)) == {
        "PATH",
        "HF_HOME",
        "TOKENIZERS_PARALLELISM",
        "NCCL_DEBUG",
        "RAY_AUTH_TOKEN",
    }


def test_workers_look_for_native_libraries_where_the_driver_does():
    assert worker_environment({LIBRARY_DIR_VARIABLE: "/opt/native"}) == {LIBRARY_DIR_VARIABLE: "/opt/native"}


def test_pythonpath_becomes_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert worker_environment({"PYTHONPATH": ".:/opt/x"})["PYTHONPATH"] == f"{tmp_path}:/opt/x"


def test_the_environment_is_exchanged_and_put_back(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    before = dict(os.environ)
    with exchanged_environment({"PATH": "/nowhere", "NEW": "1"}):
        assert dict(os.environ) == {"PATH": "/nowhere", "NEW": "1"}
    assert dict(os.environ) == before


def test_workers_import_from_where_the_driver_does_but_keep_their_own_interpreter(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    entries = import_variables()["PYTHONPATH"].split(os.pathsep)
    assert entries[0] == str(tmp_path)
    assert not [entry for entry in entries if entry.endswith("site-packages") or entry.endswith("lib-dynload")]
    assert sysconfig.get_path("stdlib") not in entries


def test_thread_counts_are_explicit_and_statistics_off_unless_asked_for():
    assert thread_variables(3, {})["OMP_NUM_THREADS"] == "3"
    assert quiet_variables({})["VLLM_NO_USAGE_STATS"] == "1"
    assert "VLLM_NO_USAGE_STATS" not in quiet_variables({"VLLM_NO_USAGE_STATS": "0"})


def test_idle_threads_of_workers_sleep_unless_the_user_wants_them_to_spin():
    assert thread_variables(2, {})["OMP_WAIT_POLICY"] == "PASSIVE"
    assert thread_variables(2, {"OMP_WAIT_POLICY": "ACTIVE"})["OMP_WAIT_POLICY"] == "ACTIVE"
