"""The `rlhf` command: parse, call one thing, turn an error into one line and an exit code.

Everything heavy is imported inside its command, so that `--help` and a mistyped key are answered at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import typer.core

from rlhf_cli.environment import set_up_process

if TYPE_CHECKING:
    from rlhf_cli.config.data import DataSource


class InOrder(typer.core.TyperGroup):
    """Lists the commands as one uses them; by itself typer has groups, `rm` among them, behind all others."""

    def list_commands(self, ctx: Any) -> list[str]:
        order = ("sft", "rm", "ppo", "pipeline", "status", "doctor", "data", "config")
        return sorted(super().list_commands(ctx), key=order.index)


app = typer.Typer(
    name="rlhf",
    cls=InOrder,
    help="From raw text to an aligned language model: SFT, reward model, PPO.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Check, show and describe config files.", no_args_is_help=True)
app.add_typer(config_app, name="config")
data_app = typer.Typer(help="Look at data, convert it, and make it with a language model.", no_args_is_help=True)
app.add_typer(data_app, name="data")
rm_app = typer.Typer(invoke_without_command=True)
app.add_typer(rm_app, name="rm")

Config = Annotated[Path, typer.Option("--config", help="The stage's YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file; may be given again."),
]
Restart = Annotated[bool, typer.Option("--restart", help="Run again even if finished and unchanged.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print warnings and errors only.")]
StageName = Annotated[
    str | None, typer.Option("--stage", help="sft, rm or ppo, where the file's name does not say it.")
]


@app.command()
def sft(config: Config, overrides: Overrides = None, restart: Restart = False, quiet: Quiet = False) -> None:
    """Stage 1: teach a model to answer, from demonstrations."""
    _stage("sft", config, overrides, restart, quiet)


@rm_app.callback()
def rm(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", help="The stage's YAML file.", show_default=False)] = None,
    overrides: Overrides = None,
    restart: Restart = False,
    quiet: Quiet = False,
) -> None:
    """Stage 2: teach a reward model what people prefer; `rlhf rm serve` puts one behind an endpoint."""
    given = config is not None or overrides or restart or quiet
    if context.invoked_subcommand is not None and given:
        raise typer.BadParameter(f"options of the stage have no place before `{context.invoked_subcommand}`")
    if context.invoked_subcommand is None:
        if config is None:
            raise typer.BadParameter("the stage needs its YAML file", param_hint="--config")
        _stage("rm", config, overrides, restart, quiet)


@rm_app.command("serve")
def rm_serve(
    model: Annotated[str, typer.Argument(help="A model directory, a finished rm stage, or an artifact root.")],
    host: Annotated[str, typer.Option("--host", help="Beyond this machine only with a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 5000,
    token_env: Annotated[
        str | None, typer.Option("--token-env", metavar="NAME", help="Environment variable that holds the token.")
    ] = None,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Texts of one request, at most.")] = 1024,
    raw: Annotated[bool, typer.Option("--raw", help="Scores as they come, not normalised.")] = False,
    label: Annotated[str | None, typer.Option("--label", help="Which label of a classifier is the score.")] = None,
    probability: Annotated[bool, typer.Option("--probability", help="Its probability, not its logit.")] = False,
    template: Annotated[
        str | None, typer.Option("--template", help="How the text is written: `chat`, or with {prompt} and {response}.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")] = "auto",
) -> None:
    """A reward model behind an HTTP endpoint, for `type: http` rewards and OpenRLHF's clients."""

    def work() -> None:
        from rlhf_cli.commands.serve import Settings, serve

        serve(Settings(model, host, port, token_env, max_batch, raw, label, probability, template, device))

    _exit(work)


@app.command()
def ppo(config: Config, overrides: Overrides = None, restart: Restart = False, quiet: Quiet = False) -> None:
    """Stage 3: make the policy better at what the reward model scores."""
    _stage("ppo", config, overrides, restart, quiet)


