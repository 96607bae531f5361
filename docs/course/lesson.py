"""The figures and the planted faults of the course.

    python docs/course/lesson.py figure 3      # draw the figure of lesson 3 again: docs/course/3.svg
    python docs/course/lesson.py plant 3       # a broken run for the exercise of lesson 3: artifacts/course/3

A figure takes five minutes at most on one core, a planted run about one. Most figures train the models of
examples/micro_rlhf.py, which are small enough to train again for every curve.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import torch
from torch import Tensor, nn

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "docs"), str(ROOT / "tests"), str(ROOT)]

import micro_rlhf as micro  # noqa: E402
from draw_run import DARK, LIGHT, text  # noqa: E402

Curve = Sequence[tuple[float, float]]
LENGTH = 28
"""Tokens of a response of micro_rlhf's policies at most."""
FLOOR = 3 * math.log(8) / 25
"""Entropy of micro_rlhf's language in nats per character: no model has a lower loss."""
FAULTS = {
    1: "pad_is_eos",
    2: "length_biased",
    3: "kl_coef_10",
    4: "steps_unclipped",
    5: "other_temperature",
    6: "score_of_hundreds",
    7: "reward_of_a_word",
    8: "learning_rate_of_a_large_model",
}
"""The run of tests/support/faults.py that is planted in each lesson. Don't look before you have tried."""


# ------------------------------------------------------------------------------------------- training small models


def sft_model(steps: int = 300, seed: int = 0, width: int = 64) -> micro.Llama:
    """A policy that learned to write the sentences of micro_rlhf."""
    torch.manual_seed(seed)
    rng, policy = random.Random(seed), micro.Llama(micro.V, width=width)
    for _ in micro.sft(policy, (micro.demonstrations(rng) for _ in range(steps)), 3e-3):
        pass
    return policy


def scorer_of(policy: nn.Module, steps: int = 150, seed: int = 0) -> nn.Module:
    """A reward model that starts from the policy, with a new head."""
    torch.manual_seed(seed)
    rng, scorer = random.Random(seed), copy.deepcopy(policy)
    scorer.head = nn.Linear(scorer.head.in_features, 1, bias=False)
    for _ in micro.reward_model(scorer, (micro.preferences(rng) for _ in range(steps)), 1e-3):
        pass
    return scorer


def replies(policy: nn.Module, count: int = 128, seed: int = 1) -> list[list[int]]:
    """Ids of sampled responses."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    prompts = [micro.encode(micro.new_prompt(rng)) for _ in range(count)]
    return micro.sample(policy, prompts, torch.rand(count, LENGTH, generator=generator))


def kindness(policy: nn.Module) -> float:
    found = [micro.kindness(micro.decode(ids)) for ids in replies(policy)]
    return sum(found) / len(found)


def draws(iterations: int, minibatches: int = 4, epochs: int = 1, seed: int = 2) -> Iterator[micro.Draws]:
    """What each iteration of micro.ppo takes from outside: 64 prompts, random numbers, the rows of each step."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(iterations):
        prompts = [micro.new_prompt(rng) for _ in range(64)]
        uniforms = torch.rand(64, LENGTH, generator=generator)
        orders = [torch.randperm(64, generator=generator).view(minibatches, -1) for _ in range(epochs)]
        yield prompts, uniforms, torch.cat(orders).tolist()


def value_of(scorer: nn.Module) -> nn.Module:
    """The value model: the reward model with a head of zeros."""
    model = copy.deepcopy(scorer)
    nn.init.zeros_(model.head.weight)
    return model


def scale_of(scorer: nn.Module, policy: nn.Module) -> dict[str, float]:
    """Mean and standard deviation of the scores of the SFT model's replies."""
    with torch.no_grad():
        scores = micro.sequence_scores(scorer, [micro.encode("the cat") + ids for ids in replies(policy)])
    return {"score_mean": scores.mean().item(), "score_std": scores.std().item()}


# --------------------------------------------------------------------------------------------------- the eight figures


def smooth(values: Sequence[float], width: int = 10) -> Curve:
    """The mean of every `width` values."""
    return [(i + width, sum(values[i : i + width]) / width) for i in range(0, len(values) - width + 1, width)]


def figure_1() -> str:
    torch.manual_seed(0)
    rng, policy = random.Random(0), micro.Llama(micro.V)
    losses = list(micro.sft(policy, (micro.demonstrations(rng) for _ in range(300)), 3e-3))
    return chart(
        "The loss falls to the entropy of the text",
        ("SFT step of 32 sentences", "nats per character"),
        {
            "knows nothing: log 29": [(0, math.log(29)), (300, math.log(29))],
            "the model's loss": [(0, losses[0]), *smooth(losses, 5)],
            "entropy of the text": [(0, FLOOR), (300, FLOOR)],
        },
        low=0,
    )


