"""Test your own functions against golden.json: `python check.py my_functions.py`. Needs nothing but Python.

A function gets the inputs of each case whose name is its own, or begins with it and "_", as keyword arguments, nested
lists of numbers, and returns a mapping of outputs: lists, NumPy arrays or tensors. See docs/conformance.md.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

GRADIENT_TOLERANCE = 1e-6


def numbers(value: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """Every number of nested lists with its place, such as `[0][2]`."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple):
        for i, one in enumerate(value):
            yield from numbers(one, f"{place}[{i}]")
    else:
        yield place, float(value)


def difference(case: Mapping[str, Any], key: str, found: Any) -> str:
    """What is wrong with one output, or nothing."""
    expected, actual = dict(numbers(case["outputs"][key])), dict(numbers(found))
    if expected.keys() != actual.keys():
        return f"{key}: its shape is another: {len(actual)} numbers, {len(expected)} expected"
    tolerance = GRADIENT_TOLERANCE if key.startswith("grad_") else case["tol"]
    for place, value in expected.items():
        if not abs(actual[place] - value) <= tolerance * max(1.0, abs(value)):
            return f"{key}{place} is {actual[place]:.10g}, not {value:.10g} (tolerance {tolerance:g})"
    return ""


def check(case: Mapping[str, Any], function: Callable[..., Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """The outputs of a case that the function returned, and what is wrong with them."""
    try:
        found = function(**case["inputs"])
    except Exception as error:
        return [], [f"{type(error).__name__}: {error}"]
    unknown = [f"{key}: the case has no such output" for key in found.keys() - case["outputs"].keys()]
    known = [key for key in case["outputs"] if key in found]
    return known, unknown + [text for key in known if (text := difference(case, key, found[key]))]


def main(module: str) -> int:
    cases = json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8"))["cases"]
    functions = {name: value for name, value in runpy.run_path(module).items() if callable(value)}
    num_checked = num_wrong = 0
    for case in cases:
        name = max((one for one in functions if f"{case['name']}_".startswith(f"{one}_")), key=len, default=None)
        if name is None:
            continue
        checked, wrong = check(case, functions[name])
        num_checked += bool(checked or wrong)
        num_wrong += bool(wrong)
        print(f"{'WRONG' if wrong else 'ok':5} {case['name']}: {', '.join(checked)}")
        for text in [*wrong, case["what"], f"Source: {case['source']}"] if wrong else ():
            print(f"      {text}")
    print(f"{num_checked} of {len(cases)} cases checked, {num_wrong} wrong")
    return 1 if num_wrong or not num_checked else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python check.py MODULE.py")
    sys.exit(main(sys.argv[1]))
