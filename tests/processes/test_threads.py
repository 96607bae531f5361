"""Passes in threads: their order and errors, and that every stage has the same bytes on 1, 2, 3 and 4 of them."""

import itertools
import threading
import time

import pytest
import torch
from torch import nn

from rlhf_cli.data import batches
from rlhf_cli.data.batches import Budget
from rlhf_cli.decoders import paged
from rlhf_cli.decoders.paged import PagedDecoder
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.forward import autocast
from rlhf_cli.models.load import load_policy, prepare
from rlhf_cli.processes import environment, microbatches, threads
from rlhf_cli.processes.distributed import ALONE
from rlhf_cli.processes.microbatches import GradientSum, over_microbatches
from rlhf_cli.processes.threads import in_threads, use_threads
from rlhf_cli.rollout import sampling
from rlhf_cli.rollout.sampling import Sampling, draw_uniforms, sample
from support.forked import Forked
from support.runs import run_forked
from support.tiny import CPU, read_jsonl, tiny_model

COUNTS = (1, 2, 3, 4)


@pytest.fixture(autouse=True)
def _as_before():
    yield
    use_threads(None)


@pytest.fixture
def small_parts(monkeypatch):
    """Cut the few tokens of a test into several microbatches, and its responses into several groups."""
    monkeypatch.setattr(batches, "PART_TOKENS", 24)
    monkeypatch.setattr(paged, "GROUP_NUMBERS", 1)


# --------------------------------------------------------------------------------------------- the scheduler


def together(count):
    """Tasks that end only if all of them run at the same time."""
    barrier = threading.Barrier(count)
    return [lambda number=number: (barrier.wait(10), number)[1] for number in range(count)]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_as_many_tasks_as_threads_run_at_the_same_time_and_come_in_order(count):
    use_threads(count)
    assert list(in_threads(together(count))) == list(range(count))


def test_a_thread_does_not_wait_for_a_longer_task_before_its_own():
    use_threads(2)
    begun = threading.Event()
    tasks = [lambda: begun.wait(10), lambda: True, lambda: begun.set() or True]
    assert list(in_threads(tasks)) == [True, True, True]


def test_only_one_task_more_than_threads_runs_or_waits_to_be_taken():
    use_threads(2)
    begun = []
    results = in_threads([lambda number=number: begun.append(number) or number for number in range(6)])
    assert next(results) == 0
    assert len(begun) <= 4  # the first, and three after it
    assert list(results) == [1, 2, 3, 4, 5]


def test_a_task_sees_the_gradient_mode_of_its_caller_and_one_core():
    use_threads(2)
    with torch.no_grad():
        assert list(in_threads([torch.is_grad_enabled] * 2)) == [False, False]
    assert list(in_threads([torch.is_grad_enabled] * 2)) == [True, True]
    assert list(in_threads([torch.get_num_threads] * 2)) == [1, 1]


def test_an_error_is_raised_when_the_tasks_beside_it_have_ended():
    use_threads(2)
    ended, begun, fails = [], threading.Event(), threading.Event()

    def fail():
        begun.wait(10)
        fails.set()
        raise ValueError("this one")

    def slow():
        begun.set()
        fails.wait(10)
        ended.append(1)

    with pytest.raises(ValueError, match="this one"):
        list(in_threads([fail, slow, slow, lambda: ended.append("never begun")]))
    assert ended in ([1], [1, 1])
    assert list(in_threads(together(2))) == [0, 1]


def test_a_task_without_memory_is_computed_again_with_none_beside_it():
    use_threads(2)
    running = set()

    def greedy(number):
        running.add(number)
        try:
            if threading.current_thread() is not threading.main_thread() and number in (2, 4):
                raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
            time.sleep(0.1)
            return number, len(running)
        finally:
            running.remove(number)

    results = list(in_threads([lambda number=number: greedy(number) for number in range(6)]))
    assert [number for number, _ in results] == list(range(6))
    assert (results[2], results[4]) == ((2, 1), (4, 1))
    with pytest.raises(RuntimeError, match="another"):
        list(in_threads([lambda: (_ for _ in ()).throw(RuntimeError("another"))] * 2))


def test_a_task_computes_its_own_passes_in_turn():
    use_threads(2)
    nested = [lambda: list(in_threads([threading.get_ident] * 3)) for _ in range(2)]
    assert all(len(set(idents)) == 1 for idents in in_threads(nested))


