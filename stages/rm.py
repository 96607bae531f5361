"""RM: train a reward model to tell which of two answers people prefer, or to predict an answer's score.

    rlhf rm --config configs/support/rm.yaml
    rlhf rm --config configs/support/rm.yaml --nproc 2

Reads   pairs, rankings, scored or labelled rows, and a backbone: the run's SFT model, or any encoder or decoder
Writes  <artifacts>/rm/model, a sequence classifier with one label, metrics.jsonl; with evaluation.keep_best also
        best_model

 1. encode the rows: prompt, answer and EOS of each answer. Nothing is cut unless data.truncation says so
 2. draw fresh samples of the SFT model, before the reward model is in memory. A resumed run has kept them
 3. load the backbone with a new, small scalar head; a classifier with one label keeps its own
 4. for each step: of rankings of K answers, -log sigmoid(better score - worse score), averaged over all pairs of a
    ranking (Ouyang et al. 2022, eq. 1; a preference pair is K = 2); of scored answers, (score - target)^2 with
    targets of mean 0 and standard deviation 1; of answers labelled good or bad, the logistic loss of the score
 5. held-out accuracy or error with its interval, beside chance and what the length of an answer tells
 6. write the score's mean and standard deviation over the samples into the model's config, as `score_mean` and
    `score_std`: kl_coef then means the same whatever the scale of the scores. With `length_correction`, before that,
    fit the held-out scores against the length of the answers, and write the curve as `length_curve`. It is subtracted
    from every score

With `members`, steps 3 to 6 are taken for each. The further members are trained before the first, in members/1,
members/2, ... All start from the same new head and each reads the rows in an order of its own.
"""

from __future__ import annotations

if __name__ == "__main__":  # Before torch is imported, which reads these settings.
    from rlhf_cli.processes.environment import set_up_process

    set_up_process()

import gc
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.algorithms.length import regression_on_length, value_at
from rlhf_cli.algorithms.names import RewardModelLoss
from rlhf_cli.algorithms.reward_model import (
    pairwise_loss,
    plackett_luce_loss,
    pointwise_loss,
    ranking_pairs,
    unbiased_weight,
)
from rlhf_cli.config.sft_rm import RMConfig
from rlhf_cli.data.answers import (
    AnswerEncoder,
    RankedIds,
    ScoredIds,
    TargetScale,
    answer_encoder,
    labelled_pairs,
    require_labels,
)
from rlhf_cli.data.batches import Budget, own_share
from rlhf_cli.data.cache import tokenise
from rlhf_cli.data.encode import require_eos
from rlhf_cli.data.splits import Drawn, HeldOutRows, held_out_rows
from rlhf_cli.data.stage_rows import probe_rows, rm_rows
from rlhf_cli.errors import ConfigError, DataError
from rlhf_cli.evaluation.agreement import (
    agreement_of_members,
    answer_metrics,
    figures_of_rankings,
    held_out_lines,
    length_accuracies,
    margins_of,
    probe_shares,
    scores_of_rows,
)
from rlhf_cli.evaluation.normalization import (
    Items,
    Sample,
    fit_length,
    frozen_reward_model,
    samples_of_sft,
    texts_to_score,
    write_statistics,
)
from rlhf_cli.health.baselines import held_out_verdict
from rlhf_cli.models.forward import autocast, check_length, is_packed, longest_input
from rlhf_cli.models.frozen import freeze, release
from rlhf_cli.models.heads import reads_last_token
from rlhf_cli.models.load import (
    check_vocabulary,
    ensure_pad_token,
    load_tokenizer,
    new_reward_model,
    prepare,
    same_tokenizer,
)
from rlhf_cli.models.lora import add_adapters, defers_base, prepare_base
from rlhf_cli.models.passes import set_up_training
from rlhf_cli.models.save import base_of, round_weights, save_trained
from rlhf_cli.models.shard import shard_for, shards
from rlhf_cli.packing import SHORTEST_PREFIX, common_prefix
from rlhf_cli.processes.distributed import World, require_rows_for_all
from rlhf_cli.processes.microbatches import GradientSum
from rlhf_cli.report.progress import Display
from rlhf_cli.rewards.models import sequence_scores
from rlhf_cli.run.artifacts import fingerprint, model_directory
from rlhf_cli.run.checkpoint import State
from rlhf_cli.run.checkpoint_files import MEMBERS
from rlhf_cli.run.stage_run import StageRun
from rlhf_cli.seeding import derived_seed
from rlhf_cli.tensor_ops import totals
from rlhf_cli.training.best import Best, require_held_out
from rlhf_cli.training.supervised import Loop

