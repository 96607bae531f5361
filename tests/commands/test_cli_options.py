"""The command line itself: FILE and --config, -h, `config docs`, a source's keys as --set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rlhf_cli import cli
from rlhf_cli.cli import app
from rlhf_cli.commands.config import entries
from rlhf_cli.config.by_stage import CONFIGS
from rlhf_cli.program import program


def rlhf(*arguments: str, columns: int = 80) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})


COMMANDS: list[tuple[str, ...]] = [(), *((name,) for name in cli.COMMANDS["rlhf"])]
COMMANDS += [(group, name) for group in ("rm", "data", "config") for name in cli.COMMANDS[group]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_of_every_command_fits_into_80_columns(command: tuple[str, ...]) -> None:
    result = rlhf(*command, "-h")
    assert result.exit_code == 0, result.output
    assert result.output == rlhf(*command, "--help").output
    assert max(map(len, result.output.splitlines())) <= 80
    assert "…" not in result.output


@pytest.mark.parametrize("group", cli.COMMANDS)
def test_the_list_of_commands_has_the_first_line_of_each(group: str) -> None:
    """The list is printed without importing the commands."""
    for name, place in cli.COMMANDS[group].items():
        if place is not None:
            assert cli.first_line(place) == cli.imported(name, place).help.split("\n\n")[0].replace("\n", " ")


# ------------------------------------------------------------------------------- the file of a stage


@pytest.mark.parametrize("stage", ["sft", "rm", "ppo"])
def test_a_stage_takes_its_file_with_or_without_config(stage: str, tmp_path: Path) -> None:
    file = tmp_path / f"{stage}.yaml"
    file.write_text("artifacts: a\nnonsense: 1\n", encoding="utf-8")
    without, with_config = rlhf(stage, str(file)), rlhf(stage, "--config", str(file))
    assert without.exit_code == with_config.exit_code == 2
    assert "nonsense: unknown key" in without.stderr
    assert without.stderr == with_config.stderr
    assert rlhf(stage, "--nproc", "2", str(file)).stderr == without.stderr
    mixed = rlhf(stage, "--quiet", "--set", "seed=x", str(file), "--restart")
    assert "--set seed=x: found the text 'x'" in mixed.stderr
    assert "give FILE or --config, not both" in rlhf(stage, str(file), "--config", str(file)).stderr
    for words in ((stage,), ("config", "show"), ("config", "check")):
        missing = rlhf(*words, "no.yaml")
        assert (missing.exit_code, missing.stderr) == (2, "error: no.yaml: no such file, must be a YAML config\n")
    assert "the stage needs its YAML file" in rlhf(stage).stderr


def test_rm_keeps_its_command_and_refuses_options_before_it() -> None:
    assert "write options after `serve`" in rlhf("rm", "--quiet", "serve", "x").stderr
    assert "No such command 'sevre'" in rlhf("rm", "sevre", "x").stderr
    assert rlhf("rm", "--members", "2", "no.yaml").stderr == "error: no.yaml: no such file, must be a YAML config\n"
    assert "--members: 0, must be greater than or equal to 1" in rlhf("rm", "--members", "0", "no.yaml").stderr


# ------------------------------------------------------------------------------- mistakes on the command line


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("chat x --stage foo", "--stage: 'foo' is not one of sft, ppo. Run: RLHF chat -h"),
        ("generate x --stage foo --prompts p --out o.jsonl", "--stage: 'foo' is not one of sft, ppo. Run: RLHF gen"),
        ("serve x --port 99999", "--port: 99999, must be less than or equal to 65535. Run: RLHF serve -h"),
        ("chat x --temperature -1", "--temperature: -1, must be greater than or equal to 0"),
        ("generate x --prompts p", "--out: is required"),
        ("rm score x y --nope", "No such option: --nope. Run: RLHF rm score -h"),
        ("sft", "FILE: the stage needs its YAML file"),
        ("ppo --nproc 0", "--nproc: 0, must be greater than or equal to 1"),
        ("plan x --gpus none", "--gpus: none, must be"),
        ("nothing", "No such command 'nothing'. Run: RLHF -h"),
        ("config check", "FILES: is required"),
        ("config check x.yaml --stage dpo", "--stage: 'dpo' is not one of sft, rm, ppo. Run: RLHF config check -h"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(line: str, message: str) -> None:
    result = rlhf(*line.split())
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert result.stderr.startswith(f"error: {message.replace('RLHF', program())}")


# ------------------------------------------------------------------------------- completion in the shell


@pytest.mark.parametrize(
    ("words", "expected"),
    [("rlhf pip", ["pipeline"]), ("rlhf eval --stage r", ["rm"]), ("rlhf config docs rm.zero", ["rm.zero_mean_coef"])],
)
def test_the_shell_completes_commands_and_keys(words: str, expected: list[str]) -> None:
    env = {"_RLHF_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    assert CliRunner().invoke(app, [], prog_name="rlhf", env=env).output.split() == expected


# ------------------------------------------------------------------------------- config docs


@pytest.mark.parametrize(
    ("key", "facts"),
    [
        ("ppo.kl_coef", "a number at least 0; default 0.05"),
        ("rollout.top_p", "a number above 0 and at most 1 or null; default null"),
        ("seed", "a whole number; default 0"),
        ("training.tokens_per_microbatch", "a whole number above 0 or auto; default auto"),
        ("optimizer.betas", "a list of 2, each a number at least 0 and below 1; default [0.9, 0.95]"),
        ("optimizer.learning_rate", "a number above 0; required"),
        ("rewards.http.url", "text; required"),
        ("rewards.reward_model.steps.separator", r'text; default "\n\n"'),
        ("evaluation.gold", "text or null; default null"),
        ("data.split", "a list of whole numbers at least 0 or null; default null"),
        ("ppo.rewards", "a list of mappings; default [{type: reward_model}]"),
    ],
)
def test_docs_name_type_and_default(key: str, facts: str) -> None:
    result = rlhf("config", "docs", key)
    assert result.exit_code == 0
    assert result.output.splitlines()[1] == f"  {facts}"


@pytest.mark.parametrize("key", [*CONFIGS, "ppo.rollout"])
def test_docs_of_a_stage_or_section_list_every_key_below_it_at_80_columns(key: str) -> None:
    stage, _, section = key.partition(".")
    output = rlhf("config", "docs", key).output
    names = [line.split("  (")[0] for line in output.splitlines() if line and not line.startswith(" ")]
    assert names == [entry.name for entry in entries(stage) if entry.name.startswith(section)]
    assert len(names) > 10
    assert max(map(len, output.splitlines())) <= 80
    schema = json.dumps(CONFIGS[stage].model_json_schema())
    assert all(f'"{name.rpartition(".")[2]}"' in schema for name in names)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("rm.los", "did you mean rm.loss?"),
        ("optimizer.lr", "did you mean sft.optimizer.learning_rate?"),
        ("ppo.klcoef", "did you mean ppo.ppo.kl_coef?"),
        ("zzzz", "List all keys of a stage with: rlhf config docs sft | rm | ppo"),
        ("", "no such key"),
    ],
)
def test_docs_of_an_unknown_key_suggest_another(key: str, message: str) -> None:
    result = rlhf("config", "docs", key)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


# ------------------------------------------------------------------------------- keys of a source


def test_a_sources_keys_are_set(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"q": f"question {n}", "a": {"text": f"answer {n}"}} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    by_key = ("--key", "prompt=q", "--key", "response=a.text")
    by_set = (
        "--set",
        "keys.prompt=q",
        "--set",
        "keys={prompt: q, response: a.text}",
        "--set",
        "format=prompt_response",
    )
    for more in (by_key, by_set):
        result = rlhf("data", "check", str(path), "--for", "sft", "--json", "--set", "limit=7", *more)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["sides"]["train"]["read"] == 7
