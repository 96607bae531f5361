"""Formulas, compared with numbers from public implementations. tests/golden/golden.json names the source of each case.

Of its 73 cases 68 are checked. Each of the other 5 is in NOT_OFFERED, with the reason. Every key of a checked case's
outputs is checked, except those in NOT_A_TARGET.
"""

import json
import re
import subprocess
import sys

import pytest
import torch

from rlhf_cli.algorithms.advantages import (
    broadcast_to_tokens,
    gae,
    group_advantages,
    masked_whiten,
    reward_to_go,
    token_rewards,
)
from rlhf_cli.algorithms.best_of_n import best_of_n_kl_bound
from rlhf_cli.algorithms.calibration import brier_score, calibration_error
from rlhf_cli.algorithms.kl import adaptive_kl_coef, adaptive_policy_kl_coef, kl_estimate, kl_full, kl_loss
from rlhf_cli.algorithms.losses import entropy_bonus, lm_loss, loss_weights, mixed_loss, policy_loss, value_loss
from rlhf_cli.algorithms.reward_model import pairwise_loss, pointwise_loss, ranking_pairs
from rlhf_cli.algorithms.score_transforms import Moments, clip_score, merge, moments_of
from rlhf_cli.config.stage import Optimizer
from rlhf_cli.tensor_ops import masked_sum, token_entropy, token_logprobs
from rlhf_cli.training.optimizer import build_stepper, ema
from support.paths import ROOT, TESTS

COPY, ORIGINAL = TESTS / "golden/golden.json", ROOT.parent / "shared/golden/golden.json"
CASES = {case["name"]: case for case in json.loads(COPY.read_text(encoding="utf-8"))["cases"]}
NOT_OFFERED = {
    "variant_trl_score_one_later": "the score is at the last real token, as in TRL <= 0.11 and OpenRLHF",
    "clip_fraction_by_ratio_only": "policy/clip_fraction counts tokens with a clipped gradient, not all out of range",
    "remax_advantages": "its baseline is the score of a greedy response, which the rollout does not sample",
    "rm_softmax_best_of_k": "the reward model learns from pairs, rankings and scores, not from the best of K responses",
    "rm_tokenwise_deepspeed_chat": "the reward model scores whole responses, and the source counts padding",
}
"""Case -> why this project does not have the formula."""
NOT_A_TARGET = {
    ("sft_global_token_mean", "mean_of_microbatch_means"),
    ("rm_kwise_instructgpt", "pooled_pairs_mean"),
}
"""Outputs that the file lists for contrast: other averages than the one that the case is about."""
BOOLS, INTS = {"mask"}, {"labels", "sequence", "actions", "ptx_labels"}


def end_to_end(value):
    """The rows of a list one after another if their lengths differ, as in rankings; otherwise the value itself."""
    is_ragged = isinstance(value, list) and isinstance(value[0], list) and len({*map(len, value)}) > 1
    return [x for row in value for x in row] if is_ragged else value


def tensors(case):
    """The inputs of a case: float64 tensors that require a gradient, bool masks, int ids, plain numbers."""
    result = {}
    for key, value in case["inputs"].items():
        if not isinstance(value, list):
            result[key] = value
        elif key in BOOLS:
            result[key] = torch.tensor(value, dtype=torch.bool)
        elif key in INTS:
            result[key] = torch.tensor(value)
        elif key in ("microbatches", "split", "batches", "kls"):
            result[key] = value
        else:
            result[key] = torch.tensor(end_to_end(value), dtype=torch.float64, requires_grad=True)
            if end_to_end(value) is not value:
                result["sizes"] = [len(row) for row in value]
    return result


def gradient(loss, of):
    return torch.autograd.grad(loss, of, retain_graph=True)[0]


def check_token_logprobs_entropy(x):
    logprobs = token_logprobs(x["logits"], x["labels"], temperature=x["temperature"])
    entropy = token_entropy(x["logits"], temperature=x["temperature"])
    return {
        "logprobs": logprobs,
        "entropy": entropy,
        "grad_logits_of_weighted_logprob": gradient((x["w"] * logprobs).sum(), x["logits"]),
        "grad_logits_of_weighted_entropy": gradient((x["w"] * entropy).sum(), x["logits"]),
    }


def check_response_logprobs_shift(x):
    start = x["context_length"]
    return {"logprobs": token_logprobs(x["logits"][:, start - 1 : -1], x["sequence"][:, start:])}


def masked_mean(x, mask):
    return masked_sum(x, mask) / mask.sum()


