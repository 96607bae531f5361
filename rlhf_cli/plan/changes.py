"""What makes a stage need less memory, the cheapest change first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import Stage
from rlhf_cli.errors import UserError
from rlhf_cli.plan.memory import Machine
from rlhf_cli.plan.stages import StagePlan

Plan = Callable[[list[str]], StagePlan]
"""The plan of the stage with further overrides. Raises UserError if the config refuses them."""


@dataclass(frozen=True)
class Change:
    """Overrides of the config, and the plan with them."""

    overrides: list[str]
    costs: str
    """What they cost."""
    plan: StagePlan
    """With them. If the config says `auto`, the microbatches take the memory that they free."""
    peak: float
    """Bytes at the tokens per microbatch of the plan before them: what they save."""


def single_changes(config: Stage, plan: StagePlan, machine: Machine, replan: Plan) -> list[Change]:
    """The changes that lower the peak by at least a hundredth at the same microbatches, each by itself."""
    changes = []
    same_tokens = f"{_section(config)}.tokens_per_microbatch={plan.tokens_per_microbatch}"
    for overrides, costs in _candidates(config, plan, machine):
        try:
            changed = replan(overrides)
            is_refilled = changed.tokens_per_microbatch > plan.tokens_per_microbatch
            peak = (replan([*overrides, same_tokens]) if is_refilled else changed).peak.total
        except UserError:
            continue  # the config refuses it beside what it has
        if peak < 0.99 * plan.peak.total:
            changes.append(Change(overrides, costs, changed, peak))
    return changes


def enough_changes(changes: list[Change], room: float, replan: Plan) -> Change | None:
    """The first of the changes that fits into `room` bytes by itself, or else the first few together.

    A change that does not lower the peak beside the earlier ones is left out. None if all together do not fit.
    """
    alone = next((change for change in changes if change.plan.peak.total <= room), None)
    chosen: list[str] = []
    best: StagePlan | None = None
    for change in changes:
        keys = {text.partition("=")[0] for text in change.overrides}
        beside = _beside([text for text in chosen if text.partition("=")[0] not in keys], change.overrides, replan)
        if beside is None or (best is not None and beside[1].peak.total >= 0.99 * best.peak.total):
            continue
        chosen, best = beside
        if best.peak.total <= room:
            break
    if best is None or best.peak.total > room:
        return alone
    if alone is not None and (set(alone.overrides) <= set(chosen) or changes.index(alone) <= len(chosen)):
        return alone
    return Change(chosen, "", best, best.peak.total)


def _beside(earlier: list[str], overrides: list[str], replan: Plan) -> tuple[list[str], StagePlan] | None:
    """Overrides beside earlier ones, and their plan. If the config refuses that, one of the earlier ones is dropped."""
    for dropped in [None, *reversed(earlier)]:
        texts = [*(text for text in earlier if text != dropped), *overrides]
        try:
            return texts, replan(texts)
        except UserError:
            continue
    return None


def _section(config: Stage) -> str:
    """The section with the microbatches."""
    return "ppo" if isinstance(config, PPOConfig) else "training"


def _candidates(config: Stage, plan: StagePlan, machine: Machine) -> list[tuple[list[str], str]]:
    """(overrides, what they cost), the cheapest first."""
    is_ppo, is_several = isinstance(config, PPOConfig), machine.processes > 1
    found: list[tuple[list[str], str]] = []
    for tokens in (plan.batch.tokens // 2, plan.batch.tokens // 8):
        if tokens >= 256:
            text = f"{_section(config)}.tokens_per_microbatch={tokens}"
            found.append(([text], "smaller passes; the same result"))
    found += _fewer_rows(config, machine)
    found.append((["gradient_checkpointing=true"], "a third more arithmetic"))
    shard = ["distributed.shard=true"] if is_several and plan.setting.sharded == 1 else []
    if shard and machine.processes > machine.per_node:
        found.append((["distributed.shard=hybrid"], "weights cross the links within a machine"))
    if shard:
        found.append((shard, "weights cross the network in each pass"))
    if is_ppo and is_several:
        found.append(([*shard, "rollout.decoder=sharded"], "all weights cross the network for each token"))
    found.append((["optimizer.precision=8bit"], "moments in 8 bits"))
    found.append((["optimizer.precision=bfloat16"], "weights and moments rounded to 16 bits"))
    if is_ppo:
        found.append((["offload=[optimizer, frozen]"], "copies between GPU and host in each iteration"))
    if is_several:
        found.append(([*shard, "distributed.offload=true"], "copies in each pass, AdamW steps on the CPU"))
    return [*found, *_adapters(config), _shorter(config)]


def _fewer_rows(config: Stage, machine: Machine) -> list[tuple[list[str], str]]:
    """Fewer responses that are sampled at the same time."""
    if isinstance(config, PPOConfig):
        key, num, most = "rollout", config.ppo.rollout_batch_size, config.rollout.max_live_rows
    elif isinstance(config, RMConfig):
        key, num, most = "evaluation", config.evaluation.num_normalization_samples, config.evaluation.max_live_rows
    else:
        return []
    rows = -(-num // machine.processes)
    live = min(rows, most or rows)
    return [([f"{key}.max_live_rows={live // n}"], "slower sampling") for n in (4, 16) if live // n]


def _adapters(config: Stage) -> list[tuple[list[str], str]]:
    assert isinstance(config, SFTConfig | RMConfig | PPOConfig)
    if isinstance(config, SFTConfig) and config.model.scratch is not None:
        return []
    if isinstance(config, PPOConfig):
        keys, lora = ["policy.lora", *["value_model.lora"] * config.ppo.has_value_model], config.policy.lora
    else:
        keys, lora = ["model.lora"], config.model.lora
    plain = [([f"{key}.r=16" for key in keys], "trains adapters only")] if lora is None else []
    return [*plain, ([f"{key}.quantize=nf4" for key in keys], "frozen weights in 4 bits")]


def _shorter(config: Stage) -> tuple[list[str], str]:
    if isinstance(config, PPOConfig):
        prompt, response = max(1, config.data.max_prompt_length // 2), max(1, config.rollout.max_new_tokens // 2)
        return [f"data.max_prompt_length={prompt}", f"rollout.max_new_tokens={response}"], "shorter texts"
    assert isinstance(config, SFTConfig | RMConfig)
    return [f"data.max_length={max(2, config.data.max_length // 2)}"], "drops longer rows"
