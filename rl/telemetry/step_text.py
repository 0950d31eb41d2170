"""The wording of the terminal: one line for a step, one for a validation. Pure; plain output drops the colours."""

from collections.abc import Mapping

from rich.text import Text

_TOTAL = "timing/train/total_step_time"
_TIMING = "timing/train/"

# What a phase is called in the progress display, and in the split of a step's time.
PHASE_WORDS = {
    "exposed_generation": ("generating", "generate"),
    "data_processing": ("building the batch", "batch"),
    "policy_and_reference_logprobs": ("scoring tokens", "logprobs"),
    "advantage_calculation": ("advantages", "advantage"),
    "policy_training": ("training", "train"),
    "residency": ("sharing the device", "move"),
    "weight_sync": ("sending weights", "refit"),
    "validation": ("validating", "validate"),
    "checkpointing": ("saving a checkpoint", "save"),
}
_SHOWN_SECONDS = 0.05


def phase_label(phase: str) -> str:
    """Return what the user reads while a phase runs."""
    return PHASE_WORDS[phase][0] if phase in PHASE_WORDS else phase.replace("_", " ")


def step_text(step: int, total_steps: int, metrics: Mapping[str, float]) -> Text:
    """Return the line of a step: reward, loss, length, mismatch, rate, time by phase; absent numbers are left out."""
    text = Text(no_wrap=False)
    text.append(f"step {step:>{len(str(total_steps))}}/{total_steps}", style="bold")
    _number(text, "reward", metrics.get("train/reward"), "{:.3f}", style="bold green")
    _number(text, "loss", metrics.get("train/loss"), "{:+.4f}")
    _number(text, "length", metrics.get("train/mean_gen_tokens_per_sample"), "{:.1f}")
    _mismatch(text, metrics)
    failed = metrics.get("train/num_invalid_rollouts")
    if failed:
        _number(text, "unscored", failed, "{:.0f}", style="yellow")
    rate = metrics.get("performance/tokens_per_sec")
    if rate is not None:
        text.append(f"  {rate:.0f} tok/s")
    seconds = metrics.get(_TOTAL)
    if seconds is not None:
        text.append(f"  {seconds:.1f}s")
        text.append(_phases(metrics), style="dim")
    return text


def validation_text(step: int, metrics: Mapping[str, float]) -> Text:
    """Return the line of a validation."""
    text = Text("validation", style="bold")
    text.append(f" after step {step}" if step else " before the first step", style="not bold")
    short = {name.removeprefix("validation/"): value for name, value in metrics.items()}
    for name, value in short.items():
        whole = name.startswith("num_")
        if whole and value == 0:
            continue
        _number(
            text,
            name.removeprefix("num_").replace("_", " "),
            value,
            "{:.0f}" if whole else "{:.3f}",
            style="bold cyan" if name == "accuracy" else "",
        )
    return text


def duration(seconds: float) -> str:
    """Return h:mm:ss or m:ss."""
    whole = max(round(seconds), 0)
    hours, rest = divmod(whole, 3600)
    minutes, second = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{second:02d}" if hours else f"{minutes}:{second:02d}"


def _mismatch(text: Text, metrics: Mapping[str, float]) -> None:
    """How far trainer and generator disagree: the largest gap on own tokens, or where there are none, as in an
    asynchronous run, the mean factor between the probabilities of the two policies."""
    gap = metrics.get("train/max_logprob_diff")
    if gap is not None:
        _number(text, "mismatch", gap, "{:.1e}")
    else:
        _number(text, "prob error", metrics.get("train/token_mult_prob_error"), "{:.4f}")
    broken = metrics.get("train/num_nonfinite_logprob_gaps")
    if broken:
        _number(text, "broken logprobs", broken, "{:.0f}", style="bold red")


def _number(text: Text, label: str, value: float | None, form: str, style: str = "") -> None:
    if value is not None:
        text.append(f"  {label} ", style="dim")
        text.append(form.format(value), style=style)


def _phases(metrics: Mapping[str, float]) -> str:
    parts = [
        f"{PHASE_WORDS[name][1] if name in PHASE_WORDS else name.replace('_', ' ')} {value:.1f}"
        for key, value in metrics.items()
        if key.startswith(_TIMING) and key != _TOTAL and value >= _SHOWN_SECONDS
        for name in [key.removeprefix(_TIMING)]
    ]
    return f" ({', '.join(parts)})" if parts else ""
