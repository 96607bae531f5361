"""`rlhf init`: write a folder with configs, sample data and a reward function to start from."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import typer

from rlhf_cli.config.stage import STAGES
from rlhf_cli.errors import ConfigError
from rlhf_cli.printing import say
from rlhf_cli.program import command

Template = Literal["support", "support-hard", "sentiment", "hh", "stories", "blank", "bilingual"]
OWN = "It runs on a CPU without the hub, in seconds. Put your data and your model into the YAML files."
NEEDS: dict[Template, str] = {
    "support": "It runs on a CPU without the hub, in about two minutes.",
    "support-hard": "It runs on a CPU without the hub, in about two minutes. PPO over-optimises its reward model here.",
    "blank": OWN,
    "bilingual": OWN,
    "sentiment": "It needs the hub (gpt2 and rotten_tomatoes) and a GPU.",
    "hh": "It needs the hub (Qwen2.5-0.5B and Anthropic/hh-rlhf) and a GPU.",
    "stories": "It needs the hub (tinyllama-15M).",
}
"""One line about what each template needs to run."""
Files = dict[str, Callable[[], str]]
"""The files of a template: the name below the folder, and what writes the text."""
PACKAGE = Path(__file__).resolve().parents[1]


def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to create.")],
    template: Annotated[
        Template,
        typer.Option("--from", help="The example to start from. support*, blank and bilingual run without the hub."),
    ] = "support",
) -> None:
    """Write configs, sample data and a reward function to start from."""
    files = _files(template)
    existing = [name for name in files if (directory / name).exists()]
    if existing:
        raise ConfigError(f"{directory / existing[0]}: exists already, and nothing was written. Give another folder")
    name = re.sub(r"[^\w.+=-]+", "-", directory.resolve().name) or "run"
    for file, write in files.items():
        text = write()
        if file.endswith(".yaml"):
            text = _fill(text, directory, name)
        try:
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            (directory / file).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{directory / file}: cannot be written ({error.strerror})") from None
    say(f"{directory}: wrote {', '.join(files)}")
    say(NEEDS[template])
    say(f"Run it: {command('pipeline', str(directory))}")


def _files(template: Template) -> Files:
    def copy(name: str) -> Callable[[], str]:
        return lambda: _path(f"{template}/{name}").read_text(encoding="utf-8")

    files = {f"{stage}.yaml": copy(f"{stage}.yaml") for stage in STAGES if _path(f"{template}/{stage}.yaml").is_file()}

    def hard_preferences() -> str:  # few, noisy and biased
        task = _task()
        return _lines(task.draw_rows(7, "hard_train", task.HARD_PAIRS, task.hard_pref_row))

    data = {f"data/{name}": copy(name) for name in ("sft.jsonl", "preferences.jsonl", "prompts.jsonl")}
    others: dict[Template, Callable[[], Files]] = {
        "support": lambda: {"judge.py": copy("gold.py"), **_support_data()},
        "support-hard": lambda: {**_files("support"), **files, "data/preferences.jsonl": hard_preferences},
        "sentiment": lambda: {"judge.py": copy("judge.py")},
        "hh": dict,
        "stories": lambda: {"reward.py": copy("reward.py"), "data/prompts.jsonl": copy("prompts.jsonl")},
        "blank": lambda: {"reward.py": copy("reward.py"), **data},
        "bilingual": lambda: {**_files("blank"), **files, **data},
    }
    return {**files, **others[template]()}


def _path(name: str) -> Path:
    """A file of a template. A checkout has some in `data/` and `configs/`, a wheel has all in the package."""
    templates, checkout = PACKAGE / "templates", PACKAGE.parent
    places = [root / name for root in (templates, templates / "configs", checkout / "data", checkout / "configs")]
    return next(filter(Path.is_file, places), places[0])


def _task() -> SimpleNamespace:
    """The script of the shop-support task. It imports the files beside it."""
    folder = _path("support/generate.py").parent
    sys.path.insert(0, str(folder))
    try:
        return SimpleNamespace(**runpy.run_path(str(folder / "generate.py")))
    finally:
        sys.path.remove(str(folder))


def _support_data() -> Files:
    """The rows of the shop-support task, drawn from its grammar: the same rows in every folder."""
    task = _task()
    kinds = {
        "sft": ("sft", task.sft_row),
        "preferences": ("pref", task.pref_row),
        "prompts": ("prompts", task.prompt_row),
    }

    def rows(kind: str, side: str) -> Callable[[], str]:
        prefix, write_row = kinds[kind]
        name = f"{prefix}_{side}"
        return lambda: _lines(task.draw_rows(7, name, task.ROWS[name], write_row))

    sides = {"": "train", "_test": "test"}
    return {f"data/{kind}{end}.jsonl": rows(kind, side) for kind in kinds for end, side in sides.items()}


def _lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _fill(text: str, directory: Path, name: str) -> str:
    """Replace __DIR__ and __NAME__, and in a shipped config the folders of its checkout.

    A path with special characters is quoted: as YAML in values, and for the shell in the commands of comments.
    """
    if shipped := re.match(r"# rlhf (\w+) --config configs/(\w+)/", text):
        stage, example = shipped.groups()
        text = text.replace(" --config", "", 1)
        text = re.sub(rf"^# .*: configs/{example}-small\.$", f"# Every key: rlhf config docs {stage}", text, flags=re.M)
        text = text.replace(f"artifacts/{example}", "artifacts/__NAME__").replace(f"configs/{example}", "__DIR__")
        text = text.replace(f"data/{example}/prompts", "__DIR__/data/prompts").replace(f"data/{example}/", "__DIR__/")
    place = directory.as_posix()
    text = text.replace("__NAME__", name)
    if not re.fullmatch(r"[\w./+=-]+", place):
        text = re.sub(r"(?<=: )__DIR__[^\s,}\]]*", lambda path: json.dumps(path[0], ensure_ascii=False), text)
        text = re.sub(r"(?<=[^:] )__DIR__", lambda _: shlex.quote(place), text)
    return text.replace("__DIR__", place)
