"""The static decoder on a CPU: its step without a graph, and recorded by torch.fx instead of a CUDA graph.

Like a CUDA graph, a torch.fx recording fixes every shape, every Python number and every tensor's memory. The capture
itself needs a GPU; its tests are skipped without one.
"""

from __future__ import annotations

import copy
import inspect
import math
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_cli.config.models import Lora
from rlhf_cli.decoders import choose, network
from rlhf_cli.decoders import gpu as static_module
from rlhf_cli.decoders.base import UnsupportedError, difference
from rlhf_cli.decoders.choose import choose_decoder
from rlhf_cli.decoders.gpu import StaticDecoder, static_decoder
from rlhf_cli.decoders.plain import PlainDecoder
from rlhf_cli.models.adapters import adapters_off, add_lora
from rlhf_cli.rollout import sampling as sampling_module
from rlhf_cli.rollout.distribution import Sampling
from rlhf_cli.rollout.sampling import sample
from support.decoders import (
    FAST,
    LONGEST,
    PROMPTS,
    SAMPLINGS,
    UNIFORMS,
    VOCAB,
    Seen,
    check_against_plain,
    made,
    plain_logits,
    plain_responses,
    random_ids,
    same,
)
from support.gpu import needs_gpu
from support.tiny import read_jsonl

NAMES = ["llama", "llama one key head", "mistral", "qwen2", "qwen3", "gpt2"]
PRECISIONS = [torch.float32, torch.bfloat16]


def autocast(dtype):
    return nullcontext() if dtype == torch.float32 else torch.autocast("cpu", dtype)


class Recorded:
    """One step as torch.fx recorded it."""

    def __init__(self, decoder, num_rows, num_keys):
        decoder._step(num_rows, num_keys)
        self.replay = make_fx(lambda: decoder._step(num_rows, num_keys))()


def record(monkeypatch):
    """Make every decoder replay recorded steps."""
    monkeypatch.setattr(StaticDecoder, "_record", lambda *args: Recorded(*args))
    start = StaticDecoder.__init__

    def with_graphs(self, *args):
        start(self, *args)
        self.uses_graphs = True

    monkeypatch.setattr(StaticDecoder, "__init__", with_graphs)


def sampled_by(tier, model, prompts, uniforms, sampling, monkeypatch, **settings):
    """Responses that were certainly sampled by the static or the plain decoder."""
    made_decoders = []

    def chosen(model, longest, rows, _name):
        made_decoders.append(static_decoder(model, longest, rows) if tier == "static" else PlainDecoder(model))
        return made_decoders[-1]

    with monkeypatch.context() as patch:
        patch.setattr(sampling_module, "choose_decoder", chosen)
        responses = sample(model, prompts, uniforms, sampling, **settings)
    assert len(made_decoders) == 1
    return responses


def on_a_gpu(monkeypatch):
    """`auto` takes the static decoder."""
    monkeypatch.setattr(choose, "_decoder", lambda model, longest, rows, _name: static_decoder(model, longest, rows))


def why_not(model, longest=1):
    """Why the static decoder refuses a model; None if it takes it."""
    try:
        static_decoder(model, longest, 1)
    except UnsupportedError as reason:
        return str(reason)
    return None


@pytest.fixture
def small_buckets(monkeypatch):
    """Small buckets, so that these short texts cross some."""
    monkeypatch.setattr(static_module, "BUCKET", 16)
    monkeypatch.setattr(static_module, "READ_TOKENS", 60)


# --------------------------------------------------------------------------------------------- logits


