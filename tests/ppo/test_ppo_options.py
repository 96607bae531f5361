"""PPO's options outside the losses: inputs of the rewards, sampling, schedules, older rollouts, the plan.

test_ppo_models.py tests what PPO saves. Numbers in brackets are rows of the list of bugs in other implementations (docs
of the project).
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear
from transformers import AutoModelForSequenceClassification, GenerationConfig

from rlhf_cli.config.models import Lora
from rlhf_cli.config.ppo import PPO, PPOConfig, PPOEvaluation, Ptx, Rollout, ValueModel
from rlhf_cli.data.batches import stream
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.load import load_policy
from rlhf_cli.ppo.scores import ScoreScale, ask_rewards, measure_reference_scores
from rlhf_cli.ppo.setup import kl_note, load_setup
from rlhf_cli.ppo.update import minibatches
from rlhf_cli.rollout.sampling import draw_uniforms, sample
from rlhf_cli.run.stage_run import StageRun
from rlhf_cli.training.optimizer import Stepper
from stages import ppo as ppo_stage
from support.compare import close
from support.crash import outcome
from support.oracles import check_update_batch, chosen, distributions, hidden_states, numbers, padded, plain_copy
from support.paths import TESTS
from support.resume import same
from support.setup import ALONE, config_of, learning, reward_calls
from support.tiny import STOP, encoder, merged, read_jsonl, write_jsonl

# --------------------------------------------------------------------------------- rewards


def scored_rollout(setup):
    """Sample a rollout and score it. Returns (rollout, texts, scores)."""
    rollout = ppo_stage._rollout(setup, 0)
    return rollout, *ask_rewards(setup, rollout)


def test_reads_and_output_of_a_reward_model_that_shares_the_tokenizer(start, pipeline):
    """It reads the sampled ids, with or without the prompt. The probability is the sigmoid of its score."""
    path = str(pipeline("llama") / "rm")
    reward = {"type": "reward_model", "path": path, "normalize": False}
    totals = {}
    for reads, output in itertools.product(("prompt_and_response", "response"), ("logit", "probability")):
        with start(rewards=[{**reward, "reads": reads, "output": output}]) as setup:
            assert setup.rewards[0].reads_policy_tokens
            rollout, _, scores = scored_rollout(setup)
        plain = AutoModelForSequenceClassification.from_pretrained(f"{path}/model")
        expected = []
        for prompt, response in zip(rollout.prompts, rollout.responses, strict=True):
            ids = prompt.ids + response.ids if reads == "prompt_and_response" else list(response.ids)
            if response.ended and ids[-1] != setup.tokenizer.eos_token_id:
                ids.append(setup.tokenizer.eos_token_id)  # As in the reward model's training, whatever ended it.
            with torch.no_grad():
                expected.append(plain(input_ids=torch.tensor([ids])).logits[0, 0])
        logits = torch.stack(expected)
        close(scores.total, logits.sigmoid() if output == "probability" else logits)
        totals[reads, output] = scores.total
    for one, other in itertools.combinations(totals.values(), 2):
        assert (one - other).abs().min() > 1e-3


def test_reads_and_output_of_an_encoder_with_labels(start, word_piece, tmp_path):
    """It reads the text, with or without the prompt. The probability is the label's entry of the softmax."""
    model = encoder(tmp_path / "two", word_piece, 2, id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1})
    reward = {"type": "reward_model", "path": str(tmp_path / "two"), "label": "bad", "weight": -2.0}
    for reads, output in itertools.product(("prompt_and_response", "response"), ("logit", "probability")):
        with start(rewards=[{**reward, "reads": reads, "output": output}]) as setup:
            rollout, texts, scores = scored_rollout(setup)
        for prompt, text, score, total in zip(
            rollout.prompts, texts, scores.each["reward_model"], scores.total, strict=True
        ):
            full_text = prompt.text + text if reads == "prompt_and_response" else text
            with torch.no_grad():
                logits = model(**word_piece(full_text, return_tensors="pt")).logits[0]
            expected = logits.softmax(0)[0] if output == "probability" else logits[0]
            assert score.item() == pytest.approx(expected.item(), abs=1e-5)
            assert total.item() == pytest.approx(-2.0 * expected.item(), abs=1e-5)


