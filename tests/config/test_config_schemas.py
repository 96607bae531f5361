"""The schemas: shipped configs are valid, every field has a doc and is read, conflicting options are refused."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rlhf_cli.config import base, data, models, ppo, rewards, sft_rm, stage
from rlhf_cli.config.base import REMOVED, Section
from rlhf_cli.config.by_stage import CONFIGS, stage_of
from rlhf_cli.config.loader import config_schema, load_config, load_values
from rlhf_cli.config.ppo import PPOConfig, ValueModel
from rlhf_cli.config.stage import Stage
from rlhf_cli.config.yaml_text import dump_config
from rlhf_cli.errors import ConfigError, UserError
from rlhf_cli.run.identity import identity, require_files, require_inputs
from rlhf_cli.run.launch import explained
from support.paths import ROOT

SHIPPED = sorted(ROOT.glob("configs/*/*.yaml"))


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_shipped_configs_are_valid_dump_back_and_begin_with_the_command(path: Path, tmp_path: Path) -> None:
    stage = stage_of(path, None)
    config = load_config(path, CONFIGS[stage])
    assert load_config(write(tmp_path / "copy.yaml", dump_config(config)), CONFIGS[stage]) == config
    validator(stage).validate(json.loads(config.model_dump_json()))
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first == f"# rlhf {stage} --config {path.relative_to(ROOT)}"


@functools.cache
def validator(stage: str) -> jsonschema.Draft202012Validator:
    schema = config_schema(CONFIGS[stage])
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def sections() -> list[type[BaseModel]]:
    modules = (base, data, models, stage, rewards, sft_rm, ppo)
    found = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    return sorted((c for c in found if issubclass(c, Section) and c is not Section), key=lambda c: c.__name__)


def test_every_field_is_read_by_something() -> None:
    """A key that no code reads would do nothing. Reading is an attribute access anywhere in the packages."""
    read: set[str] = set()
    for path in [*ROOT.glob("rlhf_cli/**/*.py"), *ROOT.glob("stages/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
    fields = {field for section in sections() for field in section.model_fields} - {"type"}
    assert fields - read == set()


def test_every_field_has_a_doc() -> None:
    """`rlhf config docs` prints it, and editors show it. A subclass may leave the doc to its base."""
    silent = {
        f"{section.__name__}.{name}"
        for section in sections()
        for name, info in section.model_fields.items()
        if not info.description and name in section.__annotations__
    }
    assert silent == set()
    assert [section.__name__ for section in sections() if not (section.__doc__ or "").strip()] == []


SFT: dict[str, Any] = {
    "artifacts": "a",
    "model": {"path": "m"},
    "data": {"train": "d.jsonl"},
    "training": {"num_steps": 1},
    "optimizer": {"learning_rate": 1e-3},
}
GROUPED = ("rloo", "grpo", "dr_grpo", "reinforce_pp_baseline")
GROUPS = ["rollout.samples_per_prompt=2"]
PPO: dict[str, Any] = {
    "artifacts": "a",
    "data": {"train": "d.jsonl"},
    "ppo": {"num_iterations": 1, "rollout_batch_size": 8, "minibatch_size": 4},
    "optimizer": {"learning_rate": 1e-3},
}


@pytest.mark.parametrize(
    ("stage", "overrides", "message"),
    [
        ("sft", ["training.num_epochs=1"], "exactly one of num_epochs and num_steps"),
        ("sft", ["training.num_steps=null"], "exactly one of num_epochs and num_steps"),
        ("sft", ["model.scratch={}"], "exactly one of path"),
        ("sft", ["data.prompt_template=hello"], "must be `chat` or contain {prompt} exactly once"),
        ("rm", ["loss=bce", "label_smoothing=0.1"], "label_smoothing does nothing with loss: bce"),
        ("rm", ["loss=mse", "flip_rate=0.1"], "flip_rate does nothing with loss: mse"),
        ("rm", ["label_smoothing=0.1", "flip_rate=0.1"], "Remove one of them"),
        ("rm", ["members=2", "member_models=[a, b]"], "names 2 models, and 1 of the members come after"),
        ("rm", ["member_models=[a]"], "names 1 models, and 0 of the members come after"),
        ("rm", ["loss=plackett_luce", "zero_mean_coef=0.1"], "zero_mean_coef does nothing with loss: plackett_luce"),
        ("rm", ["flip_rate=0.5"], "less than 0.5"),
        ("rm", ["loss=mse", "data.margin_column=m"], "does nothing with loss: mse"),
        ("ppo", ["ppo.minibatch_size=3"], "must divide rollout_batch_size"),
        ("ppo", ["rewards=[]"], "at least 1"),
        ("sft", ["optimizer.betas=[1, 0.9]"], "less than 1"),
        ("sft", ["data.train={path: d.jsonl, select: 3/3}"], "part 3/3 does not exist; the parts of 3 are 0/3 to 2/3"),
        ("ppo", ["rewards.0={type: function, function: nope}"], "function"),
        ("ppo", ["rewards.0={type: reward_model, output: probability}"], "probability is for a classifier"),
        # A group baseline with one sample, or with samples that do not fill a batch.
        *(("ppo", [f"ppo.advantage_estimator={name}"], "every advantage would be 0") for name in GROUPED),
        ("ppo", ["rollout.samples_per_prompt=3"], "must divide ppo.rollout_batch_size"),
        # A KL that would do nothing or be counted twice.
        ("ppo", ["ppo.kl_in=loss", "ppo.kl_estimator=k1"], "gradient of 0 on average"),
        ("ppo", ["ppo.kl_estimator=k2_sequence"], "is a loss, not a reward"),
        ("ppo", ["ppo.kl_target=6"], "kl_target does nothing with kl_controller: fixed"),
        ("ppo", ["ppo.kl_horizon=100"], "kl_horizon does nothing with kl_controller: fixed"),
        ("ppo", ["ppo.kl_controller=adaptive"], "needs kl_target"),
        ("ppo", ["ppo.kl_controller=adaptive", "ppo.kl_target=6", "ppo.kl_coef=0"], "0 stays 0"),
        # Keys that the choice made does not read.
        ("ppo", ["ppo.objective=penalty", "ppo.clip_range=0.1"], "clip_range does nothing with objective: penalty"),
        ("ppo", ["ppo.objective=penalty", "ppo.dual_clip=3"], "dual_clip does nothing"),
        ("ppo", ["ppo.policy_kl_target=0.01"], "policy_kl_target does nothing with objective: clip"),
        ("ppo", ["ppo.advantage_estimator=reinforce", "ppo.vf_coef=0.1"], "vf_coef does nothing"),
        ("ppo", ["ppo.advantage_estimator=reinforce", "ppo.gae_lambda=1"], "gae_lambda does nothing"),
        ("ppo", ["ppo.advantage_estimator=monte_carlo", "ppo.gae_lambda=1"], "gae_lambda does nothing"),
        ("ppo", ["ppo.advantage_estimator=grpo", *GROUPS, "ppo.gamma=0.9"], "gamma does nothing"),
        ("ppo", ["ppo.advantage_estimator=reinforce", "value_model.init=policy"], "value_model does nothing"),
        ("ppo", ["ppo.advantage_estimator=reinforce_pp", "ppo.whiten_advantages=false"], "Use reinforce"),
        ("ppo", ["ppo.importance_ratio_cap=5", "precision=float32"], "does nothing with num_rollouts_per_update: 1"),
        ("ppo", ["rollout.max_staleness=1"], "no other engines any more"),
        ("sft", ["track_model=true"], "models are not sent to trackers any more"),
        ("ppo", ["rollout.engine=vllm", "rollout.max_staleness=0"], "no other engines any more"),
        ("ppo", ["ppo.num_reference_samples=5"], "does nothing with score_normalization: none"),
        ("ppo", ["ppo.overlong_buffer=4"], "only together. Set both"),
        ("ppo", ["ppo.overlong_buffer=100", "ppo.overlong_penalty=1"], "above rollout.max_new_tokens"),
        ("ppo", ["rollout.min_new_tokens=65"], "above max_new_tokens"),
        ("ppo", ["ppo.minibatch_size=8", "ppo.max_approx_kl=0.1"], "can never end an update of one step"),
        ("ppo", ["value_model.warmup_iterations=1"], "leaves no iteration to train the policy"),
        ("ppo", ["value_model.init=policy", "value_model.path=x"], "init: policy does nothing"),
        ("ppo", ["value_model.init=shared", "value_model.lora={}"], "lora does nothing with init: shared"),
        ("ppo", ["value_model={init: shared, freeze: [norm]}"], "freeze does nothing with init: shared"),
        ("ppo", ["value_model={lora: {}, freeze: [norm]}"], "freeze does nothing with value_model.lora"),
        ("ppo", ["policy.lora={}", "policy.freeze=[embeddings]"], "freeze does nothing with lora"),
        ("ppo", ["policy.lora={dropout: 0.1}"], "dropout is not offered: two passes of the same weights would differ"),
        ("sft", ["model.lora_dropout=0.1"], "dropout is not offered"),
        ("sft", ["model.lora={}", "model.freeze=[embeddings]"], "freeze does nothing with lora"),
        ("sft", ["model.lora={}", "model.add_tokens=[<x>]"], "add_tokens does nothing with lora"),
        ("rm", ["optimizer.precision=bfloat16", "model.lora={}"], "does nothing with model.lora"),
        ("ppo", ["optimizer.precision=bfloat16", "policy.lora={}"], "does nothing with policy.lora"),
        ("ppo", ["policy.add_tokens=[<x>]"], "add_tokens belongs to the SFT stage"),
        ("ppo", ["rollout.no_repeat_ngram_size=1"], "at least 2"),
        ("rm", ["model.add_tokens=[<x>]"], "add_tokens belongs to the SFT stage"),
        ("ppo", ["evaluation.best_metric=gold"], "needs every_iterations"),
        ("ppo", ["ptx={train: d.jsonl, coef: 1.5, mode: convex}"], "coef is 1.5"),
        ("sft", ["distributed.offload=true"], "offload needs shard: true"),
        ("sft", ["distributed={shard: true, offload: true}", "device=cpu"], "does nothing with device: cpu"),
        ("ppo", ["distributed={shard: true, offload: true}", "offload=[frozen]"], "does nothing with distributed"),
    ],
)
def test_a_config_that_cannot_work_is_refused(stage: str, overrides: list[str], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"{stage}.yaml", yaml.safe_dump(PPO if stage == "ppo" else SFT))
    load_config(path, CONFIGS[stage])
    with pytest.raises(ConfigError, match=message.replace("{", r"\{").replace("}", r"\}")):
        load_config(path, CONFIGS[stage], overrides)


@pytest.mark.parametrize("stage", CONFIGS)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["compile=true", "gradient_checkpointing=true"], "exclude each other"),
        (["optimizer.precision=bfloat16", "precision=float32"], "needs bfloat16 passes"),
    ],
)
def test_the_rules_that_all_stages_share_hold_in_each(stage: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(ROOT / f"configs/support/{stage}.yaml", CONFIGS[stage], overrides)


def test_keys_of_earlier_versions_that_mean_what_runs_do_now_are_ignored() -> None:
    path, overrides = ROOT / "configs/support/ppo.yaml", [f"{key}={value}" for key, value in REMOVED.items()]
    assert load_config(path, PPOConfig, overrides) == load_config(path, PPOConfig)


def test_another_estimator_can_be_chosen_from_the_command_line(tmp_path: Path) -> None:
    """Every key that is in its way is named at once, with its own line, and null unsets it."""
    path = ROOT / "configs/support/ppo.yaml"
    lines = path.read_text(encoding="utf-8").splitlines()
    overrides = ["ppo.advantage_estimator=rloo", "value_model={init: policy}", "ppo.kl_controller=fixed"]
    with pytest.raises(ConfigError) as error:
        load_config(path, PPOConfig, overrides)
    in_the_way = ("kl_target", "kl_horizon", "gae_lambda")
    numbers = [next(n for n, line in enumerate(lines, 1) if line.strip().startswith(name)) for name in in_the_way]
    named = [line.partition(": ") for line in str(error.value).splitlines()]
    assert [(place, text.split(" does nothing")[0]) for place, _, text in named[1:]] == [
        *((f"{path}:{number}", f"ppo: {name}") for number, name in zip(numbers, in_the_way, strict=True)),
        ("--set value_model={init", "policy}: value_model"),
    ]
    assert "every advantage would be 0" in named[0][2]
    nulls = [f"ppo.{name}=null" for name in in_the_way] + ["value_model=null", "rollout.samples_per_prompt=4"]
    config = load_config(path, PPOConfig, [*overrides, *nulls])
    assert (config.ppo.gae_lambda, config.ppo.kl_target, config.value_model) == (0.95, None, ValueModel())
    text = f"extends: {path}\nppo: {{kl_controller: fixed, kl_target: null, kl_horizon: null}}\n"
    assert load_config(write(tmp_path / "above.yaml", text), PPOConfig).ppo.kl_horizon == 10_000
    with pytest.raises(ConfigError, match=r"ppo.num_iterations: required key is missing$"):
        load_config(path, PPOConfig, ["ppo.num_iterations=null"])
    with pytest.raises(ConfigError, match=r"ppo.yaml:1: seed: found nothing"):
        load_values({"artifacts": "a", "seed": None}, PPOConfig, [], "ppo.yaml:1")


# -------------------------------------- mutated configs: each is valid, or refused with readable messages, quickly


@functools.cache
def bases() -> list[tuple[str, str]]:
    """Every shipped config with all defaults written out, and as shipped if it extends no other: stage, text."""
    configs = []
    for path in SHIPPED:
        stage = stage_of(path, None)
        if "extends: " not in (text := path.read_text(encoding="utf-8")):
            configs.append((stage, text))
        configs.append((stage, dump_config(load_config(path, CONFIGS[stage]))))
    return configs


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 3.0, 0.5, -0.5, 1e-5, 1e308, 5e-324, 2**64, 10**30, math.inf, math.nan, "", " ",
    "x", "3", "null", "no", "<<", "auto", "chat", "{prompt}", "{prompt} {prompt}", "linear", "rloo", "adaptive", "loss",
    "shared", "mse", "penalty", "9/3", "a.py:f", ".py:", "../x", "~x", "org/name", "a b/c", "-x", "ünï 😀", "\u202ex",
    "\u2028", "\x85", "a\nb", "\r", "\x07", "\0", "\x1b[31m", "\ud800", "\ufffe", "x" * 300, "é" * 3000, "x\n" * 500,
    [], {}, [1, 2], ["a"], [[[]]], [None], {"path": "p"}, {"path": "p", "select": "0/2"}, {"type": "reward_model"},
    {"type": "function", "function": "a.py:f"}, {"r": 4}, {"a": {"b": {"c": 1}}}, {1: 2}, {None: 1}, {"": 1},
    {"x" * 500: 1}, b"bytes", {"a", "b"}, list(range(2000)), {f"k{i}": i for i in range(300)},
]  # fmt: skip
KEYS: list[Any] = ["path", "train", "type", "num_step", "lr", "a.b", "Seed", "ppo", "lora", "ü", "k" * 200, 3, None]
OVERRIDES = [
    "seed=3", "seed=x", "seed", "=1", "x=1", "a=[", "artifacts=a", "data.train.path=x", "optimizer.betas.0=0.5",
    "optimizer.betas.5=1", "rewards.0.weight=2", "rewards={}", "model.path=null", "data=\ud800", "\udc80=1",
    "a." * 60 + "b=1", "model.scratch.config." + "x" * 3000 + "=1", "seed=" + "9" * 5000, "artifacts=" + "y" * 5000,
]  # fmt: skip


def nodes(tree: Any) -> list[tuple[Any, Any]]:
    """Every (mapping or list, key or index) of a tree."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []
    return [(tree, key) for key in keys] + [inner for key in keys for inner in nodes(tree[key])]