def walk(decoder, num_steps):
    """Rows of different lengths. Some leave, others enter. Yields the texts and logits of each step."""
    texts, later = [list(prompt) for prompt in PROMPTS], random_ids(3, 66, 20, seed=8)
    logits = decoder.admit(PROMPTS)
    drawn = torch.Generator().manual_seed(5)
    for step in range(num_steps):
        yield texts, logits
        if step in (3, 20, 21, 40):
            stay = torch.tensor([i for i in range(len(texts)) if (i + step) % 3 != 0])
            decoder.keep(stay)
            texts = [texts[i] for i in stay]
        new = torch.randint(0, VOCAB, (len(texts),), generator=drawn)
        for text, token in zip(texts, new.tolist(), strict=True):
            text.append(token)
        logits = decoder.step(new).clone()
        if step in (5, 30):
            logits = torch.cat([logits, decoder.admit(later)])
            texts += [list(prompt) for prompt in later]


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize(
    ("name", "way"), [(name, "directly") for name in FAST] + [(name, "recorded") for name in ("llama", "qwen3", "gpt2")]
)
@torch.no_grad()
def test_the_logits_of_every_step_equal_a_plain_forward(name, way, monkeypatch):
    if way == "recorded":
        record(monkeypatch)
    seen, decoder = Seen(), StaticDecoder(made(name), 150, 12, torch.float32)
    for texts, logits in walk(decoder, 60):
        assert logits.dtype == torch.float32
        seen.add(texts, logits)
    assert check_against_plain(seen, made(name)) > 300
    if way == "recorded":
        num_rows, num_keys = zip(*decoder.graphs, strict=True)
        assert set(num_rows) == {12, 8, 4}
        assert len(set(num_keys)) > 2


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("name", FAST)
@torch.no_grad()
def test_bfloat16_is_as_close_to_float32_as_a_plain_forward(name):
    """On average over many logits. Only its copies of the weights and its order of sums may differ."""
    model, ours, theirs, size = made(name), 0.0, 0.0, 0.0
    seen, decoder = Seen(), StaticDecoder(model, 150, 12, torch.bfloat16)
    for texts, logits in walk(decoder, 45):
        seen.add(texts, logits)
    with autocast(torch.bfloat16):
        rounded = [plain.float() for _, plain, _ in seen.pairs(model)]
    for (rows, exact, _), plain in zip(seen.pairs(model), rounded, strict=True):
        ours += (rows - exact).square().sum().item()
        theirs += (plain - exact).square().sum().item()
        size += exact.square().sum().item()
    assert 0 < ours <= 1.3**2 * theirs
    assert theirs < 0.03**2 * size, "otherwise any result would pass"


@pytest.mark.usefixtures("small_buckets")
@torch.no_grad()
def test_a_step_reads_no_further_than_the_longest_row_needs(monkeypatch):
    shapes = []
    step = StaticDecoder._step
    monkeypatch.setattr(StaticDecoder, "_step", lambda self, *shape: shapes.append(shape) or step(self, *shape))
    decoder = StaticDecoder(made("llama"), 60, 7, torch.float32)
    decoder.admit(random_ids(14, 3, 2, 2, 2))
    for _ in range(4):
        decoder.step(torch.zeros(5, dtype=torch.int64))
    decoder.keep(torch.tensor([1, 4]))
    decoder.step(torch.zeros(2, dtype=torch.int64))
    decoder.admit(random_ids(40))
    decoder.step(torch.zeros(3, dtype=torch.int64))
    assert shapes == [(7, 16), (7, 16), (7, 32), (7, 32), (2, 16), (4, 48)]


@torch.no_grad()
def test_equal_prompts_are_read_once(monkeypatch):
    read, pack = [], static_module.pack
    monkeypatch.setattr(static_module, "pack", lambda prompts, device: read.extend(prompts) or pack(prompts, device))
    model, prompts = made("llama"), random_ids(20, 20, 3)
    decoder = StaticDecoder(model, 40, 5, torch.float32)
    logits = decoder.admit([prompts[0], prompts[1], prompts[0], prompts[2], prompts[1]])
    assert [list(prompt) for prompt in read] == prompts
    assert torch.equal(logits[0], logits[2])
    assert not torch.equal(logits[0], logits[1])
    with pytest.raises(ValueError, match="room for 5"):
        decoder.admit(prompts)


@torch.no_grad()
def test_a_new_row_does_not_read_values_of_an_old_one():
    """The slot of a row of NaN is used again. Places not written yet have weight 0, and 0 * NaN is NaN."""
    decoder = StaticDecoder(made("llama"), 60, 2, torch.float32)
    decoder.admit(random_ids(30, 5))
    for pool in (*decoder.keys, *decoder.values):
        pool[1] = math.nan
    decoder.keep(torch.tensor([0]))
    decoder.admit(random_ids(3))
    assert decoder.step(torch.tensor([1, 2])).isfinite().all()


