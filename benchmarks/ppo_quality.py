"""Compare our PPO with the PPOTrainer of TRL 1.12.0: same SFT and reward models, prompts and number of episodes.

    python benchmarks/ppo_quality.py --work DIR --seeds 0 1 2

For each seed, one process after the other, each on one thread:

 1. `rlhf pipeline configs/support` trains SFT, RM and our PPO with the shipped configs, to DIR/seed<N>
 2. trl_ppo.py in TRL's own environment trains from those SFT and RM checkpoints, once for each of TRL_RUNS
 3. `measure` evaluates every policy on the held-out prompts, with the same code and the same uniforms

Finished parts are kept, so a second call only measures and reports. The report is DIR/PPO_QUALITY.md, or with
--record the tracked file beside this script. Every measured reply with its figures is in DIR/seed<N>/replies.jsonl.
"""

import argparse
import datetime
import gzip
import hashlib
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import PreTrainedTokenizerBase

import rlhf_cli
from rlhf_cli.algorithms.statistics import distinct_n
from rlhf_cli.config.rewards import OWN_REWARD_MODEL
from rlhf_cli.data.batches import Budget
from rlhf_cli.data.encode import RowText
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.data.records import Record, batched
from rlhf_cli.models.cost import CPU_TOKENS
from rlhf_cli.models.load import load_policy, load_tokenizer, prepare
from rlhf_cli.processes.environment import set_up_process
from rlhf_cli.rewards.base import RewardSource, Samples
from rlhf_cli.rewards.functions import load_function
from rlhf_cli.rewards.sources import load_rewards
from rlhf_cli.rollout.rollout import Models, collect
from rlhf_cli.rollout.sampling import Sampling, draw_uniforms, response_text, stop_ids

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CONFIGS = "configs/support"
TRL_VERSION = "1.12.0"
TORCH_VERSION = "2.13.0"
TRL_RUNS = {
    "TRL, the same settings": ["--value-head", "zero"],
    "TRL, value head from the RM": [],
    "TRL, lr 5e-4, no warm-up, 40 updates": ["--learning-rate", "5e-4", "--warmup-updates", "0", "--updates", "40"],
}
"""Name in the report -> options of trl_ppo.py."""
OURS = "ours, as shipped"
SFT = "SFT"

MARGIN = 0.15
"""How far our score and gold may be below TRL's, in their own units."""
KL_MARGIN = 0.5
"""How far our KL may be above TRL's, in nats per reply."""
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Number of seeds -> half width of Student's 95 % interval, in standard errors of the mean."""


# ------------------------------------------------------------------------------------------ training


def train_ours(run: Path, seed: int) -> None:
    """Train SFT, RM and PPO with the shipped configs; finished and unchanged stages are skipped."""
    command = [sys.executable, "-m", "rlhf_cli", "pipeline", CONFIGS]
    execute([*command, "--set", f"seed={seed}", "--set", f"artifacts={run}"], run / "pipeline.log")


def train_trl(python: Path, run: Path, out: Path, options: Sequence[str]) -> None:
    """Run trl_ppo.py, unless its result exists and is newer than the models it starts from."""
    result = out / "result.json"
    made_from = max((run / stage / "manifest.json").stat().st_mtime for stage in ("sft", "rm"))
    if result.is_file() and result.stat().st_mtime > made_from:
        return
    paths = {
        "--config": run / "ppo" / "config.yaml",
        "--sft": run / "sft" / "model",
        "--rm": run / "rm" / "model",
        "--out": out,
    }
    out.mkdir(parents=True, exist_ok=True)
    command = [str(python), str(HERE / "trl_ppo.py"), *(str(x) for pair in paths.items() for x in pair), *options]
    execute(command, out / "log")


def make_trl_environment(folder: Path) -> Path:
    """Return the Python of a virtual environment with TRL; create the environment if it does not exist.

    torch is installed first in its exact version, so that TRL's `torch>=...` does not pull another build.
    """
    python = folder / "bin" / "python"
    if not (folder / "finished").is_file():
        execute([sys.executable, "-m", "venv", str(folder)], None)
        pip = [str(python), "-m", "pip", "install", "--constraint", str(HERE / "trl-constraints.txt")]
        execute([*pip, f"torch=={TORCH_VERSION}"], folder / "pip.log")
        execute([*pip, f"trl=={TRL_VERSION}"], folder / "pip.log")
        (folder / "finished").touch()
    return python