OF_PAIRS = ("loss/rm", "rm/accuracy", "eval/accuracy", "rm/margin", "speed/step_tokens_per_s")
SHOWN: dict[RewardModelLoss, tuple[str, ...]] = {
    "logsigmoid": OF_PAIRS,
    "logexp": OF_PAIRS,
    "plackett_luce": OF_PAIRS,
    "mse": ("loss/rm", "rm/mse", "eval/mse", "speed/step_tokens_per_s"),
    "bce": ("loss/rm", "rm/accuracy", "eval/accuracy", "speed/step_tokens_per_s"),
}
"""The figures beside the progress, the most important first."""

Item = RankedIds | ScoredIds  # a training row: the sequences of a ranking, or one with its score


@dataclass(frozen=True)
class TokenRows:
    """The rows of the stage as tokens, and the encoder that made them."""

    train: Items
    held_out: HeldOutRows[Any]
    probes: Sequence[RankedIds]
    scale: TargetScale
    encoder: AnswerEncoder


def run(config: RMConfig, *, quiet: bool = False, restart: bool = False) -> None:
    """Run the stage: the steps of the module's docstring, in their order."""
    with StageRun("rm", config, quiet=quiet, restart=restart) as stage:
        world, config = stage.world, stage.settled(config)
        if not shards(config):
            require_rows_for_all(world, config.training.minibatch_size, "training.minibatch_size")

        # 1. Rows to tokens.
        rows = _rows(config, stage.display)
        metric = "eval/mse" if config.loss == "mse" else "eval/accuracy"
        best = Best(metric if config.evaluation.keep_best else None, lower=config.loss == "mse")
        require_held_out(best, rows.held_out.watched)
        if config.length_correction and not rows.held_out.test:
            raise ConfigError(
                "length_correction: is fitted on held-out test rows, and there are none. Set data.test or "
                "data.test_fraction"
            )
        _require_one_reading(config, rows)

        # 2. Samples of the SFT model, while no other model is in memory.
        samples = samples_of_sft(rows.held_out.test or rows.train, config, stage)

        # 3. to 6. for each other member first: only the last one's state is the stage's.
        members = [_member(number, config, rows, samples, stage) for number in range(1, config.num_members)]
        model, budget, scores, final = _train(config, 0, rows, best, stage.directory / "model", stage)
        _show(final, rows, stage.display)

        # 6. Its scores without what the length of a reply tells, if the config asks for it, and their scale.
        final |= _length_figures(rows.held_out.test, scores, config, stage.display)
        final |= _normalize(model, rows, samples, scores, budget, stage.directory / "model", config, stage)
        if members:
            first = Member(scores, final)
            final |= _agreement([first, *members], rows, config, stage.display)
        stage.publish(final)