def verdict(stage: str, overrides: list[str], path: Path) -> str:
    """ "valid" or "refused": the way a config is loaded, and used before a model or data is."""
    start = time.process_time()
    try:
        config: Stage = load_config(path, CONFIGS[stage], overrides)
    except ConfigError as error:
        for line in str(error).split("\n"):
            assert line.startswith((f"{path}:", "--set ")), line[:200]
            assert line.isprintable(), line[:200]
            assert 15 < len(line.removeprefix(str(path))) <= 500, line[:200]
        return "refused"
    finally:
        assert time.process_time() - start < 5
    for check in (require_inputs, require_files, identity):
        with contextlib.suppress(UserError), explained(path, config.artifacts):
            check(config)
    assert load_config(write(path, dump_config(config)), CONFIGS[stage]) == config, (
        "differs after it is written and read again"
    )
    return "valid"


CHANGES = st.tuples(
    st.integers(0, 9999),
    st.sampled_from(["replaced", "scaled", "scaled", "removed", "renamed", "wrapped"]),
    st.sampled_from(VALUES),
    st.sampled_from(KEYS),
)


def changed(text: str, changes: list[Any]) -> bytes:
    tree = yaml.safe_load(text)
    for at, kind, value, name in changes:
        if not (places := nodes(tree)):
            break
        holder, key = places[at % len(places)]
        old = holder[key]
        if kind == "removed":
            del holder[key]
        elif kind == "renamed" and isinstance(holder, dict):
            holder[name] = holder.pop(key)
        elif kind == "wrapped":
            holder[key] = [old]
        elif kind == "scaled" and isinstance(old, bool | int | float | str):
            holder[key] = not old if isinstance(old, bool) else old * 2
        else:
            holder[key] = copy.deepcopy(value)
    return yaml.safe_dump(tree, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")


def test_mutated_configs_are_usable_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(ROOT / "data")
    ends: Counter[str] = Counter()

    @settings(max_examples=160, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(bases()),
        st.lists(CHANGES, min_size=1, max_size=3),
        st.just([]) | st.lists(st.sampled_from(OVERRIDES), max_size=2),
    )
    def load(base: tuple[str, str], changes: list[Any], overrides: list[str]) -> None:
        path = tmp_path / "config.yaml"
        path.write_bytes(changed(base[1], changes))
        ends[verdict(base[0], overrides, path)] += 1

    load()
    assert min(ends["valid"], ends["refused"]) > 0, ends


def test_a_terminal_without_unicode_shows_escapes_and_a_config_stays_utf_8(tmp_path: Path) -> None:
    """A character that the terminal cannot encode must not end in a traceback."""
    path = write(tmp_path / "ünï 😀.yaml", yaml.safe_dump({**SFT, "artifacts": "ünï 😀"}))

    def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "rlhf_cli", "config", *arguments, str(path), "--stage", "sft"]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
        return subprocess.run(command, capture_output=True, env=env, check=False)

    shown = f"{path}: valid sft config\n".encode("ascii", "backslashreplace")
    assert (run("check").stdout, run("show").stdout) == (shown, dump_config(load_config(path, CONFIGS["sft"])).encode())
    refused = run("check", "--set", "seed=ünï 😀")
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert refused.stderr == "error: --set seed=ünï 😀: found the text 'ünï 😀', must be a whole number\n".encode(
        "ascii", "backslashreplace"
    )
