"""The Hugging Face hub: which paths cannot be on it, and one quick check that it can be reached.

Without a connection huggingface_hub retries every request for half a minute or more. So the first load from the hub
sends one request with a short time limit. If it fails, the process uses the local cache only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from functools import cache
from pathlib import Path

from rlhf_cli.errors import ArtifactError

TIMEOUT_S = 6.0
OWN_FOLDERS = ("artifacts", "configs", "data")


def is_local(path: str) -> bool:
    """Whether a path can only be a local one, and not a hub id (`name` or `owner/name`).

    >>> is_local("./gpt2"), is_local("artifacts/nope"), is_local("gpt2"), is_local("openai-community/gpt2")
    (True, True, False, False)
    """
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        return True
    parent, slash, _ = path.partition("/")
    return bool(slash) and (parent in OWN_FOLDERS or Path(parent).is_dir())


def require_hub_model(path: str, revision: str | None = None) -> None:
    """Raise ArtifactError if the model with this hub id can be neither downloaded nor read from the local cache."""
    names = ("config.json", "tokenizer_config.json", "tokenizer.json")
    if not is_offline() or any(cached(path, name, revision) for name in names):
        return
    what = "HF_HUB_OFFLINE is set" if _set_offline() else "the Hugging Face hub cannot be reached"
    raise ArtifactError(
        f"{path}: no such directory, and {what}; the model is not in the local cache either. Give the path of a local "
        "model directory, or download the model where there is a connection and copy the cache, then set "
        "HF_HUB_OFFLINE=1"
    )


def is_offline() -> bool:
    """Whether this process uses the local cache only: HF_HUB_OFFLINE is set, or the hub does not answer.

    The first call sends a request and takes at most 6 seconds. Without an answer it switches huggingface_hub,
    transformers and datasets to the local cache.
    """
    if _set_offline():
        return True
    if _reachable():
        return False
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True
    config = getattr(sys.modules.get("datasets"), "config", None)
    if config is not None:
        config.HF_HUB_OFFLINE = True
    return True


def _set_offline() -> bool:
    chosen = (os.environ.get(name, "").upper() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value in ("1", "ON", "YES", "TRUE") for value in chosen)


@cache
def _reachable() -> bool:
    """Whether the hub answers one request, with whatever status. Name resolution counts towards the time limit."""
    # Imported here: on a busy machine that takes seconds, which do not count.
    import httpx2
    from huggingface_hub import constants, get_session

    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(httpx2.HTTPError, OSError, ValueError):
            get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S - 1)
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return answered.is_set()


def cached(path: str, name: str, revision: str | None = None) -> str | None:
    """The path of a hub model's file in the local cache; None if it is not there, or if `path` is no hub id."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(path, name, revision=revision)
    except HFValidationError:
        return None
    return file if isinstance(file, str) else None
