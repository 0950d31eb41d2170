"""RewardModelEnvironment: the reward is the score that a sequence classifier with one output gives the conversation.

The model is a Hugging Face sequence classifier, a folder or a hub id, loaded once in each scoring process. It reads the
whole conversation, written by its own chat template, or prompt and completion as plain text where the prompt is plain
text. A group is scored by batches padded on the right; padding changes no score. A score that is not finite, or a
conversation longer than the model's context, is no reward and does not vote. The policy is never here.
"""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from rl.core.errors import ConfigError, DataError, first_line
from rl.core.types import FinishReason, Message, Prompt, RolloutStatus
from rl.data.columns import PLAIN_TEXT
from rl.data.pretrained import resolve_model
from rl.environments.base import Episode, StepResult
from rl.environments.completion_form import thinking_flags
from rl.environments.config import RewardModelEnvConfig
from rl.environments.outcomes import failed, failed_task
from rl.environments.pool import OutcomeKind, ScorerPool

_PREFIX = "reward_model_env"

# The score of one conversation, or why it has none.
Score = float | str


@dataclass(frozen=True)
class Classifier:
    """A loaded model with its tokenizer.

    Attributes:
        model: Gives logits [N, 1].
        tokenizer: Its tokenizer.
        pad_token: The one by which the model knows padding; None when it knows none.
        max_tokens: Its context in tokens; None when the model does not tell.
    """

    model: Any
    tokenizer: Any
    pad_token: int | None
    max_tokens: int | None


class RewardModelEnvironment:
    """Scores groups in processes of its own."""

    def __init__(self, name: str, config: RewardModelEnvConfig) -> None:
        """Start the scoring processes in the background; they load the model."""
        self._config = config
        self._key = f"env.{name}.model_name"
        self._pool = ScorerPool(name, config.num_workers, config.timeout_s, prepare_classifier, (config, self._key))

    async def step(self, prompt: Prompt, episodes: list[Episode]) -> list[StepResult]:
        """Score all siblings by one call; one result each, in order.

        Raises:
            ConfigError: the model cannot be loaded.
        """
        await self._pool.ready()
        conversations = [_conversation(prompt, episode) for episode in episodes]
        outcome = await self._pool.run(score_conversations, self._config, self._key, conversations)
        subject = f"reward model {self._config.model_name}, prompt {prompt.prompt_id}"
        if outcome.kind is not OutcomeKind.OK:
            return [failed_task(outcome, f"{subject}, sample {episode.sample}") for episode in episodes]
        scores: list[Score] = outcome.value
        metrics = group_metrics([score for score in scores if not isinstance(score, str)])
        return [self._result(score, metrics, episode, subject) for score, episode in zip(scores, episodes, strict=True)]

    async def close(self) -> None:
        """End the scoring processes; idempotent."""
        await self._pool.close()

    def _result(self, score: Score, metrics: dict[str, float], episode: Episode, subject: str) -> StepResult:
        if isinstance(score, str):
            return failed(RolloutStatus.REWARD_INVALID, f"{subject}, sample {episode.sample}: {score}")
        ended = float(episode.completion.finish_reason is FinishReason.STOP)
        flags = thinking_flags(episode.completion.text, self._config.think_tags)
        return StepResult((), score, done=True, metrics=metrics | {"properly_ended": ended}, flags=flags)


def group_metrics(scores: Sequence[float]) -> dict[str, float]:
    """Return number, mean, standard deviation (n - 1; 0 for one), least and greatest of a group's scores."""
    if not scores:
        return {}
    values = {
        "num_samples": float(len(scores)),
        "mean_reward": statistics.fmean(scores),
        "std_reward": statistics.stdev(scores) if len(scores) > 1 else 0.0,
        "min_reward": min(scores),
        "max_reward": max(scores),
    }
    return {f"{_PREFIX}/{name}": value for name, value in values.items()}


def prepare_classifier(config: RewardModelEnvConfig, key: str) -> None:
    """Load the model in a scoring process, so that no deadline pays for it.

    Args:
        config: What to load.
        key: The configuration's key of the model, for messages.

    Raises:
        ConfigError: it cannot be loaded, or is no classifier with one output.
    """
    load_classifier(config, key)


