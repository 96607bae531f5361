"""The documentation against the code: keys, defaults, commands, links, test files, figures and findings exist."""

import ast
import functools
import re
import shlex
from itertools import pairwise
from typing import Annotated

import pytest
import typer
import typer.core
import typer.exceptions
import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticUndefined

from rlhf_cli.cli import app
from rlhf_cli.config.by_stage import CONFIGS
from rlhf_cli.config.explain import alternatives, fields_of, options_of
from rlhf_cli.config.loader import load_config
from rlhf_cli.health.ppo_rules import EVALUATION, STOPS, WARNINGS
from support.paths import ROOT, TESTS

MOVED = ["COSTS", "FORMULAS", "KL", "PLAN", "SCALE", "TESTS", "TUNING"]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    + [ROOT / "benchmarks" / f"{name}.md" for name in MOVED]
)
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
ROOMS = ("rlhf_cli", "stages", "data")
SOURCE = "\n".join(path.read_text(encoding="utf-8") for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))


def keys_of(kind, prefix=""):
    """Every dotted key of a schema with its field; a list of sections gives the keys of its items."""
    for name, field in fields_of(kind).items():
        key = prefix + name
        yield key, field
        for member in alternatives(field.annotation)[0]:
            for inner in [member, *getattr(member, "__args__", ())]:
                for section in alternatives(inner)[0]:
                    if fields_of(section):
                        yield from keys_of(section, f"{key}.")


FIELDS = [pair for schema in CONFIGS.values() for pair in keys_of(schema)]
"""A key occurs several times if it exists in several stages, or in several kinds of a section."""
KEYS = {stage: dict(keys_of(schema)) for stage, schema in CONFIGS.items()}
ALL_KEYS = {key for keys in KEYS.values() for key in keys}
SECTIONS = sorted({key.split(".")[0] for key in ALL_KEYS if "." in key})


def in_backticks(text):
    """The code spans of a page, without its code blocks."""
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


# ---------------------------------------------------------------------------------------- config keys


@pytest.mark.parametrize("page", TEXTS)
def test_every_key_that_a_page_names_exists(page):
    named = {
        match[1]
        for span in in_backticks(TEXTS[page])
        if (match := re.match(rf"((?:{'|'.join(SECTIONS)})\.[a-z_]\w*(?:\.\w+)*)(?![\w./(])", span))
    }
    unknown = {
        key for key in named if key not in ALL_KEYS and not key.endswith((".py", ".yaml", ".json", ".jsonl", ".md"))
    }
    assert not unknown


STAGE_PAGES = {
    "sft": ("docs/sft.md", "docs/training.md", "docs/lora.md", "docs/data.md"),
    "rm": ("docs/rm.md", "docs/training.md", "docs/lora.md", "docs/data.md"),
    "ppo": ("docs/ppo.md", "docs/training.md", "docs/lora.md", "docs/data.md", "docs/rewards.md"),
}


@pytest.mark.parametrize("stage", CONFIGS)
def test_every_key_of_a_stage_is_documented(stage):
    """A key of a source, a reward or adapters, of which there are several, by its last part."""
    text = "\n".join(TEXTS[page] for page in STAGE_PAGES[stage])
    sections = {key.rpartition(".")[0] for key in KEYS[stage]}
    missing = []
    for key in KEYS[stage].keys() - sections:
        last = key.split(".")[-1]
        is_one_of_several = re.match(r"(data|ptx|rewards)\.", key) or ".lora." in key
        forms = [f"`{last}`", f".lora.{last}`", f" {last}: ", f"{{{last}: "] if is_one_of_several else []
        missing += [] if any(form in text for form in [f"`{key}`", *forms]) else [key]
    assert not missing


def is_valid(field, value):
    try:
        TypeAdapter(Annotated[field.annotation, field]).validate_python(value)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("page", TEXTS)
def test_every_value_that_a_page_gives_to_a_key_is_allowed(page):
    """`ppo.kl_in: loss`, and `kl_in: loss` where the section is clear from the text.

    Not so in lists of what is refused, and on the page about new choices.
    """
    if page == "docs/extending.md":
        return
    wrong = []
    for span in in_backticks(re.sub(r"^## [\d. ]*What is refused\n.*?(?=^## |\Z)", "", TEXTS[page], flags=re.M | re.S)):
        match = re.fullmatch(r"([a-z_][\w.]*): ([^{}<>]+)", span)
        if match is None or "..." in span or match[2].isupper():
            continue
        fields = [field for key, field in FIELDS if f".{key}".endswith(f".{match[1]}")]
        if fields and not any(is_valid(field, yaml.safe_load(match[2])) for field in fields):
            wrong.append(span)
    assert not wrong


