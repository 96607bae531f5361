"""The stages end to end on tiny models: their artifacts, that they learn, and what they say on the way."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli.config.models import ScratchModel
from rlhf_cli.errors import ConfigError, RunError
from rlhf_cli.models.load import load_reward_model, load_tokenizer
from rlhf_cli.models.scratch import new_model
from rlhf_cli.report.progress import Display
from rlhf_cli.rewards.functions import load_function
from rlhf_cli.rewards.models import encode_whole, score_sequences
from rlhf_cli.training.optimizer import Stepper
from stages import rm as rm_stage
from stages import sft as sft_stage
from support.tiny import SETTINGS, encoder, read_jsonl, tiny_model, write_jsonl

# ------------------------------------------------------------------------------- models and data


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_tokenizer_from_scratch_is_loaded_as_one_of_the_models_family(run_stage, tmp_path, name):
    scratch = {"architecture": name, "config": SETTINGS[name], "tokenizer": {"vocab_size": 290}}
    path = run_stage("sft", tmp_path, model={"scratch": scratch}) / "model"
    model, tokenizer = (auto.from_pretrained(path) for auto in (AutoModelForCausalLM, AutoTokenizer))
    assert len(tokenizer) <= model.get_input_embeddings().weight.shape[0]
    assert tokenizer.decode(tokenizer("a new lamp 12", add_special_tokens=False)["input_ids"]) == "a new lamp 12"


def test_hh_transcripts_run_through_all_stages(make_model, run_stage, tmp_path):
    """The shared beginning is the prompt: SFT learns the chosen answer to it, PPO samples from it."""
    start = "\n\nHuman: please help\n\nAssistant: with what?\n\nHuman: the {} is broken\n\nAssistant:"
    rows = [
        {"chosen": start.format(w) + f" we will send a new {w}", "rejected": start.format(w) + " no"}
        for w in ("lamp", "radio", "map")
    ]
    path = str(write_jsonl(tmp_path / "hh.jsonl", rows))
    data = {"train": path, "test": path}
    run_stage("sft", tmp_path, model={"path": str(make_model("llama"))}, data=data)
    run_stage("rm", tmp_path, data=data)
    run_stage("ppo", tmp_path, data=data)
    prompts = {start.format(w) for w in ("lamp", "radio", "map")}
    samples = read_jsonl(tmp_path / "sft/samples.jsonl")
    assert {row["prompt"] for row in samples} <= prompts
    targets = {start.format(w): f" we will send a new {w}" for w in ("lamp", "radio", "map")}
    assert all(row["target"] == targets[row["prompt"]] for row in samples), "beside the answer of the row"
    examples = json.loads((tmp_path / "ppo/evaluation.json").read_text())["examples"]
    assert {example["prompt"] for example in examples} == prompts


# ------------------------------------------------------------------------------------- rewards


def test_an_encoder_is_trained_as_reward_model(word_piece, run_stage, tmp_path):
    """tests/rewards/test_reward_models.py has its scores in PPO."""
    encoder(tmp_path / "encoder", word_piece)
    run_stage("rm", tmp_path, model={"path": str(tmp_path / "encoder")}, optimizer={"learning_rate": 3e-3})
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm/model", output_loading_info=True)
    assert type(model).__name__ == "DistilBertForSequenceClassification"
    assert not info["missing_keys"]


def test_a_long_text_is_cut_to_the_positions_of_roberta(word_piece, tmp_path):
    """RoBERTa's 130 positions hold 128 tokens: the first position is pad_token_id + 1."""
    sizes = {"vocab_size": len(word_piece), "max_position_embeddings": 130, "pad_token_id": 1, "num_labels": 1}
    tiny_model("roberta", AutoModelForSequenceClassification, **sizes).save_pretrained(tmp_path)
    word_piece.save_pretrained(tmp_path)
    model, tokenizer = load_reward_model(str(tmp_path)), load_tokenizer(str(tmp_path))
    tokenizer.model_max_length = 128  # as in released tokenizers
    sequences, _ = encode_whole(model, tokenizer, ["we will send " * 100], [True])
    assert score_sequences(model, sequences, "float32").isfinite().all()


