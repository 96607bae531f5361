"""`rlhf push`: upload a trained model with its card to the Hugging Face hub.

Only weights, tokenizer, configs and the card are uploaded, from a list of known names. Rows, metrics, samples and any
other file stay here. A secret in one of the files stops the command.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf_cli.commands.export import source_of
from rlhf_cli.commands.options import StageOfRun
from rlhf_cli.errors import ArtifactError, ConfigError, RunError
from rlhf_cli.files import read_object, read_text
from rlhf_cli.hub import is_local, is_offline
from rlhf_cli.printing import say, size
from rlhf_cli.program import command
from rlhf_cli.run.artifacts import is_adapter, require_intact
from rlhf_cli.trained.locate import is_model

CARD, BASE, TEMPLATES = "README.md", "base_model.json", "additional_chat_templates"
UPLOADED = (
    *(CARD, "LICENSE", "LICENSE.*", "NOTICE"),
    *("config.json", "generation_config.json", "model_config.json", "adapter_config.json", BASE),
    *("*.safetensors", "*.safetensors.index.json", "*.gguf"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "*.tiktoken", "chat_template.jinja"),
    f"{TEMPLATES}/*.jinja",
)
"""Names of the files that belong to a model. No other file is uploaded."""
SECRETS = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{20,}|\bAIza[\w-]{30,}|\bAKIA[0-9A-Z]{16}\b|\bxox[abp]-[\w-]{10,}",
    "a GitHub token": r"\bgh[opsu]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}",
    "a GitLab token": r"\bglpat-[\w-]{20,}",
    "a JSON web token": r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+",
    "a bearer token": r"(?i)\bbearer\s+(?=[^\s]*\d)[\w.~+/=-]{16,}",
    "a variable with a secret": (
        r"\b[A-Z][A-Z0-9_]*(?:API_?KEY|SECRET|TOKEN|PASSW(?:OR)?D)[A-Z0-9_]*\s*[=:]\s*[\"']?(?=[^\s]*\d)[\w.~+/-]{16,}"
    ),
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
    "a URL with a password": r"\bhttps?://[^\s/:@\"']+:[^\s/@\"']+@",
}
SECRET_KEY = re.compile(
    r"(api|secret|private|access)_?key|passw(or)?d|secret|(access|auth|api|hf|bearer|hub)_?token", re.IGNORECASE
)
"""Names of JSON keys whose text is a secret. `eos_token` and the like are none."""
WEIGHTS = (".safetensors", ".gguf")


@dataclass(frozen=True)
class Upload:
    """The files to upload, and the facts that the hub's page would show."""

    name: str
    contents: dict[str, Path | bytes]
    """By name: a file of the folder, or the bytes of one that is written for the upload."""
    left_out: list[str]
    license: str | None
    base_model: str


