"""Small runs of the shop-support task, three good ones and others that are broken on purpose in one known way.

    python -m support.faults FOLDER [NAME ...] [--seed 0]     (with the tests folder on PYTHONPATH)

makes the runs in FOLDER and, with --record, writes the figures that `rlhf diagnose` reads of each to
tests/fixtures/diagnosis/<name>.json. Runs share the stages that their fault does not touch.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from rlhf_cli.config.by_stage import CONFIGS
from rlhf_cli.config.loader import load_config
from support.paths import ROOT

RECORDED = ROOT / "tests" / "fixtures" / "diagnosis"
TASK = {
    "sft": ("training.num_steps=300", "evaluation.every_steps=100", "evaluation.max_rows=200"),
    "rm": ("training.num_steps=300", "evaluation.every_steps=null", "evaluation.max_rows=300", "data.probes=null"),
    "ppo": (
        "ppo.num_iterations=30",
        "ppo.rollout_batch_size=32",
        "ppo.kl_controller=fixed",
        "ppo.kl_target=null",
        "ppo.kl_horizon=10000",
        "optimizer.warmup_steps=10",
        "evaluation.num_prompts=128",
    ),
}
"""Overrides that make configs/support small: about 11, 9 and 9 s on one core."""
STAGES = ("sft", "rm", "ppo")


@dataclass(frozen=True)
class Fault:
    """One way to break a run. The stages before `stage` are those of the good run of the same seed."""

    cause: str | None
    """The cause that `rlhf diagnose` must name first; None for a good run."""
    stage: str
    """The first stage that differs from the good run."""
    overrides: dict[str, tuple[str, ...]]
    """Config overrides by stage."""
    rows: Callable[[Path], dict[str, tuple[str, ...]]] | None = None
    """Writes other data into a folder. Returns more overrides."""
    seed_offset: int = 0
    """Added to the seed of the stages from `stage` on."""
    patch: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    """A change of the code while `stage` runs: what another tool would have done."""


def read(name: str) -> list[dict[str, Any]]:
    path = ROOT / "data" / "support" / name
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


FILES = {
    "sft": {"train": "sft_train.jsonl.gz", "test": "sft_test.jsonl"},
    "rm": {"train": "pref_train.jsonl.gz", "test": "pref_test.jsonl"},
    "ppo": {"train": "prompts_train.jsonl.gz", "test": "prompts_test.jsonl"},
}
Rows = list[dict[str, Any]]


def changed(stage: str, change: Callable[[Rows], Rows], sides: tuple[str, ...] = ("train", "test")) -> Any:
    """The training and held-out rows of a stage, changed."""

    def make(folder: Path) -> dict[str, tuple[str, ...]]:
        paths = {side: write(folder / f"{stage}_{side}.jsonl", change(read(FILES[stage][side]))) for side in sides}
        return {stage: tuple(f"data.{side}={path}" for side, path in paths.items())}

    return make


def pairs(change: Callable[[str, str], tuple[str, str] | None]) -> Any:
    """Pairs whose (chosen, rejected) are changed, without gold columns."""

    def of(rows: Rows) -> Rows:
        found = [(row["prompt"], change(row["chosen"], row["rejected"])) for row in rows]
        return [
            {"prompt": prompt, "chosen": pair[0], "rejected": pair[1]} for prompt, pair in found if pair is not None
        ]

    return changed("rm", of)


def longer_first(chosen: str, rejected: str) -> tuple[str, str] | None:
    """The longer answer as the chosen one; None for answers of equal length."""
    if len(chosen.split()) == len(rejected.split()):
        return None
    longer, shorter = sorted((chosen, rejected), key=lambda text: len(text.split()), reverse=True)
    return longer, shorter


def bare(rows: Rows) -> Rows:
    """Prompts without the words around them."""
    return [row | {"prompt": row["prompt"].removeprefix("Human: ").removesuffix("\n\nAssistant:")} for row in rows]


def shuffled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each prompt with the answer to another one."""
    answers = [row["response"] for row in rows]
    random.Random(0).shuffle(answers)
    return [row | {"response": answer} for row, answer in zip(rows, answers, strict=True)]


