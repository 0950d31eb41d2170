"""Counting GPUs by their device files."""

from rl.cluster.devices import count_gpus


def test_device_files_are_counted_and_cut_to_the_visible_ones(tmp_path, monkeypatch):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert count_gpus(tmp_path) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert count_gpus(tmp_path) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_gpus(tmp_path) == 0
