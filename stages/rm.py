"""RM: teach a model which of two answers people prefer, or what score an answer has.

    rlhf rm --config configs/support/rm.yaml
    torchrun --nproc-per-node 2 -m stages.rm --config configs/support/rm.yaml

Reads   preference pairs or scored rows, and a backbone: the run's SFT model, or any encoder or decoder
Writes  <artifacts>/rm/model, a sequence classifier with one label, metrics.jsonl

 1. the backbone with a new, small scalar head
 2. rows to token sequences, each answer whole: prompt, answer, EOS. Nothing is cut: a cut answer has no EOS
 3. for each step: pairs, -log sigmoid(chosen_score - rejected_score) (Ouyang et al. 2022, eq. 1 with K = 2),
    or scored rows, (score - target)^2 on targets brought to mean 0 and standard deviation 1
 4. held-out accuracy with its interval and margin, or error and correlations
 5. the score's mean and standard deviation over fresh samples of the SFT model go into the model's config as
    `score_mean` and `score_std`, so that kl_coef means the same whatever the scale of the scores
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.algorithms.reward_model import pairwise_loss, score_loss
from rlhf_cli.algorithms.statistics import pair_accuracy, pearson, spearman, wilson_interval
from rlhf_cli.artifacts import MANIFEST, model_directory, stage_directory
from rlhf_cli.config.schemas import RMConfig
from rlhf_cli.data.batches import chunks, stream
from rlhf_cli.data.encode import encode_for_classifier, encode_pairs, encode_prompts, prompt_text, require_eos
from rlhf_cli.data.formats import Preference, Scored, first_words, preferences, scored
from rlhf_cli.data.sources import Row, read_rows
from rlhf_cli.data.split import read_split
from rlhf_cli.errors import DataError
from rlhf_cli.models.forward import autocast
from rlhf_cli.models.limits import check_length, longest_input, positions
from rlhf_cli.models.load import (
    check_vocabulary,
    ensure_pad_token,
    is_language_model,
    load_policy,
    load_tokenizer,
    new_reward_model,
    prepare,
    reads_last_token,
    same_tokenizer,
    save,
    save_facts,
)
from rlhf_cli.rewards.sources import encode_texts, score_sequences, sequence_scores
from rlhf_cli.rollout.sampling import Sampling, sample, stop_ids, uniforms
from rlhf_cli.seeding import generator
from rlhf_cli.training import launch
from rlhf_cli.training.checkpoint import Weights
from rlhf_cli.training.distributed import World, require_rows_for_all
from rlhf_cli.training.optimizer import build_stepper, warmup_warning
from rlhf_cli.training.stage_run import StageRun


@dataclass(frozen=True)
class Pair:
    """A tokenised preference pair."""

    chosen: list[int]
    rejected: list[int]
    row: Preference


@dataclass(frozen=True)
class ScoredSequence:
    """A tokenised scored row; `target` is the score brought to mean 0 and standard deviation 1."""

    ids: list[int]
    target: float
    row: Scored


@dataclass(frozen=True)
class TargetScale:
    """How scores were brought to mean 0 and standard deviation 1."""

    mean: float
    std: float


def run(config: RMConfig, *, quiet: bool = False, restart: bool = False) -> None:
    """Run the stage: everything that the module's docstring lists, in its order."""
    with StageRun("rm", config, quiet=quiet, restart=restart) as stage:
        world, display = stage.world, stage.display
        pairwise = config.loss != "mse"
        require_rows_for_all(world, config.training.minibatch_size, "training.minibatch_size")

        # 1. The backbone and its head.
        path = model_directory(config.stage_model(config.model.path, "sft"))
        tokenizer = load_tokenizer(path, config.model.revision)
        model = new_reward_model(path, config.model.revision, seed=config.seed, head_std=config.model.head_std)
        check_vocabulary(model, tokenizer, path)
        if reads_last_token(model):
            require_eos(tokenizer, path)
        ensure_pad_token(model, tokenizer)
        if note := prepare(model, world.device):
            display.note(note)
        check_length(config.data.max_length, longest_input(model, tokenizer), "data.max_length")

        # 2. Rows to tokens.
        encode = Encoder(model, tokenizer, config)
        scale = TargetScale(0.0, 1.0)
        train: list[Pair] | list[ScoredSequence]
        test: list[Pair] | list[ScoredSequence]
        if pairwise:
            train_pairs, test_pairs = _read_pairs(config, stage)
            train = encode.pairs(train_pairs, stage, "train")
            test = encode.pairs(test_pairs, stage, "test")[: config.evaluation.max_rows]
        else:
            train_scored, test_scored = _read_scored(config, stage)
            targets = torch.tensor([row.score for row in train_scored], dtype=torch.float64)
            scale = TargetScale(targets.mean().item(), max(targets.std(correction=0).item(), 1e-8))
            train = encode.scored(train_scored, scale, stage, "train")
            test = encode.scored(test_scored, scale, stage, "test")[: config.evaluation.max_rows]
        probes: list[Pair] = []
        if config.data.probes is not None:
            probes = encode.pairs(_read_probes(config), stage, "probes")

        # 3. Training.
        steps = config.training.total_steps(len(train))
        display.note(
            f"{len(train)} training rows; {steps} steps of {config.training.minibatch_size} "
            f"({steps * config.training.minibatch_size / len(train):.2f} epochs); "
            f"{sum(p.numel() for p in model.parameters()):,} parameters on {world.device}"
        )
        if config.optimizer.warmup_steps >= steps:
            display.warn(warmup_warning(config.optimizer.warmup_steps, steps))
        stepper = build_stepper(model, config.optimizer, steps)
        shown = ("loss/rm", "rm/accuracy", "rm/margin") if pairwise else ("loss/rm", "rm/mse")
        model.train()
        first = stage.resume({"model": Weights(model), "optimizer": stepper}, steps)
        display.begin(steps, "step", first)
        for step in range(first, steps):
            rows = stream(len(train), config.training.minibatch_size, step, config.seed, "rm order")
            rate = stepper.learning_rate
            batch = [train[i] for i in rows]
            stats = _accumulate(model, batch, config, world)
            numbers = {"loss/rm": stats["loss/rm"], "rm/grad_norm": stepper.clip(world)}
            moves = stage.may_step(step + 1, f"rm step {step + 1}", numbers, partial(list, map(asdict, batch)))
            stepper.advance(move=moves)
            figures = {**stats, **numbers, "rm/learning_rate": rate, "rm/bad_steps": float(not moves)}
            stage.log(step + 1, figures, shown)
            every = config.evaluation.every_steps
            if every is not None and (step + 1) % every == 0 and step + 1 < steps:
                stage.log(step + 1, _evaluate(model, test, scale, config, world))
            stage.finish_step(step + 1, steps)
        display.end()

        # 4. Held-out figures, and what the model can and can't tell apart; what is trained is saved before.
        if world.is_main:
            save(model, tokenizer, stage.directory / "model")
        final = _evaluate(model, test, scale, config, world)
        final |= _probe(model, probes, config, world)
        stage.log(steps, final)
        if not test:
            display.note("no held-out rows, so no figures")
        if final:
            display.table("RM, held out", ["", "value"], [[key, f"{value:.4g}"] for key, value in final.items()])

        # 5. What the SFT model's answers score.
        mean, std = _normalization(model, tokenizer, encode, test or train, config, stage)
        final |= {"rm/sft_score_mean": mean, "rm/sft_score_std": std}
        facts = {"score_mean": mean, "score_std": std}
        if not pairwise:
            # The head predicts targets of mean 0 and deviation 1: target = score * target_std + target_mean.
            facts |= {"target_mean": scale.mean, "target_std": scale.std}
        if world.is_main:
            save_facts(model, facts, stage.directory / "model")
        stage.publish(final)


