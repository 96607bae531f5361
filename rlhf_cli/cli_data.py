"""The `rlhf data` commands: look at data, convert it, and write it with a language model.

Everything heavy is imported inside its command, as in `cli`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import typer.core

from rlhf_cli.cli_options import Quiet, exit_with
from rlhf_cli.printing import say

if TYPE_CHECKING:
    from rlhf_cli.config.data import DataSource

data_app = typer.Typer(help="Check data, convert it, and write it with a language model.", no_args_is_help=True)

SET_INSTEAD = ("--limit", "--name", "--data-dir", "--split", "--revision", "--streaming", "--select")


ARGUMENTS = "rlhf.arguments"
"""The key of a context under which a SourceCommand keeps the words behind its name."""


class SourceCommand(typer.core.TyperCommand):
    """A command that reads a SOURCE. Names the `--set` for a key of the source that is written as an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = list(args)
        for argument in args:
            option = argument.partition("=")[0]
            instead = ""
            if option in SET_INSTEAD:
                instead = f"{option[2:].replace('-', '_')}={'true' if option == '--streaming' else 'VALUE'}"
            elif option in ("--weight", "--weights"):
                instead = "weights.NAME=NUMBER"
            if instead:
                say(f"error: {option}: is a key of the source. Write --set {instead}", error=True)
                raise typer.Exit(2)
        return super().parse_args(ctx, args)


STAGES_FOR = Literal["sft", "rm", "rm-scores", "ppo"]
SOURCE_HELP = "A data file, a folder of files, a glob, or the id of a hub dataset."
Source = Annotated[str, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)]
SourceOrNone = Annotated[str | None, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)]
SourceSet = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a key of the source, such as limit=100 or split=test (rlhf config docs sft.data.train). Repeatable.",
    ),
]
SourceOrConfigSet = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a key of the source, such as limit=100 or split=test, or of the config. Repeatable.",
    ),
]
Format = Annotated[str | None, typer.Option("--format", help="The format of the rows, if it is not detected.")]
Keys = Annotated[
    list[str] | None,
    typer.Option("--key", "--keys", metavar="OURS=THEIRS", help="Rename a column. Repeatable."),
]
For = Annotated[STAGES_FOR, typer.Option("--for", help="The stage to read for. rm-scores is rm with loss: mse or bce.")]
ForOrNone = Annotated[
    STAGES_FOR | None,
    typer.Option("--for", help="The stage to read for. rm-scores is rm with loss: mse or bce.", show_default=False),
]
ConfigOrNone = Annotated[Path | None, typer.Option("--config", help="A stage's YAML file instead of SOURCE.")]
Tokenizer = Annotated[
    str | None, typer.Option("--tokenizer", help="A model directory or hub id. Without it, lengths are in words.")
]
Out = Annotated[Path, typer.Option("--out", help="The .jsonl file to write or to continue.", show_default=False)]
Model = Annotated[
    str,
    typer.Option("--model", help="A model directory or hub id; with --server, a name there.", show_default=False),
]
Server = Annotated[str | None, typer.Option("--server", help="Base URL of an OpenAI-compatible server.")]
ApiKeyEnv = Annotated[
    str | None, typer.Option("--api-key-env", metavar="NAME", help="Environment variable with the server's key.")
]
Template = Annotated[Path | None, typer.Option("--template", help="A text file that replaces the built-in prompt.")]
Num = Annotated[int | None, typer.Option("--num", min=1, help="Maximum rows (with --task prompts: to write).")]
Task = Annotated[
    Literal["prompts", "demonstrations", "samples", "dialogues"], typer.Option("--task", help="What to write.")
]
NumSamples = Annotated[int, typer.Option("--samples", min=2, help="Answers per prompt (with --task samples).")]
NumTurns = Annotated[int, typer.Option("--turns", min=1, help="Maximum answers per dialogue (with --task dialogues).")]
UserModel = Annotated[
    str | None, typer.Option("--user-model", help="The model that plays the user of a dialogue. By default --model.")
]
UserServer = Annotated[str | None, typer.Option("--user-server", help="Base URL of the user model's server.")]
UserApiKeyEnv = Annotated[
    str | None, typer.Option("--user-api-key-env", metavar="NAME", help="As --api-key-env, for --user-server.")
]
NumSeeds = Annotated[int, typer.Option("--seeds", min=1, help="Example prompts per request (with --task prompts).")]
Similarity = Annotated[
    float,
    typer.Option(
        "--similarity", min=0.01, max=1.0, help="Reject a prompt that shares this much of its words with another."
    ),
]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the most likely token.")]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", min=0.001, max=1.0, help="Sample from the smallest set of tokens with this probability."),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Maximum tokens of an answer.")]
Seed = Annotated[int, typer.Option("--seed", help="Another seed samples other answers.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Answers per batch of a local model.")]
Concurrency = Annotated[int, typer.Option("--concurrency", min=1, max=64, help="Concurrent requests to a server.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Maximum seconds without an answer of the server.")]
Retries = Annotated[int, typer.Option("--retries", min=0, help="Maximum retries of a failed request.")]
Device = Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option("--device", help="Where the model runs.")]
KeepSpecial = Annotated[
    bool,
    typer.Option("--keep-special", help="Read special tokens in rows and in --template as special tokens."),
]
OnBadRow = Annotated[
    Literal["error", "skip"], typer.Option("--on-bad-row", help="Stop at a row that cannot be read, or skip it.")
]
RestartOut = Annotated[bool, typer.Option("--restart", help="Start over and remove the rows in --out.")]


