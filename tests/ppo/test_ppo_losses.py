"""Losses and gradients of PPO's update for every option, compared with slow loops over single tokens.

An option that is ignored, applied twice, or applied with the wrong sign or scale makes them differ.

Numbers in brackets are rows of the list of bugs in other implementations (docs of the project).
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.data.batches import Budget
from rlhf_cli.data.encode import Example
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.data.records import Record
from rlhf_cli.models.load import load_policy, new_reward_model, prepare
from rlhf_cli.ppo import update as ptx_module
from rlhf_cli.ppo.update import KLCoefs, UpdateBatch
from rlhf_cli.rollout.rollout import Models, collect
from rlhf_cli.rollout.sampling import Sampling, draw_uniforms
from stages import ppo as ppo_stage
from support.compare import grads, same_gradients
from support.oracles import KL_COEF, POLICY_KL_COEF, Case, slow_losses
from support.setup import Recorder, config_of, setup_of
from support.tiny import PROMPTS, STOP, merged, random_ids, write_jsonl

CUTS = ({"microbatch_size": 3}, {"microbatch_size": 1}, {}, {"tokens_per_microbatch": 40})
LONGEST = 14


# ------------------------------------------------------------------------------ the losses of an update


PLAIN = Sampling(temperature=0.8, stop=STOP)
FILTERED = Sampling(temperature=0.8, top_k=60, top_p=0.95, min_p=0.002, min_new_tokens=4, stop=STOP)
LEAST = Sampling(temperature=0.8, min_new_tokens=5, stop=STOP)


@pytest.fixture(scope="module")
def case_of(make_model):
    """A function: Sampling -> its Case, built once."""
    cases = {}
    path = str(make_model("llama"))

    def build(sampling):
        if sampling in cases:
            return cases[sampling]
        noise = torch.Generator().manual_seed(4)

        def with_noise(model, size):
            model = copy.deepcopy(model)
            with torch.no_grad():
                for p in model.parameters():
                    p += size * torch.randn(p.shape, generator=noise, dtype=p.dtype)
            return model

        old, (values, _) = load_policy(path), new_reward_model(path, None, seed=1, head_std=0.5)
        for model in (old, values):
            prepare(model, torch.device("cpu"))
            model.double()
        prompts = [PromptRow("", ids, Record("", "")) for ids in PROMPTS]
        ref_policy = with_noise(old, 0.02)
        uniforms = draw_uniforms(0, "test", 0, len(PROMPTS), LONGEST)
        options = {"tokenizer": None, "budget": Budget(40), "precision": "float32", "recompute": True}
        rollout = collect(prompts, uniforms, Models(old, ref_policy, values), sampling=sampling, **options)
        mask = rollout.response_mask
        fixed = torch.Generator().manual_seed(6)
        head = torch.nn.Linear(32, 1, bias=False, dtype=torch.float64)
        torch.nn.init.normal_(head.weight, std=0.3, generator=fixed)
        ids = random_ids(6, 15, 3, seed=8)
        cases[sampling] = Case(
            sampling=sampling,
            prompts=prompts,
            responses=rollout.responses,
            rollout=rollout,
            policy=with_noise(old, 0.015),
            ref_policy=ref_policy,
            value_model=with_noise(values, 0.01),
            head=head,
            advantages=torch.randn(mask.shape, generator=fixed, dtype=torch.float64) * mask,
            returns=rollout.values + torch.randn(mask.shape, generator=fixed, dtype=torch.float64) * mask,
            ptx=[Example(row, [t > len(row) // 3 for t in range(len(row))], "row") for row in ids],
        )
        return cases[sampling]

    return build


def update(case, config, *, shared=False, iteration=0):
    """Run `_update` on the case without changing weights.

    Returns (gradients of the policy, gradients of the value model or head, statistics).
    """
    head = case.head if shared else None
    value_model = None if shared else case.value_model
    for model in (case.policy, case.value_model, case.head):
        model.zero_grad()
    rows = case.rollout
    old = rows.response_mask, rows.logprobs, rows.sampled_logprobs, rows.ref_logprobs, rows.values
    batch = UpdateBatch(case.prompts, case.responses, *old, case.advantages, case.returns)
    steppers = Recorder(case.policy), Recorder(case.head if shared else case.value_model)
    setup = replace(
        setup_of(config, Models(case.policy, case.ref_policy, value_model, head), (), *steppers),
        sampling=case.sampling,
        ptx=case.ptx if config.ptx is not None else [],
        value_stepper=steppers[1],
    )
    stats = ppo_stage._update(setup, batch, iteration, KLCoefs(KL_COEF, POLICY_KL_COEF))
    return steppers[0].steps, steppers[1].steps, stats


def update_config(write_config, root, ppo=None, **changes):
    base = {"rollout_batch_size": 8, "minibatch_size": 8, "ppo_epochs": 1, "vf_coef": 0.3, "kl_coef": 0.9}
    changes = merged({"rollout": {"temperature": 0.8, "max_new_tokens": LONGEST}}, changes)
    return config_of(write_config, "ppo", PPOConfig, root, ppo={**base, **(ppo or {})}, **changes)


IN_LOSS = {"kl_in": "loss"}
PTX = {"train": "unread.jsonl"}
LOSSES = {
    "defaults": {},
    "clip_range": {"clip_range": 0.05},
    "clip_range_high": {"clip_range": 0.05, "clip_range_high": 0.3},
    "dual_clip": {"dual_clip": 1.1, "clip_range": 0.05},
    "penalty": {"objective": "penalty", "policy_kl_coef": 1.0},
    "sequence": {"loss_aggregation": "sequence"},
    "constant": {"loss_aggregation": "constant"},
    "entropy": {"entropy_coef": 0.3},
    "entropy as a cost": {"entropy_coef": -0.2},
    "k2": {**IN_LOSS, "kl_estimator": "k2"},
    "k3": {**IN_LOSS, "kl_estimator": "k3"},
    "abs": {**IN_LOSS, "kl_estimator": "abs"},
    "full": {**IN_LOSS, "kl_estimator": "full"},
    "k2_sequence, the default": IN_LOSS,
    "k2_sequence, per sequence": {**IN_LOSS, "loss_aggregation": "sequence"},
    "full, constant divisor": {**IN_LOSS, "kl_estimator": "full", "loss_aggregation": "constant"},
    "vf_coef": {"vf_coef": 2.0},
    "value_clip_range": {"value_clip_range": 0.05},
    "no value_clip_range": {"value_clip_range": None},
    "ptx additive": {"ptx": {**PTX, "coef": 1.7}},
    "ptx convex": {"ptx": {**PTX, "coef": 0.6, "mode": "convex"}},
    "combined": {
        **IN_LOSS,
        "objective": "penalty",
        "kl_estimator": "full",
        "loss_aggregation": "sequence",
        "entropy_coef": 0.2,
        "value_clip_range": 0.05,
        "ptx": {**PTX, "coef": 0.6, "mode": "convex"},
    },
}


def split(options):
    """Split options into those of `ppo` and those of `ptx`. `ptx` gets 3 rows per step."""
    ptx = {"ptx": {**options["ptx"], "minibatch_size": 3}} if "ptx" in options else {}
    return {"ppo": {k: v for k, v in options.items() if k != "ptx"}, **ptx}


@pytest.fixture(scope="module")
def default_gradients():
    """A function: gradients (policy, values) of the slow loop with default options, computed once."""
    cache = {}

    def compute(case, config, shared):
        key = (case.sampling, shared)
        if key not in cache:
            cache[key] = tuple(map(grads, slow_losses(case, config, shared=shared)[:2]))
        return cache[key]

    return compute


def largest_gap(a, b):
    size = max(g.abs().max() for g in b.values())
    return max((a[name] - b[name]).abs().max().item() for name in b) / size.item()


SHARED = ("defaults", "clip_range", "sequence", "full", "vf_coef", "value_clip_range", "ptx convex", "combined")
"""Options with which the gradients of the policy and of a shared head are added."""


@pytest.mark.parametrize(("name", "shared"), [*((name, False) for name in LOSSES), *((name, True) for name in SHARED)])
def test_losses_and_gradients_equal_those_of_the_slow_loop(
    case_of, default_gradients, write_config, tmp_path, name, shared
):
    """[11, 18, 19, 23, 34, 35, 42] To 1e-6 in float64, for a split into unequal microbatches; some for every split.

    The value loss of a separate value model reaches only that model. The value loss of a shared head also reaches the
    backbone, in addition to the policy loss.
    """
    sampling = FILTERED if len(name) % 2 else PLAIN  # about half of the options each
    if name == "combined":
        sampling = LEAST
    case, options = case_of(sampling), split(LOSSES[name])
    value_model = {"value_model": {"init": "shared"}} if shared else {}
    config = update_config(write_config, tmp_path, **options, **value_model)
    policy, values, expected = slow_losses(case, config, shared=shared)
    for cut in CUTS if name in ("defaults", "combined") else CUTS[:1]:
        cut_config = update_config(write_config, tmp_path, **merged(options, {"ppo": cut}), **value_model)
        policy_steps, value_steps, stats = update(case, cut_config, shared=shared)
        assert len(policy_steps) == len(value_steps) == 1
        same_gradients(policy_steps[0], grads(policy), 1e-6)
        same_gradients(value_steps[0], grads(values), 1e-6)
        assert stats["loss/policy"] == pytest.approx(expected["policy"], rel=1e-8)
        assert stats["loss/value"] == pytest.approx(expected["value"], rel=1e-8)
        if "ptx" in options:
            assert stats["loss/ptx"] == pytest.approx(expected["ptx"], rel=1e-8)
        if config.ppo.kl_in == "loss":
            assert stats["loss/kl"] == pytest.approx(expected["kl"], rel=1e-8)
        if config.ppo.entropy_coef and config.ppo.loss_aggregation == "token":
            assert stats["policy/full_entropy"] == pytest.approx(expected["entropy"], rel=1e-8)

    # The option changes the gradient of this case.
    if name != "defaults":
        only_values = name in ("vf_coef", "value_clip_range", "no value_clip_range")
        default = default_gradients(case, update_config(write_config, tmp_path, **value_model), shared)
        assert largest_gap(grads(values if only_values else policy), default[only_values]) > 1e-3
    num_tokens = sum(len(r.ids) for r in case.responses)
    if config.ppo.objective == "clip":
        assert 0 < expected["clipped"] < num_tokens
    if config.ppo.dual_clip:
        assert 0 < expected["capped"] < num_tokens
        assert stats["policy/dual_clip_fraction"] == pytest.approx(expected["capped"] / num_tokens)


@pytest.mark.parametrize("aggregation", ["sequence", "constant"])
def test_the_mean_over_responses_is_taken_over_the_minibatch(case_of, write_config, tmp_path, aggregation):
    """Two steps of four responses: the mean of their gradients is the gradient of all eight."""
    case, options = case_of(PLAIN), {"loss_aggregation": aggregation}
    policy, values, _ = slow_losses(case, update_config(write_config, tmp_path, options))
    config = update_config(write_config, tmp_path, {**options, "minibatch_size": 4})
    policy_steps, value_steps, _ = update(case, config)
    for steps, model in ((policy_steps, policy), (value_steps, values)):
        assert len(steps) == 2
        same_gradients({name: (steps[0][name] + steps[1][name]) / 2 for name in steps[0]}, grads(model), 1e-6)


@pytest.mark.parametrize("shared", [False, True], ids=["separate value model", "shared"])
def test_only_the_value_model_trains_during_its_warm_up(case_of, write_config, tmp_path, shared):
    """No loss gives the policy a gradient. The gradient of the head equals that of the slow loop."""
    case = case_of(PLAIN)
    value_model = {"value_model": {"warmup_iterations": 1, **({"init": "shared"} if shared else {})}}
    ptx = {"ptx": {**PTX, "coef": 0.6, "minibatch_size": 3}}
    options = {"num_iterations": 2, "entropy_coef": 0.1, "num_rollouts_per_update": 1}
    config = update_config(write_config, tmp_path, options, **value_model, **ptx)
    _, values, expected = slow_losses(case, config, shared=shared, learns_policy=False)
    policy_steps, value_steps, stats = update(case, config, shared=shared)
    assert policy_steps == []
    assert all(p.grad is None for p in case.policy.parameters())
    same_gradients(value_steps[0], grads(values), 1e-6)
    assert stats["loss/value"] == pytest.approx(expected["value"], rel=1e-8)
    assert "loss/ptx" not in stats
    policy_steps, _, stats = update(case, config, shared=shared, iteration=1)
    assert len(policy_steps) == 1
    assert "loss/ptx" in stats


def test_each_step_reads_the_next_ptx_rows(case_of, write_config, tmp_path, monkeypatch):
    """[35] Every row is read once per epoch, across iterations. The mean is over the tokens of the step."""
    case = case_of(PLAIN)
    rows = [Example(ids, [False, *[True] * (len(ids) - 1)], "row") for ids in random_ids(*range(3, 15), seed=12)]
    monkeypatch.setattr(case, "ptx", rows)
    batches, real = [], ptx_module.target_logprobs

    def spy(model, ids, learned):
        batches.append([list(row) for row in ids])
        return real(model, ids, learned)

    monkeypatch.setattr(ptx_module, "target_logprobs", spy)
    ptx = {"ptx": {**PTX, "coef": 1.0, "minibatch_size": 3}}
    config = update_config(write_config, tmp_path, {"num_iterations": 3, "minibatch_size": 4}, **ptx)
    for iteration in range(2):
        update(case, config, iteration=iteration)
    assert [len(batch) for batch in batches] == [3] * 4
    assert sorted(itertools.chain(*batches)) == sorted(row.ids for row in rows)
    batches.clear()
    for iteration in range(2):
        update(case, config, iteration=iteration)
    earlier = [*batches]
    update(case, config, iteration=2)
    assert earlier == batches[:4], "the same step reads the same rows"
    batches.clear()
    default_size = {"ptx": {**PTX, "coef": 1.0}}
    update(case, update_config(write_config, tmp_path, {"minibatch_size": 4}, **default_size))
    assert [len(batch) for batch in batches] == [4, 4], "null means ppo.minibatch_size"


def test_ptx_rows_are_encoded_like_sft_rows(start, data):
    """This includes loss_on, max_length and prompt_words."""
    train = str(data["demonstrations"])
    with start(ptx={"train": train, "coef": 1.0, "max_length": 96}) as setup:
        default_rows = setup.ptx
    assert len(default_rows) == 24
    with start(ptx={"train": train, "coef": 1.0, "max_length": 96, "loss_on": "all"}) as setup:
        for row, other in zip(setup.ptx, default_rows, strict=True):
            assert row.ids == other.ids
            assert row.loss_mask == [False] + [True] * (len(row.ids) - 1)
            assert sum(other.loss_mask) < sum(row.loss_mask)
    limit = sorted(len(row.ids) for row in default_rows)[10]
    with start(ptx={"train": train, "coef": 1.0, "max_length": limit}) as setup:
        assert list(setup.ptx) == [row for row in default_rows if len(row.ids) <= limit]
        assert 0 < len(setup.ptx) < 24
    folder = Path(train).parent
    texts = write_jsonl(folder / "texts.jsonl", [{"text": "please help the tent is late"}])
    with start(ptx={"train": str(texts), "coef": 1.0, "prompt_words": 2}) as setup:
        (row,) = setup.ptx
        learned_ids = [i for i, is_learned in zip(row.ids, row.loss_mask, strict=True) if is_learned]
        assert setup.tokenizer.decode(learned_ids[:-1]) == " the tent is late"