def _train(
    config: RMConfig, number: int, rows: TokenRows, best: Best, folder: Path, stage: StageRun
) -> tuple[PreTrainedModel, Budget, torch.Tensor, dict[str, float]]:
    """Steps 3 to 5 of the module's docstring for the member `number`; 0 is the first.

    Returns the model, which is saved in `folder`, its budget, the scores of the held-out answers, and its figures.
    """
    world = stage.world
    scores = torch.empty(0)

    def evaluate(test: Drawn[Item]) -> dict[str, float]:
        """Held-out figures over all rows together, never a mean of batch means."""
        nonlocal scores
        scores = torch.empty(0)
        if not test:
            return {}
        scores = _scores(model.eval(), test, passes.budget, config, world)
        model.train()
        return _figures(test, scores, rows.scale, config)

    # 3. The backbone and its head.
    lora, base, device = config.model.lora, base_of(config), world.device
    model, _, _ = _backbone(config, deferred=shards(config) or defers_base(lora, config, device))
    prepare_base(model, lora, "model.lora", config, device)
    lines = [prepare(model, device), add_adapters(model, lora, base, "model.lora", config)]
    stage.display.notes(*lines, shard_for(config, model, device))

    # 4. Training.
    passes = set_up_training(model, config, device, stage.microbatch_tokens({"reward model": model}))
    loop: Loop[Item] = Loop(
        stage,
        config,
        model,
        passes,
        train=rows.train,
        seed=derived_seed(config.seed, "rm member", number) if number else config.seed,
        held_out=rows.held_out,
        evaluate=evaluate,
        save=lambda name: save_trained(
            model, rows.encoder.tokenizer, folder if name == "model" else stage.directory / name, config, lora, base
        ),
        best=best,
        shown=SHOWN[config.loss],
    )
    for step, batch in loop.steps():
        with stage.speed.phase("step"):
            stats = _accumulate(model, batch, rows.scale, passes.budget, config, stage)
            figures = loop.update(step, stats, partial(list, map(asdict, batch)))
        answers = [item.sequences for item in own_share(batch, _size, world)]
        lengths = [len(ids) for row in answers for ids in row]
        once = [n for row in answers for n in (0, *[common_prefix(row)] * (len(row) - 1))]  # a common prefix
        stage.speed.count("step", tokens=sum(lengths), flops=passes.work.training(lengths, 0, once))
        stage.log(step + 1, figures | stage.speed.row(), loop.shown)

    # 5. The model is saved, then measured: on held-out rows, and on each probe.
    round_weights(model, config, base)
    final = loop.finish()
    if rows.probes:
        probed = [item.answers for item in rows.probes]
        shares = probe_shares(rows.probes, scores_of_rows(model.eval(), probed, passes.budget, config.precision, world))
        final |= {f"probe/{name}": sum(right.tolist()) / len(right) for name, (right, _) in shares.items()}
    stage.log(loop.num_steps, final)
    return model, passes.budget, scores, final


# -------------------------------------------------------------------------------------------- members


@dataclass
class Member:
    """A trained reward model of several."""

    scores: torch.Tensor  # scores of the answers of all held-out test rows
    figures: dict[str, float]
    digest: str = ""  # the fingerprint of its folder

    def state(self) -> State:
        return {"scores": self.scores}, {"figures": self.figures, "digest": self.digest}

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        self.scores, self.figures = tensors["scores"], dict(numbers["figures"])


def member_config(config: RMConfig, number: int) -> RMConfig:
    """The config of a member beside the first, numbered from 1."""
    # The seed is the run's: the mean of the weights of models whose new heads start apart judges worse than each.
    model, paths = config.model, config.member_models
    if paths:
        model = model.model_copy(update={"path": paths[(number - 1) % len(paths)], "revision": None})
    once = config.training.model_copy(update={"save_every": None})
    return config.model_copy(update={"model": model, "training": once})


def _require_one_reading(config: RMConfig, rows: TokenRows) -> None:
    """Raise ConfigError for a model of `member_models` that reads other tokens than the first member."""
    for number, path in enumerate(config.member_models, 1):
        model, tokenizer, _ = _backbone(member_config(config, number), deferred=True)
        own = rows.encoder
        if not same_tokenizer(own.tokenizer, tokenizer) or reads_last_token(model) != own.reads_last_token:
            raise ConfigError(
                f"member_models: {path} has another tokenizer than the first member, and all read the same rows. Name "
                "models with the tokenizer of model.path"
            )


def _member(number: int, config: RMConfig, rows: TokenRows, samples: Sequence[Sample], stage: StageRun) -> Member:
    """Train a member beside the first, unless an interrupted run has finished it."""
    own, folder = member_config(config, number), stage.directory / MEMBERS / str(number)
    kept = Member(torch.empty(0), {})

    def changed(numbers: Mapping[str, Any]) -> str | None:
        return None if numbers["member"]["digest"] == fingerprint(str(folder)) else f"{folder} was modified"

    stage.display.note(f"member {number} of {config.num_members - 1} beside the first")
    with stage.member(number):
        gc.collect()  # the parts of a sharded model refer to each other
        if stage.restore_finished({"member": kept}, changed):
            return kept
        model, budget, scores, final = _train(own, number, rows, Best(None, lower=False), folder, stage)
        final |= _normalize(model, rows, samples, scores, budget, folder, own, stage)
        release(model)
        kept = Member(scores, final, stage.world.of_main(lambda: fingerprint(str(folder))))
        stage.save_finished(own.training.total_steps(len(rows.train)), {"member": kept})
    return kept


