"""What must hold for every architecture: the fast paths against plain forwards, and cuts that change nothing.

Numbers in brackets are rows of the list of bugs found in other implementations (docs of the project): each has
been put in here once, and a test below failed.
"""

from __future__ import annotations

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import ARCHITECTURES, read_jsonl, write_jsonl
from torch.nn.functional import cross_entropy, linear, logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli.algorithms.advantages import gae, token_rewards
from rlhf_cli.algorithms.statistics import wilson_interval
from rlhf_cli.config.data import DataSource
from rlhf_cli.config.loader import load_config
from rlhf_cli.config.models import TokenizerTraining
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.rewards import ModelReward
from rlhf_cli.config.sft_rm import RMConfig
from rlhf_cli.config.stage import Optimizer
from rlhf_cli.data.batches import Budget, stream
from rlhf_cli.data.encode import encode_demonstrations, encode_pairs, encode_prompts
from rlhf_cli.data.formats import read_record, recognise
from rlhf_cli.data.records import Demonstration, Message, Prompt, Ranking, Scored, scored
from rlhf_cli.data.sources import Row
from rlhf_cli.decoders.cpu import FastDecoder
from rlhf_cli.decoders.plain import PlainDecoder
from rlhf_cli.errors import ArtifactError
from rlhf_cli.models.cost import Work
from rlhf_cli.models.forward import autocast, hidden_at, is_packed, logits_at
from rlhf_cli.models.load import (
    load_policy,
    load_reward_model,
    load_tokenizer,
    new_reward_model,
    new_value_model,
    prepare,
    set_dropout_off,
)
from rlhf_cli.models.scratch import train_tokenizer
from rlhf_cli.packing import PackedBatch, Segment, pack
from rlhf_cli.ppo.batch import UpdateBatch
from rlhf_cli.ppo.setup import Learner
from rlhf_cli.rewards.base import Samples
from rlhf_cli.rewards.models import score_sequences, sequence_scores
from rlhf_cli.rewards.score import ScoreScale
from rlhf_cli.rewards.sources import load_rewards, total_score
from rlhf_cli.rollout.distribution import Response, Sampling
from rlhf_cli.rollout.rollout import collect
from rlhf_cli.rollout.sampling import draw, draw_uniforms, sample
from rlhf_cli.rollout.scoring import Models, PromptRow, response_values, score_tokens
from rlhf_cli.training.distributed import World
from rlhf_cli.training.optimizer import build_stepper
from rlhf_cli.training.speed import Speed
from stages import ppo as ppo_stage
from stages import rm as rm_stage
from stages import sft as sft_stage

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
LARGE = 10**6
BUDGETS = (
    *(Budget(LARGE, rows) for rows in (1, 2, 4, None)),
    Budget(1),
    Budget(40),
    Budget(70, 3),
    Budget(70, padded=True),
)
VOCAB = 256  # every fixture model has more
EOS_OF = {"gpt2": 0}  # 2 elsewhere


def random_ids(*lengths, seed=0):
    """Sequences of ids 3..VOCAB-1: no special token among them."""
    draw_from = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=draw_from).tolist() for n in lengths]


LENGTHS = (7, 1, 23, 4, 12)


