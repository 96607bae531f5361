"""RM: teach a model which of two answers people prefer, or what score an answer has.

    rlhf rm --config configs/support/rm.yaml
    torchrun --nproc-per-node 2 -m stages.rm --config configs/support/rm.yaml

Reads   pairs, rankings or scored rows, and a backbone: the run's SFT model, or any encoder or decoder
Writes  <artifacts>/rm/model, a sequence classifier with one label, metrics.jsonl; where asked for best_model

 1. the backbone with a new, small scalar head
 2. rows to token sequences, each answer whole: prompt, answer, EOS. Nothing is cut unless it is asked for
 3. for each step: rankings of K answers, -log sigmoid(score of the better - score of the worse) over all pairs of a
    ranking, divided by their number (Ouyang et al. 2022, eq. 1; a pair is K = 2), or scored rows,
    (score - target)^2 on targets brought to mean 0 and standard deviation 1
 4. held-out accuracy with its interval and margin, or error and correlations
 5. the score's mean and standard deviation over fresh samples of the SFT model go into the model's config as
    `score_mean` and `score_std`, so that kl_coef means the same whatever the scale of the scores
"""

from __future__ import annotations

if __name__ == "__main__":  # Before torch is imported, which reads these settings.
    from rlhf_cli.environment import set_up_process

    set_up_process()

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.algorithms.reward_model import pairwise_loss, ranking_pairs, score_loss
from rlhf_cli.algorithms.statistics import pair_accuracy, pearson, spearman, wilson_interval
from rlhf_cli.artifacts import MANIFEST, model_directory, stage_directory
from rlhf_cli.config.data import Rows
from rlhf_cli.config.sft_rm import RMConfig
from rlhf_cli.data.batches import Budget, deal, stream
from rlhf_cli.data.encode import (
    LeftOut,
    Limits,
    encode_answers,
    encode_for_classifier,
    encode_rows,
    fit,
    require_eos,
    whole_text,
)
from rlhf_cli.data.formats_plain import first_words
from rlhf_cli.data.prefetch import ahead
from rlhf_cli.data.reading import first_format
from rlhf_cli.data.records import (
    Demonstration,
    Message,
    Prompt,
    Ranking,
    Record,
    Scored,
    pairs_of_labels,
    ranking,
    scored,
)
from rlhf_cli.data.tokens import Tokenised, tokenise
from rlhf_cli.errors import DataError
from rlhf_cli.models.cost import Work, peak_flops, token_budget, work_of
from rlhf_cli.models.forward import autocast, is_packed, shares_prefixes
from rlhf_cli.models.limits import check_length, longest_input, positions
from rlhf_cli.models.load import (
    check_vocabulary,
    ensure_pad_token,
    is_language_model,
    load_policy,
    load_reward_model,
    load_tokenizer,
    new_reward_model,
    prepare,
    reads_last_token,
    same_tokenizer,
    save,
    save_facts,
)
from rlhf_cli.models.passes import set_up_passes
from rlhf_cli.packing import SHORTEST_PREFIX, common_prefix
from rlhf_cli.rewards.models import cut_all, encode_texts, length_limit, score_sequences, sequence_scores
from rlhf_cli.rollout.distribution import Sampling
from rlhf_cli.rollout.sampling import draw_uniforms, sample, stop_ids
from rlhf_cli.seeding import generator
from rlhf_cli.tensor_ops import totals
from rlhf_cli.training import launch
from rlhf_cli.training.best import Best, require_held_out
from rlhf_cli.training.checkpoint import Weights
from rlhf_cli.training.distributed import World, require_rows_for_all
from rlhf_cli.training.optimizer import build_stepper, warmup_warning
from rlhf_cli.training.speed import Speed
from rlhf_cli.training.stage_run import StageRun

SPEED_SHOWN = "speed/step_tokens_per_s"


@dataclass(frozen=True)
class RankedIds:
    """Answers to one prompt, best first, as token sequences; a preference pair has two."""

    answers: list[list[int]]
    row: Ranking


@dataclass(frozen=True)
class ScoredIds:
    """A scored row's token sequence."""

    ids: list[int]
    score: float
    row: Scored


