"""`rlhf serve`: a trained model behind OpenAI's API, here or by vLLM, and a reward model by `rlhf rm serve`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlhf_cli.commands.options import Device, Host, Quantized, StageOfRun, TokenEnv
from rlhf_cli.commands.serving import TOKEN_VARIABLE, RequireToken, bind, required_token
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.printing import say
from rlhf_cli.program import command, install_extra
from rlhf_cli.run.artifacts import is_adapter
from rlhf_cli.trained.locate import StageModel, locate

if TYPE_CHECKING:
    from rlhf_cli.models.adapter_files import AdapterDirectory
    from rlhf_cli.rollout.prompt_form import PromptForm
    from rlhf_cli.trained.model import TrainedLanguageModel

Engine = Literal["auto", "transformers", "vllm"]
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM accepts as --max-lora-rank."""


def serve_command(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A run's directory, or that of a model.")],
    stage: StageOfRun = None,
    engine: Annotated[
        Engine,
        typer.Option("--engine", help="vLLM, the default where it is installed, or this process."),
    ] = "auto",
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 chooses a free port.")] = 8000,
    token_env: TokenEnv = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The model's name in requests; RUN-STAGE by default.")
    ] = None,
    device: Device = "auto",
    quantize: Quantized = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command line of vLLM and start nothing.")
    ] = False,
) -> None:
    """Serve a trained model with OpenAI's API: chat and completions."""
    located = locate(directory, stage, ("ppo", "sft", "rm"))
    token = required_token(host, token_env)
    if not dry_run:
        bind(host, port).close()  # a port that is taken is found before the model is loaded
    if stage == "rm" or (located is not None and located.stage == "rm"):
        if engine != "auto" or dry_run or name is not None or quantize is not None:
            raise ConfigError(
                "--stage rm: a reward model is served as `rlhf rm serve` does, without --engine, --name, --quantize "
                "and --dry-run. Remove the option (docs/use.md has the line for vLLM)"
            )
        from rlhf_cli.commands import rm_serve

        path = located.path.removesuffix("/model") if located is not None else directory
        rm_serve.serve(rm_serve.RewardServerOptions(path, device=device, host=host, port=port, token_env=token_env))
        return
    from rlhf_cli.trained.model import find_model

    name = name or name_of(directory, located)
    if choose_engine(engine, dry_run=dry_run) == "vllm":
        for option, given in {"--quantize": quantize is not None, "--device": device != "auto"}.items():
            if given:
                why = "reads a quantized export" if option == "--quantize" else "chooses its device"
                raise ConfigError(f"{option}: vLLM {why}. Remove the option, or give --engine transformers")
        _start_vllm(find_model(directory, stage), name, host, port, token_env, token, dry_run=dry_run)
        return
    from rlhf_cli.commands.chat_api import ChatAPI
    from rlhf_cli.processes.distributed import start

    speaker = find_model(directory, stage).speaker(start(device).device, quantize)
    say_prompts(speaker.form, speaker.sampling.stop_strings)
    server = ChatAPI(bind(host, port), name, speaker, token)
    server.run_until_signal(f"serving {name} at {server.url}/v1")
    say("stopped", flush=True)


def choose_engine(engine: Engine, *, dry_run: bool) -> str:
    """The engine that was asked for, or vLLM where it is installed. Raises ConfigError if it is not installed."""
    if dry_run and engine == "transformers":
        raise ConfigError("--dry-run: prints the command line of vLLM. Remove it, or give --engine vllm")
    if dry_run:
        return "vllm"
    has_vllm = importlib.util.find_spec("vllm") is not None
    if engine == "vllm" and not has_vllm:
        raise ConfigError(f"--engine vllm: needs vllm. Run: {install_extra('vllm', 'vllm')}")
    return "vllm" if has_vllm and engine == "auto" else engine.replace("auto", "transformers")


def name_of(directory: str, located: StageModel | None) -> str:
    """The name of a model in requests: run and stage, or the directory's name. It has no @ and no colon.

    >>> name_of("gpt2", None), name_of("my:model", None)
    ('gpt2', 'my-model')
    """
    if located is not None:
        name = f"{located.root.resolve().name}-{located.name}"
    else:
        name = Path(directory).resolve().name if Path(directory).is_dir() else directory
    return re.sub(r"[@:\s]", "-", name.replace("/", "-") if located is not None else name)


def say_prompts(form: PromptForm, stops: tuple[str, ...]) -> None:
    """Say how the model is prompted, and by which of the two routes."""
    say(f"prompts: {form.sentence}", error=True)
    if form.kind == "single":
        say("use /v1/completions with the prompt as text; the model was not trained on chats", error=True)
    if stops:
        say(f"stop strings of the run: {json.dumps(list(stops))}", error=True)