@torch.no_grad()
def test_a_full_row_does_not_disturb_the_others():
    """Also if the model has a table of positions that ends there (GPT-2)."""
    decoder = StaticDecoder(made("gpt2"), 256, 2, torch.float32)
    text = random_ids(250, 100)
    decoder.admit(text)
    for step in range(12):
        logits = decoder.step(torch.tensor([1, 2]))
        text[1].append(2)
        assert (logits[1] - plain_logits(made("gpt2"), text[1])[-1]).abs().max() < 1e-3, step


# ---------------------------------------------------------------------------------- against the plain decoder


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "plain") for name in NAMES] + [(name, kind) for name in ("qwen2", "gpt2") for kind in SAMPLINGS],
)
def test_the_plain_decoder_draws_the_same_tokens(name, kind, monkeypatch):
    model = made(name)
    found = sampled_by("static", model, PROMPTS, UNIFORMS, SAMPLINGS[kind], monkeypatch)
    same(found, plain_responses(name, kind))
    if kind == "plain":
        assert len({len(r.ids) for r in found}) > 3


@pytest.mark.parametrize("name", NAMES)
def test_greedy_sampling_draws_the_same_tokens(name, monkeypatch):
    model, sampling = made(name), Sampling(top_k=1, stop=SAMPLINGS["plain"].stop)
    found = sampled_by("static", model, PROMPTS, UNIFORMS, sampling, monkeypatch)
    same(found, sampled_by("plain", model, PROMPTS, UNIFORMS, sampling, monkeypatch))


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize(
    ("name", "kind", "max_live_rows", "way"),
    [
        *(
            (name, kind, max_live_rows, "directly")
            for name in ("llama", "gpt2")
            for kind, max_live_rows in (("plain", 1), ("plain", 3), ("min_new_tokens", 7), ("endless", 7))
        ),
        ("llama", "plain", 7, "recorded"),
        ("gpt2", "endless", 3, "recorded"),
    ],
)
def test_a_limit_on_live_rows_changes_no_response(name, kind, max_live_rows, way, monkeypatch):
    """An ended row continues for a step or more, without an effect on its neighbours."""
    model, most = made(name), []
    if way == "recorded":
        record(monkeypatch)
    # The check at the first use of a model takes steps of two rows.
    sampled_by("static", model, PROMPTS[:1], UNIFORMS[:1, :2], SAMPLINGS[kind], monkeypatch)
    step = StaticDecoder.step
    monkeypatch.setattr(StaticDecoder, "step", lambda self, ids: most.append(len(ids)) or step(self, ids))
    found = sampled_by("static", model, PROMPTS, UNIFORMS, SAMPLINGS[kind], monkeypatch, max_live_rows=max_live_rows)
    same(found, plain_responses(name, kind))
    assert max(most) <= max_live_rows


def test_limited_memory_changes_no_response(monkeypatch):
    model = made("qwen2")
    whole = sampled_by("static", model, PROMPTS, UNIFORMS, SAMPLINGS["plain"], monkeypatch)
    monkeypatch.setattr(static_module, "_rows_that_fit", lambda _bytes, rows, _device: min(rows, 4))
    most, step = [], StaticDecoder.step
    monkeypatch.setattr(StaticDecoder, "step", lambda self, ids: most.append(len(ids)) or step(self, ids))
    same(sampled_by("static", model, PROMPTS, UNIFORMS, SAMPLINGS["plain"], monkeypatch), whole)
    assert max(most) == 4


def test_the_number_of_rows_follows_from_the_free_memory(monkeypatch):
    gpu = torch.device("cuda")
    for name, number in {"memory_reserved": 500, "memory_allocated": 300}.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, number=number: number)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (800, 5000))
    assert static_module._rows_that_fit(100, 64, gpu) == 8
    assert static_module._rows_that_fit(100, 5, gpu) == 5
    assert static_module._rows_that_fit(10**6, 5, torch.device("cpu")) == 5
    with pytest.raises(UnsupportedError, match="more than the GPU has free"):
        static_module._rows_that_fit(801, 64, gpu)


