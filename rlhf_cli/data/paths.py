"""The files that a data source's path names. Imports no torch: `rlhf status` needs it for every stage."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rlhf_cli.errors import DataError
from rlhf_cli.files import digest_once
from rlhf_cli.printing import printable

KINDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
SUFFIXES = tuple(kind + compression for compression in ("", *COMPRESSIONS) for kind in KINDS)

# `datasets` writes these beside the rows.
NOT_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}


def find_files(path: str) -> list[Path]:
    """The files that a path names, sorted; an empty list if the path can only be a hub dataset's id.

    A folder gives no files of subfolders, because `train/` and `test/` would be mixed without notice; use a glob for
    them, `**/*.jsonl`. Folders and globs give only files with a known ending and no hidden ones, and .txt files only if
    there is nothing else, because licences and notes are .txt too. Raises DataError if nothing is found.
    """
    given = Path(path)
    try:
        if given.is_file():
            return [given]
        if given.is_dir():
            is_root = given.resolve() == given.resolve().parent  # files in / are hardly meant
            found, fault = [] if is_root else list(given.iterdir()), "the folder has no data file"
        elif given.exists():
            raise DataError(f"{printable(path)}: neither a file nor a folder. Write its content to a file")
        elif any(sign in path for sign in "*?["):
            found, fault = list(Path(given.anchor).glob(str(given.relative_to(given.anchor)))), "no data file matches"
        elif path.lower().endswith(SUFFIXES) or path.startswith((".", "/", "~")) or path.count("/") > 1:
            fault = f"{printable(path)}: no such file (relative to {Path.cwd()})"
            raise DataError(f"{fault}. Give an existing path or a hub dataset's id")
        else:
            return []
        # Hidden names that the path itself contains are intended.
        found = [file for file in found if not any(p[0] == "." and p not in given.parts for p in file.parts)]
        named = [file for file in found if file.name.lower().endswith(SUFFIXES) and file.name not in NOT_ROWS]
        files = [file for file in named if file.is_file()]
    except (OSError, ValueError, NotImplementedError) as error:
        fault = f"cannot be looked up ({reason(error)})"
        raise DataError(f"{printable(path)}: {fault}. Check the path and its permissions") from None
    if not files:
        advice = f" To read subfolders, use a glob: {printable(path)}/**/*.jsonl" if given.is_dir() else ""
        raise DataError(f"{printable(path)}: {fault}. Its name must end in {', '.join(KINDS)}.{advice}")
    return sorted([file for file in files if ending(file)[0] != ".txt"] or files)


def data_fingerprint(path: str, revision: str | None = None) -> str:
    """A digest that changes whenever the rows at `path` may change; "missing" if nothing is found.

    It covers the names and bytes of local files. A hub dataset is identified by its revision only.
    """
    try:
        files = find_files(path)
        if not files:
            return f"hub:{path}@{revision or 'main'}"
        if files == [Path(path)]:
            return digest_once(files[0])
        digest = hashlib.sha256()
        for file in files:
            digest.update(f"{file.name}\0{digest_once(file)}\n".encode())
        return digest.hexdigest()
    except (DataError, OSError):
        return "missing"


def ending(path: Path) -> tuple[str, str]:
    """The type and the compression from the end of a name: `a.CSV.gz` gives .csv and .gz."""
    *_, before, last = ["", "", *(suffix.lower() for suffix in path.suffixes)]
    return (before, last) if last in COMPRESSIONS else (last, "")


def reason(error: BaseException) -> str:
    """An exception's reason on one short line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    words = printable(" ".join(text.replace("'\t'", "a tab").split()))  # parsers quote their input
    return (words[:200] + "..." if len(words) > 200 else words) or type(error).__name__