@dataclass(frozen=True)
class TargetScale:
    """How scores are brought to mean 0 and standard deviation 1."""

    mean: float
    std: float

    def target(self, score: float) -> float:
        return (score - self.mean) / self.std


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
        train: Sequence[RankedIds] | Sequence[ScoredIds]
        test: Sequence[RankedIds] | Sequence[ScoredIds]
        probes: Sequence[RankedIds] = []
        if pairwise:
            train, test, lines = _rankings(config, encode)
            if config.data.probes is not None:
                probes = encode.rankings(Rows(train=[config.data.probes], test_fraction=0), "data.probes").train
        else:
            data = encode.scored(config.data)
            train, test, lines = data.train, data.test, data.lines
            scores = data.train.numbers("score")
            scale = TargetScale(scores.mean().item(), max(scores.std().item(), 1e-8))
        test = test[: config.evaluation.max_rows]
        for line in lines:
            display.note(line)

        # 3. Training.
        steps = config.training.total_steps(len(train))
        given = config.training.tokens_per_microbatch
        checkpointing = config.gradient_checkpointing
        stage.tokens_per_microbatch = (
            token_budget([model], [], world.device, config.precision, world.size, checkpointing=checkpointing)
            if given == "auto"
            else given
        )
        budget = Budget(stage.tokens_per_microbatch, config.training.microbatch_size, padded=not is_packed(model))
        speed, work = stage.speed, work_of(model)
        speed.peak_flops = peak_flops(world.device, config.precision)
        display.note(
            f"{len(train)} training rows; {steps} steps of {config.training.minibatch_size} "
            f"({steps * config.training.minibatch_size / len(train):.2f} epochs), "
            f"at most {budget.tokens:,} tokens at a time; "
            f"{sum(p.numel() for p in model.parameters()):,} parameters on {world.device}"
        )
        if config.optimizer.warmup_steps >= steps:
            display.warn(warmup_warning(config.optimizer.warmup_steps, steps))
        stepper = build_stepper(model, config.optimizer, steps)
        shown = (*(("loss/rm", "rm/accuracy", "rm/margin") if pairwise else ("loss/rm", "rm/mse")), SPEED_SHOWN)
        notes, compile_s = set_up_passes([model], config, world.device)
        for line in notes:
            display.note(line)
        model.train()
        best = Best(
            ("eval/accuracy" if pairwise else "eval/mse") if config.evaluation.keep_best else None, lower=not pairwise
        )
        require_held_out(best, test)
        first = stage.resume({"model": Weights(model), "optimizer": stepper, "best": best}, steps)
        if config.compile and first == 0:
            stage.log(first, {"time/compile_s": compile_s})
        display.begin(steps, "step", first)
        for step, batch in speed.timed("data", ahead(partial(_batch, config, train), first, steps, world.device)):
            rate = stepper.learning_rate
            with speed.phase("step"):
                stats = _accumulate(model, batch, scale, budget, config, world)
                numbers = {"loss/rm": stats["loss/rm"], "rm/grad_norm": stepper.clip(world)}
                moves = stage.may_step(step + 1, f"rm step {step + 1}", numbers, partial(list, map(asdict, batch)))
                stepper.advance(move=moves)
            _count(speed, work, _own(batch, world))
            figures = {**stats, **numbers, "rm/learning_rate": rate, "rm/bad_steps": float(not moves), **speed.row()}
            stage.log(step + 1, figures, shown)
            every = config.evaluation.every_steps
            if every is not None and (step + 1) % every == 0 and step + 1 < steps:
                with speed.phase("evaluation"):
                    held_out = _evaluate(model, test, scale, budget, config, world)
                stage.log(step + 1, held_out)
                if best.is_better(step + 1, held_out) and world.is_main:
                    save(model, tokenizer, stage.directory / "best_model")
            stage.finish_step(step + 1, steps)
        display.end()

        # 4. Held-out figures, and what the model can and can't tell apart; what is trained is saved before.
        if world.is_main:
            save(model, tokenizer, stage.directory / "model")
        with speed.phase("evaluation"):
            final = _evaluate(model, test, scale, budget, config, world)
        if best.is_better(steps, final) and world.is_main:
            save(model, tokenizer, stage.directory / "best_model")
        final |= _probe(model, probes, budget, config, world)
        stage.log(steps, final)
        if not test:
            display.note("no held-out rows, so no figures")
        if final:
            display.table("RM, held out", ["", "value"], [[key, f"{value:.4g}"] for key, value in final.items()])

        # 5. What the SFT model's answers score, cut as what was learnt from, here and wherever the model judges.
        facts: dict[str, float | str] = {
            "rlhf_max_length": config.data.max_length,
            "rlhf_truncation": config.data.truncation,
        }
        if not pairwise:
            # The head predicts targets of mean 0 and deviation 1: target = score * target_std + target_mean.
            facts |= {"target_mean": scale.mean, "target_std": scale.std}
        judges = {"model": model}
        if best.step is not None:
            display.note(f"best_model is the model of step {best.step}, of {best.metric} {best.value:.4g}")
            world.barrier()
            judges["best_model"] = load_reward_model(str(stage.directory / "best_model"), None)
            prepare(judges["best_model"], world.device)
        for name, judge in judges.items():
            judge.config.update(facts)
            mean, std = _normalization(judge, tokenizer, encode, test or train, budget, config, stage)
            if name == "model":
                final |= {"rm/sft_score_mean": mean, "rm/sft_score_std": std}
            if world.is_main:
                save_facts(judge, facts | {"score_mean": mean, "score_std": std}, stage.directory / name)
        stage.publish(final)


