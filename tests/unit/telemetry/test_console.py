import io
import json
import logging

import pytest

from rl.telemetry.console import Console
from tests.support.clock import FakeClock

METRICS = {
    "train/reward": 0.625,
    "train/loss": -0.0123,
    "train/mean_gen_tokens_per_sample": 2.4,
    "train/max_logprob_diff": 2.1e-5,
    "performance/tokens_per_sec": 311.6,
    "timing/train/total_step_time": 4.9,
    "timing/train/exposed_generation": 3.1,
    "timing/train/policy_training": 1.2,
    "timing/train/advantage_calculation": 0.001,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def make(tmp_path):
    made = []

    def build(mode="auto", stream=None, total_steps=20):
        out = io.StringIO() if stream is None else stream
        console = Console(mode, total_steps, tmp_path / "run.log", FakeClock(), out)
        made.append(console)
        return console, out

    yield build
    for console in made:
        console.close()


def test_a_step_is_one_plain_line_when_output_is_no_terminal(make):
    console, out = make()
    console.phase("policy_training")
    console.step_line(7, METRICS)
    assert out.getvalue() == (
        "step  7/20  reward 0.625  loss -0.0123  length 2.4  mismatch 2.1e-05  312 tok/s  "
        "4.9s (generate 3.1, train 1.2)  eta 0:00\n"
    )


def test_other_things_than_steps_can_be_counted(tmp_path):
    out = Terminal()
    console = Console("rich", 1, tmp_path / "run.log", FakeClock(), out, unit="prompts")
    console.counted(3, 12)
    console.close()
    assert "prompts 3/12" in out.getvalue()


def test_numbers_that_are_absent_are_left_out_and_unscored_samples_are_told(make):
    console, out = make()
    console.step_line(20, {"train/reward": 1.0, "train/num_invalid_rollouts": 3.0})
    assert out.getvalue() == "step 20/20  reward 1.000  unscored 3\n"


def test_an_asynchronous_run_shows_another_figure_for_the_mismatch_and_broken_numbers_are_told(make):
    console, out = make()
    console.step_line(20, {"train/token_mult_prob_error": 1.0213, "train/num_nonfinite_logprob_gaps": 2.0})
    assert out.getvalue() == "step 20/20  prob error 1.0213  broken logprobs 2\n"


def test_the_time_left_follows_the_recent_steps_and_not_the_validations(tmp_path):
    clock, out = FakeClock(), io.StringIO()
    console = Console("plain", 10, tmp_path / "run.log", clock, out)
    clock.advance(7000)
    console.phase("weight_sync")
    console.validation_line(0, {"accuracy": 0.5, "num_samples": 19, "num_failed": 0})
    clock.advance(50)
    console.phase("exposed_generation")
    for step in range(1, 6):
        clock.advance(30)
        console.step_line(step, {})
        clock.advance(1000)
        console.validation_line(step, {"accuracy": 0.5, "num_samples": 19})
    console.close()
    lines = out.getvalue().splitlines()
    assert lines[1] == "step  1/10  eta 4:30"
    assert lines[-2] == "step  5/10  eta 2:30"
    assert lines[-1] == "validation after step 5  accuracy 0.500  samples 19"


def test_warnings_of_any_module_of_ours_are_shown_once_and_kept(make, tmp_path):
    _, out = make()
    logging.getLogger("rl.somewhere").warning("the disk is %s", "slow")
    logging.getLogger("other.library").warning("noise")
    logging.getLogger("rl.somewhere").info("detail")
    assert out.getvalue() == "warning: the disk is slow\n"
    log = (tmp_path / "run.log").read_text()
    assert all(word in log for word in ("the disk is slow", "noise", "detail"))


def test_the_figures_of_a_short_run_count_no_step_twice(make):
    console, out = make()
    history = [{"step": step, "time_s": 1.0, "train/reward": step / 10} for step in (1, 2, 3)]
    console.summary(history, {}, "finished 3 steps")
    assert "0.100 (first 1 step) to 0.300 (last 1)" in out.getvalue()


def test_the_summary_shows_the_curve_figures_and_paths(make, tmp_path):
    console, out = make()
    history = [{"step": 0, "time_s": 1.0, "validation/accuracy": 0.474}]
    history += [{"step": step, "time_s": 65.0, "train/reward": step / 20} for step in range(1, 21)]
    history[-1]["validation/accuracy"] = 0.947
    console.summary(history, {"run folder": tmp_path}, "finished: 20 steps")
    text = out.getvalue()
    assert "reward by step" in text and "1.00 ┤" in text
    assert "0.075 (first 2 steps) to 0.900 (last 5)" in text and "0.474 to 0.947" in text and "1:05" in text
    assert str(tmp_path) in text and text.endswith("finished: 20 steps\n")
    assert "finished: 20 steps" in (tmp_path / "run.log").read_text()


def test_a_terminal_gets_a_progress_line_and_colours(make):
    console, out = make(stream=Terminal())
    console.phase("exposed_generation")
    console.step_line(1, METRICS)
    console.close()
    text = out.getvalue()
    assert "\x1b[" in text and "reward" in text


def test_the_progress_line_names_step_phase_and_rate(make):
    console, out = make(mode="rich")
    console.step_line(3, METRICS)
    console.phase("weight_sync")
    console.close()
    assert all(word in out.getvalue() for word in ("step 3/20", "sending weights", "312 tok/s"))


def test_a_closed_pipe_does_not_end_the_run(make):
    class Broken(io.StringIO):
        writes = 0

        def write(self, text):
            self.writes += 1
            raise BrokenPipeError("gone")

    stream = Broken()
    console, _ = make(stream=stream)
    console.step_line(1, METRICS)
    console.step_line(2, METRICS)
    assert stream.writes > 0


def test_a_closed_console_leaves_the_logging_as_it_found_it(make):
    before = [*logging.getLogger().handlers], [*logging.getLogger("rl").handlers]
    console, out = make()
    console.close()
    console.close()
    assert ([*logging.getLogger().handlers], [*logging.getLogger("rl").handlers]) == before
    logging.getLogger("rl.x").warning("after")
    assert out.getvalue() == ""


def test_long_lines_are_not_wrapped_in_plain_mode(make):
    console, out = make()
    console.note("x" * 500)
    assert out.getvalue() == "x" * 500 + "\n"
    json.dumps(out.getvalue())


def test_a_closed_standard_output_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    console = Console("auto", 20, tmp_path / "run.log", FakeClock())
    console.step_line(1, METRICS)
    console.summary([{"step": 1, "time_s": 1.0, "train/reward": 0.5}], {}, "finished")
    console.close()
    assert "reward 0.625" in (tmp_path / "run.log").read_text()


def test_output_that_is_closed_during_the_run_ends_nothing(make, tmp_path):
    console, out = make()
    out.close()
    console.note("still here")
    console.note("and here")
    assert "and here" in (tmp_path / "run.log").read_text()


@pytest.mark.parametrize("mode", ["plain", "rich"])
def test_an_ascii_output_gets_a_curve_and_names_in_its_own_characters(make, mode):
    bytes_written = io.BytesIO()
    console, out = make(mode, io.TextIOWrapper(bytes_written, encoding="ascii", write_through=True))
    console.note("prompts of größe 3 \ud800")
    history = [{"step": step, "time_s": 1.0, "train/reward": step / 10} for step in range(1, 9)]
    console.summary(history, {}, "finished")
    shown = bytes_written.getvalue().decode("ascii")
    assert "prompts of gr??e 3 ?" in shown
    assert "*" in shown
    assert "+-----" in shown
    assert out.encoding == "ascii"


def test_a_run_without_any_reward_says_that_nothing_was_learned(make):
    console, out = make()
    line = {"step": 1, "time_s": 1.0, "train/num_invalid_rollouts": 8.0}
    console.summary([line, {**line, "step": 2}], {}, "finished 2 steps")
    assert "none of the 2 steps had a valid reward, so nothing was learned" in out.getvalue()
    console.summary([line, {**line, "step": 2, "train/reward": 0.0}], {}, "finished 2 steps")
    assert out.getvalue().count("nothing was learned") == 1