def table_rows(text):
    """The cells of every row of an option table: those whose header is `key`, `default`, ..."""
    header = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")] if line.startswith("|") else []
        if not cells:
            header = []
        elif not header:
            header = cells
        elif header[:2] == ["key", "default"] and not set(line) <= set("|- "):
            yield cells


def written(default):
    """A default as YAML would read it back."""
    if default is PydanticUndefined:
        return "required"
    if fields_of(type(default)):
        return default.model_dump(mode="json", exclude_defaults=True)
    return list(default) if isinstance(default, tuple) else default


@pytest.mark.parametrize("page", ["docs/sft.md", "docs/rm.md", "docs/ppo.md", "docs/training.md"])
def test_the_defaults_of_the_option_tables_are_those_of_the_schemas(page):
    checked = 0
    for cells in table_rows(TEXTS[page]):
        names = re.findall(r"`([^`]+)`", cells[0])
        stated = cells[1].split(":")[0] if not cells[1].startswith("[") else cells[1]
        values = [yaml.safe_load(part) for part in ([stated] if len(names) == 1 else stated.split(", "))]
        if len(values) == 1:
            values = values * len(names)
        for name, value in zip(names, values, strict=True):
            stages = [page.removeprefix("docs/").removesuffix(".md")]
            stages = stages if stages[0] in CONFIGS else [stage for stage in CONFIGS if name in KEYS[stage]]
            for stage in stages:
                default = written(KEYS[stage][name].get_default(call_default_factory=True))
                default = float(default) if isinstance(value, str) and re.fullmatch(r"[\d.]+e-?\d+", value) else default
                value = float(value) if isinstance(default, float) else value
                assert (value if value != {} else {}) == default or (value == "required" and default is None), name
                checked += 1
    assert checked > 15


@pytest.mark.parametrize("name", ["ppo.advantage_estimator", "ppo.kl_estimator"])
def test_every_choice_has_a_row_of_its_own(name):
    page = "docs/ppo.md" if name == "ppo.advantage_estimator" else "docs/kl.md"
    table = TEXTS[page].split(f"| `{name}` |", 2 if name == "ppo.advantage_estimator" else 1)[-1]
    rows = re.findall(r"^\| `(\w+)` \|", table.split("\n\n")[0], flags=re.MULTILINE)
    field = fields_of(alternatives(fields_of(CONFIGS["ppo"])["ppo"].annotation)[0][0])[name.split(".")[1]]
    assert rows == options_of(alternatives(field.annotation)[0])


def test_the_page_of_formulas_lists_the_golden_cases_that_are_not_checked():
    tree = ast.parse((TESTS / "algorithms" / "test_golden.py").read_text(encoding="utf-8"))
    node = next(n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "NOT_OFFERED")
    listed = re.findall(r"^\| `(\w+)` \| [^|]*\|$", TEXTS["benchmarks/FORMULAS.md"].split("| case |")[1], re.MULTILINE)
    assert listed[: len(ast.literal_eval(node.value))] == list(ast.literal_eval(node.value))


# ------------------------------------------------------------------------------------------- commands