def test_a_dense_reward_gets_the_text_of_each_token(watch, functions):
    """The texts of the tokens join to the decoded response."""
    rewards = [{"type": "function", "function": f"{functions}:tokens", "per_token": True}]
    run = watch(rewards=rewards, ppo={"num_iterations": 1, "kl_coef": 0.0, "missing_eos_penalty": 0.0})
    (call,), rollout, setup = reward_calls(run.setup), run.rollouts[0], run.setup
    for row, response in zip(call["rows"], rollout.responses, strict=True):
        assert row["tokens"] == [setup.tokenizer.decode([i]) for i in response.ids]
    assert run.metrics[0]["objective/reward"] == pytest.approx(statistics.fmean(map(sum, call["dense"])), abs=1e-5)
    assert run.metrics[0]["objective/score"] == run.metrics[0]["reward/tokens"]


def test_scores_normalised_by_reference_have_mean_0_and_std_1(start, pipeline):
    """The samples are of ref_policy on training prompts, even if the policy is another model."""
    ref = str(pipeline("llama") / "sft")
    ppo = {"score_normalization": "reference", "num_reference_samples": 20}
    with start(ref_policy={"path": ref}, ppo=ppo) as setup:
        scale = ScoreScale(setup.config.ppo)
        measure_reference_scores(setup, scale)
        calls = list(reward_calls(setup))
    raw = torch.tensor([x for call in calls for x in call["values"]])
    assert [len(call["values"]) for call in calls] == [8, 8, 4]
    normalised = scale.apply(raw)
    assert normalised.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert normalised.std().item() == pytest.approx(1.0, abs=1e-5)
    uniforms = draw_uniforms(0, "ppo reference", 0, 20, 8)
    order = stream(len(setup.train), 20, 0, 0, "ppo reference prompts")
    ref_policy = load_policy(str(Path(ref) / "model"))
    by_ref = sample(ref_policy, [setup.train[i].ids for i in order], uniforms, setup.sampling)
    texts = [setup.tokenizer.decode(r.ids, skip_special_tokens=True) for r in by_ref]
    assert [text for call in calls for text in call["responses"]] == texts
    assert [p for call in calls for p in call["prompts"]] == [setup.train[i].text for i in order]


def test_equal_scores_are_shifted_but_not_scaled(write_config, tmp_path):
    """A constant reward is normalised to 0, not to NaN."""
    config = config_of(write_config, "ppo", PPOConfig, tmp_path, ppo={"score_normalization": "running"})
    scale, raw = ScoreScale(config.ppo), torch.full((8,), 7.5)
    scale.take(raw, ALONE)
    assert scale.apply(raw).tolist() == [0.0] * 8


# -------------------------------------------------------------------------------------------- sampling


FILTERS = {
    "min_new_tokens": 4,
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.97,
    "min_p": 0.003,
    "stop_strings": ["e"],
}
NO_REPEATS = {"temperature": 0.4, "no_repeat_ngram_size": 2}


@pytest.mark.parametrize("rollout", [FILTERS, NO_REPEATS], ids=["filters", "no n-gram twice"])
def test_with_every_filter_the_first_ratio_is_one_and_the_first_kl_zero(watch, rollout):
    """[13, 14] They are exact, because the microbatches are the same. The update batch equals the slow loop."""
    ppo = {"minibatch_size": 8, "kl_coef": 0.3, "old_logprobs": "recomputed"}
    run = watch(rollout={"max_new_tokens": 12, **rollout}, ppo=ppo, optimizer={"learning_rate": 2e-2})
    first, later = run.metrics
    assert first["policy/first_ratio"] == first["policy/ratio"] == later["policy/first_ratio"] == 1.0
    assert first["policy/first_ratio_error"] == later["policy/first_ratio_error"] == 0.0
    assert first["objective/kl"] == 0.0
    assert later["objective/kl"] != 0.0
    assert max(row["policy/sampler_gap"] for row in run.metrics) < 3e-5
    check_update_batch(run)
    responses = [r for rollout in run.rollouts for r in rollout.responses]
    if rollout is NO_REPEATS:
        assert any(ids for r in responses for ids in r.forbidden_ids)
        assert GenerationConfig.from_pretrained(run.stage_dir / "model").no_repeat_ngram_size == 2
        return
    lengths = [len(r.ids) for r in responses]
    assert (min(lengths), max(lengths)) == (4, 12)
    assert all(len(kept) <= 40 for r in responses for kept in r.allowed_ids)
    assert {len(kept) for r in responses for kept in r.allowed_ids} != {40}, "the other filters keep fewer"
    assert not any(i in run.setup.sampling.stop for r in responses for i in r.ids[:3])


