"""SFT: train a language model to answer, from demonstrations.

    rlhf sft --config configs/support/sft.yaml
    rlhf sft --config configs/support/sft.yaml --nproc 2

Reads   demonstrations (`data.train`, `data.test`), and a pretrained model or an architecture
Writes  <artifacts>/sft/model, metrics.jsonl, samples.jsonl; with evaluation.keep_best also best_model

 1. load the model and its tokenizer, or make both from scratch
 2. encode the rows: the targets of the loss are the answer's tokens and EOS, not the prompt's
 3. for each step: sum the cross-entropy over the batch's target tokens and divide by their number in the whole
    batch, so that the gradient does not depend on how the batch is cut into microbatches
 4. save the model, then compute held-out loss, perplexity and token accuracy, and sample answers to read

The loss is the usual next-token cross-entropy: the supervised baseline of Stiennon et al. 2020 and Ouyang et al. 2022.
"""

from __future__ import annotations

if __name__ == "__main__":  # Before torch is imported, which reads these settings.
    from rlhf_cli.processes.environment import set_up_process

    set_up_process()

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.algorithms.losses import lm_loss
from rlhf_cli.config.sft_rm import SFTConfig
from rlhf_cli.data.batches import Budget, own_share
from rlhf_cli.data.cache import Table, tokenise
from rlhf_cli.data.encode import Example, RowText, require_eos
from rlhf_cli.data.encoders import DemonstrationEncoder
from rlhf_cli.data.records import Record
from rlhf_cli.data.row_counts import Report
from rlhf_cli.data.splits import Drawn, held_out_rows
from rlhf_cli.data.stage_rows import demonstration, records, sft_rows
from rlhf_cli.health.findings import Finding
from rlhf_cli.health.recap import findings_of
from rlhf_cli.models.forward import autocast, check_positions, positions, scored_targets, target_logprobs
from rlhf_cli.models.frozen import freeze
from rlhf_cli.models.load import check_vocabulary, load_policy, load_tokenizer, prepare
from rlhf_cli.models.lora import add_adapters, defers_base, prepare_base
from rlhf_cli.models.passes import set_up_training
from rlhf_cli.models.save import base_of, round_weights, save_trained
from rlhf_cli.models.seq2seq import require_one_answer
from rlhf_cli.models.shard import shard_for, shards
from rlhf_cli.models.vocabulary import add_tokens, embed_tokens
from rlhf_cli.processes.distributed import World
from rlhf_cli.processes.microbatches import GradientSum
from rlhf_cli.report.progress import Display
from rlhf_cli.rollout.sampling import draw_uniforms
from rlhf_cli.rollout.speaker import Speaker
from rlhf_cli.run.artifacts import model_directory
from rlhf_cli.run.stage_run import StageRun
from rlhf_cli.tensor_ops import totals
from rlhf_cli.training.best import Best, require_held_out
from rlhf_cli.training.supervised import Loop

SHOWN = ("loss/sft", "eval/loss", "sft/grad_norm", "sft/learning_rate", "speed/step_tokens_per_s")
"""The figures beside the progress, the most important first."""
HIGH_LOSS = "high_loss"  # the name of the finding about a training loss that is too high


def run(config: SFTConfig, *, quiet: bool = False, restart: bool = False) -> None:
    """Run the stage: the steps of the module's docstring, in their order."""
    with StageRun("sft", config, quiet=quiet, restart=restart) as stage:
        world, display, config = stage.world, stage.display, stage.settled(config)

        # 1. The model. A new tokenizer is trained on the rows.
        model, tokenizer, lines = _model_and_tokenizer(config, world.device)
        lines.append(prepare(model, world.device))
        lora, base = config.model.lora, base_of(config)
        lines.append(add_adapters(model, lora, base, "model.lora", config))
        lines.append(shard_for(config, model, world.device))
        display.notes(*lines)
        check_positions(model, config.data.max_length, "data.max_length")

        # 2. Rows to tokens.
        data = tokenise(DemonstrationEncoder(tokenizer, sft_rows(config)), longest=positions(model))
        display.about_rows(data.lines, data.warnings)
        _warn_of_unused_tokens(config.model.add_tokens, tokenizer, data.train, display)
        train, held_out = data.train, held_out_rows(data, config.data, config.evaluation.max_rows, config.seed)
        require_one_answer(model, train, config.data.loss_on)
        shown = _demonstrations(config, "test") if held_out.test else None
        questions = Questions(shown, model, tokenizer, config, stage)

        # 3. Training.
        passes = set_up_training(model, config, world.device, stage.microbatch_tokens({"model": model}))

        best = Best("eval/loss" if config.evaluation.keep_best else None, lower=True)
        require_held_out(best, held_out.watched)
        loop: Loop[Example] = Loop(
            stage,
            config,
            model,
            passes,
            train=train,
            seed=config.seed,
            held_out=held_out,
            evaluate=lambda rows: _evaluate(model, rows, passes.budget, config.precision, world),
            after_evaluation=lambda step: questions.answer(step, None if step == loop.num_steps else 1),
            save=lambda name: save_trained(model, tokenizer, stage.directory / name, config, lora, base),
            best=best,
            shown=SHOWN,
            mean_length=float(train.lengths("ids").mean()),
        )
        for step, batch in loop.steps():
            with stage.speed.phase("step"):
                loss = _accumulate(model, batch, passes.budget, config.precision, stage)
                figures = loop.update(step, {"loss/sft": loss}, partial(_readable, tokenizer, batch))
            mine = own_share(batch, lambda example: len(example.ids), world)
            lengths, targets = [len(example.ids) for example in mine], sum(sum(example.loss_mask) for example in mine)
            stage.speed.count("step", tokens=sum(lengths), flops=passes.work.training(lengths, targets))
            stage.log(step + 1, {**figures, **stage.speed.row()}, loop.shown)
            _warn_of_loss(figures, config, model, stage, step, loop.num_steps)

        # 4. The product, then held-out figures.
        round_weights(model, config, base)
        final = loop.finish()
        if final:
            stage.log(loop.num_steps, final)
            rows = held_out.test or held_out.validation
            num_tokens = sum(sum(example.loss_mask) for example in rows)
            title = f"SFT on {rows} held-out rows, {num_tokens:,} target tokens"
            display.table(title, ["", "value"], [[key, f"{value:.4g}"] for key, value in final.items()])
        else:
            display.note("no held-out rows, so no figures")
        stage.publish(final)