def commands(text):
    """The words of every `rlhf ...` command of a page, in code blocks and code spans, continued lines joined."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *in_backticks(text)]:
        command = line.removeprefix("$ ").split(" | ")[0].strip()
        if command.startswith("rlhf ") and "..." not in command:
            words = shlex.split(command, comments=True)[1:]
            yield ["stage.yaml" if word == "FILE" else word for word in words]


def parse(command, words, parent=None):
    """Parse a command line to its end without running anything; raises TyperException, or Exit for --help."""
    context = command.make_context(command.name or "rlhf", words, parent=parent)
    rest = [*getattr(context, "_protected_args", []), *context.args]
    if isinstance(command, typer.core.TyperGroup) and rest:
        _, found, rest = command.resolve_command(context, rest)
        parse(found, rest, context)


@functools.cache
def the_command():
    return typer.main.get_command(app)


ALL_COMMANDS = sorted({tuple(words) for text in TEXTS.values() for words in commands(text)})


def names_only(words):
    """Is it a command that a sentence names, as in `rlhf data score`?"""
    return all(re.fullmatch(r"[a-z]+", word) for word in words)


@pytest.mark.parametrize("words", ALL_COMMANDS, ids=" ".join)
def test_every_command_parses(words):
    command = the_command()
    if names_only(words):
        with pytest.raises(typer.exceptions.Exit):
            parse(command, [*words, "--help"])
    elif not {"--help", "--install-completion"} & set(words):  # these do their work while they are parsed
        parse(command, list(words))


def test_a_command_with_an_unknown_option_does_not_parse():
    with pytest.raises(typer.exceptions.TyperException):
        parse(the_command(), ["sft", "--config", "sft.yaml", "--epochs", "3"])


def overrides(words):
    return [value for flag, value in pairwise(words) if flag == "--set"]


@pytest.mark.parametrize("words", [words for words in ALL_COMMANDS if "--set" in words], ids=" ".join)
def test_every_override_of_a_command_is_a_config(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    if words[0] == "pipeline":
        for stage in CONFIGS:
            given = [part.removeprefix(f"{stage}:") for part in overrides(words)]
            given = [part for part in given if part.split(":")[0] not in CONFIGS]
            load_config(ROOT / words[1] / f"{stage}.yaml", CONFIGS[stage], given)
    else:
        file = next(word for word in words if word.endswith(".yaml"))
        load_config(ROOT / file, CONFIGS[words[0]], overrides(words))


# ------------------------------------------------------------------------------- links, files, figures


def anchor(heading):
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


EVERY_PAGE = [
    *ROOT.glob("*.md"),
    *(page for room in ("benchmarks", "data", "docs") for page in (ROOT / room).rglob("*.md")),
]


@pytest.mark.parametrize("page", sorted(page.relative_to(ROOT).as_posix() for page in EVERY_PAGE))
def test_every_link_leads_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for label, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", re.sub(r"(\[`[^`\n]*`\])|`[^`\n]*`", r"\1", text)):
        if target.startswith("http"):
            continue
        path, _, heading = target.partition("#")
        file = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert file.exists(), target
        if heading and file.suffix == ".py":
            lines, name = file.read_text(encoding="utf-8").splitlines(), label.strip("`")
            found = [f"#L{number}" for number, line in enumerate(lines, 1) if name in line]
            assert f"#{heading}" in found, f"{target}: `{name}` is in lines {found}"
        elif heading:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert heading in {anchor(each) for each in headings}, target


@pytest.mark.parametrize("page", TEXTS)
def test_every_file_that_a_page_names_exists(page):
    pattern = r"(?<![\w/.-])((?:[\w-]+/)+[\w-]+\.(?:py|md|yaml|json))\b"
    text = re.sub(r"\]\([^)]*\)", "]", TEXTS[page])
    for name in re.findall(pattern, text):
        shipped = name.startswith(("tests/", "docs/", "configs/", "benchmarks/", "rlhf_cli/", "stages/", "data/"))
        if "test_" in name or shipped:
            assert (ROOT / name).exists() or (TESTS / name).exists(), name
    for name in re.findall(r"(?<![\w/])test_\w+\.py", text):
        assert list(TESTS.rglob(name)), name


TESTS_SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in sorted(TESTS.rglob("*.py")))


@pytest.mark.parametrize("page", TEXTS)
def test_every_test_that_a_page_names_exists(page):
    for name in re.findall(r"\b(test_\w+)\b(?!\.py)", TEXTS[page]):
        assert re.search(rf"\bdef {name}\(|\b{name}\b *[:=]", TESTS_SOURCE + SOURCE) or name in ALL_NAMES, name


ALL_NAMES = {part for key in ALL_KEYS for part in key.split(".")}


def test_the_functions_and_tables_that_a_contributor_is_sent_to_exist():
    words = set(re.findall(r"\w+", SOURCE + TESTS_SOURCE))
    for span in in_backticks(TEXTS["docs/extending.md"]):
        if re.fullmatch(r"_?[a-z]+(_[a-z]+)+|[A-Z]+(_[A-Z]+)*", span) and len(span) > 3:
            assert span in words


GROUPS = "eval|rm|sft|objective|reward|response|policy|value|loss|time|speed|memory|probe"


@pytest.mark.parametrize("page", TEXTS)
def test_every_figure_that_a_page_names_is_written_by_the_code(page):
    unknown = []
    for span in in_backticks(TEXTS[page]):
        if re.fullmatch(rf"(?:{GROUPS})/[a-z_0-9]+", span) and span not in SOURCE:
            group, name = span.split("/")
            phase = re.sub(r"_(s|mfu|tokens_per_s|low95|high95)$", "", name)  # time/<phase>_s, speed/<phase>_mfu
            if name != phase and "95" in name and f"{group}/{phase}" in SOURCE:  # the ends of an interval
                continue
            if f'}}/{name}"' in SOURCE:  # f"{stage}/grad_norm"
                continue
            if f"{group}/{{" not in SOURCE or not re.search(rf"[\"'/]({name}|{phase})[\"']|\b{name} *=", SOURCE):
                unknown.append(span)
    assert not unknown


def test_every_finding_is_documented_and_every_documented_one_exists():
    rows = set(re.findall(r"^\| `(\w+)` \|", TEXTS["docs/health.md"], flags=re.MULTILINE))
    names = {rule.name for rule in (*STOPS, *WARNINGS, *EVALUATION)}
    assert names <= rows
    assert all(f'"{name}"' in SOURCE for name in rows - names)


def test_the_readme_is_short():
    lines = TEXTS["README.md"].splitlines()
    assert len(lines) <= 120
    assert max(len(line) for line in lines if not line.startswith("|")) <= 125