def test_stop_tokens_end_a_response(start, tokenizer):
    names = tokenizer.convert_ids_to_tokens(sorted(STOP))
    with start(rollout={"stop_tokens": names}) as setup:
        assert setup.sampling.stop == STOP | {tokenizer.eos_token_id}
    with pytest.raises(ConfigError, match=r"rollout\.stop_tokens: 'help\? no!' is not a single token"):
        with start(rollout={"stop_tokens": ["help? no!"]}):
            pass


def test_stop_strings_end_a_response_and_are_not_shown(watch):
    """The scored and logged text ends before the stop string. The ids in the update include it."""
    run = watch(rollout={"stop_strings": ["e", "zz"], "stop_tokens": []}, num_logged_samples=8)
    tokenizer, ended_by_string = run.setup.tokenizer, 0
    samples = read_jsonl(run.stage_dir / "samples.jsonl")
    for i, (rollout, call) in enumerate(zip(run.rollouts, reward_calls(run.setup), strict=True)):
        assert [row["response"] for row in samples[8 * i : 8 * i + 8]] == call["responses"]
        for response, text, row in zip(rollout.responses, call["responses"], call["rows"], strict=True):
            full_text = tokenizer.decode(response.ids, skip_special_tokens=True)
            assert text == full_text.partition("e")[0]
            assert row["ended"] == response.ended
            if "e" in full_text:
                ended_by_string += 1
                assert response.ended
                assert "e" not in tokenizer.decode(response.ids[:-1])
    assert 0 < ended_by_string < 16


