"""Reward model scores, for every architecture: they are read at the last token, alone or in a batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.data.records import Record
from rlhf_cli.models.forward import autocast, hidden_at
from rlhf_cli.models.load import load_reward_model, prepare
from rlhf_cli.packing import pack
from rlhf_cli.rewards.models import sequence_scores
from rlhf_cli.rollout.rollout import response_values
from rlhf_cli.rollout.sampling import Response
from support.compare import close
from support.tiny import CPU, EOS_OF, random_ids


@pytest.fixture(scope="module")
def reward_model(arch, pipeline):
    model = load_reward_model(str(pipeline(arch) / "rm/model"))
    assert prepare(model, CPU) is None
    return model


@pytest.fixture(scope="module")
def scored_ids(arch):
    return [[*ids, EOS_OF.get(arch, 2)] for ids in random_ids(11, 1, 30, 5, 17, seed=2)]


def test_transformers_computes_the_same_scores(arch, pipeline, reward_model, scored_ids):
    """[5, 8, 10] Any library that loads the artifact computes the same score, with padding on the right."""
    path = pipeline(arch) / "rm/model"
    theirs = AutoModelForSequenceClassification.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.pad_token_id is not None
    assert tokenizer.pad_token_id != tokenizer.eos_token_id == EOS_OF.get(arch, 2)
    assert theirs.config.pad_token_id == tokenizer.pad_token_id
    assert theirs.config.num_labels == 1
    batch = tokenizer.pad({"input_ids": scored_ids}, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        wanted = theirs(**batch).logits
        found = sequence_scores(reward_model, scored_ids)
    close(found, wanted)
    assert wanted.std() > 0.01, "otherwise any two scores would be close"


def test_the_head_runs_in_float32_under_bfloat16(reward_model, scored_ids):
    """[40] Scores and values have more digits than bfloat16, and equal those of the head on the hidden states."""
    batch = pack(scored_ids)
    with torch.no_grad(), autocast(CPU, "bfloat16"):
        scores = sequence_scores(reward_model, scored_ids)
        hidden = hidden_at(reward_model, batch, batch.last)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, linear(hidden.float(), reward_model.score.weight))
    assert not torch.equal(scores, scores.bfloat16().float())
    prompts = [PromptRow("", ids[:1], Record("", "")) for ids in scored_ids]
    answers = [Response(ids[1:], [0.0] * len(ids[1:]), True) for ids in scored_ids]
    with torch.no_grad():
        values = response_values(reward_model, prompts, answers, "bfloat16")
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())
