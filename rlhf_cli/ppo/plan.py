"""The batch arithmetic of a run, printed before training."""

from __future__ import annotations

from rlhf_cli.ppo.setup import Setup
from rlhf_cli.rewards.models import RewardModel
from rlhf_cli.sharding import is_sharded
from rlhf_cli.training.progress import epochs


def plan(setup: Setup) -> list[tuple[str, str]]:
    """The batch arithmetic of the run, as (name, text) lines."""
    config, ppo, rollout = setup.config, setup.config.ppo, setup.config.rollout
    responses = ppo.num_iterations * ppo.rollout_batch_size
    passes = ppo.num_iterations * config.num_prompts / len(setup.train)
    per_step = f"{ppo.ppo_epochs} ppo_epochs x {ppo.rollout_batch_size // ppo.minibatch_size} minibatches"
    if ppo.num_rollouts_per_update > 1:
        per_step += f" x {ppo.num_rollouts_per_update} rollouts"
    micro = f", {ppo.microbatch_size} per microbatch" if ppo.microbatch_size else ""
    lines = [
        ("prompts", f"{len(setup.train):,} of {setup.mean_prompt_length:.0f} tokens on average; {epochs(passes)}"),
        (
            "rollouts",
            f"{ppo.num_iterations:,} iterations x {config.num_prompts:,} prompts x {rollout.samples_per_prompt} "
            f"= {responses:,} responses of at most {rollout.max_new_tokens} tokens "
            f"(at most {responses * rollout.max_new_tokens:,} tokens)",
        ),
        (
            "minibatches",
            f"{per_step} of {ppo.minibatch_size} responses{micro} = {ppo.steps_per_iteration} optimizer steps per "
            "iteration",
        ),
        ("microbatches", f"at most {setup.budget.tokens:,} tokens (ppo.tokens_per_microbatch)"),
        ("steps", f"{ppo.total_steps:,} in total, the first {config.optimizer.warmup_steps} of them warm-up"),
    ]
    if config.value_model.warmup_iterations:
        lines.append(("value warm-up", f"{config.value_model.warmup_iterations} iterations before the policy trains"))
    if config.ptx is not None:
        size = config.ptx.minibatch_size or ppo.minibatch_size
        steps = sum(ppo.updates(i) for i in range(config.value_model.warmup_iterations, ppo.num_iterations))
        passes = steps * size / len(setup.ptx)
        lines.append(("ptx", f"{size} rows per step = {epochs(passes)} over {len(setup.ptx):,} rows"))
    if setup.world.size > 1:
        lines.append(("processes", f"{setup.world.size}, which share each of these numbers"))
        models = {"policy": setup.models.policy, "ref_policy": setup.models.ref_policy}
        models |= {"value_model": setup.models.value_model}
        models |= {source.name: source.model for source in setup.rewards if isinstance(source, RewardModel)}
        if divided := [name for name, model in models.items() if model is not None and is_sharded(model)]:
            lines.append(("sharded", f"{', '.join(divided)} (distributed.shard)"))
    return lines