# ---------------------------------------------------------------------------------------- 2. to tokens


@dataclass(frozen=True)
class Encoder:
    """Prompt and answer to the ids that the reward model reads, the same here and in PPO."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: RMConfig

    def __call__(self, prompts: list[str], answers: list[str]) -> list[list[int]]:
        template = self.config.data.prompt_template
        if reads_last_token(self.model):
            return [p + a for p, a in encode_pairs(self.tokenizer, prompts, answers, template, start=False)]
        texts = [prompt_text(p, template, self.tokenizer) + a for p, a in zip(prompts, answers, strict=True)]
        # Not cut at the model's longest input: what is too long is dropped and counted.
        return encode_for_classifier(self.tokenizer, texts, None)

    def pairs(self, rows: list[Preference], stage: StageRun, what: str) -> list[Pair]:
        prompts = [row.prompt for row in rows]
        chosen = self(prompts, [row.chosen for row in rows])
        rejected = self(prompts, [row.rejected for row in rows])
        pairs = [Pair(*item) for item in zip(chosen, rejected, rows, strict=True)]
        longest = self.config.data.max_length
        kept = [pair for pair in pairs if max(len(pair.chosen), len(pair.rejected)) <= longest]
        self._report(len(pairs), len(kept), stage, what)
        return kept

    def scored(self, rows: list[Scored], scale: TargetScale, stage: StageRun, what: str) -> list[ScoredSequence]:
        ids = self([row.prompt for row in rows], [row.response for row in rows])
        items = [
            ScoredSequence(sequence, (row.score - scale.mean) / scale.std, row)
            for sequence, row in zip(ids, rows, strict=True)
        ]
        kept = [item for item in items if len(item.ids) <= self.config.data.max_length]
        self._report(len(items), len(kept), stage, what)
        return kept

    def _report(self, before: int, after: int, stage: StageRun, what: str) -> None:
        longest = self.config.data.max_length
        if before and not after:
            raise DataError(f"data.{what}: all {before} rows are longer than {longest} tokens. Raise data.max_length")
        if after < before:
            stage.display.note(f"data.{what}: {before - after} of {before} rows longer than {longest} dropped")


def _read_pairs(config: RMConfig, stage: StageRun) -> tuple[list[Preference], list[Preference]]:
    train, test = read_split(config.data)
    rows, kind = _preferences(train, config, "train")
    stage.display.note(f"{config.data.train.path}: rows of {kind}")
    if kind != "labelled" and len(rows) < len(train):
        stage.display.note(f"data.train: {len(train) - len(rows)} rows with two equal answers left out")
    return rows, _preferences(test, config, "test")[0] if test else []


def _read_scored(config: RMConfig, stage: StageRun) -> tuple[list[Scored], list[Scored]]:
    train, test = read_split(config.data)
    rows, kind = scored(train)
    stage.display.note(f"{config.data.train.path}: rows of {kind}")
    return rows, scored(test)[0] if test else []


def _read_probes(config: RMConfig) -> list[Preference]:
    assert config.data.probes is not None
    rows = read_rows(config.data.probes)
    for row in rows:
        if not isinstance(row.values.get("probe"), str):
            raise DataError(f"{row.where}: a row of data.probes needs a text `probe`, the name of what it probes")
    return _preferences(rows, config, "probes")[0]


def _preferences(rows: list[Row], config: RMConfig, purpose: str) -> tuple[list[Preference], str]:
    return preferences(
        rows,
        margin_column=config.data.margin_column if purpose == "train" else None,
        generator=generator(config.seed, f"pairs of {purpose}"),
    )


# ----------------------------------------------------------------------------------------- 3. training


def _accumulate(model: PreTrainedModel, batch: list, config: RMConfig, world: World) -> dict[str, float]:
    """Backward over this process's share of a batch; returns the statistics of the whole batch."""
    mine = world.shard(batch)
    sums: dict[str, float] = {}
    for part in chunks(range(len(mine)), config.training.microbatch_size):
        with autocast(world.device, config.precision):
            loss, stats = _loss(model, [mine[i] for i in part], len(batch), config)
        loss.backward()
        for key, value in {"loss/rm": loss, **stats}.items():
            sums[key] = sums.get(key, 0.0) + value.item()
    return world.sum_floats(sums)


