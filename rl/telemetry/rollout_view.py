"""A rollout as text for people: who said what, which of it the policy sampled, and what it earned.

print(rollout_text(group.prompt, rollout))
"""

from collections.abc import Iterator, Sequence

from rl.core.types import Message, Prompt, Rollout, Turn

_INDENT = "    "


def rollout_text(prompt: Prompt, rollout: Rollout) -> str:
    """Return the turns of a rollout, one block per message; sampled blocks alone are trained on.

    Args:
        prompt: What it answers.
        rollout: Any, finished.
    """
    reward = f"{rollout.reward:g}" if rollout.is_valid else f"none ({rollout.status.value})"
    lines = [f"rollout {rollout.rollout_id} of prompt {prompt.prompt_id} in environment {prompt.environment}"]
    size = f"{len(rollout.turns[0].prompt_tokens)} tokens"
    together = f" with the other {len(prompt.messages) - 1}" if len(prompt.messages) > 1 else ""
    lines += _blocks(prompt.messages, f"prompt, {size}{together}, not trained")
    for number, turn in enumerate(rollout.turns):
        following = rollout.turns[number + 1] if number + 1 < len(rollout.turns) else None
        lines += _answer(number, turn)
        lines += _blocks(turn.env_messages, _added(turn, following))
    lines.append(f"end: {rollout.end.value}, {len(rollout.turns)} turns, reward {reward}")
    return "\n".join(lines) + "\n"


def _answer(number: int, turn: Turn) -> Iterator[str]:
    completion = turn.completion
    versions = "-".join(str(version) for version in sorted({completion.version_min, completion.version_max}))
    notes = [
        f"turn {number}",
        f"{len(completion.tokens)} tokens, sampled by version {versions} and trained",
        f"ended by {completion.finish_reason.value}",
        f"reward {turn.reward:g}",
        *sorted(flag.value for flag in turn.flags),
        *(["its history was rewritten: a sequence of its own"] if turn.forked else []),
    ]
    yield f"[assistant] {', '.join(notes)}"
    yield from _indented(completion.text)


def _added(turn: Turn, following: Turn | None) -> str:
    if following is None:
        return "environment, after the end, in no sequence"
    if following.forked:
        return "environment, not trained"
    added = len(following.prompt_tokens) - len(turn.prompt_tokens) - len(turn.completion.tokens)
    return f"environment, {added} tokens with the template's, not trained"


def _blocks(messages: Sequence[Message], note: str) -> Iterator[str]:
    for message in messages:
        yield f"[{message.role}] {note}"
        yield from _indented(message.content)


def _indented(text: str) -> Iterator[str]:
    for line in text.splitlines() or [""]:
        yield (_INDENT + line).rstrip()
