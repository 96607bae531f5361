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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from rlhf_cli.config.by_stage import CONFIGS
from rlhf_cli.config.loader import load_config
from rlhf_cli.config.stage import STAGES
from rlhf_cli.health.ranking import CAUSES
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
FILES = {
    "sft": {"train": "support/sft_train.jsonl.gz", "test": "support/sft_test.jsonl"},
    "rm": {"train": "support/pref_train.jsonl.gz", "test": "support/pref_test.jsonl"},
    "ppo": {"train": "support/prompts_train.jsonl.gz", "test": "support/prompts_test.jsonl"},
}
Rows = list[dict[str, Any]]
Data = Callable[[str], dict[str, Rows]]  # of a stage: its rows by side, `train` and `test`


@dataclass(frozen=True)
class Fault:
    """One way to break a run. The stages before that of its cause are those of the good run of the same seed."""

    cause: str | None  # the cause that `rlhf diagnose` must name first; None for a good run
    overrides: tuple[str, ...] = ()  # of the config of the cause's stage, as all that follows
    data: Data | None = None
    make: Callable[[Path], str] | None = None
    """Makes something in a folder. Returns one more override."""
    patch: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    """A change of the code while the stage runs: what another tool would have done."""
    seed_offset: int = 0  # added to the seed of that stage and of those after it
    good_until: str = "ppo"  # the first stage of a good run that is its own

    @property
    def stage(self) -> str:
        return next((rule.stage for rule in CAUSES if rule.name == self.cause), self.good_until)


# ------------------------------------------------------------------------------------------ other rows


def read(name: str) -> Rows:
    path = ROOT / "data" / name
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def changed(change: Callable[[Rows], Rows], sides: tuple[str, ...] = ("train", "test")) -> Data:
    """The rows of a stage, changed."""
    return lambda stage: {side: change(read(FILES[stage][side])) for side in sides}


def training(change: Callable[[Rows], Rows]) -> Data:
    """The training rows of a stage, changed."""
    return changed(change, ("train",))


def answers(change: Callable[[int, str], str]) -> Data:
    """Demonstrations whose answers are changed, by their number."""
    return changed(lambda rows: [row | {"response": change(i, row["response"])} for i, row in enumerate(rows)])


def prompts(change: Callable[[str], str], sides: tuple[str, ...] = ("train", "test")) -> Data:
    return changed(lambda rows: [row | {"prompt": change(row["prompt"])} for row in rows], sides)


def pairs(change: Callable[[str, str], tuple[str, str] | None], sides: tuple[str, ...] = ("train", "test")) -> Data:
    """Pairs whose (chosen, rejected) are changed, without gold columns."""

    def of(rows: Rows) -> Rows:
        found = [(row["prompt"], change(row["chosen"], row["rejected"])) for row in rows]
        return [{"prompt": prompt, "chosen": pair[0], "rejected": pair[1]} for prompt, pair in found if pair]

    return changed(of, sides)


def swapped(chosen: str, rejected: str) -> tuple[str, str]:
    return rejected, chosen


def noisy(share: float) -> Callable[[str, str], tuple[str, str]]:
    """Pairs of which this share has its labels swapped by chance."""
    generator = random.Random(0)
    return lambda chosen, rejected: (rejected, chosen) if generator.random() < share else (chosen, rejected)


def longer_first(chosen: str, rejected: str) -> tuple[str, str] | None:
    """The longer answer as the chosen one; None for answers of equal length."""
    if len(chosen.split()) == len(rejected.split()):
        return None
    longer, shorter = sorted((chosen, rejected), key=lambda text: len(text.split()), reverse=True)
    return longer, shorter


def shorter_first(chosen: str, rejected: str) -> tuple[str, str] | None:
    found = longer_first(chosen, rejected)
    return found and swapped(*found)


def bare(prompt: str) -> str:
    """A prompt without the words around it."""
    return prompt.removeprefix("Human: ").removesuffix("\n\nAssistant:")


def shuffled(values: list[str]) -> list[str]:
    random.Random(0).shuffle(values)
    return values


def turned(values: list[str]) -> list[str]:
    """Each value in the place before: a file lost its first row."""
    return [*values[1:], values[0]]


def moved(key: str, order: Callable[[list[str]], list[str]], step: int = 1) -> Callable[[Rows], Rows]:
    """Rows whose `key` is that of other rows: joined in another order. With a step, only every so many rows."""

    def move(rows: Rows) -> Rows:
        others = order([row[key] for row in rows])
        return [
            {k: v for k, v in row.items() if not k.startswith("gold")} | ({key: other} if i % step == step - 1 else {})
            for i, (row, other) in enumerate(zip(rows, others, strict=True))
        ]

    return move