def execute(command: Sequence[str], log: Path | None) -> None:
    """Run a command from the repository's root on one thread and append its output to `log`."""
    print(shlex.join(command), flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if log is None:
        subprocess.run(command, check=True, cwd=ROOT, env=environment)
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    if code:
        tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-15:])
        raise SystemExit(f"{tail}\n{log}: the command failed with exit code {code}")


# --------------------------------------------------------------------------------------- measurement


@dataclass(frozen=True)
class Measurement:
    """A policy's replies to the held-out prompts; every list is [draws][prompts]."""

    texts: list[list[str]]
    figures: dict[str, list[list[float]]]
    """score, kl, length, ended, and those of the judge: gold, right, unique, ..."""

    def mean(self, name: str) -> float:
        """The mean over all replies."""
        return statistics.fmean(value for draw in self.figures[name] for value in draw)

    def by_prompt(self, name: str) -> list[float]:
        """The mean over draws of each prompt."""
        return [statistics.fmean(values) for values in zip(*self.figures[name], strict=True)]

    @property
    def summary(self) -> dict[str, float]:
        """The columns of the table. Distinct-2 falls with the number of replies, so it is computed per draw."""
        return {
            "score": self.mean("score"),
            "median": statistics.fmean(statistics.median(draw) for draw in self.figures["score"]),
            **{name: self.mean(name) for name in ("gold", "kl", "right", "unique", "ended", "length")},
            "distinct_2": statistics.fmean(distinct_n([t.split() for t in draw], 2) for draw in self.texts),
            **{name: self.mean(name) for name in ("rude", "wellformed")},
        }


def measure(policy_path: Path, run: Path, draws: int, num_prompts: int | None = None) -> Measurement:
    """Sample and judge `draws` replies to each of the first `num_prompts` held-out prompts (None: as configured).

    The first draw uses the uniforms of the ppo stage's own evaluation, so for our policy its figures are those of
    evaluation.json.
    """
    config = yaml.safe_load((run / "ppo" / "config.yaml").read_text(encoding="utf-8"))
    device, precision, batch_size = torch.device("cpu"), "float32", config["ppo"]["rollout_batch_size"]
    tokenizer = load_tokenizer(str(run / "sft" / "model"))
    policy, ref_policy = load_policy(str(policy_path)), load_policy(str(run / "sft" / "model"))
    for model in (policy, ref_policy):
        prepare(model, device)
    sampling = Sampling(temperature=config["rollout"]["temperature"], stop=frozenset(stop_ids(ref_policy, tokenizer)))
    reward_model = load_reward(run, tokenizer)
    judge = load_function(config["evaluation"]["gold"])
    rows = [Record(row["prompt"], "", columns=row) for row in read_rows(data_file(config, "test"))]
    rows = rows[: num_prompts or config["evaluation"]["num_prompts"]]
    prompts = [
        PromptRow(row.prompt, ids, row) for row, ids in zip(rows, RowText(tokenizer).prompt_ids(rows), strict=True)
    ]

    texts: list[list[str]] = []
    figures: dict[str, list[list[float]]] = {}
    for draw in range(draws):
        table = draw_uniforms(config["seed"], "ppo evaluation", draw, len(prompts), config["rollout"]["max_new_tokens"])
        rollouts = [
            collect(
                [prompts[i] for i in part],
                table[list(part)],
                Models(policy, ref_policy),
                sampling=sampling,
                tokenizer=tokenizer,
                budget=Budget(CPU_TOKENS, batch_size),
                precision=precision,
                recompute=True,
                with_values=False,
            )
            for part in batched(range(len(prompts)), batch_size)
        ]
        responses = [response for rollout in rollouts for response in rollout.responses]
        ended = [response.ended for response in responses]
        replies = [response_text(tokenizer, response, sampling) for response in responses]
        judged = Samples(
            [p.text for p in prompts],
            replies,
            [p.ids for p in prompts],
            [response.ids for response in responses],
            ended,
            [p.row.columns for p in prompts],
        )
        texts.append(replies)
        own = {
            "score": reward_model.score(judged).tolist(),
            "kl": torch.cat([(r.logprobs - r.ref_logprobs).sum(1) for r in rollouts]).tolist(),
            "length": [float(len(response.ids)) for response in responses],
            "ended": [float(end) for end in ended],
        }
        marks = judge(
            judged.prompts, replies, [{**p.row.columns, "ended": e} for p, e in zip(prompts, ended, strict=True)]
        )
        for name, values in (own | {key: [row[key] for row in marks] for key in marks[0]}).items():
            figures.setdefault(name, []).append(values)
    return Measurement(texts, figures)