def test_a_child_of_fork_has_threads_of_its_own(tmp_path):
    code = """
import os
from rlhf_cli.processes.threads import in_threads, use_threads
use_threads(2)
assert list(in_threads([os.getpid] * 4)) == [os.getpid()] * 4
child = os.fork()
if not child:
    os._exit(0 if list(in_threads([os.getpid] * 4)) == [os.getpid()] * 4 else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    code_of_exit, output = Forked(code, folder=tmp_path, log=tmp_path / "log").wait()
    assert code_of_exit == 0, output


def test_the_cores_of_a_container_are_counted(monkeypatch, tmp_path):
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(environment, "CGROUP", tmp_path / "cpu.max")
    assert environment.num_cores() == 8  # no limit is set here
    for text, cores in (("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1), ("1600000 100000", 8)):
        environment.CGROUP.write_text(text)
        assert environment.num_cores() == cores


def test_omp_num_threads_is_the_default(monkeypatch):
    for value, count in (("3", 3), ("2,1", 2), ("", environment.num_cores()), (None, environment.num_cores())):
        monkeypatch.setenv("OMP_NUM_THREADS", value) if value is not None else monkeypatch.delenv("OMP_NUM_THREADS")
        use_threads(None)
        assert threads.num_threads() == count


# ------------------------------------------------------------------------------------------------ the cut


def test_the_cut_depends_on_the_rows_alone_and_its_parts_are_about_equal():
    lengths = [int(n) for n in torch.randint(40, 160, (64,), generator=torch.Generator().manual_seed(0))]
    cut = Budget(2048, parts=1).cut(lengths)
    sizes = [sum(lengths[row] for row in chunk) for chunk in cut]
    assert sorted(row for chunk in cut for row in chunk) == list(range(64))
    assert len(cut) == 4
    assert max(sizes) - min(sizes) < 40
    small = Budget(400, parts=1).cut(lengths)
    assert small == Budget(400, parts=2).cut(lengths)
    assert max(sum(lengths[row] for row in chunk) for chunk in small) <= 400
    assert max(map(len, small)) - min(map(len, small)) <= 2, "not as few as possible"
    assert Budget(400, parts=2).cut([500, 20]) == Budget(400).cut([500, 20])
    assert Budget(400, parts=2).cut([]) == []
    groups = Budget(2048, parts=2).cut([300] * 8, groups=[0, 1, 2, 3] * 2, shared=[200] * 8)
    assert sorted(map(sorted, groups)) == [[0, 2, 4, 6], [1, 3, 5, 7]], "rows of a group stay together"


@pytest.mark.parametrize("fewest", [batches.PART_TOKENS, batches.PART_TOKENS_OF_LARGE])
@pytest.mark.parametrize("parts", [1, 2])
def test_up_to_four_microbatches_are_small_and_more_are_larger(parts, fewest):
    counts = {}
    for total in range(32, 20 * fewest, 32):
        cut = Budget(10**6, parts=parts, part_tokens=fewest).cut([32] * (total // 32))
        counts.setdefault(len(cut), total / fewest)
    assert counts == ({1: 32 / fewest, 2: 2.5, 4: 5, 8: 16} if parts == 1 else {1: 32 / fewest, 2: 1.5, 4: 5, 8: 16})


# ------------------------------------------------------------------------------------------- sums of gradients


def test_the_sum_of_gradients_has_the_bytes_of_one_thread():
    torch.manual_seed(0)
    one, two = (nn.Sequential(nn.Embedding(50, 24), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)) for _ in range(2))
    rows = torch.randint(50, (40, 9))

    def loss_of(model):
        def loss(part):
            value = model(rows[list(part)]).square().sum()
            return value, {"loss": value.detach()}

        return loss

    sums = []
    for count in COUNTS:
        use_threads(count)
        for model in (one, two):
            model.zero_grad()
        gradients = GradientSum(ALONE, lambda loss: loss, one, two)
        pieces = [range(first, first + 5) for first in range(0, 40, 5)]
        stats = gradients.add(pieces, loss_of(one), loss_of(two))
        gradients.receive()
        sums.append(([w.grad.clone() for m in (one, two) for w in m.parameters()], stats))
    for other, stats in sums[1:]:
        assert all(torch.equal(a, b) for a, b in zip(sums[0][0], other, strict=True))
        assert stats == sums[0][1]


def test_a_number_of_threads_that_is_none_is_one_line(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "two")
    use_threads(None)
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS: found two, must be a number of threads"):
        threads.num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert threads.num_threads() == 3


def test_models_with_state_in_their_passes_are_computed_in_turn():
    use_threads(2)
    model = nn.Linear(2, 2)
    text = type("Config", (), {"rope_parameters": {"rope_type": "dynamic"}})
    of_text_and_images = type("Config", (), {"get_text_config": lambda: text})
    for model.config in (text, of_text_and_images):
        assert set(over_microbatches([[1], [2]], lambda _: threading.current_thread(), models=[model])) == {
            threading.current_thread()
        }
    del model.config
    found = over_microbatches([[1], [2]], lambda _: threading.current_thread(), models=[model])
    assert threading.current_thread() not in found
    assert not microbatches._can_thread([nn.Linear(2, 2, device="meta")])


# --------------------------------------------------------------------------------------- responses and stages


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt2 wide", "qwen2"])
@pytest.mark.parametrize(("live", "precision"), [(None, "float32"), (40, "float32"), (None, "bfloat16")])
def test_responses_have_the_bytes_of_one_thread(architecture, live, precision, make_model, small_parts):  # noqa: ARG001
    """A library may take another sum where a product has more rows: one thread reads 400 tokens, each of four 100."""
    wide = architecture == "gpt2 wide"
    model = tiny_model("gpt2", n_embd=256, vocab_size=300) if wide else load_policy(str(make_model(architecture)))
    prepare(model, CPU)
    prompts = [[(5 * row + i) % 250 + 3 for i in range(1 + row % 11)] for row in range(70)]
    uniforms = draw_uniforms(0, "threads", 0, 70, 24)
    found = []
    for count in COUNTS:
        use_threads(count)
        with autocast(CPU, precision):
            responses = sample(model, prompts, uniforms, Sampling(stop=frozenset(range(3, 12))), max_live_rows=live)
        found.append([(one.ids, one.logprobs, one.ended) for one in responses])
    assert found[1:] == found[:1] * 3


@pytest.mark.parametrize("error", [lambda rows: 1e-6 * rows, lambda rows: 1e-6 * (rows > 200)])
def test_rows_are_decoded_in_threads_only_if_their_bytes_are_the_same(error, make_model, monkeypatch, small_parts):  # noqa: ARG001
    model = load_policy(str(make_model("llama")))
    prepare(model, CPU)
    decoder = PagedDecoder(model, 40)
    use_threads(1)
    assert [new().cache.fewest_rows for new in decoder.apart(48)] == [paged.FEWEST_ROWS], (
        "steps as wide as of 3 threads"
    )
    assert [new() for new in decoder.apart(2 * paged.FEWEST_ROWS - 1)] == [decoder]
    use_threads(3)
    assert len(decoder.apart(48)) == 3
    forward = PagedDecoder.step

    def depends_on_the_rows_beside(self, ids):
        return forward(self, ids) + error(len(ids))

    other = load_policy(str(make_model("llama")))
    prepare(other, CPU)
    monkeypatch.setattr(PagedDecoder, "step", depends_on_the_rows_beside)
    assert len(PagedDecoder(other, 40).apart(48)) == 1


@pytest.mark.parametrize("settings", [{"top_p": 0.8}, {"no_repeat_ngram_size": 1}], ids=str)
def test_a_group_of_responses_without_memory_is_drawn_again_from_its_beginning(
    settings,
    make_model,
    monkeypatch,
    small_parts,  # noqa: ARG001
):
    model, calls, forward = load_policy(str(make_model("llama"))), itertools.count(1), PagedDecoder.step
    prepare(model, CPU)
    monkeypatch.setattr(paged, "_rows_are_independent", lambda _: True)
    use_threads(2)

    def step(self, ids):
        logits = forward(self, ids)
        if next(calls) == 9:
            raise MemoryError
        return logits

    given = model, [[5, 6, 7]] * 40, draw_uniforms(0, "again", 0, 40, 12), Sampling(**settings)
    wanted = sample(*given)
    monkeypatch.setattr(PagedDecoder, "step", step)
    assert sample(*given) == wanted
    assert next(calls) > 23, "one of two groups began twice"


OPTIONS = {
    "sft": {},
    "rm": {},
    "ppo": {},
    "ppo bfloat16": {"precision": "bfloat16"},
    "ppo full": {"policy": {"lora": {"r": 2}}, "ppo": {"kl_estimator": "full", "kl_in": "loss"}},
    "ppo one backbone": {"value_model": {"init": "shared"}, "ppo": {"old_logprobs": "recomputed"}},
}


def files_of(stage):
    """The bytes of a stage's models and samples, and its metrics without times."""
    measured = ("time/", "speed/", "memory/")
    rows = [
        {key: value for key, value in row.items() if not key.startswith(measured)}
        for row in read_jsonl(stage / "metrics.jsonl")
    ]
    models = {str(path.relative_to(stage)): path.read_bytes() for path in stage.rglob("*.safetensors")}
    return models | {"metrics": rows, "samples": (stage / "samples.jsonl").read_bytes()}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_stage_has_the_bytes_of_one_thread(name, pipeline, run_stage, small_parts, tmp_path, request):  # noqa: ARG001
    stage, of_model = name.split()[0], pipeline("llama")
    model = {"sft": {"model": {"path": str(of_model / "sft")}}, "rm": {"model": {"path": str(of_model / "sft")}}}
    inputs = model.get(stage, {"rewards": [{"type": "reward_model", "path": str(of_model / "rm")}]})
    if stage == "ppo":
        inputs["policy"] = {"path": str(of_model / "sft")} | OPTIONS[name].get("policy", {})
        sizes = {"num_iterations": 1, "rollout_batch_size": 48, "minibatch_size": 16}
        inputs["ppo"] = sizes | OPTIONS[name].get("ppo", {})
    found = []
    for count in COUNTS if name == "sft" else (1, 3):
        changes = OPTIONS[name] | inputs | {"threads": count}
        found.append(files_of(run_stage(stage, tmp_path / str(count), **changes)))
    assert all(one == found[0] for one in found[1:])