@torch.no_grad()
def test_a_row_takes_the_computed_memory(monkeypatch):
    reckoned = []
    monkeypatch.setattr(static_module, "_rows_that_fit", lambda size, rows, _: reckoned.append(size) or rows)
    for dtype in PRECISIONS:
        decoder = StaticDecoder(made("llama one key head"), 200, 5, dtype)
        pools = sum(pool.nbytes for pool in (*decoder.keys, *decoder.values))
        assert 5 * (reckoned.pop() - 16 * VOCAB) == pools


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_log_probabilities_in_bfloat16_are_close_to_the_models(name, monkeypatch):
    """As close as those of the plain decoder under the same autocast."""
    model, gaps = made(name), {}
    for tier in ("static", "plain"):
        with autocast(torch.bfloat16):
            responses = sampled_by(tier, model, PROMPTS, UNIFORMS, SAMPLINGS["plain"], monkeypatch)
        found, wanted = [], []
        for prompt, response in zip(PROMPTS, responses, strict=True):
            logprobs = plain_logits(model, [*prompt, *response.ids])[len(prompt) - 1 : -1].log_softmax(1)
            wanted.append(logprobs.gather(1, torch.tensor(response.ids)[:, None])[:, 0])
            found += response.logprobs
        gaps[tier] = (torch.tensor(found) - torch.cat(wanted)).square().mean().sqrt().item()
    assert 1e-4 < gaps["static"] <= 1.3 * gaps["plain"] < 0.2


def test_ppo_in_bfloat16_has_a_first_ratio_of_exactly_1(pipeline, run_stage, tmp_path, monkeypatch):
    """The old log-probabilities are recomputed by the training forward, so those of the sampler need only be close."""
    root, steps, step = pipeline("llama"), [], StaticDecoder.step
    on_a_gpu(monkeypatch)
    record(monkeypatch)
    monkeypatch.setattr(StaticDecoder, "step", lambda self, ids: steps.append(self.dtype) or step(self, ids))
    judge = {"path": str(root / "rm" / "model")}
    folder = run_stage(
        "ppo",
        tmp_path,
        precision="bfloat16",
        policy={"path": str(root / "sft" / "model")},
        value_model=judge,
        rewards=[{"type": "reward_model", **judge}],
    )
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "policy/first_ratio_error" in row]
    assert len(rows) == 2
    assert steps.count(torch.bfloat16) > 14
    assert [row["policy/first_ratio_error"] for row in rows] == [0.0, 0.0]
    assert all(1e-4 < row["policy/sampler_gap"] < 0.1 for row in rows)


# ----------------------------------------------------------------------------------------------- the weights


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
@torch.no_grad()
def test_a_new_decoder_samples_from_the_new_weights(name, dtype):
    model = copy.deepcopy(made(name))
    with autocast(dtype):
        before = static_decoder(model, 50, 10).admit(PROMPTS[:3])
        for number, weight in enumerate(model.parameters()):
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
        after = static_decoder(model, 50, 10).admit(PROMPTS[:3])
    assert difference(after, before) > 0.1
    wanted = torch.stack([plain_logits(model, prompt)[-1] for prompt in PROMPTS[:3]])
    assert difference(after, wanted) < (1e-4 if dtype == torch.float32 else 0.05)


@torch.no_grad()
def test_linear_layers_are_copied_in_bfloat16_and_not_in_float32():
    model = made("llama")
    addresses = {weight.data_ptr() for weight in model.parameters()}
    seen = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.mm, torch.ops.aten.linear):
                seen.extend(x for x in args if isinstance(x, torch.Tensor) and x.dim() == 2)
            return func(*args, **(kwargs or {}))

    decoder = StaticDecoder(model, 50, 2, torch.bfloat16)
    decoder.admit(random_ids(3, 4))
    with Products():
        decoder.step(torch.tensor([1, 2]))
    assert {x.dtype for x in seen} == {torch.bfloat16}
    assert len(seen) == 2 * (2 * 4 + 1)
    assert not addresses & {x.data_ptr() for x in seen}
    assert StaticDecoder(model, 50, 2, torch.float32).network.head is model.lm_head


