"""Rollouts of a sampler whose log-probabilities differ from those of training, as in bfloat16."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
import torch

from rlhf_cli.config.models import ScratchModel
from rlhf_cli.health.history import GAP_TOLERANCE
from rlhf_cli.models.save import save
from rlhf_cli.models.scratch import new_model
from rlhf_cli.ppo.setup import Setup
from rlhf_cli.rollout import rollout as rollout_module
from support.compare import close
from support.gpu import MARKS
from support.oracles import check_update_batch, chosen, distributions, numbers, padded, plain_copy, slow_importance
from support.tiny import SETTINGS, read_jsonl


@pytest.fixture(scope="module")
def wide(tokenizer, tmp_path_factory):
    """The path of a model whose layers can be quantized."""
    config = {**SETTINGS["llama"], "hidden_size": 64, "intermediate_size": 128}
    folder = tmp_path_factory.mktemp("wide") / "model"
    save(new_model(ScratchModel(architecture="llama", config=config), tokenizer, seed=3), tokenizer, folder)
    return str(folder)


@pytest.fixture
def another_sampler(monkeypatch):
    """The sampler's log-probabilities are off by up to 1 nat, and training takes them as those of bfloat16.

    The passes of training stay in float32, so that a slow loop can tell what an advantage must be.
    """
    real, draws = rollout_module.sample, random.Random(0)

    def sample(*args, **options):
        return [
            replace(response, logprobs=[logprob + draws.uniform(-1, 1) for logprob in response.logprobs])
            for response in real(*args, **options)
        ]

    monkeypatch.setattr(rollout_module, "sample", sample)
    monkeypatch.setattr(Setup, "sampler_may_differ", True)


@pytest.mark.usefixtures("another_sampler")
@pytest.mark.parametrize("changes", [{}, {"value_model": {"init": "shared"}}, {"ppo": {"importance_ratio_cap": 1.1}}])
def test_advantages_are_weighted_where_the_sampler_differs_from_training(watch, changes):
    """``min(recomputed / sampled, cap)``, token by token. The ratio starts at 1, and the gap is a figure."""
    run = watch(**changes)
    check_update_batch(run)
    cap, capped = run.setup.config.ppo.importance_ratio_cap, 0
    for rollout, batch, row in zip(run.rollouts, run.batches, run.metrics, strict=True):
        assert not batch.advantages.requires_grad
        gaps = [
            trained - sampled
            for logprobs, response in zip(rollout.logprobs.tolist(), rollout.responses, strict=True)
            for trained, sampled in zip(logprobs, response.logprobs, strict=False)
        ]
        assert row["policy/first_ratio_error"] < 1e-5
        assert row["policy/sampler_gap"] == pytest.approx(max(map(abs, gaps)), abs=1e-5)
        assert row["policy/sampler_gap_mean"] == pytest.approx(statistics.fmean(map(abs, gaps)), abs=1e-5)
        assert row["policy/importance_capped"] == pytest.approx(sum(math.exp(x) > cap for x in gaps) / len(gaps))
        capped += row["policy/importance_capped"]
    assert capped > 0


@pytest.mark.usefixtures("another_sampler")
def test_an_older_rollout_of_another_sampler_has_one_weight(watch):
    """The ratio of the policy before the update to what the sampler computed, capped once."""
    run = watch(ppo={"num_iterations": 2, "num_rollouts_per_update": 2}, optimizer={"learning_rate": 1e-2})
    sampled, (then, now) = run.rollouts[0], run.models
    texts = (sampled.prompts, sampled.responses, run.setup.sampling)
    weights = []
    with torch.no_grad():
        for models in (then, now):
            logprobs = chosen(distributions(plain_copy(models.policy).double(), *texts))
            weights.append(padded(slow_importance(numbers(logprobs), sampled.responses, 2.0)))
    first, second = (batch.advantages[:8, : weights[0].shape[1]].double() for batch in run.batches)
    close(second * weights[0], first * weights[1], 1e-4)
    assert (weights[0] - weights[1]).abs().max() > 1e-2


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=MARKS)])
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_the_gap_of_bfloat16_is_below_its_limit(run_stage, wide, tmp_path, device, quantize):
    """Two iterations with adapters. The policy that sampled has the ratio 1."""
    if quantize is not None:
        pytest.importorskip("bitsandbytes", reason="NF4 needs bitsandbytes (extra qlora)")
    lora = {"r": 4, "quantize": quantize}
    stage = run_stage(
        "ppo",
        tmp_path,
        policy={"path": wide, "lora": lora},
        value_model={"lora": lora},
        rewards=[{"type": "length", "target": 5}],
        precision="bfloat16",
        device=device,
    )
    rows = [row for row in read_jsonl(stage / "metrics.jsonl") if "policy/sampler_gap_mean" in row]
    assert len(rows) == 2
    for row in rows:
        assert 0 < row["policy/sampler_gap_mean"] < GAP_TOLERANCE["bfloat16"]
        assert row["policy/first_ratio_error"] < 1e-2


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_the_precision_says_whether_the_sampler_differs(watch, precision):
    """In bfloat16 the decoder rounds otherwise than training's forward pass. In float32 nothing is weighted."""
    run = watch(precision=precision, ppo={"num_iterations": 1})
    row, is_bfloat16 = run.metrics[0], precision == "bfloat16"
    assert run.setup.sampler_may_differ == is_bfloat16
    findings = [one["name"] for line in read_jsonl(run.stage_dir / "health.jsonl") for one in line["findings"]]
    assert "sampler_gap" not in findings, "the tolerance is that of the precision"
    if is_bfloat16:
        assert {"policy/sampler_gap", "policy/importance_capped"} <= row.keys()
        assert 1e-4 < row["policy/sampler_gap_mean"] < 0.05
        assert row["policy/first_ratio_error"] == 0.0
    else:
        assert not any("sampler" in key or "importance" in key for key in row)