def test_few_passes_of_a_large_model_use_several_cores_each(monkeypatch):
    use_threads(4)
    monkeypatch.setattr(threads, "LARGE", 5)
    large, small = nn.Linear(2, 2), nn.Linear(2, 1)

    def counts(microbatches, model, **options):
        return over_microbatches(microbatches, lambda _: torch.get_num_threads(), models=[model], **options)

    assert (counts([[1], [2]], large), counts([[1], [2]], small)) == ([2, 2], [1, 1])
    assert counts([[1]], large) == [4]
    assert counts([[1], [2]], large, in_turn=True) == [4, 4]
    assert torch.get_num_threads() == 1


def test_all_cores_share_the_decoding_steps_of_few_responses_of_a_model_that_is_not_small(monkeypatch, make_model):
    use_threads(2)
    model, seen = load_policy(str(make_model("llama"))), []
    decode = sampling._decode

    def watched(*given):
        seen.append(torch.get_num_threads())
        return decode(*given)

    monkeypatch.setattr(sampling, "_decode", watched)
    monkeypatch.setattr(paged, "_rows_are_independent", lambda _: True)  # as the processor's products decide otherwise
    for weights, rows, cores in ((10**9, 4, [1]), (1, 4, [2]), (1, 32, [1, 1])):
        monkeypatch.setattr(sampling, "SHARED_STEP", weights)
        sample(model, [[1, 2]] * rows, draw_uniforms(0, "cores", 0, rows, 2), Sampling(), max_live_rows=64)
        assert seen == cores
        seen.clear()


def test_gradients_that_do_not_fit_twice_are_computed_in_turn(monkeypatch):
    use_threads(2)
    model, seen = nn.Linear(4, 1), []

    def loss(part):
        seen.append(threading.current_thread())
        return model(torch.ones(len(part), 4)).sum(), {}

    for copies, most in ((40, 2), (39, 1)):
        monkeypatch.setattr(microbatches, "COPIES_BYTES", copies)
        GradientSum(ALONE, lambda x: x, model).add([[1], [2]], loss)
        assert (threading.main_thread() not in seen) == (most == 2)
        seen.clear()


def test_two_processes_have_the_bytes_of_one_thread(pipeline, write_config, tmp_path):
    """Each sums its gradients in the order of its microbatches, before the processes add them."""
    found = []
    for count in (1, 3):
        options = {"model": {"path": str(pipeline("llama") / "sft")}, "training": {"microbatch_size": 1}}
        run_forked(2, "sft", write_config("sft", tmp_path / str(count), threads=count, **options))
        found.append(files_of(tmp_path / str(count) / "sft"))
    assert found[0] == found[1]