@pytest.mark.parametrize(
    ("name", "targets", "dtype"),
    [
        ("llama", "all", torch.float32),
        ("llama", "some", torch.bfloat16),
        ("gpt2", "all", torch.bfloat16),
        ("gpt2", "some", torch.float32),
    ],
)
@torch.no_grad()
def test_adapters_count_and_can_be_disabled(name, targets, dtype, monkeypatch):
    pytest.importorskip("peft")
    record(monkeypatch)
    model = copy.deepcopy(made(name))
    some = ["c_attn"] if name == "gpt2" else ["q_proj", "down_proj"]
    add_lora(model, Lora(r=4, target_modules=None if targets == "all" else some), "policy.lora", seed=0)
    for key, weight in model.named_parameters():
        if "lora_B" in key:
            weight += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(key)))

    def gap(wanted):
        with autocast(dtype):
            decoder = static_decoder(model, 50, 10)
            decoder.admit([prompt[:-1] for prompt in PROMPTS[1:4]])
            found = decoder.step(torch.tensor([prompt[-1] for prompt in PROMPTS[1:4]]))
        return difference(found, torch.stack([plain_logits(wanted, prompt)[-1] for prompt in PROMPTS[1:4]]))

    most = 1e-4 if dtype == torch.float32 else 0.1
    assert gap(model) < most
    assert gap(made(name)) > 0.3
    with adapters_off(model):
        assert gap(made(name)) < most


# ------------------------------------------------------------------------------------- where it isn't used


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", FAST)
def test_the_static_decoder_supports_these_families(name, dtype):
    with autocast(dtype):
        assert static_decoder(made(name), 200, 4).dtype == dtype


@pytest.mark.parametrize("wrong", ["rotate", "packed_attention", "_rms_norm"])
def test_a_decoder_that_differs_from_the_model_is_refused(wrong, monkeypatch):
    """As with a release of transformers that computes something else."""
    on_a_gpu(monkeypatch)
    right = {
        "rotate": lambda x, _: x,
        "packed_attention": lambda _module, query, *_, **__: (query.transpose(1, 2), None),
        "_rms_norm": lambda module: lambda x: 1.001 * module(x),
    }
    monkeypatch.setattr(network if wrong == "rotate" else static_module, wrong, right[wrong])
    model = copy.deepcopy(made("llama"))
    with autocast(torch.bfloat16):
        assert "differs from a plain forward by" in why_not(model, 100)
        assert isinstance(choose_decoder(model, 100, 2), PlainDecoder)


def test_wrong_bfloat16_copies_are_refused(monkeypatch):
    """An error that float32 does not show: copies that are off by 2 %."""
    on_a_gpu(monkeypatch)
    linear_in = static_module._linear_in

    def worse(dtype):
        right = linear_in(dtype)
        return right if dtype == torch.float32 else lambda *modules: lambda x: 1.02 * right(*modules)(x)

    monkeypatch.setattr(static_module, "_linear_in", worse)
    model = copy.deepcopy(made("llama"))
    assert why_not(model, 100) is None, "in float32"
    with autocast(torch.bfloat16):
        assert "in bfloat16 the static decoder is" in why_not(model, 100)


def test_a_model_with_replaced_modules_is_checked_again(monkeypatch):
    on_a_gpu(monkeypatch)
    model = copy.deepcopy(made("llama"))
    assert why_not(model) is None
    block = model.model.layers[0]
    block.forward = lambda hidden, *_, **__: 2 * hidden
    block.extra = torch.nn.Identity()
    assert "differs" in why_not(model)
    model.model.layers[1].mlp = torch.nn.Identity()
    assert "AttributeError" in why_not(model)


@pytest.mark.parametrize("way", ["a bfloat16 model", "float16"])
def test_other_precisions_are_refused(way, monkeypatch):
    on_a_gpu(monkeypatch)
    model = copy.deepcopy(made("llama"))
    if way == "a bfloat16 model":
        model = model.to(torch.bfloat16)
    with nullcontext() if way == "a bfloat16 model" else torch.autocast("cpu", torch.float16):
        assert "weights in float32" in why_not(model)


