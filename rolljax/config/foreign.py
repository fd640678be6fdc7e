"""Names of settings in TRL, verl and Tunix, and the corresponding settings here, which `--set` suggests.

The tables in docs/coming_from.md hold the same names, and the differences; `tests/unit/repository/test_site.py`
compares them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rolljax.errors import ConfigError

NAMES: Mapping[str, Mapping[str, str]] = {
    "TRL": {
        "model": "Recipe.model",
        "train_dataset": "Questions.path Records.path",
        "reward_funcs": "Questions.reward",
        "peft_config": "Recipe.lora Lora.rank Lora.alpha Lora.targets",
        "environment_factory": "TrlEnvironment.factory ToolEnv.inner",
        "tools": "ToolEnv.tools",
        "max_tool_calling_iterations": "ToolLimits.calls_per_episode",
        "num_generations": "Phase.group_size",
        "max_completion_length": "Recipe.max_answer_tok",
        "vllm_max_model_length": "SamplerConfig.max_context",
        "generation_batch_size": "Phase.prompts_per_step Phase.updates_per_step",
        "per_device_train_batch_size": "Phase.prompts_per_step Phase.updates_per_step",
        "gradient_accumulation_steps": "Phase.prompts_per_step Phase.updates_per_step",
        "steps_per_generation": "Phase.prompts_per_step Phase.updates_per_step",
        "num_iterations": "Phase.epochs",
        "max_steps": "Phase.steps",
        "temperature": "Phase.temperature",
        "top_p": "Phase.top_p",
        "top_k": "Phase.top_k",
        "min_p": "Phase.min_p",
        "learning_rate": "AdamW.lr",
        "weight_decay": "AdamW.weight_decay",
        "max_grad_norm": "AdamW.clip_norm",
        "warmup_steps": "AdamW.warmup_updates",
        "lr_scheduler_type": "AdamW.schedule",
        "adam_beta1": "AdamW.b1",
        "adam_beta2": "AdamW.b2",
        "adam_epsilon": "AdamW.eps",
        "epsilon": "Grpo.clip_low",
        "epsilon_high": "Grpo.clip_high",
        "delta": "Grpo.dual_clip",
        "beta": "Grpo.kl KlLoss.coef KlLoss.estimator",
        "sync_ref_model": "KlLoss.reference",
        "loss_type": "Grpo.aggregation Cispo.clip_high",
        "importance_sampling_level": "Gspo.clip_low Gspo.clip_high",
        "scale_rewards": "Grpo.std",
        "mask_truncated_completions": "Grpo.mask_truncated",
        "entropy_coef": "Grpo.entropy_coef",
        "vllm_importance_sampling_correction": "Grpo.correction",
        "vllm_importance_sampling_mode": "Correction.level",
        "vllm_importance_sampling_clip_max": "Correction.weight_cap",
        "use_vllm": "Recipe.placement",
        "vllm_mode": "Split.sampler",
        "vllm_gpu_memory_utilization": "SamplerConfig.pages SamplerConfig.slots",
        "vllm_tensor_parallel_size": "SamplerConfig.tensor",
        "gradient_checkpointing": "Recipe.remat",
        "bf16": "Recipe.dtype",
        "eval_steps": "Phase.eval_every Evaluation.tasks Evaluation.held_out_frac",
        "eval_dataset": "Phase.eval_every Evaluation.tasks Evaluation.held_out_frac",
        "save_steps": "Recipe.save_every",
        "save_total_limit": "Recipe.keep_checkpoints",
        "output_dir": "--run_dir",
        "resume_from_checkpoint": "--run_dir",
        "log_completions": "Recipe.rollouts_every",
        "seed": "Recipe.seed",
    },
    "verl": {
        "data.train_files": "Questions.path",
        "data.val_files": "Evaluation.held_out_frac Evaluation.tasks",
        "data.train_batch_size": "Phase.prompts_per_step",
        "data.max_response_length": "Recipe.max_answer_tok",
        "data.max_prompt_length": "SamplerConfig.max_context",
        "custom_reward_function.path": "Questions.reward",
        "custom_reward_function.name": "Questions.reward",
        "model.path": "Recipe.model",
        "model.enable_gradient_checkpointing": "Recipe.remat",
        "model.lora_rank": "Lora.rank",
        "model.lora_alpha": "Lora.alpha",
        "actor.ppo_mini_batch_size": "Phase.updates_per_step",
        "actor.ppo_micro_batch_size_per_gpu": "Phase.micro_rows",
        "actor.ppo_max_token_len_per_gpu": "Phase.row_len",
        "actor.ppo_epochs": "Phase.epochs",
        "actor.clip_ratio_low": "Grpo.clip_low",
        "actor.clip_ratio_high": "Grpo.clip_high",
        "actor.clip_ratio_c": "Grpo.dual_clip",
        "actor.loss_agg_mode": "Grpo.aggregation",
        "actor.entropy_coeff": "Grpo.entropy_coef",
        "actor.use_kl_loss": "Grpo.kl",
        "actor.kl_loss_coef": "KlLoss.coef",
        "actor.kl_loss_type": "KlLoss.estimator",
        "algorithm.use_kl_in_reward": "Grpo.kl KlReward.coef KlReward.adaptive AdaptiveKl.target",
        "algorithm.kl_ctrl": "Grpo.kl KlReward.coef KlReward.adaptive AdaptiveKl.target",
        "algorithm.adv_estimator": "Phase.algorithm",
        "algorithm.norm_adv_by_std_in_grpo": "Grpo.std",
        "algorithm.gamma": "Ppo.gamma",
        "algorithm.lam": "Ppo.lam",
        "algorithm.filter_groups": "Dapo.filter GroupFilter.dynamic_sampling_rounds",
        "critic.optim.lr": "Critic.optimizer",
        "critic.ppo_epochs": "Critic.epochs",
        "critic.cliprange_value": "Critic.clip",
        "trainer.critic_warmup": "Critic.warmup_steps",
        "actor.optim.lr": "AdamW.lr",
        "actor.optim.lr_warmup_steps": "AdamW.warmup_updates",
        "actor.optim.weight_decay": "AdamW.weight_decay",
        "actor.grad_clip": "AdamW.clip_norm",
        "actor.fsdp_config.fsdp_size": "MeshSpec.fsdp MeshSpec.data",
        "actor.fsdp_config.optimizer_offload": "AdamW.offload",
        "actor.ulysses_sequence_parallel_size": "MeshSpec.context",
        "rollout.n": "Phase.group_size",
        "rollout.temperature": "Phase.temperature",
        "rollout.top_p": "Phase.top_p",
        "rollout.top_k": "Phase.top_k",
        "rollout.tensor_model_parallel_size": "SamplerConfig.tensor",
        "rollout.gpu_memory_utilization": "SamplerConfig.pages",
        "rollout.max_num_seqs": "SamplerConfig.slots",
        "rollout.max_num_batched_tokens": "SamplerConfig.prefill_chunk",
        "rollout.multi_turn": "ToolEnv.tools Recipe.env Recipe.agent",
        "rollout.val_kwargs.temperature": "Evaluation.temperature",
        "trainer.total_training_steps": "Phase.steps",
        "trainer.save_freq": "Recipe.save_every",
        "trainer.test_freq": "Phase.eval_every",
        "trainer.max_actor_ckpt_to_keep": "Recipe.keep_checkpoints",
        "trainer.rollout_data_dir": "Recipe.rollouts_every",
        "trainer.resume_mode": "--fresh",
        "trainer.default_local_dir": "--run_dir",
        "trainer.nnodes": "Recipe.mesh MeshSpec.data Recipe.placement",
        "trainer.n_gpus_per_node": "Recipe.mesh MeshSpec.data Recipe.placement",
    },
    "Tunix": {
        "num_generations": "Phase.group_size",
        "num_iterations": "Phase.epochs",
        "beta": "Grpo.kl KlLoss.coef KlLoss.estimator",
        "kl_loss_mode": "Grpo.kl KlLoss.coef KlLoss.estimator",
        "epsilon": "Grpo.clip_low",
        "epsilon_high": "Grpo.clip_high",
        "epsilon_c": "Grpo.dual_clip",
        "loss_algo": "Gspo.clip_low",
        "loss_agg_mode": "Grpo.aggregation",
        "advantage_estimator": "Phase.algorithm",
        "sampler_is": "Grpo.correction",
        "sampler_is_threshold": "Correction.weight_cap",
        "use_rollout_logps": "Grpo.anchor",
        "overlong_loss_masking": "Grpo.mask_truncated",
        "off_policy_steps": "Phase.async_ratio",
        "max_concurrency": "SamplerConfig.slots PoolConfig.workers",
        "reward_num_workers": "PoolConfig.workers",
        "max_tokens_to_generate": "Recipe.max_answer_tok",
        "max_prompt_length": "SamplerConfig.max_context",
        "kv_cache_size": "SamplerConfig.pages",
        "temperature": "Phase.temperature",
        "top_p": "Phase.top_p",
        "top_k": "Phase.top_k",
        "rollout_engine": "Recipe.sampler",
        "role_to_mesh": "Recipe.placement Recipe.mesh SamplerConfig.tensor",
        "offload_to_cpu": "AdamW.offload",
        "mini_batch_size": "Phase.prompts_per_step Phase.updates_per_step Phase.micro_rows",
        "train_micro_batch_size": "Phase.prompts_per_step Phase.updates_per_step Phase.micro_rows",
        "max_steps": "Phase.steps",
        "eval_every_n_steps": "Phase.eval_every",
        "checkpoint_root_directory": "--run_dir",
        "module_path": "Lora.targets",
        "rank": "Lora.rank",
        "alpha": "Lora.alpha",
    },
}
"""Other frameworks' names: by framework, their name -> ours, separated by blanks. verl's are paths of keys, without
`actor_rollout_ref`."""


CLASSES = ("GRPOConfig", "TrainingArguments", "RolloutConfig", "RLTrainingConfig", "ClusterConfig")
"""Class names of TRL and Tunix."""


def foreign(name: str, fields: Collection[str], where: str) -> ConfigError | None:
    """Return the error for a setting's name that is another framework's; None if no framework has it.

    Args:
      name: as the user typed it: a name, the end of a path of keys, or either of them after a class
        (`GRPOConfig.beta`).
      fields: names of rolljax's own settings. One of these counts as another framework's only if the rest of the name
        identifies that framework, or if it means something else here.
    """
    found = {
        of: [o for theirs, ours in table.items() if _same(theirs, ours, name, fields) for o in ours.split()]
        for of, table in NAMES.items()
    }
    frameworks = [of for of, ours in found.items() if ours]
    if not frameworks:
        return None
    ours = ", ".join(dict.fromkeys(o for of in frameworks for o in found[of]))
    return ConfigError(
        f"is a setting of {' and '.join(frameworks)}",
        setting=name,
        where=where,
        remedy=f"ours: {ours}; docs/coming_from.md says what differs",
    )


def _same(theirs: str, ours: str, typed: str, fields: Collection[str]) -> bool:
    """Return whether a typed name is the other framework's: one path ends with the other, and it is not a misspelling
    of ours."""
    head, _, last = typed.rpartition("/")[2].rpartition(".")
    if last in fields and "." not in theirs:
        if head:
            return theirs == last and head in CLASSES
        return theirs == last and f".{last}" not in ours
    path = f".{head}.{last}" if head else f".{last}"
    return f".{theirs}".endswith(path) and (bool(head) or last not in fields) or path.endswith(f".{theirs}")