# ------------------------------------------------------------------------------------------------ vLLM


def _start_vllm(
    trained: TrainedLanguageModel,
    name: str,
    host: str,
    port: int,
    token_env: str | None,
    token: str | None,
    *,
    dry_run: bool,
) -> None:
    """Replace this process by vLLM's server, or print its command line."""
    from rlhf_cli.models.load import load_tokenizer

    _refuse_encoder_decoder(trained)
    tokenizer = load_tokenizer(trained.path, trained.revision)
    form = trained.form(tokenizer)
    words = vllm_command(trained, name, host, port, with_token=token is not None)
    if form.kind == "transcript":
        words += ["--chat-template", str(form.chat_template(tokenizer))]
    say_prompts(form, ())
    if dry_run:
        before = f'{TOKEN_VARIABLE}="${token_env}" ' if token is not None else ""
        say(before + shlex.join(words))
        return
    stops = trained.rollout().stop_strings
    if stops:
        say(f"send the run's stop strings with each request: stop={json.dumps(stops)}", error=True)
    say(f"starting {shlex.join(words)}", error=True)
    sys.stdout.flush()
    os.execve(vllm_program(), words, os.environ | ({TOKEN_VARIABLE: token} if token is not None else {}))


def _refuse_encoder_decoder(trained: TrainedLanguageModel) -> None:
    """Raise ArtifactError for a model that vLLM does not serve."""
    from transformers import AutoConfig

    from rlhf_cli.models.check import check_directory
    from rlhf_cli.models.seq2seq import is_seq2seq_config

    if is_adapter(trained.path):
        return  # LoRA is not offered for encoder-decoders
    check_directory(trained.path, trained.revision, weights=False)
    if is_seq2seq_config(AutoConfig.from_pretrained(trained.path, revision=trained.revision, trust_remote_code=False)):
        raise ArtifactError(
            f"{trained.path}: is an encoder-decoder, which vLLM does not serve. Use --engine transformers"
        )


def vllm_program() -> str:
    """The `vllm` beside this Python, or that on the PATH. Raises ConfigError without one."""
    beside = Path(sys.executable).with_name("vllm")
    program = str(beside) if beside.is_file() else shutil.which("vllm")
    if program is None:
        raise ConfigError(f"--engine vllm: {beside} is missing. Run: {install_extra('vllm', 'vllm')}")
    return program


def vllm_command(trained: TrainedLanguageModel, name: str, host: str, port: int, *, with_token: bool) -> list[str]:
    """The command that serves a model with vLLM, which draws by default as the run does.

    Adapters stay adapters. Raises ArtifactError for adapters that vLLM does not read.
    """
    from rlhf_cli.models.adapter_files import read_adapter

    adapter = read_adapter(trained.path) if is_adapter(trained.path) else None
    model, revision = trained.path, trained.revision
    if adapter is not None:
        model, revision = adapter.base.path, adapter.base.revision
    words = ["vllm", "serve", model, "--host", host, "--port", str(port)]
    if revision is not None:
        words += ["--revision", revision]
    if adapter is not None:
        words += ["--served-model-name", f"{name}-base", *_lora_words(adapter, name)]
    else:
        words += ["--served-model-name", name]
    rollout = trained.rollout()
    drawing: dict[str, Any] = {
        "temperature": rollout.temperature,
        "top_k": rollout.top_k,
        "top_p": rollout.top_p,
        "min_p": rollout.min_p,
    }
    words += ["--dtype", "float32" if trained.precision == "float32" else "bfloat16"]
    words += ["--override-generation-config", json.dumps({k: v for k, v in drawing.items() if v is not None})]
    if with_token:
        words += ["--middleware", f"{RequireToken.__module__}.{RequireToken.__qualname__}"]
    return words


def _lora_words(adapter: AdapterDirectory, name: str) -> list[str]:
    """The options with which vLLM applies adapters to their base."""
    rank = int(adapter.lora.get("r", 0))
    reasons = {
        "are DoRA": bool(adapter.lora.get("use_dora")),
        "were trained on a quantized base": adapter.quantization is not None,
        f"have rank {rank}": rank > LORA_RANKS[-1],
    }
    for reason, holds in reasons.items():
        if holds:
            merge = command("merge", adapter.path, "merged")
            raise ArtifactError(f"{adapter.path}: the adapters {reason}, which vLLM does not serve. Run: {merge}")
    largest = next(size for size in LORA_RANKS if size >= rank)
    words = ["--enable-lora", "--lora-modules", f"{name}={Path(adapter.path).resolve()}"]
    return [*words, "--max-lora-rank", str(largest), "--tokenizer", adapter.path]