def test_ppo_runs_with_a_reward_function_alone(pipeline, run_stage, tmp_path):
    body = "return [float(row['number']) + 0.25 * row['ended'] for row in rows]"
    (tmp_path / "reward.py").write_text(f"def reward(prompts, responses, rows): {body}")
    rewards = [{"type": "function", "function": f"{tmp_path}/reward.py:reward"}]
    policy = {"path": str(pipeline("llama") / "sft")}
    run_stage("ppo", tmp_path, policy=policy, rewards=rewards)
    evaluation = json.loads((tmp_path / "ppo/evaluation.json").read_text())
    assert [int(example["ppo"]["score"]) for example in evaluation["examples"]] == [0, 1, 2, 3, 4]
    value = json.loads((tmp_path / "ppo/value_model/config.json").read_text())
    assert value["architectures"] == ["LlamaForSequenceClassification"]
    with pytest.raises(ConfigError, match=r"value_model\.init"):
        run_stage("ppo", tmp_path / "b", policy=policy, rewards=rewards, value_model={"init": "reward_model"})


def test_one_normalization_sample_leaves_the_scale_of_the_scores(pipeline, run_stage, tmp_path, capsys):
    """One number has no spread. PPO divides its scores by a score_std of nearly 0, and a NaN makes all of them NaN."""
    model = {"path": str(pipeline("llama") / "sft")}
    run_stage("rm", tmp_path, model=model, evaluation={"num_normalization_samples": 1})
    assert json.loads((tmp_path / "rm/model/config.json").read_text())["score_std"] == 1.0
    assert "the scores of the 1 texts for score_std are equal, so it is 1" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------- learning


def test_sft_learns_a_fixed_answer(make_model, data, run_stage, tmp_path):
    """The same answer to every prompt: the loss falls from at least ln(300) = 5.7 nats to almost 0."""
    rows = [{"prompt": row["prompt"], "response": " thank you today"} for row in read_jsonl(data["prompts"])]
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    keys = {"model": {"path": str(make_model("llama"))}, "data": {"train": path, "test": path}}
    keys |= {"training": {"num_steps": 40, "minibatch_size": 8}, "optimizer": {"learning_rate": 1e-2}}
    run_stage("sft", tmp_path, **keys, evaluation={"temperature": 0.1, "max_new_tokens": 16})
    losses = [row["loss/sft"] for row in read_jsonl(tmp_path / "sft/metrics.jsonl") if "loss/sft" in row]
    assert losses[0] > 4
    assert losses[-1] < 0.2
    assert {row["response"] for row in read_jsonl(tmp_path / "sft/samples.jsonl")} == {" thank you today"}
    assert all(row["ended"] for row in read_jsonl(tmp_path / "sft/samples.jsonl"))


# ------------------------------------------------------------------------------- details


def test_a_scratch_model_has_no_dropout(tokenizer):
    """GPT-2's config has 0.1 by default: training would draw from generators without a seed."""
    config = ScratchModel(architecture="gpt2", config={"n_embd": 32, "n_layer": 2, "n_head": 2})
    model = new_model(config, tokenizer, 0).train()
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_sft_shows_one_answer_on_its_way_and_all_at_the_end(tmp_path, make_model, run_stage, monkeypatch):
    """Each with its prompt as the model reads it."""
    shown: list[tuple[str, str]] = []
    monkeypatch.setattr(Display, "exchange", lambda _, prompt, answers: shown.append((next(iter(answers)), prompt)))
    changes = {"data": {"prompt_template": "Ask: {prompt} Say:"}, "training": {"num_steps": 2}}
    evaluation = {"num_samples": 2, "every_steps": 1}
    run_stage("sft", tmp_path, model={"path": str(make_model("llama"))}, evaluation=evaluation, **changes)
    samples = read_jsonl(tmp_path / "sft/samples.jsonl")
    assert [row["step"] for row in samples] == [1, 1, 2, 2]
    assert shown == [(f"step {samples[i]['step']}", samples[i]["prompt"]) for i in (0, 2, 3)]
    assert all(row["prompt"].startswith("Ask: ") and row["prompt"].endswith(" Say:") for row in samples)


def test_prompts_without_room_for_a_response_are_skipped(tmp_path, make_model, run_stage):
    """Held-out prompts of any length; GPT-2 here has 64 positions and would fail beyond them."""
    path = make_model("gpt2")
    limit = AutoConfig.from_pretrained(path).max_position_embeddings
    longest = {"max_new_tokens": limit, "num_samples": 2, "every_steps": None}
    run_stage("sft", tmp_path, model={"path": str(path)}, evaluation=longest)
    samples = (tmp_path / "sft/samples.jsonl").read_text()
    assert samples == ""
    run_stage("rm", tmp_path, evaluation={"max_new_tokens": limit})
    assert (tmp_path / "rm/manifest.json").is_file()