# ------------------------------------------------------------------------------- 1. rows, 3. backbone


def _backbone(config: RMConfig, *, deferred: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[str | None]]:
    """The backbone with its scalar head, its tokenizer, and lines for the user; `deferred`: with unread weights."""
    path, revision, head_std = *config.inputs["model"], config.model.head_std
    path = model_directory(path)
    tokenizer = load_tokenizer(path, revision)
    model, new = new_reward_model(path, revision, seed=config.seed, head_std=head_std, deferred=deferred)
    if new:
        line = f"{path}: gets a head for the score, untrained so far: {', '.join(new)}"
    elif head_std is not None:
        raise ConfigError(f"model.head_std: {path} has a trained head with one label, which is kept. Remove head_std")
    else:
        line = f"{path}: is a classifier with one label, its trained head is kept"
    check_vocabulary(model, tokenizer, path)
    if reads_last_token(model):
        require_eos(tokenizer, path)
    ensure_pad_token(model, tokenizer)
    check_length(config.data.max_length, longest_input(model, tokenizer), "data.max_length")
    return model, tokenizer, [line, freeze(model, config.model.freeze, "model.freeze")]


def _rows(config: RMConfig, display: Display) -> TokenRows:
    """Rankings for the pairwise losses, or scored answers for the others; and the probes. The backbone is freed."""
    model, tokenizer, lines = _backbone(config, deferred=True)
    display.notes(*lines)
    spec = rm_rows(config)
    encoder = answer_encoder(tokenizer, spec, reads_last_token=reads_last_token(model))
    longest = longest_input(model, tokenizer)
    found = tokenise(encoder, longest=longest)
    display.about_rows(found.lines, found.warnings)
    train: Items = found.train
    sides: Any = found
    scale = TargetScale(0.0, 1.0)
    if config.loss == "mse":
        scores = found.train.numbers("score")
        if scores.min() == scores.max():
            what = f"every score of the training rows is {scores[0]:g}, so there is nothing to learn"
            raise DataError(f"{what}. Add rows with other scores, or name their column: keys: {{score: COLUMN}}")
        scale = TargetScale(scores.mean().item(), scores.std().item())
    elif config.loss == "bce":
        require_labels(found.train, found.validation, found.test)
    elif spec.purpose == "rm scores":
        sides = labelled_pairs(found, config.seed)
        train = sides.train
        display.note(f"{len(train):,} training pairs of a text with a higher and one with a lower label")
    probes: Sequence[RankedIds] = []
    if (probe_spec := probe_rows(config)) is not None:
        reads_last = encoder.reads_last_token
        probed = tokenise(answer_encoder(tokenizer, probe_spec, reads_last_token=reads_last), longest=longest)
        display.about_rows(probed.lines, probed.warnings)
        probes = probed.train
    held_out = held_out_rows(sides, config.data, config.evaluation.max_rows, config.seed)
    return TokenRows(train, held_out, probes, scale, encoder)


# ----------------------------------------------------------------------------------------- 4. training