def _loss(
    model: PreTrainedModel, items: list, num_rows: int, config: RMConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a microbatch, over `num_rows`, the rows of the whole batch, so that parts add up."""
    if config.loss == "mse":
        scores = sequence_scores(model, [item.ids for item in items])[:, 0]
        return score_loss(scores, scores.new_tensor([item.target for item in items]), num_rows=num_rows)
    scores = sequence_scores(model, [item.chosen for item in items] + [item.rejected for item in items])[:, 0]
    return pairwise_loss(
        scores[: len(items)],
        scores[len(items) :],
        margin=scores.new_tensor([item.row.margin for item in items]),
        loss=config.loss,
        zero_mean_coef=config.zero_mean_coef,
        num_pairs=num_rows,
    )


# -------------------------------------------------------------------------------------- 4. evaluation


def _evaluate(
    model: PreTrainedModel,
    test: list[Pair] | list[ScoredSequence],
    scale: TargetScale,
    config: RMConfig,
    world: World,
) -> dict[str, float]:
    """Held-out figures, counted over rows and never a mean of batches' means."""
    if not test:
        return {}
    model.eval()
    if config.loss == "mse":
        rows = [item for item in test if isinstance(item, ScoredSequence)]
        predicted = _scores(model, [item.ids for item in rows], config, world).double() * scale.std + scale.mean
        target = torch.tensor([item.row.score for item in rows], dtype=torch.float64)
        metrics = {
            "eval/mse": (predicted - target).square().mean().item(),
            "eval/target_variance": target.var(correction=0).item(),
            "eval/pearson": pearson(predicted, target),
            "eval/spearman": spearman(predicted, target),
            "eval/pair_accuracy": pair_accuracy(predicted, target),
        }
    else:
        pairs = [item for item in test if isinstance(item, Pair)]
        margin, accuracy = _margins(model, pairs, config, world)
        low, high = wilson_interval(accuracy.sum().item(), len(pairs))
        metrics = {
            "eval/accuracy": accuracy.mean().item(),
            "eval/accuracy_low95": low,
            "eval/accuracy_high95": high,
            "eval/margin": margin.mean().item(),
            "eval/length_baseline": _longer_wins(pairs),
        }
        gold = [_gold_gap(pair.row) for pair in pairs]
        if all(gap is not None for gap in gold):
            agrees = [m * gap > 0 for m, gap in zip(margin.tolist(), gold, strict=True) if gap]
            metrics["eval/gold_accuracy"] = sum(agrees) / max(1, len(agrees))
    model.train()
    return metrics


def _probe(model: PreTrainedModel, probes: list[Pair], config: RMConfig, world: World) -> dict[str, float]:
    """Accuracy for each named probe: an accuracy over all pairs can hide that one defect goes unseen."""
    if not probes:
        return {}
    model.eval()
    _, accuracy = _margins(model, probes, config, world)
    by_name: dict[str, list[float]] = {}
    for pair, value in zip(probes, accuracy.tolist(), strict=True):
        by_name.setdefault(pair.row.columns["probe"], []).append(value)
    model.train()
    return {f"probe/{name}": sum(values) / len(values) for name, values in by_name.items()}


def _margins(
    model: PreTrainedModel, pairs: list[Pair], config: RMConfig, world: World
) -> tuple[torch.Tensor, torch.Tensor]:
    """chosen_score - rejected_score, [n], and 1 where it is positive, 1/2 where it is zero."""
    scores = _scores(model, [p.chosen for p in pairs] + [p.rejected for p in pairs], config, world)
    margin = scores[: len(pairs)] - scores[len(pairs) :]
    return margin, (margin.sign() + 1) / 2


def _scores(model: PreTrainedModel, sequences: list[list[int]], config: RMConfig, world: World) -> torch.Tensor:
    """The scores of sequences, each process computing its share."""
    mine = world.shard(sequences)
    size = config.training.microbatch_size or config.training.minibatch_size
    scores = score_sequences(model, mine, config.precision, chunk=size).tolist() if mine else []
    return torch.tensor(world.interleave(world.gather(scores)))


def _longer_wins(pairs: list[Pair]) -> float:
    """The accuracy of choosing the longer answer, ties one half: what any reward model has to beat."""
    lengths = [(len(pair.chosen), len(pair.rejected)) for pair in pairs]
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in lengths) / len(lengths)


