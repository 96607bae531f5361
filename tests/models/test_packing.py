"""Packed rows with shared prefixes against one plain forward per sequence: indices, values and gradients."""

import copy
import itertools
import time
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_cli.config.loader import load_config
from rlhf_cli.config.models import Lora
from rlhf_cli.config.sft_rm import RMConfig
from rlhf_cli.data.answers import RankedIds
from rlhf_cli.data.batches import Budget
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.data.records import Answer, Record
from rlhf_cli.kernels import attention
from rlhf_cli.models import forward
from rlhf_cli.models.adapters import add_lora
from rlhf_cli.models.forward import check_head, choose_attention, hidden_at, is_packed, logits_at, logprobs_at
from rlhf_cli.packing import FEWEST_EQUAL, PackedBatch, Segment, pack, response_positions
from rlhf_cli.processes import threads
from rlhf_cli.rewards.models import score_sequences, sequence_scores
from rlhf_cli.rollout import rollout
from rlhf_cli.rollout.rollout import Models, collect, score_tokens
from rlhf_cli.rollout.sampling import Response, Sampling
from stages import rm as rm_stage
from support import compare
from support.tiny import ARCHITECTURES, CPU, tiny_model

VOCAB = 97
# A window that is shorter than the prompts: what follows one no longer sees its beginning.
MODELS = {**{name: {} for name in (*ARCHITECTURES, "mixtral")}, "mistral": {"sliding_window": 6}}


def ids(length, seed):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPT, OTHER = ids(19, 1), ids(9, 2)
SEQUENCES = [
    PROMPT + ids(12, 3),
    PROMPT + ids(5, 4),
    ids(7, 5),
    OTHER + ids(3, 6),
    PROMPT + ids(23, 7),
    OTHER + ids(14, 8),
    ids(1, 9),
    PROMPT[:11] + ids(2, 10),
]
GROUPS = ["a", "a", "b", "c", "a", "c", "b", "a"]
SHARED = [0, 19, 0, 0, 19, 9, 0, 11]


@pytest.fixture(scope="module", params=MODELS)
def pair(request):
    """(a model of transformers, the same model on packed rows)."""
    return made(request.param)


def made(name, auto=AutoModelForCausalLM, **settings):
    plain = tiny_model(name, auto, **MODELS[name], **settings)
    model = copy.deepcopy(plain)
    assert choose_attention(model) is None
    assert is_packed(model)
    return plain, model


def close(found, wanted):
    compare.close(found, wanted, 1e-4)


def same_gradients(model, plain):
    compare.same_gradients(compare.grads(model), compare.grads(plain), 1e-4)
    for m in (model, plain):
        m.zero_grad()


def everywhere(batch):
    return batch.indices([0] * len(batch.segments), batch.lengths)


def test_indices_find_every_token_of_a_sequence():
    batch = pack(SEQUENCES, groups=GROUPS)
    at = everywhere(batch)
    assert batch.ids[at].tolist() == [i for sequence in SEQUENCES for i in sequence]
    assert batch.position_ids[at].tolist() == [p for sequence in SEQUENCES for p in range(len(sequence))]
    assert batch.lengths == [len(sequence) for sequence in SEQUENCES]
    assert len(batch.ids) == sum(batch.lengths) - sum(SHARED)
    assert [segment.prefix_length for segment in batch.segments] == SHARED
    assert batch.ids[batch.last].tolist() == [sequence[-1] for sequence in SEQUENCES]
    assert len(set(batch.last.tolist())) == len(SEQUENCES)
    assert sorted(set(at.tolist())) == list(range(len(batch.ids))), "every place in the row belongs to a sequence"


def test_response_positions_include_the_shared_prefix():
    """A response's first token is predicted at the prompt's last token, which another sequence holds."""
    prompts = [4, 19, 1, 9, 19, 8, 1, 3]
    batch = pack(SEQUENCES, groups=GROUPS)
    at = response_positions(batch, prompts)
    whole = response_positions(pack(SEQUENCES), prompts)
    wanted = pack(SEQUENCES)
    assert batch.ids[at].tolist() == wanted.ids[whole].tolist()
    assert batch.position_ids[at].tolist() == wanted.position_ids[whole].tolist()


