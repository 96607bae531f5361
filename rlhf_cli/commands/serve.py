"""`rlhf serve`: a trained model behind OpenAI's API, and a reward model by `rlhf rm serve`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli.commands.options import Device, Host, Quantized, StageOfRun, TokenEnv
from rlhf_cli.commands.serving import bind, required_token
from rlhf_cli.errors import ConfigError
from rlhf_cli.printing import say
from rlhf_cli.trained.locate import StageModel, locate


def serve_command(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A run's directory, or that of a model.")],
    stage: StageOfRun = None,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 chooses a free port.")] = 8000,
    token_env: TokenEnv = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The model's name in requests; RUN-STAGE by default.")
    ] = None,
    device: Device = "auto",
    quantize: Quantized = None,
) -> None:
    """Serve a trained model with OpenAI's API: chat and completions."""
    located = locate(directory, stage, ("ppo", "sft", "rm"))
    token = required_token(host, token_env)
    bind(host, port).close()  # a port that is taken is found before the model is loaded
    if stage == "rm" or (located is not None and located.stage == "rm"):
        if name is not None or quantize is not None:
            raise ConfigError(
                "--stage rm: a reward model is served as `rlhf rm serve` does, without --name and --quantize. Remove "
                "the option"
            )
        from rlhf_cli.commands import rm_serve

        path = located.path.removesuffix("/model") if located is not None else directory
        rm_serve.serve(rm_serve.RewardServerOptions(path, device=device, host=host, port=port, token_env=token_env))
        return
    from rlhf_cli.commands.chat_api import ChatAPI
    from rlhf_cli.processes.distributed import start
    from rlhf_cli.trained.model import find_model

    name = name or name_of(directory, located)
    speaker = find_model(directory, stage).speaker(start(device).device, quantize)
    say(f"prompts: {speaker.form.sentence}", error=True)
    if speaker.form.kind == "single":
        say("use /v1/completions with the prompt as text; the model was not trained on chats", error=True)
    if stops := speaker.sampling.stop_strings:
        say(f"stop strings of the run: {json.dumps(list(stops))}", error=True)
    server = ChatAPI(bind(host, port), name, speaker, token)
    server.run_until_signal(f"serving {name} at {server.url}/v1")
    say("stopped", flush=True)


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