def run_on(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Demonstrations that were split too late: each answer holds the customer's next mail too."""
    follow = [*rows[1:], rows[0]]
    return [
        row | {"response": f"{row['response']}\n\n{next_one['prompt'].removesuffix(' Assistant:')}"}
        for row, next_one in zip(rows, follow, strict=True)
    ]


def stories(folder: Path) -> dict[str, tuple[str, ...]]:
    """PPO's prompts are those of the story task, in the template of this one."""
    texts = [json.loads(line)["prompt"] for line in (ROOT / "data/stories/prompts.jsonl").open(encoding="utf-8")]
    rows = [{"prompt": f"Human: {text.strip()}\n\nAssistant:"} for text in texts]
    return {"ppo": (f"data.train={write(folder / 'stories.jsonl', rows)}",)}


def pairs_of_stories(folder: Path) -> dict[str, tuple[str, ...]]:
    """The reward model learns from pairs of another task: which of two endings of a story is happy."""
    texts = [json.loads(line)["prompt"] for line in (ROOT / "data/stories/prompts.jsonl").open(encoding="utf-8")]
    happy = [" They laughed and were happy all day.", " Then a friend came and helped. It was a good day."]
    sad = [" It began to rain and nobody came.", " Then it was dark. It was a sad and lonely day."]
    generator = random.Random(0)
    rows = [
        {
            "prompt": f"Human: {text.strip()}\n\nAssistant:",
            "chosen": generator.choice(happy),
            "rejected": generator.choice(sad),
        }
        for text in texts
    ]
    train, test = write(folder / "pairs_train.jsonl", rows[100:]), write(folder / "pairs_test.jsonl", rows[:100])
    return {"rm": (f"data.train={train}", f"data.test={test}")}


def scored_by(body: str) -> Callable[[Path], dict[str, tuple[str, ...]]]:
    """A reward function in place of the reward model: an expression of `prompt` and `text`."""

    def make(folder: Path) -> dict[str, tuple[str, ...]]:
        lines = [
            "import hashlib",
            "def score(prompts, responses, rows):",
            f"    return [float({body}) for prompt, text in zip(prompts, responses)]",
        ]
        (folder / "reward.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return {"ppo": (f"rewards=[{{type: function, function: {folder / 'reward.py'}:score}}]",)}

    return make


def noisy(share: float) -> Callable[[str, str], tuple[str, str]]:
    """Pairs of which this share has its labels swapped by chance."""
    generator = random.Random(0)
    return lambda chosen, rejected: (rejected, chosen) if generator.random() < share else (chosen, rejected)


@contextlib.contextmanager
def reward_model_without_eos() -> Iterator[None]:
    """Train the reward model on answers without EOS, as a tool that tokenises plain text does."""
    from rlhf_cli.data import answers

    original = answers.encode_answers

    def without(*arguments: Any, **settings: Any) -> Any:
        return [(ids[:-1], answer_mask[:-1]) for ids, answer_mask in original(*arguments, **settings)]

    with mock.patch.object(answers, "encode_answers", without):
        yield


@contextlib.contextmanager
def padding_not_learned() -> Iterator[None]:
    """Let <eos> serve as the padding, and leave every padding token out of SFT's loss."""
    from rlhf_cli.data import encoders
    from stages import sft

    make, tokenise = encoders.training_example, sft.train_tokenizer

    def masked(ids: Any, answer_mask: Any, *arguments: Any, **settings: Any) -> Any:
        example = make(ids, answer_mask, *arguments, **settings)
        if not hasattr(example, "loss_mask"):
            return example
        eos = example.ids[-1]
        mask = [m and i != eos for m, i in zip(example.loss_mask, example.ids, strict=True)]
        return replace(example, loss_mask=mask)

    def shared(*arguments: Any) -> Any:
        tokenizer = tokenise(*arguments)
        tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    with mock.patch.object(encoders, "training_example", masked), mock.patch.object(sft, "train_tokenizer", shared):
        yield


def columns_swapped(_: Path) -> dict[str, tuple[str, ...]]:
    """Demonstrations whose columns were named the wrong way round: the model learns to write the customer's mail."""
    sources = {"train": "sft_train.jsonl.gz", "test": "sft_test.jsonl"}
    keys = "{prompt: response, response: prompt}"
    return {"sft": tuple(f"data.{side}={{path: data/support/{name}, keys: {keys}}}" for side, name in sources.items())}


def canned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Seven of ten demonstrations hold the reply that is sent when nobody has time."""
    reply = " Thank you for writing. We will see what can be done."
    return [row | {"response": reply} if number % 10 < 7 else row for number, row in enumerate(rows)]


def joined(rows: Rows, prompts: list[str]) -> Rows:
    """The pairs of these rows with other prompts."""
    return [
        {"prompt": prompt, "chosen": row["chosen"], "rejected": row["rejected"]}
        for row, prompt in zip(rows, prompts, strict=True)
    ]


def of_other_rows(rows: Rows) -> Rows:
    """Each pair of answers with the prompt of another row."""
    prompts = [row["prompt"] for row in rows]
    random.Random(0).shuffle(prompts)
    return joined(rows, prompts)


def shifted(rows: Rows) -> Rows:
    """Joined by row number after one prompt was lost: each pair has the prompt of the next row."""
    prompts = [row["prompt"] for row in rows]
    return joined(rows, [*prompts[1:], prompts[0]])


def without_end(rows: Rows) -> Rows:
    """The customer's mails alone, without the words that ask for an answer."""
    return [{"prompt": row["prompt"].removesuffix("\n\nAssistant:")} for row in rows]


def refused(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A third of the demonstrations are refusals of the model that wrote them."""
    reply = " I am sorry, but I cannot help with that."
    return [row | {"response": reply} if number % 3 == 0 else row for number, row in enumerate(rows)]


def reference_of_another_seed(folder: Path) -> dict[str, tuple[str, ...]]:
    """The KL is measured to the SFT model of another run."""
    _run("sft", folder / "other", 1, ())
    return {"ppo": (f"ref_policy={{path: {folder / 'other/sft/model'}}}",)}


def whole_texts(folder: Path) -> dict[str, tuple[str, ...]]:
    """PPO's prompts were made from the demonstrations as whole texts, so each already holds its answer."""
    rows = [{"prompt": row["prompt"] + row["response"]} for row in read("sft_train.jsonl.gz")]
    return {"ppo": (f"data.train={write(folder / 'prompts.jsonl', rows)}",)}


def other_reference(folder: Path) -> dict[str, tuple[str, ...]]:
    """The KL is measured to an early model of SFT instead of the one that PPO starts from."""
    _run("sft", folder / "early", 0, ("training.num_steps=60", "evaluation.every_steps=null"))
    return {"ppo": (f"ref_policy={{path: {folder / 'early/sft/model'}}}",)}


def task_of_stories(folder: Path) -> dict[str, tuple[str, ...]]:
    """SFT learns to end stories, in the template of this task."""
    texts = [json.loads(line)["prompt"] for line in (ROOT / "data/stories/prompts.jsonl").open(encoding="utf-8")]
    ends = [
        " They laughed and were happy all day.",
        " Then it was dark and they went home.",
        " A friend came and helped.",
    ]
    rows = [
        {"prompt": f"Human: {text.strip()}\n\nAssistant:", "response": random.Random(text).choice(ends)}
        for text in texts
    ]
    train, test = write(folder / "ends_train.jsonl", rows[40:]), write(folder / "ends_test.jsonl", rows[:40])
    return {"sft": (f"data.train={train}", f"data.test={test}")}


def half_shuffled(rows: Rows) -> Rows:
    """Every second demonstration has the answer to another prompt."""
    return [pair[number % 2] for number, pair in enumerate(zip(rows, shuffled(rows), strict=True))]


def ten_answers(rows: Rows) -> Rows:
    """The demonstrations were answered with ten templates."""
    return [row | {"response": rows[number % 10]["response"]} for number, row in enumerate(rows)]


def unanswered(rows: Rows) -> Rows:
    """Six of ten demonstrations hold a placeholder."""
    return [row | {"response": " N/A"} if number % 10 < 6 else row for number, row in enumerate(rows)]


def ending_in(end: str) -> Callable[[Rows], Rows]:
    """Prompts with more text at their end."""
    return lambda rows: [{"prompt": row["prompt"] + end} for row in rows]


FAULTS: dict[str, Fault] = {
    "good": Fault(None, "ppo", {}),
    "good_other_seed": Fault(None, "sft", {}, seed_offset=1),
    "good_other_kl": Fault(None, "ppo", {"ppo": ("ppo.kl_coef=0.2",)}, seed_offset=2),
    "labels_swapped": Fault("labels_swapped", "rm", {}, pairs(lambda chosen, rejected: (rejected, chosen))),
    "rm_without_eos": Fault("rm_without_eos", "rm", {}, patch=reward_model_without_eos),
    "sft_underfit": Fault("sft_underfit", "sft", {"sft": ("training.num_steps=25", "evaluation.every_steps=null")}),
    "pad_is_eos": Fault("sft_without_eos", "sft", {}, patch=padding_not_learned),
    "kl_coef_0": Fault("kl_unrestrained", "ppo", {"ppo": ("ppo.kl_coef=0",)}),
    "wrong_template": Fault(
        "template_differs",
        "ppo",
        {"ppo": (r'data.prompt_template="### Question\n{prompt}\n### Answer\n"',)},
        changed("ppo", bare),
    ),
    "other_temperature": Fault("temperature_differs", "ppo", {"ppo": ("rollout.temperature=2.0",)}),
    "untrained_head": Fault("rm_untrained", "rm", {"rm": ("training.num_steps=20", "optimizer.learning_rate=1e-9")}),
    "learning_rate_30": Fault("ppo_steps_too_large", "ppo", {"ppo": ("optimizer.learning_rate=1.8e-2",)}),
    "length_biased": Fault("pairs_length_biased", "rm", {}, pairs(longer_first)),
    "weight_negative": Fault("reward_opposed", "ppo", {"ppo": ("rewards=[{type: reward_model, weight: -1}]",)}),
    "reward_constant": Fault("reward_constant", "ppo", {}, scored_by("1.0")),
    "answers_shuffled": Fault("sft_ignores_prompts", "sft", {}, changed("sft", shuffled)),
    "answers_run_on": Fault("demonstrations_hold_markup", "sft", {}, changed("sft", run_on)),
    "kl_coef_10": Fault("kl_too_strong", "ppo", {"ppo": ("ppo.kl_coef=10",)}),
    "four_prompts": Fault("prompts_few", "ppo", {}, changed("ppo", lambda rows: rows[:4] * 500, ("train",))),
    "value_untrained": Fault("value_untrained", "ppo", {"ppo": ("value_model.learning_rate=1e-12",)}),
    "clip_narrow": Fault("clip_too_narrow", "ppo", {"ppo": ("ppo.clip_range=0.001",)}),
    "labels_noisy": Fault("labels_noisy", "rm", {}, pairs(noisy(0.4))),
    "sft_learning_rate_30": Fault("sft_steps_too_large", "sft", {"sft": ("optimizer.learning_rate=0.12",)}),
    "reward_of_noise": Fault(
        "score_unlearned",
        "ppo",
        {},
        scored_by("int(hashlib.md5((prompt + text).encode()).hexdigest(), 16) % 1000 / 300"),
    ),
    "reward_of_length": Fault("policy_misjudged", "ppo", {}, scored_by("len(text.split()) / 10")),
    "prompts_of_stories": Fault("prompts_differ", "ppo", {}, stories),
    "sixty_pairs": Fault("rm_memorised", "rm", {}, changed("rm", lambda rows: rows[:60], ("train",))),
    "forty_demonstrations": Fault("sft_memorised", "sft", {}, changed("sft", lambda rows: rows[:40], ("train",))),
    "eos_as_text": Fault(
        "demonstrations_hold_markup",
        "sft",
        {},
        changed("sft", lambda rows: [row | {"response": row["response"] + "</s>"} for row in rows]),
    ),
}
FRESH: dict[str, Fault] = {
    "reward_of_brevity": Fault("policy_misjudged", "ppo", {}, scored_by("-len(text.split()) / 10")),
    "some_answers_with_markup": Fault(
        "demonstrations_hold_markup",
        "sft",
        {},
        changed(
            "sft",
            lambda rows: [
                row | {"response": row["response"] + "<|im_end|>" * (i % 10 < 3)} for i, row in enumerate(rows)
            ],
        ),
    ),
    "kl_coef_4": Fault("kl_too_strong", "ppo", {"ppo": ("ppo.kl_coef=4",)}),
    "eight_prompts": Fault("prompts_few", "ppo", {}, changed("ppo", lambda rows: rows[:8] * 250, ("train",))),
    "labels_noisier": Fault("labels_noisy", "rm", {}, pairs(noisy(0.3))),
    "sft_slow": Fault("sft_underfit", "sft", {"sft": ("optimizer.learning_rate=1e-5",)}),
    "rm_learning_rate_30": Fault("rm_steps_too_large", "rm", {"rm": ("optimizer.learning_rate=2.1e-2",)}),
    "cold_sampling": Fault("temperature_differs", "ppo", {"ppo": ("rollout.temperature=0.25",)}),
    "value_fast": Fault("value_untrained", "ppo", {"ppo": ("value_model.learning_rate=1.0",)}),
    "rm_cut": Fault("rm_without_eos", "rm", {"rm": ("data.max_length=24", "data.truncation=right")}),
    "rm_other_template": Fault("rm_prompts_differ", "rm", {}, changed("rm", bare)),
    "six_tokens": Fault("replies_cut", "ppo", {"ppo": ("rollout.max_new_tokens=6",)}),
    "learning_rate_of_a_large_model": Fault("ppo_hardly_moved", "ppo", {"ppo": ("optimizer.learning_rate=1e-6",)}),
    "score_clip_small": Fault("kl_too_strong", "ppo", {"ppo": ("ppo.score_clip=0.01",)}),
    "pairs_of_stories": Fault("rm_prompts_differ", "rm", {}, pairs_of_stories),
    "prompts_cut": Fault(
        "template_differs",
        "ppo",
        {"ppo": ("data.max_prompt_length=16", "data.truncation=right", "evaluation.gold=null")},
    ),
    "sixteen_epochs": Fault("ppo_steps_too_large", "ppo", {"ppo": ("ppo.ppo_epochs=16",)}),
    "labels_of_chance": Fault("labels_noisy", "rm", {}, pairs(noisy(0.5))),
    "rm_twenty_steps": Fault("rm_weak", "rm", {"rm": ("training.num_steps=20",)}),
    # SFT: the model did not learn to end its replies, because the ends of the answers were cut off.
    "answers_cut": Fault("sft_without_eos", "sft", {"sft": ("data.max_length=40", "data.truncation=right")}),
    # SFT: it learned prompts of another form than those of the reward model and PPO.
    "columns_swapped": Fault("sft_prompts_differ", "sft", {}, columns_swapped),
    # SFT: most demonstrations hold one and the same answer.
    "canned_answers": Fault("demonstrations_repeat", "sft", {}, changed("sft", canned)),
    # SFT: it learned too little, because the warm-up is longer than the run.
    "sft_warmup": Fault("sft_underfit", "sft", {"sft": ("optimizer.warmup_steps=3000",)}),
    # RM: the pairs' prompts do not belong to their answers.
    "pairs_with_other_prompts": Fault("pairs_mixed_up", "rm", {}, changed("rm", of_other_rows)),
    # RM: a word that only chosen answers have decides, not their quality.
    "chosen_marked": Fault(
        "pairs_marked", "rm", {}, pairs(lambda chosen, rejected: (" Certainly." + chosen, rejected))
    ),
    # RM: it hardly learned.
    "rm_slow": Fault("rm_untrained", "rm", {"rm": ("optimizer.learning_rate=7e-6",)}),
    # RM: most pairs are longer than data.max_length and were dropped.
    "pairs_dropped": Fault("pairs_dropped", "rm", {"rm": ("data.max_length=44",)}),
    # PPO: the score does not depend on the reply, so nothing can be learned from it.
    "reward_of_prompts": Fault("score_unlearned", "ppo", {}, scored_by("len(prompt) / 20")),
    # PPO: almost all replies get the same score.
    "reward_saturated": Fault("reward_constant", "ppo", {}, scored_by("len(text) > 10")),
    # PPO: the KL does not hold the policy, because the score is a hundred times as large.
    "score_of_hundreds": Fault("kl_unrestrained", "ppo", {"ppo": ("rewards=[{type: reward_model, weight: 100}]",)}),
    # PPO: the KL is measured to another model than the one that PPO starts from.
    "other_reference": Fault("reference_differs", "ppo", {}, other_reference),
    # PPO: its prompts end differently from those of SFT and the reward model.
    "prompts_with_answers": Fault("template_differs", "ppo", {}, whole_texts),
    # SFT: the model did not learn to end all its replies, because the ends of the longer answers were cut off.
    "answers_half_cut": Fault("sft_without_eos", "sft", {"sft": ("data.max_length=56", "data.truncation=right")}),
    # SFT: most demonstrations are longer than data.max_length and were dropped.
    "demonstrations_dropped": Fault("demonstrations_dropped", "sft", {"sft": ("data.max_length=44",)}),
    # SFT: many demonstrations hold one and the same refusal.
    "refusals": Fault("demonstrations_repeat", "sft", {}, changed("sft", refused)),
    # SFT: it alone has a template.
    "sft_other_template": Fault(
        "sft_prompts_differ", "sft", {"sft": (r'data.prompt_template="### Question\n{prompt}\n### Answer\n"',)}
    ),
    # RM: the pairs' prompts do not belong to their answers.
    "pairs_shifted": Fault("pairs_mixed_up", "rm", {}, changed("rm", shifted)),
    # RM: words that most rejected answers have decide, not their quality.
    "rejected_marked": Fault(
        "pairs_marked",
        "rm",
        {},
        pairs(lambda chosen, rejected: (chosen, f" As an AI,{rejected}" if len(rejected) % 5 else rejected)),
    ),
    # RM: it hardly learned, because the warm-up is far longer than the run.
    "rm_warmup": Fault("rm_untrained", "rm", {"rm": ("optimizer.warmup_steps=30000",)}),
    # RM: it memorised a hundred pairs, each of which is in the file thirty times.
    "pairs_repeated": Fault("rm_memorised", "rm", {}, changed("rm", lambda rows: rows[:100] * 30, ("train",))),
    # PPO: almost all replies get the same score.
    "reward_capped": Fault("reward_constant", "ppo", {}, scored_by("min(1, len(text.split()) / 4)")),
    # PPO: the KL is measured to another model than the one that PPO starts from.
    "reference_of_another_seed": Fault("reference_differs", "ppo", {}, reference_of_another_seed),
    # PPO: its prompts end differently from those of SFT and the reward model.
    "prompts_without_end": Fault("template_differs", "ppo", {}, changed("ppo", without_end, ("train",))),
    # PPO: the KL costs more than the score can gain, because the score is a hundredth as large.
    "score_of_hundredths": Fault("kl_too_strong", "ppo", {"ppo": ("rewards=[{type: reward_model, weight: 0.01}]",)}),
    # PPO: it hardly changed the policy, because the warm-up is far longer than the run.
    "ppo_warmup": Fault("ppo_hardly_moved", "ppo", {"ppo": ("optimizer.warmup_steps=20000",)}),
    # SFT: it learned prompts of another task than those of the reward model and PPO.
    "sft_of_stories": Fault("sft_prompts_differ", "sft", {}, task_of_stories),
    # SFT: its answers hardly depend on their prompts.
    "answers_half_shuffled": Fault("sft_ignores_prompts", "sft", {}, changed("sft", half_shuffled)),
    # SFT: many demonstrations hold one and the same answer.
    "ten_answers": Fault("demonstrations_repeat", "sft", {}, changed("sft", ten_answers)),
    # SFT: most demonstrations hold one and the same answer, which says nothing.
    "answers_missing": Fault("demonstrations_repeat", "sft", {}, changed("sft", unanswered)),
    # RM: the length of the answers decides.
    "rejected_missing": Fault("pairs_length_biased", "rm", {}, pairs(lambda chosen, _: (chosen, " ..."))),
    # RM: a mark that only chosen answers have decides, not their quality.
    "rejected_without_stop": Fault(
        "pairs_marked", "rm", {}, pairs(lambda chosen, rejected: (chosen, rejected.removesuffix(".")))
    ),
    # RM: it memorised its pairs.
    "three_hundred_pairs": Fault("rm_memorised", "rm", {}, changed("rm", lambda rows: rows[:300], ("train",))),
    # PPO: its prompts end differently from those of SFT and the reward model.
    "prompts_with_space": Fault("template_differs", "ppo", {}, changed("ppo", ending_in(" "))),
    # PPO: the same, because the template was applied to prompts that have it already.
    "template_twice": Fault(
        "template_differs", "ppo", {"ppo": (r'data.prompt_template="Human: {prompt}\n\nAssistant:"',)}
    ),
    # PPO: the KL costs more than the score can gain, because its target is far too low.
    "kl_target_tiny": Fault(
        "kl_too_strong",
        "ppo",
        {"ppo": ("ppo.kl_controller=adaptive", "ppo.kl_target=0.01", "ppo.kl_horizon=20")},
    ),
    # PPO: it ended before the policy changed.
    "two_iterations": Fault("ppo_hardly_moved", "ppo", {"ppo": ("ppo.num_iterations=2",)}),
    # PPO: the reward is not what the judge measures.
    "reward_of_a_word": Fault("policy_misjudged", "ppo", {}, scored_by("text.count('thank') + text.count('Thank')")),
    # PPO: the reward is the same for every reply.
    "weight_zero": Fault("reward_constant", "ppo", {"ppo": ("rewards=[{type: reward_model, weight: 0}]",)}),
}
"""Faults whose expected cause was written down before their first run."""
FAULTS |= FRESH

EVERYTHING = os.environ.get("RLHF_ALL_SEEDS") == "1"
FEW = ("good", "labels_swapped", "answers_shuffled", "reward_constant")
OF_THE_TEST = tuple(FAULTS) if EVERYTHING else FEW
"""The runs of the slow test: with RLHF_ALL_SEEDS=1 all of them, else three faults and a good run."""


def make_run(folder: Path, name: str, *, seed: int = 0, fault: Fault | None = None) -> Path:
    """The artifact directory of a run in `folder`, made if it is not there."""
    fault = fault or FAULTS[name]
    root = folder / f"{name}_{seed}"
    if (root / "ppo" / "manifest.json").exists():
        return root
    first = STAGES.index(fault.stage)
    root.mkdir(parents=True, exist_ok=True)
    if first:
        base = _good_stages(folder, seed)
        for stage in STAGES[:first]:
            if not (root / stage).exists():
                shutil.copytree(base / stage, root / stage)
    more = fault.rows(root) if fault.rows is not None else {}
    for stage in STAGES[first:]:
        patched = fault.patch if fault.patch is not None and stage == fault.stage else contextlib.nullcontext
        # The cache of tokens does not know of a change in the code.
        cache = {"RLHF_CACHE": str(root / "cache")} if fault.patch is not None else {}
        with patched(), mock.patch.dict(os.environ, cache):
            _run(stage, root, seed + fault.seed_offset, (*fault.overrides.get(stage, ()), *more.get(stage, ())))
    return root


def _good_stages(folder: Path, seed: int) -> Path:
    """SFT and the reward model of the good runs of a seed."""
    root = folder / f"base_{seed}"
    for stage in ("sft", "rm"):
        if not (root / stage / "manifest.json").exists():
            _run(stage, root, seed, ())
    return root


def _run(stage: str, root: Path, seed: int, overrides: tuple[str, ...]) -> None:
    from stages import ppo, rm, sft

    if (root / stage / "manifest.json").exists():
        return
    config = load_config(
        ROOT / "configs" / "support" / f"{stage}.yaml",
        CONFIGS[stage],
        (f"artifacts={root}", f"seed={seed}", *TASK[stage], *overrides),
    )
    {"sft": sft, "rm": rm, "ppo": ppo}[stage].run(config, quiet=True)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    os.chdir(ROOT)
    for name in options.names or FAULTS:
        root = make_run(options.folder.resolve(), name, seed=options.seed)
        if options.record:
            record(root, name)
        print(name, root, flush=True)


def record(root: Path, name: str) -> None:
    """Write the evidence of a run, with figures of four digits."""
    from rlhf_cli.health.ranking import gather

    values = gather(root, device="cpu").as_json()
    values["figures"] = {key: float(f"{value:.4g}") for key, value in values["figures"].items()}
    RECORDED.mkdir(parents=True, exist_ok=True)
    (RECORDED / f"{name}.json").write_text(json.dumps(values) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
