"""The loop that SFT and RM share: batches, optimizer steps, evaluation, the best model, checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Generic, TypeVar

from transformers import PreTrainedModel

from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.data.batches import ahead, stream
from rlhf_cli.data.splits import Drawn, HeldOutRows
from rlhf_cli.files import rows_of
from rlhf_cli.health.findings import Finding
from rlhf_cli.health.recap import findings_of
from rlhf_cli.models.passes import Passes
from rlhf_cli.report.progress import epochs
from rlhf_cli.run.checkpoint import Weights
from rlhf_cli.run.stage_run import StageRun
from rlhf_cli.tensor_ops import num_weights
from rlhf_cli.training.bad_steps import no_gradient
from rlhf_cli.training.best import Best
from rlhf_cli.training.optimizer import build_stepper, warmup_warning

MANY_EPOCHS = 10  # with more passes over the training rows than this a run warns: a model then memorises its rows
HELD_OUT_LOSSES = ("eval/loss", "eval/mse", "eval/brier")
"""The held-out figures that are a loss; a stage has one of them."""
MEMORISES = "memorises"  # the name of the finding about a held-out loss that rises
HELD_OUT_RISE = 1.05  # held-out loss, divided by its lowest so far. Good: up to 1.01.
LEAST_RISE = 0.01  # nats: near a loss of 0 smaller differences mean nothing
LEARNED = 1e-3  # a loss below this may give a gradient whose squares are 0 in float32

T = TypeVar("T")


class Loop(Generic[T]):
    """The optimizer steps of a stage over batches of `T`.

    Args:
        train: the training rows, which `seed` shuffles anew for each epoch.
        evaluate: computes the figures of held-out rows; `{}` without rows.
        save: writes the model as the folder of this name in the stage's directory.
        best: which model to keep as `best_model`.
        shown: the figures beside the progress, the most important first.
        after_evaluation: called after each evaluation with the number of steps, for example to sample answers.
        mean_length: mean tokens of a training row, for the line about the run.
    """

    def __init__(
        self,
        stage: StageRun,
        config: SFTConfig | RMConfig,
        model: PreTrainedModel,
        passes: Passes,
        *,
        train: Sequence[T],
        seed: int,
        held_out: HeldOutRows[Any],
        evaluate: Callable[[Drawn[Any]], dict[str, float]],
        save: Callable[[str], None],
        best: Best,
        shown: tuple[str, ...],
        after_evaluation: Callable[[int], None] = lambda _: None,
        mean_length: float | None = None,
    ):
        self.stage, self.config, self.model, self.passes, self.best = stage, config, model, passes, best
        self.train, self.seed, num_rows = train, seed, len(train)
        self.num_steps = config.training.total_steps(num_rows)
        self.stepper = build_stepper(model, config.optimizer, self.num_steps, seed=config.seed, scale=stage.loss_scale)
        self.held_out, self._evaluate, self._save = held_out, evaluate, save
        self.shown = tuple(map(self._named, shown))
        self._after_evaluation = after_evaluation
        stage.speed.peak_flops = passes.peak_flops
        training = config.training
        lengths = "" if mean_length is None else f" of {mean_length:.0f} tokens on average"
        plan = (
            f"{num_rows:,} training rows{lengths}; {self.num_steps:,} steps of {training.minibatch_size} rows "
            f"({epochs(self.num_steps * training.minibatch_size / num_rows)}), at most {passes.budget.tokens:,} "
            f"tokens per microbatch; {sum(map(num_weights, model.parameters())):,} parameters on {stage.world.device}"
        )
        choice = "evaluation.keep_best" if best.metric is not None else None
        stage.display.notes(plan, *passes.lines, *held_out.notes("evaluation.max_rows", choice))
        for warning in warnings(config, self.num_steps, num_rows):
            stage.display.warn(warning)

    def steps(self) -> Iterator[tuple[int, list[T]]]:
        """Each remaining step (from 0) with its batch of all processes. Between two it evaluates and saves when due.

        The body of the caller's loop computes the gradient and calls `update`.
        """
        stage, config, total = self.stage, self.config, self.num_steps
        every = config.evaluation.every_steps
        self.model.train()
        first = stage.resume({"model": Weights(self.model), "optimizer": self.stepper, "best": self.best}, total)
        if config.compile and first == 0:
            stage.log(first, {"time/compile_s": self.passes.compile_s})
        stage.display.begin(total, "step", first)
        for step, batch in stage.speed.timed("data", ahead(self._batch, first, total, stage.world.device)):
            yield step, batch
            done = step + 1
            if every is not None and done % every == 0 and done < total:
                figures = self.evaluate(done)
                if figures:
                    stage.log(done, figures, self.shown)
            size = config.training.minibatch_size
            epoch, before = (number * size // len(self.train) for number in (done, step))
            if config.training.save_every == "epoch" and done < total and epoch > before:
                self.save(f"epoch_{epoch}")
            stage.finish_step(done, total)
        stage.display.end()

    def _batch(self, step: int) -> list[T]:
        size, purpose = self.config.training.minibatch_size, f"{self.stage.stage} order"
        return [self.train[i] for i in stream(len(self.train), size, step, self.seed, purpose)]

    def update(
        self, step: int, stats: Mapping[str, float], describe: Callable[[], list[dict[str, Any]]]
    ) -> dict[str, float]:
        """Clip the gradient and step the optimizer, or skip the step if the loss or the gradient is not finite.

        Raises RunError for a gradient of exactly 0 although the loss is not. `describe` gives the batch as rows for the
        file of failed batches. Returns the step's row of metrics: `stats`, and <stage>/grad_norm, learning_rate,
        bad_steps and, in float16, loss_scale.
        """
        name, learning_rate = self.stage.stage, self.stepper.learning_rate
        loss, grad_norm = stats[f"loss/{name}"], self.stepper.clip(self.stage.world)
        numbers = {f"loss/{name}": loss, f"{name}/grad_norm": grad_norm}
        moves = self.stage.may_step(step + 1, f"{name} step {step + 1}", numbers, describe)
        if moves and loss > LEARNED:
            self.stage.report(step + 1, no_gradient({f"{name}/grad_norm": grad_norm}, f"step {step + 1}"), None)
        scale = self.stage.loss_scale.figures(name)
        self.stepper.advance(move=moves)
        self.stage.loss_scale.update()
        return {
            **stats,
            **scale,
            f"{name}/grad_norm": grad_norm,
            f"{name}/learning_rate": learning_rate,
            f"{name}/bad_steps": float(not moves),
        }

    def evaluate(self, done: int) -> dict[str, float]:
        """Held-out figures after `done` steps. Saves the model as `best_model` if they are the best so far."""
        with self.stage.speed.phase("evaluation"):
            found = self._evaluate(self.held_out.watched)
            figures = {self._named(name): value for name, value in found.items()}
            main = [f"{name.partition('/')[2]} {figures[name]:.4g}" for name in self.shown if name in figures]
            if main and done < self.num_steps:  # the last figures are shown as a table
                self.stage.display.note(f"step {done:,}: held-out {', '.join(main)}")
            self._after_evaluation(done)
            self.stage.world.barrier("the samples")
        if self.stage.world.is_main:
            self._warn_if_memorised(done, figures)
        if self.best.is_better(done, found):
            self.stage.set_aside("best_model")
            self.save("best_model")
        return figures

    def _warn_if_memorised(self, done: int, figures: Mapping[str, float]) -> None:
        """Warn once of a held-out loss that rises while the training loss falls."""
        directory = self.stage.directory
        key = next((key for key in map(self._named, HELD_OUT_LOSSES) if key in figures), None)
        if key is None or any(one.name == MEMORISES for one in findings_of(directory)):
            return
        rows = list(rows_of(directory / "metrics.jsonl"))
        of = f"loss/{self.stage.stage}"
        training = [(row["step"], row[of]) for row in rows if row.get(of) is not None]
        held_out = [(row["step"], row[key]) for row in rows if row.get(key) is not None and row["step"] < done]
        message = memorises([*held_out, (done, figures[key])], training)
        if message is not None:
            keep = "best_model is the better one" if self.best.metric else "Set evaluation.keep_best: true"
            advice = f"{keep}; lower training.num_steps or num_epochs, or add rows to data.train"
            self.stage.report(done, [Finding(MEMORISES, "warning", message, advice)], None)

    def finish(self) -> dict[str, float]:
        """Save the trained model before anything else can fail, then compute the final held-out figures."""
        self.stepper.release()  # what follows may load a second model
        self.save("model")
        figures = self.evaluate(self.num_steps)
        if self.held_out.validation:
            figures |= self._evaluate(self.held_out.test)
        if self.best.step is not None:
            metric = self._named(str(self.best.metric))
            self.stage.display.note(f"best_model is the model of step {self.best.step}: {metric} {self.best.value:.4g}")
        return figures

    def _named(self, name: str) -> str:
        """`eval/...` is `validation/...` where validation rows are watched."""
        return re.sub("^eval/", "validation/", name) if self.held_out.validation else name

    def save(self, name: str) -> None:
        if self.stage.world.takes_part(self.model):
            self._save(name)
        self.stage.world.barrier(f"{name} to be saved")


def warnings(config: SFTConfig | RMConfig, num_steps: int, num_rows: int) -> list[str]:
    """Warnings about the length of a run: a warm-up that never ends, a few rows repeated many times."""
    found = []
    if config.optimizer.warmup_ratio is None and config.optimizer.warmup_steps >= num_steps:
        found.append(warmup_warning(config.optimizer.warmup_steps, num_steps))
    passes = num_steps * config.training.minibatch_size / num_rows
    if passes > MANY_EPOCHS:
        key = "num_steps" if config.training.num_steps is not None else "num_epochs"
        several = "the 1 training row" if num_rows == 1 else f"the {num_rows:,} training rows"
        lower = f"training.{key}"
        if num_rows < config.training.minibatch_size:  # repeats rows within a step
            lower += " or training.minibatch_size"
        found.append(
            f"the run passes {passes:.1f} times over {several}; after more than {MANY_EPOCHS} epochs a model memorises "
            f"its rows. Add rows to data.train, or lower {lower}"
        )
    return found


def memorises(held_out: Sequence[tuple[int, float]], training: Sequence[tuple[int, float]]) -> str | None:
    """The message if the held-out loss is above its lowest while the training loss fell further; else None.

    Both are (step, loss), in order. The training loss is a mean over the steps between two evaluations.

    >>> held_out, training = [(10, 1.0), (20, 1.2)], [(step, 2.0 - step / 10) for step in range(1, 21)]
    >>> memorises(held_out, training)[:78]
    'The held-out loss is 1.2, 20% above the 1 of step 10, and the training loss fe'
    """
    if len(held_out) < 2:
        return None
    (best_step, best), (step, now) = min(held_out, key=lambda one: one[1]), held_out[-1]
    window = step - held_out[-2][0]
    before = [loss for at, loss in training if best_step - window < at <= best_step]
    last = [loss for at, loss in training if step - window < at <= step]
    rises = now > max(HELD_OUT_RISE * best, best + LEAST_RISE)
    if not (rises and before and last and fmean(last) < fmean(before)):
        return None
    rise = f"{now / best - 1:.0%} " if best else ""
    return (
        f"The held-out loss is {now:.3g}, {rise}above the {best:.3g} of step {best_step}, and the "
        f"training loss fell from {fmean(before):.3g} to {fmean(last):.3g} since then (means of {window} steps). The "
        "model memorises its training rows."
    )