def figure_2() -> str:
    policy, rng = sft_model(), random.Random(3)
    sentences = [micro.new_response(rng) for _ in range(400)]
    kind = torch.tensor([float(micro.kindness(sentence)) for sentence in sentences])
    curves: dict[str, Curve] = {"true worth": [(0, -3), (3, 3)]}
    for steps in (20, 60, 300):
        scorer = scorer_of(policy, steps)
        with torch.no_grad():
            rows = [[*micro.encode("the cat" + sentence), micro.EOS] for sentence in sentences]
            scores = micro.sequence_scores(scorer, rows)
        scores = scores - scores.mean() + 2 * (kind.mean() - 1.5)
        curves[f"after {32 * steps:,} pairs"] = [(k, scores[kind == k].mean().item()) for k in range(4)]
    return chart(
        "Scores become the worth that explains the choices",
        ("kind words in the sentence", "mean score"),
        curves,
        dots=list(curves),
    )


def figure_3() -> str:
    generator = torch.Generator().manual_seed(0)
    logits, score = torch.randn(2, 40, generator=generator, dtype=torch.float64)
    reference = logits.softmax(0)

    def point(policy: Tensor) -> tuple[float, float]:
        return torch.xlogy(policy, policy / reference).sum().item(), (policy * score).sum().item()

    tilts = [(reference.log() + score / beta).softmax(0) for beta in torch.logspace(1.5, -0.9, 60).tolist()]
    below = torch.stack([(reference * (score <= s)).sum() for s in score])  # P(score <= s)
    best = [below**n - (below - reference) ** n for n in (1, 2, 4, 8, 16)]
    trained, trace = logits.clone().requires_grad_(), []
    for step in range(10_001):
        policy = trained.softmax(0)
        objective = (policy * score).sum() - 0.3 * torch.xlogy(policy, policy / reference).sum()
        (gradient,) = torch.autograd.grad(objective, trained)
        if step % 100 == 0:
            trace.append(point(policy.detach()))
        with torch.no_grad():
            trained += 0.2 * gradient
    return chart(
        "No policy is above the tilt",
        ("KL to the reference, nats", "expected score"),
        {
            "exponential tilt": [point(policy) for policy in tilts],
            "gradient ascent, 0.3 a nat": trace,
            "best of 1, 2, 4, 8, 16": [point(policy) for policy in best],
        },
        dots=["best of 1, 2, 4, 8, 16"],
    )


def figure_4() -> str:
    base = sft_model()
    scorer = scorer_of(base)
    scale, curves = scale_of(scorer, base), {}
    for name, clip in (("with the clip", 0.2), ("without the clip", math.inf)):
        curves[name] = []
        for minibatches, epochs in ((1, 1), (2, 1), (4, 1), (4, 2), (4, 4)):
            steps = micro.ppo(
                copy.deepcopy(base), value_of(scorer), scorer, draws(12, minibatches, epochs), 5e-4, clip=clip, **scale
            )
            last = [figures["score"] - 0.2 * figures["kl"] for figures in steps][-6:]
            curves[name].append((minibatches * epochs, sum(last) / 6))
    return chart(
        "The clip allows more steps on the same samples",
        ("optimizer steps on each 64 responses (logarithmic)", "objective: score - 0.2 KL"),
        curves,
        low=-1,
        logarithmic="x",
        dots=list(curves),
    )


def figure_5() -> str:
    curves = {}
    for name, learned in (("EOS in the loss", True), ("EOS masked as padding", False)):
        torch.manual_seed(0)
        rng, policy, points = random.Random(0), micro.Llama(micro.V), []
        optimizer = micro.adamw(policy, 3e-3)
        for step in range(201):
            if step % 20 == 0:
                ended = [ids[-1] == micro.EOS for ids in replies(policy)]
                points.append((step, 100 * sum(ended) / len(ended)))
            rows = [[*micro.encode(p + r), micro.EOS] for p, r in micro.demonstrations(rng)]
            ids = micro.padded(rows)
            length = torch.tensor([len(row) - 1 for row in rows])[:, None]
            mask = (torch.arange(ids.shape[1] - 1) < length) & (learned | (ids[:, 1:] != micro.EOS))
            micro.step(policy, optimizer, -micro.token_logprobs(policy, ids)[mask].mean())
        curves[name] = points
    return chart("A model that never saw EOS never stops", ("SFT step", "replies that end, %"), curves, low=0)


