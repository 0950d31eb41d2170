"""Cross-checks of the loss: which of its flags go together, and which would have no effect.

See `rl.controller.checks`; `rl.algorithms.objective` builds the loss from what is accepted here.
"""

from collections.abc import Iterator

from rl.controller.config import MasterConfig
from rl.controller.conflicts import Check, Conflict, inert
from rl.core.config_view import scalar

_LOSS = "loss_fn"
_ON_POLICY = f"{_LOSS}.force_on_policy_ratio"
_REINFORCE = f"{_LOSS}.disable_ppo_ratio"
_SEQUENCE_RATIO = f"{_LOSS}.sequence_level_importance_ratios"
_CISPO = f"{_LOSS}.use_cispo"
_TOKEN_LEVEL = f"{_LOSS}.token_level_loss"
_DIVISOR = f"{_LOSS}.sequence_loss_divisor"
_BETA = f"{_LOSS}.reference_policy_kl_penalty"
_KL_IN_REWARD = f"{_LOSS}.use_kl_in_reward"
_KL_WEIGHT = f"{_LOSS}.use_on_policy_kl_approximation"
_CORRECTION = f"{_LOSS}.use_importance_sampling_correction"
_TRUNCATION = f"{_LOSS}.truncated_importance_sampling"
_UPDATE_SIZE = "policy.train_global_batch_size"
_CLIP_BOUNDS = ["ratio_clip_min", "ratio_clip_max", "ratio_clip_c"]


def _has_single_update(config: MasterConfig) -> bool:
    return config.policy.train_global_batch_size in (None, config.sequences_per_step)


def _refuse(key: str, value: object, other: str, other_value: object, why: str, fix: str) -> Conflict:
    problem = f"{key}={scalar(value)} does not go with {other}={scalar(other_value)}: {why}"
    return Conflict((key, other), problem, fix)


def on_policy_ratio_needs_one_update(config: MasterConfig) -> Iterator[Conflict]:
    """After a first optimizer step the ratio is no longer 1."""
    if config.loss_fn.force_on_policy_ratio and not _has_single_update(config):
        prompts, generations = config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt
        sizes = (
            f"{_UPDATE_SIZE}={config.policy.train_global_batch_size} of {prompts * generations} "
            f"(grpo.num_prompts_per_step={prompts} x grpo.num_generations_per_prompt={generations})"
        )
        problem = f"{_ON_POLICY}=true needs one optimizer step per RL step, but {sizes} makes more"
        yield Conflict((_ON_POLICY, _UPDATE_SIZE), problem, f"set {_UPDATE_SIZE}=null or {_ON_POLICY}=false")


def one_ratio_is_chosen(config: MasterConfig) -> Iterator[Conflict]:
    """A ratio that another one overrides has no effect."""
    loss = config.loss_fn
    if loss.force_on_policy_ratio:
        yield from inert(loss, _LOSS, ["disable_ppo_ratio"], _ON_POLICY, f"{_ON_POLICY}=true comes first")
    replacement = _ON_POLICY if loss.force_on_policy_ratio else _REINFORCE if loss.disable_ppo_ratio else None
    if replacement is not None and not loss.use_importance_sampling_correction:
        reason = f"{replacement}=true replaces the ratio, and {_CORRECTION}=false leaves out the generator's weights"
        yield from inert(loss, _LOSS, ["sequence_level_importance_ratios"], replacement, reason)


def clip_bounds_need_a_ratio(config: MasterConfig) -> Iterator[Conflict]:
    """Clip bounds mean nothing for a ratio that is always 1, and where there is none."""
    loss = config.loss_fn
    if loss.force_on_policy_ratio:
        key, reason = _ON_POLICY, f"with {_ON_POLICY}=true the ratio is always 1"
    elif loss.disable_ppo_ratio:
        key, reason = _REINFORCE, f"with {_REINFORCE}=true there is no ratio"
    elif _has_single_update(config):
        key = _UPDATE_SIZE
        size, value = config.sequences_per_step, scalar(config.policy.train_global_batch_size)
        reason = f"with {key}={value} one optimizer step takes all {size} sequences of an RL step, and the ratio is "
        reason += f"always 1 (a smaller {key} makes more)"
    else:
        return
    yield from inert(loss, _LOSS, _CLIP_BOUNDS, key, reason)


