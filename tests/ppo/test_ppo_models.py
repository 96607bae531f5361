"""Models of PPO beyond the defaults: LoRA, a shared value head, the EMA, the best policy, continued runs.

The tests read saved models back with plain transformers and compare numbers with plain tensors in float64.
"""

from __future__ import annotations

import json
import statistics
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig

from rlhf_cli.errors import ConfigError
from rlhf_cli.processes.microbatches import GradientSum
from rlhf_cli.rollout import rollout as rollout_module
from rlhf_cli.rollout.sampling import draw_uniforms, sample
from support.compare import close
from support.oracles import chosen, distributions, full_kl, hidden_states, padded, plain_copy
from support.setup import reward_calls, weights_of
from support.tiny import read_jsonl

LLAMA_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GPT2_LAYERS = ("c_attn", "c_proj", "c_fc")


def saved(stage_dir, name="model"):
    return load_file(stage_dir / name / "model.safetensors")


def causal(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@torch.no_grad()
def logprobs_by(model, rollout, sampling):
    """Log-probabilities of the rollout's tokens by plain forward passes: [B, R] float64."""
    return padded(chosen(distributions(plain_copy(model), rollout.prompts, rollout.responses, sampling)))


@torch.no_grad()
def values_by(classifier, rollout):
    """Values of the rollout's states by a plain sequence classifier: [B, R] float64."""
    model = plain_copy(classifier)
    states = hidden_states(model.base_model, rollout.prompts, rollout.responses)
    return padded([[linear(state, model.score.weight)[0] for state in row] for row in states])


def same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(actual[name], weight), name


# -------------------------------------------------------------------------------------------- adapters


@pytest.mark.parametrize(
    ("architecture", "targets", "adapted"),
    [("llama", ["q_proj", "v_proj"], ("q_proj", "v_proj")), ("gpt2", None, GPT2_LAYERS)],
)
def test_lora_trains_low_rank_matrices_and_saves_them_merged(watch, make_model, architecture, targets, adapted):
    """Before the first step the adapters add 0: the ratio is exactly 1 and the KL exactly 0.

    tests/models/test_lora.py has the merged weights by hand.
    """
    path = make_model(architecture)
    lora = {"r": 3, "alpha": 5, "target_modules": targets}
    rollout = {} if architecture == "llama" else {"stop_tokens": []}
    run = watch(
        policy={"path": str(path), "lora": lora},
        rollout=rollout,
        ppo={"minibatch_size": 8, "kl_coef": 0.3, "old_logprobs": "recomputed"},
        optimizer={"learning_rate": 3e-2},
    )
    policy = run.setup.models.policy
    assert run.setup.models.ref_policy is None, "no second model is in memory"
    first, later = run.metrics
    assert first["policy/first_ratio"] == later["policy/first_ratio"] == 1.0
    assert first["policy/first_ratio_error"] == 0.0
    assert first["objective/kl"] == 0.0
    assert abs(later["objective/kl"]) > 1e-4

    # ref_policy is the initial model, however far the adapters have moved.
    sft = causal(path)
    sampling = run.setup.sampling
    for rollout in run.rollouts:
        close(rollout.ref_logprobs.double(), logprobs_by(sft, rollout, sampling), 1e-5)
    assert (run.rollouts[1].logprobs - run.rollouts[1].ref_logprobs).abs().max() > 1e-2

    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    before, after = saved(path.parent), saved(run.stage_dir)
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith(tuple(f"{layer}.weight" for layer in adapted))}
    # The saved model computes the same logits as the trained policy with its adapters on.
    plain, ids = causal(run.stage_dir / "model"), torch.tensor([run.rollouts[0].prompts[0].ids])
    with torch.no_grad():
        trained_logits = plain_copy(policy)(input_ids=ids).logits
        close(plain(input_ids=ids).logits, trained_logits, 1e-5)
        assert (trained_logits - sft(input_ids=ids).logits).abs().max() > 1e-2
    assert not [key for key in json.loads((run.stage_dir / "model/config.json").read_text()) if "lora" in key]