def _accumulate(
    model: PreTrainedModel, batch: list[Item], scale: TargetScale, budget: Budget, config: RMConfig, stage: StageRun
) -> dict[str, float]:
    """The gradient of this process's share of a batch. Returns the statistics of the whole batch."""
    mine = own_share(batch, _size, stage.world)

    def loss_of(rows: Sequence[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with autocast(stage.world.device, config.precision):
            loss, stats = _loss(model, [mine[i] for i in rows], len(batch), scale, config)
        return loss, {"loss/rm": loss, **stats}

    gradients = GradientSum(stage.world, stage.loss_scale.scaled, model)
    stats = gradients.add(budget.cut([_num_tokens(item, model) for item in mine]), loss_of)
    gradients.receive()
    return stage.world.sum_floats(totals(stats))


def _num_tokens(item: Item, model: PreTrainedModel) -> int:
    """The tokens that a row costs: a common prefix counts once if the model computes it once; padding counts."""
    sequences = item.sequences
    if not is_packed(model):
        return len(sequences) * max(map(len, sequences))
    shared = common_prefix(sequences)
    if shared < SHORTEST_PREFIX:
        shared = 0
    return sum(map(len, sequences)) - (len(sequences) - 1) * shared


def _size(item: Item) -> int:
    return sum(map(len, item.sequences))


def _loss(
    model: PreTrainedModel, items: list, num_rows: int, scale: TargetScale, config: RMConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a microbatch, divided by the rows of the whole batch, so that microbatches add up."""
    if config.loss == "mse" or config.loss == "bce":
        scores = sequence_scores(model, [item.ids for item in items])[:, 0]  # [answers]
        targets = scores.new_tensor([scale.target(item.score) for item in items])
        return pointwise_loss(scores, targets, loss=config.loss, num_rows=num_rows)
    flat = [(i, ids) for i, item in enumerate(items) for ids in item.answers]
    scores = sequence_scores(model, [ids for _, ids in flat], groups=[i for i, _ in flat])[:, 0]  # [answers]
    sizes = [len(item.answers) for item in items]
    better, worse, weight = ranking_pairs(sizes)  # [pairs] each
    # A row's margin belongs to the pair of its best and its worst answer.
    row_margins = [
        item.row.margin if (i, j) == (0, len(item.answers) - 1) else 0.0
        for item in items
        for i in range(len(item.answers))
        for j in range(i + 1, len(item.answers))
    ]
    loss, stats = pairwise_loss(
        scores[better],
        scores[worse],
        margin=scores.new_tensor(row_margins),
        weight=weight.to(scores),
        loss="logsigmoid" if config.loss == "plackett_luce" else config.loss,
        flipped_weight=unbiased_weight(config.flip_rate) if config.flip_rate else config.label_smoothing or 0.0,
        zero_mean_coef=config.zero_mean_coef,
        num_pairs=num_rows,
    )
    if config.loss == "plackett_luce":
        loss = plackett_luce_loss(scores, sizes, num_rankings=num_rows)
    return loss, stats


# -------------------------------------------------------------------------------------- 5. evaluation


def _scores(model: PreTrainedModel, test: Drawn[Item], budget: Budget, config: RMConfig, world: World) -> torch.Tensor:
    """The scores of the answers of all held-out rows, row by row."""
    return scores_of_rows(model, [item.sequences for item in test], budget, config.precision, world)


def _figures(test: Drawn[Item], scores: torch.Tensor, scale: TargetScale, config: RMConfig) -> dict[str, float]:
    """The held-out figures that follow from `_scores`."""
    each = scores.split([len(item.sequences) for item in test])

    def figures_of(numbers: Sequence[int]) -> dict[str, float]:
        items, found = [test[i] for i in numbers], torch.cat([each[i] for i in numbers])
        if config.is_pairwise:
            return figures_of_rankings([item for item in items if isinstance(item, RankedIds)], found)
        rows = [item for item in items if isinstance(item, ScoredIds)]
        target = torch.tensor([item.score for item in rows], dtype=torch.float64)
        return answer_metrics(found.double() * scale.std + scale.mean, target, [i.row for i in rows], config.loss)

    metrics, main = figures_of(range(len(test))), "eval/mse" if config.loss == "mse" else "eval/accuracy"
    for name, numbers in test.by_source.items():
        metrics |= {key.replace(main, f"{main}/{name}"): x for key, x in figures_of(numbers).items() if main in key}
    return metrics


def _length_figures(test: Drawn[Item], scores: torch.Tensor, config: RMConfig, display: Display) -> dict[str, float]:
    """Measure and print the share of the accuracy on held-out pairs that the length of an answer explains."""
    if not test or not config.is_pairwise:
        return {}
    sizes = [len(item.sequences) for item in test]
    by_length, without = length_accuracies(scores, [length for item in test for length in item.lengths], sizes)
    accuracy = margins_of(scores, sizes)[1].mean().item()
    if accuracy > 0.5:
        share = min(max((by_length - 0.5) / (accuracy - 0.5), 0.0), 1.0)
        is_used = (
            "length_correction: true" if config.length_correction else "as length_correction: true would make them"
        )
        display.note(
            f"length explains {share:.0%} of the held-out accuracy above chance: the score that it predicts orders "
            f"{by_length:.3f} of the pairs, and the scores without that, {is_used}, order {without:.3f}"
        )
    return {"rm/length_accuracy": by_length, "rm/accuracy_without_length": without}


def _agreement(members: Sequence[Member], rows: TokenRows, config: RMConfig, display: Display) -> dict[str, float]:
    """The accuracy or error of each member and of their mean, and how alike they judge, on the held-out rows."""
    test = rows.held_out.test
    if not test:
        display.note("no held-out rows, so it is unknown how alike the members judge")
        return {}
    name = "mse" if config.loss == "mse" else "accuracy"
    # PPO adds normalised scores. Predictions of one target need no scale.
    scores = [m.scores for m in members]
    if config.length_correction:
        lengths = torch.tensor([length for item in test for length in item.lengths])
        scores = [one - value_at(regression_on_length(lengths, one), lengths).to(one) for one in scores]
    if config.is_pairwise:
        scores = [one / m.figures["rm/sft_score_std"] for one, m in zip(scores, members, strict=True)]
    named = {**{str(i): one for i, one in enumerate(scores)}, "mean": torch.stack(scores).mean(0)}
    found = {f"members/{name}_{i}": _figures(test, one, rows.scale, config)[f"eval/{name}"] for i, one in named.items()}
    sizes = [len(item.sequences) for item in test] if config.is_pairwise else None
    found |= agreement_of_members(scores, sizes)
    lines = [[key, f"{value:.4g}"] for key, value in found.items()]
    display.table(f"RM, {len(members)} members on {test} held-out rows; 0 is rm/model", ["", "value"], lines)
    return found


def _show(figures: dict[str, float], rows: TokenRows, display: Display) -> None:
    """Print the held-out figures as a table, and what they say about the model."""
    if figures:
        display.table("RM, held out", ["", "value", "rows"], held_out_lines(figures, rows.held_out, rows.probes))
    if rows.probes:
        display.note(
            "probe/NAME is the accuracy on pairs that differ in one known way, NAME (data.probes). 0.5 is chance: the "
            "model does not see that difference, so its score tells PPO nothing about it"
        )
    if not rows.held_out.watched:
        display.note("no held-out rows, so it is unknown whether the model is better than chance")
        return
    if not rows.held_out.test:
        figures = {name.replace("validation/", "eval/"): value for name, value in figures.items()}
    sentence, is_better = held_out_verdict(figures)
    (display.note if is_better else display.warn)(sentence)


# ----------------------------------------------------------------------------------- 6. normalisation


def _normalize(
    model: PreTrainedModel,
    rows: TokenRows,
    samples: Sequence[Sample],
    scores: torch.Tensor,
    budget: Budget,
    folder: Path,
    config: RMConfig,
    stage: StageRun,
) -> dict[str, float]:
    """Write length limits, correction for length and score statistics into the config of each saved model.

    `scores` are the last model's, of the held-out answers. Returns its statistics. Its weights are freed if another one
    is loaded.
    """
    # PPO cuts texts as the training did.
    data = config.data
    facts: dict[str, Any] = {"rlhf_max_length": data.max_length, "rlhf_truncation": data.truncation}
    if config.loss == "mse":
        # The head predicts (score - target_mean) / target_std.
        facts |= {"target_mean": rows.scale.mean, "target_std": rows.scale.std}
    model.config.update(facts)
    texts = texts_to_score(model, rows.encoder, rows.held_out.test or rows.train, samples, config, stage)
    test = rows.held_out.test
    lengths = [item.lengths for item in test]
    if config.length_correction:
        facts |= fit_length(model, lengths, lambda: scores)
    mean, std = write_statistics(model, texts, facts, folder, budget, config, stage)
    stage.world.barrier()
    others = [path for path in sorted(stage.directory.iterdir()) if re.fullmatch(r"best_model|epoch_\d+", path.name)]
    if others:
        release(model)
    for directory in others:
        other = frozen_reward_model(directory, config, stage)
        if config.length_correction:
            facts |= fit_length(other, lengths, partial(_scores, other, test, budget, config, stage.world))
        write_statistics(other, texts, facts, directory, budget, config, stage)
    return {"rm/sft_score_mean": mean, "rm/sft_score_std": std}


if __name__ == "__main__":
    from rlhf_cli.run import launch

    launch.main("rm", run)
