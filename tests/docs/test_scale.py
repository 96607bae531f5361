"""The page about 8 to 1,024 GPUs against its generator, and the generator against hand computation."""

import pytest

from support.paths import ROOT
from support.source import module_at

PAGE = ROOT / "benchmarks" / "SCALE.md"
SEVEN_B = 6_738_415_616  # parameters of Llama 2 7B, as published
ENDS = 2 * 32000 * 4096  # those of its embeddings and its head
PASS = 2 * (SEVEN_B - ENDS) + 4 * ENDS
"""Bytes that a pass of it gathers. Norms are counted with the ends, which changes little."""
SCORER = SEVEN_B - ENDS // 2  # parameters of a sequence classifier of its shape: no head over the vocabulary
PASS_OF_SCORER = PASS - 2 * ENDS


@pytest.fixture(scope="module")
def page():
    return module_at(PAGE.with_name("scale.py"))


@pytest.fixture(scope="module")
def text():
    return PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(("gpus", "shard"), [(8, True), (1024, True), (64, "hybrid")])
def test_a_step_of_7_b_by_hand(page, text, gpus, shard):
    plan = page.planned("7 B", gpus, shard=shard)
    shape = plan.models[0].shape
    assert shape.weights == SEVEN_B
    parts = plan.peak.parts
    divided = 8 if shard == "hybrid" else gpus
    assert parts["weights"] + parts["optimizer"] == pytest.approx(12 * SEVEN_B / divided)
    inside = (2 * PASS + 4 * SEVEN_B) * (divided - 1) / divided
    between = 2 * 4 * SEVEN_B * 7 / 8 if shard == "hybrid" else inside if gpus > 8 else 0.0
    sent = page.sent_in_step(shape, gpus, shard)
    assert (sent.inside, sent.between) == pytest.approx((inside, between), rel=1e-4)
    computes, sends = page.computing(shape), max(inside / 400e9, between / 320e9)
    row = page.sft_row("7 B", gpus, shard)
    by_hand = [f"{plan.peak.total / 1e9:.0f}", f"{inside / 1e9:.0f} / {between / 1e9:.0f}", f"{computes:.1f}"]
    assert row[3:] == [*by_hand, f"{sends:.1f}", f"{max(inside / 400e9, between / 40e9):.1f}"]
    assert f"| {' | '.join(row)} |" in text, "run python benchmarks/scale.py"


@pytest.mark.parametrize(("shard", "copies"), [(True, True), ("hybrid", False)])
def test_an_iteration_of_ppo_of_7_b_by_hand(page, text, shard, copies):
    models = page.models_of(page.planned_ppo("7 B", 64, shard, copies=copies))
    assert [shape.weights for shape in models] == pytest.approx([SEVEN_B, SCORER, SEVEN_B, SCORER], rel=1e-5)
    sent = page.sent_in_iteration(models, 64, shard, copies=copies)
    share = 7 / 8 if shard == "hybrid" else 63 / 64
    gradients = 4 * SEVEN_B + 4 * SCORER
    rollout = 4 * SEVEN_B if copies else 512 * PASS
    passes = [rollout, 2 * PASS + 2 * PASS_OF_SCORER, 2 * PASS + 2 * PASS_OF_SCORER + gradients]
    assert [each.inside for each in sent] == pytest.approx([share * size for size in passes], rel=1e-4)
    between = [0.0, 0.0, 2 * 7 / 8 * gradients] if shard == "hybrid" else [each.inside for each in sent]
    assert [each.between for each in sent] == pytest.approx(between, rel=1e-4)
    assert f"| {' | '.join(page.ppo_row('7 B', 64, shard, copies))} |" in text, "run python benchmarks/scale.py"


def test_the_page_holds_an_rl_step_of_7_b_against_others(page, text):
    shape = page.planned("7 B", 8).models[0].shape
    tokens, peak = 1024 * 2048 / 16, 0.4 * 312e12
    computing = (2 + 2 * 4 + 8 * 2) * SEVEN_B * tokens / peak
    cache = 64 * 1536 * 2 * (2 * 32 * 4096)
    copy = 4 * SEVEN_B * 15 / 16 / 160e9  # more than 1/320 of it between the machines
    by_hand = computing + 1024 * (2 * SEVEN_B + cache) / 2.0e12 + copy
    seconds = page.rl_step(shape, "A800", 16, 1024, 1024, 1024, trained_models=2, passes=4)
    assert seconds == pytest.approx(by_hand)
    assert f"| 471, 855 | {seconds:.0f} |" in text, "run python benchmarks/scale.py"


def test_every_row_of_the_page_is_there_and_its_worked_lines_are_computed(page, text):
    cases = [*page.sft_cases(), *page.ppo_cases()]
    assert {(name, gpus) for name, gpus, *_ in cases} == {(name, gpus) for name in page.SIZES for gpus in page.GPUS}
    for name, gpus, shard, *_ in cases:
        assert f"| {name} | {gpus:,} | {page.named(shard)} |" in text
    assert page.sft_by_hand() in text
    assert page.ppo_by_hand() in text
