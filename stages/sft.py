"""SFT: teach a language model to answer, from demonstrations.

    rlhf sft --config configs/support/sft.yaml
    torchrun --nproc-per-node 2 -m stages.sft --config configs/support/sft.yaml

Reads   demonstrations (`data.train`, `data.test`), and a pretrained model or an architecture
Writes  <artifacts>/sft/model, metrics.jsonl, samples.jsonl; where asked for best_model

 1. the model and its tokenizer: pretrained, or both made here
 2. rows to token sequences; the prompt's tokens are not learnt, EOS is
 3. for each step: the batch's cross-entropy, summed over its learnt tokens and divided by their number in
    the whole batch, so that the gradient does not depend on how the batch was cut into microbatches
 4. the model is saved; held-out loss, perplexity and token accuracy, and samples to read; it is published

The loss is eq. 1 of Stiennon et al. 2020 without its reward terms, the usual next-token cross-entropy.
"""

from __future__ import annotations

if __name__ == "__main__":  # Before torch is imported, which reads these settings.
    from rlhf_cli.environment import set_up_process

    set_up_process()

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.algorithms.language_model import lm_loss
from rlhf_cli.artifacts import model_directory
from rlhf_cli.config.sft_rm import SFTConfig
from rlhf_cli.data.batches import Budget, deal, stream
from rlhf_cli.data.encode import (
    Example,
    LeftOut,
    Limits,
    answer_to_learn,
    before_answer,
    encode_demonstrations,
    encode_rows,
    prompt_text,
    require_eos,
)
from rlhf_cli.data.prefetch import ahead
from rlhf_cli.data.reading import Report, records
from rlhf_cli.data.records import Demonstration, demonstration
from rlhf_cli.data.tokens import Tokenised, tokenise
from rlhf_cli.models.cost import Work, peak_flops, token_budget, work_of
from rlhf_cli.models.forward import autocast, is_packed, target_logits, target_logprobs, vocabulary_rows
from rlhf_cli.models.limits import check_positions, positions
from rlhf_cli.models.load import check_vocabulary, load_policy, load_tokenizer, prepare, save
from rlhf_cli.models.passes import set_up_passes
from rlhf_cli.models.scratch import new_model, train_tokenizer
from rlhf_cli.rollout.distribution import Sampling
from rlhf_cli.rollout.sampling import draw_uniforms, sample, stop_ids
from rlhf_cli.tensor_ops import token_logprobs, totals
from rlhf_cli.training import launch
from rlhf_cli.training.best import Best, require_held_out
from rlhf_cli.training.checkpoint import Weights
from rlhf_cli.training.distributed import World
from rlhf_cli.training.optimizer import build_stepper, warmup_warning
from rlhf_cli.training.speed import Speed
from rlhf_cli.training.stage_run import StageRun

MOST_LOGITS = 1 << 28
"""Numbers of the logits that an evaluation holds at once: 1 GB in float32."""
SHOWN = ("loss/sft", "sft/learning_rate", "sft/grad_norm", "speed/step_tokens_per_s")