def _gold_gap(row: Preference) -> float | None:
    """gold_chosen - gold_rejected, where the row has both."""
    a, b = row.columns.get("gold_chosen"), row.columns.get("gold_rejected")
    return a - b if isinstance(a, int | float) and isinstance(b, int | float) else None


# ----------------------------------------------------------------------------------- 5. normalisation


def _normalization(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    encode: Encoder,
    items: list[Pair] | list[ScoredSequence],
    config: RMConfig,
    stage: StageRun,
) -> tuple[float, float]:
    """Mean and standard deviation of the score over fresh samples of the SFT model (`_sft_model` says which).

    Where there is none, the answers of the data stand in, and a line says so.
    """
    count = config.evaluation.num_normalization_samples
    if count == 0:
        return 0.0, 1.0
    rows = [items[i % len(items)].row for i in range(count)]
    answers = [_answer(row, number) for number, row in enumerate(rows)]
    sequences = _sampled(model, tokenizer, rows, answers, config, stage)
    if not sequences:
        stage.display.note("no SFT model to sample from: the score is normalised over the data's own answers")
        sequences = encode([row.prompt for row in rows], answers)
    model.eval()
    scores = score_sequences(model, sequences, config.precision)
    return scores.mean().item(), max(scores.std(correction=0).item(), 1e-6)


