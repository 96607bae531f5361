"""The command line: quick answers without torch, skipping, status, exit codes."""

import errno
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import termios
from unittest import mock

import pytest

from rlhf_cli.commands import init
from rlhf_cli.commands import pipeline as pipeline_module
from rlhf_cli.printing import say
from rlhf_cli.program import program
from support import projects
from support.paths import ROOT
from support.projects import PREFERENCES, digests, write_project
from support.tiny import write_jsonl


def rlhf(*arguments, cwd=ROOT, **options):
    """Run the command in this process, with a wide screen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.setenv("COLUMNS", "400")
        return projects.rlhf(*arguments, **options)


QUICK_COMMANDS = [
    (["--help"], 0),
    (["ppo", "--help"], 0),
    (["sft", "--config", "configs/support/sft.yaml", "--set", "traning.num_steps=1"], 2),
    (["sft", "--confg", "x"], 2),
    (["config", "check", "configs/support"], 0),
    (["config", "show", "configs/support/ppo.yaml"], 0),
    (["config", "schema", "rm"], 0),
    (["status", "configs"], 0),
    (["doctor", "/no/such/place"], 2),
    (["ppo", "--config", "configs/support/ppo.yaml", "--set", "artifacts=/nowhere/run"], 2),
]


def test_answers_without_importing_torch():
    """One after the other in one process: the first that imports something heavy is named. Then all commands are
    imported, so that the help and a wrong option of each are answered at once."""
    check = (
        "import sys\nfrom rlhf_cli import cli\n"
        "def is_light(): return not {'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)\n"
        f"for arguments, code in {QUICK_COMMANDS!r}:\n"
        "    sys.argv = ['rlhf', *arguments]\n"
        "    try:\n        cli.main()\n"
        "    except SystemExit as stop:\n        assert (stop.code or 0) == code, arguments\n"
        "    assert is_light(), arguments\n"
        "for commands in cli.COMMANDS.values():\n"
        "    for name, place in commands.items():\n"
        "        if place:\n            cli.imported(name, place)\n"
        "        assert is_light(), name\n"
        "print('\\nQUICK')\n"
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.stdout.endswith("\nQUICK\n"), result.stdout + result.stderr


def test_help_takes_less_than_a_third_of_a_second():
    """Measured in processor seconds, the best of three runs, because wall time depends on the load of the machine."""
    seconds = []
    for _ in range(3):
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "rlhf_cli", "--help"], capture_output=True, check=True)
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime)
    assert min(seconds) < 0.33


def test_config_show_and_schema():
    assert "seed: 7" in rlhf("config", "show", "configs/support/sft.yaml", "--set", "seed=7").stdout
    assert set(json.loads(rlhf("config", "schema").stdout)) == {"sft", "rm", "ppo"}
    assert "num_iterations" in rlhf("config", "schema", "ppo").stdout
    assert "STAGE: 'ppoo' is not one of sft, rm, ppo" in rlhf("config", "schema", "ppoo", code=2).stderr


def test_config_check_reports_every_file(tmp_path):
    (tmp_path / "sft.yaml").write_text("artifacts: a\nmodl: 1\n")
    (tmp_path / "rm.yaml").write_text("artifacts: a\nlos: mse\n")
    result = rlhf("config", "check", tmp_path, code=2)
    assert "did you mean model?" in result.stderr
    assert "did you mean loss?" in result.stderr
    (tmp_path / "other.yaml").write_text("artifacts: a\n")
    assert "does not say which stage" in rlhf("config", "check", tmp_path / "other.yaml", code=2).stderr


# ------------------------------------------------------------------------------- skipping, status


def pipeline(folder, *arguments):
    return projects.rlhf("pipeline", folder, *arguments).stdout


def test_a_finished_pipeline_is_skipped_and_shows_its_table(project):
    # The project was copied to another path, so the first run here starts over. The second has nothing to do.
    pipeline(project)
    before = digests(project)
    output = pipeline(project)
    assert output.count("is finished and its config, data and inputs are unchanged") == 3
    assert "SFT against PPO" in output
    assert digests(project) == before


def test_the_first_process_alone_prints_the_table(finished, monkeypatch):
    monkeypatch.setattr(pipeline_module, "run_stage", lambda *_, **__: False)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        output = pipeline(finished)
        assert ("Pipeline" in output, "SFT against PPO" in output) == (rank == "0", rank == "0")


def test_a_changed_stage_and_all_later_stages_run_again(project):
    pipeline(project)
    with (project / "pref.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "a new", "chosen": " one", "rejected": " two"}) + "\n")
    output = pipeline(project, "--set", "rm:zero_mean_coef=0.05")
    assert "sft: " in output
    assert output.count(": skipped, ") == 1
    assert "runs again (changed: config.zero_mean_coef, data.train" in output
    assert "changed: inputs.rewards.0" in output


def status_lines(root, cwd):
    """The line of `rlhf status` for each stage."""
    lines = [line.strip() for line in rlhf("status", root, cwd=cwd).stdout.splitlines() if line.split()]
    return {line.split()[0]: line for line in lines if line.split()[0] in ("sft", "rm", "ppo")}


def test_status_from_anywhere(project, tmp_path):
    """Relative paths in a config refer to the directory where the run was started, even after it has moved."""
    for path in project.glob("*.yaml"):
        path.write_text(path.read_text().replace(f"{project}/", ""), encoding="utf-8")
    shutil.rmtree(project / "run")
    rlhf("pipeline", ".", "--quiet", cwd=project)
    (tmp_path / "away").mkdir()
    # A different file with the same name.
    write_jsonl(tmp_path / "away/sft.jsonl", PREFERENCES)

    def all_are(state, lines):
        assert set(lines) == {"sft", "rm", "ppo"}
        assert all(f" {state} " in line and ";" not in line and "stale" not in line for line in lines.values()), lines

    for cwd in (project, project / "run", tmp_path / "away"):
        for root in (str(project / "run"), os.path.relpath(project / "run", cwd)):
            all_are("finished", status_lines(root, cwd))
    (tmp_path / "link").symlink_to(project, target_is_directory=True)
    all_are("finished", status_lines("link/run", tmp_path))
    project.rename(tmp_path / "moved")
    all_are("finished", status_lines("moved/run", tmp_path))

    # Without its data the state is unknown. Changed data makes a stage stale, seen from any directory.
    shutil.copytree(tmp_path / "moved/run", tmp_path / "copies/another")
    lines = status_lines("copies/another", tmp_path)
    assert all("finished; not found from" in line and "stale" not in line for line in lines.values()), lines
    assert f"not found from {tmp_path}: data train (pref.jsonl)" in lines["rm"]
    assert all("input" not in line for line in lines.values()), "the copy contains the stages that they read"
    with (tmp_path / "moved/pref.jsonl").open("a") as file:
        file.write("\n")
    lines = status_lines("moved/run", tmp_path)
    assert "stale, changed since: data train" in lines["rm"]
    assert "stale" not in lines["sft"] + lines["ppo"]
    (tmp_path / "moved/sft.jsonl").unlink()
    assert "finished; not found from" in status_lines("moved/run", tmp_path)["sft"]
    (tmp_path / "moved/run/sft/manifest.json").unlink()
    assert "input model" in status_lines("moved/run", tmp_path)["rm"]


def test_quiet_prints_warnings_only(project):
    """Nothing but warnings: the project has one held-out pair, which cannot show that its reward model is any good."""
    lines = pipeline(project, "--quiet", "--restart").splitlines()
    expected = (
        "rm: warning: held-out accuracy ",
        "ppo: warning: before iteration 1, weak_reward_model: ",
        "  To try: ",
    )
    assert [line.startswith(start) for line, start in zip(lines, expected, strict=True)] == [True] * 3


def test_an_interrupted_command_without_a_stage_speaks_of_none(tmp_path, monkeypatch):
    monkeypatch.setattr(init, "_files", mock.Mock(side_effect=KeyboardInterrupt))
    assert rlhf("init", tmp_path / "new", code=130).stderr == "interrupted\n"


def test_a_folder_that_may_not_be_entered_is_one_line(tmp_path, monkeypatch):
    """The tests may run as root, who may enter every folder."""
    monkeypatch.setattr(init, "_files", mock.Mock(side_effect=PermissionError(errno.EACCES, "denied", "there/file")))
    message = "error: there/file: permission denied. Check its permissions, also of its folders\n"
    assert rlhf("init", tmp_path / "new", code=2).stderr == message


def test_a_foreign_stages_package_is_refused(tmp_path):
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "__init__.py").write_text("")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from rlhf_cli.run.launch import load_stage\n"
        "from rlhf_cli.errors import ConfigError\n"
        "try:\n    load_stage('sft')\nexcept ConfigError as error:\n    print('REFUSED', error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "REFUSED" in result.stdout, result.stderr


# ------------------------------------------------------------------------------- refusals, restart, seeds


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ppo:data.train=nowhere.jsonl", "no such file"),
        ("ppo:evaluation.gold=nowhere.py:f", "no such file"),
        ("rm:model.path=out/other/sft", "out/other: no finished 'sft' stage. Run: "),
        ("sfft:seed=1", "the prefix is sft:, rm: or ppo:"),
        ("ppo:ppo.kl_cof=1", "did you mean kl_coef"),
    ],
)
def test_missing_inputs_of_a_later_stage_are_reported_before_the_first_stage_runs(tmp_path, override, message):
    write_project(tmp_path)
    result = rlhf("pipeline", tmp_path, "--set", override, code=2)
    assert message in result.stderr
    assert not (tmp_path / "run").exists()
    (tmp_path / "sft.yaml").unlink()
    assert f"{tmp_path} has no sft.yaml" in rlhf("pipeline", tmp_path, "--set", "sft:nonsense.key=1", code=2).stderr


def test_status_of_a_folder_shows_every_run_in_it(project):
    """It lists finished and interrupted runs, in nested folders too. It does not list the stages of a run as runs."""
    (project / "seeds/1/.sft.partial").mkdir(parents=True)
    (project / "empty").mkdir()
    lines = [line.split() for line in rlhf("status", project).stdout.splitlines() if line.split()]
    assert [words[0] for words in lines if words[0].startswith("/")] == [str(project / "run"), str(project / "seeds/1")]
    assert [words[:2] for words in lines if words[0] == "sft"] == [["sft", "finished"], ["sft", "interrupted"]]
    assert rlhf("status", ".", cwd=project / "run/sft").stdout == rlhf("status", project / "run").stdout, "of a stage"
    (project / "run/.rm.partial").mkdir()
    for state in ("is interrupted", "has failed"):
        shown = " ".join(rlhf("status", str(project / "run")).stdout.split())
        assert f"a new run of it {state} (nothing saved; the next run starts over)" in shown
        (project / "run/.rm.partial/end.json").write_text('{"state": "failed", "line": "NaN"}')


def test_the_advised_command_builds_the_missing_stage(tmp_path):
    """The advice must repeat `--set artifacts`, or the command would build the stage in another directory."""
    write_project(new_project := tmp_path)
    other = new_project / "other run"
    options = [str(new_project / "rm.yaml"), "--set", f"artifacts={other}", "--set", "seed=5", "--quiet"]
    advice = rlhf("rm", "--config", *options, code=2).stderr.partition("Run: ")[2].strip()
    assert f"'artifacts={other}'" in advice
    assert "seed=5" in advice
    # As the shell reads it. tests/house/test_program.py runs the program's name in a shell.
    words, name = shlex.split(advice), shlex.split(program())
    assert words[: len(name)] == name
    rlhf(*words[len(name) :])
    assert (other / "sft/manifest.json").is_file()
    rlhf("rm", "--config", *options)
    refused = rlhf("rm", "--config", str(new_project / "rm.yaml"), "--set", "model.path=x/other/sft", code=2)
    assert "x/other: no finished 'sft' stage" in refused.stderr
    assert refused.stderr.strip().endswith(f"sft --config {new_project}/sft.yaml --set artifacts=x/other")


def test_another_seed_does_not_replace_a_finished_stage(project):
    pipeline(project)
    before = digests(project)
    result = rlhf("pipeline", project, "--set", "seed=7", "--set", "sft:training.num_steps=3", code=2)
    run = project / "run"
    assert f"{run}/sft is finished with seed 0, and a run with seed 7 would replace it" in result.stderr
    assert "training.num_steps differs too" in result.stderr
    assert f"--set 'artifacts={run}-{{seed}}'" in result.stderr
    assert digests(project) == before
    assert pipeline(project, "--set", "seed=7", "--set", f"artifacts={run}-{{seed}}").count(": skipped, ") == 0
    assert json.loads((project / "run-7/ppo/manifest.json").read_text())["seed"] == 7
    assert digests(project) == before, "the run of seed 7 is in another directory"
    shutil.rmtree(project / "run-7")
    assert digests(project) == before
    assert pipeline(project, "--set", "seed=7", "--restart").count("runs again (changed: config.seed") == 3
    assert json.loads((run / "ppo/manifest.json").read_text())["seed"] == 7


def test_a_warm_up_longer_than_the_run_is_a_warning(tmp_path):
    write_project(tmp_path)
    result = rlhf("sft", str(tmp_path / "sft.yaml"), "--quiet", "--set", "optimizer.warmup_steps=50")
    assert "never reaches its peak" in " ".join(result.stdout.split())


def test_a_long_error_breaks_between_words_on_a_terminal(monkeypatch, capsys):
    path = "/a/long/path-of-a-run/" + "x" * 80 + "/model"
    text = f"error: {path}: the prompt has 600 tokens and the model reads 512, reply included. Shorten the message"
    say(text, error=True)
    assert capsys.readouterr().err == f"{text}\n", "a pipe gets one line"
    terminal, program = os.openpty()
    termios.tcsetwinsize(program, (24, 60))
    with os.fdopen(program, "w") as file, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", file)
        say(f"short\n  {text}", error=True, flush=True)
        lines = os.read(terminal, 2000).decode().splitlines()
    os.close(terminal)
    assert lines[0] == "short"
    assert " ".join(line.removeprefix("  ") for line in lines[1:]) == text
    assert all(line.startswith("  ") and (len(line) <= 60 or line == f"  {path}:") for line in lines[1:])