# ---------------------------------------------------------------------------------------- 2. to tokens


@dataclass(frozen=True)
class Encoder:
    """Prompt and answer to the ids that the reward model reads, the same here and in PPO."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: RMConfig

    def __call__(self, rows: Sequence[Demonstration]) -> list[list[int] | LeftOut]:
        """Each row's ids within the limits of the config, or why it is left out."""
        data = self.config.data
        limits = Limits(data.max_length, data.truncation, data.min_response_length)
        if reads_last_token(self.model):
            found = encode_answers(self.tokenizer, rows, data.prompt_template, start=False)
            fitting = [fit(ids, answer, limits, self.tokenizer.bos_token_id) for ids, answer in found]
            return [each if isinstance(each, LeftOut) else each[0] for each in fitting]
        texts = [whole_text(row, data.prompt_template, self.tokenizer) for row in rows]
        if data.truncation == "drop":
            # Not cut at the model's longest input: what is too long is dropped and counted.
            whole = encode_for_classifier(self.tokenizer, texts, None)
            too_long = LeftOut(f"longer than {data.max_length} tokens")
            return [ids if len(ids) <= data.max_length else too_long for ids in whole]
        return [*encode_for_classifier(self.tokenizer, texts, data.max_length, data.truncation)]

    def rankings(self, data: Rows, role: str = "data") -> Tokenised[RankedIds]:
        """Preference pairs and rankings."""
        margin_column = self.config.data.margin_column

        def view(record: Record, side: str) -> Ranking | LeftOut:
            if role == "data.probes" and not isinstance(record.columns.get("probe"), str):
                raise DataError(f"{record.where}: a row of data.probes needs a text `probe`, what it probes")
            learns = side == "train" and role == "data"
            found = ranking(record, margin_column=margin_column if learns else None)
            return found or LeftOut("no two answers of which one is better")

        def encode(rows: Sequence[Ranking]) -> Iterator[RankedIds | LeftOut]:
            found = iter(self([_answered(row, answer) for row in rows for answer in row.answers]))
            for row in rows:
                answers = [next(found) for _ in row.answers]
                kept = [ids for ids in answers if not isinstance(ids, LeftOut)]
                too_long = [each for each in answers if isinstance(each, LeftOut)]
                yield too_long[0] if too_long else _told_apart(kept, row)

        return self._tokenise(data, "rm pairs", RankedIds, view, encode, role)

    def scored(self, data: Rows) -> Tokenised[ScoredIds]:
        """Answers with a score each."""

        def view(record: Record, side: str) -> list[Scored] | LeftOut:  # noqa: ARG001
            return scored(record) or LeftOut("no answer with a score")

        def encode(rows: Sequence[list[Scored]]) -> Iterator[ScoredIds | LeftOut]:
            flat = [row for some in rows for row in some]
            for row, ids in zip(flat, self([_answered(row, row.response) for row in flat]), strict=True):
                yield ids if isinstance(ids, LeftOut) else ScoredIds(ids, row.score, row)

        return self._tokenise(data, "rm scores", ScoredIds, view, encode, "data")

    def _tokenise(self, data, purpose, kind, view, encode, role):
        settings = self.config.data.model_dump(mode="json") | {
            "role": role,
            "reads last token": reads_last_token(self.model),
        }
        return tokenise(data, purpose, kind, view, encode, self.tokenizer, settings=settings, role=role)