def load_reward(run: Path, tokenizer: PreTrainedTokenizerBase) -> RewardSource:
    """The run's reward model as PPO uses it, with its normalisation."""
    return load_rewards([OWN_REWARD_MODEL], str(run), tokenizer, torch.device("cpu"), "float32")[0][0]


def data_file(config: dict[str, Any], side: str) -> Path:
    """The only file of `data.train` or `data.test` in a resolved config."""
    (source,) = config["data"][side]
    return Path(source["path"])


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def check_same_task(run: Path, config: dict[str, Any], trl: dict[str, Any]) -> None:
    """Raise SystemExit unless TRL trained on our tokens, its reward model gave our scores and its ratio was 1."""
    tokenizer = load_tokenizer(str(run / "sft" / "model"))
    with gzip.open(data_file(config, "train"), "rt", encoding="utf-8") as file:
        rows = [Record(json.loads(line)["prompt"], "") for line in file]
    ids = RowText(tokenizer).prompt_ids(rows)
    if hashlib.sha256(json.dumps(ids).encode()).hexdigest() != trl["prompts"]:
        raise SystemExit(f"{run}: TRL's training prompts have different tokens from ours")
    # Scores of the first prompts, each followed by EOS alone.
    some, ends = ids[: len(trl["scores"])], [[int(tokenizer.eos_token_id)]] * len(trl["scores"])
    judged = Samples([], [""] * len(some), some, ends, [True] * len(some), [{}] * len(some))
    gap = (load_reward(run, tokenizer).score(judged) - torch.tensor(trl["scores"])).abs().max().item()
    if gap > 1e-4:
        raise SystemExit(f"{run}: TRL's reward model differs from ours by up to {gap:.2g}, at most 1e-4 is allowed")
    # A ratio of 0.5 means that the optimizer steps half as often as it should.
    ratios = [row["val/ratio"] for row in trl["log"]]
    if min(ratios) < 0.95 or max(ratios) > 1.05:
        raise SystemExit(f"{run}: TRL's val/ratio is {min(ratios):.3f} to {max(ratios):.3f}, must be 0.95 to 1.05")


def save_replies(path: Path, measured: dict[str, Measurement]) -> None:
    """Write every reply with its figures, one per line."""
    with path.open("w", encoding="utf-8") as file:
        for name, m in measured.items():
            for draw, texts in enumerate(m.texts):
                for prompt, text in enumerate(texts):
                    figures = {key: values[draw][prompt] for key, values in m.figures.items()}
                    row = {"policy": name, "draw": draw, "prompt": prompt, "reply": text, **figures}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")


# ------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Training:
    """Episodes and seconds of one training."""

    episodes: int
    seconds: float
    """Of the loop alone, without loading and evaluation."""

    @property
    def rate(self) -> float:
        """Episodes per second."""
        return self.episodes / self.seconds


def our_training(run: Path) -> Training:
    """From the stage's metrics: the start of the first iteration to the end of the last."""
    rows = read_rows(run / "ppo" / "metrics.jsonl")
    config = yaml.safe_load((run / "ppo" / "config.yaml").read_text(encoding="utf-8"))
    first = sum(rows[0][f"time/{part}_s"] for part in ("rollout", "scoring", "reward", "update"))
    seconds = rows[-1]["time/elapsed_s"] - rows[0]["time/elapsed_s"] + first
    return Training(len(rows) * config["ppo"]["rollout_batch_size"], seconds)


