"""Keys that users of NeMo RL know under another name, or that have no counterpart here, and what to write instead.

An entry covers the key itself and everything below it. It only words the error; no old key is ever accepted.
"""

RENAMED_KEYS: dict[str, str] = {
    "checkpointing.checkpoint_dir": "checkpoints stand in the run folder: set logger.log_dir",
    "checkpointing.checkpoint_must_save_by": "there is no time limit: set checkpointing.save_period",
    "cluster.name": "runs are named by their folder: set logger.log_dir",
    "data.dataset_name": "use data.train.kind (jsonl, hf, reasoning_gym, few_shot_addition) and data.train.path",
    "data.add_system_prompt": "use data.system_prompt",
    "data.system_prompt_file": "use data.system_prompt with the text itself",
    "data.val_dataset_name": "use data.validation.kind and data.validation.path",
    "data.num_workers": "prompts are tokenized by the controller; leave it out",
    "grpo.adv_estimator.normalize_rewards": "use grpo.normalize_rewards",
    "grpo.adv_estimator.use_leave_one_out_baseline": "use grpo.use_leave_one_out_baseline",
    "grpo.adv_estimator.weights": "use grpo.adv_estimator.reward_weights with names: {correctness: 1.0, format: 0.5}",
    "grpo.async_grpo.enabled": "synchronous is async_rl.sampler.max_lookahead_versions: 0, asynchronous is 1 or more",
    "grpo.async_grpo.max_trajectory_age_steps": "use async_rl.sampler.max_lookahead_versions",
    "grpo.async_grpo.in_flight_weight_updates": "use policy.generation.refit_cfg.pause_mode: keep",
    "grpo.async_grpo": "use the section async_rl",
    "grpo.skip_reference_policy_logprobs_calculation": (
        "the reference model runs only while loss_fn.reference_policy_kl_penalty is above 0; leave it out"
    ),
    "grpo.val_batch_size": "validation prompts run at once, up to async_rl.max_inflight_prompts; leave it out",
    "logger.tensorboard": "tensorboard/ stands in the run folder: use logger.tensorboard_enabled",
    "policy.generation.vllm_cfg.async_engine": "the engine is always asynchronous; leave it out",
    "policy.generation.vllm_cfg.max_model_len": "use policy.max_total_sequence_length",
    "policy.generation.vllm_cfg.precision": "the engine takes policy.precision; leave it out",
    "policy.tokenizer.chat_template_kwargs": "put the values into policy.tokenizer.chat_template",
}


def renamed(key: str) -> str | None:
    """Return what to write instead of `key`, when the table knows it or a section above it."""
    while key:
        if key in RENAMED_KEYS:
            return RENAMED_KEYS[key]
        key = key.rpartition(".")[0]
    return None
