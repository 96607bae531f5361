"""Microbatches by tokens, rows per process, operation counts, and speed metrics."""

import copy
import itertools
import random
import statistics
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_cli.data.answers import RankedIds
from rlhf_cli.data.batches import Budget, deal, in_order
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.models.cost import work_of
from rlhf_cli.models.forward import MAX_LOGITS, budget_of_logits
from rlhf_cli.models.load import prepare
from rlhf_cli.packing import pack
from rlhf_cli.ppo.update import UpdateBatch, rows_of_process, select
from rlhf_cli.processes.distributed import World
from rlhf_cli.rollout.rollout import cut_responses, shared_prompts
from rlhf_cli.rollout.sampling import Response
from rlhf_cli.training import speed
from rlhf_cli.training.speed import Speed
from stages import rm as rm_stage
from stages import sft as sft_stage
from support.tiny import CPU, llama, read_jsonl


@pytest.mark.parametrize("seed", range(30))
def test_chunks_contain_every_row_once_within_their_limits(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(11, 50) for _ in range(draw.randint(0, 40))]
    groups = [draw.randint(0, 12) for _ in lengths] if seed % 3 == 0 else list(range(len(lengths)))
    prefix = [draw.randint(0, 10) for _ in range(len(lengths) + 13)]
    shared = [prefix[group] for group in groups]
    budget, max_rows, padded = draw.randint(1, 300), draw.choice([None, 1, 4]), seed % 2 == 1

    def computed(rows):
        if padded:
            return len(rows) * max(lengths[row] for row in rows)
        return sum(lengths[row] - shared[row] for row in rows) + sum(prefix[g] for g in {groups[row] for row in rows})

    cut = Budget(budget, max_rows, padded).cut(lengths, groups, shared)
    assert sorted(row for chunk in cut for row in chunk) == list(range(len(lengths)))
    for chunk in cut:
        assert len(chunk) == 1 or computed(chunk) <= budget
        assert max_rows is None or len(chunk) <= max_rows
    for group in set(groups):
        own = [row for row, name in enumerate(groups) if name == group]
        places = [i for i, chunk in enumerate(cut) if set(chunk) & set(own)]
        whole = computed(own) <= budget and (max_rows is None or len(own) <= max_rows)
        assert len(places) == 1 or not whole, "a group that fits into a chunk was cut"
        assert places == list(range(places[0], places[-1] + 1)), "the rows of a group are adjacent"
    if not padded and groups == list(range(len(lengths))) and max_rows is None:
        # Every chunk is full: the next row would not have fitted.
        for chunk, after in itertools.pairwise(cut):
            assert computed([*chunk, after[0]]) > budget


def test_a_group_that_is_too_large_is_cut():
    """Eight responses of 10 tokens to a prompt of 20: 100 tokens with a shared prompt, 240 without."""
    lengths, groups, shared = [30] * 8 + [5], [*"aaaaaaaa", "b"], [20] * 8 + [0]
    assert Budget(100).cut(lengths, groups, shared) == [list(range(8)), [8]]
    assert Budget(60).cut(lengths, groups, shared) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert Budget(100, 6).cut(lengths, groups, shared) == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    assert Budget(100).cut(lengths) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_rows_have_the_same_order_in_every_cut():
    """So scoring and the update compute the same rows to the last bit."""
    lengths = [5, 9, 5, 9, 2]
    (whole,) = Budget(100).cut(lengths)
    assert whole == [1, 3, 0, 2, 4]
    (some,) = Budget(100).cut([lengths[row] for row in (0, 2, 3)])
    assert [(0, 2, 3)[row] for row in some] == [3, 0, 2]


def test_in_order_puts_rows_back():
    lengths = [3, 1, 4, 1, 5, 9, 2, 6]
    cut = Budget(10).cut(lengths)
    assert len(cut) > 2
    assert in_order(([lengths[row] for row in chunk] for chunk in cut), cut) == lengths
    assert in_order([], []) == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_processes", [1, 2, 3, 8])
def test_processes_get_equal_rows_and_about_equal_tokens(seed, num_processes):
    draw = random.Random(seed)
    lengths = [max(1, int(draw.lognormvariate(4.4, 0.7))) for _ in range(draw.randint(0, 64))]
    hands = deal(lengths, num_processes)
    assert sorted(row for hand in hands for row in hand) == list(range(len(lengths)))
    sizes = [len(hand) for hand in hands]
    assert max(sizes) - min(sizes) <= 1
    tokens = [sum(lengths[row] for row in hand) for hand in hands]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)
    assert deal(lengths, num_processes) == hands