def _answered(row: Ranking | Scored, answer: str) -> Demonstration:
    """A row with one of its answers."""
    messages = (*row.messages, Message("assistant", answer.removeprefix(" "))) if row.messages else ()
    return Demonstration(row.prompt, answer, row.where, messages)


def _told_apart(answers: list[list[int]], row: Ranking) -> RankedIds | LeftOut:
    """The answers that are still different as tokens, once cut; the best place of equal ones stays."""
    different = [i for i, ids in enumerate(answers) if ids not in answers[:i]]
    if len(different) < 2:
        return LeftOut("what tells its answers apart was cut off")
    kept = replace(row, answers=tuple(row.answers[i] for i in different))
    return RankedIds([answers[i] for i in different], kept)


def _rankings(config: RMConfig, encode: Encoder) -> tuple[Sequence[RankedIds], Sequence[RankedIds], list[str]]:
    """The rows of the pairwise losses: as they are, or, of rows with a label each, pairs drawn from them."""
    if first_format(config.data.train[0], "rm pairs").name != "labelled":
        rows = encode.rankings(config.data)
        return rows.train, rows.test, rows.lines
    labelled = encode.scored(config.data)
    sides: list[Sequence[RankedIds]] = []
    for name, side in (("train", labelled.train), ("test", labelled.test)):
        draw = generator(config.seed, f"pairs of {name}")
        pairs = pairs_of_labels(side.numbers("score").tolist(), draw) if len(side) else []
        sides.append(LabelledPairs(side, pairs))
    return sides[0], sides[1], [*labelled.lines, "pairs of a higher and a lower label, drawn once"]


class LabelledPairs(Sequence[RankedIds]):
    """Pairs of rows that have a label each; they share no prompt, each text is judged whole."""

    def __init__(self, items: Sequence[ScoredIds], pairs: list[tuple[int, int]]):
        self.items, self.pairs = items, pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        higher, lower = (self.items[i] for i in self.pairs[index])
        texts = (higher.row.prompt + higher.row.response, lower.row.prompt + lower.row.response)
        return RankedIds([higher.ids, lower.ids], Ranking("", texts, higher.row.where))


# ----------------------------------------------------------------------------------------- 3. training


def _batch(config: RMConfig, train: Sequence[RankedIds] | Sequence[ScoredIds], step: int) -> list:
    """The rows of a step, over all processes."""
    rows = stream(len(train), config.training.minibatch_size, step, config.seed, "rm order")
    return [train[i] for i in rows]


def _accumulate(
    model: PreTrainedModel, batch: list, scale: TargetScale, budget: Budget, config: RMConfig, world: World
) -> dict[str, float]:
    """Backward over this process's share of a batch; returns the statistics of the whole batch."""
    mine = _own(batch, world)
    parts = []
    for part in budget.cut([_num_tokens(item, model) for item in mine]):
        with autocast(world.device, config.precision):
            loss, stats = _loss(model, [mine[i] for i in part], len(batch), scale, config)
        loss.backward()
        parts.append({"loss/rm": loss, **stats})
    return world.sum_floats(totals(parts))


def _sequences(item: RankedIds | ScoredIds) -> list[list[int]]:
    """A row's token sequences, which are computed together."""
    return item.answers if isinstance(item, RankedIds) else [item.ids]


def _num_tokens(item: RankedIds | ScoredIds, model: PreTrainedModel) -> int:
    """The tokens that are computed of a row: what its sequences begin with counts once where the model shares it,
    and on padded batches each is as long as the longest."""
    sequences = _sequences(item)
    if not is_packed(model):
        return len(sequences) * max(map(len, sequences))
    shared = common_prefix(sequences) if shares_prefixes(model) else 0
    if shared < SHORTEST_PREFIX:
        shared = 0
    return sum(map(len, sequences)) - (len(sequences) - 1) * shared


def _own(batch: list, world: World) -> list:
    """This process's share of a batch, about as many tokens as each other's."""
    return [batch[i] for i in deal([sum(map(len, _sequences(item))) for item in batch], world.size)[world.rank]]