@data_app.command("check", cls=SourceCommand)
def data_check(
    path: SourceOrNone = None,
    for_: ForOrNone = None,
    config: ConfigOrNone = None,
    overrides: SourceOrConfigSet = None,
    tokenizer: Tokenizer = None,
    max_length: Annotated[int | None, typer.Option("--max-length", min=1, help="Count rows longer than this.")] = None,
    test: Annotated[
        str | None,
        typer.Option("--test", metavar="FILE", help="Held-out rows. Reports prompts that are in both files."),
    ] = None,
    format: Format = None,
    keys: Keys = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a stage would read: counts, lengths, duplicates, leaks, labels, bad rows.

    Exit code 0: every row can be read. 1: some rows cannot. 2: the source or an option is wrong.
    """

    def work() -> None:
        from rlhf_cli.commands.data_check import check_data, rows_of_config, rows_of_source

        of_source = {"--test": test, "--max-length": max_length}
        source = _source_or_none(path, config, for_, overrides, format, keys)
        if source is None:
            _refuse_beside_config(of_source)
            assert config is not None
            parts, found = rows_of_config(config, _stage_name(for_), overrides or [])
        else:
            assert for_ is not None
            parts, found = [rows_of_source(source, for_, test=test, max_length=max_length)], None
        check_data(parts, tokenizer or found, as_json=as_json)

    exit_with(work)


@data_app.command("show", cls=SourceCommand)
def data_show(
    path: SourceOrNone = None,
    for_: ForOrNone = None,
    config: ConfigOrNone = None,
    overrides: SourceOrConfigSet = None,
    tokenizer: Tokenizer = None,
    num: Annotated[int, typer.Option("-n", "--num", min=1, help="Number of rows, from the first.")] = 3,
    row: Annotated[
        int | None, typer.Option("--row", min=1, help="Show the row with this number, as messages count rows.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option("--max-length", min=1, help="Maximum length of a row in tokens.")
    ] = None,
    format: Format = None,
    keys: Keys = None,
) -> None:
    """Show rows as the model sees them: prompt, answer, special tokens, learned tokens."""

    def work() -> None:
        from rlhf_cli.commands.data_check import rows_of_config, rows_of_source
        from rlhf_cli.commands.data_show import show_data

        source = _source_or_none(path, config, for_, overrides, format, keys)
        if source is None:
            _refuse_beside_config({"--max-length": max_length})
            assert config is not None
            parts, found = rows_of_config(config, _stage_name(for_), overrides or [])
        else:
            assert for_ is not None
            parts, found = [rows_of_source(source, for_, max_length=max_length)], None
        show_data(parts[0], tokenizer or found, num=num, row=row)

    exit_with(work)


@data_app.command("convert", cls=SourceCommand)
def data_convert(
    path: Source,
    for_: For,
    out: Annotated[Path, typer.Option("--out", help="The .jsonl, .jsonl.gz or .parquet file to write.")],
    keep: Annotated[
        list[str] | None, typer.Option("--keep", metavar="COLUMN", help="Copy a column unchanged. Repeatable.")
    ] = None,
    on_bad_row: OnBadRow = "error",
    overrides: SourceSet = None,
    format: Format = None,
    keys: Keys = None,
    quiet: Quiet = False,
) -> None:
    """Convert rows of any supported format into one file that a stage reads directly."""

    def work() -> None:
        from rlhf_cli.commands.data_check import rows_of_source
        from rlhf_cli.commands.data_convert import convert

        part = rows_of_source(source_of(path, overrides, format, keys), for_, on_bad_row=on_bad_row)
        convert(part, out, keep or [], quiet=quiet)

    exit_with(work)


@data_app.command("generate", cls=SourceCommand)
def data_generate(
    path: Source,
    task: Task,
    out: Out,
    model: Model,
    server: Server = None,
    api_key_env: ApiKeyEnv = None,
    template: Template = None,
    num: Num = None,
    samples: NumSamples = 4,
    turns: NumTurns = 3,
    user_model: UserModel = None,
    user_server: UserServer = None,
    user_api_key_env: UserApiKeyEnv = None,
    seeds: NumSeeds = 3,
    similarity: Similarity = 0.7,
    temperature: Temperature = 1.0,
    top_p: TopP = None,
    max_new_tokens: MaxNewTokens = 256,
    seed: Seed = 0,
    batch_size: BatchSize = 16,
    concurrency: Concurrency = 8,
    timeout: Timeout = 120.0,
    retries: Retries = 5,
    device: Device = "auto",
    keep_special: KeepSpecial = False,
    overrides: SourceSet = None,
    format: Format = None,
    keys: Keys = None,
    on_bad_row: OnBadRow = "error",
    restart: RestartOut = False,
    quiet: Quiet = False,
) -> None:
    """Let a language model write prompts, demonstrations, several answers per prompt, or dialogues."""

    def work() -> None:
        from rlhf_cli.commands.data_generate import generate
        from rlhf_cli.commands.writer import WriterOptions

        sampling = (temperature, top_p, max_new_tokens, seed, batch_size, concurrency)
        options = WriterOptions(
            model, server, api_key_env, *sampling, timeout, retries, device=device, keep_special=keep_special
        )
        user = options.for_user(user_model, user_server, user_api_key_env)
        counts: dict[str, Any] = {"num": num, "num_samples": samples, "num_turns": turns, "num_seeds": seeds}
        files: dict[str, Any] = {"template": template, "on_bad_row": on_bad_row, "restart": restart, "quiet": quiet}
        source = source_of(path, overrides, format, keys)
        generate(source, task, out, options, user=user, similarity=similarity, **counts, **files)

    exit_with(work)


@data_app.command("score", cls=SourceCommand)
def data_score(
    path: Source,
    out: Out,
    model: Model,
    server: Server = None,
    api_key_env: ApiKeyEnv = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Choose the better of two answers; asks in both orders.")
    ] = False,
    template: Template = None,
    lowest: Annotated[float, typer.Option("--min", help="The lowest score.")] = 0.0,
    highest: Annotated[float, typer.Option("--max", help="The highest score.")] = 5.0,
    attempts: Annotated[
        int, typer.Option("--attempts", min=1, help="Maximum requests until the answer has a score.")
    ] = 3,
    ties: Annotated[
        Literal["drop", "keep"], typer.Option("--ties", help="With --compare: keep scores both 0.5.")
    ] = "drop",
    num: Num = None,
    temperature: Temperature = 0.2,
    top_p: TopP = None,
    max_new_tokens: MaxNewTokens = 16,
    seed: Seed = 0,
    batch_size: BatchSize = 16,
    concurrency: Concurrency = 8,
    timeout: Timeout = 120.0,
    retries: Retries = 5,
    device: Device = "auto",
    keep_special: KeepSpecial = False,
    overrides: SourceSet = None,
    format: Format = None,
    keys: Keys = None,
    on_bad_row: OnBadRow = "error",
    restart: RestartOut = False,
    quiet: Quiet = False,
) -> None:
    """Let a language model judge answers: a score for each, or the better of two."""

    def work() -> None:
        from rlhf_cli.commands.data_score import score
        from rlhf_cli.commands.writer import WriterOptions

        sampling = (temperature, top_p, max_new_tokens, seed, batch_size, concurrency)
        options = WriterOptions(
            model, server, api_key_env, *sampling, timeout, retries, device=device, keep_special=keep_special
        )
        files: dict[str, Any] = {"num": num, "on_bad_row": on_bad_row, "restart": restart, "quiet": quiet}
        score(
            source_of(path, overrides, format, keys),
            out,
            options,
            compare=compare,
            template=template,
            lowest=lowest,
            highest=highest,
            attempts=attempts,
            ties=ties,
            **files,
        )

    exit_with(work)


def _source_or_none(
    path: str | None,
    config: Path | None,
    for_: str | None,
    overrides: list[str] | None,
    format: str | None,
    keys: list[str] | None,
) -> DataSource | None:
    """The source of a command line, or None if it names a config instead; raises ConfigError if it names neither."""
    from rlhf_cli.errors import ConfigError

    if (path is None) == (config is None):
        raise ConfigError("give either SOURCE and --for, or --config")
    if path is None:
        _refuse_beside_config({"--key": keys, "--format": format})
        return None
    if for_ is None:
        raise ConfigError("--for: is missing, must be one of sft, rm, rm-scores, ppo: the stage to read for")
    return source_of(path, overrides, format, keys)


def _refuse_beside_config(options: dict[str, Any]) -> None:
    from rlhf_cli.errors import ConfigError

    for option, value in options.items():
        if value is not None:
            raise ConfigError(f"{option}: does not go with --config. Change the file, or --set a key of it")


def _stage_name(for_: str | None) -> str | None:
    return "rm" if for_ == "rm-scores" else for_


def source_of(path: str, overrides: list[str] | None, format: str | None, keys: list[str] | None) -> DataSource:
    """A source from the command line; raises ConfigError if it is not valid."""
    from rlhf_cli.config.data import DataSource
    from rlhf_cli.config.loader import load_values
    from rlhf_cli.errors import ConfigError

    pairs = [pair.split("=", 1) for pair in keys or []]
    if any(len(pair) != 2 for pair in pairs):
        raise ConfigError("--key: must be OURS=THEIRS, for example response=output.text")
    values: dict[str, Any] = {"path": path, "keys": dict(pairs)}
    if format is not None:
        values["format"] = format
    return load_values(values, DataSource, overrides or [], "SOURCE")