def test_passes_that_hold_all_logits_hold_a_limited_number_of_them():
    policy = llama()
    vocabulary = policy.config.vocab_size
    assert budget_of_logits(policy, Budget(1 << 40, rows=3)) == Budget(MAX_LOGITS // vocabulary, rows=3)
    assert budget_of_logits(policy, Budget(5)) == Budget(5)


def test_chosen_rows_are_as_wide_as_the_longest_of_them():
    """As wide as the log-probabilities of another pass over them, which a resumed update computes."""
    responses = [Response([7] * length, [], True) for length in (5, 2, 3)]
    batch = UpdateBatch([PromptRow("", [1], None)] * 3, responses, *torch.arange(15).view(3, 5).expand(7, 3, 5))
    chosen = select(batch, [2, 1])
    assert chosen.logprobs.tolist() == [[10, 11, 12], [5, 6, 7]]
    assert select(batch, []).logprobs.shape == (0, 0)


@pytest.mark.parametrize("num_processes", [2, 4, 8])
@pytest.mark.parametrize("samples", [1, 8])
def test_a_ppo_minibatch_is_dealt_evenly(num_processes, samples):
    """Every row once, and the slowest process has little more work than the mean. Shared prompts count once."""
    draw = random.Random(num_processes)
    rows = []
    for prompt in range(128 // samples):
        ids = [prompt] * draw.randint(4, 200)
        rows += [(PromptRow("", ids, None), Response([1] * int(draw.lognormvariate(3.5, 0.8) + 1), [], True))] * samples
    batch = UpdateBatch(*map(list, zip(*rows, strict=True)), *[torch.zeros(0)] * 7)
    most = []
    for seed in range(20):
        minibatch = random.Random(seed).sample(range(128), 64)
        hands = [rows_of_process(batch, minibatch, World(rank, num_processes, CPU)) for rank in range(num_processes)]
        assert sorted(itertools.chain(*hands)) == sorted(minibatch)
        assert all(hand == sorted(hand) for hand in hands)
        tokens = [
            sum(map(len, {tuple(rows[i][0].ids) for i in hand})) + sum(len(rows[i][1].ids) for i in hand)
            for hand in hands
        ]
        most.append(max(tokens) / statistics.fmean(tokens))
    assert statistics.fmean(most) < (1.1 if samples == 1 else 1.6)


def test_responses_that_share_no_prefix_count_in_full():
    """Equal responses to a prompt share nothing, and neither do responses to a very short prompt."""
    policy = llama()
    prepare(policy, CPU)
    answer = Response([1] * 10, [], True)
    for prompt, responses, most in (
        ([5] * 90, [answer] * 16, 200),
        ([5] * 7, [Response([i] * 3, [], True) for i in range(40)], 64),
        ([5] * 90, [Response([i] * 10, [], True) for i in range(16)], 200),
    ):
        prompts = [PromptRow("", prompt, None)] * len(responses)
        cut = cut_responses(Budget(most), policy, prompts, responses)
        assert sorted(itertools.chain(*cut)) == list(range(len(responses)))
        sizes = []
        for part in cut:
            batch = pack([prompt + responses[i].ids for i in part], groups=[0] * len(part))
            sizes.append(len(batch.ids))
        assert max(sizes) <= most
    assert len(cut) == 2, "different answers to a long prompt share it: 90 + 11 * 10"


def test_a_padded_row_counts_its_longest_answer_for_each():
    item = RankedIds([[1] * 500, [1] * 20, [2] * 20], None)
    packed = llama()
    prepare(packed, CPU)
    assert rm_stage._num_tokens(item, packed) == 500 + 20 + 20
    padded = copy.deepcopy(packed)
    padded.set_attn_implementation("sdpa")
    assert rm_stage._num_tokens(item, padded) == 3 * 500
    assert rm_stage._num_tokens(RankedIds([[1] * 30 + [2], [1] * 30 + [3, 4]], None), packed) == 33
    assert rm_stage._num_tokens(RankedIds([[1] * 7 + [2], [1] * 7 + [3, 4]], None), packed) == 17


SIZES = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "llama": {**SIZES, "num_key_value_heads": 2, "head_dim": 48},
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neox": SIZES,
    "mixtral": {**SIZES, "intermediate_size": 160, "num_key_value_heads": 2, "num_local_experts": 8}
    | {"num_experts_per_tok": 2},
}


def model_of(name, vocabulary=300):
    """A model that is wide enough that norms and biases hardly count."""
    config = AutoConfig.for_model(name, vocab_size=vocabulary, **MODELS[name])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if name == "mixtral":
        model.set_experts_implementation("eager")
    return model


def counted(model, length, *, backward):
    """The operations of a pass over one sequence, as torch counts them."""
    ids = torch.arange(length)[None] + 3
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=ids, use_cache=False).logits.square().mean()
        if backward:
            loss.backward()
    return counter.get_total_flops()