def test_a_failing_gold_judge_fails_before_training(tmp_path, make_model, run_stage):
    judge = tmp_path / "judge.py"
    judge.write_text(
        "def ones(prompts, responses, rows):\n    return [1.0] * len(prompts)\n\n\n"
        "def judge(prompts, responses, rows):\n    raise KeyError('nothing')\n"
    )
    expected = r"evaluation\.gold \(.*judge\.py:judge\).*raised KeyError.*fits your data, or remove evaluation\.gold"
    rewards = [{"type": "function", "function": f"{judge}:ones"}]
    keys = {"policy": {"path": str(make_model("llama"))}, "rewards": rewards, "evaluation": {"gold": f"{judge}:judge"}}
    with pytest.raises(RunError, match=expected):
        run_stage("ppo", tmp_path / "run", **keys)
    assert not (tmp_path / "run/.ppo.partial/metrics.jsonl").exists()


def test_the_model_is_saved_before_the_final_evaluation(tmp_path, make_model, run_stage, monkeypatch):
    monkeypatch.setattr(sft_stage, "_evaluate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_stage("sft", tmp_path, model={"path": str(make_model("llama"))}, evaluation={"every_steps": None})
    assert (tmp_path / ".sft.partial/model/model.safetensors").is_file()


def test_a_reward_function_can_use_dataclasses_and_import_neighbours(tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 2.5\n")
    (tmp_path / "reward.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport neighbour_of_reward\n\n\n"
        "@dataclass\nclass Two:\n    value: float\n\n\n"
        "def f(prompts, responses, rows):\n    return [Two(neighbour_of_reward.VALUE).value for _ in prompts]\n"
    )
    assert load_function(f"{tmp_path}/reward.py:f")(["a"], ["b"], [{}]) == [2.5]


@pytest.mark.parametrize(
    ("changes", "step", "above"),
    [
        ({"warn_loss_above": 0.5, "optimizer": {"warmup_steps": 1}}, 3, "above 0.50 (warn_loss_above)"),
        ({}, 2, f"above {math.log(300):.2f}"),
    ],
)
def test_a_high_loss_is_reported_once_after_the_warm_up(changes, step, above, run_stage, make_model, tmp_path):
    """The limit is that of guessing if none is given. A tiny random model with large weights is worse than guessing."""
    run_stage("sft", tmp_path, model={"path": str(make_model("llama"))}, **changes)
    losses = [row["loss/sft"] for row in read_jsonl(tmp_path / "sft/metrics.jsonl") if "loss/sft" in row]
    assert losses[1] > math.log(300)
    worse = "" if losses[step - 1] < math.log(300) else ", worse than guessing all tokens with equal probability"
    found = [(row["step"], f) for row in read_jsonl(tmp_path / "sft/health.jsonl") for f in row["findings"]]
    messages = [(at, finding["message"]) for at, finding in found if finding["name"] == "high_loss"]
    assert messages == [(step, f"The loss is {losses[step - 1]:.2f}, {above}{worse}.")]


@pytest.mark.parametrize("stage", ["sft", "rm"])
def test_a_gradient_of_exactly_0_stops_the_stage(stage, run_stage, make_model, tmp_path, monkeypatch):
    real = Stepper.clip

    def lost(self, world):
        for p in self.model.parameters():
            p.grad = None if p.grad is None else torch.zeros_like(p)
        return real(self, world)

    monkeypatch.setattr(Stepper, "clip", lost)
    with pytest.raises(RunError, match=rf"{stage} step 1: no_gradient: {stage}/grad_norm is exactly 0 in step 1"):
        run_stage(stage, tmp_path, model={"path": str(make_model("llama"))})
    (row,) = read_jsonl(tmp_path / f".{stage}.partial/health.jsonl")
    assert [f["name"] for f in row["findings"]] == ["no_gradient"]


@pytest.mark.parametrize("stage", ["sft", "rm"])
def test_a_stage_that_memorises_its_rows_says_so_once(stage, run_stage, make_model, tmp_path, monkeypatch):
    losses = iter([1.0, 1.2, 1.3, 1.4])
    module, name = (sft_stage, "_evaluate") if stage == "sft" else (rm_stage, "_figures")
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: real(*args) | {"eval/loss": next(losses)})
    changes = {"training": {"num_steps": 12, "minibatch_size": 2}, "evaluation": {"every_steps": 3}}
    run_stage(stage, tmp_path, model={"path": str(make_model("llama"))}, optimizer={"learning_rate": 1e-2}, **changes)
    found = [f for row in read_jsonl(tmp_path / f"{stage}/health.jsonl") for f in row["findings"]]
    (finding,) = [finding for finding in found if finding["name"] == "memorises"]
    assert "20% above the 1 of step 3, and the training loss fell from" in finding["message"]
    assert "keep_best" in finding["advice"]
