"""Scalar heads: scores are read at the last token, also where transformers has no classifier (CodeGen, Mamba)."""

import pytest
import torch
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli.config.models import ScratchModel
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.data.records import Record
from rlhf_cli.models.forward import autocast, hidden_at
from rlhf_cli.models.heads import reads_last_token
from rlhf_cli.models.load import load_reward_model, load_value_model, new_reward_model, new_value_model, prepare
from rlhf_cli.models.save import save
from rlhf_cli.models.scratch import new_model
from rlhf_cli.packing import pack
from rlhf_cli.rewards.models import score_sequences, sequence_scores
from rlhf_cli.rollout.rollout import response_values
from rlhf_cli.rollout.sampling import Response
from support.compare import close
from support.tiny import CPU, EOS_OF, SETTINGS, random_ids


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


@pytest.fixture(scope="module", params=["codegen", "mamba"])
def family(request, tokenizer, tmp_path_factory):
    model = new_model(ScratchModel(architecture=request.param, config=SETTINGS[request.param]), tokenizer, seed=3)
    path = tmp_path_factory.mktemp(request.param) / "model"
    save(model, tokenizer, path)
    return path


def test_a_head_is_trained_saved_and_loaded_again(family, tokenizer, tmp_path):
    model, new = new_reward_model(str(family), None, seed=0, head_std=0.5)
    assert new == ["score.weight"]
    assert reads_last_token(model)
    backbone = AutoModelForCausalLM.from_pretrained(family).base_model.state_dict()
    assert all(torch.equal(backbone[name], p) for name, p in model.base_model.state_dict().items())
    model.config.pad_token_id = tokenizer.pad_token_id
    prepare(model, CPU)
    sequences = random_ids(9, 1, 14, seed=2)
    with torch.no_grad():
        scores = sequence_scores(model, sequences)
        alone = [model.score(model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]) for ids in sequences]
    close(scores, torch.stack(alone))
    sequence_scores(model, sequences).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    save(model, tokenizer, tmp_path)
    again = load_reward_model(str(tmp_path))
    prepare(again, CPU)
    close(score_sequences(again, sequences, "float32"), scores[:, 0])
    kept, new = new_reward_model(str(tmp_path), None, seed=9, head_std=None)
    assert new == []
    assert torch.equal(kept.score.weight, model.score.weight)
    assert load_value_model(str(tmp_path)).config.num_labels == 1
    assert new_value_model(str(family), None).score.weight.abs().max() == 0