def _sampled(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Preference | Scored],
    answers: list[str],
    config: RMConfig,
    stage: StageRun,
) -> list[list[int]]:
    """The rows' prompts with fresh samples of the SFT model, as the reward model reads them; empty where there
    is no such model or none of the prompts leaves room for a sample in its positions."""
    path, settings = _sft_model(config), config.evaluation
    if path is None:
        return []
    policy_tokenizer, policy = load_tokenizer(path), load_policy(path)
    prepare(policy, stage.world.device)
    texts = [row.prompt or first_words(a, settings.prompt_words)[0] for row, a in zip(rows, answers, strict=True)]
    prompts = encode_prompts(policy_tokenizer, texts, config.data.prompt_template)
    fits = [i for i, prompt in enumerate(prompts) if len(prompt) + settings.max_new_tokens <= positions(policy)]
    if not fits:
        return []
    texts, prompts = [texts[i] for i in fits], [prompts[i] for i in fits]
    with autocast(stage.world.device, config.precision):
        responses = sample(
            policy,
            prompts,
            uniforms(config.seed, "rm normalization", 0, len(prompts), settings.max_new_tokens),
            Sampling(temperature=settings.temperature, stop=frozenset(stop_ids(policy, policy_tokenizer))),
        )
    for text, response in zip(texts[:8], responses, strict=False):
        reply = policy_tokenizer.decode(response.ids, skip_special_tokens=True)
        stage.sample({"prompt": text, "response": reply, "ended": response.ended})
    whole = [p + r.ids for p, r in zip(prompts, responses, strict=True)]
    if reads_last_token(model) and same_tokenizer(policy_tokenizer, tokenizer):
        return whole
    decoded = [str(policy_tokenizer.decode(ids, skip_special_tokens=True)) for ids in whole]
    return encode_texts(model, tokenizer, decoded, [r.ended for r in responses])


def _answer(row: Preference | Scored, number: int) -> str:
    """One of the row's answers; of a pair now the better, now the worse one, so that neither kind prevails."""
    if isinstance(row, Scored):
        return row.response
    return row.rejected if number % 2 else row.chosen


def _sft_model(config: RMConfig) -> str | None:
    """The model whose samples the score is normalised over: the run's own SFT model, else the language model
    that the backbone came from, else none (an encoder can't be sampled from)."""
    own = stage_directory(config.artifacts, "sft")
    if (own / MANIFEST).is_file():
        return str(own / "model")
    path = model_directory(config.model.path) if config.model.path is not None else None
    return path if path is not None and is_language_model(path, config.model.revision) else None


if __name__ == "__main__":
    launch.main("rm", run)