def close(found, wanted, tolerance=1e-5):
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def grads(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_gradients(found, wanted, tolerance):
    """Every weight's gradient, to `tolerance` of the largest entry of all."""
    assert found.keys() == wanted.keys()
    assert found
    size = max(g.abs().max() for g in wanted.values())
    assert size > 0
    gap = max((found[name] - wanted[name]).abs().max() for name in wanted)
    assert gap <= tolerance * size, f"relative difference {gap / size:.1e}"


@pytest.fixture(scope="module", params=ARCHITECTURES)
def arch(request):
    return request.param


@pytest.fixture(scope="module")
def plain(arch, make_model):
    """As transformers loads it, one forward a sequence: what everything is compared to."""
    return load_policy(str(make_model(arch)))


@pytest.fixture(scope="module")
def policy(arch, make_model):
    model = load_policy(str(make_model(arch)))
    assert prepare(model, CPU) is None, "this architecture runs on packed rows"
    return model


def double(model):
    model = copy.deepcopy(model).double()
    model.zero_grad()
    return model


# ------------------------------------------------------------------------------------- packed forwards


def check_forwards(model, plain):
    sequences = random_ids(*LENGTHS)
    batch = pack(sequences)
    weights = torch.randn(len(batch.ids), 1, generator=torch.Generator().manual_seed(1))
    everywhere = torch.arange(len(batch.ids))
    some = torch.tensor([0, 6, 7, 20, 34, 46])
    wanted_logits = torch.cat([plain(input_ids=torch.tensor([s])).logits[0] for s in sequences])
    wanted_hidden = torch.cat([plain.base_model(input_ids=torch.tensor([s])).last_hidden_state[0] for s in sequences])
    close(logits_at(model, batch, everywhere), wanted_logits)
    close(hidden_at(model, batch, everywhere), wanted_hidden)
    close(logits_at(model, batch, some), wanted_logits[some])
    close(hidden_at(model, batch, some), wanted_hidden[some])

    for one in (model, plain):
        one.zero_grad()
    (logits_at(model, batch, everywhere).log_softmax(-1)[:, :9] * weights).sum().backward()
    (wanted_logits.log_softmax(-1)[:, :9] * weights).sum().backward()
    same_gradients(grads(model), grads(plain), 1e-5)
    for one in (model, plain):
        one.zero_grad()


def test_packed_forward_is_a_plain_forward_of_each_sequence(policy, plain):
    assert is_packed(policy)
    assert not is_packed(plain)
    check_forwards(policy, plain)


@pytest.mark.parametrize("name", ["bloom", "gemma2"])
def test_a_model_that_cannot_pack_runs_padded(make_model, table, name):
    """Bloom's attention is its own; Gemma 2's has a softcap that SDPA has not."""
    path = str(make_model(name))
    model, plain = load_policy(path), load_policy(path)
    plain.set_attn_implementation("eager")
    prepare(model, CPU)
    assert not is_packed(model)
    check_forwards(model, plain)
    check_sampled_logprobs(model, plain, table, 1.0)


@pytest.mark.parametrize("name", ["bloom", "gemma2"])
def test_a_model_that_cannot_pack_says_so(make_model, name):
    note = prepare(load_policy(str(make_model(name))), CPU)
    assert note is not None
    assert "ForCausalLM" in note
    assert "padded" in note


def test_a_model_that_ignores_sequence_ends_is_found_out(make_model, monkeypatch):
    """One whose packed row attends across sequences must not be let through."""
    from rlhf_cli.kernels import attention

    model = load_policy(str(make_model("llama")))
    real = attention.packed_attention

    def leaky(*args, packed=None, **kwargs):
        whole = packed and PackedBatch(packed.ids, packed.position_ids, [Segment(0, len(packed.ids))])
        return real(*args, packed=whole, **kwargs)

    for name in (attention.EACH, attention.EACH_UNSHARED):
        monkeypatch.setitem(attention.AttentionInterface._global_mapping, name, leaky)
    assert "differ" in prepare(model, CPU)
    assert not is_packed(model)


@pytest.mark.parametrize("name", [*ARCHITECTURES, "bloom", "opt"])
def test_dropout_is_off_in_train_mode(make_model, name):
    """[14] Families keep their dropout in modules, in floats and in names of their own."""
    model = load_policy(str(make_model(name)))
    ids = torch.tensor(random_ids(12))
    with torch.no_grad():
        evaluated = model.eval()(input_ids=ids).logits
        trained = model.train()(input_ids=ids).logits
    assert torch.equal(evaluated, trained)


# -------------------------------------------------------------------------------------------- sampling

PROMPTS = random_ids(1, 5, 12, 5, 2, 9, 3, 7, seed=5)
STOP = frozenset(range(10, 60))  # about one token in six ends a response
LONGEST = 14


@pytest.fixture(scope="module")
def table():
    return draw_uniforms(0, "test", 0, len(PROMPTS), LONGEST)


@pytest.fixture(scope="module")
def responses(policy, table):
    return sample(policy, PROMPTS, table, Sampling(stop=STOP))


def ids_of(responses):
    return [r.ids for r in responses]


def test_the_fixture_has_what_it_needs(responses):
    lengths = {len(r.ids) for r in responses}
    assert len(lengths) > 3
    assert any(r.ended for r in responses)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_are_those_of_a_plain_forward(policy, plain, table, temperature):
    """[7, 12, 13] Left padding, the cache and compaction against one forward of the whole sequence."""
    check_sampled_logprobs(policy, plain, table, temperature)


def check_sampled_logprobs(policy, plain, table, temperature):
    for prompt, response in zip(PROMPTS, sample(policy, PROMPTS, table, Sampling(temperature, stop=STOP)), strict=True):
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([prompt + response.ids])).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / temperature).log_softmax(-1)
        wanted = logprobs.gather(1, torch.tensor(response.ids)[:, None])[:, 0]
        close(torch.tensor(response.logprobs), wanted)


def test_a_response_does_not_depend_on_how_the_batch_was_cut(policy, table, responses):
    for size in (1, 3, 4):
        parts = [
            response
            for at in range(0, len(PROMPTS), size)
            for response in sample(policy, PROMPTS[at : at + size], table[at : at + size], Sampling(stop=STOP))
        ]
        assert ids_of(parts) == ids_of(responses)
        assert [r.ended for r in parts] == [r.ended for r in responses]
        for part, whole in zip(parts, responses, strict=True):
            close(torch.tensor(part.logprobs), torch.tensor(whole.logprobs))


def test_other_prompts_beside_change_nothing(policy, table, responses):
    """A prompt of 60 tokens pads all others by as many."""
    strangers = random_ids(60, 1, 30, seed=9)
    longer = torch.cat([draw_uniforms(7, "strangers", 0, 3, LONGEST), table])
    beside = sample(policy, strangers + PROMPTS, longer, Sampling(stop=STOP))
    assert ids_of(beside[3:]) == ids_of(responses)


def test_responses_end_with_the_first_stop_token(policy, table, responses):
    """The same draws without any stop token, cut by hand."""
    free = sample(policy, PROMPTS, table, Sampling())
    assert all(len(r.ids) == LONGEST and not r.ended for r in free)
    for prompt_free, response in zip(free, responses, strict=True):
        ends = [i for i, token in enumerate(prompt_free.ids) if token in STOP]
        assert response.ended == bool(ends)
        assert response.ids == (prompt_free.ids[: ends[0] + 1] if ends else prompt_free.ids)
        assert len(response.logprobs) == len(response.ids)


def test_each_of_several_stop_tokens_ends(policy, table):
    free = ids_of(sample(policy, PROMPTS, table, Sampling()))
    first, second = free[0][3], free[2][5]
    one = sample(policy, PROMPTS, table, Sampling(stop=frozenset({first})))
    both = sample(policy, PROMPTS, table, Sampling(stop=frozenset({first, second})))
    assert one[0].ids[-1] == first
    assert one[2].ids != both[2].ids
    assert both[2].ids[-1] == second
    assert both[2].ended
    assert both[0] == one[0]


def test_a_stop_token_in_the_prompt_is_no_stop(policy, table):
    """[36]"""
    stop = frozenset(range(VOCAB, 300))
    prompts = [[min(stop), *prompt, max(stop)] for prompt in PROMPTS]
    free = sample(policy, prompts, table, Sampling())
    stopped = sample(policy, prompts, table, Sampling(stop=stop))
    for a, b in zip(free, stopped, strict=True):
        ends = [i for i, token in enumerate(a.ids) if token in stop]
        assert b.ids == (a.ids[: ends[0] + 1] if ends else a.ids)
    assert max(len(r.ids) for r in stopped) > 1