@pytest.mark.parametrize("n", [1, 4])
def test_an_iteration_samples_n_responses_to_each_of_the_next_prompts(start, n):
    """[15, 27, 38] Every prompt comes once per epoch, and every response has uniforms of its own."""
    with start(rollout={"samples_per_prompt": n}) as setup:
        rollouts = [ppo_stage._rollout(setup, i) for i in range(3 * n)]
    prompts = [prompt.text for rollout in rollouts for prompt in rollout.prompts]
    assert Counter(prompts) == {p.text: n for p in setup.train}
    assert len(prompts) == 24 * n
    for rollout in rollouts:
        texts = [prompt.text for prompt in rollout.prompts]
        assert texts == [texts[i // n * n] for i in range(8)], "prompt-major"
    drawn = {tuple(r.ids) for rollout in rollouts for r in rollout.responses if len(r.ids) > 3}
    assert len(drawn) == sum(len(r.ids) > 3 for rollout in rollouts for r in rollout.responses)


def test_every_iteration_draws_its_own_uniforms(start, data, tmp_path):
    """[15, 27] With one prompt and an unchanged policy, only the uniforms can make two iterations differ."""
    path = write_jsonl(tmp_path / "one.jsonl", read_jsonl(data["prompts"])[:1])
    with start(data={"train": str(path)}, rollout={"min_new_tokens": 8}) as setup:
        first, second, again = ([r.ids for r in ppo_stage._rollout(setup, i).responses] for i in (0, 1, 0))
    assert first == again
    assert all(a != b for a, b in zip(first, second, strict=True))


# ------------------------------------------------------------------------------------- limits and schedules


def peaks(values):
    """Indices from 2 on whose value exceeds all earlier ones by 10 %."""
    return [i for i in range(2, len(values)) if values[i] > 1.1 * max(values[:i])]


def test_max_approx_kl_ends_the_update_before_the_step_that_exceeds_it(watch):
    """[25] The next iteration updates again. Both schedules still reach their final learning rate."""
    free = watch("free", **learning())
    kl = [step["policy/approx_kl"] for step in free.steps]
    end = peaks(kl)[1]
    limit = (max(kl[:end]) + kl[end]) / 2
    assert free.moves == [("policy", True), ("value", True)] * 12
    assert free.metrics[0]["policy/stopped_early"] == 0.0

    limited = watch("held", **learning(max_approx_kl=limit))
    assert len(limited.steps) == end + 1, "the step that exceeds the limit is computed, later ones are not"
    assert limited.moves == [(which, i < end) for i in range(12) for which in ("policy", "value")]
    assert [s["policy/approx_kl"] for s in limited.steps] == kl[: end + 1]
    for name, weight in free.weights[end - 1].items():
        assert torch.equal(limited.after[0][name], weight), name
    assert limited.metrics[0]["policy/stopped_early"] == 1.0
    for run in (free, limited):
        for stepper in (run.setup.policy_stepper, run.setup.value_stepper):
            assert stepper.learning_rate == pytest.approx(2e-3, rel=1e-6)

    twice = watch("twice", **learning(max_approx_kl=limit, num_iterations=2))
    assert twice.moves[24] == ("policy", True)
    assert twice.setup.policy_stepper.learning_rate == pytest.approx(2e-3, rel=1e-6)


def test_a_minibatch_above_max_ratio_is_skipped(watch, monkeypatch):
    """Neither the weights nor Adam's state change, the schedule advances, and the metrics count it."""
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
    assert run.setup.policy_stepper.learning_rate == pytest.approx(2e-3, rel=1e-6)


def test_the_kl_after_an_update_is_that_of_the_policies_before_and_after_it(watch):
    """KL(old, new) per token, from plain forward passes."""
    run = watch(ppo={"objective": "penalty", "policy_kl_target": 1e3, "num_iterations": 2})
    texts = (run.rollouts[0].prompts, run.rollouts[0].responses, run.setup.sampling)
    with torch.no_grad():
        old, new = (numbers(chosen(distributions(plain_copy(models.policy), *texts))) for models in run.models)
    gaps = [b - a for x, y in zip(old, new, strict=True) for a, b in zip(x, y, strict=True)]
    expected = statistics.fmean(math.exp(gap) - 1 - gap for gap in gaps)
    assert run.metrics[0]["policy/kl_after_update"] == pytest.approx(expected, rel=1e-3)
    assert expected > 1e-4


def test_each_learning_rate_follows_its_own_number_of_steps(watch):
    """[25] The policy takes fewer steps than the value model, because of the value warm-up. Rollouts are used twice."""
    run = watch(
        ppo={"num_iterations": 3, "num_rollouts_per_update": 2, "ppo_epochs": 2},
        value_model={"learning_rate": 1e-3, "warmup_iterations": 1},
        optimizer={"learning_rate": 4e-3, "schedule": "linear", "min_lr_ratio": 0.25},
    )
    counts = Counter(which for which, _ in run.moves)
    assert counts == {"value": 4 + 8 + 8, "policy": 8 + 8}
    assert run.setup.policy_stepper.learning_rate == pytest.approx(1e-3, rel=1e-6)
    assert run.setup.value_stepper.learning_rate == pytest.approx(2.5e-4, rel=1e-6)
    expected = [4e-3, 4e-3, (4e-3 + 1e-3) / 2]
    assert [row["policy/learning_rate"] for row in run.metrics] == pytest.approx(expected, rel=1e-6)
    expected = [1e-3 - 7.5e-4 * done / 20 for done in (0, 4, 12)]
    assert [row["value/learning_rate"] for row in run.metrics] == pytest.approx(expected, rel=1e-6)
    by_default = watch("default", ppo={"num_iterations": 1})
    assert by_default.metrics[0]["value/learning_rate"] == by_default.metrics[0]["policy/learning_rate"] == 5e-3


def test_initial_weights_of_the_value_model(start, pipeline):
    root = pipeline("llama")
    model_reward = {"rewards": [{"type": "reward_model", "path": str(root / "rm")}]}
    policy = {"policy": {"path": str(root / "sft")}}
    rm, sft = (load_file(root / f"{stage}/model/model.safetensors") for stage in ("rm", "sft"))
    alone = {}  # without a reward model, auto takes the policy
    cases = (
        ("auto", model_reward, rm),
        ("auto", alone, sft),
        ("reward_model", model_reward, rm),
        ("policy", model_reward, sft),
    )
    for init, rewards, source in cases:
        with start(value_model={"init": init}, **rewards, **policy) as setup:
            weights = setup.models.value_model.base_model.state_dict()
            assert setup.models.value_model.score.weight.abs().max() == 0
        for name, weight in weights.items():
            assert torch.equal(weight, source[f"model.{name}"]), (init, name)
    with start(value_model={"init": "shared"}, **policy) as setup:
        assert setup.models.value_model is None
        assert setup.models.value_head.weight.abs().max() == 0
        assert list(setup.value_stepper.model.parameters()) == [setup.models.value_head.weight]


# ------------------------------------------------------------------------------------- older rollouts


@pytest.mark.parametrize(("num_rollouts", "cap", "has_values"), [(2, 1.05, True), (3, 2.0, False)])
def test_older_rollouts_are_weighted_by_their_importance(watch, num_rollouts, cap, has_values):
    """The ratio is that of two policies: at the beginning of the update, and when the rollout was sampled.

    Its log-probabilities come from plain forward passes in float64.
    """
    estimator = {} if has_values else {"advantage_estimator": "reinforce", "whiten_advantages": True}
    run = watch(
        ppo={"num_iterations": 3, "num_rollouts_per_update": num_rollouts, "importance_ratio_cap": cap, **estimator},
        optimizer={"learning_rate": 1e-2},
    )
    assert [len(batch.responses) for batch in run.batches] == [8 * min(i + 1, num_rollouts) for i in range(3)]
    num_steps = [2 * min(i + 1, num_rollouts) for i in range(3)]
    assert len([1 for which, _ in run.moves if which == "policy"]) == len(run.steps) == sum(num_steps)
    capped = 0
    own_batches = [replace(batch) for batch in run.batches]
    for i, batch in enumerate(run.batches):
        assert run.metrics[i]["policy/first_ratio_error"] < 1e-5
        iterations = list(range(max(0, i - num_rollouts + 1), i + 1))
        for position, sampled_in in enumerate(iterations):
            rows, width = slice(8 * position, 8 * position + 8), run.rollouts[sampled_in].response_mask.shape[1]
            sampled = run.rollouts[sampled_in]
            assert batch.responses[rows] == sampled.responses
            rollout_args = (sampled.prompts, sampled.responses, run.setup.sampling)
            with torch.no_grad():
                then, now = (
                    padded(chosen(distributions(plain_copy(run.models[j].policy).double(), *rollout_args)))
                    for j in (sampled_in, i)
                )
                values_now = padded(
                    [
                        [linear(state, run.models[i].value_model.score.weight.double())[0] for state in row]
                        for row in hidden_states(
                            plain_copy(run.models[i].value_model).double().base_model, *rollout_args[:2]
                        )
                    ]
                    if has_values
                    else [[0.0] * len(r.ids) for r in sampled.responses]
                )
            weight = (now - then).exp().clamp(max=cap)
            capped += int(((now - then).exp() > cap).sum())
            # The same rollout in the update of its own iteration: the last rows of that batch.
            first = {
                name: getattr(own_batches[sampled_in], name)[-8:, :width].double()
                for name in ("advantages", "returns", "ref_logprobs")
            }
            close(batch.logprobs[rows, :width].double(), now, 1e-5)
            close(batch.values[rows, :width].double(), values_now, 1e-5)
            close(batch.advantages[rows, :width].double(), first["advantages"] * weight, 1e-4)
            close(batch.returns[rows, :width].double(), first["returns"], 1e-6)
            close(batch.ref_logprobs[rows, :width].double(), first["ref_logprobs"], 1e-6)
            if sampled_in < i:
                assert (weight - 1).abs().max() > 1e-2
    assert capped > 0


def test_every_row_of_every_kept_rollout_is_used_once_per_epoch(write_config, tmp_path):
    ppo = {"rollout_batch_size": 8, "minibatch_size": 4, "num_rollouts_per_update": 2, "ppo_epochs": 2}
    config = config_of(write_config, "ppo", PPOConfig, tmp_path, ppo=ppo)
    epochs = []
    for iteration, size in enumerate((8, 16, 16)):
        chosen_rows = minibatches(size, iteration, config)
        assert {len(rows) for rows in chosen_rows} == {4}
        flat = list(itertools.chain(*chosen_rows))
        epochs += [flat[:size], flat[size:]]
        assert [sorted(epoch) for epoch in epochs[-2:]] == [list(range(size))] * 2
    assert len(set(map(tuple, epochs))) == 6, "each epoch has another order"


# -------------------------------------------------------------------------------------------- the plan


def test_kl_note_explains_estimators_with_another_optimum(write_config, tmp_path):
    """All estimators except the two defaults get a note. With kl_coef 0 there is no note."""
    reward, loss = ("k1", "k2", "k3", "abs", "full"), ("k2", "k3", "abs", "full", "k2_sequence")
    for kl_in, estimator in [("reward", e) for e in (None, *reward)] + [("loss", e) for e in (None, *loss)]:
        ppo = {"kl_in": kl_in, "kl_estimator": estimator}
        note = kl_note(config_of(write_config, "ppo", PPOConfig, tmp_path, ppo=ppo))
        if estimator in (None, "k1", "k2_sequence"):
            assert note is None
        else:
            assert note.startswith("ppo.kl_estimator: ")
        ppo["kl_coef"] = 0.0
        assert kl_note(config_of(write_config, "ppo", PPOConfig, tmp_path, ppo=ppo)) is None
    # A KL in the loss loses weight, with any estimator, if the advantages are divided by their standard deviation.
    for estimator, whiten in (("gae", True), ("reinforce_pp", None), ("grpo", None)):
        ppo = {"kl_in": "loss", "advantage_estimator": estimator, "whiten_advantages": whiten}
        config = config_of(write_config, "ppo", PPOConfig, tmp_path, ppo=ppo, rollout={"samples_per_prompt": 2})
        assert "divided by their standard deviation" in kl_note(config)


def test_the_plan_has_the_right_numbers(write_config, base, data, tmp_path, capsys):
    """24 prompts and 3 iterations of 2, 4 and 4 minibatches, with 2 epochs. The first trains only the values."""
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
        setup = load_setup(config, stage)
    tokens = statistics.fmean(len(p.ids) for p in setup.train)
    assert "ppo: plan\n" in out
    for line in (
        f"  prompts        24 of {tokens:.0f} tokens on average; 0.50 epochs",
        "  rollouts       3 iterations x 4 prompts x 2 = 24 responses of at most 8 tokens (at most 192 tokens)",
        "  minibatches    2 ppo_epochs x 2 minibatches x 2 rollouts of 4 responses, 3 per microbatch = 8 optimizer "
        "steps per iteration",
        "  microbatches   at most 2,048 tokens (ppo.tokens_per_microbatch)",
        "  steps          20 in total, the first 5 of them warm-up",
        "  value warm-up  1 iterations before the policy trains",
    ):
        assert line in out
    # 20 steps minus the 4 of the value warm-up, which use no ptx rows: 16 * 6 / 24 epochs.
    assert "  ptx            6 rows per step = 4.00 epochs over 24 rows" in out
    assert "processes" not in out


# --------------------------------------------------------------------------------------------- reruns


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


def test_a_rerun_with_many_options_gives_the_same_bits(watch, data):
    """The state of the global random generators has no influence."""
    ptx = {"ptx": {"train": str(data["demonstrations"]), "coef": 0.3, "mode": "convex", "max_length": 96}}
    torch.manual_seed(1)
    first = outcome(watch("first", **UNUSUAL, **ptx).stage_dir)
    torch.manual_seed(2)
    same(outcome(watch("second", **UNUSUAL, **ptx).stage_dir), first)
    assert {"model/model.safetensors", "value_model/model.safetensors", "ema_model/model.safetensors"} < first.keys()
    other = outcome(watch("other", seed=1, **UNUSUAL, **ptx).stage_dir)
    assert other["model/model.safetensors"] != first["model/model.safetensors"]


def test_every_option_is_named_in_a_test():
    """An option that no test mentions fails here."""
    others = ("decoders/test_choose.py", "models/test_frozen.py", "models/test_lora.py", "models/test_nf4.py")
    files = [*(TESTS / "ppo").glob("test_ppo_*.py"), *(TESTS / name for name in others)]
    text = "".join(path.read_text("utf-8") for path in files)
    for section in (PPO, Rollout, ValueModel, Lora, Ptx, PPOEvaluation):
        missing = [key for key in section.model_fields if not re.search(rf"\b{key}\b", text)]
        assert missing == [], section.__name__