def run_on(rows: Rows) -> Rows:
    """Demonstrations that were split too late: each answer holds the customer's next mail too."""
    follow = [row["prompt"].removesuffix(" Assistant:") for row in (*rows[1:], rows[0])]
    return [row | {"response": f"{row['response']}\n\n{mail}"} for row, mail in zip(rows, follow, strict=True)]


def ten_answers(rows: Rows) -> Rows:
    """The demonstrations were answered with ten templates."""
    return [row | {"response": rows[number % 10]["response"]} for number, row in enumerate(rows)]


def whole_texts(_: str) -> dict[str, Rows]:
    """PPO's prompts were made from the demonstrations as whole texts, so each already holds its answer."""
    return {"train": [{"prompt": row["prompt"] + row["response"]} for row in read("support/sft_train.jsonl.gz")]}


def stories(**answers: tuple[str, ...]) -> Data:
    """The rows of the story task in the template of this one, with answers drawn by chance."""
    starts = [f"Human: {row['prompt'].strip()}\n\nAssistant:" for row in read("stories/prompts.jsonl")]
    generator = random.Random(0)
    rows = [{"prompt": start} | {key: generator.choice(some) for key, some in answers.items()} for start in starts]
    return lambda _: {"train": rows[100:], "test": rows[:100]} if answers else {"train": rows}


HAPPY = (" They laughed and were happy all day.", " Then a friend came and helped. It was a good day.")
SAD = (" It began to rain and nobody came.", " Then it was dark. It was a sad and lonely day.")


# ---------------------------------------------------------------------------------------- other things


