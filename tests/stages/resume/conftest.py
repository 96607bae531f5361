"""Fixtures of the resume tests: configs by case, undisturbed runs to compare with, and stopped runs to resume."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.run.stage_run import StageRun
from support import crash
from support.resume import PPO_CARRIES, TRAINING, same, stopped_after, stopping_after, succeed
from support.tiny import SETTINGS, merged

CHANGED_MODEL = {"add_tokens": ["<|end|>"], "freeze": ["layers.0"]}


@pytest.fixture(scope="session")
def changes(pipeline) -> dict[str, dict[str, Any]]:
    """Changes to the shared config of each case. The first word of a case is its stage."""
    root = pipeline("llama")
    optimizer = {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}
    often = {"checkpoints": {"every_steps": 2, "every_minutes": None}, "optimizer": optimizer}
    ppo = often | {"policy": {"path": str(root / "sft")}, "rewards": [{"type": "reward_model", "path": f"{root}/rm"}]}
    shaped = {**ppo["rewards"][0], "shaping": {"kind": "par", "num_references": 2}}
    four = {"ppo": {"num_iterations": 4}}
    lora = {"lora": {"r": 2, "alpha": 4, "target_modules": ["q_proj", "up_proj"]}}
    cases = {
        "sft": (often, {"model": {"path": str(root / "sft/model"), **CHANGED_MODEL}, **TRAINING}),
        "sft scratch": (often, {"model": {"scratch": {"config": SETTINGS["llama"]}}, **TRAINING}),
        "sft dora": (often, {"model": {"path": str(root / "sft/model"), "lora": {"r": 2, "dora": True}}, **TRAINING}),
        "rm": (often, TRAINING),
        "rm members": (often, TRAINING | {"members": 3}),
        "rm lora": (often, {"model": {"path": str(root / "sft/model"), "lora": {"r": 2}}, **TRAINING}),
        "ppo": (ppo, PPO_CARRIES, {"rewards": [shaped, {"type": "length", "max": 3, "limit": {"above": -1}}]}),
        "ppo 8bit": (ppo, four | {"optimizer": {"precision": "8bit"}}),
        "ppo lora penalty": (
            ppo,
            {
                "policy": lora,
                "value_model": lora,
                "data": {"test": {"limit": 24}},  # enough for response/unfamiliarity
                "ppo": {
                    "num_iterations": 4,
                    "objective": "penalty",
                    "policy_kl_target": 0.001,
                    "score_normalization": "reference",
                    "num_reference_samples": 8,
                    "ema_decay": 0.5,
                },
            },
        ),
        "ppo shared filters": (
            ppo,
            {
                "value_model": {"init": "shared"},
                "rollout": {"top_k": 30, "min_new_tokens": 2, "temperature": 0.9},
                "ppo": {"num_iterations": 4, "num_rollouts_per_update": 3, "kl_in": "loss", "entropy_coef": 0.01},
                "ptx": {"train": str(root.parent), "coef": 0.5},
            },
        ),
        "ppo groups bfloat16": (
            ppo,
            {
                "rollout": {"samples_per_prompt": 2},
                "ppo": {"num_iterations": 4, "advantage_estimator": "rloo", "score_normalization": "running"},
                "evaluation": {"every_iterations": 2, "best_metric": "-kl"},
                "policy": {"freeze": ["embeddings", "layers.0"]},
                "optimizer": {"max_grad_norm": None, "precision": "bfloat16"},
                "precision": "bfloat16",
            },
        ),
    }
    return {name: functools.reduce(merged, parts) for name, parts in cases.items()}


@pytest.fixture(scope="session")
def config_in(write_config, changes, pipeline, data) -> Callable[..., list[str]]:
    """A function: case, artifact root, config changes -> the command-line arguments of the run."""

    def prepare(case: str, root: Path, **more: Any) -> list[str]:
        stage = case.split()[0]
        if stage == "rm" and not (root / "sft").is_dir():
            shutil.copytree(pipeline("llama") / "sft", root / "sft")
        config = merged(changes[case], more)
        if "ptx" in config:
            config["ptx"]["train"] = str(data["demonstrations"])
        return [stage, "--config", str(write_config(stage, root, **config))]

    return prepare


@pytest.fixture
def at_step(monkeypatch) -> Callable[[int, Callable[[StageRun], object]], None]:
    """A function: step, action -> run the action after the step and before it is saved."""
    return lambda step, happens: monkeypatch.setattr(StageRun, "finish_step", stopping_after(step, happens))


@pytest.fixture(scope="session")
def undisturbed(config_in, tmp_path_factory) -> Callable[[str], dict[str, Any]]:
    """A function: case -> the outcome of a run that nothing stops."""
    known: dict[str, dict[str, Any]] = {}

    def run(case: str) -> dict[str, Any]:
        if case not in known:
            root = tmp_path_factory.mktemp("undisturbed") / "run"
            succeed(config_in(case, root), "--quiet")
            known[case] = crash.outcome(root / case.split()[0])
        return known[case]

    return run


@pytest.fixture
def finish(undisturbed) -> Callable[..., str]:
    """A function: the arguments of a run -> what it prints. It ends as a run that nothing stopped."""

    def run(arguments: list[str], *more: str) -> str:
        output = succeed(arguments, *more)
        stage = arguments[0]
        same(crash.outcome(Path(arguments[2]).parent / stage), undisturbed(stage))
        return output

    return run


@pytest.fixture(scope="session")
def stopped(config_in, tmp_path_factory) -> Callable[[str, Path], list[str]]:
    """A function: case, new artifact root -> the arguments that resume a stopped run there.

    The run was stopped after four steps (PPO: three iterations); the last two checkpoints are left.
    """
    known: dict[str, Path] = {}

    def copy(case: str, root: Path) -> list[str]:
        stage = case.split()[0]
        if case not in known:
            known[case] = tmp_path_factory.mktemp("stopped") / "run"
            stopped_after(3 if stage == "ppo" else 4, config_in(case, known[case]), "--quiet")
        shutil.copytree(known[case], root, dirs_exist_ok=True)
        return config_in(case, root)

    return copy