def check_kl(estimator):
    def check(x):
        kl = kl_estimate(x["logprobs"], x["ref_logprobs"], estimator=estimator)
        token_mean = masked_mean(kl, x["mask"])
        return {
            "per_token": kl.where(x["mask"], 0),
            "token_mean": token_mean,
            "seq_sum_mean": masked_sum(kl, x["mask"]) / len(kl),
            "grad_logprobs_of_token_mean": gradient(token_mean, x["logprobs"]),
        }

    return check


def check_kl_full(x):
    kl = kl_full(x["logits"], x["ref_logits"])
    return {"per_token": kl.where(x["mask"], 0), "token_mean": masked_mean(kl, x["mask"])}


def check_token_rewards(x):
    kl = kl_estimate(x["logprobs"], x["ref_logprobs"], estimator="k1")
    score = x["scores"]
    if "clip_high" in x:
        assert x["clip_low"] == -x["clip_high"]
        score = clip_score(score, x["clip_high"])
    return {"rewards": token_rewards(score, kl, x["mask"], kl_coef=x["kl_coef"])}


def check_gae(x):
    advantages, returns = gae(x["rewards"], x["values"], x["mask"], gamma=x["gamma"], gae_lambda=x["lam"])
    whitened = masked_whiten(advantages, x["mask"])
    return {"advantages": advantages, "returns": returns, "advantages_whitened": whitened}


def check_monte_carlo_returns(x):
    values = torch.full_like(x["rewards"], 123.0)  # with lambda = 1 the returns do not depend on the values
    return {"returns": gae(x["rewards"], values, x["mask"], gamma=x["gamma"], gae_lambda=1.0)[1]}


def check_masked_whiten(bessel):
    def check(x):
        return {"whitened": masked_whiten(x["x"], x["mask"], shift_mean=x["shift_mean"], bessel=bessel)}

    return check


def policy_inputs(x):
    return x["logprobs"], x["old_logprobs"], x["advantages"], x["mask"]


def weights_of(mask, aggregation, max_new_tokens=1):
    """`loss_weights` of a minibatch with this mask."""
    return loss_weights(
        mask,
        aggregation=aggregation,
        num_tokens=mask.sum(),
        num_sequences=len(mask),
        max_new_tokens=max_new_tokens,
        dtype=torch.float64,
    )


def check_policy_loss(aggregation=None):
    def check(x):
        weights = weights_of(x["mask"], aggregation, x.get("constant", 1)) if aggregation else None
        low, high = x.get("clip_low", x.get("clip_eps")), x.get("clip_high")
        clips = {"clip_range": low, "clip_range_high": high, "dual_clip": x.get("dual_clip")}
        loss, stats = policy_loss(*policy_inputs(x), **clips, weights=weights)
        return {
            "loss": loss,
            "grad_logprobs": gradient(loss, x["logprobs"]),
            "capped_fraction": stats["policy/dual_clip_fraction"],
            "clip_fraction": stats["policy/clip_fraction"],
        }

    return check


def check_policy_loss_with_entropy_and_kl(x):
    logprobs, mask = token_logprobs(x["logits"], x["actions"]), x["mask"]
    policy, _ = policy_loss(logprobs, x["old_logprobs"], x["advantages"], mask, clip_range=x["clip_eps"])
    bonus, _ = entropy_bonus(token_entropy(x["logits"]), mask)
    kl, _ = kl_loss(kl_estimate(logprobs, x["ref_logprobs"], estimator="k3"), mask)
    loss = policy - x["entropy_coef"] * bonus + x["kl_coef"] * kl
    return {
        "loss": loss,
        "policy_loss": policy,
        "entropy": bonus,
        "kl_k3": kl,
        "grad_logits": gradient(loss, x["logits"]),
    }


def check_ptx(x):
    policy, _ = policy_loss(*policy_inputs(x), clip_range=x["clip_eps"])
    lm, _ = lm_loss(*next_token_logprobs(x["ptx_logits"], x["ptx_labels"]))
    return {
        "policy_loss": policy,
        "lm_loss": lm,
        "convex": mixed_loss(policy, lm, ptx_coef=x["convex_coef"], ptx_mode="convex"),
        "additive": mixed_loss(policy, lm, ptx_coef=x["additive_coef"], ptx_mode="additive"),
    }


def check_adaptive(x):
    """Of the KL in the reward, by a horizon, or of PPO-penalty's KL, by factors of 2."""
    coef, coefs = x["init"], []
    for kl in x["kls"]:
        if "horizon" in x:
            coef = adaptive_kl_coef(coef, kl, target=x["target"], horizon=x["horizon"], num_episodes=x["n_steps"])
        else:
            coef = adaptive_policy_kl_coef(coef, kl, target=x["target"])
        coefs.append(coef)
    return {"betas": torch.tensor(coefs, dtype=torch.float64)}