def _count(speed: Speed, work: Work, items: list) -> None:
    """What a step did with this process's rows: tokens of whole sequences, operations of a shared beginning once."""
    rows = [_sequences(item) for item in items]
    lengths = [len(ids) for row in rows for ids in row]
    shared = [n for row in rows for n in (0, *[common_prefix(row)] * (len(row) - 1))]
    speed.count("step", tokens=sum(lengths), flops=work.training(lengths, 0, shared))


def _loss(
    model: PreTrainedModel, items: list, num_rows: int, scale: TargetScale, config: RMConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a microbatch, over `num_rows`, the rows of the whole batch, so that parts add up."""
    if config.loss == "mse":
        scores = sequence_scores(model, [item.ids for item in items])[:, 0]
        targets = scores.new_tensor([scale.target(item.score) for item in items])
        return score_loss(scores, targets, num_rows=num_rows)
    flat = [(i, ids) for i, item in enumerate(items) for ids in item.answers]
    scores = sequence_scores(model, [ids for _, ids in flat], groups=[i for i, _ in flat])[:, 0]
    better, worse, weight = ranking_pairs([len(item.answers) for item in items])
    # A row's margin is how far its best answer leads its worst.
    margins = [
        item.row.margin if (i, j) == (0, len(item.answers) - 1) else 0.0
        for item in items
        for i in range(len(item.answers))
        for j in range(i + 1, len(item.answers))
    ]
    return pairwise_loss(
        scores[better],
        scores[worse],
        margin=scores.new_tensor(margins),
        weight=weight.to(scores),
        loss=config.loss,
        zero_mean_coef=config.zero_mean_coef,
        num_pairs=num_rows,
    )


# -------------------------------------------------------------------------------------- 4. evaluation


def _evaluate(
    model: PreTrainedModel,
    test: Sequence[RankedIds] | Sequence[ScoredIds],
    scale: TargetScale,
    budget: Budget,
    config: RMConfig,
    world: World,
) -> dict[str, float]:
    """Held-out figures, counted over rows and never a mean of batches' means."""
    if not test:
        return {}
    model.eval()
    if config.loss == "mse":
        rows = [item for item in test if isinstance(item, ScoredIds)]
        predicted = _scores(model, [[item.ids] for item in rows], budget, config, world).double()
        predicted = predicted * scale.std + scale.mean
        target = torch.tensor([item.score for item in rows], dtype=torch.float64)
        metrics = {
            "eval/mse": (predicted - target).square().mean().item(),
            "eval/target_variance": target.var(correction=0).item(),
            "eval/pearson": pearson(predicted, target),
            "eval/spearman": spearman(predicted, target),
            "eval/pair_accuracy": pair_accuracy(predicted, target),
        }
    else:
        rankings = [item for item in test if isinstance(item, RankedIds)]
        margin, accuracy = _margins(model, rankings, budget, config, world)
        # A ranking's pairs are not independent: it counts as one trial.
        low, high = wilson_interval(accuracy.sum().item(), len(rankings))
        baseline = [_longer_wins(item) for item in rankings]
        metrics = {
            "eval/accuracy": accuracy.mean().item(),
            "eval/accuracy_low95": low,
            "eval/accuracy_high95": high,
            "eval/margin": margin.mean().item(),
            "eval/length_baseline": sum(baseline) / len(baseline),
        }
        gold = [_gold_gap(item.row) for item in rankings]
        if all(gap is not None for gap in gold):
            agrees = [m * gap > 0 for m, gap in zip(margin.tolist(), gold, strict=True) if gap]
            metrics["eval/gold_accuracy"] = sum(agrees) / max(1, len(agrees))
    model.train()
    return metrics


def _probe(
    model: PreTrainedModel, probes: Sequence[RankedIds], budget: Budget, config: RMConfig, world: World
) -> dict[str, float]:
    """Accuracy for each named probe: an accuracy over all pairs can hide that one defect goes unseen."""
    if not probes:
        return {}
    model.eval()
    rankings = list(probes)
    _, accuracy = _margins(model, rankings, budget, config, world)
    by_name: dict[str, list[float]] = {}
    for item, value in zip(rankings, accuracy.tolist(), strict=True):
        by_name.setdefault(item.row.columns["probe"], []).append(value)
    model.train()
    return {f"probe/{name}": sum(values) / len(values) for name, values in by_name.items()}


def _margins(
    model: PreTrainedModel, rankings: list[RankedIds], budget: Budget, config: RMConfig, world: World
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each ranking, [n]: the mean over its pairs of better less worse score, and of 1 where that is positive and
    1/2 where it is zero."""
    scores = _scores(model, [item.answers for item in rankings], budget, config, world)
    sizes = [len(item.answers) for item in rankings]
    better, worse, weight = ranking_pairs(sizes)
    weight = weight.float()
    row = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor([size * (size - 1) // 2 for size in sizes]))
    lead = scores[better] - scores[worse]
    margin, accuracy = torch.zeros(len(sizes)), torch.zeros(len(sizes))
    return margin.index_add(0, row, weight * lead), accuracy.index_add(0, row, weight * (lead.sign() + 1) / 2)


def _scores(
    model: PreTrainedModel, rows: list[list[list[int]]], budget: Budget, config: RMConfig, world: World
) -> torch.Tensor:
    """The scores of all rows' sequences, row by row, each process computing its share of the rows."""
    mine = world.shard(rows)
    groups = [i for i, row in enumerate(mine) for _ in row]
    scores = score_sequences(model, [ids for row in mine for ids in row], config.precision, budget, groups=groups)
    own = [part.tolist() for part in scores.split([len(row) for row in mine])]
    return torch.tensor([score for row in world.interleave(world.gather(own)) for score in row])


def _longer_wins(item: RankedIds) -> float:
    """The share of a ranking's pairs in which the better answer is the longer, ties one half: what any reward model
    has to beat."""
    lengths = [len(ids) for ids in item.answers]
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for i, a in enumerate(lengths) for b in lengths[i + 1 :]]
    return sum(wins) / len(wins)


def _gold_gap(row: Ranking) -> float | None:
    """gold_chosen - gold_rejected, where the row has both."""
    a, b = row.columns.get("gold_chosen"), row.columns.get("gold_rejected")
    return a - b if isinstance(a, int | float) and isinstance(b, int | float) else None


# ----------------------------------------------------------------------------------- 5. normalisation


def _normalization(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    encode: Encoder,
    items: Sequence[RankedIds] | Sequence[ScoredIds],
    budget: Budget,
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
        found = encode([_answered(row, answer) for row, answer in zip(rows, answers, strict=True)])
        sequences = [ids for ids in found if not isinstance(ids, LeftOut)]
    model.eval()
    scores = score_sequences(model, sequences, config.precision, budget)
    return scores.mean().item(), max(scores.std(correction=0).item(), 1e-6)


def _sampled(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Ranking | Scored],
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
    asked = [Prompt(text, row.where, {}, row.messages) for text, row in zip(texts, rows, strict=True)]
    prompts = encode_rows(policy_tokenizer, asked, config.data.prompt_template)
    fits = [i for i, prompt in enumerate(prompts) if len(prompt) + settings.max_new_tokens <= positions(policy)]
    if not fits:
        return []
    texts, prompts = [texts[i] for i in fits], [prompts[i] for i in fits]
    with autocast(stage.world.device, config.precision):
        responses = sample(
            policy,
            prompts,
            draw_uniforms(config.seed, "rm normalization", 0, len(prompts), settings.max_new_tokens),
            Sampling(temperature=settings.temperature, stop=frozenset(stop_ids(policy, policy_tokenizer))),
        )
    for text, response in zip(texts[:8], responses, strict=False):
        reply = policy_tokenizer.decode(response.ids, skip_special_tokens=True)
        stage.sample({"prompt": text, "response": reply, "ended": response.ended})
    whole = [p + r.ids for p, r in zip(prompts, responses, strict=True)]
    if reads_last_token(model) and same_tokenizer(policy_tokenizer, tokenizer):
        return cut_all(whole, *length_limit(model, tokenizer), tokenizer.bos_token_id)[0]
    decoded = [str(policy_tokenizer.decode(ids, skip_special_tokens=True)) for ids in whole]
    return encode_texts(model, tokenizer, decoded, [r.ended for r in responses])


def _answer(row: Ranking | Scored, number: int) -> str:
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