def test_short_and_complete_prefixes_are_not_shared():
    a = ids(20, 1)
    equal = pack([a, a, a[:12]], groups=[0, 0, 0])
    assert [s.prefix_length for s in equal.segments] == [0, 0, 0], "equal scores stay equal to the last bit"
    short = pack([a[:7] + [3, 4, 5], a[:7] + [6, 7, 8]], groups=[0, 0])
    assert [s.prefix_length for s in short.segments] == [0, 0]
    apart = pack([a + [3], a + [4]], groups=[0, 1])
    assert [s.prefix_length for s in apart.segments] == [0, 0]
    assert pack([a[:8] + [3], a[:8] + [4]], groups=[0, 0]).segments[1] == Segment(9, 1, 0, 8)


def test_runs_of_equal_length():
    """Four or more complete neighbours of equal length form a run. A sequence with a prefix is a run by itself."""
    equal = [[1, 2, 3]] * FEWEST_EQUAL
    batch = pack([*equal, [4, 5], [4, 6], *SEQUENCES], groups=[*range(FEWEST_EQUAL + 2), *GROUPS])
    runs = batch.runs
    assert [(run.num_sequences, run.length) for run in runs[:3]] == [(4, 3), (1, 2), (1, 2)]
    assert sum(run.num_sequences * run.length for run in runs) == len(batch.ids)
    assert [run.prefix for run in runs[3:]] == [None, (3, 0, 19), None, None, (3, 0, 19), (6, 0, 9), None, (3, 0, 11)]
    within = pack([ids(12, n) for n in range(4)] + [ids(12, 2)[:10] + [4]], groups=[0, 1, 2, 3, 2]).runs
    assert [(run.num_sequences, run.length, run.prefix) for run in within] == [(4, 12, None), (1, 1, (0, 24, 34))]


def plain_hidden(plain, sequences):
    return torch.cat([plain.base_model(input_ids=torch.tensor([s])).last_hidden_state[0] for s in sequences])


EQUAL = [ids(9, n) for n in range(5)]  # in one attention call


@pytest.mark.parametrize(
    ("sequences", "groups"),
    [(SEQUENCES, GROUPS), (SEQUENCES, None), ([*EQUAL, EQUAL[2][:8] + ids(4, 30)], [0, 1, 2, 3, 4, 2])],
    ids=["shared", "whole", "equal"],
)
def test_hidden_states_logits_and_gradients_equal_a_plain_forward(pair, sequences, groups):
    plain, model = pair
    batch = pack(sequences, groups=groups)
    at = everywhere(batch)
    close(hidden_at(model, batch, at), plain_hidden(plain, sequences))
    logits = logits_at(model, batch, at)
    wanted = torch.cat([plain(input_ids=torch.tensor([s])).logits[0] for s in sequences])
    close(logits, wanted)
    weights = torch.randn(len(at), 1, generator=torch.Generator().manual_seed(1))
    for each in (logits, wanted):
        (each.log_softmax(-1)[:, :9] * weights).sum().backward()
    same_gradients(model, plain)


@pytest.mark.parametrize("name", MODELS)
def test_scores_and_their_gradients_equal_a_plain_forward(name):
    plain, model = made(name, AutoModelForSequenceClassification, num_labels=1)
    torch.nn.init.normal_(plain.score.weight)
    model.score.load_state_dict(plain.score.state_dict())
    found = sequence_scores(model, SEQUENCES, GROUPS)[:, 0]
    wanted = torch.stack([plain.score(plain_hidden(plain, [s]))[-1, 0] for s in SEQUENCES])
    close(found, wanted)
    assert wanted.std() > 0.1, "else any two scores would be close"
    for budget in (Budget(10_000, 1), Budget(10_000, 3), Budget(10_000), Budget(1), Budget(25), Budget(40)):
        close(score_sequences(model, SEQUENCES, "float32", budget, groups=GROUPS), wanted.detach())
    for scores in (found, wanted):
        (scores * torch.arange(8)).sum().backward()
    same_gradients(model, plain)