@dataclass(frozen=True)
class Difference:
    """Ours minus TRL's in one figure."""

    seeds: list[float]
    """The mean over prompts, per seed."""
    error: float
    """Standard error of the mean over seeds and prompts, from the spread over prompts: the effect of other prompts
    and samples with the same models."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.seeds)

    @property
    def seed_error(self) -> float:
        """Standard error from the spread over seeds: the effect of other seeds. 0 (unknown) with one seed."""
        return statistics.stdev(self.seeds) / len(self.seeds) ** 0.5 if len(self.seeds) > 1 else 0.0

    @property
    def half_width(self) -> float:
        """Half width of the 95 % interval: the wider of the normal one over prompts and Student's over seeds."""
        over_seeds = STUDENT[len(self.seeds)] * self.seed_error if len(self.seeds) > 1 else 0.0
        return max(1.96 * self.error, over_seeds)

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ({self.error:.2f}; {self.seed_error:.2f}) ± {self.half_width:.2f}"


def paired_difference(ours: Sequence[Measurement], theirs: Sequence[Measurement], name: str) -> Difference:
    """The paired difference over the same prompts and uniforms, with one pair of measurements per seed.

    Draws of a prompt are averaged first, then seeds: prompts are the independent units.

    >>> def one(score): return Measurement([["", ""]], {"score": [score]})
    >>> paired_difference([one([1.0, 2.0]), one([2.0, 5.0])], [one([1.0, 1.0]), one([1.0, 1.0])], "score")
    Difference(seeds=[0.5, 2.5], error=1.0)
    """
    by_seed = [
        [a - b for a, b in zip(mine.by_prompt(name), other.by_prompt(name), strict=True)]
        for mine, other in zip(ours, theirs, strict=True)
    ]
    by_prompt = [statistics.fmean(values) for values in zip(*by_seed, strict=True)]
    error = statistics.stdev(by_prompt) / len(by_prompt) ** 0.5
    return Difference([statistics.fmean(values) for values in by_seed], error)


def verdict(differences: dict[str, Difference]) -> str:
    """Whether the claim holds on average, and for each figure how certain that is.

    `surely`: the whole 95 % interval is within the margin; `in the mean`: the mean is, the interval is not.

    >>> verdict({"score": Difference([-0.10], 0.01), "gold": Difference([0.0], 0.1), "kl": Difference([0.45], 0.1)})
    'holds (score surely, gold in the mean, kl in the mean)'
    >>> verdict({"score": Difference([-0.16], 0.01), "gold": Difference([0.0], 0.01), "kl": Difference([0.0], 0.01)})
    'fails (score not, gold surely, kl surely)'
    """
    said = {}
    for name, difference in differences.items():
        room = KL_MARGIN - difference.mean if name == "kl" else MARGIN + difference.mean
        said[name] = "not" if room < 0 else "surely" if room > difference.half_width else "in the mean"
    word = "fails" if "not" in said.values() else "holds"
    return f"{word} ({', '.join(f'{name} {how}' for name, how in said.items())})"


# -------------------------------------------------------------------------------------------- report


COLUMNS = {
    "score": "score, mean",
    "median": "score, median",
    "gold": "gold",
    "uplift": "gold uplift",
    "kl": "KL",
    "right": "right",
    "unique": "unique",
    "ended": "eos",
    "length": "tokens",
    "distinct_2": "distinct-2",
    "rude": "rude",
    "wellformed": "wellformed",
}
"""Figure -> its heading."""


@dataclass(frozen=True)
class Seed:
    """One seed: its trainings, their times and the measured replies."""

    seed: int
    measured: dict[str, Measurement]
    training: dict[str, Training]
    trl: dict[str, dict[str, Any]]
    """Name of the TRL run -> its result.json."""

    def summary(self, name: str) -> dict[str, float]:
        """One row of the table of figures."""
        return self.measured[name].summary | {
            "uplift": self.measured[name].mean("gold") - self.measured[SFT].mean("gold")
        }


