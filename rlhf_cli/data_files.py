"""Which files a data source's path stands for. No torch here: `rlhf status` asks it of every stage."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rlhf_cli.errors import DataError

KINDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
SUFFIXES = tuple(kind + compression for compression in ("", *COMPRESSIONS) for kind in KINDS)

# What `datasets` writes beside the rows of a folder.
NOT_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}


def find_files(path: str) -> list[Path]:
    """The files that a source's path stands for, sorted; none where it can only be a hub dataset's id.

    A folder stands for the files in it, not for those of its subfolders: `train/` and `test/` side by side would be
    mixed unseen. A glob may take them, `**/*.jsonl`. From folders and globs come only files with a known ending, no
    hidden ones, and plain text only where there is nothing else, since licences and notes are .txt too.

    Raises DataError where nothing is there.
    """
    place = Path(path)
    try:
        if place.is_file():
            return [place]
        if place.is_dir():
            # What lies in the root of the file system is hardly meant.
            is_root = place.resolve() == place.resolve().parent
            found, fault = [] if is_root else list(place.iterdir()), "a folder without a data file"
        elif place.exists():
            raise DataError(f"{shown_path(path)}: neither a file nor a folder. Write what it gives into a file")
        elif any(sign in path for sign in "*?["):
            found, fault = list(Path(place.anchor).glob(str(place.relative_to(place.anchor)))), "no data file fits"
        elif path.lower().endswith(SUFFIXES) or path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise DataError(
                f"{shown_path(path)}: no such file (looked from {Path.cwd()}). "
                "Give a path that exists, with ~ written out, or a hub dataset's id"
            )
        else:
            return []
        # Dots that the path itself names are meant.
        shown = [file for file in found if not any(p[0] == "." and p not in place.parts for p in file.parts)]
        files = [
            file
            for file in shown
            if file.name.lower().endswith(SUFFIXES) and file.name not in NOT_ROWS and file.is_file()
        ]
    except (OSError, ValueError, NotImplementedError) as error:
        raise DataError(
            f"{shown_path(path)}: can't be looked up ({reason(error)}). Check the path and its rights"
        ) from None
    if not files:
        advice = f" Subfolders are read by a glob, {shown_path(path)}/**/*.jsonl" if place.is_dir() else ""
        raise DataError(f"{shown_path(path)}: {fault}, one that ends in {', '.join(KINDS)} is needed.{advice}")
    return sorted([file for file in files if ending(file)[0] != ".txt"] or files)


def data_fingerprint(path: str, revision: str | None = None) -> str:
    """A digest that changes when the rows at `path` may: of its files' names and bytes; a hub dataset is known by its
    revision only; "missing" where nothing is there.
    """
    try:
        files = find_files(path)
        if not files:
            return f"hub:{path}@{revision or 'main'}"
        if files == [Path(path)]:
            return _digest(files[0])
        whole = hashlib.sha256()
        for file in files:
            whole.update(f"{file.name}\0{_digest(file)}\n".encode())
        return whole.hexdigest()
    except (DataError, OSError):
        return "missing"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def ending(path: Path) -> tuple[str, str]:
    """The kind and the compression that a name ends in: `a.CSV.gz` gives .csv and .gz."""
    *_, before, last = ["", "", *(suffix.lower() for suffix in path.suffixes)]
    return (before, last) if last in COMPRESSIONS else (last, "")


def shown_path(path: str | Path) -> str:
    """A path as it can be printed in one line and written as UTF-8."""
    return str(path) if str(path).isprintable() else ascii(str(path))


def reason(error: Exception) -> str:
    """An error's reason in one short line."""
    told = (error.strerror if isinstance(error, OSError) else None) or str(error)
    words = " ".join(told.replace("'\t'", "a tab").split())
    words = words if words.isprintable() else ascii(words)  # a parser may quote what it found
    return (words[:200] + "..." if len(words) > 200 else words) or type(error).__name__