def cispo_stands_alone(config: MasterConfig) -> Iterator[Conflict]:
    """CISPO has its own surrogate of token ratios, with a token-level mean."""
    loss = config.loss_fn
    if not loss.use_cispo:
        return
    why = "CISPO weights each token by its clipped ratio"
    for name in ("disable_ppo_ratio", "force_on_policy_ratio", "sequence_level_importance_ratios"):
        if dict(loss)[name]:
            key = f"{_LOSS}.{name}"
            yield _refuse(key, True, _CISPO, True, why, f"set {key}=false or {_CISPO}=false")
    if loss.ratio_clip_c is not None:
        key = f"{_LOSS}.ratio_clip_c"
        why = "CISPO bounds every ratio already"
        yield _refuse(key, loss.ratio_clip_c, _CISPO, True, why, f"set {key}=null or {_CISPO}=false")
    if not loss.token_level_loss:
        why = "CISPO's loss is a mean over tokens"
        yield _refuse(_TOKEN_LEVEL, False, _CISPO, True, why, f"set {_TOKEN_LEVEL}=true or {_CISPO}=false")


def sequence_settings_need_a_sequence_loss(config: MasterConfig) -> Iterator[Conflict]:
    """A ratio per sequence, and a divisor of a sequence's sum, belong to the mean over sequences."""
    loss = config.loss_fn
    if loss.token_level_loss and loss.sequence_level_importance_ratios:
        why = "a ratio per sequence needs the mean over sequences"
        yield _refuse(_SEQUENCE_RATIO, True, _TOKEN_LEVEL, True, why, f"set {_TOKEN_LEVEL}=false")
    if loss.token_level_loss and loss.sequence_loss_divisor is not None:
        why = "the mean over tokens divides by their number"
        yield _refuse(_DIVISOR, loss.sequence_loss_divisor, _TOKEN_LEVEL, True, why, f"set {_TOKEN_LEVEL}=false")


def sequence_ratios_keep_the_mean(config: MasterConfig) -> Iterator[Conflict]:
    """A ratio per sequence is normalised by length already."""
    loss = config.loss_fn
    if loss.sequence_level_importance_ratios and loss.sequence_loss_divisor is not None:
        why = "a ratio per sequence is a mean over its tokens, and so must be its loss"
        fix = f"set {_DIVISOR}=null"
        yield _refuse(_DIVISOR, loss.sequence_loss_divisor, _SEQUENCE_RATIO, True, why, fix)


def kl_settings_need_a_penalty(config: MasterConfig) -> Iterator[Conflict]:
    """Without the KL term its settings mean nothing."""
    if config.loss_fn.reference_policy_kl_penalty == 0:
        names = [
            "reference_policy_kl_type",
            "kl_input_clamp_value",
            "kl_output_clamp_value",
            "use_on_policy_kl_approximation",
            "use_kl_in_reward",
        ]
        yield from inert(config.loss_fn, _LOSS, names, _BETA, f"{_BETA}=0 leaves the KL term out")


def kl_in_reward_has_an_estimator(config: MasterConfig) -> Iterator[Conflict]:
    """The estimators that compare siblings have one reward per response, not per token."""
    loss, name = config.loss_fn, config.grpo.adv_estimator.name
    if loss.use_kl_in_reward and loss.reference_policy_kl_penalty > 0 and name != "reinforce_plus_plus":
        key = "grpo.adv_estimator.name"
        why = "only reinforce_plus_plus subtracts the KL estimate from the reward of each token"
        fix = f"set {key}=reinforce_plus_plus, or {_KL_IN_REWARD}=false to have the KL term in the loss"
        yield _refuse(_KL_IN_REWARD, True, key, name, why, fix)


def kl_weight_needs_the_kl_in_the_loss(config: MasterConfig) -> Iterator[Conflict]:
    """In the reward, the estimate is a number and has no gradient to weigh."""
    loss = config.loss_fn
    if loss.use_on_policy_kl_approximation and loss.use_kl_in_reward and loss.reference_policy_kl_penalty > 0:
        why = "it weighs the KL term of the loss, which is in the reward"
        yield _refuse(_KL_WEIGHT, True, _KL_IN_REWARD, True, why, f"set {_KL_WEIGHT}=false or {_KL_IN_REWARD}=false")


