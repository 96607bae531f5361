"""Every option of PPO's config, through the stage's own code, against slow obvious loops.

Two oracles do most of the work. `slow_losses` goes over the tokens of an update one by one, with plain
forwards in float64, and leaves the gradients that `_update` must leave. `check_update_batch` makes advantages and
returns out of the reward function's raw numbers and plain forwards of copies of the models, and holds them
against what a whole run handed to its update. An option that is ignored, applied twice, or applied with the
wrong sign or scale differs from them. What PPO saves is in test_ppo_models.py.

Numbers in brackets are rows of the list of bugs found in other implementations (docs of the project).
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import statistics
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import merged, read_jsonl, write_jsonl
from safetensors.torch import load_file
from test_invariants import PROMPTS, STOP, Recorder, close, config_of, grads, learner_of, random_ids, same_gradients
from test_stages import digests, encoder, run_processes, same_weights, word_piece
from torch.nn.functional import linear
from transformers import AutoModelForSequenceClassification

from rlhf_cli.config.models import Lora
from rlhf_cli.config.ppo import PPOConfig, PPOEvaluation, Ptx, Rollout, ValueModel
from rlhf_cli.config.ppo_update import PPO
from rlhf_cli.data.batches import Budget, stream
from rlhf_cli.data.encode import Example
from rlhf_cli.data.records import Prompt
from rlhf_cli.errors import ConfigError, RunError
from rlhf_cli.metrics import OF_THE_MACHINE
from rlhf_cli.models import load
from rlhf_cli.models.load import load_policy, new_reward_model, prepare
from rlhf_cli.ppo import report as figures
from rlhf_cli.ppo import setup
from rlhf_cli.ppo.batch import UpdateBatch
from rlhf_cli.rollout import rollout as rollout_module
from rlhf_cli.rollout.distribution import Sampling
from rlhf_cli.rollout.rollout import collect
from rlhf_cli.rollout.sampling import draw_uniforms, sample
from rlhf_cli.rollout.scoring import Models, PromptRow
from rlhf_cli.training.optimizer import Stepper
from rlhf_cli.training.stage_run import StageRun
from stages import ppo as ppo_stage

__all__ = ["word_piece"]
CUTS = ({"microbatch_size": 1}, {"microbatch_size": 3}, {}, {"tokens_per_microbatch": 40})
LONGEST = 14
NO_TEST = {"test": None, "test_fraction": 0}


# --------------------------------------------------------------------------------------- plain forwards


def plain_copy(model):
    """The model as transformers runs it by itself, one sequence at a time."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("sdpa")
    model.zero_grad()
    return model


def allowed_ids(response, t, sampling, vocabulary):
    """What token t of a response could have been."""
    if response.allowed_ids is not None:
        return response.allowed_ids[t]
    early = t + 1 < sampling.min_new_tokens
    return [i for i in range(vocabulary) if not (early and i in sampling.stop)]


def distributions(model, prompts, responses, sampling):
    """For each response and each of its tokens: (log-probabilities of what it could have been, which it was)."""
    found = []
    for prompt, response in zip(prompts, responses, strict=True):
        logits = model(input_ids=torch.tensor([prompt.ids + response.ids])).logits[0]
        at, row = len(prompt.ids), []
        for t, token in enumerate(response.ids):
            ids = allowed_ids(response, t, sampling, logits.shape[1])
            row.append(((logits[at + t - 1, ids] / sampling.temperature).log_softmax(0), ids.index(token)))
        found.append(row)
    return found


def hidden_states(backbone, prompts, responses):
    """For each response and each of its tokens: the last hidden state before it was chosen."""
    found = []
    for prompt, response in zip(prompts, responses, strict=True):
        hidden = backbone(input_ids=torch.tensor([prompt.ids + response.ids])).last_hidden_state[0]
        found.append([hidden[len(prompt.ids) + t - 1] for t in range(len(response.ids))])
    return found


def chosen(rows):
    """Of `distributions`: the log-probability of each token that was drawn."""
    return [[logprobs[k] for logprobs, k in row] for row in rows]


def full_kl(here, there):
    """sum p * (log p - log q) over what could have been drawn."""
    return (here.exp() * (here - there)).sum()


def numbers(rows):
    return [[float(x) for x in row] for row in rows]