@app.command()
def pipeline(
    directory: Annotated[Path, typer.Argument(help="A folder with sft.yaml, rm.yaml and ppo.yaml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[STAGE:]KEY=VALUE",
            help="Override a key in every file, or in one stage's (ppo:seed=1).",
        ),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Run every stage again.")] = False,
    quiet: Quiet = False,
) -> None:
    """The stages of a folder in order; what is finished and unchanged is skipped."""

    def work() -> None:
        from rlhf_cli.commands.pipeline import run_pipeline

        run_pipeline(directory, overrides or [], _load_stage, restart=restart, quiet=quiet)

    _exit(work)


@app.command()
def status(
    directory: Annotated[Path, typer.Argument(help="A run's artifact root, e.g. artifacts/support.")],
) -> None:
    """What is finished, stale or unfinished in an artifact root."""

    def work() -> None:
        from rlhf_cli.commands.status import show_status

        show_status(directory)

    _exit(work)


@app.command()
def doctor(
    directory: Annotated[
        Path | None, typer.Argument(help="An artifact root, or one stage's directory, to look at too.")
    ] = None,
) -> None:
    """Can this machine do what a run needs, and is an artifact root as it was written?"""

    def work() -> None:
        from rlhf_cli.commands.doctor import examine

        examine(directory)

    _exit(work)


@config_app.command("check")
def config_check(
    files: Annotated[list[Path], typer.Argument(help="YAML files, or folders of them.")],
    stage: StageName = None,
    overrides: Overrides = None,
) -> None:
    """Read config files and report every mistake at once."""

    def work() -> None:
        from rlhf_cli.commands.config import check

        check(files, stage, overrides or [])

    _exit(work)


@config_app.command("show")
def config_show(
    file: Annotated[Path, typer.Argument(help="A YAML file.")],
    stage: StageName = None,
    overrides: Overrides = None,
) -> None:
    """Print a config with every default filled in."""

    def work() -> None:
        from rlhf_cli.commands.config import show

        show(file, stage, overrides or [])

    _exit(work)


@config_app.command("schema")
def config_schema(
    stage: Annotated[str | None, typer.Argument(help="sft, rm or ppo; all three without it.")] = None,
) -> None:
    """Print the JSON Schema of a stage's config, for completion in editors."""

    def work() -> None:
        from rlhf_cli.commands.config import schema

        schema(stage)

    _exit(work)


DataPath = Annotated[
    str, typer.Argument(metavar="SOURCE", help="A data file, a folder of them, a glob, or a hub dataset's id.")
]
DataFormat = Annotated[str, typer.Option("--format", help="What the rows are, where their keys don't say it.")]
DataKeys = Annotated[
    list[str] | None,
    typer.Option("--key", "--keys", metavar="OURS=THEIRS", help="Map a column; may be given again."),
]
Out = Annotated[Path, typer.Option("--out", help="The .jsonl file to write, or to go on with.", show_default=False)]
WriterModel = Annotated[
    str,
    typer.Option("--model", help="A model directory or hub id; with --server a name there.", show_default=False),
]
Server = Annotated[str | None, typer.Option("--server", help="Base URL of an OpenAI-compatible server.")]
ApiKeyEnv = Annotated[
    str | None, typer.Option("--api-key-env", metavar="VARIABLE", help="The environment variable with its key.")
]
Template = Annotated[Path | None, typer.Option("--template", help="A text file instead of the built-in words.")]
Num = Annotated[int | None, typer.Option("--num", min=1, help="How many rows at most (prompts: to write).")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token.")]
TopP = Annotated[float | None, typer.Option("--top-p", min=0.001, max=1.0, help="Draw from this share at the top.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")]
Seed = Annotated[int, typer.Option("--seed", help="Another seed draws other answers.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Answers at a time, of a local model.")]
Concurrency = Annotated[int, typer.Option("--concurrency", min=1, max=64, help="Requests at a time, to a server.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds that a server may say nothing.")]
Retries = Annotated[int, typer.Option("--retries", min=0, help="How often a failed request is sent again.")]
Device = Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option("--device", help="Of a local model.")]
OnBadRow = Annotated[Literal["error", "skip"], typer.Option("--on-bad-row", help="skip counts it.")]
RestartOut = Annotated[bool, typer.Option("--restart", help="Begin anew; the rows in --out are removed.")]


DataPathOrNone = Annotated[
    str | None, typer.Argument(metavar="SOURCE", help="A data file, a folder of them, a glob, or a hub dataset's id.")
]
For = Annotated[
    Literal["sft", "rm", "rm-scores", "ppo"] | None,
    typer.Option("--for", help="The stage that is to read it; rm-scores is rm with loss: mse.", show_default=False),
]
ConfigOrNone = Annotated[Path | None, typer.Option("--config", help="A stage's YAML file, instead of SOURCE.")]
DataWeights = Annotated[
    list[str] | None,
    typer.Option("--weight", "--weights", metavar="NAME=NUMBER", help="A grade's weight; may be given again."),
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Read only the first rows.")]
HubName = Annotated[str | None, typer.Option("--name", help="The subset of a hub dataset.")]
HubSplit = Annotated[str | None, typer.Option("--split", help="The split of a hub dataset.", show_default="train")]
HubFolder = Annotated[str | None, typer.Option("--data-dir", help="A folder inside a hub dataset.")]
HubStreaming = Annotated[bool, typer.Option("--streaming", help="Read a hub dataset without keeping it on disk.")]
HubRevision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a hub dataset.")]
TokenizerPath = Annotated[
    str | None, typer.Option("--tokenizer", help="A model directory or hub id; without it lengths are in words.")
]


@data_app.command("check")
def data_check(
    path: DataPathOrNone = None,
    for_: For = None,
    config: ConfigOrNone = None,
    overrides: Overrides = None,
    tokenizer: TokenizerPath = None,
    max_length: Annotated[
        int | None, typer.Option("--max-length", min=1, help="Count the rows that are longer.")
    ] = None,
    test: Annotated[
        str | None,
        typer.Option("--test", metavar="FILE", help="Held-out rows; finds prompts that stand on both sides."),
    ] = None,
    format: DataFormat = "auto",
    keys: DataKeys = None,
    weights: DataWeights = None,
    limit: Limit = None,
    name: HubName = None,
    data_dir: HubFolder = None,
    split: HubSplit = None,
    revision: HubRevision = None,
    streaming: HubStreaming = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What a stage would read: counts, lengths, duplicates, leaks, labels, length bias, and the first bad rows.

    Exit code 0: every row can be read. 1: some can't. 2: the source or an option can't be used.
    """

    def work() -> None:
        from rlhf_cli.commands.data_check import check_data, rows_of_config, rows_of_source

        of_source = {"--test": test, "--max-length": max_length}
        hub = _hub(name, data_dir, split, revision, streaming)
        source = _source_or_none(path, config, for_, overrides, format, keys, weights, limit, hub)
        if source is None:
            _refuse_beside_config(of_source)
            assert config is not None
            parts, found = rows_of_config(config, _stage_name(for_), overrides or [])
        else:
            assert for_ is not None
            parts, found = [rows_of_source(source, for_, test=test, max_length=max_length)], None
        check_data(parts, tokenizer or found, as_json=as_json)

    _exit(work)


@data_app.command("show")
def data_show(
    path: DataPathOrNone = None,
    for_: For = None,
    config: ConfigOrNone = None,
    overrides: Overrides = None,
    tokenizer: TokenizerPath = None,
    num: Annotated[int, typer.Option("-n", "--num", min=1, help="How many rows, from the first.")] = 3,
    row: Annotated[int | None, typer.Option("--row", min=1, help="The row that messages call by this number.")] = None,
    max_length: Annotated[int | None, typer.Option("--max-length", min=1, help="Longest row in tokens.")] = None,
    format: DataFormat = "auto",
    keys: DataKeys = None,
    weights: DataWeights = None,
    name: HubName = None,
    data_dir: HubFolder = None,
    split: HubSplit = None,
    revision: HubRevision = None,
    streaming: HubStreaming = False,
) -> None:
    """Rows as the model will see them: prompt, answer, special tokens, and which tokens are learnt."""

    def work() -> None:
        from rlhf_cli.commands.data_check import rows_of_config, rows_of_source
        from rlhf_cli.commands.data_show import show_data

        hub = _hub(name, data_dir, split, revision, streaming)
        source = _source_or_none(path, config, for_, overrides, format, keys, weights, None, hub)
        if source is None:
            _refuse_beside_config({"--max-length": max_length})
            assert config is not None
            parts, found = rows_of_config(config, _stage_name(for_), overrides or [])
        else:
            assert for_ is not None
            parts, found = [rows_of_source(source, for_, max_length=max_length)], None
        show_data(parts[0], tokenizer or found, num=num, row=row)

    _exit(work)


@data_app.command("convert")
def data_convert(
    path: DataPath,
    for_: Annotated[
        Literal["sft", "rm", "rm-scores", "ppo"],
        typer.Option("--for", help="The stage that is to read it; rm-scores is rm with loss: mse."),
    ],
    out: Annotated[Path, typer.Option("--out", help="The .jsonl, .jsonl.gz or .parquet file to write.")],
    keep: Annotated[
        list[str] | None, typer.Option("--keep", metavar="COLUMN", help="Keep a column as it is; may be given again.")
    ] = None,
    on_bad_row: OnBadRow = "error",
    format: DataFormat = "auto",
    keys: DataKeys = None,
    weights: DataWeights = None,
    limit: Limit = None,
    name: HubName = None,
    data_dir: HubFolder = None,
    split: HubSplit = None,
    revision: HubRevision = None,
    streaming: HubStreaming = False,
    quiet: Quiet = False,
) -> None:
    """Write rows of any format in our own: one file that a stage reads as it is."""

    def work() -> None:
        from rlhf_cli.commands.data_check import rows_of_source
        from rlhf_cli.commands.data_convert import convert

        hub = _hub(name, data_dir, split, revision, streaming)
        source = _data_source(path, format, keys, weights, limit, hub)
        part = rows_of_source(source, for_, on_bad_row=on_bad_row)
        convert(part, out, keep or [], quiet=quiet)

    _exit(work)


def _source_or_none(
    path: str | None,
    config: Path | None,
    for_: str | None,
    overrides: list[str] | None,
    format: str,
    keys: list[str] | None,
    weights: list[str] | None,
    limit: int | None,
    hub: dict[str, object],
) -> DataSource | None:
    """The source of a command line, or None where it names a config instead; raises ConfigError for what is neither."""
    from rlhf_cli.errors import ConfigError

    if (path is None) == (config is None):
        raise ConfigError("give either SOURCE and --for, or --config")
    if path is None:
        given = {"--key": keys, "--weight": weights, "--limit": limit, "--format": None if format == "auto" else format}
        _refuse_beside_config({**given, **{f"--{key.replace('_', '-')}": value for key, value in hub.items()}})
        return None
    if for_ is None:
        raise ConfigError("--for: is missing, one of sft, rm, rm-scores, ppo: the stage that is to read the rows")
    if overrides:
        raise ConfigError("--set: belongs to --config")
    return _data_source(path, format, keys, weights, limit, hub)


def _hub(
    name: str | None, data_dir: str | None, split: str | None, revision: str | None, streaming: bool
) -> dict[str, object]:
    """Those of a hub dataset's options that are given."""
    given = {"name": name, "data_dir": data_dir, "split": split, "revision": revision, "streaming": streaming or None}
    return {key: value for key, value in given.items() if value is not None}


def _refuse_beside_config(options: Mapping[str, object]) -> None:
    from rlhf_cli.errors import ConfigError

    for option, value in options.items():
        if value is not None:
            raise ConfigError(f"{option}: the config says that. Change the file, or --set a key of it")


def _stage_name(for_: str | None) -> str | None:
    return "rm" if for_ == "rm-scores" else for_


@data_app.command("generate")
def data_generate(
    path: DataPath,
    task: Annotated[Literal["prompts", "demonstrations", "samples"], typer.Option("--task", help="What to write.")],
    out: Out,
    model: WriterModel,
    server: Server = None,
    api_key_env: ApiKeyEnv = None,
    template: Template = None,
    num: Num = None,
    samples: Annotated[int, typer.Option("--samples", min=2, help="Answers to each prompt (samples).")] = 4,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Prompts shown at a time (prompts).")] = 3,
    similarity: Annotated[
        float,
        typer.Option("--similarity", min=0.01, max=1.0, help="Share of words in common that is too much (prompts)."),
    ] = 0.7,
    temperature: Temperature = 1.0,
    top_p: TopP = None,
    max_new_tokens: MaxNewTokens = 256,
    seed: Seed = 0,
    batch_size: BatchSize = 16,
    concurrency: Concurrency = 8,
    timeout: Timeout = 120.0,
    retries: Retries = 5,
    device: Device = "auto",
    format: DataFormat = "auto",
    keys: DataKeys = None,
    name: HubName = None,
    data_dir: HubFolder = None,
    split: HubSplit = None,
    revision: HubRevision = None,
    streaming: HubStreaming = False,
    on_bad_row: OnBadRow = "error",
    restart: RestartOut = False,
    quiet: Quiet = False,
) -> None:
    """Have a language model write prompts, demonstrations, or several answers to each prompt."""

    def work() -> None:
        from rlhf_cli.commands.data_generate import WriterOptions, generate

        options = WriterOptions(
            *(model, server, api_key_env, temperature, top_p, max_new_tokens, seed, batch_size, concurrency),
            timeout_s=timeout,
            retries=retries,
            device=device,
        )
        generate(
            _data_source(path, format, keys, hub=_hub(name, data_dir, split, revision, streaming)),
            task,
            out,
            options,
            template=template,
            num=num,
            num_samples=samples,
            num_seeds=seeds,
            similarity=similarity,
            on_bad_row=on_bad_row,
            restart=restart,
            quiet=quiet,
        )

    _exit(work)


@data_app.command("score")
def data_score(
    path: DataPath,
    out: Out,
    model: WriterModel,
    server: Server = None,
    api_key_env: ApiKeyEnv = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Prefer one of two answers; asked in both orders.")
    ] = False,
    template: Template = None,
    lowest: Annotated[float, typer.Option("--min", help="The lowest score.")] = 0.0,
    highest: Annotated[float, typer.Option("--max", help="The highest score.")] = 5.0,
    attempts: Annotated[int, typer.Option("--attempts", min=1, help="Times to ask until the answer is clear.")] = 3,
    ties: Annotated[
        Literal["drop", "keep"], typer.Option("--ties", help="With --compare; keep scores both 0.5.")
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
    format: DataFormat = "auto",
    keys: DataKeys = None,
    name: HubName = None,
    data_dir: HubFolder = None,
    split: HubSplit = None,
    revision: HubRevision = None,
    streaming: HubStreaming = False,
    on_bad_row: OnBadRow = "error",
    restart: RestartOut = False,
    quiet: Quiet = False,
) -> None:
    """Have a language model judge answers: a number for each, or the better one of two."""

    def work() -> None:
        from rlhf_cli.commands.data_generate import WriterOptions
        from rlhf_cli.commands.data_score import score

        options = WriterOptions(
            *(model, server, api_key_env, temperature, top_p, max_new_tokens, seed, batch_size, concurrency),
            timeout_s=timeout,
            retries=retries,
            device=device,
        )
        score(
            _data_source(path, format, keys, hub=_hub(name, data_dir, split, revision, streaming)),
            out,
            options,
            compare=compare,
            template=template,
            lowest=lowest,
            highest=highest,
            attempts=attempts,
            ties=ties,
            num=num,
            on_bad_row=on_bad_row,
            restart=restart,
            quiet=quiet,
        )

    _exit(work)


def _data_source(
    path: str,
    format: str,
    keys: list[str] | None,
    weights: list[str] | None = None,
    limit: int | None = None,
    hub: Mapping[str, object] | None = None,
) -> DataSource:
    """A source from the command line; raises ConfigError for what can't be one."""
    import pydantic

    from rlhf_cli.config.data import DataSource
    from rlhf_cli.errors import ConfigError

    pairs = [pair.split("=", 1) for pair in keys or []]
    if any(len(pair) != 2 for pair in pairs):
        raise ConfigError("--key: must be OURS=THEIRS, for example response=output.text")
    grades = [pair.split("=", 1) for pair in weights or []]
    if any(len(pair) != 2 for pair in grades):
        raise ConfigError("--weight: must be NAME=NUMBER, for example helpfulness=0.65")
    values = {"path": path, "format": format, "keys": dict(pairs), "weights": dict(grades), "limit": limit}
    try:
        return DataSource.model_validate({**values, **(hub or {})})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from rlhf_cli import __version__

        print(__version__)
        raise typer.Exit


def _stage(stage: str, config: Path, overrides: list[str] | None, restart: bool, quiet: bool) -> None:
    def work() -> None:
        from rlhf_cli.training.launch import run_stage

        run_stage(stage, lambda: _load_stage(stage), config, overrides or [], restart=restart, quiet=quiet)

    _exit(work)


def _load_stage(stage: str) -> Callable[..., None]:
    """The stage's `run`. `stages` is a name that others use too: only the one beside this package is ours."""
    import gc
    import importlib
    import importlib.util

    import rlhf_cli
    from rlhf_cli.errors import ConfigError

    spec = importlib.util.find_spec("stages")
    ours = Path(rlhf_cli.__file__).resolve().parent.parent / "stages" / "__init__.py"
    found = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    if found != ours:
        raise ConfigError(
            f"the package 'stages' that Python finds is {found}, not rlhf's own {ours}. "
            "Uninstall the other one, or start from another directory"
        )
    # An import makes several hundred thousand objects that stay, and the collector would look through all of them
    # again and again: a third of the time. Frozen, they are out of its way during the run as well.
    gc.disable()
    try:
        run: Callable[..., None] = importlib.import_module(f"stages.{stage}").run
    finally:
        gc.enable()
    gc.freeze()
    return run


def _exit(work: Callable[[], object]) -> None:
    from rlhf_cli.training.launch import exit_code

    code = exit_code(work)
    if code:
        raise typer.Exit(code)


def main() -> None:
    """The console script."""
    set_up_process()
    sys.exit(app(standalone_mode=True))


if __name__ == "__main__":
    main()