def test_a_failing_capture_is_a_reason_and_not_a_traceback(monkeypatch):
    on_a_gpu(monkeypatch)
    record(monkeypatch)

    def fails(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(StaticDecoder, "_record", fails)
    assert "RuntimeError" in why_not(copy.deepcopy(made("llama")))


# --------------------------------------------------------------------------------------------- the recording


def test_a_graph_is_recorded_as_torch_documents(monkeypatch):
    """Warm-up on a side stream, then the capture of the same step, with arguments that torch accepts."""
    log, takes = [], inspect.signature(torch.cuda.graph)

    @contextmanager
    def within(name):
        log.append(name)
        yield
        log.append(f"{name} ends")

    def capture(*args, **kwargs):
        assert takes.bind(*args, **kwargs).arguments["capture_error_mode"] == "thread_local"
        return within("capture")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "a stream")
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "a graph")
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(StaticDecoder, "_step", lambda _, *shape: log.append(shape))
    with torch.no_grad():
        decoder = StaticDecoder(made("llama"), 50, 4, torch.float32)
    assert decoder._record(4, 128) == "a graph"
    warm_up = ["wait", "a stream", (4, 128), (4, 128), (4, 128), "a stream ends", "wait"]
    assert log == [*warm_up, "capture", (4, 128), "capture ends"]


# ------------------------------------------------------------------------------------------ nothing is waited for


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@torch.no_grad()
def test_the_host_never_waits_for_the_device(name, dtype, monkeypatch):
    """Meta tensors raise if their values are read, or if they are mixed with tensors of the host."""
    monkeypatch.setattr(StaticDecoder, "_autocast", lambda _: nullcontext())
    model = copy.deepcopy(made(name)).to("meta")
    decoder = StaticDecoder(model, 60, 4, dtype)
    assert decoder.admit([[1, 2, 3], [4, 5], [1, 2, 3]]).device.type == "meta"
    for _ in range(3):
        assert decoder.step(torch.zeros(3, dtype=torch.int64, device="meta")).shape == (3, VOCAB)


def test_the_sampler_reads_one_number_per_step_one_step_late(monkeypatch):
    asked, steps, read = [], [], []

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
                asked.append(func)
            return func(*args, **(kwargs or {}))

    model, step, read_count = made("llama"), StaticDecoder.step, sampling_module._Count.read
    monkeypatch.setattr(StaticDecoder, "step", lambda self, ids: steps.append(len(read)) or step(self, ids))
    monkeypatch.setattr(sampling_module._Count, "read", lambda self: read.append(len(steps)) or read_count(self))
    monkeypatch.setattr(static_module, "_why_not", lambda *_: "")
    with Asked():
        sampled_by("static", copy.deepcopy(model), PROMPTS, UNIFORMS, Sampling(), monkeypatch)
    assert len(steps) == LONGEST, "the last step is wasted"
    assert steps[:4] == [0, 1, 2, 3], "before a step, the counts of all steps but the last have been read"
    assert len(asked) == len(read) + 2, "the tokens of all prompts, which the host has, and who stays at the end"


# --------------------------------------------------------------------------------------------- on a GPU only


@needs_gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", PRECISIONS)
@torch.no_grad()
def test_a_replayed_graph_equals_the_step(name, dtype):
    model = copy.deepcopy(made(name)).to("cuda")
    direct, replayed = (StaticDecoder(model, 200, 4, dtype) for _ in range(2))
    direct.uses_graphs = False
    prompts = random_ids(120, 5, 3)
    near = 1e-5 if dtype == torch.float32 else 1e-2
    assert difference(direct.admit(prompts), replayed.admit(prompts)) < near
    for i in range(20):
        ids = torch.tensor([i, 2 * i, 3 * i], device="cuda")
        if i == 12:
            for decoder in (direct, replayed):
                decoder.keep(torch.tensor([0, 2], device="cuda"))
        ids = ids[: len(direct.lengths)]
        assert difference(direct.step(ids), replayed.step(ids)) < near, i
    assert set(replayed.graphs) == {(4, 128), (4, 256), (2, 256)}


@needs_gpu
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_the_static_decoder_samples_on_a_gpu(name, dtype):
    model = copy.deepcopy(made(name)).to("cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        assert why_not(model, 200) is None
        found = sample(model, PROMPTS, UNIFORMS, replace(SAMPLINGS["plain"], decoder="static"), max_live_rows=4)
    assert [len(r.ids) > 0 for r in found] == [True] * len(PROMPTS)
    if dtype == torch.float32:
        same(found, sample(made(name), PROMPTS, UNIFORMS, SAMPLINGS["plain"]))