def padded(rows):
    width = max(map(len, rows))
    return torch.tensor([[*map(float, row), *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)


# ------------------------------------------------------------------------------ the losses of an update


@dataclass
class Case:
    """A rollout of float64 models, and the same models a little later, so that ratios leave the clip range."""

    sampling: Sampling
    prompts: list
    responses: list
    rollout: object
    policy: torch.nn.Module
    ref_policy: torch.nn.Module
    value_model: torch.nn.Module
    head: torch.nn.Linear
    advantages: torch.Tensor
    returns: torch.Tensor
    ptx: list


PLAIN = Sampling(temperature=0.8, stop=STOP)
FILTERED = Sampling(temperature=0.8, top_k=60, top_p=0.95, min_p=0.002, min_new_tokens=4, stop=STOP)
LEAST = Sampling(temperature=0.8, min_new_tokens=5, stop=STOP)


@pytest.fixture(scope="module")
def case_of(make_model):
    """A function: sampling to a Case, made once."""
    made = {}
    path = str(make_model("llama"))

    def make(sampling):
        if sampling in made:
            return made[sampling]
        noise = torch.Generator().manual_seed(4)

        def moved(model, size):
            model = copy.deepcopy(model)
            with torch.no_grad():
                for p in model.parameters():
                    p += size * torch.randn(p.shape, generator=noise, dtype=p.dtype)
            return model

        old = load_policy(path)
        prepare(old, torch.device("cpu"))
        old = old.double()
        values = new_reward_model(path, None, seed=1, head_std=0.5)
        prepare(values, torch.device("cpu"))
        values = values.double()
        prompts = [PromptRow("", ids, Prompt("", "")) for ids in PROMPTS]
        ref_policy = moved(old, 0.02)
        table = draw_uniforms(0, "test", 0, len(PROMPTS), LONGEST)
        rollout = collect(
            prompts,
            table,
            Models(old, ref_policy, values),
            sampling=sampling,
            tokenizer=None,
            budget=Budget(40),
            precision="float32",
            recompute=True,
        )
        mask = rollout.response_mask
        fixed = torch.Generator().manual_seed(6)
        head = torch.nn.Linear(32, 1, bias=False, dtype=torch.float64)
        torch.nn.init.normal_(head.weight, std=0.3, generator=fixed)
        ids = random_ids(6, 15, 3, seed=8)
        made[sampling] = Case(
            sampling=sampling,
            prompts=prompts,
            responses=rollout.responses,
            rollout=rollout,
            policy=moved(old, 0.015),
            ref_policy=ref_policy,
            value_model=moved(values, 0.01),
            head=head,
            advantages=torch.randn(mask.shape, generator=fixed, dtype=torch.float64) * mask,
            returns=rollout.values + torch.randn(mask.shape, generator=fixed, dtype=torch.float64) * mask,
            ptx=[Example(row, [t > len(row) // 3 for t in range(len(row))], "row") for row in ids],
        )
        return made[sampling]

    return make


KL_COEF, POLICY_KL_COEF = 0.4, 0.7
"""The learner's own by now, whatever the config started from."""


def slow_losses(case, config, *, shared=False, learns_policy=True):
    """Every loss of one minibatch, token by token; returns (policy, values, numbers) with their gradients."""
    ppo, ptx = config.ppo, config.ptx
    policy, ref_policy = plain_copy(case.policy), plain_copy(case.ref_policy)
    value_model = copy.deepcopy(case.head) if shared else plain_copy(case.value_model)
    value_model.zero_grad()
    new = distributions(policy, case.prompts, case.responses, case.sampling)
    with torch.no_grad():
        ref = distributions(ref_policy, case.prompts, case.responses, case.sampling)
    backbone = policy.base_model if shared else value_model.base_model
    hidden = hidden_states(backbone, case.prompts, case.responses)
    head = value_model.weight if shared else value_model.score.weight
    num_tokens = sum(len(r.ids) for r in case.responses)
    seen = Counter()
    losses = {"policy": 0.0, "kl": 0.0, "entropy": 0.0, "value": 0.0, "ptx": 0.0}
    for b, response in enumerate(case.responses):
        length = len(response.ids)
        weight = {
            "token": 1 / num_tokens,
            "sequence": 1 / (len(case.responses) * length),
            "constant": 1 / (len(case.responses) * config.rollout.max_new_tokens),
        }[ppo.loss_aggregation]
        log_ratio_to_ref = 0.0
        for t in range(length):
            (p, k), (q, _) = new[b][t], ref[b][t]
            ratio = (p[k] - case.rollout.logprobs[b, t]).exp()
            advantage = case.advantages[b, t].item()
            if ppo.objective == "clip":
                high = ppo.clip_range if ppo.clip_range_high is None else ppo.clip_range_high
                clipped = ratio.clamp(1 - ppo.clip_range, 1 + high)
                gain = torch.minimum(ratio * advantage, clipped * advantage)
                seen["clipped"] += int((clipped * advantage < ratio * advantage).item())
                if ppo.dual_clip is not None and advantage < 0 and gain < ppo.dual_clip * advantage:
                    gain = torch.tensor(ppo.dual_clip * advantage, dtype=torch.float64)
                    seen["capped"] += 1
            else:
                gain = ratio * advantage - POLICY_KL_COEF * (ratio - 1 - ratio.log())
            losses["policy"] = losses["policy"] - weight * gain
            difference = p[k] - q[k]
            log_ratio_to_ref = log_ratio_to_ref + difference
            if ppo.kl_in == "loss" and ppo.kl_estimator not in (None, "k2_sequence"):
                kl = {
                    "k2": difference**2 / 2,
                    "k3": (-difference).exp() - 1 + difference,
                    "abs": difference.abs(),
                    "full": full_kl(p, q),
                }[ppo.kl_estimator]
                losses["kl"] = losses["kl"] + weight * kl
            losses["entropy"] = losses["entropy"] - weight * (p.exp() * p).sum()
            state = hidden[b][t].detach() if shared and not learns_policy else hidden[b][t]
            old, target = case.rollout.values[b, t], case.returns[b, t]
            value = linear(state, head)[0]
            error = (value - target) ** 2
            if ppo.value_clip_range is not None:
                near = old + (value - old).clamp(-ppo.value_clip_range, ppo.value_clip_range)
                seen["value_clipped"] += int(((near - target) ** 2 > error).item())
                error = torch.maximum(error, (near - target) ** 2)
            losses["value"] = losses["value"] + weight * 0.5 * error
        if ppo.kl_in == "loss" and ppo.kl_estimator in (None, "k2_sequence"):
            losses["kl"] = losses["kl"] + weight * log_ratio_to_ref**2 / 2
    total = losses["policy"] - ppo.entropy_coef * losses["entropy"]
    if ppo.kl_in == "loss":
        total = total + KL_COEF * losses["kl"]
    if ptx is not None:
        learnt = sum(sum(row.learnt) for row in case.ptx)
        for row in case.ptx:
            logprobs = policy(input_ids=torch.tensor([row.ids])).logits[0].log_softmax(-1)
            for t, is_learnt in enumerate(row.learnt):
                if is_learnt:
                    losses["ptx"] = losses["ptx"] - logprobs[t - 1, row.ids[t]] / learnt
        share = 1 - ptx.coef if ptx.mode == "convex" else 1.0
        total = share * total + ptx.coef * losses["ptx"]
    value_total = ppo.vf_coef * losses["value"]
    (total + value_total if learns_policy else value_total).backward()
    return (
        policy,
        value_model,
        {name: float(torch.as_tensor(loss).detach()) for name, loss in losses.items()} | dict(seen),
    )


def update(case, config, *, shared=False, iteration=0, values=True):
    """`_update` on the case, without a step: (gradients of the policy, of the value model or head, statistics)."""
    head = case.head if shared else None
    value_model = None if shared or not values else case.value_model
    for model in (case.policy, case.value_model, case.head):
        model.zero_grad()
    rows = case.rollout
    batch = UpdateBatch(
        case.prompts,
        case.responses,
        rows.response_mask,
        rows.logprobs,
        rows.ref_logprobs,
        rows.values,
        case.advantages,
        case.returns,
    )
    steppers = Recorder(case.policy), Recorder(case.head if shared else case.value_model)
    learner = replace(
        learner_of(config, Models(case.policy, case.ref_policy, value_model, head), (), *steppers),
        sampling=case.sampling,
        ptx=case.ptx if config.ptx is not None else [],
        kl_coef=KL_COEF,
        policy_kl_coef=POLICY_KL_COEF,
        value_stepper=steppers[1] if values else None,
    )
    stats = ppo_stage._update(learner, batch, iteration)
    return steppers[0].steps, steppers[1].steps, stats


def update_config(write_config, root, ppo=None, **changes):
    base = {"rollout_batch_size": 8, "minibatch_size": 8, "ppo_epochs": 1, "vf_coef": 0.3, "kl_coef": 0.9}
    changes = merged({"rollout": {"temperature": 0.8, "max_new_tokens": LONGEST}}, changes)
    return config_of(write_config, "ppo", PPOConfig, root, ppo={**base, **(ppo or {})}, **changes)


IN_LOSS = {"kl_in": "loss"}
PTX = {"train": "unread.jsonl"}
LOSSES = {
    "as it is": {},
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
    "k2_sequence": {**IN_LOSS, "kl_estimator": "k2_sequence"},
    "k2_sequence by default": IN_LOSS,
    "k2_sequence by sequence": {**IN_LOSS, "loss_aggregation": "sequence"},
    "full by constant": {**IN_LOSS, "kl_estimator": "full", "loss_aggregation": "constant"},
    "vf_coef": {"vf_coef": 2.0},
    "value_clip_range": {"value_clip_range": 0.05},
    "no value_clip_range": {"value_clip_range": None},
    "ptx additive": {"ptx": {**PTX, "coef": 1.7}},
    "ptx convex": {"ptx": {**PTX, "coef": 0.6, "mode": "convex"}},
    "all at once": {
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
    """Options of `ppo` beside ptx, which has a section of its own (with as many rows as one step takes)."""
    ptx = {"ptx": {**options["ptx"], "minibatch_size": 3}} if "ptx" in options else {}
    return {"ppo": {k: v for k, v in options.items() if k != "ptx"}, **ptx}


@pytest.fixture(scope="module")
def usual_gradients():
    """A function: those of the slow loop without any option, (of the policy, of the values), computed once."""
    made = {}

    def make(case, config, shared):
        key = (case.sampling, shared)
        if key not in made:
            made[key] = tuple(map(grads, slow_losses(case, config, shared=shared)[:2]))
        return made[key]

    return make


def largest_gap(a, b):
    size = max(g.abs().max() for g in b.values())
    return max((a[name] - b[name]).abs().max().item() for name in b) / size.item()


@pytest.mark.parametrize("shared", [False, True], ids=["own value model", "shared"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_the_slow_loop(
    case_of, usual_gradients, write_config, tmp_path, name, shared
):
    """[11, 18, 19, 23, 34, 35, 42] To 1e-6 in float64, however the minibatch is cut.

    With a model of its own the value loss reaches the value model alone; a shared head's reaches the backbone
    too, beside the policy's loss.
    """
    sampling = FILTERED if len(name) % 2 else PLAIN
    if name == "all at once":
        sampling = LEAST
    case, options = case_of(sampling), split(LOSSES[name])
    value_model = {"value_model": {"init": "shared"}} if shared else {}
    config = update_config(write_config, tmp_path, **options, **value_model)
    policy, values, wanted = slow_losses(case, config, shared=shared)
    for cut in CUTS:
        cut_config = update_config(write_config, tmp_path, **merged(options, {"ppo": cut}), **value_model)
        policy_steps, value_steps, stats = update(case, cut_config, shared=shared)
        assert len(policy_steps) == len(value_steps) == 1
        same_gradients(policy_steps[0], grads(policy), 1e-6)
        same_gradients(value_steps[0], grads(values), 1e-6)
        assert stats["loss/policy"] == pytest.approx(wanted["policy"], rel=1e-8)
        assert stats["loss/value"] == pytest.approx(wanted["value"], rel=1e-8)
        if "ptx" in options:
            assert stats["loss/ptx"] == pytest.approx(wanted["ptx"], rel=1e-8)
        if config.ppo.kl_in == "loss":
            assert stats["loss/kl"] == pytest.approx(wanted["kl"], rel=1e-8)
        if config.ppo.entropy_coef and config.ppo.loss_aggregation == "token":
            assert stats["policy/full_entropy"] == pytest.approx(wanted["entropy"], rel=1e-8)

    # That the option does something here, and is seen to.
    if name != "as it is":
        only_values = name in ("vf_coef", "value_clip_range", "no value_clip_range")
        usual = usual_gradients(case, update_config(write_config, tmp_path, **value_model), shared)
        assert largest_gap(grads(values if only_values else policy), usual[only_values]) > 1e-3
    num_tokens = sum(len(r.ids) for r in case.responses)
    if config.ppo.objective == "clip":
        assert 0 < wanted["clipped"] < num_tokens
    if config.ppo.dual_clip:
        assert 0 < wanted["capped"] < num_tokens
        assert stats["policy/dual_clip_fraction"] == pytest.approx(wanted["capped"] / num_tokens)


@pytest.mark.parametrize("aggregation", ["sequence", "constant"])
def test_a_mean_over_responses_is_one_over_the_minibatch(case_of, write_config, tmp_path, aggregation):
    """Two steps of four responses: the mean of their gradients is the gradient of all eight."""
    case, options = case_of(PLAIN), {"loss_aggregation": aggregation}
    whole, values, _ = slow_losses(case, update_config(write_config, tmp_path, options))
    config = update_config(write_config, tmp_path, {**options, "minibatch_size": 4})
    policy_steps, value_steps, _ = update(case, config)
    for steps, model in ((policy_steps, whole), (value_steps, values)):
        assert len(steps) == 2
        same_gradients({name: (steps[0][name] + steps[1][name]) / 2 for name in steps[0]}, grads(model), 1e-6)


@pytest.mark.parametrize("shared", [False, True], ids=["own value model", "shared"])
def test_in_the_warm_up_only_values_learn(case_of, write_config, tmp_path, shared):
    """The policy gets no gradient at all, from no loss; the head's is the slow loop's."""
    case = case_of(PLAIN)
    value_model = {"value_model": {"warmup_iterations": 1, **({"init": "shared"} if shared else {})}}
    ptx = {"ptx": {**PTX, "coef": 0.6, "minibatch_size": 3}}
    options = {"num_iterations": 2, "entropy_coef": 0.1, "num_rollouts_per_update": 1}
    config = update_config(write_config, tmp_path, options, **value_model, **ptx)
    _, values, wanted = slow_losses(case, config, shared=shared, learns_policy=False)
    policy_steps, value_steps, stats = update(case, config, shared=shared)
    assert policy_steps == []
    assert all(p.grad is None for p in case.policy.parameters())
    same_gradients(value_steps[0], grads(values), 1e-6)
    assert stats["loss/value"] == pytest.approx(wanted["value"], rel=1e-8)
    assert "loss/ptx" not in stats
    policy_steps, _, stats = update(case, config, shared=shared, iteration=1)
    assert len(policy_steps) == 1
    assert "loss/ptx" in stats


def test_without_values_there_is_no_value_loss(case_of, write_config, tmp_path):
    case = case_of(PLAIN)
    config = config_of(
        write_config,
        "ppo",
        PPOConfig,
        tmp_path,
        rollout={"temperature": 0.8},
        ppo={"rollout_batch_size": 8, "minibatch_size": 8, "ppo_epochs": 1, "advantage_estimator": "reinforce"},
    )
    policy, _, wanted = slow_losses(case, config)
    policy_steps, value_steps, stats = update(case, config, values=False)
    same_gradients(policy_steps[0], grads(policy), 1e-6)
    assert value_steps == []
    assert not [key for key in stats if "value" in key]
    assert stats["loss/policy"] == pytest.approx(wanted["policy"], rel=1e-8)


def test_each_step_takes_its_own_rows_for_ptx(case_of, write_config, tmp_path, monkeypatch):
    """[35] Every row once in an epoch of steps, whatever the iteration; the mean is over the step's own tokens."""
    case = case_of(PLAIN)
    rows = [Example(ids, [False, *[True] * (len(ids) - 1)], "row") for ids in random_ids(*range(3, 15), seed=12)]
    monkeypatch.setattr(case, "ptx", rows)
    taken, real = [], ppo_stage.target_logprobs

    def spy(model, ids, learnt):
        taken.append([list(row) for row in ids])
        return real(model, ids, learnt)

    monkeypatch.setattr(ppo_stage, "target_logprobs", spy)
    ptx = {"ptx": {**PTX, "coef": 1.0, "minibatch_size": 3}}
    config = update_config(write_config, tmp_path, {"num_iterations": 3, "minibatch_size": 4}, **ptx)
    for iteration in range(2):
        update(case, config, iteration=iteration)
    assert [len(part) for part in taken] == [3] * 4
    assert sorted(itertools.chain(*taken)) == sorted(row.ids for row in rows)
    taken.clear()
    for iteration in range(2):
        update(case, config, iteration=iteration)
    again = [*taken]
    update(case, config, iteration=2)
    assert again == taken[:4], "the same step takes the same rows"
    taken.clear()
    by_default = {"ptx": {**PTX, "coef": 1.0}}
    update(case, update_config(write_config, tmp_path, {"minibatch_size": 4}, **by_default))
    assert [len(part) for part in taken] == [4, 4], "null takes ppo.minibatch_size"


def test_ptx_rows_are_read_as_sft_reads_them(start, data):
    """loss_on, max_length and prompt_words."""
    train = str(data["demonstrations"])
    with start(ptx={"train": train, "coef": 1.0, "max_length": 96}) as learner:
        usual = learner.ptx
    assert len(usual) == 24
    with start(ptx={"train": train, "coef": 1.0, "max_length": 96, "loss_on": "all"}) as learner:
        for row, other in zip(learner.ptx, usual, strict=True):
            assert row.ids == other.ids
            assert row.learnt == [False] + [True] * (len(row.ids) - 1)
            assert sum(other.learnt) < sum(row.learnt)
    limit = sorted(len(row.ids) for row in usual)[10]
    with start(ptx={"train": train, "coef": 1.0, "max_length": limit}) as learner:
        assert list(learner.ptx) == [row for row in usual if len(row.ids) <= limit]
        assert 0 < len(learner.ptx) < 24
    folder = Path(train).parent
    texts = write_jsonl(folder / "texts.jsonl", [{"text": "please help the tent is late"}])
    with start(ptx={"train": str(texts), "coef": 1.0, "prompt_words": 2}) as learner:
        (row,) = learner.ptx
        learnt = [i for i, yes in zip(row.ids, row.learnt, strict=True) if yes]
        assert learner.tokenizer.decode(learnt[:-1]) == " the tent is late"


# ------------------------------------------------------------- from raw scores to advantages and returns

FUNCTIONS = '''
SEEN = []


def letters(prompts, responses, rows):
    """Of either sign, unlike for almost every response; what it was asked and said is kept."""
    values = [len(r) % 7 - 3.0 + 0.25 * r.count("e") for r in responses]
    SEEN.append({"prompts": prompts, "responses": responses, "rows": rows, "values": values})
    return values


def ends(prompts, responses, rows):
    return [0.5 + row["ended"] for row in rows]


def tokens(prompts, responses, rows):
    values = [[0.25 * len(text) - 0.5 * (i % 3) for i, text in enumerate(row["tokens"])] for row in rows]
    SEEN.append({"prompts": prompts, "responses": responses, "rows": rows, "dense": values})
    return values


def infinite(prompts, responses, rows):
    SEEN.append({})
    return [float("inf") if len(SEEN) > 1 else 0.0 for _ in rows]
'''


@pytest.fixture(scope="session")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "rewards.py"
    path.write_text(FUNCTIONS, encoding="utf-8")
    return path


@pytest.fixture
def base(make_model, tokenizer, functions):
    """A run of PPO that needs no stage before it; about one token in six ends a response."""
    return {
        "policy": {"path": str(make_model("llama"))},
        "rewards": [{"type": "function", "function": f"{functions}:letters"}],
        "data": NO_TEST,
        "rollout": {"max_new_tokens": 8, "stop_tokens": tokenizer.convert_ids_to_tokens(sorted(STOP))},
        "ppo": {"num_iterations": 2, "rollout_batch_size": 8, "minibatch_size": 4, "ppo_epochs": 1},
        "optimizer": {"learning_rate": 5e-3},
    }


@pytest.fixture
def start(write_config, base, tmp_path):
    """A function: changes to a loaded Learner, whose stage is open for a while."""

    @contextmanager
    def begin(**changes):
        config = config_of(write_config, "ppo", PPOConfig, tmp_path / "learner", **merged(base, changes))
        with StageRun("ppo", config, quiet=True) as stage:
            yield setup.load_learner(config, stage)

    return begin


@pytest.fixture
def watch(monkeypatch, run_stage, base, tmp_path):
    """A function: run PPO and keep what passed between its steps.

    learner; rollouts, and models as they were at each; batches, what each update learnt from; steps, the
    statistics of each minibatch; moves, whether each call of `advance` stepped, by (name of the model); after,
    the policy's weights behind each update; metrics, the rows of metrics.jsonl; place, the stage's directory.
    """

    def run(name="run", before_rollout=None, **changes):
        seen = SimpleNamespace(
            learner=None, rollouts=[], models=[], batches=[], steps=[], moves=[], after=[], weights=[]
        )
        real = {part: getattr(ppo_stage, part) for part in ("load_learner", "_rollout", "_update", "_backward")}
        advance = Stepper.advance

        def load_learner(config, stage):
            seen.learner = real["load_learner"](config, stage)
            return seen.learner

        def rollout(learner, iteration):
            if before_rollout is not None:
                before_rollout(learner, iteration)
            seen.models.append(copy.deepcopy(learner.models))
            seen.rollouts.append(real["_rollout"](learner, iteration))
            return seen.rollouts[-1]

        def backward(*args):
            sums, error = real["_backward"](*args)
            seen.steps.append(dict(sums))
            return sums, error

        def one_update(learner, batch, iteration):
            seen.batches.append(batch)
            stats = real["_update"](learner, batch, iteration)
            seen.after.append(weights_of(learner.models.policy))
            return stats

        def step(self, *, move=True):
            advance(self, move=move)
            which = "policy" if self is seen.learner.policy_stepper else "value"
            seen.moves.append((which, move))
            if which == "policy":
                seen.weights.append(weights_of(self.model))

        with monkeypatch.context() as patch:
            patch.setattr(ppo_stage, "load_learner", load_learner)
            patch.setattr(ppo_stage, "_rollout", rollout)
            patch.setattr(ppo_stage, "_backward", backward)
            patch.setattr(ppo_stage, "_update", one_update)
            patch.setattr(Stepper, "advance", step)
            seen.place = run_stage("ppo", tmp_path / name, **merged(base, changes))
        seen.metrics = read_jsonl(seen.place / "metrics.jsonl")
        return seen

    return run


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def said(learner, number=0):
    """What the reward function `number` of a run was asked and answered, call by call."""
    return learner.rewards[number].function.__globals__["SEEN"]


def mean_std(values):
    return statistics.fmean(values), statistics.stdev(values)


def whiten(rows, *, keep_mean):
    mean, std = mean_std(list(itertools.chain(*rows)))
    scale = math.sqrt(std**2 + 1e-8)
    return [[(x - mean) / scale + (mean if keep_mean else 0.0) for x in row] for row in rows]


def slow_score(config, raw, responses, mean, std):
    """The raw score normalised, clipped, less each penalty."""
    ppo, longest = config.ppo, config.rollout.max_new_tokens
    found = []
    for score, response in zip(raw, responses, strict=True):
        length = len(response.ids)
        score = (score - mean) / std
        if ppo.score_clip is not None:
            score = max(-ppo.score_clip, min(score, ppo.score_clip))
        if not response.ended:
            score -= ppo.missing_eos_penalty
        score -= ppo.length_penalty * length
        if ppo.overlong_buffer and length > longest - ppo.overlong_buffer:
            score -= ppo.overlong_penalty * (length - (longest - ppo.overlong_buffer)) / ppo.overlong_buffer
        found.append(score)
    return found


def over_groups(config, totals, kind):
    n, found = config.rollout.samples_per_prompt, []
    for i, total in enumerate(totals):
        group = totals[i // n * n : i // n * n + n]
        others = [x for j, x in enumerate(group) if j != i % n]
        mean = statistics.fmean(group)
        found.append(
            {
                "rloo": lambda total=total, others=others: total - statistics.fmean(others),
                "grpo": lambda total=total, mean=mean, group=group: (total - mean) / (statistics.stdev(group) + 1e-6),
                "dr_grpo": lambda total=total, mean=mean: total - mean,
            }[kind]()
        )
    return found


def slow_token_rewards(config, score, dense, logprobs, ref_logprobs, kl_full, kl_coef):
    ppo = config.ppo
    if ppo.advantage_estimator == "reinforce_pp_baseline":
        score = over_groups(config, score, "dr_grpo")
    rows = []
    for b, row in enumerate(logprobs):
        rewards = []
        for t, logprob in enumerate(row):
            difference = logprob - ref_logprobs[b][t]
            kl = {
                None: difference,
                "k1": difference,
                "k2": difference**2 / 2,
                "k3": math.exp(-difference) - 1 + difference,
                "abs": abs(difference),
                "full": kl_full[b][t],
            }[ppo.kl_estimator if ppo.kl_in == "reward" else None]
            reward = -kl_coef * kl if ppo.kl_in == "reward" else 0.0
            if dense is not None:
                reward += dense[b][t]
            if t == len(row) - 1:
                reward += score[b]
            rewards.append(reward)
        rows.append(rewards)
    return rows


def slow_advantages(config, rewards, values):
    """From the definitions: a sum over what is to come, not a recursion."""
    ppo, name = config.ppo, config.ppo.advantage_estimator
    gamma = ppo.gamma

    def by_lambda(lam):
        rows = []
        for r, v in zip(rewards, values, strict=True):
            deltas = [r[t] + gamma * (v[t + 1] if t + 1 < len(r) else 0.0) - v[t] for t in range(len(r))]
            rows.append([sum((gamma * lam) ** (j - t) * deltas[j] for j in range(t, len(r))) for t in range(len(r))])
        return rows

    to_go = [[sum(gamma ** (j - t) * r[j] for j in range(t, len(r))) for t in range(len(r))] for r in rewards]
    returns = to_go
    if name == "gae":
        advantages = by_lambda(ppo.gae_lambda)
        learnt = by_lambda(ppo.gae_lambda if ppo.value_lambda is None else ppo.value_lambda)
        returns = [[a + v for a, v in zip(x, y, strict=True)] for x, y in zip(learnt, values, strict=True)]
    elif name == "monte_carlo":
        advantages = [[a - v for a, v in zip(x, y, strict=True)] for x, y in zip(to_go, values, strict=True)]
    elif name in ("rloo", "grpo", "dr_grpo"):
        totals = over_groups(config, [sum(r) for r in rewards], name)
        advantages = [[total] * len(r) for total, r in zip(totals, rewards, strict=True)]
    else:
        advantages = to_go
    by_default = name.startswith("reinforce_pp") or (name in ("gae", "monte_carlo") and ppo.kl_in == "reward")
    if by_default if ppo.whiten_advantages is None else ppo.whiten_advantages:
        advantages = whiten(advantages, keep_mean=False)
    return advantages, returns


def weighted_scores(config, learner, call):
    """Of the reward functions' `call`-th answers: (weighted sum of the whole-response ones, of the dense ones)."""
    sums, dense = None, None
    for number, reward in enumerate(config.rewards):
        function = reward.function.rpartition(":")[2]
        if reward.per_token:
            rows = [[reward.weight * x for x in row] for row in said(learner, number)[call]["dense"]]
            old = dense or [[0.0] * len(row) for row in rows]
            dense = [[a + b for a, b in zip(*two, strict=True)] for two in zip(old, rows, strict=True)]
            continue
        asked = said(learner)[call]
        values = asked["values"] if function == "letters" else [0.5 + row["ended"] for row in asked["rows"]]
        values = [reward.weight * x for x in values]
        sums = values if sums is None else [a + b for a, b in zip(sums, values, strict=True)]
    num_rows = len(said(learner)[call]["responses"])
    return sums if sums is not None else [0.0] * num_rows, dense


@torch.no_grad()
def check_update_batch(run, num_reference_calls=0):
    """Each update's advantages, returns, log-probabilities and values against slow loops from raw scores on.

    Returns what the slow loops found, iteration by iteration.
    """
    learner, config = run.learner, run.learner.config
    ppo, kl_coef = config.ppo, config.ppo.kl_coef
    so_far, found = [], []
    for i, (rollout, models, batch) in enumerate(zip(run.rollouts, run.models, run.batches, strict=True)):
        here, there = plain_copy(models.policy), plain_copy(models.ref_policy)
        asked = (rollout.prompts, rollout.responses, learner.sampling)
        p, q = distributions(here, *asked), distributions(there, *asked)
        logprobs, ref_logprobs = numbers(chosen(p)), numbers(chosen(q))
        kl_full = [[float(full_kl(a[0], b[0])) for a, b in zip(*two, strict=True)] for two in zip(p, q, strict=True)]
        values = [[0.0] * len(row) for row in logprobs]
        if ppo.advantage_estimator in ("gae", "monte_carlo"):
            backbone = here.base_model
            weight = models.value_head.weight if models.value_head is not None else models.value_model.score.weight
            if models.value_model is not None:
                backbone = plain_copy(models.value_model).base_model
            states = hidden_states(backbone, *asked[:2])
            values = [[float(linear(state, weight)[0]) for state in row] for row in states]
        raw, dense = weighted_scores(config, learner, num_reference_calls + i)
        so_far += raw
        mean, std = 0.0, 1.0
        if ppo.score_normalization == "running":
            mean, std = mean_std(so_far)
        elif ppo.score_normalization == "reference":
            samples = [weighted_scores(config, learner, call)[0] for call in range(num_reference_calls)]
            mean, std = mean_std(list(itertools.chain(*samples)))
        score = slow_score(config, raw, rollout.responses, mean, std)
        unwhitened = slow_token_rewards(config, score, dense, logprobs, ref_logprobs, kl_full, kl_coef)
        rewards = whiten(unwhitened, keep_mean=True) if ppo.whiten_rewards else unwhitened
        advantages, returns = slow_advantages(config, rewards, values)
        for tensor, wanted in (
            (batch.advantages, advantages),
            (batch.returns, returns),
            (batch.logprobs, logprobs),
            (batch.ref_logprobs, ref_logprobs),
            (batch.values, values),
        ):
            close(tensor.double(), padded(wanted), 1e-4)
        row = run.metrics[i]
        response_kl = statistics.fmean(sum(a) - sum(b) for a, b in zip(logprobs, ref_logprobs, strict=True))
        assert row["objective/kl"] == pytest.approx(response_kl, abs=1e-4)
        assert row["objective/kl_coef"] == pytest.approx(kl_coef, rel=1e-6)
        assert row["objective/reward"] == pytest.approx(statistics.fmean(map(sum, rewards)), abs=1e-4)
        total = [a + sum(b) for a, b in zip(raw, dense or [[]] * len(raw), strict=True)]
        assert row["objective/score"] == pytest.approx(statistics.fmean(total), abs=1e-4)
        if ppo.kl_controller == "adaptive":
            error = max(-0.2, min(row["objective/kl"] / ppo.kl_target - 1, 0.2))
            kl_coef *= 1 + error * ppo.rollout_batch_size / ppo.kl_horizon
        found.append(SimpleNamespace(raw=raw, score=score, unwhitened=unwhitened, rewards=rewards))
    return found


GROUPS = {"rollout": {"samples_per_prompt": 4}}
NONE = {"kl_coef": 0.3}
EXPERIENCES = {
    "as it is": {"ppo": NONE},
    "value_lambda": {"ppo": {**NONE, "gae_lambda": 0.8, "value_lambda": 1.0, "gamma": 0.9}},
    "gamma": {"ppo": {**NONE, "gamma": 0.7, "gae_lambda": 0.5}},
    "monte_carlo": {"ppo": {**NONE, "advantage_estimator": "monte_carlo", "gamma": 0.9}},
    "reinforce": {"ppo": {**NONE, "advantage_estimator": "reinforce", "gamma": 0.9}},
    "reinforce whitened": {"ppo": {**NONE, "advantage_estimator": "reinforce", "whiten_advantages": True}},
    "reinforce_pp": {"ppo": {**NONE, "advantage_estimator": "reinforce_pp"}},
    "reinforce_pp_baseline": {"ppo": {**NONE, "advantage_estimator": "reinforce_pp_baseline"}, **GROUPS},
    "rloo": {"ppo": {**NONE, "advantage_estimator": "rloo"}, **GROUPS},
    "grpo": {"ppo": {**NONE, "advantage_estimator": "grpo"}, **GROUPS},
    "dr_grpo": {"ppo": {**NONE, "advantage_estimator": "dr_grpo"}, **GROUPS},
    "dr_grpo whitened": {"ppo": {**NONE, "advantage_estimator": "dr_grpo", "whiten_advantages": True}, **GROUPS},
    "groups with values": {"ppo": NONE, **GROUPS},
    "no whitening": {"ppo": {**NONE, "whiten_advantages": False}},
    "whiten_rewards": {"ppo": {**NONE, "whiten_rewards": True, "whiten_advantages": False}},
    "k2": {"ppo": {**NONE, "kl_estimator": "k2"}},
    "k3": {"ppo": {**NONE, "kl_estimator": "k3"}},
    "abs": {"ppo": {**NONE, "kl_estimator": "abs"}},
    "full": {"ppo": {**NONE, "kl_estimator": "full"}, "rollout": {"top_k": 40, "temperature": 0.7}},
    "kl in the loss": {"ppo": {**NONE, "kl_in": "loss"}},
    "kl in the loss, whitened": {"ppo": {**NONE, "kl_in": "loss", "whiten_advantages": True}},
    "kl in the loss, reinforce_pp": {"ppo": {**NONE, "kl_in": "loss", "advantage_estimator": "reinforce_pp"}},
    "adaptive": {"ppo": {"kl_coef": 0.3, "kl_controller": "adaptive", "kl_target": 0.5, "kl_horizon": 20}},
    "adaptive, small error": {
        "ppo": {"kl_coef": 0.3, "kl_controller": "adaptive", "kl_target": 100.0, "kl_horizon": 20}
    },
    "running": {"ppo": {**NONE, "score_normalization": "running", "score_clip": 0.8}},
    "reference": {"ppo": {**NONE, "score_normalization": "reference", "num_reference_samples": 12}},
    "score_clip": {"ppo": {**NONE, "score_clip": 1.1}},
    "penalties": {
        "ppo": {
            **NONE,
            "missing_eos_penalty": 0.7,
            "length_penalty": 0.05,
            "overlong_buffer": 5,
            "overlong_penalty": 0.9,
        }
    },
    "no penalty": {"ppo": {**NONE, "missing_eos_penalty": 0.0}},
    "a dense reward": {"ppo": NONE, "rewards": [("tokens", 0.5, True)]},
    "two dense rewards among others": {
        "ppo": {**NONE, "score_normalization": "running", "score_clip": 0.8, "missing_eos_penalty": 0.3},
        "rewards": [("letters", 0.7, False), ("tokens", 2.0, True), ("ends", -1.5, False), ("tokens", -0.5, True)],
    },
    "everything that is shaped": {
        "ppo": {
            **NONE,
            "score_normalization": "running",
            "score_clip": 0.8,
            "missing_eos_penalty": 0.3,
            "length_penalty": 0.05,
            "overlong_buffer": 3,
            "overlong_penalty": 2.0,
            "whiten_rewards": True,
        }
    },
}


@pytest.mark.parametrize("name", EXPERIENCES)
def test_what_an_update_learns_from_is_what_the_slow_loop_makes_of_raw_scores(name, watch, pipeline, functions):
    """[1, 2, 3, 17, 20, 33, 42] Two iterations, from a policy that is not ref_policy."""
    changes = {key: value for key, value in EXPERIENCES[name].items() if key != "rewards"}
    own = {"ref_policy": {"path": str(pipeline("llama") / "sft")}}
    if "rewards" in EXPERIENCES[name]:
        own["rewards"] = [
            {"type": "function", "function": f"{functions}:{function}", "weight": weight, "per_token": per_token}
            for function, weight, per_token in EXPERIENCES[name]["rewards"]
        ]
    calls = 2 if changes["ppo"].get("score_normalization") == "reference" else 0  # 12 samples, 8 at a time
    run = watch(**merged(own, changes))
    found = check_update_batch(run, num_reference_calls=calls)
    assert len(found) == 2
    ppo, n = run.learner.config.ppo, run.learner.config.rollout.samples_per_prompt

    # That the rollouts have what the options act on.
    assert all(abs(row["objective/kl"]) > 1e-3 for row in run.metrics)
    assert run.metrics[0]["policy/first_ratio"] == pytest.approx(1.0, abs=1e-5), "[17] against the sampler, not ref"
    lengths = [len(r.ids) for rollout in run.rollouts for r in rollout.responses]
    endings = {r.ended for rollout in run.rollouts for r in rollout.responses}
    assert endings == {True, False}
    assert len(set(lengths)) > 3
    if ppo.score_clip is not None:
        assert any(abs(x) > 1.5 * ppo.score_clip for part in found for x in part.raw)
    if ppo.kl_controller == "adaptive":
        assert run.metrics[1]["objective/kl_coef"] != run.metrics[0]["objective/kl_coef"]

    has_values = ppo.advantage_estimator in ("gae", "monte_carlo")
    assert (run.place / "value_model").is_dir() == has_values
    value_keys = [key for row in run.metrics for key in row if key.startswith("value/") or key == "loss/value"]
    assert bool(value_keys) == has_values
    for rollout in run.rollouts:
        for at in range(0, 8, n):
            assert len({prompt.text for prompt in rollout.prompts[at : at + n]}) == 1, "a prompt's rows stand together"
            assert n == 1 or len({tuple(r.ids) for r in rollout.responses[at : at + n]}) > 1
        assert len({prompt.text for prompt in rollout.prompts}) == 8 // n
    if ppo.whiten_rewards:
        for part in found:
            mean, std = mean_std(list(itertools.chain(*part.rewards)))
            assert mean == pytest.approx(statistics.fmean(itertools.chain(*part.unwhitened)), abs=1e-4), "it is kept"
            assert std == pytest.approx(1.0, abs=1e-4)


# --------------------------------------------------------------------------------- what rewards are given


def judged_by(learner):
    """A rollout of the learner as its rewards see it: (prompts, texts, responses, what `total_score` makes of it)."""
    rollout = ppo_stage._rollout(learner, 0)
    texts = [figures.response_text(learner.tokenizer, r, learner.sampling) for r in rollout.responses]
    judged = figures.judged(learner, rollout.prompts, texts, rollout.responses)
    return rollout, texts, figures.total_score(learner.rewards, judged)


def test_reads_and_output_of_a_reward_model_that_shares_the_tokenizer(start, pipeline):
    """The ids as they are, with the prompt or without it; the probability is the sigmoid of its one score."""
    path = str(pipeline("llama") / "rm")
    reward = {"type": "reward_model", "path": path, "normalize": False}
    found = {}
    for reads, output in itertools.product(("prompt_and_response", "response"), ("logit", "probability")):
        with start(rewards=[{**reward, "reads": reads, "output": output}]) as learner:
            assert learner.rewards[0].reads_policy_tokens
            rollout, _, scores = judged_by(learner)
        plain = AutoModelForSequenceClassification.from_pretrained(f"{path}/model")
        wanted = []
        for prompt, response in zip(rollout.prompts, rollout.responses, strict=True):
            ids = prompt.ids + response.ids if reads == "prompt_and_response" else response.ids
            with torch.no_grad():
                wanted.append(plain(input_ids=torch.tensor([ids])).logits[0, 0])
        logits = torch.stack(wanted)
        close(scores.total, logits.sigmoid() if output == "probability" else logits)
        found[reads, output] = scores.total
    for one, other in itertools.combinations(found.values(), 2):
        assert (one - other).abs().min() > 1e-3


def test_reads_and_output_of_an_encoder_with_labels(start, word_piece, tmp_path):
    """The text, with the prompt or without it; the probability is the label's softmax."""
    model = encoder(tmp_path / "two", word_piece, 2, id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1})
    reward = {"type": "reward_model", "path": str(tmp_path / "two"), "label": "good", "weight": -2.0}
    for reads, output in itertools.product(("prompt_and_response", "response"), ("logit", "probability")):
        with start(rewards=[{**reward, "reads": reads, "output": output}]) as learner:
            rollout, texts, scores = judged_by(learner)
        for prompt, text, score, total in zip(
            rollout.prompts, texts, scores.each["reward_model"], scores.total, strict=True
        ):
            whole = prompt.text + text if reads == "prompt_and_response" else text
            with torch.no_grad():
                logits = model(**word_piece(whole, return_tensors="pt")).logits[0]
            wanted = logits.softmax(0)[1] if output == "probability" else logits[1]
            assert score.item() == pytest.approx(wanted.item(), abs=1e-5)
            assert total.item() == pytest.approx(-2.0 * wanted.item(), abs=1e-5)


def test_a_dense_reward_gets_the_text_of_each_token(watch, functions):
    """The tokens join to the decoded response, and the rest of the score stands at the last token alone."""
    rewards = [{"type": "function", "function": f"{functions}:tokens", "per_token": True}]
    run = watch(rewards=rewards, ppo={"num_iterations": 1, "kl_coef": 0.0, "missing_eos_penalty": 0.0})
    (asked,), rollout, learner = said(run.learner), run.rollouts[0], run.learner
    for row, response in zip(asked["rows"], rollout.responses, strict=True):
        assert row["tokens"] == [learner.tokenizer.decode([i]) for i in response.ids]
    returns = [[sum(row[t:]) for t in range(len(row))] for row in asked["dense"]]
    own = run.learner.config.ppo.model_copy(update={"gae_lambda": 1.0})
    found = slow_advantages(run.learner.config.model_copy(update={"ppo": own}), asked["dense"], returns)[1]
    close(padded(found), padded(returns), 1e-9)
    assert run.metrics[0]["objective/reward"] == pytest.approx(statistics.fmean(map(sum, asked["dense"])), abs=1e-5)
    assert run.metrics[0]["objective/score"] == run.metrics[0]["reward/tokens"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[[0.5] for row in rows]", "returned 1 numbers for"),
        ("[0.5 for row in rows]", "a list of numbers is needed"),
        ("[[float('nan')] * len(row['tokens']) for row in rows]", "it must be a finite number"),
    ],
)
def test_a_dense_reward_that_is_none_is_refused(watch, tmp_path, body, message):
    path = tmp_path / "bad.py"
    path.write_text(f"def bad(prompts, responses, rows):\n    return {body}\n", encoding="utf-8")
    with pytest.raises(RunError, match=message):
        watch(rewards=[{"type": "function", "function": f"{path}:bad", "per_token": True}])


def test_scores_normalised_by_reference_have_mean_0_and_std_1(start, pipeline):
    """Over ref_policy's own samples, on training prompts; not the policy's, where that is another."""
    ref = str(pipeline("llama") / "sft")
    ppo = {"score_normalization": "reference", "num_reference_samples": 20}
    with start(ref_policy={"path": ref}, ppo=ppo) as learner:
        figures.measure_reference(learner)
        calls = list(said(learner))
    raw = torch.tensor([x for call in calls for x in call["values"]])
    assert [len(call["values"]) for call in calls] == [8, 8, 4]
    normalised = learner.scale.apply(raw)
    assert normalised.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert normalised.std().item() == pytest.approx(1.0, abs=1e-5)
    table = draw_uniforms(0, "ppo reference", 0, 20, 8)
    order = stream(len(learner.train), 20, 0, 0, "ppo reference prompts")
    own = load_policy(str(Path(ref) / "model"))
    by_ref = sample(own, [learner.train[i].ids for i in order], table, learner.sampling)
    texts = [learner.tokenizer.decode(r.ids, skip_special_tokens=True) for r in by_ref]
    assert [text for call in calls for text in call["responses"]] == texts
    assert [p for call in calls for p in call["prompts"]] == [learner.train[i].text for i in order]


def test_scores_without_spread_are_only_shifted(watch, tmp_path):
    """A constant reward is normalised to 0, and not to nan."""
    path = tmp_path / "constant.py"
    path.write_text("def constant(prompts, responses, rows):\n    return [7.5] * len(rows)\n", encoding="utf-8")
    rewards = [{"type": "function", "function": f"{path}:constant"}]
    ppo = {"score_normalization": "running", "missing_eos_penalty": 0.0, "kl_coef": 0.0}
    run = watch(rewards=rewards, ppo=ppo)
    assert [row["objective/score"] for row in run.metrics] == [7.5, 7.5]
    assert [row["objective/reward"] for row in run.metrics] == [0.0, 0.0]


def test_held_out_replies_are_scored_by_dense_rewards_too(watch, functions, data):
    """A reply counts with the sum of its tokens."""
    rewards = [
        {"type": "function", "function": f"{functions}:letters", "weight": 2.0},
        {"type": "function", "function": f"{functions}:tokens", "per_token": True, "weight": 0.5},
    ]
    test = {"test": {"path": str(data["prompts"]), "limit": 5}}
    run = watch(rewards=rewards, data=test, ppo={"num_iterations": 1})
    found = json.loads((run.place / "evaluation.json").read_text())
    for side, call in (("sft", 0), ("ppo", 2)):
        whole, dense = weighted_scores(run.learner.config, run.learner, call)
        wanted = [a + sum(b) for a, b in zip(whole, dense, strict=True)]
        assert [example[side]["score"] for example in found["examples"]] == pytest.approx(wanted, abs=1e-5)


# -------------------------------------------------------------------------------------------- sampling


@torch.no_grad()
def ranks(learner):
    """How many tokens are likelier than each one that was drawn, by plain forwards."""
    rollout = ppo_stage._rollout(learner, 0)
    plain, found = plain_copy(learner.models.policy), []
    for prompt, response in zip(rollout.prompts, rollout.responses, strict=True):
        logits = plain(input_ids=torch.tensor([prompt.ids + response.ids])).logits[0, len(prompt.ids) - 1 : -1]
        drawn = logits.gather(1, torch.tensor(response.ids)[:, None])
        found += (logits > drawn).sum(1).tolist()
    return found


@pytest.mark.parametrize(
    ("narrow", "left"),
    [({"top_k": 2}, 2), ({"top_p": 1e-6}, 1), ({"min_p": 1.0}, 1), ({"temperature": 1e-4}, 1)],
    ids=["top_k", "top_p", "min_p", "temperature"],
)
def test_each_filter_reaches_the_sampler(start, narrow, left):
    """At its narrowest each leaves the likeliest token, or the two likeliest; without it others come too."""
    with start(rollout=narrow) as learner:
        assert set(ranks(learner)) == set(range(left))
    with start() as learner:
        assert max(ranks(learner)) > left


def test_with_every_filter_the_first_ratio_is_one_and_the_first_kl_zero(watch):
    """[13, 14] To the last bit, since the chunks are the same; and what follows is the slow loop's."""
    rollout = {
        "max_new_tokens": 12,
        "min_new_tokens": 4,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.97,
        "min_p": 0.003,
        "stop_strings": ["e"],
    }
    ppo = {"minibatch_size": 8, "kl_coef": 0.3, "old_logprobs": "recomputed"}
    run = watch(rollout=rollout, ppo=ppo, optimizer={"learning_rate": 2e-2})
    first, later = run.metrics
    assert first["policy/first_ratio"] == first["policy/ratio"] == later["policy/first_ratio"] == 1.0
    assert first["policy/first_ratio_error"] == later["policy/first_ratio_error"] == 0.0
    assert first["objective/kl"] == 0.0
    assert later["objective/kl"] != 0.0
    assert max(row["policy/sampler_gap"] for row in run.metrics) < 1e-5
    responses = [r for rollout in run.rollouts for r in rollout.responses]
    lengths = [len(r.ids) for r in responses]
    assert min(lengths) == 4
    assert max(lengths) == 12
    assert all(len(kept) <= 40 for r in responses for kept in r.allowed_ids)
    assert {len(kept) for r in responses for kept in r.allowed_ids} != {40}, "the other filters leave fewer"
    assert not any(i in run.learner.sampling.stop for r in responses for i in r.ids[:3])
    check_update_batch(run)


def test_stop_tokens_end_a_response(start, tokenizer):
    names = tokenizer.convert_ids_to_tokens(sorted(STOP))
    with start(rollout={"stop_tokens": names}) as learner:
        assert learner.sampling.stop == STOP | {tokenizer.eos_token_id}
        stopped = ppo_stage._rollout(learner, 0).responses
    with start(rollout={"stop_tokens": []}) as learner:
        assert learner.sampling.stop == {tokenizer.eos_token_id}
        free = ppo_stage._rollout(learner, 0).responses
    assert any(r.ended for r in stopped)
    for response, whole in zip(stopped, free, strict=True):
        at = [t for t, i in enumerate(whole.ids) if i in STOP]
        assert response.ids == (whole.ids[: at[0] + 1] if at else whole.ids)
        assert response.ended == (bool(at) or whole.ended)
    with pytest.raises(ConfigError, match=r"rollout\.stop_tokens: 'help\? no!' is no single token"):
        with start(rollout={"stop_tokens": ["help? no!"]}):
            pass


def test_stop_strings_end_a_response_and_are_not_shown(watch):
    """What is scored and kept as a sample ends before the string; the ids that are learnt hold it."""
    run = watch(rollout={"stop_strings": ["e", "zz"], "stop_tokens": []}, num_logged_samples=8)
    tokenizer, ended_by_string = run.learner.tokenizer, 0
    samples = read_jsonl(run.place / "samples.jsonl")
    for i, (rollout, asked) in enumerate(zip(run.rollouts, said(run.learner), strict=True)):
        assert [row["response"] for row in samples[8 * i : 8 * i + 8]] == asked["responses"]
        for response, text, row in zip(rollout.responses, asked["responses"], asked["rows"], strict=True):
            whole = tokenizer.decode(response.ids, skip_special_tokens=True)
            assert text == whole.partition("e")[0]
            assert row["ended"] == response.ended
            if "e" in whole:
                ended_by_string += 1
                assert response.ended
                assert "e" not in tokenizer.decode(response.ids[:-1])
    assert 0 < ended_by_string < 16


@pytest.mark.parametrize("least", [0, 5, 8])
def test_min_and_max_new_tokens(start, least):
    with start(rollout={"min_new_tokens": least}) as learner:
        lengths = [len(r.ids) for i in range(3) for r in ppo_stage._rollout(learner, i).responses]
    assert min(lengths) == max(1, least)
    assert max(lengths) == 8


@pytest.mark.parametrize("n", [1, 4])
def test_an_iteration_takes_new_prompts_and_n_responses_to_each(start, n):
    """[15, 27, 38] Every prompt once an epoch, and no two responses from the same draws."""
    with start(rollout={"samples_per_prompt": n}) as learner:
        rollouts = [ppo_stage._rollout(learner, i) for i in range(3 * n)]
    prompts = [prompt.text for rollout in rollouts for prompt in rollout.prompts]
    assert Counter(prompts) == {p.text: n for p in learner.train}
    assert len(prompts) == 24 * n
    for rollout in rollouts:
        texts = [prompt.text for prompt in rollout.prompts]
        assert texts == [texts[i // n * n] for i in range(8)], "prompt-major"
    drawn = {tuple(r.ids) for rollout in rollouts for r in rollout.responses if len(r.ids) > 3}
    assert len(drawn) == sum(len(r.ids) > 3 for rollout in rollouts for r in rollout.responses)


def test_logged_samples(watch):
    run = watch(num_logged_samples=3)
    rows = read_jsonl(run.place / "samples.jsonl")
    assert [row["step"] for row in rows] == [1, 1, 1, 2, 2, 2]
    for i, row in enumerate(rows):
        rollout, asked = run.rollouts[i // 3], said(run.learner)[i // 3]
        assert (row["prompt"], row["response"]) == (asked["prompts"][i % 3], asked["responses"][i % 3])
        assert row["score"] == pytest.approx(asked["values"][i % 3], abs=1e-6)
        kl = (rollout.logprobs - rollout.ref_logprobs)[i % 3].sum().item()
        assert row["kl"] == pytest.approx(kl, abs=1e-6)
    assert read_jsonl(watch("none", num_logged_samples=0).place / "samples.jsonl") == []


# ------------------------------------------------------------------------------------- how far, how fast


def learning(**ppo):
    """A run that moves far: 12 steps an iteration."""
    return {
        "ppo": {"num_iterations": 1, "minibatch_size": 2, "ppo_epochs": 3, **ppo},
        "optimizer": {"learning_rate": 2e-2, "schedule": "linear", "min_lr_ratio": 0.1},
    }


def peaks(values):
    """Places from the third on where a value is above all before it by a tenth."""
    return [i for i in range(2, len(values)) if values[i] > 1.1 * max(values[:i])]


def test_max_approx_kl_ends_the_update_before_the_step_that_exceeds_it(watch):
    """[25] The next iteration begins anew, and both schedules end where they were to end."""
    free = watch("free", **learning())
    kl = [step["policy/approx_kl"] for step in free.steps]
    end = peaks(kl)[1]
    limit = (max(kl[:end]) + kl[end]) / 2
    assert free.moves == [("policy", True), ("value", True)] * 12
    assert free.metrics[0]["policy/stopped_early"] == 0.0

    held = watch("held", **learning(max_approx_kl=limit))
    assert len(held.steps) == end + 1, "the step that exceeds it is looked at, those after it are not"
    assert held.moves == [(which, i < end) for i in range(12) for which in ("policy", "value")]
    assert [s["policy/approx_kl"] for s in held.steps] == kl[: end + 1]
    for name, weight in free.weights[end - 1].items():
        assert torch.equal(held.after[0][name], weight), name
    assert held.metrics[0]["policy/stopped_early"] == 1.0
    for run in (free, held):
        for stepper in (run.learner.policy_stepper, run.learner.value_stepper):
            assert stepper.learning_rate == pytest.approx(2e-3, rel=1e-6)

    twice = watch("twice", **learning(max_approx_kl=limit, num_iterations=2))
    assert twice.moves[24] == ("policy", True)
    assert twice.learner.policy_stepper.learning_rate == pytest.approx(2e-3, rel=1e-6)


def test_a_minibatch_above_max_ratio_is_skipped(watch, monkeypatch):
    """Neither weights nor Adam's state change; the schedule goes on; the number is in the metrics."""
    free = watch("free", **learning())
    limit = sorted(step["policy/ratio"] for step in free.steps)[8]
    skipped, moved = [], []
    advance = Stepper.advance

    def state(stepper):
        moments = [stepper.optimizer.state[p] for p in stepper.model.parameters() if p in stepper.optimizer.state]
        return [p.detach().clone() for p in stepper.model.parameters()] + [
            value.clone() for one in moments for value in one.values()
        ]

    def spy(self, *, move=True):
        before, rate = state(self), self.learning_rate
        advance(self, move=move)
        after = state(self)
        same = len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        (moved if move else skipped).append((same, self.learning_rate < rate))

    monkeypatch.setattr(Stepper, "advance", spy)
    run = watch("held", **learning(max_ratio=limit))
    ratios = [step["policy/ratio"] for step in run.steps]
    assert len(ratios) == 12
    assert [move for which, move in run.moves if which == "policy"] == [ratio <= limit for ratio in ratios]
    assert [move for which, move in run.moves if which == "value"] == [ratio <= limit for ratio in ratios]
    assert 0 < len(skipped) < 24
    assert skipped == [(True, True)] * len(skipped)
    assert moved == [(False, True)] * len(moved)
    assert run.metrics[0]["policy/skipped_steps"] == len(skipped) / 2
    assert free.metrics[0]["policy/skipped_steps"] == 0.0
    assert run.learner.policy_stepper.learning_rate == pytest.approx(2e-3, rel=1e-6)


def test_max_ratio_of_null_never_skips(watch):
    run = watch(**learning(max_ratio=None))
    assert run.metrics[0]["policy/skipped_steps"] == 0.0
    assert all(move for _, move in run.moves)


@torch.no_grad()
def after_update_kl(run, i):
    """KL(old, new) of iteration i a token: from plain forwards of the policies before and behind its update."""
    rollout = run.rollouts[i]
    asked = (rollout.prompts, rollout.responses, run.learner.sampling)
    old, new = (numbers(chosen(distributions(plain_copy(run.models[j].policy), *asked))) for j in (i, i + 1))
    terms = [math.exp(b - a) - 1 - (b - a) for x, y in zip(old, new, strict=True) for a, b in zip(x, y, strict=True)]
    return statistics.fmean(terms)


def test_policy_kl_coef_follows_its_target(watch):
    """[33] It doubles above 1.5 times the target, halves below 1/1.5 of it, and stays between."""

    def run_with(target):
        ppo = {"objective": "penalty", "policy_kl_coef": 0.5, "policy_kl_target": target, "num_iterations": 3}
        return watch(str(target), ppo=ppo)

    halved = run_with(1e3)
    first = halved.metrics[0]["policy/kl_after_update"]
    assert first == pytest.approx(after_update_kl(halved, 0), rel=1e-3)
    assert first > 1e-4
    assert [row["policy/policy_kl_coef"] for row in halved.metrics] == [0.5, 0.25, 0.125]
    doubled = run_with(first / 1.6)
    assert [row["policy/policy_kl_coef"] for row in doubled.metrics][:2] == [0.5, 1.0]
    for target in (first / 1.4, first * 1.4):
        stays = run_with(target)
        assert [row["policy/policy_kl_coef"] for row in stays.metrics][:2] == [0.5, 0.5]
        second = stays.metrics[1]["policy/kl_after_update"]
        assert second == pytest.approx(after_update_kl(stays, 1), rel=1e-3)
        factor = 0.5 if second < target / 1.5 else 2.0 if second > 1.5 * target else 1.0
        assert stays.metrics[2]["policy/policy_kl_coef"] == 0.5 * factor


def test_the_learning_rates_and_their_ends(watch):
    """[25] With a warm-up of the values and rollouts used twice, each model's schedule has its own number of steps."""
    run = watch(
        ppo={"num_iterations": 3, "num_rollouts_per_update": 2, "ppo_epochs": 2},
        value_model={"learning_rate": 1e-3, "warmup_iterations": 1},
        optimizer={"learning_rate": 4e-3, "schedule": "linear", "min_lr_ratio": 0.25},
    )
    counts = Counter(which for which, _ in run.moves)
    assert counts == {"value": 4 + 8 + 8, "policy": 8 + 8}
    assert run.learner.policy_stepper.learning_rate == pytest.approx(1e-3, rel=1e-6)
    assert run.learner.value_stepper.learning_rate == pytest.approx(2.5e-4, rel=1e-6)
    wanted = [4e-3, 4e-3, (4e-3 + 1e-3) / 2]
    assert [row["policy/learning_rate"] for row in run.metrics] == pytest.approx(wanted, rel=1e-6)
    wanted = [1e-3 - 7.5e-4 * done / 20 for done in (0, 4, 12)]
    assert [row["value/learning_rate"] for row in run.metrics] == pytest.approx(wanted, rel=1e-6)
    by_default = watch("default", ppo={"num_iterations": 1})
    assert by_default.metrics[0]["value/learning_rate"] == by_default.metrics[0]["policy/learning_rate"] == 5e-3


@pytest.mark.parametrize("init", ["policy", "shared"])
def test_the_policy_does_not_move_a_bit_while_the_values_warm_up(watch, make_model, init):
    start_weights = weights_of(load_policy(str(make_model("llama"))))
    run = watch(value_model={"init": init, "warmup_iterations": 1}, ppo={"num_iterations": 2, "entropy_coef": 0.1})
    for name, weight in start_weights.items():
        assert torch.equal(run.after[0][name], weight), name
    assert any(not torch.equal(run.after[1][name], weight) for name, weight in start_weights.items())
    heads = [m.value_head.weight if init == "shared" else m.value_model.score.weight for m in run.models]
    assert heads[0].abs().max() == 0
    assert heads[1].abs().max() > 1e-3
    assert [which for which, _ in run.moves] == ["value"] * 2 + ["policy", "value"] * 2
    assert "policy/grad_norm" not in run.metrics[0]
    assert run.metrics[1]["objective/kl"] == pytest.approx(0.0, abs=1e-5)


def test_what_a_value_model_starts_from(start, pipeline):
    root = pipeline("llama")
    model_reward = {"rewards": [{"type": "reward_model", "path": str(root / "rm")}]}
    policy = {"policy": {"path": str(root / "sft")}}
    rm, sft = (load_file(root / f"{stage}/model/model.safetensors") for stage in ("rm", "sft"))
    for init, source in (("auto", rm), ("reward_model", rm), ("policy", sft)):
        with start(value_model={"init": init}, **model_reward, **policy) as learner:
            found = learner.models.value_model.base_model.state_dict()
            assert learner.models.value_model.score.weight.abs().max() == 0
        for name, weight in found.items():
            assert torch.equal(weight, source[f"model.{name}"]), (init, name)
    with start(**policy) as learner:
        found = learner.models.value_model.base_model.state_dict()
    assert all(torch.equal(weight, sft[f"model.{name}"]) for name, weight in found.items()), "no reward model"
    with start(value_model={"init": "shared"}, **policy) as learner:
        assert learner.models.value_model is None
        assert learner.models.value_head.weight.abs().max() == 0
        assert list(learner.value_stepper.model.parameters()) == [learner.models.value_head.weight]


# ------------------------------------------------------------------------------------- rollouts used again


@pytest.mark.parametrize(("kept", "cap", "values"), [(2, 1.05, True), (3, 2.0, False)])
def test_older_rollouts_are_weighed_by_their_importance(watch, kept, cap, values):
    """Against log-probabilities of plain forwards in float64: those of the policy at the update's beginning, and
    those of the policy that sampled, however old."""
    estimator = {} if values else {"advantage_estimator": "reinforce", "whiten_advantages": True}
    run = watch(
        ppo={"num_iterations": 3, "num_rollouts_per_update": kept, "importance_ratio_cap": cap, **estimator},
        optimizer={"learning_rate": 1e-2},
    )
    assert [len(batch.responses) for batch in run.batches] == [8 * min(i + 1, kept) for i in range(3)]
    num_steps = [2 * min(i + 1, kept) for i in range(3)]
    assert len([1 for which, _ in run.moves if which == "policy"]) == len(run.steps) == sum(num_steps)
    capped = 0
    fresh = [replace(batch) for batch in run.batches]
    for i, batch in enumerate(run.batches):
        assert run.metrics[i]["policy/first_ratio_error"] < 1e-5
        made = list(range(max(0, i - kept + 1), i + 1))
        for part, when in enumerate(made):
            rows, width = slice(8 * part, 8 * part + 8), run.rollouts[when].response_mask.shape[1]
            sampled = run.rollouts[when]
            assert batch.responses[rows] == sampled.responses
            asked = (sampled.prompts, sampled.responses, run.learner.sampling)
            with torch.no_grad():
                then, now = (
                    padded(chosen(distributions(plain_copy(run.models[j].policy).double(), *asked))) for j in (when, i)
                )
                own = padded(
                    [
                        [linear(state, run.models[i].value_model.score.weight.double())[0] for state in row]
                        for row in hidden_states(plain_copy(run.models[i].value_model).double().base_model, *asked[:2])
                    ]
                    if values
                    else [[0.0] * len(r.ids) for r in sampled.responses]
                )
            weight = (now - then).exp().clamp(max=cap)
            capped += int(((now - then).exp() > cap).sum())
            # As its own update saw it, in the last rows of that update's batch.
            first = {
                name: getattr(fresh[when], name)[-8:, :width].double()
                for name in ("advantages", "returns", "ref_logprobs")
            }
            close(batch.logprobs[rows, :width].double(), now, 1e-5)
            close(batch.values[rows, :width].double(), own, 1e-5)
            close(batch.advantages[rows, :width].double(), first["advantages"] * weight, 1e-4)
            close(batch.returns[rows, :width].double(), first["returns"], 1e-6)
            close(batch.ref_logprobs[rows, :width].double(), first["ref_logprobs"], 1e-6)
            if when < i:
                assert (weight - 1).abs().max() > 1e-2
    assert capped > 0


def test_every_row_of_every_kept_rollout_is_seen_once_an_epoch(watch, monkeypatch):
    seen, real = [], ppo_stage._own_rows

    def spy(minibatch, *rest):
        rows = real(minibatch, *rest)
        seen.append(rows)
        return rows

    monkeypatch.setattr(ppo_stage, "_own_rows", spy)
    watch(ppo={"num_iterations": 3, "num_rollouts_per_update": 2, "ppo_epochs": 2})
    flat = list(itertools.chain(*seen))
    assert all(len(rows) == 4 for rows in seen)
    sizes = [8, 8, 16, 16, 16, 16]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    epochs = [flat[at : at + size] for at, size in zip(starts, sizes, strict=True)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(size)) for size in sizes]
    assert sum(sizes) == len(flat)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs), "each epoch in an order of its own"


# ------------------------------------------------------------------------------- what cannot be learnt from


def failed(root):
    return [path.name for path in root.iterdir() if path.name.startswith("ppo.failed")]


def test_an_infinite_reward_is_refused_before_a_step(watch, functions, tmp_path, monkeypatch):
    stepped = []
    monkeypatch.setattr(Stepper, "advance", lambda self, *, move=True: stepped.append(move))  # noqa: ARG005
    rewards = [{"type": "function", "function": f"{functions}:infinite"}]
    with pytest.raises(RunError, match="reward function infinite, response 1: returned inf"):
        watch(rewards=rewards, ppo={"num_iterations": 3})
    assert len(stepped) == 4, "the first iteration's"
    assert not (tmp_path / "run/ppo").exists()


def weight_of_nan(learner, iteration):
    """Between the first iteration and the second."""
    if iteration == 1:
        with torch.no_grad():
            learner.models.policy.base_model.norm.weight[3] = math.nan


@pytest.mark.parametrize("how", ["weights", "learning_rate"])
def test_a_loss_that_is_no_number_stops_the_run(watch, run_stage, base, tmp_path, how):
    """Nothing is stepped from there on, the batch is kept beside the stage, and the finished stage stands."""
    run_stage("ppo", tmp_path / "run", **merged(base, {"ppo": {"num_iterations": 1}}))
    before = digests(tmp_path / "run/ppo")
    learners = []

    def ruin(learner, iteration):
        if how == "weights":
            weight_of_nan(learner, iteration)
        learners.append(learner)

    changes = {"optimizer": {"learning_rate": 1e30}} if how == "learning_rate" else {}
    moves, real = [], Stepper.advance
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Stepper, "advance", lambda self, *, move=True: (moves.append(weights_of(self.model)), real(self, move=move))
        )
        with pytest.raises(RunError) as error:
            watch(before_rollout=ruin, ppo={"num_iterations": 3}, **changes)
    iteration, step = (1, 2) if how == "learning_rate" else (2, 3)
    place = tmp_path / "run/ppo.failed_batch.jsonl"
    message = str(error.value)
    assert error.value.exit_code == 1
    assert message.startswith(f"ppo iteration {iteration}, step {step}: ")
    assert re.search(r"loss/policy is nan|policy/ratio is nan", message)
    assert str(place) in message
    assert "\n" not in message
    assert len(moves) == 2 * (step - 1)
    rows = read_jsonl(place)
    assert len(rows) == 4
    prompts = {tuple(p.ids): p.text for p in learners[0].train}
    for row in rows:
        assert row["prompt"] == prompts[tuple(row["prompt_ids"])]
        length = len(row["response_ids"])
        assert 0 < length <= 8
        for name in ("logprobs", "ref_logprobs", "values", "advantages", "returns"):
            assert len(row[name]) == length
        assert all(map(math.isfinite, row["ref_logprobs"])), "ref_policy is well"
    is_bad = [not all(isinstance(x, float) for x in row["logprobs"]) for row in rows]
    assert not any(is_bad) if how == "learning_rate" else all(is_bad)
    assert digests(tmp_path / "run/ppo") == before
    assert not (tmp_path / "run/.ppo.partial/manifest.json").exists()
    assert not (tmp_path / "run/.ppo.partial/model").exists()


def test_filters_of_a_policy_that_is_no_number(watch, tmp_path):
    """No token is likelier than another, so that none is left to draw: one line too, and no traceback."""
    rollout = {"top_k": 20, "top_p": 0.9, "min_p": 0.01}
    with pytest.raises(RunError) as error:
        watch(before_rollout=weight_of_nan, rollout=rollout, ppo={"num_iterations": 3})
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run/ppo").exists()


def test_health_has_a_row_for_each_iteration(watch):
    run = watch(ppo={"num_iterations": 3})
    rows = read_jsonl(run.place / "health.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row, metrics in zip(rows, run.metrics, strict=True):
        assert f"KL {metrics['objective/kl']:.3g}" in row["line"]
        assert isinstance(row["findings"], list)
    assert rows[0]["line"].startswith("healthy: ")


def stopped(root):
    rows = read_jsonl(root / ".ppo.partial/health.jsonl")
    return [f["name"] for f in rows[-1]["findings"] if f["severity"] == "stop"]


def test_another_temperature_in_training_than_in_sampling_stops_the_run(watch, tmp_path, monkeypatch):
    """[13] Before anything is published."""
    monkeypatch.setattr(ppo_stage, "_how", lambda learner: (replace(learner.sampling, temperature=0.7), "float32"))
    with pytest.raises(RunError, match=r"ppo step 1: ratio_not_one: .*temperature"):
        watch()
    assert stopped(tmp_path / "run") == ["ratio_not_one"]
    assert not (tmp_path / "run/ppo").exists()


def test_another_temperature_for_ref_policy_stops_the_run(watch, tmp_path, monkeypatch):
    real = rollout_module.ref_response_logprobs

    def warmer(models, prompts, responses, sampling, precision):
        return real(models, prompts, responses, replace(sampling, temperature=1.3), precision)

    monkeypatch.setattr(rollout_module, "ref_response_logprobs", warmer)
    with pytest.raises(RunError, match="ppo step 1: kl_not_zero: objective/kl is"):
        watch()
    assert stopped(tmp_path / "run") == ["kl_not_zero"]
    assert not (tmp_path / "run/ppo").exists()


def test_dropout_left_on_stops_the_run(watch, tmp_path, make_model, monkeypatch):
    """[14] GPT-2's config files have it; here nobody turns it off, and the policy is in train mode."""
    monkeypatch.setattr(load, "set_dropout_off", lambda model: None)  # noqa: ARG005
    monkeypatch.setattr(setup, "load_policy", lambda path, revision=None: load_policy(path, revision).train())
    with pytest.raises(RunError, match=r"ppo step 1: ratio_not_one: .*[Dd]ropout"):
        watch(policy={"path": str(make_model("gpt2"))}, rollout={"stop_tokens": []})
    assert not (tmp_path / "run/ppo").exists()


# -------------------------------------------------------------------------------------------- the plan


def test_a_kl_whose_optimum_is_another_than_one_would_think_is_said(write_config, tmp_path):
    """All but the two that null stands for, and none where the KL has no weight."""
    reward, loss = ("k1", "k2", "k3", "abs", "full"), ("k2", "k3", "abs", "full", "k2_sequence")
    for kl_in, estimator in [("reward", e) for e in (None, *reward)] + [("loss", e) for e in (None, *loss)]:
        ppo = {"kl_in": kl_in, "kl_estimator": estimator}
        note = setup._kl_note(config_of(write_config, "ppo", PPOConfig, tmp_path, ppo=ppo))
        if estimator in (None, "k1", "k2_sequence"):
            assert note is None
        else:
            assert note.startswith("ppo.kl_estimator: ")
        ppo["kl_coef"] = 0.0
        assert setup._kl_note(config_of(write_config, "ppo", PPOConfig, tmp_path, ppo=ppo)) is None
    # Beside advantages that are divided by their own spread a KL in the loss fades, whatever its estimator.
    for estimator, whiten in (("gae", True), ("reinforce_pp", None), ("grpo", None)):
        ppo = {"kl_in": "loss", "advantage_estimator": estimator, "whiten_advantages": whiten}
        config = config_of(write_config, "ppo", PPOConfig, tmp_path, ppo=ppo, rollout={"samples_per_prompt": 2})
        assert "divided by their standard deviation" in setup._kl_note(config)


def test_the_plan_has_the_right_numbers(write_config, base, data, tmp_path, capsys):
    """24 prompts; 2 + 4 + 4 minibatches of 3 iterations, twice each, the first iteration for the values only."""
    config = config_of(
        write_config,
        "ppo",
        PPOConfig,
        tmp_path,
        **merged(
            base,
            {
                "rollout": {"samples_per_prompt": 2},
                "ppo": {"num_iterations": 3, "ppo_epochs": 2, "microbatch_size": 3, "num_rollouts_per_update": 2},
                "value_model": {"warmup_iterations": 1},
                "ptx": {"train": str(data["demonstrations"]), "coef": 1.0, "minibatch_size": 6},
                "optimizer": {"warmup_steps": 5},
            },
        ),
    )
    ppo_stage.run(config, quiet=False)
    out = capsys.readouterr().out
    with StageRun("ppo", config, quiet=True) as stage:
        learner = setup.load_learner(config, stage)
    tokens = statistics.fmean(len(p.ids) for p in learner.train)
    assert "ppo: plan\n" in out
    for line in (
        f"  prompts        24 of {tokens:.0f} tokens on average; 0.50 epochs",
        "  rollouts       3 iterations x 4 prompts x 2 = 24 responses of at most 8 tokens (at most 192 tokens)",
        "  minibatches    2 ppo_epochs x 2 minibatches x 2 rollouts of 4 responses, 3 at a time = 8 optimizer steps "
        "an iteration",
        "  at a time      at most 2,048 tokens (ppo.tokens_per_microbatch)",
        "  steps          20 in all, the first 5 of warm-up",
        "  value warm-up  1 iterations before the policy moves",
    ):
        assert line in out
    # No step of the 4 in the warm-up takes any: 16 * 6 / 24.
    assert "  ptx            6 rows a step = 4.00 epochs over 24 rows" in out
    assert "processes" not in out


# --------------------------------------------------------------------------------------------- as a whole

UNUSUAL = {
    "rollout": {"top_p": 0.97, "top_k": 50, "min_p": 0.002, "min_new_tokens": 3, "samples_per_prompt": 2},
    "ppo": {
        "num_iterations": 3,
        "ppo_epochs": 2,
        "microbatch_size": 3,
        "tokens_per_microbatch": 60,
        "num_rollouts_per_update": 2,
        "score_normalization": "running",
        "score_clip": 2.0,
        "kl_controller": "adaptive",
        "kl_target": 1.0,
        "kl_horizon": 100,
        "whiten_rewards": True,
        "value_lambda": 1.0,
        "objective": "penalty",
        "policy_kl_target": 0.01,
        "loss_aggregation": "sequence",
        "entropy_coef": 0.05,
        "max_approx_kl": 1.0,
        "ema_decay": 0.9,
    },
    "value_model": {"warmup_iterations": 1, "learning_rate": 2e-3},
}


def files_of(place):
    """Everything that does not tell the time."""
    found = {p.relative_to(place).as_posix(): p.read_bytes() for p in place.rglob("*") if p.suffix == ".safetensors"}
    found["samples.jsonl"] = (place / "samples.jsonl").read_bytes()
    found["metrics"] = [
        {key: value for key, value in row.items() if not key.startswith(OF_THE_MACHINE)}
        for row in read_jsonl(place / "metrics.jsonl")
    ]
    found["health"] = (place / "health.jsonl").read_bytes()
    return found


def test_an_exact_rerun_with_everything_unusual_gives_the_same_bits(watch, data):
    """Where the global generators stand has no say."""
    ptx = {"ptx": {"train": str(data["demonstrations"]), "coef": 0.3, "mode": "convex", "max_length": 96}}
    torch.manual_seed(1)
    first = files_of(watch("first", **UNUSUAL, **ptx).place)
    torch.manual_seed(2)
    second = files_of(watch("second", **UNUSUAL, **ptx).place)
    assert first.keys() == second.keys()
    assert {"model/model.safetensors", "value_model/model.safetensors", "ema_model/model.safetensors"} < first.keys()
    for name in first:
        assert first[name] == second[name], name
    other = files_of(watch("other", seed=1, **UNUSUAL, **ptx).place)
    assert other["model/model.safetensors"] != first["model/model.safetensors"]


def test_every_option_is_named_in_a_test():
    """One that is added without a test is found here."""
    folder = Path(__file__).parent
    text = "".join((folder / name).read_text("utf-8") for name in ("test_ppo_options.py", "test_ppo_models.py"))
    for section in (PPO, Rollout, ValueModel, Lora, Ptx, PPOEvaluation):
        missing = [key for key in section.model_fields if not re.search(rf"\b{key}\b", text)]
        assert missing == [], section.__name__


# ------------------------------------------------------------------------------------------ two processes


def two_as_one(watch, write_config, base, tmp_path, changes):
    """A run on one process and the same on two: weights and the metrics that both have; returns the first."""
    changes = merged({"optimizer": {"eps": 1e-3}}, changes)
    one = watch("one", **changes)
    run_processes(2, "ppo", write_config("ppo", tmp_path / "two", **merged(base, changes)))
    same_weights(one.place, tmp_path / "two/ppo")
    rows = read_jsonl(tmp_path / "two/ppo/metrics.jsonl")
    for a, b in zip(one.metrics, rows, strict=True):
        common = {key: value for key, value in a.items() if not key.startswith((*OF_THE_MACHINE, "policy/sampler_gap"))}
        assert {key: b[key] for key in common} == pytest.approx(common, rel=1e-3, abs=1e-4)
    return one


def limits(run):
    """(a max_approx_kl and a max_ratio that some steps of this run are clearly above, and some below)."""
    found = []
    for key in ("policy/approx_kl", "policy/ratio"):
        values = sorted(step[key] for step in run.steps)
        gaps = [b - a for a, b in itertools.pairwise(values)]
        at = max(range(len(gaps) // 2, len(gaps)), key=gaps.__getitem__)
        found.append((values[at] + values[at + 1]) / 2)
    return found


def test_groups_split_over_processes_and_stops_taken_by_all(watch, write_config, base, tmp_path, data):
    """[37] Prompts with three responses each, of which a process has one or two; nobody waits for ever."""
    changes = {
        "rollout": {"samples_per_prompt": 3},
        "ppo": {
            "rollout_batch_size": 9,
            "minibatch_size": 3,
            "ppo_epochs": 3,
            "advantage_estimator": "grpo",
            "kl_in": "loss",
            "num_rollouts_per_update": 2,
            "entropy_coef": 0.02,
            "ema_decay": 0.8,
        },
        "ptx": {"train": str(data["demonstrations"]), "coef": 0.3, "minibatch_size": 5, "max_length": 96},
        "optimizer": {"learning_rate": 2e-2, "eps": 1e-3},
    }
    limit, _ = limits(watch("free", **changes))
    run = two_as_one(watch, write_config, base, tmp_path, merged(changes, {"ppo": {"max_approx_kl": limit}}))
    assert any(row["policy/stopped_early"] for row in run.metrics)
    assert {move for _, move in run.moves} == {True, False}


SPLIT = {
    "reinforce_pp_baseline": {
        "rollout": {"samples_per_prompt": 4},
        "ppo": {"advantage_estimator": "reinforce_pp_baseline", "whiten_rewards": True},
    },
    "rloo": {"rollout": {"samples_per_prompt": 2}, "ppo": {"advantage_estimator": "rloo"}},
    "dr_grpo": {
        "rollout": {"samples_per_prompt": 4},
        "ppo": {"advantage_estimator": "dr_grpo", "loss_aggregation": "constant", "minibatch_size": 2},
    },
    "scores": {
        "ppo": {
            "score_normalization": "running",
            "kl_controller": "adaptive",
            "kl_target": 0.1,
            "kl_horizon": 100,
            "whiten_rewards": True,
            "loss_aggregation": "sequence",
        }
    },
    "reference": {"ppo": {"score_normalization": "reference", "num_reference_samples": 11}},
    "penalty": {"ppo": {"objective": "penalty", "policy_kl_target": 1e-5, "num_iterations": 3}},
    "shared": {
        "value_model": {"init": "shared", "warmup_iterations": 1},
        "ppo": {"minibatch_size": 2, "num_iterations": 3},
    },
    "lora": {"policy": {"lora": {"r": 4}}},
    "dense": {"ppo": {"whiten_advantages": False}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT)
def test_two_processes_give_what_one_gives_with(name, watch, write_config, base, functions, tmp_path):
    changes = SPLIT[name]
    if name == "dense":
        rewards = [{"type": "function", "function": f"{functions}:tokens", "per_token": True}]
        changes = merged(changes, {"rewards": rewards})
    run = two_as_one(watch, write_config, base, tmp_path, changes)
    assert run.metrics[-1]["objective/kl"] != 0.0


@pytest.mark.slow
def test_skips_are_taken_by_all_processes(watch, write_config, base, tmp_path):
    """[37]"""
    changes = merged(learning(num_iterations=2), {"optimizer": {"eps": 1e-3}})
    _, limit = limits(watch("free", **changes))
    run = two_as_one(watch, write_config, base, tmp_path, merged(changes, {"ppo": {"max_ratio": limit}}))
    assert 0 < sum(row["policy/skipped_steps"] for row in run.metrics) < 24


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_all_processes(write_config, base, tmp_path):
    changes = merged(base, {"optimizer": {"learning_rate": 1e30}})
    with pytest.raises(AssertionError, match=r"ppo iteration 1, step 2: .*failed_batch\.jsonl"):
        run_processes(2, "ppo", write_config("ppo", tmp_path, **changes))
    assert len(read_jsonl(tmp_path / "ppo.failed_batch.jsonl")) == 4
