"""examples/micro_rlhf.py computes what the stages compute: the same losses, advantages and weights after each step.

Both sides get the same weights, rows and random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from rlhf_cli.config.by_stage import load_stage_config
from rlhf_cli.data.batches import stream
from rlhf_cli.ppo.update import UpdateBatch, minibatches
from rlhf_cli.rollout.sampling import draw_uniforms
from stages import ppo, rm, sft
from support.paths import ROOT
from support.source import module_at
from support.tiny import character_tokenizer, read_jsonl, write_jsonl

RATE = 1e-3
LENGTH = 28
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
NAMES = {
    "embed.": "model.embed_tokens.", "layers.": "model.layers.", "norm_1.": "input_layernorm.",
    "norm_2.": "post_attention_layernorm.", "norm.": "model.norm.",
    **{f".{x}.": f".self_attn.{x}_proj." for x in "qkvo"},
    **{f".{x}.": f".mlp.{x}_proj." for x in ("gate", "up", "down")},
}  # fmt: skip


micro: Any = module_at(ROOT / "examples" / "micro_rlhf.py")


def new_micro(num_outputs: int, seed: int) -> Any:
    torch.manual_seed(seed)
    model = micro.Llama(num_outputs)
    for weight in model.parameters():  # as far from uniform as a trained model
        weight.data *= 4 if weight.dim() == 2 else 1
    return model


def of_transformers(weights: dict[str, Tensor], head: str) -> dict[str, Tensor]:
    """The weights under the names of transformers' Llama."""
    named = {}
    for name, weight in weights.items():
        if name.startswith("head."):
            named[f"{head}.weight"] = weight
            continue
        for ours, theirs in NAMES.items():
            if name.startswith(ours) or (ours.startswith((".", "norm_")) and ours in name):
                name = name.replace(ours, theirs, 1)
        named[name] = weight
    return named


def save(model: Any, folder: Path, **facts: float) -> Path:
    """Save a model of the example as transformers does, with its tokenizer."""
    num_outputs = model.head.out_features
    config = LlamaConfig(
        vocab_size=micro.V, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, rms_norm_eps=1e-6, tie_word_embeddings=False, bos_token_id=None, eos_token_id=0,
        pad_token_id=0, num_labels=num_outputs, **facts,
    )  # fmt: skip
    is_scalar = num_outputs == 1
    theirs: PreTrainedModel = (LlamaForSequenceClassification if is_scalar else LlamaForCausalLM)(config)
    theirs.load_state_dict(of_transformers(model.state_dict(), "score" if is_scalar else "lm_head"))
    theirs.save_pretrained(folder)
    character_tokenizer(["<eos>", *micro.CHARS[1:]]).save_pretrained(folder)
    return folder


def data_of(path: Path, rows: list[Any], *keys: str) -> dict[str, Any]:
    """The section `data` of a stage that trains on all these rows."""
    write_jsonl(path, [dict(zip(keys, row, strict=True)) for row in rows])
    return {"train": str(path), "test_fraction": 0}


def run(stage: Any, name: str, folder: Path, **sections: Any) -> tuple[list[dict[str, Any]], Any]:
    """Run a stage; return its rows of metrics and its config."""
    config = {
        "artifacts": str(folder / "run"),
        "seed": 3,
        "device": "cpu",
        "optimizer": {"learning_rate": RATE, "schedule": "constant", "eps": 1e-5},
        **sections,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    loaded = load_stage_config(name, path)
    stage.run(loaded, quiet=True)
    return read_jsonl(folder / "run" / name / "metrics.jsonl"), loaded


def same_weights(model: Any, folder: Path, head: str) -> None:
    """The stage's model may have one embedding more, of a padding token."""
    theirs, ours = load_file(folder / "model.safetensors"), of_transformers(model.state_dict(), head)
    assert theirs.keys() == ours.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight[: len(ours[name])], **CLOSE)


def batches(rows: list[Any], purpose: str, steps: int, size: int) -> Iterator[list[Any]]:
    """The rows of each step, in the order of the stage."""
    for step in range(steps):
        yield [rows[i] for i in stream(len(rows), size, step, 3, purpose)]


def test_ten_steps_of_sft_are_those_of_the_stage(tmp_path: Path) -> None:
    rng, model = random.Random(0), new_micro(micro.V, seed=1)
    rows = [(micro.new_prompt(rng), micro.new_response(rng)) for _ in range(48)]
    metrics, _ = run(
        sft, "sft", tmp_path,
        model={"path": str(save(model, tmp_path / "model"))},
        data=data_of(tmp_path / "rows.jsonl", rows, "prompt", "response"),
        training={"num_steps": 10, "minibatch_size": 16},
    )  # fmt: skip
    losses = list(micro.sft(model, batches(rows, "sft order", 10, 16), RATE))
    torch.testing.assert_close(losses, [row["loss/sft"] for row in metrics[:10]], **CLOSE)
    assert losses[-1] < losses[0] - 0.5
    same_weights(model, tmp_path / "run/sft/model", "lm_head")