def scored_by(body: str) -> Callable[[Path], str]:
    """A reward function in place of the reward model: an expression of `prompt` and `text`."""

    def make(folder: Path) -> str:
        lines = [
            "import hashlib",
            "def score(prompts, responses, rows):",
            f"    return [float({body}) for prompt, text in zip(prompts, responses)]",
        ]
        (folder / "reward.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return f"rewards=[{{type: function, function: {folder / 'reward.py'}:score}}]"

    return make


def reference(seed: int, *overrides: str) -> Callable[[Path], str]:
    """The KL is measured to another SFT model than the one that PPO starts from."""

    def make(folder: Path) -> str:
        _run("sft", folder / "other", seed, overrides)
        return f"ref_policy={{path: {folder / 'other/sft/model'}}}"

    return make


@contextlib.contextmanager
def reward_model_without_eos() -> Iterator[None]:
    """Train the reward model on answers without EOS, as a tool that tokenises plain text does."""
    from rlhf_cli.data.answers import AnswerEncoder

    original = AnswerEncoder.encode_rows

    def without(*arguments: Any) -> Any:
        return [(ids[:-1], answer_mask[:-1]) for ids, answer_mask in original(*arguments)]

    with mock.patch.object(AnswerEncoder, "encode_rows", without):
        yield


@contextlib.contextmanager
def padding_not_learned() -> Iterator[None]:
    """Let <eos> serve as the padding, and leave every padding token out of SFT's loss."""
    from rlhf_cli.data import encoders
    from rlhf_cli.models import scratch

    encoder, tokenise = encoders.DemonstrationEncoder, scratch.train_tokenizer
    make = encoder.items

    def masked(self: Any, row: Any, sequences: Any) -> Any:
        (example,) = make(self, row, sequences)
        if not hasattr(example, "loss_mask"):
            return [example]
        eos = example.ids[-1]
        mask = [m and i != eos for m, i in zip(example.loss_mask, example.ids, strict=True)]
        return [replace(example, loss_mask=mask)]

    def shared(*arguments: Any) -> Any:
        tokenizer = tokenise(*arguments)
        tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    with mock.patch.object(encoder, "items", masked), mock.patch.object(scratch, "train_tokenizer", shared):
        yield


def weight(value: float) -> tuple[str, ...]:
    return (f"rewards=[{{type: reward_model, weight: {value}}}]",)


QUESTION = (r'data.prompt_template="### Question\n{prompt}\n### Answer\n"',)
KEYS = "keys: {prompt: response, response: prompt}"
FAULTS: dict[str, Fault] = {
    "good": Fault(None),
    "good_other_seed": Fault(None, seed_offset=1, good_until="sft"),
    "good_other_kl": Fault(None, ("ppo.kl_coef=0.2",), seed_offset=2),
    # The limits were set between the runs of these and the good ones.
    "labels_swapped": Fault("labels_swapped", data=pairs(swapped)),
    "rm_without_eos": Fault("rm_without_eos", patch=reward_model_without_eos),
    "sft_underfit": Fault("sft_underfit", ("training.num_steps=25", "evaluation.every_steps=null")),
    "pad_is_eos": Fault("sft_without_eos", patch=padding_not_learned),
    "kl_coef_0": Fault("kl_unrestrained", ("ppo.kl_coef=0",)),
    "wrong_template": Fault("template_differs", QUESTION, prompts(bare)),
    "other_temperature": Fault("temperature_differs", ("rollout.temperature=2.0",)),
    "untrained_head": Fault("rm_untrained", ("training.num_steps=20", "optimizer.learning_rate=1e-9")),
    "learning_rate_30": Fault("ppo_steps_too_large", ("optimizer.learning_rate=1.8e-2",)),
    "length_biased": Fault("pairs_length_biased", data=pairs(longer_first)),
    "weight_negative": Fault("reward_opposed", weight(-1)),
    "reward_constant": Fault("reward_constant", make=scored_by("1.0")),
    "answers_shuffled": Fault("sft_ignores_prompts", data=changed(moved("response", shuffled))),
    "answers_run_on": Fault("demonstrations_hold_markup", data=changed(run_on)),
    "kl_coef_10": Fault("kl_too_strong", ("ppo.kl_coef=10",)),
    "four_prompts": Fault("prompts_few", data=training(lambda rows: rows[:4] * 500)),
    "value_untrained": Fault("value_untrained", ("value_model.learning_rate=1e-12",)),
    "clip_narrow": Fault("clip_too_narrow", ("ppo.clip_range=0.001",)),
    "labels_noisy": Fault("labels_noisy", data=pairs(noisy(0.4))),
    "sft_learning_rate_30": Fault("sft_steps_too_large", ("optimizer.learning_rate=0.12",)),
    "reward_of_noise": Fault(
        "score_unlearned", make=scored_by("int(hashlib.md5((prompt + text).encode()).hexdigest(), 16) % 1000 / 300")
    ),
    "reward_of_length": Fault("policy_misjudged", make=scored_by("len(text.split()) / 10")),
    "prompts_of_stories": Fault("prompts_differ", data=stories()),
    "sixty_pairs": Fault("rm_memorised", data=training(lambda rows: rows[:60])),
    "forty_demonstrations": Fault("sft_memorised", data=training(lambda rows: rows[:40])),
    "eos_as_text": Fault("demonstrations_hold_markup", data=answers(lambda _, text: text + "</s>")),
    # Nineteen others. The cause of the last eight, and of all below, was written down before their first run.
    "reward_of_brevity": Fault("policy_misjudged", make=scored_by("-len(text.split()) / 10")),
    "some_answers_with_markup": Fault(
        "demonstrations_hold_markup", data=answers(lambda i, text: text + "<|im_end|>" * (i % 10 < 3))
    ),
    "kl_coef_4": Fault("kl_too_strong", ("ppo.kl_coef=4",)),
    "eight_prompts": Fault("prompts_few", data=training(lambda rows: rows[:8] * 250)),
    "labels_noisier": Fault("labels_noisy", data=pairs(noisy(0.3))),
    "sft_slow": Fault("sft_underfit", ("optimizer.learning_rate=1e-5",)),
    "rm_learning_rate_30": Fault("rm_steps_too_large", ("optimizer.learning_rate=2.1e-2",)),
    "cold_sampling": Fault("temperature_differs", ("rollout.temperature=0.25",)),
    "value_fast": Fault("value_untrained", ("value_model.learning_rate=1.0",)),
    "rm_cut": Fault("rm_without_eos", ("data.max_length=24", "data.truncation=right")),
    "rm_other_template": Fault("rm_prompts_differ", data=prompts(bare)),
    "six_tokens": Fault("replies_cut", ("rollout.max_new_tokens=6",)),
    "learning_rate_of_a_large_model": Fault("ppo_hardly_moved", ("optimizer.learning_rate=1e-6",)),
    "score_clip_small": Fault("kl_too_strong", ("ppo.score_clip=0.01",)),
    "pairs_of_stories": Fault("rm_prompts_differ", data=stories(chosen=HAPPY, rejected=SAD)),
    "prompts_cut": Fault(
        "template_differs", ("data.max_prompt_length=16", "data.truncation=right", "evaluation.gold=null")
    ),
    "sixteen_epochs": Fault("ppo_steps_too_large", ("ppo.ppo_epochs=16",)),
    "labels_of_chance": Fault("labels_noisy", data=pairs(noisy(0.5))),
    "rm_twenty_steps": Fault("rm_weak", ("training.num_steps=20",)),
    # The first thirteen of other kinds.
    "answers_cut": Fault("sft_without_eos", ("data.max_length=40", "data.truncation=right")),
    "columns_swapped": Fault(
        "sft_prompts_differ", tuple(f"data.{side}={{path: data/{name}, {KEYS}}}" for side, name in FILES["sft"].items())
    ),
    "canned_answers": Fault(
        "demonstrations_repeat",
        data=answers(lambda i, text: " Thank you for writing. We will see what can be done." if i % 10 < 7 else text),
    ),
    "sft_warmup": Fault("sft_underfit", ("optimizer.warmup_steps=3000",)),
    "pairs_with_other_prompts": Fault("pairs_mixed_up", data=changed(moved("prompt", shuffled))),
    "chosen_marked": Fault("pairs_marked", data=pairs(lambda chosen, rejected: (" Certainly." + chosen, rejected))),
    "rm_slow": Fault("rm_untrained", ("optimizer.learning_rate=7e-6",)),
    "pairs_dropped": Fault("pairs_dropped", ("data.max_length=44",)),
    "reward_of_prompts": Fault("score_unlearned", make=scored_by("len(prompt) / 20")),
    "reward_saturated": Fault("reward_constant", make=scored_by("len(text) > 10")),
    "score_of_hundreds": Fault("kl_unrestrained", weight(100)),
    "other_reference": Fault(
        "reference_differs", make=reference(0, "training.num_steps=60", "evaluation.every_steps=null")
    ),
    "prompts_with_answers": Fault("template_differs", data=whole_texts),
    # The second thirteen, most of them kinds of the first in another form.
    "answers_half_cut": Fault("sft_without_eos", ("data.max_length=56", "data.truncation=right")),
    "demonstrations_dropped": Fault("demonstrations_dropped", ("data.max_length=44",)),
    "refusals": Fault(
        "demonstrations_repeat",
        data=answers(lambda i, text: text if i % 3 else " I am sorry, but I cannot help with that."),
    ),
    "sft_other_template": Fault("sft_prompts_differ", QUESTION),
    "pairs_shifted": Fault("pairs_mixed_up", data=changed(moved("prompt", turned))),
    "rejected_marked": Fault(
        "pairs_marked",
        data=pairs(lambda chosen, rejected: (chosen, f" As an AI,{rejected}" if len(rejected) % 5 else rejected)),
    ),
    "rm_warmup": Fault("rm_untrained", ("optimizer.warmup_steps=30000",)),
    "pairs_repeated": Fault("rm_memorised", data=training(lambda rows: rows[:100] * 30)),
    "reward_capped": Fault("reward_constant", make=scored_by("min(1, len(text.split()) / 4)")),
    "reference_of_another_seed": Fault("reference_differs", make=reference(1)),
    "prompts_without_end": Fault(
        "template_differs", data=prompts(lambda text: text.removesuffix("\n\nAssistant:"), ("train",))
    ),
    "score_of_hundredths": Fault("kl_too_strong", weight(0.01)),
    "ppo_warmup": Fault("ppo_hardly_moved", ("optimizer.warmup_steps=20000",)),
    # The third thirteen, of other kinds again.
    "sft_of_stories": Fault("sft_prompts_differ", data=stories(response=(*HAPPY, SAD[0]))),
    "answers_half_shuffled": Fault("sft_ignores_prompts", data=changed(moved("response", shuffled, step=2))),
    "ten_answers": Fault("demonstrations_repeat", data=changed(ten_answers)),
    "answers_missing": Fault("demonstrations_repeat", data=answers(lambda i, text: " N/A" if i % 10 < 6 else text)),
    "rejected_missing": Fault("pairs_length_biased", data=pairs(lambda chosen, _: (chosen, " ..."))),
    "rejected_without_stop": Fault(
        "pairs_marked", data=pairs(lambda chosen, rejected: (chosen, rejected.removesuffix(".")))
    ),
    "three_hundred_pairs": Fault("rm_memorised", data=training(lambda rows: rows[:300])),
    "prompts_with_space": Fault("template_differs", data=prompts(lambda text: text + " ")),
    "template_twice": Fault("template_differs", (r'data.prompt_template="Human: {prompt}\n\nAssistant:"',)),
    "kl_target_tiny": Fault("kl_too_strong", ("ppo.kl_controller=adaptive", "ppo.kl_target=0.01", "ppo.kl_horizon=20")),
    "two_iterations": Fault("ppo_hardly_moved", ("ppo.num_iterations=2",)),
    "reward_of_a_word": Fault("policy_misjudged", make=scored_by("text.count('thank') + text.count('Thank')")),
    "weight_zero": Fault("reward_constant", weight(0)),
    # Twelve more, after rules for those.
    "sft_weight_decay": Fault("sft_underfit", ("optimizer.weight_decay=30",)),
    "answers_shifted": Fault("sft_ignores_prompts", data=changed(moved("response", turned))),
    "sft_prompts_lost": Fault("sft_prompts_differ", data=prompts(lambda _: "Human: Hello.\n\nAssistant:")),
    "answers_with_role": Fault("demonstrations_hold_markup", data=answers(lambda _, text: f" Assistant:{text}")),
    "shorter_chosen": Fault("pairs_length_biased", data=pairs(shorter_first)),
    "training_labels_swapped": Fault("labels_swapped", data=pairs(swapped, ("train",))),
    "pairs_in_both_orders": Fault(
        "labels_noisy",
        data=training(
            lambda rows: [
                {"prompt": row["prompt"], "chosen": row[a], "rejected": row[b]}
                for row in rows
                for a, b in (("chosen", "rejected"), ("rejected", "chosen"))
            ]
        ),
    ),
    "pairs_without_prompts": Fault("rm_prompts_differ", data=prompts(lambda _: "Human: Hello.\n\nAssistant:")),
    "reward_with_offset": Fault("kl_too_strong", make=scored_by("1000 + len(text) / 1000")),
    "prompts_in_capitals": Fault("template_differs", data=prompts(str.upper, ("train",))),
    "kl_in_loss_free": Fault("kl_unrestrained", ("ppo.kl_in=loss", "ppo.kl_coef=0")),
    "steps_unclipped": Fault("ppo_steps_too_large", ("ppo.clip_range=100", "optimizer.learning_rate=6e-3")),
}

EVERYTHING = os.environ.get("RLHF_ALL_SEEDS") == "1"
FEW = {"good": "ppo", "answers_shuffled": "sft", "labels_swapped": "ppo", "reward_constant": "ppo"}
OF_THE_TEST = dict.fromkeys(FAULTS, "ppo") if EVERYTHING else FEW
"""The runs of the slow test and the last stage of each: with RLHF_ALL_SEEDS=1 all of them, else a good run and a fault
of each stage."""


# ------------------------------------------------------------------------------------------------ runs


def make_run(folder: Path, name: str, *, seed: int = 0, last: str = "ppo") -> Path:
    """The artifact directory of a run in `folder` to the stage `last`, made if it is not there."""
    fault, root = FAULTS[name], folder / f"{name}_{seed}"
    if (root / last / "manifest.json").exists():
        return root
    first = STAGES.index(fault.stage)
    root.mkdir(parents=True, exist_ok=True)
    if first:
        base = _good_stages(folder, seed)
        for stage in STAGES[:first]:
            if not (root / stage).exists():
                shutil.copytree(base / stage, root / stage)
    overrides = list(fault.overrides)
    for side, rows in (fault.data(fault.stage) if fault.data else {}).items():
        path = root / f"{fault.stage}_{side}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        overrides.append(f"data.{side}={path}")
    if fault.make:
        overrides.append(fault.make(root))
    # The cache of tokens does not know of a change in the code.
    cache = {"RLHF_CACHE": str(root / "cache")} if fault.patch else {}
    with (fault.patch or contextlib.nullcontext)(), mock.patch.dict(os.environ, cache):
        _run(fault.stage, root, seed + fault.seed_offset, overrides)
    for stage in STAGES[first + 1 : STAGES.index(last) + 1]:
        _run(stage, root, seed + fault.seed_offset)
    return root


def _good_stages(folder: Path, seed: int) -> Path:
    """SFT and the reward model of the good runs of a seed."""
    root = folder / f"base_{seed}"
    for stage in ("sft", "rm"):
        _run(stage, root, seed)
    return root


def _run(stage: str, root: Path, seed: int, overrides: Sequence[str] = ()) -> None:
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
    """Write the evidence of a run, with figures of four digits and no path of this machine."""
    from rlhf_cli.health.ranking import gather

    values = asdict(gather(root, device="cpu"))
    values["figures"] = {key: float(f"{value:.4g}") for key, value in values["figures"].items()}
    values["problems"] = [problem.replace(str(root), "artifacts") for problem in values["problems"]]
    RECORDED.mkdir(parents=True, exist_ok=True)
    (RECORDED / f"{name}.json").write_text(json.dumps(values) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