def test_max_length(policy, table):
    one = sample(policy, PROMPTS, table[:, :1], Sampling(stop=STOP))
    assert [len(r.ids) for r in one] == [1] * len(PROMPTS)
    assert [r.ended for r in one] == [r.ids[-1] in STOP for r in one]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_when_finished_rows_leave_changes_nothing(policy, table, responses, monkeypatch, share):
    for tier in (FastDecoder, PlainDecoder):
        monkeypatch.setattr(tier, "leaves_below", share)
    moved = sample(policy, PROMPTS, table, Sampling(stop=STOP))
    assert ids_of(moved) == ids_of(responses)
    for a, b in zip(moved, responses, strict=True):
        close(torch.tensor(a.logprobs), torch.tensor(b.logprobs))


def test_iterations_differ_and_equal_uniforms_do_not(policy):
    """[15, 27]"""
    prompts = [PROMPTS[2]] * 4
    first, second = (draw_uniforms(0, "ppo rollout", i, 4, LONGEST) for i in (0, 1))
    a, b = (ids_of(sample(policy, prompts, t, Sampling())) for t in (first, second))
    assert len({tuple(ids) for ids in a}) == 4, "four rows of uniforms, four responses"
    assert all(x != y for x, y in zip(a, b, strict=True))
    assert torch.equal(first, draw_uniforms(0, "ppo rollout", 0, 4, LONGEST))
    same = first[:1].expand(4, -1).contiguous()
    assert len({tuple(ids) for ids in ids_of(sample(policy, prompts, same, Sampling()))}) == 1


# The draw itself: no model in it.


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_draws_follow_the_softmax(temperature):
    logits = torch.tensor([0.3, -1.0, 2.0, -math.inf, 0.0, 1.1, -2.5])
    n = 200_000
    u = torch.rand(n, generator=torch.Generator().manual_seed(3))
    ids, logprobs = draw(logits.expand(n, -1), u, temperature)
    p = (logits.double() / temperature).softmax(0)
    counts = torch.bincount(ids, minlength=len(logits)).double()
    assert counts[3] == 0
    possible = p > 0
    chi_square = ((counts - n * p)[possible].square() / (n * p[possible])).sum()
    assert chi_square < 22.5, "5 degrees of freedom: once in 2,000 times by chance, and the seed is fixed"
    close(logprobs, p.log()[ids].float())


def test_impossible_tokens_are_never_drawn():
    """At both ends of the row, for the smallest and the largest u that torch.rand can give."""
    last = 1 - 2.0**-24
    inside = torch.tensor([-math.inf, -math.inf, 0.2, -math.inf, 1.0, -3.0, -math.inf, -math.inf])
    u = torch.cat([torch.tensor([0.0, last, 2.0**-24]), torch.rand(5000)])
    ids, logprobs = draw(inside.expand(len(u), -1), u, 1.0)
    assert set(ids.tolist()) <= {2, 4, 5}
    assert ids[0] == 2
    assert ids[1] == 5
    assert logprobs.isfinite().all()
    for vocabulary in (7, 1000, 50_000):
        wide = torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
        wide[:, -3:] = -math.inf
        ids, logprobs = draw(wide, torch.full((64,), last), 1.0)
        assert ids.max() < vocabulary - 3
        assert logprobs.isfinite().all()


# ----------------------------------------------------------------------------------------- before a step


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(
        "def length(prompts, responses, rows):\n    return [len(r) % 7 - 3.0 for r in responses]\n"
        "def letters(prompts, responses, rows):\n    return [float(r.count('e')) for r in responses]\n",
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_before_the_first_step_ratio_is_one_and_kl_zero(
    arch, make_model, run_stage, reward_file, tmp_path, temperature
):
    """[13, 14, 17] GPT-2 and GPT-NeoX have dropout in their configs."""

    def rows_of(name, **ppo):
        run_stage(
            "ppo",
            tmp_path / name,
            policy={"path": str(make_model(arch))},
            rewards=[{"type": "function", "function": f"{reward_file}:length"}],
            rollout={"temperature": temperature},
            data={"test": None, "test_fraction": 0},
            ppo={"num_iterations": 2, "rollout_batch_size": 8, "kl_coef": 0.3, "old_logprobs": "recomputed", **ppo},
        )
        return read_jsonl(tmp_path / name / "ppo/metrics.jsonl")

    whole, later = rows_of("whole", minibatch_size=8, ppo_epochs=1)
    assert later["policy/first_ratio"] == 1.0
    assert later["objective/kl"] != 0.0, "the policy has left ref_policy"
    assert whole["policy/first_ratio"] == 1.0
    assert whole["policy/ratio"] == 1.0
    assert whole["policy/approx_kl"] == 0.0
    assert whole["objective/kl"] == 0.0
    assert whole["policy/sampler_gap"] < 1e-5
    parts, _ = rows_of("parts", minibatch_size=4, microbatch_size=3, ppo_epochs=2)
    assert parts["policy/first_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert parts["policy/ratio"] != 1.0, "the later steps do move"
    assert parts["objective/kl"] == 0.0


# ------------------------------------------------------------------------------------------ reward model


@pytest.fixture(scope="module")
def reward_model(arch, pipeline):
    model = load_reward_model(str(pipeline(arch) / "rm/model"))
    assert prepare(model, CPU) is None
    return model


@pytest.fixture(scope="module")
def scored_ids(arch):
    return [[*ids, EOS_OF.get(arch, 2)] for ids in random_ids(11, 1, 30, 5, 17, seed=2)]


def test_a_score_is_the_same_alone_and_in_a_batch(reward_model, scored_ids):
    """[8]"""
    with torch.no_grad():
        batch = sequence_scores(reward_model, scored_ids)
        alone = torch.cat([sequence_scores(reward_model, [ids]) for ids in scored_ids])
    close(batch, alone)
    assert batch.std() > 0.01, "else any two scores would be close"
    for budget in BUDGETS:
        close(score_sequences(reward_model, scored_ids, "float32", budget), batch[:, 0])


def test_transformers_gives_the_same_scores(arch, pipeline, reward_model, scored_ids):
    """[5, 8, 10] What the artifact promises: any library reads the same score from it, padded on the right."""
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


def test_a_score_is_read_at_eos(reward_model, scored_ids):
    """[10]"""
    with torch.no_grad():
        before = sequence_scores(reward_model, scored_ids)
        for row, ids in enumerate(scored_ids):
            hidden = reward_model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
            at_every_token = linear(hidden, reward_model.score.weight)[:, 0]
            close(before[row, 0], at_every_token[-1])
            assert (at_every_token[:-1] - at_every_token[-1]).abs().min() > 1e-4
        changed = [random_ids(len(ids), seed=8)[0] for ids in scored_ids]
        changed[2] = scored_ids[2]
        after = sequence_scores(reward_model, changed)
    close(after[2], before[2])
    assert (after - before).abs()[[0, 1, 3, 4]].min() > 1e-4


def test_ppo_refuses_a_reward_model_without_a_head(arch, make_model, run_stage, tmp_path):
    """[32]"""
    rewards = [{"type": "reward_model", "path": str(make_model(arch))}]
    with pytest.raises(ArtifactError, match=r"score\.weight"):
        run_stage("ppo", tmp_path, policy={"path": str(make_model(arch))}, rewards=rewards)
    assert not (tmp_path / "ppo").exists()


def test_the_head_runs_in_float32_under_bfloat16(reward_model, scored_ids):
    """[40] Scores and values are more than bfloat16 can hold, and are the head's own on the hidden states."""
    batch = pack(scored_ids)
    with torch.no_grad(), autocast(CPU, "bfloat16"):
        scores = sequence_scores(reward_model, scored_ids)
        hidden = hidden_at(reward_model, batch, batch.last)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, linear(hidden.float(), reward_model.score.weight))
    assert not torch.equal(scores, scores.bfloat16().float())
    value_model = copy.deepcopy(reward_model)
    prompts = [PromptRow("", ids[:1], Prompt("", "")) for ids in scored_ids]
    answers = [Response(ids[1:], [0.0] * len(ids[1:]), True) for ids in scored_ids]
    with torch.no_grad():
        values = response_values(value_model, prompts, answers, "bfloat16")
        assert not torch.equal(values, response_values(value_model, prompts, answers, "float32"))
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())