def run(config: SFTConfig, *, quiet: bool = False, restart: bool = False) -> None:
    """Run the stage: everything that the module's docstring lists, in its order."""
    with StageRun("sft", config, quiet=quiet, restart=restart) as stage:
        world, display = stage.world, stage.display

        # 1. The model; a new tokenizer is trained on the rows.
        model, tokenizer = _model_and_tokenizer(config)
        if note := prepare(model, world.device):
            display.note(note)
        check_positions(model, config.data.max_length, "data.max_length")

        # 2. Rows to tokens.
        data = tokenised(config, tokenizer)
        for line in data.lines:
            display.note(line)
        train, test = data.train, data.test[: config.evaluation.max_rows]
        questions = _questions(config, model, tokenizer, stage) if test else []

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
            f"{len(train)} training rows of {train.lengths('ids').mean():.0f} tokens on average; {steps} steps of "
            f"{config.training.minibatch_size} rows ({steps * config.training.minibatch_size / len(train):.2f} "
            f"epochs), at most {budget.tokens:,} tokens at a time; "
            f"{sum(p.numel() for p in model.parameters()):,} parameters on {world.device}"
        )
        if config.optimizer.warmup_steps >= steps:
            display.warn(warmup_warning(config.optimizer.warmup_steps, steps))
        stepper = build_stepper(model, config.optimizer, steps)
        abnormal = config.warn_loss_above or math.log(model.config.vocab_size)
        warned = False
        notes, compile_s = set_up_passes([model], config, world.device)
        for line in notes:
            display.note(line)
        model.train()
        best = Best("eval/loss" if config.evaluation.keep_best else None, lower=True)
        require_held_out(best, test)
        first = stage.resume({"model": Weights(model), "optimizer": stepper, "best": best}, steps)
        if config.compile and first == 0:
            stage.log(first, {"time/compile_s": compile_s})
        display.begin(steps, "step", first)
        for step, batch in speed.timed("data", ahead(partial(_batch, config, train), first, steps, world.device)):
            rate = stepper.learning_rate
            with speed.phase("step"):
                loss = _accumulate(model, batch, budget, config.precision, world)
                numbers = {"loss/sft": loss, "sft/grad_norm": stepper.clip(world)}
                moves = stage.may_step(step + 1, f"sft step {step + 1}", numbers, partial(_rows, tokenizer, batch))
                stepper.advance(move=moves)
            _count(speed, work, _own(batch, world))
            figures = {**numbers, "sft/learning_rate": rate, "sft/bad_steps": float(not moves), **speed.row()}
            stage.log(step + 1, figures, SHOWN)
            if moves and loss > abnormal and step > config.optimizer.warmup_steps and not warned:
                warned = True
                display.warn(
                    f"step {step + 1}: loss {loss:.2f} is above {abnormal:.2f}. Lower optimizer.learning_rate, or "
                    "look at the rows: this is worse than guessing every token alike"
                )
            every = config.evaluation.every_steps
            if every is not None and (step + 1) % every == 0 and step + 1 < steps:
                with speed.phase("evaluation"):
                    held_out = _evaluate(model, tokenizer, test, questions, budget, config, stage, step + 1)
                if best.is_better(step + 1, held_out) and world.is_main:
                    save(model, tokenizer, stage.directory / "best_model")
            stage.finish_step(step + 1, steps)
        display.end()

        # 4. The product, saved before anything else can fail; then held-out figures.
        if world.is_main:
            save(model, tokenizer, stage.directory / "model")
        with speed.phase("evaluation"):
            final = _evaluate(model, tokenizer, test, questions, budget, config, stage, steps)
        if best.is_better(steps, final) and world.is_main:
            save(model, tokenizer, stage.directory / "best_model")
        if best.step is not None:
            display.note(f"best_model is the model of step {best.step}, of {best.metric} {best.value:.4g}")
        if final:
            display.table("SFT, held out", ["", "value"], [[key, f"{value:.4g}"] for key, value in final.items()])
        else:
            display.note("no held-out rows, so no figures")
        stage.publish(final)


def _batch(config: SFTConfig, train: Sequence[Example], step: int) -> list[Example]:
    """The rows of a step, over all processes."""
    rows = stream(len(train), config.training.minibatch_size, step, config.seed, "sft order")
    return [train[i] for i in rows]


def _accumulate(model: PreTrainedModel, batch: list[Example], budget: Budget, precision: str, world: World) -> float:
    """Backward over this process's share of a batch; returns the loss of the whole batch."""
    num_tokens = sum(sum(example.learnt) for example in batch)
    mine = _own(batch, world)
    losses = []
    for part in budget.cut([len(example.ids) for example in mine]):
        examples = [mine[i] for i in part]
        with autocast(world.device, precision):
            logprobs = target_logprobs(model, [e.ids for e in examples], [e.learnt for e in examples])
        loss, _ = lm_loss(logprobs, num_tokens=num_tokens)
        loss.backward()
        losses.append({"loss": loss})
    return world.sum_floats({"loss": 0.0, **totals(losses)})["loss"]


def _own(batch: list[Example], world: World) -> list[Example]:
    """This process's share of a batch, about as many tokens as each other's."""
    return [batch[i] for i in deal([len(example.ids) for example in batch], world.size)[world.rank]]


def _count(speed: Speed, work: Work, examples: list[Example]) -> None:
    """What a step did with this process's examples."""
    lengths = [len(example.ids) for example in examples]
    learnt = sum(sum(example.learnt) for example in examples)
    speed.count("step", tokens=sum(lengths), flops=work.training(lengths, learnt))


def _rows(tokenizer: PreTrainedTokenizerBase, batch: list[Example]) -> list[dict[str, Any]]:
    """A batch that can't be learnt from, to be looked at: a row a sequence."""
    return [{"text": str(tokenizer.decode(example.ids)), **asdict(example)} for example in batch]


