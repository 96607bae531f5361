"""Tasks of lm-evaluation-harness, which reads the model directory of a stage like any other model."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_cli.errors import ConfigError
from rlhf_cli.program import install_extra
from rlhf_cli.report.figure import Figure, Figures

NORMAL_95 = 1.96
"""Standard errors on each side of a normal 95 % interval."""
BATCH_SIZE = 16
RESAMPLES = 1000
"""Bootstrap samples for the standard error of metrics that are not means."""


class Harness:
    """Runs the same tasks on several models. Without tasks it measures nothing."""

    def __init__(self, tasks: Sequence[str], device: str):
        """Look up the tasks: names of lm-evaluation-harness, patterns, or YAML files that define one.

        Raises ConfigError if the library is not installed or does not know a task.
        """
        self.device = device
        self._figures: dict[str, Figures] = {}
        self._tasks: Any = []
        if not tasks:
            return
        if importlib.util.find_spec("lm_eval") is None:
            raise ConfigError(f"--tasks: needs lm-evaluation-harness. Run: {install_extra('lm-eval', 'lm_eval')}")
        from lm_eval.config.evaluate_config import EvaluatorConfig

        config = EvaluatorConfig(tasks=list(tasks))
        try:
            self._manager = config.process_tasks()
        except ValueError as error:
            raise ConfigError(f"--tasks: {error}. `lm-eval ls tasks` lists the names") from None
        self._tasks = config.tasks

    def figures(self, model_path: str) -> Figures:
        """The figures of each task, as `task/metric`. A model is measured once."""
        if not self._tasks:
            return {}
        if model_path not in self._figures:
            import lm_eval

            results = lm_eval.simple_evaluate(
                model="hf",
                model_args={"pretrained": model_path},
                tasks=self._tasks,
                task_manager=self._manager,
                device=self.device,
                batch_size=BATCH_SIZE,
                bootstrap_iters=RESAMPLES,
                log_samples=False,
            )
            self._figures[model_path] = figures_of(results)
        return self._figures[model_path]


def figures_of(results: Mapping[str, Any]) -> Figures:
    """The figures in what `lm_eval.simple_evaluate` returns, with normal intervals from its standard errors.

    >>> figures_of({"results": {"arc": {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.1}}})["arc/acc"]
    Figure(value=0.5, low=0.304, high=0.696, rows=None)
    """
    figures: Figures = {}
    for task, values in results["results"].items():
        rows = results.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in values.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{chosen}")
            name = f"{task}/{metric}" if chosen == "none" else f"{task}/{metric} ({chosen})"
            half = NORMAL_95 * error if isinstance(error, int | float) else float("nan")
            figures[name] = Figure(value, value - half, value + half, rows)
    return figures