@pytest.mark.parametrize("choice", ["all", "some", "last"])
def test_rows_that_are_rounded_up_change_no_result_and_no_gradient(pair, choice, monkeypatch):
    """Where oneDNN computes, the packed row and the hidden states that the head reads are multiples of ROWS."""
    _, model = pair
    batch = pack(SEQUENCES, groups=GROUPS)
    of_responses = response_positions(batch, [4, 19, 1, 9, 19, 8, 1, 3])
    at = {"all": everywhere(batch), "some": of_responses, "last": batch.last}[choice]
    check_head(model)
    head, sizes, found = forward.linear_logprobs, [], []

    def watched(hidden, *arguments, **options):
        sizes.append(len(hidden))
        return head(hidden, *arguments, **options)

    monkeypatch.setattr(forward, "linear_logprobs", watched)
    for rounds in (False, True):
        monkeypatch.setattr(forward, "_rounds_rows", lambda _, rounds=rounds: rounds)
        with model.get_input_embeddings().register_forward_hook(lambda _, __, row: sizes.append(row.shape[1])):
            logprobs = logprobs_at(model, batch, at, torch.arange(len(at)) % VOCAB)
            hidden, logits = hidden_at(model, batch, at), logits_at(model, batch, at)
        (logprobs.sum() + hidden.square().sum()).backward()
        found.append(([logprobs, hidden, logits], compare.grads(model)))
        model.zero_grad()
    # By call the tokens of the row, and after those of the first the states that the head reads.
    assert sizes[:4] == [95, len(at), 95, 95]
    assert sizes[4:] == [128, {"all": 192, "some": 128, "last": 9}[choice], 128, 128]
    (plain, gradients), (rounded, gradients_rounded) = found
    for one, other in zip(plain, rounded, strict=True):
        compare.close(other, one, 1e-5)
    compare.same_gradients(gradients_rounded, gradients, 1e-5)


def test_attention_across_sequences_is_detected(monkeypatch):
    model, _ = made("llama")

    def leaky(*args, packed=None, **kwargs):
        whole = packed and PackedBatch(packed.ids, packed.position_ids, [Segment(0, len(packed.ids))])
        return attention.packed_attention(*args, packed=whole, **kwargs)

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.EACH, leaky)
    assert "differ" in choose_attention(model)
    assert not is_packed(model)