@torch.no_grad()
def mean_full_kl(policy, ref_policy, rollout, sampling):
    """Mean over tokens of the exact KL, from plain forward passes."""
    texts = rollout.prompts, rollout.responses, sampling
    policy_rows, ref_rows = (distributions(plain_copy(model), *texts) for model in (policy, ref_policy))
    pairs = [(a[0], b[0]) for x, y in zip(policy_rows, ref_rows, strict=True) for a, b in zip(x, y, strict=True)]
    return statistics.fmean(full_kl(p, q).item() for p, q in pairs)


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_the_full_kl_of_a_lora_policy_is_measured_to_its_base_model(watch, make_model, kl_in, monkeypatch):
    """ref_policy is the base model with the adapters off, both in the rollout and in the loss."""
    one_at_a_time = set()

    def watched(*models, in_turn, **more):
        one_at_a_time.add(in_turn)
        return GradientSum(*models, in_turn=in_turn, **more)

    monkeypatch.setattr("stages.ppo.GradientSum", watched)
    path = make_model("llama")
    run = watch(
        policy={"path": str(path), "lora": {"r": 2}},
        ppo={"minibatch_size": 8, "kl_in": kl_in, "kl_estimator": "full", "kl_coef": 0.5},
        optimizer={"learning_rate": 3e-2},
    )
    assert one_at_a_time == {kl_in == "loss"}, "only there a pass of the update switches the adapters off"
    rollout = run.rollouts[1]
    expected = mean_full_kl(run.models[1].policy, causal(path), rollout, run.setup.sampling)
    assert expected > 1e-3
    if kl_in == "loss":
        assert run.steps[0]["loss/kl"] == pytest.approx(0.0, abs=1e-7)
        assert run.steps[1]["loss/kl"] == pytest.approx(expected, rel=1e-3)
    else:
        assert rollout.kl_full[rollout.response_mask].mean().item() == pytest.approx(expected, rel=1e-3)
        # Before the first step the policy is its base model, and the KL takes nothing from the score.
        first, missing_eos_penalty = run.metrics[0], run.setup.config.ppo.missing_eos_penalty
        score = first["objective/score"] - missing_eos_penalty * (1 - first["response/eos_fraction"])
        assert first["objective/reward"] == pytest.approx(score, abs=1e-6)