@torch.no_grad()
def _evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    test: list[Example],
    questions: list[Question],
    budget: Budget,
    config: SFTConfig,
    stage: StageRun,
    step: int,
) -> dict[str, float]:
    """Held-out loss, perplexity and token accuracy over all tokens; completions of held-out prompts."""
    if not test:
        return {}
    world = stage.world
    model.eval()
    sums = {"nll": 0.0, "correct": 0.0, "tokens": 0.0}
    mine = world.shard(test)
    # Whole logits are looked at here, which training never holds (kernels/head.py).
    budget = replace(budget, tokens=max(1, min(budget.tokens, MOST_LOGITS // vocabulary_rows(model))))
    for part in budget.cut([len(example.ids) for example in mine]):
        with autocast(world.device, config.precision):
            logits, targets = target_logits(model, [mine[i].ids for i in part], [mine[i].learnt for i in part])
        sums["nll"] -= token_logprobs(logits, targets).cpu().double().sum().item()
        sums["correct"] += (logits.argmax(-1) == targets).sum().item()
        sums["tokens"] += len(targets)
    sums = world.sum_floats(sums)
    loss = sums["nll"] / sums["tokens"]
    metrics = {
        "eval/loss": loss,
        "eval/perplexity": math.exp(min(loss, 700.0)),
        "eval/token_accuracy": sums["correct"] / sums["tokens"],
    }
    stage.log(step, metrics)
    if questions and world.is_main:
        settings = config.evaluation
        with autocast(world.device, config.precision):
            responses = sample(
                model,
                [question.ids for question in questions],
                draw_uniforms(config.seed, "sft samples", step, len(questions), settings.max_new_tokens),
                Sampling(temperature=settings.temperature, stop=frozenset(stop_ids(model, tokenizer))),
            )
        for question, response in zip(questions, responses, strict=True):
            text = str(tokenizer.decode(response.ids, skip_special_tokens=True))
            stage.sample({"step": step, "prompt": question.text, "response": text, "ended": response.ended})
            stage.display.exchange(question.text, {f"step {step}": text})
    model.train()
    return metrics


@dataclass(frozen=True)
class Question:
    """A held-out prompt that is answered now and then, to be read."""

    text: str
    ids: list[int]


def _questions(
    config: SFTConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stage: StageRun,
) -> list[Question]:
    """The first held-out prompts that leave room for an answer in the model's positions."""
    settings, template = config.evaluation, config.data.prompt_template
    room = positions(model) - settings.max_new_tokens
    found: list[Question] = []
    for row in _demonstrations(config, "test"):
        if len(found) == settings.num_samples:
            return found
        ids = encode_rows(tokenizer, [row], template)[0]
        if len(ids) <= room:
            found.append(Question(prompt_text(row.prompt, template, tokenizer, before_answer(row)), ids))
    if settings.num_samples and not found:
        stage.display.note(f"no held-out prompt leaves room for {settings.max_new_tokens} tokens, so no samples")
    return found


def tokenised(config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> Tokenised[Example]:
    """The stage's rows as training sequences."""
    data = config.data
    limits = Limits(data.max_length, data.truncation, data.min_response_length)

    def encode(rows: Sequence[Demonstration]) -> list[Example | LeftOut]:
        learn_all = data.loss_on == "all"
        return encode_demonstrations(tokenizer, rows, data.prompt_template, learn_all=learn_all, limits=limits)

    return tokenise(data, "sft", Example, answer_to_learn, encode, tokenizer, prompt_words=data.prompt_words)


def _demonstrations(config: SFTConfig, side: str) -> Iterator[Demonstration]:
    """The demonstrations of one side, as they are read."""
    for _, record in records(config.data, "sft", Report(), prompt_words=config.data.prompt_words, only=side):
        row = demonstration(record)
        if row is not None:
            yield row


def _model_and_tokenizer(config: SFTConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    scratch = config.model.scratch
    if scratch is not None:
        texts = (row.prompt + row.response for row in _demonstrations(config, "train"))
        new_tokenizer = train_tokenizer(texts, scratch.tokenizer)
        return new_model(scratch, new_tokenizer, config.seed), new_tokenizer
    assert config.model.path is not None
    path = model_directory(config.model.path)
    tokenizer, model = load_tokenizer(path, config.model.revision), load_policy(path, config.model.revision)
    check_vocabulary(model, tokenizer, path)
    require_eos(tokenizer, path)
    return model, tokenizer


if __name__ == "__main__":
    launch.main("sft", run)