def test_ten_steps_of_the_reward_model_are_those_of_the_stage(tmp_path: Path) -> None:
    rng, model = random.Random(0), new_micro(1, seed=2)
    rows = [(micro.new_prompt(rng), micro.new_response(rng), micro.new_response(rng)) for _ in range(48)]
    metrics, _ = run(
        rm, "rm", tmp_path,
        model={"path": str(save(model, tmp_path / "model"))},
        data=data_of(tmp_path / "rows.jsonl", rows, "prompt", "chosen", "rejected"),
        training={"num_steps": 10, "minibatch_size": 16},
    )  # fmt: skip
    losses = list(micro.reward_model(model, batches(rows, "rm order", 10, 16), RATE))
    torch.testing.assert_close(losses, [row["loss/rm"] for row in metrics[:10]], **CLOSE)
    assert losses[-1] < losses[0]
    same_weights(model, tmp_path / "run/rm/model", "score")


def test_ten_steps_of_ppo_are_those_of_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five iterations of two minibatches. The stage's advantages are those that its update reads."""
    policy, scorer = new_micro(micro.V, seed=1), new_micro(1, seed=2)
    # A policy that knows the task ends some responses.
    rng = random.Random(0)
    rows = ([(micro.new_prompt(rng), micro.new_response(rng)) for _ in range(16)] for _ in range(60))
    assert list(micro.sft(policy, rows, 3e-3))[-1] < 1
    prompts = [micro.new_prompt(rng) for _ in range(40)]
    seen: list[UpdateBatch] = []

    def note(*tensors: Any) -> UpdateBatch:
        seen.append(UpdateBatch(*tensors))
        return seen[-1]

    monkeypatch.setattr("stages.ppo.UpdateBatch", note)
    facts = {"score_mean": 0.3, "score_std": 0.7}
    metrics, config = run(
        ppo, "ppo", tmp_path,
        policy={"path": str(save(policy, tmp_path / "policy"))},
        rewards=[{"type": "reward_model", "path": str(save(scorer, tmp_path / "scorer", **facts))}],
        value_model={"init": "reward_model"},
        data=data_of(tmp_path / "prompts.jsonl", [[prompt] for prompt in prompts], "prompt"),
        rollout={"max_new_tokens": LENGTH},
        ppo={"num_iterations": 5, "rollout_batch_size": 16, "minibatch_size": 8, "kl_coef": 0.2, "vf_coef": 1.0},
    )  # fmt: skip

    def draws() -> Iterator[Any]:
        for iteration in range(5):
            chosen = stream(len(prompts), 16, iteration, 3, "ppo prompts")
            uniforms = draw_uniforms(3, "ppo rollout", iteration, 16, LENGTH)
            yield [prompts[i] for i in chosen], uniforms, minibatches(16, iteration, config)

    value_model = new_micro(1, seed=2)
    torch.nn.init.zeros_(value_model.head.weight)
    figures = list(micro.ppo(policy, value_model, scorer, draws(), RATE, kl_coef=0.2, **facts))
    ended = [response[-1] == micro.EOS for row in figures for response in row["responses"]]
    assert 0.2 < sum(ended) / len(ended) < 1
    for mine, row, batch in zip(figures, metrics[:5], seen, strict=True):
        assert mine["responses"] == [list(response.ids) for response in batch.responses]
        torch.testing.assert_close(mine["advantages"], batch.advantages[batch.response_mask], rtol=1e-4, atol=1e-4)
        for name, key in {"policy_loss": "loss/policy", "value_loss": "loss/value", "kl": "objective/kl"}.items():
            assert mine[name] == pytest.approx(row[key], rel=1e-5, abs=1e-5), name
    same_weights(policy, tmp_path / "run/ppo/model", "lm_head")
    same_weights(value_model, tmp_path / "run/ppo/value_model", "score")


def test_the_tricks_of_the_example_do_what_they_say() -> None:
    assert micro.kindness(" is kind, warm and cold.") == 2
    assert micro.kindness(" is kind, kind kind kin.") == 0, "no sentence of the language"
    assert micro.decode([*micro.encode("the cat is warm."), micro.EOS]) == "the cat is warm."
    torch.manual_seed(0)
    model, ids = micro.Llama(micro.V), micro.padded([micro.encode("the cat"), micro.encode("the owl is")])
    torch.testing.assert_close(model(ids)[0, :7], model(ids[:1, :7])[0])  # padding changes nothing