def test_lora_with_another_model_as_ref_policy(watch, make_model, pipeline):
    """From the first iteration on, the reference is that model and not the policy without adapters."""
    ref = pipeline("llama") / "sft"
    run = watch(policy={"path": str(make_model("llama")), "lora": {"r": 2}}, ref_policy={"path": str(ref)})
    for rollout in run.rollouts:
        expected = logprobs_by(causal(ref / "model"), rollout, run.setup.sampling)
        close(rollout.ref_logprobs.double(), expected, 1e-5)
    assert abs(run.metrics[0]["objective/kl"]) > 1e-3
    assert run.metrics[0]["policy/first_ratio"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(("architecture", "adapted"), [("llama", LLAMA_LAYERS), ("gpt2", GPT2_LAYERS)])
def test_lora_of_a_value_model_trains_adapters_and_the_head(watch, make_model, architecture, adapted):
    """The head and the policy are trained in full. The saved classifier computes the same values."""
    path = make_model(architecture)
    run = watch(
        policy={"path": str(path)},
        rollout={} if architecture == "llama" else {"stop_tokens": []},
        value_model={"lora": {"r": 2, "alpha": 4}, "learning_rate": 2e-2},
    )
    model = run.setup.models.value_model
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert "score.weight" in trained
    assert all("lora_" in name for name in trained - {"score.weight"})
    before, after = saved(path.parent), saved(run.stage_dir, "value_model")
    shared = before.keys() & after.keys()
    assert after.keys() - shared == {"score.weight"}
    changed = {name for name in shared if not torch.equal(before[name], after[name])}
    assert changed == {name for name in shared if name.endswith(tuple(f"{layer}.weight" for layer in adapted))}
    plain = AutoModelForSequenceClassification.from_pretrained(run.stage_dir / "value_model")
    values = values_by(plain, run.rollouts[1])
    close(values, values_by(model, run.rollouts[1]), 1e-5)
    assert values.abs().max() > 1e-2
    policy = saved(run.stage_dir)
    assert all(not torch.equal(policy[name], before[name]) for name in before if "proj.weight" in name)


# ----------------------------------------------------------------------------------- shared value head


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox"])
def test_a_shared_value_model_is_saved_as_a_separate_model(watch, make_model, architecture):
    """Plain transformers loads it. Its values equal those of the policy's backbone with the head."""
    run = watch(
        policy={"path": str(make_model(architecture))},
        rollout={"stop_tokens": []},
        value_model={"init": "shared"},
    )
    models = run.setup.models
    assert models.value_model is None
    plain, info = AutoModelForSequenceClassification.from_pretrained(
        run.stage_dir / "value_model", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert plain.config.num_labels == 1
    assert torch.equal(plain.score.weight, models.value_head.weight)
    policy = causal(run.stage_dir / "model")
    same_bits(dict(plain.base_model.named_parameters()), dict(policy.base_model.named_parameters()))
    rollout = run.rollouts[1]
    expected = shared_values(models, rollout)
    close(values_by(plain, rollout), expected, 1e-5)
    assert expected.abs().max() > 1e-3
    close(rollout.values.double(), shared_values(run.models[1], rollout), 1e-5)


@torch.no_grad()
def shared_values(models, rollout):
    """Values of the policy's backbone with the head, from plain forward passes."""
    states = hidden_states(plain_copy(models.policy).base_model, rollout.prompts, rollout.responses)
    return padded([[linear(state, models.value_head.weight)[0] for state in row] for row in states])


# -------------------------------------------------------------------------------- continued runs, old log-probabilities


@pytest.mark.parametrize("init", ["auto", "shared"])
def test_continuing_from_a_finished_run(watch, init):
    """Policy and value model start from the weights of the finished run. The KL is still to its ref_policy."""
    value_model = {"init": init, "learning_rate": 2e-2}
    old = watch("old", value_model=value_model, ppo={"kl_coef": 0.1})
    sft = old.setup.config.policy.path
    run = watch(
        "new",
        policy={"path": str(old.stage_dir)},
        ref_policy={"path": sft},
        value_model={**value_model, "path": str(old.stage_dir / "value_model")},
        seed=1,
    )
    same_bits(weights_of(run.models[0].policy), old.after[-1])
    rollout, first = run.rollouts[0], run.metrics[0]
    saved_values = AutoModelForSequenceClassification.from_pretrained(old.stage_dir / "value_model")
    close(rollout.values.double(), values_by(saved_values, rollout), 1e-5)
    assert rollout.values.abs().max() > 1e-2
    assert first["value/mean"] != 0.0
    assert first["policy/first_ratio"] == pytest.approx(1.0, abs=1e-5)
    trained, base = (logprobs_by(causal(p), rollout, run.setup.sampling) for p in (old.stage_dir / "model", sft))
    expected = trained - base
    assert first["objective/kl"] == pytest.approx(expected.sum(1).mean().item(), abs=1e-4)
    assert abs(first["objective/kl"]) > 1e-3
    # Without ref_policy in the config, the reference is the policy itself.
    alone = watch("alone", policy={"path": str(old.stage_dir)}, ppo={"num_iterations": 1})
    assert alone.metrics[0]["objective/kl"] == pytest.approx(0.0, abs=1e-5)
    assert alone.metrics[0]["value/mean"] == 0.0, "a new value model"


def test_old_logprobs_auto_takes_them_from_the_sampler(watch, monkeypatch):
    """In float32, `auto` runs no forward pass of the policy between sampling and the update. `recomputed` runs one.

    The log-probabilities that the sampler captured equal those of a plain forward pass.
    """
    calls = []
    real = rollout_module.score_tokens
    monkeypatch.setattr(
        rollout_module, "score_tokens", lambda models, *a, **k: calls.append(models) or real(models, *a, **k)
    )
    for old_logprobs in ("auto", "sampled", "recomputed"):
        calls.clear()
        run = watch(old_logprobs, ppo={"old_logprobs": old_logprobs}, rollout={"temperature": 0.7})
        policy, rollout, first = run.models[0].policy, run.rollouts[0], run.metrics[0]
        recomputed = old_logprobs == "recomputed"
        assert (rollout.logprobs is rollout.sampled_logprobs) == (not recomputed)
        assert ("policy/sampler_gap" in first) == recomputed
        ran = any(models.ref_policy is not None for models in calls)  # ref_policy is scored alone
        assert ran == recomputed, "only the rollout calls this name of score_tokens"
        expected = logprobs_by(policy, rollout, run.setup.sampling)
        close(rollout.logprobs.double(), expected, 1e-5)
        assert first["policy/first_ratio"] == pytest.approx(1.0, abs=1e-5)
        assert first["policy/first_ratio_error"] < 1e-4


def test_fewer_live_rows_draw_the_same_responses(watch, monkeypatch):
    """`rollout.max_live_rows` reaches the sampler in rollouts and evaluations. It changes only rounding."""
    limits = []
    real = rollout_module.sample
    monkeypatch.setattr(rollout_module, "sample", lambda *a, **k: limits.append(k["max_live_rows"]) or real(*a, **k))
    runs = [watch(str(rows), rollout={"max_live_rows": rows}, ppo={"num_iterations": 1}) for rows in (None, 2)]
    assert set(limits[: len(limits) // 2]) == {None}
    assert set(limits[len(limits) // 2 :]) == {2}
    unlimited, limited = (run.rollouts[0].responses for run in runs)
    assert [r.ids for r in unlimited] == [r.ids for r in limited]
    close(runs[0].rollouts[0].logprobs, runs[1].rollouts[0].logprobs, 1e-5)


# ------------------------------------------------------------------------------------------------ EMA


@pytest.mark.parametrize("lora", [None, {"r": 2, "target_modules": ["q_proj"]}], ids=["full", "lora"])
def test_the_ema_model_is_the_average_over_the_steps(watch, make_model, lora):
    """``average = decay * average + (1 - decay) * weight`` after each step, starting from the initial weights.

    Steps that are skipped or come after an early stop do not count. With LoRA the adapters are averaged, then merged.
    """
    decay = 0.7
    run = watch(
        policy={"path": str(make_model("llama")), "lora": lora},
        ppo={"ema_decay": decay, "minibatch_size": 2, "ppo_epochs": 2, "max_ratio": 1.002},
        optimizer={"learning_rate": 2e-2},
    )
    before = run.models[0].policy
    average = {name: p.detach().double().clone() for name, p in before.named_parameters() if p.requires_grad}
    moves = [move for which, move in run.moves if which == "policy"]
    assert {True, False} == set(moves)
    for move, weights in zip(moves, run.weights, strict=True):
        if move:
            for name in average:
                average[name] = decay * average[name] + (1 - decay) * weights[name].double()
    ema_weights = saved(run.stage_dir, "ema_model")
    if lora is None:
        expected = average
    else:
        expected = {name: weight.double() for name, weight in saved(make_model("llama").parent).items()}
        for name in [name for name in expected if name.endswith("q_proj.weight")]:
            layer = name.removesuffix(".weight")
            a, b = (average[f"{layer}.lora_{x}.default.weight"] for x in "AB")
            expected[name] = expected[name] + 32 / 2 * b @ a
    assert ema_weights.keys() == expected.keys()
    for name, weight in expected.items():
        close(ema_weights[name].double(), weight, 1e-5)
    # Saving the average restores the weights of the policy afterwards.
    if lora is None:
        same_bits(saved(run.stage_dir), run.after[-1])
    assert any(
        (ema_weights[name].double() - saved(run.stage_dir)[name].double()).abs().max() > 1e-3 for name in ema_weights
    )
    same_bits(weights_of(run.setup.models.policy), run.after[-1])


# -------------------------------------------------------------------------------------- evaluations during the run


JUDGE = '''
FIGURES = {figures}


def judge(prompts, responses, rows):
    """Give every reply the next figure. The test decides in advance how good each policy is."""
    value = FIGURES.pop(0)
    return [{{"craft": value, "characters": float(len(text))}} for text in responses]
'''


@pytest.fixture
def judged(data, tmp_path):
    """A function: figures of the judge, one per evaluation -> config changes of a run with that judge."""

    def changes(figures, **evaluation):
        path = tmp_path / "judge.py"
        path.write_text(JUDGE.format(figures=figures), encoding="utf-8")
        return {
            "data": {"train": str(data["prompts"]), "test": {"path": str(data["prompts"]), "limit": 6}},
            "ppo": {"num_iterations": 3, "kl_coef": 0.0},
            "evaluation": {"every_iterations": 1, "gold": f"{path}:judge", **evaluation},
            "optimizer": {"learning_rate": 2e-2},
        }

    return changes


@pytest.mark.parametrize(
    ("metric", "figures", "step", "value"),
    [
        ("craft", [9.0, 1.0, 5.0, 2.0], 2, 5.0),
        ("-craft", [0.0, 1.0, -5.0, -2.0], 2, -5.0),
        ("craft", [9.0, 1.0, 1.0, 1.0], 1, 1.0),
    ],
)
def test_the_best_model_is_the_policy_with_the_best_figure(watch, judged, metric, figures, step, value):
    """The policy before PPO does not count. The first of equal figures wins; evaluation.json has its value."""
    run = watch(**judged(figures, best_metric=metric))
    same_bits(saved(run.stage_dir, "best_model"), run.after[step - 1])
    rows = read_jsonl(run.stage_dir / "evaluations.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["craft"] for row in rows] == figures[:4]
    best = json.loads((run.stage_dir / "evaluation.json").read_text())["best"]
    assert best == {"step": step, "metric": metric, "value": value}


def test_evaluations_during_the_run(watch, judged):
    """At the start, every `every_iterations` iterations and at the end, with the same prompts and uniforms."""
    run = watch(**judged([0.0, 1.0, 2.0], every_iterations=2, num_prompts=4, num_examples=3))
    before, *rows = read_jsonl(run.stage_dir / "evaluations.jsonl")
    assert [row["step"] for row in (before, *rows)] == [0, 2, 3]
    end = json.loads((run.stage_dir / "evaluation.json").read_text())
    assert before.items() >= end["sft"].items()
    assert rows[1].items() >= end["ppo"].items()
    assert end["num_prompts"] == 4
    assert len(end["examples"]) == 3
    assert [end["sft"]["craft"], rows[0]["craft"], end["ppo"]["craft"]] == [0.0, 1.0, 2.0]
    assert "best" not in end
    assert not (run.stage_dir / "best_model").exists()

    # Calls of the reward function: evaluation, two iterations, evaluation, third iteration, evaluation.
    calls = reward_calls(run.setup)
    assert [len(call["responses"]) for call in calls] == [4, 8, 8, 4, 8, 4]
    assert rows[0]["score_mean"] == pytest.approx(statistics.fmean(calls[3]["values"]), abs=1e-6)
    scores = calls[3]["values"]
    half = 1.96 * statistics.stdev(scores) / 2  # of four prompts
    ends = [statistics.fmean(scores) - half, statistics.fmean(scores) + half]
    assert [rows[0]["score_mean_low95"], rows[0]["score_mean_high95"]] == pytest.approx(ends, abs=1e-5)
    assert rows[0]["kl_low95"] < rows[0]["kl"] < rows[0]["kl_high95"]
    assert rows[0]["characters"] == statistics.fmean(len(text) for text in calls[3]["responses"])
    assert calls[0]["prompts"] == calls[3]["prompts"] == calls[5]["prompts"]
    assert calls[0]["responses"] != calls[3]["responses"] != calls[5]["responses"]

    uniforms = draw_uniforms(0, "ppo evaluation", 0, 4, 8)
    replies = sample(run.models[2].policy, [p.ids for p in run.setup.held_out.test], uniforms, run.setup.sampling)
    texts = [run.setup.tokenizer.decode(r.ids, skip_special_tokens=True) for r in replies]
    assert calls[3]["responses"] == texts, "the replies of the policy after two iterations"
    assert rows[0]["length"] == statistics.fmean(len(r.ids) for r in replies)
    assert rows[0]["eos_fraction"] == statistics.fmean(r.ended for r in replies)
    held_out = SimpleNamespace(prompts=run.setup.held_out.test, responses=replies)
    new, old = (logprobs_by(run.models[i].policy, held_out, run.setup.sampling).sum(1) for i in (2, 0))
    assert rows[0]["kl"] == pytest.approx((new - old).mean().item(), abs=1e-4)
    assert abs(rows[0]["kl"]) > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"test": None, "test_fraction": 0}}, "no held-out prompts"),
        ({"evaluation": {"best_metric": "beauty"}}, "found beauty, the figures are score_mean, score_median, craft"),
    ],
)
def test_an_unknown_best_metric_is_refused_before_training(watch, judged, changes, message):
    config = judged([0.0] * 4, best_metric="craft")
    for key, value in changes.items():
        config[key] = {**config[key], **value}
    with pytest.raises(ConfigError, match=rf"evaluation\.best_metric: {message}"):
        watch(**config)


def test_saved_models_generate_with_the_settings_of_the_rollout(watch, judged, tokenizer):
    rollout = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "min_new_tokens": 3}
    run = watch(**judged([0.0] * 4, best_metric="craft"), rollout=rollout | {"stop_tokens": ["a"]})
    stop = sorted([tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("a")])
    for name in ("model", "best_model"):
        generation = GenerationConfig.from_pretrained(run.stage_dir / name)
        # transformers does not count the stop token.
        assert {key: getattr(generation, key) for key in rollout} == rollout | {"min_new_tokens": 2}
        assert generation.do_sample is True
        assert generation.eos_token_id == stop
    plain = causal(run.stage_dir / "model")
    ids = torch.tensor([run.rollouts[0].prompts[0].ids])
    torch.manual_seed(0)
    options = {"max_new_tokens": 10, "pad_token_id": tokenizer.pad_token_id}
    assert min(plain.generate(ids, **options).shape[1] for _ in range(8)) >= ids.shape[1] + 3
