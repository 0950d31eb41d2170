"""From the flags of the `loss_fn` section to the parts of a policy-gradient objective.

Pure parsing: an objective is ratio x surrogate x correction x KL x reduction, each a small frozen type that stands with
its formula (ppo, gspo, cispo, reinforce, corrections, kl_term, reduction). Which combinations are legal is said by
`rl.controller.checks_loss`.

    loss = parse_objective(LossConfig(use_cispo=True), single_update=False)
"""

import math

from rl.algorithms.cispo import Cispo
from rl.algorithms.config import LossConfig
from rl.algorithms.corrections import IcePop, Level, Off, Raw, SequenceMask, Tis
from rl.algorithms.gspo import SequenceRatio
from rl.algorithms.kl_term import KlPlace, KlTerm
from rl.algorithms.policy_gradient import Correction, PolicyGradientLoss, Ratio, Surrogate
from rl.algorithms.ppo import Clip, TokenRatio
from rl.algorithms.reduction import SEQUENCES, TOKENS, Reduction, constant
from rl.algorithms.reinforce import NoRatio, OnPolicyRatio, Unclipped
from rl.core.errors import ConfigError


def parse_objective(loss: LossConfig, single_update: bool) -> PolicyGradientLoss:
    """Build the loss.

    Args:
        loss: The `loss_fn` section.
        single_update: Whether one optimizer step consumes the whole batch of an RL step.

    Raises:
        ConfigError: the loss forces an on-policy ratio, but the batch is used for several optimizer steps.
    """
    if loss.force_on_policy_ratio and not single_update:
        raise ConfigError(
            "loss_fn.force_on_policy_ratio=true needs one optimizer step per RL step: set "
            "policy.train_global_batch_size to grpo.num_prompts_per_step x grpo.num_generations_per_prompt, or null"
        )
    ratio = _ratio(loss)
    return PolicyGradientLoss(
        ratio=ratio,
        surrogate=_surrogate(loss, ratio),
        correction=_correction(loss),
        kl=_kl(loss),
        reduction=_reduction(loss),
        entropy_coef=loss.entropy_coef,
        nll_weight=loss.positive_example_nll_weight,
        single_update=single_update,
    )


def _ratio(loss: LossConfig) -> Ratio:
    if loss.force_on_policy_ratio:
        return OnPolicyRatio()
    if loss.disable_ppo_ratio:
        return NoRatio()
    return SequenceRatio() if loss.sequence_level_importance_ratios else TokenRatio()


def _surrogate(loss: LossConfig, ratio: Ratio) -> Surrogate:
    if isinstance(ratio, OnPolicyRatio | NoRatio):
        return Unclipped()
    if loss.use_cispo:
        return Cispo(loss.ratio_clip_min, loss.ratio_clip_max)
    return Clip(loss.ratio_clip_min, loss.ratio_clip_max, loss.ratio_clip_c)


def _correction(loss: LossConfig) -> Correction:
    level = Level.SEQUENCE if loss.sequence_level_importance_ratios else Level.TOKEN
    if not loss.use_importance_sampling_correction:
        return Off(level)
    low, high = loss.truncated_importance_sampling_ratio_min, loss.truncated_importance_sampling_ratio
    low, high = (0.0 if low is None else low), (math.inf if high is None else high)
    match loss.truncated_importance_sampling_type:
        case "tis":
            return Tis(low, high, level)
        case "icepop":
            return IcePop(low, high, level)
        case "seq-mask-tis":
            return SequenceMask(low, high)
        case None:
            return Raw(level)


def _kl(loss: LossConfig) -> KlTerm:
    where = KlPlace.REWARD if loss.use_kl_in_reward else KlPlace.LOSS
    return KlTerm(
        where=where if loss.reference_policy_kl_penalty > 0 else KlPlace.OFF,
        kind=loss.reference_policy_kl_type,
        beta=loss.reference_policy_kl_penalty,
        input_clamp=loss.kl_input_clamp_value,
        output_clamp=loss.kl_output_clamp_value,
        on_policy_weight=loss.use_on_policy_kl_approximation,
    )


def _reduction(loss: LossConfig) -> Reduction:
    if loss.token_level_loss:
        return TOKENS
    return SEQUENCES if loss.sequence_loss_divisor is None else constant(loss.sequence_loss_divisor)