def varlen_by_hand(q, k, v, queries, keys, most_queries, most_keys, *, scale, window_size, enable_gqa):  # noqa: ARG001
    """Flash attention's contract: each sequence's queries against its keys, the last query beside the last key."""
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert queries.dtype == keys.dtype == torch.int32
    assert int(queries.diff().max()) == most_queries
    assert int(keys.diff().max()) == most_keys
    outputs = []
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(queries.tolist()), itertools.pairwise(keys.tolist()), strict=True):
        a, b, c = (x.float().transpose(0, 1) for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        b, c = (x.repeat_interleave(len(a) // len(b), 0) for x in (b, c))
        row, column = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0), torch.arange(k1 - k0)
        left, right = window_size
        seen = (column <= row + right) & ((left < 0) | (column >= row - left))
        weights = (a @ b.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append((weights @ c).transpose(0, 1))
    return torch.cat(outputs).to(q.dtype)


@pytest.mark.parametrize("groups", [GROUPS, None], ids=["shared", "whole"])
def test_the_arguments_of_flash_attention_describe_the_row(pair, groups, monkeypatch):
    """The call for 16 bits on a GPU, with a stand-in for the kernel that computes the result by hand."""
    import torch.nn.attention.varlen as varlen

    plain, model = pair
    model = copy.deepcopy(model)
    model.set_attn_implementation(attention.ROW)
    called = []
    monkeypatch.setattr(varlen, "varlen_attn", lambda *a, **k: called.append(1) or varlen_by_hand(*a, **k))
    batch = pack(SEQUENCES, groups=groups)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = hidden_at(model, batch, everywhere(batch))
        wanted = plain_hidden(plain, SEQUENCES)
    assert len(called) == 2, "once a layer"
    exact = plain_hidden(plain, SEQUENCES)
    error = (wanted - exact).abs().mean()
    assert (found - exact).abs().mean() < 1.5 * error, "no further from the exact than bfloat16 is"
    called.clear()
    close(hidden_at(model, batch, everywhere(batch)), exact)
    assert not called, "float32 has no such kernel"


ROWS = [PromptRow("", prompt, Record("", "")) for prompt in (PROMPT, PROMPT, OTHER, PROMPT, OTHER, ids(5, 40))]
RESPONSES = [Response(ids(n, 70 + n), [0.0] * n, True) for n in (3, 7, 1, 1, 12, 4)]
# Like two responses with the same beginning.
RESPONSES[3] = Response(RESPONSES[1].ids[:2] + [5], [0.0] * 3, True)
DRAWN = Sampling(temperature=0.7, stop=frozenset(range(10, 20)))
COLLECTED = {"tokenizer": None, "precision": "float32", "recompute": True}


def test_shared_prompts_change_no_score_in_ppo(pair):
    plain, model = pair
    _, ref_policy = made("llama")
    with torch.no_grad():
        for p in ref_policy.parameters():
            p.mul_(1.1)
    head = torch.nn.Linear(32, 1)

    def scores(policy, parts):
        models, found = Models(policy, ref_policy, value_head=head), []
        for part in parts:
            given = [ROWS[i] for i in part], [RESPONSES[i] for i in part], DRAWN, "float32"
            found.append(score_tokens(models, *given, with_entropy=True, with_full_kl=True))
        names = ("logprobs", "values", "entropy", "kl_full")
        return {name: torch.cat([getattr(each, name) for each in found]) for name in names}

    whole = [range(len(ROWS))]
    found, wanted = scores(model, whole), scores(plain, [[i] for i in range(len(ROWS))])
    for name in wanted:
        close(found[name], wanted[name])
    assert len(wanted["logprobs"]) == sum(len(r.ids) for r in RESPONSES)
    for each in (found, wanted):
        sum(tensor.square().sum() for tensor in each.values()).backward()
    same_gradients(model, plain)


@pytest.fixture
def tokens(monkeypatch):
    tokens, real = [], forward._packed_inputs
    monkeypatch.setattr(forward, "_rounds_rows", lambda _: False)
    monkeypatch.setattr(forward, "_packed_inputs", lambda batch: tokens.append(len(batch.ids)) or real(batch))
    return tokens


@pytest.mark.parametrize("head", [None, torch.nn.Linear(32, 1)])
def test_ppo_shares_prompts_in_one_pass(head, tokens):
    """Otherwise the test above would prove nothing. A shared backbone gives the values in the same pass."""
    _, model = made("llama")
    check_head(model)
    tokens.clear()
    score_tokens(Models(model, model, value_head=head), ROWS, RESPONSES, DRAWN, "float32")
    # The fourth response begins as the second does, but only the first one's tokens are shared.
    assert tokens == [19 + 3 + 7 + 3 + 9 + 1 + 12 + 5 + 4]


def test_the_kl_to_an_equal_ref_policy_is_zero_to_the_last_bit(pair):
    _, model = pair
    models = Models(model, copy.deepcopy(model))
    with torch.no_grad():
        logprobs = score_tokens(models, ROWS, RESPONSES, DRAWN, "float32").logprobs
        of_ref = score_tokens(Models(models.ref_policy, None), ROWS, RESPONSES, DRAWN, "float32").logprobs
        assert torch.equal(logprobs, of_ref)
    rows = [ROWS[0]] * 3 + [ROWS[2]] * 3
    uniforms = torch.rand(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for size in (2, 4, 6):
        settings = COLLECTED | {"sampling": replace(DRAWN, temperature=1.0), "budget": Budget(10_000, size)}
        rollout = collect(rows, uniforms, models, **settings)
        assert torch.equal(rollout.logprobs, rollout.ref_logprobs)
        close(rollout.logprobs, rollout.sampled_logprobs)


def test_the_full_kl_needs_no_extra_pass_for_ref_logprobs(pair):
    _, model = pair
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    rows, uniforms = [ROWS[0]] * 3, torch.rand(3, 9, generator=torch.Generator().manual_seed(0))
    choices = COLLECTED | {"sampling": DRAWN, "budget": Budget(10_000)}
    passes = []
    hook = other.register_forward_hook(lambda *_: passes.append(1))
    found = collect(rows, uniforms, Models(model, other), with_full_kl=True, **choices)
    hook.remove()
    assert len(passes) == 1
    wanted = collect(rows, uniforms, Models(model, other), **choices)
    close(found.ref_logprobs, wanted.ref_logprobs)
    assert not torch.allclose(found.ref_logprobs, found.logprobs, atol=1e-2)


def test_passes_that_switch_adapters_off_are_made_one_after_the_other(monkeypatch):
    """Two threads would switch the adapters of one model off and on at the same time."""
    _, model = made("llama")
    add_lora(model, Lora(r=2), "policy.lora", seed=0)
    running, most, real = [], [], rollout.score_tokens

    def slow(*arguments, **options):
        running.append(1)
        most.append(len(running))
        time.sleep(0.1)
        running.pop()
        return real(*arguments, **options)

    monkeypatch.setattr(rollout, "score_tokens", slow)
    monkeypatch.setattr(threads, "num_threads", lambda: 2)
    choices = (ROWS, RESPONSES, DRAWN, "float32", Budget(10_000, 1))
    rollout.padded_scores(Models(model, model), *choices)
    assert max(most) == 2, "other passes are made at the same time"
    most.clear()
    whole = (*choices[:-1], Budget(10_000))  # one microbatch
    rollout.padded_scores(Models(model, copy.deepcopy(model)), *whole, with_ref_logprobs=True)
    assert max(most) == 2, "policy and ref_policy too"
    most.clear()
    rollout.padded_scores(Models(model, None), *choices, with_full_kl=True)
    assert most == [1] * len(ROWS)


def ranked(seed, num_answers):
    prompt = ids(9 + seed, seed)
    row = Record("", "row", tuple(map(Answer, tuple("x" * (i + 1) for i in range(num_answers)))), ranked=True)
    return RankedIds([prompt + ids(2 + 3 * i, 100 * seed + i) for i in range(num_answers)], row)


def test_the_rm_stage_shares_the_prompt_of_a_row(write_config, tmp_path, tokens):
    plain, model = made("llama", AutoModelForSequenceClassification, num_labels=1)
    items = [ranked(seed, count) for seed, count in ((1, 2), (2, 3), (3, 2), (4, 4))]
    config = load_config(write_config("rm", tmp_path), RMConfig)
    tokens.clear()
    found, figures = rm_stage._loss(model, items, 4, rm_stage.TargetScale(0, 1), config)
    saved = sum((len(item.answers) - 1) * (9 + seed) for seed, item in enumerate(items, start=1))
    assert tokens == [sum(len(answer) for item in items for answer in item.answers) - saved]
    wanted, known = rm_stage._loss(plain, items, 4, rm_stage.TargetScale(0, 1), config)
    close(found, wanted)
    assert figures.keys() == known.keys()
    for key in known:
        close(figures[key], known[key])
    found.backward()
    wanted.backward()
    same_gradients(model, plain)


def test_a_cached_mask_is_real_after_the_plan_asked_for_it():
    with FakeTensorMode(allow_non_fake_inputs=True):
        attention.causal_mask(3, 3, 2, torch.float64, CPU)
    assert attention.causal_mask(3, 3, 2, torch.float64, CPU).tolist()[2] == [-torch.inf, 0, 0]