def group_size(x):
    """The size of the groups of a case. All groups have the same size and adjacent rows."""
    groups = x["group"].tolist()
    size = groups.count(groups[0])
    assert groups == [i // size for i in range(len(groups))]
    return size


def check_group(kind):
    def check(x):
        options = {"eps": x["eps"]} if "eps" in x else {}
        advantages = group_advantages(x["scores"], samples_per_prompt=group_size(x), baseline=kind, **options)
        return {"per_sequence": advantages, "advantages": broadcast_to_tokens(advantages, x["mask"])}

    return check


def check_reinforce_pp(bessel, baseline=False):
    def check(x):
        rewards, score, mask = x.get("token_rewards"), x.get("scores"), x["mask"]
        if baseline:
            score = group_advantages(score, samples_per_prompt=group_size(x), baseline="dr_grpo")
        if rewards is None:
            rewards = token_rewards(score, x.get("kl", 0.0 * mask), mask, kl_coef=x.get("kl_coef", 0.0))
        returns = reward_to_go(rewards, mask, gamma=x.get("gamma", 1.0))
        return {"returns": returns, "advantages": masked_whiten(returns, mask, bessel=bessel)}

    return check


def check_ema(x):
    average, trajectory = x["init"], []
    for params in x["params"]:
        average = ema(average, params, decay=x["beta"])
        trajectory.append(average)
    return {"trajectory": torch.stack(trajectory)}


def check_running_moments(x):
    seen, rows = Moments(), []
    for batch in x["batches"]:
        new = moments_of(torch.tensor(batch, dtype=torch.float64))
        seen = merge(seen, new)
        rows.append([seen.mean, seen.squared_deviations / seen.count, seen.std, seen.count, new.mean, new.std])
    columns = torch.tensor(rows, dtype=torch.float64).T
    return dict(zip(["mean", "var", "std", "count", "batch_mean", "batch_std"], columns, strict=True))


def check_learning_rate(schedule):
    def check(x):
        config = Optimizer(
            learning_rate=x["base_lr"],
            schedule=schedule,
            warmup_steps=x["warmup_steps"],
            min_lr_ratio=x.get("min_lr", 0.0) / x["base_lr"],
        )
        stepper = build_stepper(torch.nn.Linear(1, 1), config, x["total_steps"])
        rates = []
        for _ in range(x["total_steps"]):
            rates.append(stepper.learning_rate)
            stepper.optimizer.step()
            stepper.advance(move=False)
        return {"lrs": torch.tensor(rates, dtype=torch.float64)}

    return check


def check_policy_microbatches(x):
    parts = zip(*(tensor.split(x["split"]) for tensor in policy_inputs(x)), strict=True)
    losses = [policy_loss(*part, clip_range=x["clip_eps"], num_tokens=x["batch_num_tokens"])[0] for part in parts]
    return {"micro_losses": torch.stack(losses), "total": sum(losses)}


def check_policy_stats(x):
    _, stats = policy_loss(*policy_inputs(x), clip_range=x["clip_eps"])
    k2 = masked_mean(kl_estimate(x["old_logprobs"], x["logprobs"], estimator="k2"), x["mask"])
    fraction, k1 = stats["policy/clip_fraction"], stats["policy/approx_kl_k1"]
    return {"clip_fraction": fraction, "approx_kl_k2": k2, "policy_kl_k1": k1}


def check_approx_kl(x):
    return {"approx_kl": policy_loss(*policy_inputs(x), clip_range=0.2)[1]["policy/approx_kl"]}


def check_value_loss(aggregation=None):
    def check(x):
        weights = weights_of(x["mask"], aggregation) if aggregation else None
        tensors = (x[name] for name in ("values", "old_values", "returns", "mask"))
        loss, stats = value_loss(*tensors, value_clip_range=x.get("clip_eps"), weights=weights)
        fraction = stats["value/clip_fraction"]
        return {"loss": loss, "grad_values": gradient(loss, x["values"]), "clip_fraction": fraction}

    return check


def check_pairwise(kind):
    def check(x):
        loss, _ = pairwise_loss(
            x["chosen"],
            x["rejected"],
            margin=x.get("margin"),
            loss=kind,
            zero_mean_coef=x.get("centre_coef", 0.0),
        )
        return {
            "loss": loss,
            "grad_chosen": gradient(loss, x["chosen"]),
            "grad_rejected": gradient(loss, x["rejected"]),
        }

    return check


def check_rankings(x):
    """The rankings have different lengths, so their scores are end to end."""
    better, worse, weight = ranking_pairs(x["sizes"])
    loss, _ = pairwise_loss(x["scores"][better], x["scores"][worse], weight=weight, num_pairs=len(x["sizes"]))
    return {"loss": loss, "grad_scores": gradient(loss, x["scores"])}


def check_best_of_n_kl(x):
    return {"kl": torch.tensor([best_of_n_kl_bound(int(n)) for n in x["n"]], dtype=torch.float64)}


def check_calibration(x):
    """The probability that a is better, against the outcome; the confidence in the choice, against its correctness."""
    probability, preferred_mask = (x["reward_a"] - x["reward_b"]).sigmoid(), x["a_preferred"].bool()
    better, worse = (torch.where(mask, x["reward_a"], x["reward_b"]) for mask in (preferred_mask, ~preferred_mask))
    nll, stats = pairwise_loss(better, worse)
    confidence = torch.maximum(probability, 1 - probability)
    errors = {
        "brier": torch.tensor(brier_score(probability, preferred_mask), dtype=torch.float64),
        "ece_prob": calibration_error(probability, preferred_mask, num_bins=x["bins_prob"]),
        "ece_conf": calibration_error(confidence, better > worse, num_bins=x["bins_conf"]),
    }
    figures = {"prob": probability, "nll": nll, "accuracy": stats["rm/accuracy"]}
    return figures | errors


def check_score_loss(x):
    loss, _ = pointwise_loss(x["predictions"], x["targets"], loss="mse")
    return {"loss": loss, "grad_predictions": gradient(loss, x["predictions"])}


def next_token_logprobs(logits, labels):
    """Log-probabilities of the labels, each one position to the right of its logits; -100 is masked."""
    targets = labels[:, 1:]
    mask = targets != -100
    return token_logprobs(logits[:, :-1], targets.where(mask, 0)), mask


def check_lm_loss(x):
    logprobs, mask = next_token_logprobs(x["logits"], x["labels"])
    loss, _ = lm_loss(logprobs, mask)
    packed_loss, _ = lm_loss(logprobs[mask])
    torch.testing.assert_close(packed_loss, loss)
    return {"loss": loss, "grad_logits": gradient(loss, x["logits"]), "n_tokens": mask.sum()}


def check_lm_microbatches(x):
    num_tokens = next_token_logprobs(x["logits"], x["labels"])[1].sum()
    losses = [
        lm_loss(*next_token_logprobs(x["logits"][rows], x["labels"][rows]), num_tokens=num_tokens)[0]
        for rows in x["microbatches"]
    ]
    return {"micro_losses": torch.stack(losses), "total": sum(losses), "n_tokens": num_tokens}


BY_BEGINNING = {
    "token_logprobs_entropy": check_token_logprobs_entropy,
    "response_logprobs_shift": check_response_logprobs_shift,
    "kl_k1": check_kl("k1"),
    "kl_k2": check_kl("k2"),
    "kl_k3": check_kl("k3"),
    "kl_abs": check_kl("abs"),
    "kl_full": check_kl_full,
    "token_rewards": check_token_rewards,
    "gae": check_gae,
    "mc_returns": check_monte_carlo_returns,
    "masked_whiten_bessel": check_masked_whiten(bessel=True),
    "masked_whiten_population": check_masked_whiten(bessel=False),
    "ppo_policy_loss": check_policy_loss(),
    "ppo_policy_loss_seq_mean_token_mean": check_policy_loss("sequence"),
    "ppo_policy_loss_seq_mean_token_sum": check_policy_loss("constant"),
    "ppo_policy_loss_microbatches": check_policy_microbatches,
    "ppo_clip_fraction_and_approx_kl": check_policy_stats,
    "ppo_approx_kl_k3": check_approx_kl,
    "value_loss": check_value_loss(),
    "value_loss_clipped_seq_mean": check_value_loss("sequence"),
    "policy_loss_with_entropy_bonus_and_kl_term": check_policy_loss_with_entropy_and_kl,
    "adaptive_kl_ziegler": check_adaptive,
    "ppo_penalty_adaptive_beta": check_adaptive,
    "rloo_advantages": check_group("rloo"),
    "grpo_advantages": check_group("grpo"),
    "dr_grpo_advantages": check_group("dr_grpo"),
    "reinforce_pp_bessel": check_reinforce_pp(bessel=True),
    "reinforce_pp_population": check_reinforce_pp(bessel=False),
    "reinforce_pp_baseline_population": check_reinforce_pp(bessel=False, baseline=True),
    "reinforce_pp_baseline_bessel": check_reinforce_pp(bessel=True, baseline=True),
    "rm": check_pairwise("logsigmoid"),
    "rm_logexp": check_pairwise("logexp"),
    "rm_kwise_instructgpt": check_rankings,
    "rm_mse": check_score_loss,
    "best_of_n_kl": check_best_of_n_kl,
    "bradley_terry_and_calibration": check_calibration,
    "sft_cross_entropy": check_lm_loss,
    "sft_global_token_mean": check_lm_microbatches,
    "ptx_combined": check_ptx,
    "ema_update": check_ema,
    "running_moments": check_running_moments,
    "lr_cosine": check_learning_rate("cosine"),
    "lr_linear": check_learning_rate("linear"),
    "lr_constant": check_learning_rate("constant"),
}
"""The check of the cases whose name begins so; the longest beginning counts."""


def check_of(name):
    return BY_BEGINNING[max((start for start in BY_BEGINNING if name.startswith(start)), key=len)]


CHECKS = {name: check_of(name) for name in CASES if name not in NOT_OFFERED}


def test_every_golden_case_is_checked_or_listed_as_not_offered():
    assert len(CHECKS) == 68
    assert len(NOT_OFFERED) == 5
    assert set(NOT_OFFERED) < set(CASES)
    assert all(NOT_OFFERED.values())


@pytest.mark.skipif(not ORIGINAL.is_file(), reason="the original of tests/golden/golden.json is not beside the project")
def test_the_copy_of_the_golden_file_is_the_original():
    assert COPY.read_bytes() == ORIGINAL.read_bytes()


@pytest.mark.parametrize("name", CHECKS)
def test_golden(name):
    case = CASES[name]
    x = tensors(case)
    actual = CHECKS[name](x)
    targets = {key: value for key, value in case["outputs"].items() if (name, key) not in NOT_A_TARGET}
    assert not set(targets) - set(actual), "an output of the case is not checked"
    for key, value in targets.items():
        expected = torch.tensor(end_to_end(value), dtype=torch.float64)
        assert actual[key].shape == expected.shape, key
        assert key == "n_tokens" or actual[key].dtype == torch.float64, key
        if expected.ndim == 2 and "mask" in x:
            assert (actual[key][~x["mask"]] == 0).all(), f"{key}: not 0 under padding"
        tolerance = 1e-6 if key.startswith("grad_") else case["tol"]
        excess = (actual[key] - expected).abs() - tolerance * expected.abs().clamp(min=1)
        assert excess.max() <= 0, f"{key}: {actual[key]} is not {expected}"


def run_check(module, text):
    module.write_text(text, encoding="utf-8")
    command = [sys.executable, "-S", str(TESTS / "golden/check.py"), str(module)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_runner_for_other_projects_accepts_the_function_of_its_page_and_finds_a_fault_in_it(tmp_path):
    """It needs no package: -S hides them. The fault is an advantage that lacks lambda."""
    page = (ROOT / "docs/conformance.md").read_text(encoding="utf-8")
    (function,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    right = run_check(tmp_path / "mine.py", function)
    assert (right.returncode, right.stdout.count("ok ")) == (0, 6), right.stdout + right.stderr
    assert right.stdout.endswith("6 of 73 cases checked, 0 wrong\n")
    wrong = run_check(tmp_path / "mine.py", function.replace("gamma * lam * advantage", "gamma * advantage"))
    assert wrong.returncode == 1
    assert wrong.stdout.endswith("6 of 73 cases checked, 4 wrong\n"), "lambda 1 hides the fault"
    assert "advantages[0][" in wrong.stdout
    assert "Source: OpenRLHF/OpenRLHF@" in wrong.stdout
    assert run_check(tmp_path / "mine.py", "def other(): ...").returncode == 1, "nothing was checked"


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("{'kl': [0.0 for _ in n]}", "kl[1] is 0, not 0.1931471806 (tolerance 1e-08)"),
        ("{'kl': 0.0}", "its shape is another: 1 numbers"),
        ("{'nats': []}", "nats: the case has no such output"),
        ("1 / 0", "ZeroDivisionError"),
        ("{'kl': [float('nan') for _ in n]}", "kl[0] is nan, not"),
    ],
)
def test_the_runner_says_what_is_wrong(tmp_path, returned, says):
    result = run_check(tmp_path / "mine.py", f"def best_of_n_kl(n): return {returned}")
    assert result.returncode == 1
    assert says in result.stdout
    assert "1 of 73 cases checked, 1 wrong" in result.stdout