def push(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A run's directory, or that of a model.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="The repository on the hub: OWNER/NAME.")],
    stage: StageOfRun = None,
    yes: Annotated[bool, typer.Option("--yes", help="Upload. Without it, only show what would be uploaded.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public, not private.")] = False,
) -> None:
    """Upload a trained model with its card to the Hugging Face hub. Shows what it would upload without --yes."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise ConfigError(
            f"{repo}: is not the name of a repository. Give OWNER/NAME with letters, digits, '-', '_' and '.'"
        ) from None
    upload = collect(directory, stage)
    say(f"{upload.name} to {repo}{'' if yes else ', which is uploaded with --yes'}")
    total = 0
    for name, content in sorted(upload.contents.items()):
        count = len(content) if isinstance(content, bytes) else content.stat().st_size
        total += count
        say(f"  {size(count):>9}  {name}")
    say(f"  {size(total):>9}  in {len(upload.contents)} files")
    say(f"licence: {upload.license or 'not named; write `license:` at the top of README.md'}")
    say(f"base model: {upload.base_model}")
    if CARD not in upload.contents:
        say("model card: none (README.md)")
    if upload.left_out:
        say(f"not uploaded: {', '.join(upload.left_out)}")
    say(f"a repository that does not exist yet becomes {'public' if public else 'private (--public)'}")
    if yes:
        say(send(upload, repo, public=public))


def collect(directory: str, stage: str | None) -> Upload:
    """The files of the model at `directory`, checked.

    Raises ArtifactError for a directory without a model, with a damaged one, with adapters whose base is on this
    machine only, or with a secret in a file.
    """
    if not Path(directory).is_dir():
        raise ArtifactError(f"{directory}: no such directory. Give a run, one of its stages or a model directory")
    source = source_of(directory, stage)
    folder = Path(source.path)
    if not is_model(folder):
        raise ArtifactError(f"{folder}: has no config.json, so it is not a model directory")
    require_intact(folder, thorough=True)
    paths = [path for path in folder.iterdir() if path.name != TEMPLATES] + [*folder.glob(f"{TEMPLATES}/*.jinja")]
    names = sorted(path.relative_to(folder).as_posix() + ("/" if path.is_dir() else "") for path in paths)
    files = [name for name in names if any(fnmatch(name, pattern) for pattern in UPLOADED)]
    for name in files:
        _require_safe(folder, name)
    if not any(name.endswith(WEIGHTS) for name in files):
        raise ArtifactError(f"{folder}: has no weights as *.safetensors. Nothing else is uploaded")
    if is_adapter(folder):
        base = read_object(folder / "adapter_config.json").get("base_model_name_or_path")
        if not isinstance(base, str) or is_local(base) or Path(base).is_dir():
            merge = command("merge", str(folder), "merged")
            where = f"is the local {base}, which others lack" if base else "is not named in adapter_config.json"
            raise ArtifactError(f"{folder}: the base of the adapters {where}. Run: {merge}")
    contents: dict[str, Path | bytes] = {name: folder / name for name in files}

    from huggingface_hub import ModelCard

    from rlhf_cli.trained.model import HEADING, TEMPLATE_FILE, prompting_of

    about, text = dict[str, Any](), f"# {folder.name}"
    try:
        if CARD in files:
            text = read_text(folder / CARD)
            about = ModelCard.load(folder / CARD).data.to_dict()
    except Exception as error:  # A card is written by hand, and may contain anything.
        reason = " ".join(str(error).split())[:200]
        what = f"the text or the metadata at its top cannot be read ({reason}). Correct it"
        raise ArtifactError(f"{folder / CARD}: {what}") from None
    is_new = source.located is not None and source.base() is None
    none = "none, trained from random weights" if is_new else "not on the hub"
    if (prompting := prompting_of(source.located)) is not None:
        if prompting.chat_template is not None:
            contents[TEMPLATE_FILE] = prompting.chat_template.encode()
        if HEADING not in text:
            contents[CARD] = f"{text.rstrip()}\n\n{prompting.section}\n".encode()
    if BASE in files:  # the base of adapters, without the way to its folder on this machine
        recorded = {**read_object(folder / BASE), "relative_path": None}
        contents[BASE] = (json.dumps(recorded, indent=2, sort_keys=True) + "\n").encode()
    left_out = [name for name in names if name not in files]
    return Upload(source.name, contents, left_out, about.get("license"), str(about.get("base_model") or none))


def _require_safe(folder: Path, name: str) -> None:
    """Raise ArtifactError for a file that must not be uploaded. The message does not show a secret.

    A link could upload any file of this machine, but a snapshot in the hub's cache has links to the `blobs` of its
    repository. A file with the name of weights may have other content.
    """
    path, folder = folder / name, folder.resolve()
    target = path.resolve()
    if folder not in target.parents and target.parent != folder.parent.parent / "blobs":
        raise ArtifactError(f"{path}: is a link to {target}, outside of the model. Replace it by a copy, or remove it")
    if not path.is_file():
        raise ArtifactError(f"{path}: is no regular file. Remove it")
    text, value, is_weights = "", None, True
    if path.suffix == ".gguf":
        with path.open("rb") as file:
            is_weights = file.read(4) == b"GGUF"
    elif path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as weights:
                value = weights.metadata()
                text = json.dumps(value)
        except (SafetensorError, OSError):
            is_weights = False
    else:
        text = path.read_bytes().decode(errors="replace")  # such as tokenizer.model
    if not is_weights:
        raise ArtifactError(f"{path}: has no weights in it, in spite of its name, and nothing was uploaded. Remove it")
    if path.suffix == ".json":
        try:
            value = json.loads(read_text(path))
        except (ValueError, RecursionError):
            raise ArtifactError(f"{path}: is not JSON, so it is not uploaded. Correct or remove the file") from None
    found = next((what for what, pattern in SECRETS.items() if re.search(pattern, text)), None)
    if found is None and (key := secret_key(value)) is not None:
        found = f"a secret in the key {key}"
    if found is not None:
        raise ArtifactError(f"{path}: contains {found}, and nothing was uploaded. Remove it and make a new one")


def secret_key(value: Any) -> str | None:
    """The first key of nested JSON whose name says that its text is a secret.

    >>> secret_key({"eos_token": "<eos>", "a": [{"api_key": "x"}]}), secret_key({"api_key": ""})
    ('api_key', None)
    """
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if isinstance(inner, str) and inner and SECRET_KEY.search(str(key)):
            return str(key)
        if (found := secret_key(inner)) is not None:
            return found
    return None


def send(upload: Upload, repo: str, *, public: bool) -> str:
    """Upload the files as one commit and return its URL. Files that are there already are not sent again.

    Raises ConfigError without a token, RunError if the hub cannot be reached or refuses.
    """
    import httpx2
    from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if get_token() is None:
        raise ConfigError("--yes: there is no token for the hub. Run `hf auth login`, or set HF_TOKEN")
    if is_offline():
        raise RunError(f"--yes: {constants.ENDPOINT} cannot be reached, or HF_HUB_OFFLINE is set. Nothing was uploaded")
    api = HfApi()
    operations = [CommitOperationAdd(name, content) for name, content in sorted(upload.contents.items())]
    try:
        repository = api.create_repo(repo, private=not public, exist_ok=True).repo_id
        commit = api.create_commit(repository, operations, commit_message=f"Upload {upload.name} with rlhf push")
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = error.server_message or f"status {status}"
        hint = "Check the token's rights and the owner" if status in (401, 403, 404) else "Try again"
        raise RunError(f"{repo}: the hub refused ({' '.join(reason.split())[:200]}). {hint}") from None
    except (httpx2.HTTPError, OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RunError(f"{repo}: the upload failed ({reason}). Run the same command to continue") from None
    return commit.commit_url