def lookahead_needs_correction(config: MasterConfig) -> Iterator[Conflict]:
    """Rollouts of an older version must be weighted."""
    lookahead = config.async_rl.sampler.max_lookahead_versions
    if lookahead > 0 and not config.loss_fn.use_importance_sampling_correction:
        key = "async_rl.sampler.max_lookahead_versions"
        problem = f"{key}={lookahead} trains on rollouts of older versions, which needs {_CORRECTION}=true, got false"
        yield Conflict((key, _CORRECTION), problem, f"set {_CORRECTION}=true, or {key}=0 for a synchronous run")


def truncation_needs_a_weight(config: MasterConfig) -> Iterator[Conflict]:
    """Truncation bounds the weight of the importance-sampling correction."""
    kind = config.loss_fn.truncated_importance_sampling_type
    if kind is not None and not config.loss_fn.use_importance_sampling_correction:
        problem = f"{_TRUNCATION}_type={kind} truncates a weight that {_CORRECTION}=false leaves out"
        yield Conflict((f"{_TRUNCATION}_type", _CORRECTION), problem, f"set {_CORRECTION}=true")


def truncation_has_its_bounds(config: MasterConfig) -> Iterator[Conflict]:
    """A truncation needs its upper bound; the kinds that drop need the lower one too."""
    loss = config.loss_fn
    kind = loss.truncated_importance_sampling_type
    if kind is not None and loss.truncated_importance_sampling_ratio is None:
        keys = (f"{_TRUNCATION}_type", f"{_TRUNCATION}_ratio")
        yield Conflict(keys, f"{keys[0]}={kind} needs {keys[1]}, got null", f"set {keys[1]}=2.0")
    if kind in ("icepop", "seq-mask-tis") and loss.truncated_importance_sampling_ratio_min is None:
        keys = (f"{_TRUNCATION}_type", f"{_TRUNCATION}_ratio_min")
        yield Conflict(keys, f"{keys[0]}={kind} needs {keys[1]}, got null", f"set {keys[1]}=0.5")


def truncation_bounds_have_a_type(config: MasterConfig) -> Iterator[Conflict]:
    """Without a truncation its bounds mean nothing."""
    if config.loss_fn.truncated_importance_sampling_type is None:
        names = ["truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min"]
        key = f"{_TRUNCATION}_type"
        yield from inert(config.loss_fn, _LOSS, names, key, f"{key}=null truncates nothing; set {key}=tis")


def truncation_bounds_are_ordered(config: MasterConfig) -> Iterator[Conflict]:
    """The lower bound is not above the upper one."""
    upper = config.loss_fn.truncated_importance_sampling_ratio
    lower = config.loss_fn.truncated_importance_sampling_ratio_min
    if upper is not None and lower is not None and lower > upper:
        keys = (f"{_TRUNCATION}_ratio_min", f"{_TRUNCATION}_ratio")
        yield Conflict(keys, f"{keys[0]}={lower} is above {keys[1]}={upper}", "exchange them")


def sequence_mask_weighs_tokens(config: MasterConfig) -> Iterator[Conflict]:
    """With one weight per sequence there is nothing left for a sequence mask over token weights."""
    loss = config.loss_fn
    kind = loss.truncated_importance_sampling_type
    if kind == "seq-mask-tis" and loss.sequence_level_importance_ratios:
        key = f"{_TRUNCATION}_type"
        why = "it masks sequences of token weights, and here a sequence has one weight"
        yield _refuse(key, kind, _SEQUENCE_RATIO, True, why, f"set {key}=icepop or {_SEQUENCE_RATIO}=false")


LOSS_CHECKS: list[Check] = [
    on_policy_ratio_needs_one_update,
    one_ratio_is_chosen,
    clip_bounds_need_a_ratio,
    cispo_stands_alone,
    sequence_settings_need_a_sequence_loss,
    sequence_ratios_keep_the_mean,
    kl_settings_need_a_penalty,
    kl_in_reward_has_an_estimator,
    kl_weight_needs_the_kl_in_the_loss,
    lookahead_needs_correction,
    truncation_needs_a_weight,
    truncation_has_its_bounds,
    truncation_bounds_have_a_type,
    truncation_bounds_are_ordered,
    sequence_mask_weighs_tokens,
]