def score_conversations(
    config: RewardModelEnvConfig, key: str, conversations: list[list[dict[str, str]]]
) -> list[Score]:
    """Score one group with the model of this process; runs there.

    Args:
        config: As given to `prepare_classifier`.
        key: As given to it.
        conversations: Messages of role and content; one message of role "text" is plain text.

    Raises:
        DataError: a conversation, but the tokenizer has no chat template.
    """
    classifier = load_classifier(config, key)
    rows = [_tokens(classifier.tokenizer, conversation) for conversation in conversations]
    scores: list[Score] = [_length_fault(len(row), classifier.max_tokens) for row in rows]
    fitting = [index for index, fault in enumerate(scores) if not fault]
    fitting.sort(key=lambda index: len(rows[index]))  # equal lengths together: little padding
    for start in range(0, len(fitting), config.micro_batch_size):
        part = fitting[start : start + config.micro_batch_size]
        for index, score in zip(part, score_rows(classifier, [rows[index] for index in part]), strict=True):
            scores[index] = score if math.isfinite(score) else f"the model gave {score}"
    return scores


def score_rows(classifier: Classifier, rows: list[list[int]]) -> list[float]:
    """Return the logit of each row of token ids, padded on the right to one batch [N, T]."""
    model = classifier.model
    text_config = model.config.get_text_config()
    pad = classifier.pad_token if classifier.pad_token is not None else _unused_token(rows, text_config.vocab_size)
    # A causal classifier takes the logit of the last token that is not padding, and knows padding by this number.
    text_config.pad_token_id = pad
    width = max(map(len, rows))
    tokens = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=model.device)
    with torch.inference_mode():
        logits: Tensor = model(input_ids=tokens, attention_mask=mask).logits
    return [float(value) for value in logits[:, 0].float().cpu()]


@functools.cache
def load_classifier(config: RewardModelEnvConfig, key: str) -> Classifier:
    """Load the model, once per process; see `prepare_classifier`."""
    folder = resolve_model(config.model_name, key=key)
    disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            folder,
            dtype=getattr(torch, config.precision),
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
        model = model.to(config.device).eval()
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ConfigError(f"{key}={config.model_name}: no sequence classifier loads: {first_line(error)}") from error
    _check_classifier(model.config.num_labels, report["missing_keys"], f"{key}={config.model_name}")
    text_config = model.config.get_text_config()
    longest = text_config.to_dict().get("max_position_embeddings")
    return Classifier(model, tokenizer, text_config.pad_token_id, longest)


def _check_classifier(num_labels: int, missing: Sequence[str], subject: str) -> None:
    if num_labels != 1:
        raise ConfigError(f"{subject} gives {num_labels} numbers, and a reward is one; use a classifier with one label")
    if missing:
        raise ConfigError(
            f"{subject} lacks the weights {', '.join(sorted(missing)[:3])}, which would be random; use a model that "
            "was trained as a reward model (a sequence classifier), not a language model"
        )


def _conversation(prompt: Prompt, episode: Episode) -> list[dict[str, str]]:
    """Return the messages of a rollout, the completion last; plain text stays one text."""
    if [message.role for message in prompt.messages] == [PLAIN_TEXT]:
        return [{"role": PLAIN_TEXT, "content": prompt.messages[0].content + episode.completion.text}]
    messages = list(prompt.messages)
    for turn in episode.turns:
        messages += [Message("assistant", turn.completion.text), *turn.env_messages]
    messages.append(Message("assistant", episode.completion.text))
    return [{"role": message.role, "content": message.content} for message in messages]


def _tokens(tokenizer: Any, conversation: list[dict[str, str]]) -> list[int]:
    if [message["role"] for message in conversation] == [PLAIN_TEXT]:
        return list(tokenizer(conversation[0]["content"])["input_ids"])
    if not tokenizer.chat_template:
        raise DataError(
            "the reward model's tokenizer has no chat template, so it cannot read a conversation; use "
            "data.prompt_format: raw, or a reward model with one"
        )
    # The template writes the special tokens itself.
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _length_fault(length: int, longest: int | None) -> str:
    if not length:
        return "the conversation has no tokens"
    return f"it has {length} tokens, and the model reads {longest}" if longest and length > longest else ""


def _unused_token(rows: list[list[int]], vocab_size: int) -> int:
    """Return a token that no row has: a model without a padding token pools at the last one, whatever it is."""
    used = {token for row in rows for token in row}
    return next(token for token in range(vocab_size + 1) if token not in used)