def figure_6() -> str:
    with tempfile.TemporaryDirectory() as folder:
        for command in (("init", "hard", "--from", "support-hard"), ("pipeline", "hard", "--quiet")):
            subprocess.run([sys.executable, "-m", "rlhf_cli", *command], cwd=folder, check=True)
        run = Path(folder) / "artifacts" / "hard" / "ppo"
        rows = [json.loads(line) for line in (run / "evaluations.jsonl").read_text("utf-8").splitlines()]
        final = json.loads((run / "evaluation.json").read_text("utf-8"))
    rows = [final["sft"] | {"step": 0}, *rows, final["ppo"] | {"step": 80}]
    return chart(
        "The score rises, the judge's verdict falls",
        ("PPO iteration", "held-out replies, mean"),
        {
            "gold: the judge, 0 to 5": [(r["step"], r["gold"]) for r in rows],
            "score: the reward model": [(r["step"], r["score_mean"]) for r in rows],
        },
        low=0,
    )


class Rule(nn.Module):
    """A reward function in the place of a reward model: every position gets the score of its whole row."""

    def __init__(self, score: Callable[[str], float]):
        super().__init__()
        self.score = score

    def forward(self, ids: Tensor) -> Tensor:
        scores = torch.tensor([self.score(micro.decode(row)) for row in ids.tolist()])
        return scores[:, None, None].expand(*ids.shape, 1)


def kind_words(row: str) -> float:
    return float(sum(row.count(word) for word in micro.KIND))


def kind_words_of_a_sentence(row: str) -> float:
    return kind_words(row) if re.fullmatch(r"the \w+ is \w+, \w+ and \w+\.", row) else 0.0


def figure_7() -> str:
    base, curves = sft_model(), {}
    for rule, kind_name in (
        (kind_words, "what was meant: kindness"),
        (kind_words_of_a_sentence, "kindness, sentences only"),
    ):
        policy, rewards, kind = copy.deepcopy(base), [], []
        for figures in micro.ppo(policy, value_of(scorer_of(base, 1)), Rule(rule), draws(40), 5e-4, kl_coef=0.0):
            rewards.append(figures["score"])
            kind.append(sum(micro.kindness(micro.decode(ids)) for ids in figures["responses"]) / 64)
        if rule is kind_words:
            curves["the reward: kind words"] = smooth(rewards, 2)
        curves[kind_name] = smooth(kind, 2)
    return chart("PPO finds what the reward says", ("PPO iteration", "mean of 64 replies"), curves, low=0)


def figure_8() -> str:
    curves: dict[str, Curve] = {}
    for above, name in ((1.0, "1 nat above the entropy"), (0.1, "0.1 nats above the entropy")):
        curves[name] = [rows_until(FLOOR + above, width) for width in (8, 16, 32, 64, 128)]
    return chart(
        "A larger model needs fewer rows",
        ("thousand parameters (logarithmic)", "rows until the loss is ... (logarithmic)"),
        curves,
        logarithmic="xy",
        dots=list(curves),
    )


def rows_until(loss: float, width: int, seeds: int = 3) -> tuple[float, float]:
    """Thousand parameters of a model of this width, and the rows of SFT after which its loss is below this one.

    Every batch is new, so its loss is a held-out one; the mean of five steps is compared. The mean over seeds.
    """
    rows = 0.0
    for seed in range(seeds):
        torch.manual_seed(seed)
        rng, policy, last = random.Random(seed), micro.Llama(micro.V, width=width), deque([math.inf] * 5, 5)
        steps = micro.sft(policy, (micro.demonstrations(rng) for _ in range(2000)), 3e-3)
        while sum(last) / 5 > loss:
            last.append(next(steps))
            rows += 32 / seeds
    return sum(p.numel() for p in policy.parameters()) / 1000, rows


# ------------------------------------------------------------------------------------------------------ the drawing

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 620, 340, 58, 44, 196, 54
COLOURS = (("#0969da", "#4493f8"), ("#bc4c00", "#f0883e"), ("#1a7f37", "#3fb950"), ("#8250df", "#ab7df8"))
"""Of each curve, on a light and on a dark page."""