# ---------------------------------------------------------------------------- gradients, however cut


def config_of(write_config, stage, schema, root, **changes):
    return load_config(write_config(stage, root, **changes), schema)


@pytest.fixture(scope="module")
def examples(arch, make_model, data):
    """Eight demonstrations of unequal length."""
    tokenizer = load_tokenizer(str(make_model(arch)))
    rows = [Demonstration(r["prompt"], r["response"], "row") for r in read_jsonl(data["demonstrations"])[:8]]
    found = encode_demonstrations(tokenizer, rows, None, learn_all=False)
    assert len({sum(e.learnt) for e in found}) > 3
    return found


def test_sft_gradient_is_the_token_mean_however_the_batch_is_cut(policy, plain, examples):
    """[23] To 1e-6 in float64, against a slow loop of plain forwards."""
    wanted_model, model = double(plain), double(policy)
    total = sum(
        cross_entropy(
            wanted_model(input_ids=torch.tensor([e.ids])).logits[0, :-1][torch.tensor(e.learnt[1:])],
            torch.tensor(e.ids[1:])[torch.tensor(e.learnt[1:])],
            reduction="sum",
        )
        for e in examples
    )
    loss = total / sum(sum(e.learnt) for e in examples)
    loss.backward()
    for budget in BUDGETS:
        model.zero_grad()
        found = sft_stage._accumulate(model, examples, budget, "float32", ALONE)
        assert found == pytest.approx(loss.item(), rel=1e-9)
        same_gradients(grads(model), grads(wanted_model), 1e-6)


@pytest.fixture(scope="module")
def rankings(arch, make_model, data):
    """Pairs, and two rankings of three and four answers."""
    tokenizer = load_tokenizer(str(make_model(arch)))
    preferences = read_jsonl(data["preferences"])
    rows = [
        Ranking(r["prompt"], (r["chosen"], r["rejected"]), "row", margin=0.1 * i) for i, r in enumerate(preferences[:6])
    ]
    more = [answer for r in preferences[6:12] for answer in (r["chosen"], r["rejected"] + " " + r["chosen"])]
    rows.insert(2, Ranking("please", tuple(more[:3]), "row", margin=0.7))
    rows.append(Ranking("again", tuple(more[3:7]), "row"))
    found = []
    for row in rows:
        pairs = encode_pairs(tokenizer, [row.prompt] * len(row.answers), list(row.answers), None)
        found.append(rm_stage.RankedIds([p + a for p, a in pairs], row))
    return found


@pytest.fixture(scope="module")
def classifiers(arch, make_model):
    """A new reward model on packed rows and the same one plain."""
    made = [new_reward_model(str(make_model(arch)), None, seed=1, head_std=0.5) for _ in range(2)]
    assert prepare(made[0], CPU) is None
    return made


def plain_score(model, ids):
    return linear(model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1:], model.score.weight)[0, 0]


@pytest.mark.parametrize("loss_name", ["logsigmoid", "logexp", "mse"])
def test_rm_gradient_however_the_batch_is_cut(classifiers, rankings, write_config, tmp_path, loss_name):
    """[23, 29] A ranking counts as one row: the mean over its pairs."""
    model, wanted_model = map(double, classifiers)
    scale = rm_stage.TargetScale(0.5, 2.0)
    if loss_name == "mse":
        batch = [
            rm_stage.ScoredIds(item.answers[0], 0.3 * i - 1, Scored("", "", 0.0, "row"))
            for i, item in enumerate(rankings)
        ]
        losses = [(plain_score(wanted_model, item.ids) - (item.score - 0.5) / 2).square() for item in batch]
        changes = {}
    else:
        batch, losses = rankings, []
        for item in rankings:
            scores = [plain_score(wanted_model, ids) for ids in item.answers]
            of_pairs = []
            for i, better in enumerate(scores):
                for j in range(i + 1, len(scores)):
                    margin = item.row.margin if (i, j) == (0, len(scores) - 1) else 0.0
                    lead = better - scores[j]
                    of_pairs.append(-logsigmoid(lead - margin) + 0.1 * (better + scores[j]) ** 2)
            losses.append(sum(of_pairs) / len(of_pairs))
        assert max(len(item.answers) for item in rankings) == 4
        changes = {"zero_mean_coef": 0.1}
    wanted = sum(losses) / len(losses)
    wanted.backward()
    config = config_of(write_config, "rm", RMConfig, tmp_path, loss=loss_name, **changes)
    for budget in BUDGETS:
        model.zero_grad()
        stats = rm_stage._accumulate(model, batch, scale, budget, config, ALONE)
        assert stats["loss/rm"] == pytest.approx(wanted.item(), rel=1e-9)
        # transformers' classifiers know no head bias here, and every backbone weight must agree.
        same_gradients(grads(model), grads(wanted_model), 1e-6)