def report(seeds: Sequence[Seed], config: dict[str, Any], command: str, draws: int) -> str:
    """The text of PPO_QUALITY.md."""
    names = list(seeds[0].measured)
    num_prompts = len(seeds[0].measured[SFT].texts[0])
    numbers = ", ".join(str(s.seed) for s in seeds)
    versions = next(iter(seeds[0].trl.values()))["versions"]
    means = []
    for name in names:
        rows = [s.summary(name) for s in seeds]
        means.append([f"**{name}**", *(f"{statistics.fmean(row[key] for row in rows):.3f}" for key in COLUMNS)])
    each = [[str(s.seed), name, *(f"{s.summary(name)[key]:.3f}" for key in COLUMNS)] for s in seeds for name in names]
    compared = []
    for name in TRL_RUNS:
        ours, theirs = [s.measured[OURS] for s in seeds], [s.measured[name] for s in seeds]
        differences = {key: paired_difference(ours, theirs, key) for key in ("score", "gold", "kl")}
        by_seed = [", ".join(f"{x:+.2f}" for x in d.seeds) for d in differences.values()]
        episodes = seeds[0].training[name].episodes
        equal = episodes == seeds[0].training[OURS].episodes
        said = verdict(differences) if equal else f"not judged: {episodes} episodes"
        compared.append([name, *map(str, differences.values()), *by_seed, said])
    times = [
        [
            name,
            str(seeds[0].training[name].episodes),
            ", ".join(f"{s.training[name].seconds:.0f}" for s in seeds),
            f"{statistics.fmean(s.training[name].rate for s in seeds):.0f}",
        ]
        for name in (OURS, *TRL_RUNS)
    ]
    wiring = []
    for name in TRL_RUNS:
        logs = [s.trl[name]["log"] for s in seeds]
        ratios = [row["val/ratio"] for log in logs for row in log]
        first = [log[0] for log in logs]
        wiring.append(
            [
                name,
                f"{min(ratios):.4f} to {max(ratios):.4f}",
                ", ".join(f"{row['objective/kl']:.1e}" for row in first),
                ", ".join(f"{row['objective/scores']:+.2f}" for row in first),
            ]
        )
    settings = {name: seeds[0].trl[name]["settings"] for name in TRL_RUNS}
    shared = {k: v for k, v in next(iter(settings.values())).items() if all(s[k] == v for s in settings.values())}
    shared.pop("seed", None)
    own_settings = {key: config[key] for key in ("rollout", "ppo", "optimizer", "value_model")}
    return "\n".join(
        [
            "# Our PPO against the PPOTrainer of TRL 1.12.0",
            "",
            "Written by `ppo_quality.py`; README.md describes what is compared and how. Run on "
            f"{datetime.datetime.now(datetime.UTC):%d %B %Y}, on a shared machine with {os.cpu_count()} CPU cores, "
            "every process on one thread:",
            "",
            f"    {command}",
            "",
            f"Ours: rlhf {rlhf_cli.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
            f"Python {platform.python_version()}. TRL's environment: "
            f"{', '.join(f'{k} {v}' for k, v in versions.items())}.",
            "",
            "## Verdict",
            "",
            f"The claim: score and gold at most {MARGIN} below TRL's, KL at most {KL_MARGIN} nats per reply above. "
            f"It gives ours minus TRL's, the mean over seeds {numbers}. In brackets: the standard error of that "
            f"mean from the spread over the {num_prompts} prompts (paired: same prompts, same uniforms), then from the "
            "spread over the seeds. After the ±: half the width of the wider 95 % interval of the two. `surely`: that "
            "interval is within the margin; `in the mean`: the mean is, the interval is not.",
            "",
            *table(
                ["against", "score", "gold", "KL", "score by seed", "gold by seed", "KL by seed", "the claim"],
                compared,
            ),
            "",
            "## Figures",
            "",
            f"{num_prompts} held-out prompts, {draws} replies each at temperature {config['rollout']['temperature']}. "
            "Score: by the reward model, in standard deviations of the SFT model's scores. Gold: by the task's own "
            "judge, 0 to 5; uplift: over SFT. KL: policy to SFT, nats per reply. Right: the right remedy. Unique: "
            "different replies, with names, products and orders blanked. Eos: ended with EOS.",
            "",
            f"Mean over seeds {numbers}:",
            "",
            *table(["policy", *COLUMNS.values()], means),
            "",
            "Each seed:",
            "",
            *table(["seed", "policy", *COLUMNS.values()], each),
            "",
            "## Seconds",
            "",
            "Seconds of the training loop alone, by seed. One run at a time, each on one thread, while other programs "
            "used the machine to varying degrees: **this says nothing about speed**.",
            "",
            *table(["trainer", "episodes", "seconds", "episodes/s"], times),
            "",
            "## Is TRL set up correctly?",
            "",
            "Its `val/ratio` must be 1 (0.5 means half the optimizer steps), its first KL 0 and its first score near "
            "0, the SFT model's mean. The script checked that both sides trained on the same prompt tokens and that "
            "both reward models give the same scores (within 1e-4).",
            "",
            *table(["run", "val/ratio, all updates", "first KL, by seed", "first score, by seed"], wiring),
            "",
            "## Every setting",
            "",
            f"Ours (`{CONFIGS}/ppo.yaml`, resolved):",
            "",
            "```yaml",
            yaml.safe_dump(own_settings, sort_keys=False).rstrip(),
            "```",
            "",
            "TRL, in all runs, beside `use_cpu=True`, `bf16=False`, `gradient_checkpointing=False`:",
            "",
            "```yaml",
            yaml.safe_dump(shared, sort_keys=False).rstrip(),
            "```",
            "",
            "and in each run:",
            "",
            *(
                f"- {name}: " + ", ".join(f"{k} {v}" for k, v in own.items() if k not in shared and k != "seed")
                for name, own in settings.items()
            ),
            "",
        ]
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def report_file(work: Path, *, record: bool) -> Path:
    """The report's file: the tracked one only with --record."""
    return (HERE if record else work) / "PPO_QUALITY.md"


def main() -> None:
    """Train, measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models, logs and TRL's environment")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--draws", type=int, default=4, help="replies to each held-out prompt")
    parser.add_argument(
        "--trl-python", type=Path, help="Python of an environment with TRL; default: create one in --work"
    )
    parser.add_argument("--record", action="store_true", help="write the tracked benchmarks/PPO_QUALITY.md")
    arguments = parser.parse_args()
    work = arguments.work.absolute()
    out = report_file(work, record=arguments.record)
    # Not resolved: the Python of a virtual environment is a link to one outside it.
    python = arguments.trl_python.absolute() if arguments.trl_python else make_trl_environment(work / "trl")
    # The configs name their data relative to the root of the repository.
    os.chdir(ROOT)
    torch.set_num_threads(1)

    seeds = []
    for seed in arguments.seeds:
        run = work / f"seed{seed}"
        train_ours(run, seed)
        config = yaml.safe_load((run / "ppo" / "config.yaml").read_text(encoding="utf-8"))
        models = {SFT: run / "sft" / "model", OURS: run / "ppo" / "model"}
        training, trl = {OURS: our_training(run)}, {}
        for name, options in TRL_RUNS.items():
            out_trl = run / "_".join(["trl", *(option.removeprefix("--") for option in options)])
            train_trl(python, run, out_trl, options)
            trl[name] = json.loads((out_trl / "result.json").read_text(encoding="utf-8"))
            check_same_task(run, config, trl[name])
            training[name] = Training(trl[name]["settings"]["total_episodes"], trl[name]["seconds"])
            models[name] = out_trl / "model"
        measured = {name: measure(path, run, arguments.draws) for name, path in models.items()}
        save_replies(run / "replies.jsonl", measured)
        seeds.append(Seed(seed, measured, training, trl))
    command = f"python benchmarks/ppo_quality.py --work DIR --seeds {' '.join(map(str, arguments.seeds))}"
    if arguments.draws != parser.get_default("draws"):
        command += f" --draws {arguments.draws}"
    text = report(seeds, config, command, arguments.draws)
    out.write_text(text, encoding="utf-8")
    print(text)
    print(out)


if __name__ == "__main__":
    set_up_process()
    main()