def ticks(low: float, high: float, logarithmic: bool) -> list[float]:
    """Three to six round numbers from low to high."""
    if logarithmic:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
    size = 10.0 ** math.floor(math.log10(high - low))
    step = next(s * size for s in (0.2, 0.5, 1, 2) if (high - low) / (s * size) <= 5)
    return [round(i * step, 6) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def chart(
    title: str,
    axes: tuple[str, str],
    curves: dict[str, Curve],
    *,
    low: float | None = None,
    logarithmic: str = "",
    dots: Sequence[str] = (),
) -> str:
    """Lines with their names at their ends, as an SVG for light and dark pages.

    `logarithmic` names axes, such as "xy". What is below `low` is drawn on the lower edge.
    """
    x = [point[0] for curve in curves.values() for point in curve]
    y = [point[1] for curve in curves.values() for point in curve]
    x_range, y_range = (min(x), max(x)), (min(y) if low is None else low, max(y))

    def share(value: float, ends: tuple[float, float], axis: str) -> float:
        start, end, at = map(math.log if axis in logarithmic else float, (*ends, max(value, ends[0])))
        return (at - start) / (end - start)

    def place(px: float, py: float) -> tuple[float, float]:
        return (
            LEFT + (WIDTH - LEFT - RIGHT) * share(px, x_range, "x"),
            HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share(py, y_range, "y"),
        )

    parts = [text(LEFT, 26, title, "ink", 16, weight=600)]
    for value in ticks(*y_range, "y" in logarithmic):
        height = place(x_range[0], value)[1]
        parts.append(f'<path class="grid" d="M{LEFT} {height:.0f}H{WIDTH - RIGHT}"/>')
        parts.append(text(LEFT - 8, round(height) + 4, f"{value:g}", "quiet", 12, anchor="end"))
    for value in ticks(*x_range, "x" in logarithmic):
        parts.append(text(round(place(value, y_range[0])[0]), HEIGHT - 34, f"{value:g}", "quiet", 12, anchor="middle"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, axes[0], "quiet", 13, anchor="middle"))
    side = text(0, 0, axes[1], "quiet", 13, anchor="middle")
    parts.append(f'<g transform="translate(14 {HEIGHT / 2:.0f}) rotate(-90)">{side}</g>')
    ends = sorted((place(*curve[-1])[1], number) for number, curve in enumerate(curves.values()))
    label, heights = -99.0, {}
    for height, number in ends:  # labels that would cover one another move down
        label = heights[number] = max(height, label + 17)
    for number, (name, curve) in enumerate(curves.items()):
        points = [place(*point) for point in curve]
        path = "L".join(f"{px:.0f} {py:.0f}" for px, py in points)
        parts.append(f'<path class="c{number}" fill="none" stroke-width="2" d="M{path}"/>')
        marks = points if name in dots else points[-1:]
        parts += [f'<circle class="d{number}" cx="{px:.0f}" cy="{py:.0f}" r="3"/>' for px, py in marks]
        inside = points[-1][0] < WIDTH - RIGHT - 1  # below other curves
        parts.append(text(round(points[-1][0]) + 8, round(heights[number]) + 5 + 9 * inside, name, f"d{number}", 13))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img"'
            f" aria-label=\"{escape(title)}\" font-family=\"-apple-system, 'Segoe UI', 'Noto Sans', sans-serif\">",
            f"<style>{colours(LIGHT, 0)} @media (prefers-color-scheme: dark) {{ {colours(DARK, 1)} }}</style>",
            f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def colours(palette: dict[str, str], number: int) -> str:
    rules = [f".{name} {{ fill: {palette[name]} }}" for name in ("ink", "quiet")]
    rules += [f".card {{ fill: {palette['card']}; stroke: {palette['edge']} }} .grid {{ stroke: {palette['grid']} }}"]
    rules += [f".c{i} {{ stroke: {pair[number]} }} .d{i} {{ fill: {pair[number]} }}" for i, pair in enumerate(COLOURS)]
    return " ".join(rules)


# ------------------------------------------------------------------------------------------------------ the program


def rlhf(*arguments: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_cli", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


def plant(number: int) -> Path:
    """The broken run of a lesson. Runs share the stages that no fault touches.

    Warnings go to a file: they name the fault that you are to find.
    """
    from support.faults import make_run

    runs = ROOT / "artifacts" / "course" / "runs"
    out = runs.parent / str(number)
    if not out.exists():
        runs.mkdir(parents=True, exist_ok=True)
        with (runs / f"{number}.log").open("w") as log, contextlib.redirect_stderr(log):
            shutil.copytree(make_run(runs, FAULTS[number]), out)
    return out


def main() -> None:
    match sys.argv[1:]:
        case ["figure", number]:
            torch.set_num_threads(1)
            path = FOLDER / f"{number}.svg"
            path.write_text(globals()[f"figure_{number}"](), encoding="utf-8")
            print(path.relative_to(ROOT))
        case ["plant", number]:
            print(f"rlhf diagnose {plant(int(number)).relative_to(ROOT)}")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