class Recorder:
    """Stands for a Stepper: keeps the gradients and steps nothing."""

    def __init__(self, model):
        self.model, self.steps = model, []

    learning_rate = 0.0

    def clip(self, world):  # noqa: ARG002
        self.steps.append(grads(self.model))
        return 0.0

    def advance(self, *, move=True):  # noqa: ARG002
        self.model.zero_grad()


def learner_of(config, models, rewards=(), policy_stepper=None, value_stepper=None):
    """What the stage's functions read, on one process."""
    tokens = config.ppo.tokens_per_microbatch
    return Learner(
        config=config,
        stage=SimpleNamespace(world=ALONE, may_step=lambda *_: True, speed=Speed("ppo", ALONE)),
        tokenizer=None,
        models=models,
        rewards=rewards,
        sampling=Sampling(temperature=config.rollout.temperature, stop=frozenset(STOP)),
        train=[],
        test=[],
        ptx=[],
        policy_stepper=policy_stepper,
        value_stepper=value_stepper,
        average=None,
        scale=ScoreScale(config.ppo),
        kl_coef=config.ppo.kl_coef,
        policy_kl_coef=config.ppo.policy_kl_coef,
        budget=Budget(LARGE if tokens == "auto" else tokens, config.ppo.microbatch_size),
        policy_work=Work(1, 1, 1, 1, 1),
    )


@pytest.fixture(scope="module")
def rollout_and_models(policy, classifiers, table):
    """A rollout of float64 models, and the models a little later, so that ratios leave the clip range."""
    old, ref_policy, value_model = double(policy), double(policy), double(classifiers[0])
    noise = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in ref_policy.parameters():
            p += 0.02 * torch.randn(p.shape, generator=noise, dtype=p.dtype)
    rows = [PromptRow("", ids, Prompt("", "")) for ids in PROMPTS]
    rollout = collect(
        rows,
        table,
        Models(old, ref_policy, value_model),
        sampling=Sampling(temperature=0.8, stop=frozenset(STOP)),
        tokenizer=None,
        budget=Budget(LARGE, 3),
        precision="float32",
        recompute=True,
    )
    later, later_values = copy.deepcopy(old), copy.deepcopy(value_model)
    with torch.no_grad():
        for p in [*later.parameters(), *later_values.parameters()]:
            p += 0.01 * torch.randn(p.shape, generator=noise, dtype=p.dtype)
    mask = rollout.response_mask
    fixed = torch.Generator().manual_seed(6)
    advantages = torch.randn(mask.shape, generator=fixed, dtype=torch.float64) * mask
    returns = rollout.values + torch.randn(mask.shape, generator=fixed, dtype=torch.float64) * mask
    return rollout, later, later_values, advantages, returns


def update(rollout_and_models, write_config, root, advantages=None, returns=None, **ppo):
    rollout, policy, value_model, usual_advantages, usual_returns = rollout_and_models
    config = config_of(
        write_config,
        "ppo",
        PPOConfig,
        root,
        rollout={"temperature": 0.8},
        ppo={"rollout_batch_size": 8, "ppo_epochs": 1, "vf_coef": 0.3, **ppo},
    )
    steppers = Recorder(policy), Recorder(value_model)
    policy.zero_grad()
    value_model.zero_grad()
    batch = UpdateBatch(
        rollout.prompts,
        rollout.responses,
        rollout.response_mask,
        rollout.logprobs,
        rollout.ref_logprobs,
        rollout.values,
        usual_advantages if advantages is None else advantages,
        usual_returns if returns is None else returns,
    )
    learner = learner_of(config, Models(policy, None, value_model), (), *steppers)
    stats = ppo_stage._update(learner, batch, 0)
    return steppers[0].steps, steppers[1].steps, stats


def test_ppo_gradients_however_the_minibatch_is_cut(rollout_and_models, write_config, tmp_path):
    """[11, 21, 23, 34] Both losses against a loop over the tokens of plain forwards, to 1e-6 in float64."""
    rollout, policy, value_model, advantages, returns = rollout_and_models
    wanted_policy, wanted_values = copy.deepcopy(policy), copy.deepcopy(value_model)
    for model in (wanted_policy, wanted_values):
        model.set_attn_implementation("sdpa")
        model.zero_grad()
    num_tokens = int(rollout.response_mask.sum())
    policy_total, value_total, cut_tokens = 0.0, 0.0, 0
    for b, sequence in enumerate([p.ids + r.ids for p, r in zip(rollout.prompts, rollout.responses, strict=True)]):
        at = len(rollout.prompts[b].ids)
        logprobs = (wanted_policy(input_ids=torch.tensor([sequence])).logits[0] / 0.8).log_softmax(-1)
        hidden = wanted_values.base_model(input_ids=torch.tensor([sequence])).last_hidden_state[0]
        values = linear(hidden, wanted_values.score.weight)[:, 0]
        for t in range(len(sequence) - at):
            ratio = (logprobs[at + t - 1, sequence[at + t]] - rollout.logprobs[b, t]).exp()
            clipped = ratio.clamp(0.8, 1.2)
            cut_tokens += int(ratio != clipped)
            policy_total = policy_total - torch.minimum(ratio * advantages[b, t], clipped * advantages[b, t])
            old, new, target = rollout.values[b, t], values[at + t - 1], returns[b, t]
            near = old + (new - old).clamp(-0.2, 0.2)
            value_total = value_total + 0.5 * torch.maximum((new - target) ** 2, (near - target) ** 2)
    assert 0 < cut_tokens < num_tokens
    (policy_total / num_tokens).backward()
    (0.3 * value_total / num_tokens).backward()

    for budget in BUDGETS:
        at_a_time = {"tokens_per_microbatch": budget.tokens, "microbatch_size": budget.rows}
        policy_steps, value_steps, stats = update(
            rollout_and_models, write_config, tmp_path, minibatch_size=8, **at_a_time
        )
        assert len(policy_steps) == len(value_steps) == 1
        same_gradients(policy_steps[0], grads(wanted_policy), 1e-6)
        same_gradients(value_steps[0], grads(wanted_values), 1e-6)
        assert stats["loss/policy"] == pytest.approx((policy_total / num_tokens).item(), rel=1e-8)
        assert stats["loss/value"] == pytest.approx((value_total / num_tokens).item(), rel=1e-8)