def unseen(work, length):
    """torch multiplies all pairs of tokens; our count has only the visible pairs."""
    return 4 * work.width * (length * length - length * (length + 1) // 2)


@pytest.mark.parametrize("name", MODELS)
def test_operations_equal_those_that_torch_counts(name):
    model, length = model_of(name), 240
    work = work_of(model)
    forward = work.forward([length], length)
    assert counted(model, length, backward=False) == pytest.approx(forward + unseen(work, length), rel=0.02)
    assert counted(model, length, backward=True) == pytest.approx(3 * (forward + unseen(work, length)), rel=0.02)
    assert work.training([length], length) == 3 * forward
    assert work.forward([15, 25], 7) == work.forward([15], 3) + work.forward([25], 4)


@pytest.mark.parametrize("part", ["layers", "head"])
def test_a_frozen_weight_costs_no_gradient(part):
    model, length = model_of("llama", 300 if part == "layers" else 4000), 240
    for p in model.model.layers.parameters() if part == "layers" else model.lm_head.parameters():
        p.requires_grad_(False)
    work = work_of(model)
    trained, whole = (work.trained, work.weights) if part == "layers" else (work.trained_head, work.head)
    assert trained < 0.01 * whole
    assert work.weights + work.head < 3 * whole, "otherwise it would hardly count"
    expected = work.training([length], length) + 3 * unseen(work, length)
    assert counted(model, length, backward=True) == pytest.approx(expected, rel=0.02)


def test_a_shared_prompt_counts_once():
    work = work_of(model_of("llama"))
    prompt, answers = 20, [5, 7, 6]
    lengths = [prompt + n for n in answers]
    behind = [work.forward([prompt + n], n) - work.forward([prompt], 0) for n in answers]
    shared = [0, prompt, prompt]
    assert work.forward(lengths, sum(answers), shared) == work.forward([prompt], 0) + sum(behind)
    assert work.training(lengths, sum(answers), shared) == 3 * work.forward(lengths, sum(answers), shared)
    rows = [PromptRow("", [1] * 9, None), PromptRow("", [2] * 4, None), PromptRow("", [1] * 9, None)]
    assert shared_prompts(rows) == [0, 0, 9]


class Two(World):
    """The first of two processes; the other did the same work."""

    def sum_floats(self, values):
        return {key: 2 * value for key, value in values.items()}


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(at=100.0)
    monkeypatch.setattr(speed, "time", SimpleNamespace(monotonic=lambda: now.at))
    return now


def test_speed_metrics_by_hand(clock):
    watch = Speed("sft", Two(0, 2, CPU))
    assert watch.line().startswith("speed: no step; time:"), "a resumed run that had taken its last step"
    watch.peak_flops = 1000.0
    with watch.phase("data"):
        clock.at += 1
    with watch.phase("step"):
        clock.at += 4
    watch.count("step", tokens=100, flops=600)
    row = watch.row()
    assert row.pop("memory/peak_gb") > 0
    assert row == {
        "time/data_s": 1.0,
        "time/step_s": 4.0,
        "time/evaluation_s": 0.0,
        "time/checkpoint_s": 0.0,
        "speed/step_tokens_per_s": 50.0,  # 2 x 100 in 4 s
        "speed/step_mfu": 0.15,  # 2 x 600 of 2 x 1000 x 4
    }
    # Work between two rows is in the second one, and nothing counts twice.
    watch.count("checkpoint", seconds=2.5)
    with watch.phase("evaluation"):
        clock.at += 0.5
    row = watch.row()
    assert (row["time/checkpoint_s"], row["time/evaluation_s"], row["time/step_s"]) == (2.5, 0.5, 0.0)
    assert row["speed/step_tokens_per_s"] == 0.0
    clock.at = 110.0
    line = watch.line()
    assert line.startswith("speed: step 50 tokens/s (MFU 15%); peak 0 GFLOPS; time:")
    assert "time: data 10%, step 40%, evaluation 5%, checkpoint 25%, rest 20%; peak memory" in line
    assert "\n" not in line


def test_the_tokens_of_a_step_exclude_padding(make_model, run_stage, tmp_path, monkeypatch):
    batches, real = [], sft_stage._accumulate

    def watched(model, batch, *rest):
        batches.append(sum(len(example.ids) for example in batch))
        return real(model, batch, *rest)

    monkeypatch.setattr(sft_stage, "_accumulate", watched)
    place = run_stage("sft", tmp_path, model={"path": str(make_model("llama"))})
    rows = [row for row in read_jsonl(place / "metrics.jsonl") if "loss/sft" in row]
    found = [row["speed/step_tokens_per_s"] * row["time/step_s"] for row in rows]
    # Seconds are written with four decimals.
    assert found == pytest.approx(batches, rel=0.05)
