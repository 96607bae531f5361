"""The chart library of reports: vl-convert, which brings the JavaScript of Vega-Lite and draws pictures with it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import tempfile
from pathlib import Path
from typing import Any

from rlhf_cli.files import cache_root

FOLDER = "rlhf-report"
"""The folder in the cache directory that holds the JavaScript."""


def javascript() -> str:
    """The JavaScript of Vega, Vega-Lite and vega-embed.

    vl-convert needs 1.5 s to bundle it, so the bundle is kept in the cache directory, by version of vl-convert. Without
    a cache that can be written, it is bundled each time.
    """
    import vl_convert

    path = cache_root() / FOLDER / f"vl-convert-{importlib.metadata.version('vl-convert-python')}.js"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    text: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # the stub of 1.9 has no default
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    return text


def png(specification: dict[str, Any]) -> bytes:
    """A Vega-Lite specification drawn as a PNG."""
    import vl_convert

    picture: bytes = vl_convert.vegalite_to_png(specification, scale=2)
    return picture