def test_every_response_is_learnt_from_once_an_epoch(rollout_and_models, write_config, tmp_path):
    """[23, 38] As many steps as configured; two epochs are cut differently."""
    config = {"minibatch_size": 2, "microbatch_size": 1, "ppo_epochs": 3}
    steps, _, _ = update(rollout_and_models, write_config, tmp_path, **config)
    assert len(steps) == 12
    rollout = rollout_and_models[0]
    weights = rollout.response_mask.sum(1).double()
    seen = []
    real = ppo_stage.score_tokens
    with pytest.MonkeyPatch.context() as patch:

        def spy(models, prompts, responses, *rest, **options):
            seen.extend(next(i for i, r in enumerate(rollout.responses) if r is response) for response in responses)
            return real(models, prompts, responses, *rest, **options)

        patch.setattr(ppo_stage, "score_tokens", spy)
        update(rollout_and_models, write_config, tmp_path, **config)
    epochs = [seen[i : i + 8] for i in (0, 8, 16)]
    assert all(sorted(epoch) == list(range(len(weights))) for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("recompute", [True, False])
def test_values_before_a_step_are_those_of_the_rollout(classifiers, policy, table, recompute):
    """[9] Old and new values are of the same tokens, wherever the batch is cut."""
    models = Models(double(policy), double(policy), double(classifiers[0]))
    rows = [PromptRow("", ids, Prompt("", "")) for ids in PROMPTS]
    drawn = Sampling(stop=frozenset(STOP))
    rollout = collect(
        rows,
        table,
        models,
        sampling=drawn,
        tokenizer=None,
        budget=Budget(LARGE, 3),
        precision="float32",
        recompute=recompute,
    )
    assert rollout.values.abs().max() > 0.1
    lengths = [len(p) + len(r.ids) for p, r in zip(PROMPTS, rollout.responses, strict=True)]
    for budget in BUDGETS:
        for part in budget.cut(lengths):
            prompts, responses = [rows[i] for i in part], [rollout.responses[i] for i in part]
            now = score_tokens(models, prompts, responses, drawn, "float32")
            old = torch.cat([rollout.values[i, : len(rollout.responses[i].ids)] for i in part])
            close(now.values.detach(), old, 1e-9)


def test_the_gradient_is_clipped_to_its_norm(make_model):
    """[24] Before the step, and the norm that is reported is that before the clip."""
    model = load_policy(str(make_model("llama")))
    stepper = build_stepper(model, Optimizer(learning_rate=1e-3, max_grad_norm=0.25), 4)
    logits_at(model, pack([[5, 6, 7]]), torch.tensor([0, 1])).square().sum().backward()
    before = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    assert before > 1
    assert stepper.clip(ALONE) == pytest.approx(before, rel=1e-5)
    after = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    assert after == pytest.approx(0.25, rel=1e-3)


def test_neither_loss_reaches_the_other_model(rollout_and_models, write_config, tmp_path):
    """[18]"""
    rollout, _, value_model, advantages, returns = rollout_and_models
    for tensor in (rollout.logprobs, rollout.ref_logprobs, rollout.values):
        assert not tensor.requires_grad
    rewards = token_rewards(
        torch.ones(len(PROMPTS)), rollout.logprobs - rollout.ref_logprobs, rollout.response_mask, kl_coef=0.1
    )
    for tensor in gae(rewards, rollout.values, rollout.response_mask, gamma=1.0, gae_lambda=0.95):
        assert not tensor.requires_grad

    def largest(steps):
        return max(g.abs().max().item() for step in steps for g in step.values())

    args = (rollout_and_models, write_config, tmp_path)
    policy_steps, value_steps, _ = update(*args, advantages=torch.zeros_like(advantages), minibatch_size=8)
    assert largest(policy_steps) == 0
    assert largest(value_steps) > 0
    with torch.no_grad():
        now = response_values(value_model, rollout.prompts, rollout.responses, "float32")
    exact = torch.zeros_like(returns)
    exact[rollout.response_mask] = now
    policy_steps, value_steps, _ = update(*args, returns=exact, minibatch_size=8, value_clip_range=None)
    assert largest(policy_steps) > 0
    assert largest(value_steps) < 1e-12


# ------------------------------------------------------------------------- no architecture in the below

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def chat_tokenizer(tokenizer):
    own = copy.deepcopy(tokenizer)
    own.chat_template = CHAT
    return own


@pytest.mark.parametrize("template", [None, "User: {prompt}\nBot:"])
@pytest.mark.parametrize("name", ["tokenizer", "eos_only_tokenizer"])
def test_answers_and_their_eos_are_learnt_prompts_are_not(request, name, template, data):
    """[5, 6] Also where pad is EOS."""
    tokenizer = request.getfixturevalue(name)
    rows = [Demonstration(r["prompt"], r["response"], "row") for r in read_jsonl(data["demonstrations"])]
    for row, example in zip(rows, encode_demonstrations(tokenizer, rows, template, learn_all=False), strict=True):
        learnt = [i for i, yes in zip(example.ids, example.learnt, strict=True) if yes]
        prompt = encode_prompts(tokenizer, [row.prompt], template)[0]
        assert learnt[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(learnt[:-1]) == row.response
        assert example.ids[: len(prompt)] == prompt, "a rollout starts from the same ids"
        assert example.learnt == [False] * len(prompt) + [True] * (len(example.ids) - len(prompt))
        assert example.ids.count(tokenizer.eos_token_id) == 1


def test_loss_on_all_learns_the_prompt_but_not_token_0(tokenizer):
    rows = [Demonstration("please help", " we will", "row"), Demonstration("", "thank you", "row")]
    for example in encode_demonstrations(tokenizer, rows, None, learn_all=True):
        assert example.learnt == [False] + [True] * (len(example.ids) - 1)
        assert example.ids[-1] == tokenizer.eos_token_id


def test_an_empty_prompt_still_predicts_the_first_answer_token(eos_only_tokenizer):
    rows = [Demonstration("", "thank you", "row")]
    (example,) = encode_demonstrations(eos_only_tokenizer, rows, None, learn_all=False)
    learnt = [i for i, yes in zip(example.ids, example.learnt, strict=True) if yes]
    assert eos_only_tokenizer.decode(learnt[:-1]) == "thank you"
    assert learnt[-1] == eos_only_tokenizer.eos_token_id


def conversation(*contents):
    roles = ("user", "assistant") * len(contents)
    messages = tuple(Message(role, content) for role, content in zip(roles, contents, strict=False))
    return Demonstration("", " " + contents[-1], "row", messages)


@pytest.mark.parametrize("template", [None, "chat"])
def test_every_assistant_turn_is_learnt_and_nothing_else(chat_tokenizer, template):
    """[6]"""
    row = conversation("please help", "we will send a lamp", "today", "sorry")
    (example,) = encode_demonstrations(chat_tokenizer, [row], template, learn_all=False)
    pieces, last = [], None
    for token, yes in zip(example.ids, example.learnt, strict=True):
        if yes != last:
            pieces.append((yes, []))
            last = yes
        pieces[-1][1].append(token)
    text = [(yes, chat_tokenizer.decode(ids)) for yes, ids in pieces]
    assert text == [
        (False, "<user>please help\n<assistant>"),
        (True, "we will send a lamp<eos>\n"),
        (False, "<user>today\n<assistant>"),
        (True, "sorry<eos>\n"),
    ]
    eos = chat_tokenizer.eos_token_id
    assert [yes for token, yes in zip(example.ids, example.learnt, strict=True) if token == eos] == [True, True]
    (all_of_it,) = encode_demonstrations(chat_tokenizer, [row], template, learn_all=True)
    assert all_of_it.learnt == [False] + [True] * (len(example.ids) - 1)


def test_a_chat_template_without_eos_gets_one(chat_tokenizer):
    own = copy.deepcopy(chat_tokenizer)
    own.chat_template = CHAT.replace("<eos>", "<end>")
    (example,) = encode_demonstrations(own, [conversation("please", "we will")], "chat", learn_all=False)
    assert example.ids[-1] == own.eos_token_id
    assert example.learnt[-1]


class Fixed:
    """A reward that gives the numbers that it was given."""

    name, weight = "fixed", 1.0

    def __init__(self, values):
        self.values = torch.tensor(values)

    def score(self, judged):  # noqa: ARG002
        return self.values


def test_missing_eos_costs_only_what_did_not_end(write_config, tmp_path):
    """[36] The penalty comes after the clip, and the logged score has neither."""
    responses = [Response([5, 2], [0.0, 0.0], True), Response([5, 2], [0.0, 0.0], False), Response([2], [0.0], True)]
    prompts = [PromptRow("p", [2], Prompt("p", "row"))] * 3
    config = config_of(write_config, "ppo", PPOConfig, tmp_path, ppo={"missing_eos_penalty": 0.7, "score_clip": 2.0})
    raw = torch.tensor([1.0, 5.0, -9.0])
    scores = total_score([Fixed([1.0, 5.0, -9.0])], Samples([p.text for p in prompts], ["a"] * 3, [], [], [], []))
    close(scores.total, raw)
    close(scores.each["fixed"], raw)
    learner = learner_of(config, models=None)
    score, dense = ppo_stage._score(learner, scores, responses)
    close(score, torch.tensor([1.0, 2.0 - 0.7, -2.0]))
    assert dense is None


def test_rm_accuracy_is_an_exact_count(make_model, write_config, tmp_path):
    """[31] Seven pairs in batches of 3, a tie, and both answers swapped."""
    model = new_reward_model(str(make_model("llama")), None, seed=0, head_std=1.0)
    prepare(model, CPU)
    ids = random_ids(*range(4, 18), seed=3)
    row = Ranking("", ("", ""), "row")
    pairs = [rm_stage.RankedIds([ids[2 * i], ids[2 * i + 1]], row) for i in range(6)]
    pairs.append(rm_stage.RankedIds([ids[12], ids[12]], row))
    swapped = [rm_stage.RankedIds(p.answers[::-1], row) for p in pairs]
    with torch.no_grad():
        sides = [[plain_score(model, ids) for ids in p.answers] for p in pairs[:6]]
    wins = [float(a > b) for a, b in sides] + [0.5]
    assert 0 < sum(wins[:6]) < 6
    for size in (3, 1, 7):
        config = config_of(write_config, "rm", RMConfig, tmp_path, training={"minibatch_size": size})
        scale = rm_stage.TargetScale(0.0, 1.0)
        found = rm_stage._evaluate(model, pairs, scale, BUDGETS[-1], config, ALONE)
        other = rm_stage._evaluate(model, swapped, scale, BUDGETS[0], config, ALONE)
        assert found["eval/accuracy"] == pytest.approx(sum(wins) / 7, abs=1e-12)
        assert other["eval/accuracy"] == pytest.approx(1 - sum(wins) / 7, abs=1e-12)
        assert other["eval/margin"] == pytest.approx(-found["eval/margin"], abs=1e-6)


def test_a_ranking_is_one_trial_of_its_pairs(make_model, write_config, tmp_path):
    """Accuracy, margin and the length baseline of rankings of 2 to 5 answers, by loops."""
    model = new_reward_model(str(make_model("llama")), None, seed=0, head_std=1.0)
    prepare(model, CPU)
    ids = random_ids(*range(3, 17), seed=4)
    cuts = [(0, 2), (2, 5), (5, 9), (9, 14)]
    items = [rm_stage.RankedIds(ids[a:b][::-1] if a == 2 else ids[a:b], Ranking("", (), "row")) for a, b in cuts]
    accuracy, margin, longer = [], [], []
    for item in items:
        with torch.no_grad():
            scores = [plain_score(model, one).item() for one in item.answers]
        pairs = [(i, j) for i in range(len(scores)) for j in range(i + 1, len(scores))]
        accuracy.append(sum(scores[i] > scores[j] for i, j in pairs) / len(pairs))
        margin.append(sum(scores[i] - scores[j] for i, j in pairs) / len(pairs))
        longer.append(sum(len(item.answers[i]) > len(item.answers[j]) for i, j in pairs) / len(pairs))
    assert 0 < sum(accuracy) < 4
    config = config_of(write_config, "rm", RMConfig, tmp_path)
    found = rm_stage._evaluate(model, items, rm_stage.TargetScale(0.0, 1.0), BUDGETS[-1], config, ALONE)
    assert found["eval/accuracy"] == pytest.approx(sum(accuracy) / 4, abs=1e-6)
    assert found["eval/margin"] == pytest.approx(sum(margin) / 4, abs=1e-5)
    assert found["eval/length_baseline"] == sum(longer) / 4 == 0.25
    low, high = wilson_interval(sum(accuracy), 4)
    assert (found["eval/accuracy_low95"], found["eval/accuracy_high95"]) == pytest.approx((low, high), abs=1e-6)


@pytest.mark.parametrize(("rows", "size"), [(10, 4), (7, 7), (5, 8), (3, 1), (4, 6)])
def test_every_row_is_seen_once_an_epoch(rows, size):
    """[38]"""
    epochs = 12
    seen = [i for step in range(rows * epochs // size) for i in stream(rows, size, step, 0, "test")]
    whole = [seen[at : at + rows] for at in range(0, len(seen) - rows + 1, rows)]
    assert len(whole) > 1
    assert all(sorted(epoch) == list(range(rows)) for epoch in whole)
    assert rows < 4 or len({tuple(epoch) for epoch in whole}) > 1
    assert stream(rows, size, 2, 0, "test") == seen[2 * size : 3 * size]


def test_a_score_of_zero_is_a_score(make_model, write_config, tmp_path):
    """[39]"""
    rows = [
        Row({"prompt": "p", "response": f" r{i}", "score": s}, f"f:{i}") for i, s in enumerate([0.0, 0, "0", -2, 2.0])
    ]
    source = DataSource(path="f")
    format_ = recognise(rows[0], source, "rm scores")
    read = [one for row in rows for one in scored(read_record(row, format_, source))]
    assert [row.score for row in read] == [0.0, 0.0, 0.0, -2.0, 2.0]
    texts = [Row({"text": "a text", "label": label}, "f:1") for label in (0, 1)]
    format_ = recognise(texts[0], source, "rm scores")
    assert [one.score for row in texts for one in scored(read_record(row, format_, source))] == [0.0, 1.0]
    model = new_reward_model(str(make_model("llama")), None, seed=0, head_std=None)
    path = write_jsonl(tmp_path / "rows.jsonl", [row.values for row in rows])
    config = config_of(
        write_config, "rm", RMConfig, tmp_path, loss="mse", data={"train": str(path), "test": None, "test_fraction": 0}
    )
    encode = rm_stage.Encoder(model, load_tokenizer(str(make_model("llama"))), config)
    scores = encode.scored(config.data).train.numbers("score").tolist()
    scale = rm_stage.TargetScale(0.5, 2.0)
    assert [scale.target(score) for score in scores] == [-0.25, -0.25, -0.25, -1.25, 0.75]


def test_one_scored_row_of_zero_reaches_the_loss(run_stage, make_model, tmp_path):
    """[39] All scores 0 but one: the mean squared target before any step is 1, not that of the other rows."""
    rows = [{"prompt": "p", "response": f" r{i}", "score": 0.0 if i else 8.0} for i in range(8)]
    run_stage(
        "rm",
        tmp_path,
        model={"path": str(make_model("llama")), "head_std": 1e-9},
        data={"train": str(write_jsonl(tmp_path / "rows.jsonl", rows)), "test": None, "test_fraction": 0},
        loss="mse",
        training={"num_steps": 1, "minibatch_size": 8},
    )
    assert read_jsonl(tmp_path / "rm/metrics.jsonl")[0]["loss/rm"] == pytest.approx(1.0, abs=1e-4)


def test_gradients_of_rewards_stop_at_the_rollout(pipeline, tokenizer):
    """[18] Scores come without a graph."""
    sources, _ = load_rewards([ModelReward(type="reward_model")], str(pipeline("llama")), tokenizer, CPU, "float32")
    scores = score_sequences(sources[0].model, random_ids(3, 9), "float32")
    assert not scores.requires_grad
    assert sources[0].reads_policy_tokens


def test_a_value_model_starts_at_zero_from_either_start(make_model, pipeline):
    for path in (str(make_model("gpt2")), str(pipeline("gpt2") / "rm/model")):
        model = new_value_model(path, None)
        assert model.score.weight.abs().max() == 0
        assert model.base_model.get_input_embeddings().weight.abs().max() > 0


def test_set_dropout_off_is_needed(make_model):
    """That the fixture's dropout would be seen: the check above can fail."""
    model = load_policy(str(make_model("gpt2")))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    ids = torch.tensor(random_ids(12))
    assert not torch.equal(model.train()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    set_dropout_off(model)
    assert torch.equal(model.train()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_training_a_tokenizer_twice_gives_the_same(texts):
    first, second = (train_tokenizer(texts, TokenizerTraining(vocab_size=300)) for _ in range(2))
    assert json.dumps(first.get_vocab(), sort_keys=True) == json.dumps(second.get_vocab(), sort_keys=True)