def _accumulate(model: PreTrainedModel, batch: list[Example], budget: Budget, precision: str, stage: StageRun) -> float:
    """The gradient of this process's share of a batch. Returns the loss of the whole batch."""
    world = stage.world
    num_tokens = sum(sum(example.loss_mask) for example in batch)
    mine = own_share(batch, lambda example: len(example.ids), world)

    def loss_of(rows: Sequence[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        examples = [mine[i] for i in rows]
        with autocast(world.device, precision):
            # [target tokens of the microbatch]
            logprobs = target_logprobs(model, [e.ids for e in examples], [e.loss_mask for e in examples])
        loss, _ = lm_loss(logprobs, num_tokens=num_tokens)
        return loss, {"loss": loss}

    gradients = GradientSum(world, stage.loss_scale.scaled, model)
    stats = gradients.add(budget.cut([len(example.ids) for example in mine]), loss_of)
    gradients.receive()
    return world.sum_floats({"loss": 0.0, **totals(stats)})["loss"]


def _readable(tokenizer: PreTrainedTokenizerBase, batch: list[Example]) -> list[dict[str, Any]]:
    """A batch with its text, one row per sequence, for the file of failed batches."""
    return [{"text": str(tokenizer.decode(example.ids)), **asdict(example)} for example in batch]


def _warn_of_loss(
    figures: dict[str, float], config: SFTConfig, model: PreTrainedModel, stage: StageRun, step: int, num_steps: int
) -> None:
    """Warn once of a loss above `warn_loss_above` after the warm-up; without that key, above ln(vocabulary size)."""
    loss, guessing = figures["loss/sft"], math.log(model.config.get_text_config().vocab_size)
    limit = config.warn_loss_above or guessing
    is_bad = not figures["sft/bad_steps"] and step > config.optimizer.warmup(num_steps) and loss > limit
    if is_bad and not any(one.name == HIGH_LOSS for one in findings_of(stage.directory)):
        above = f"above {limit:.2f}" + (" (warn_loss_above)" if config.warn_loss_above is not None else "")
        worse = ", worse than guessing all tokens with equal probability" if loss > guessing else ""
        advice = "Lower optimizer.learning_rate, or check the rows (rlhf data show)"
        finding = Finding(HIGH_LOSS, "warning", f"The loss is {loss:.2f}, {above}{worse}.", advice)
        stage.report(step + 1, [finding], None)


# ---------------------------------------------------------------------------------------- 4. evaluation


@torch.no_grad()
def _evaluate(
    model: PreTrainedModel, rows: Drawn[Example], budget: Budget, precision: str, world: World
) -> dict[str, float]:
    """Loss, perplexity and token accuracy over all target tokens of held-out rows, and the loss of each source."""
    if not rows:
        return {}
    model.eval()
    sums = {"nll": 0.0, "correct": 0.0, "tokens": 0.0}
    source_of = {i: name for name, numbers in rows.by_source.items() for i in numbers}
    sums |= {f"{kind} of {name}": 0.0 for name in rows.by_source for kind in ("nll", "tokens")}
    own = world.shard(range(len(rows)))
    for part, logprobs, is_likeliest in scored_targets(model, [rows[i] for i in own], budget, precision):
        sums["nll"] -= logprobs.sum().item()
        sums["correct"] += is_likeliest.sum().item()
        sums["tokens"] += len(logprobs)
        if source_of:
            numbers = [own[i] for i in part]
            for i, one in zip(numbers, logprobs.split([sum(rows[i].loss_mask) for i in numbers]), strict=True):
                sums[f"nll of {source_of[i]}"] -= one.sum().item()
                sums[f"tokens of {source_of[i]}"] += len(one)
    sums = world.sum_floats(sums)
    model.train()
    loss = sums["nll"] / sums["tokens"]
    return {
        "eval/loss": loss,
        "eval/perplexity": math.exp(min(loss, 700.0)),  # exp overflows a float above 709
        "eval/token_accuracy": sums["correct"] / sums["tokens"],
        **{f"eval/loss/{name}": sums[f"nll of {name}"] / sums[f"tokens of {name}"] for name in rows.by_source},
    }


# --------------------------------------------------------------------------------- 1. model and tokenizer


def _demonstrations(config: SFTConfig, side: str) -> Iterator[Record]:
    """The demonstrations of one side, in the order of the data."""
    for _, record in records(sft_rows(config), Report(), only=side):
        row = demonstration(record)
        if row is not None:
            yield row


def _model_and_tokenizer(
    config: SFTConfig, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[str | None]]:
    """A pretrained model with its tokenizer, or new ones, and lines for the user."""
    scratch, new_tokens = config.model.scratch, config.model.add_tokens
    if scratch is not None:
        from rlhf_cli.models.scratch import new_model, train_tokenizer

        texts = (row.prompt + row.response for row in _demonstrations(config, "train"))
        new_tokenizer = train_tokenizer(texts, scratch.tokenizer)
        add_tokens(new_tokenizer, new_tokens, "model.add_tokens")
        new = new_model(scratch, new_tokenizer, config.seed)
        return new, new_tokenizer, [freeze(new, config.model.freeze, "model.freeze")]
    assert config.model.path is not None
    path = model_directory(config.model.path)
    tokenizer = load_tokenizer(path, config.model.revision)
    deferred = shards(config) or defers_base(config.model.lora, config, device)
    model = load_policy(path, config.model.revision, deferred=deferred and not new_tokens)
    check_vocabulary(model, tokenizer, path)
    require_eos(tokenizer, path)
    lines = [freeze(model, config.model.freeze, "model.freeze")]
    add_tokens(tokenizer, new_tokens, "model.add_tokens")
    lines.append(embed_tokens(model, tokenizer, new_tokens, "model.add_tokens"))
    prepare_base(model, config.model.lora, "model.lora", config, device)
    return model, tokenizer, lines


def _warn_of_unused_tokens(
    tokens: Sequence[str], tokenizer: PreTrainedTokenizerBase, train: Table[Example], display: Display
) -> None:
    """Warn of each new token that no training row contains."""
    ids = {token: tokenizer.get_vocab()[token] for token in tokens}
    present = train.present("ids", [*ids.values()]) if ids else ()
    for token in ids:
        if ids[token] not in present:
            display.warn(
                f"model.add_tokens: {token!r} is in no training row, so it is not learned. Write it in "
                "data.prompt_template or the chat template, or set data.special_tokens: keep if your rows contain it"
            )


# ------------------------------------------------------------------------------ held-out prompts that the model answers


class Questions:
    """The first held-out prompts that leave room for an answer in the model's positions; none without rows."""

    def __init__(
        self,
        rows: Iterable[Record] | None,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: SFTConfig,
        stage: StageRun,
    ):
        self.stage, self.seed = stage, config.seed
        self.speaker, most = Speaker.at_evaluation(config, model, tokenizer), config.evaluation.num_samples
        self.rows = list(islice(self.speaker.fitting(rows or ()), most))
        self.text = RowText(tokenizer, self.speaker.form.template)
        if rows is not None and most and not self.rows:
            room = f"no held-out prompt leaves room for {self.speaker.max_new_tokens} tokens, so no samples"
            stage.display.note(room)

    @torch.no_grad()
    def answer(self, step: int, num_shown: int | None) -> None:
        """Sample an answer to each on the first process, for samples.jsonl; print the first `num_shown`, or all."""
        speaker, stage, model = self.speaker, self.stage, self.speaker.model
        if not self.rows or not stage.world.takes_part(model):
            return
        was_training = model.training
        model.eval()
        uniforms = draw_uniforms(self.seed, "sft samples", step, len(self.rows), speaker.max_new_tokens)
        responses = speaker.respond([ids for _, ids in self.rows], uniforms)
        model.train(was_training)
        for number, ((row, _), response) in enumerate(zip(self.rows, responses, strict=True)):
            prompt, text = self.text.prompt(row), speaker.text(response)
            sample = {"step": step, "prompt": prompt, "response": text, "ended": response.ended}
            stage.sample(sample | {"target": row.response})
            if num_shown is None or number < num_shown:
                stage.display.exchange(prompt, {f"step {step}": text, "target": row.response})


if __name__ == "__main__":
    from rlhf_cli.run import launch

    launch.main("sft", run)
