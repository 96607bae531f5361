"""The figures of `rlhf data check`, as JSON and as text on the screen."""

from __future__ import annotations

import io
import json
import sys
import textwrap
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from rlhf_cli.algorithms.rates import wilson_interval
from rlhf_cli.commands.data_count import MAX_EXAMPLES, Check, Side
from rlhf_cli.data.row_counts import MANY_SKIPPED
from rlhf_cli.data.splits import SIDES
from rlhf_cli.data.views import StageRows
from rlhf_cli.printing import printable
from rlhf_cli.report.progress import Console

if TYPE_CHECKING:
    import numpy as np


PERCENTILES = (1, 10, 50, 90, 99)
FEW_SCORES = 10
"""Up to this many different scores count as labels, and each is counted."""
WIDTH = 80
"""Columns of the screen that the report needs."""


def figures(check: Check, specs: Sequence[StageRows], unit: str) -> dict[str, Any]:
    """Everything that was found, as `--json` prints it."""
    by_side = {**dict.fromkeys(SIDES, specs[0]), **{spec.role.removeprefix("data."): spec for spec in specs[1:]}}
    names = [name for name in by_side if name in {*check.sides, *check.num_bad, *check.skipped}]
    warnings = [check.warning(name, name, by_side[name].length_key) for name in names]
    warnings += [_glue_warning(name, check.side(name), by_side[name], check.kept[name]) for name in names]
    found: dict[str, Any] = {
        "for": specs[0].purpose,
        "formats": check.kinds,
        "unit": unit,
        "bad_rows": {"number": check.num_bad.total(), "first": check.bad},
        "warnings": [line for line in warnings if line is not None],
        "sides": {name: _side_figures(check, name, by_side[name]) for name in names},
    }
    for side, key in (("validation", "validation_leaks"), ("test", "leaks")):
        if "train" in check.sides and side in check.sides:
            found[key] = _leaks(check, check.sides["train"], check.sides[side])
    return found


def _side_figures(check: Check, name: str, spec: StageRows) -> dict[str, Any]:
    import numpy as np

    side, limits = check.side(name), spec.limits
    rows, prompts = _array(side.rows), _array(side.prompts)
    _, first = np.unique(rows, return_index=True)
    is_duplicate = np.ones(len(rows), bool)
    is_duplicate[first] = False
    different = prompts[first]
    _, times = np.unique(different[different != 0], return_counts=True)
    found: dict[str, Any] = {
        "read": check.num_read[name] + check.num_bad[name],
        "bad": check.num_bad[name],
        "skipped": dict(check.skipped.get(name, {})),
        "used": check.kept[name],
        "duplicates": {
            "rows": int(is_duplicate.sum()),
            "first": check.places(side, np.flatnonzero(is_duplicate)[:MAX_EXAMPLES].tolist()),
        },
        "prompts_of_several_rows": {"prompts": int((times > 1).sum()), "rows": int(times[times > 1].sum())},
        "empty_prompts": side.empty_prompts,
        "special_tokens": side.special.figures(),
        "glued": side.glued.figures(),
        "max_length": limits.max_length if limits is not None else None,
        "too_long": side.too_long,
        "min_response_length": limits.min_response_length if limits is not None else 0,
        "too_short": side.too_short,
        "lengths": {key: _percentiles(_array(values)) for key, values in side.lengths.items()},
    }
    if side.num_answers:
        found["length_bias"] = _length_bias(side)
        found["answers_of_a_row"] = {str(n): side.num_answers[n] for n in sorted(side.num_answers)}
    if side.scores:
        found["scores"] = _score_figures(_array(side.scores))
    return found


def _glue_warning(name: str, side: Side, spec: StageRows, used: int) -> str | None:
    """A warning if prompt and answer meet without a space in many rows, with the template that separates them."""
    glued = side.glued
    if glued.number <= MANY_SKIPPED * used:
        return None
    template = json.dumps((spec.template or "{prompt}") + "\n", ensure_ascii=False)
    return (
        f"{name}: prompt and answer meet without a space in {glued.number:,} of {used:,} rows ({glued.example}). "
        f"data.prompt_template: {template} would separate them"
    )


def _percentiles(values: np.ndarray) -> dict[str, float]:
    """For each percentage, the smallest length that this share of the rows does not exceed."""
    import numpy as np

    found = np.percentile(values, PERCENTILES, method="inverted_cdf")
    return {
        **{f"p{p}": int(value) for p, value in zip(PERCENTILES, found, strict=True)},
        "max": int(values.max()),
        "mean": float(values.mean()),
    }


def _length_bias(side: Side) -> dict[str, float]:
    """How often the preferred answer is the longer one. A ranking's pairs are not independent: it is one trial."""
    n = sum(side.num_answers.values())
    low, high = wilson_interval(side.longer_wins, n)
    return {
        "chosen_longer": side.chosen_longer / n,
        "as_long": side.equally_long / n,
        "mean_chosen": float(_array(side.lengths["chosen"]).mean()),
        "mean_rejected": float(_array(side.lengths["rejected"]).mean()),
        "longer_is_right": side.longer_wins / n,
        "low95": low,
        "high95": high,
    }


def _score_figures(scores: np.ndarray) -> dict[str, Any]:
    import numpy as np

    values, times = np.unique(scores, return_counts=True)
    found: dict[str, Any] = {"number": len(scores), "mean": float(scores.mean()), "std": float(scores.std())}
    if len(values) <= FEW_SCORES:
        return found | {"counts": {f"{v:g}": int(n) for v, n in zip(values, times, strict=True)}}
    middle = float(np.percentile(scores, 50, method="inverted_cdf"))
    return found | {"min": float(values[0]), "median": middle, "max": float(values[-1])}


def _leaks(check: Check, train: Side, test: Side) -> dict[str, Any]:
    import numpy as np

    prompts = _array(test.prompts)
    leaking = np.isin(prompts, _array(train.prompts)) & (prompts != 0)
    return {
        "rows": int(leaking.sum()),
        "prompts": len(np.unique(prompts[leaking])),
        "first": check.places(test, np.flatnonzero(leaking)[:MAX_EXAMPLES].tolist()),
    }


def _array(values: array[Any]) -> np.ndarray:
    import numpy as np

    return np.frombuffer(values, {"q": np.int64, "i": np.int32, "d": np.float64}[values.typecode])


# --------------------------------------------------------------------------------------------- the screen


def new_console() -> Console:
    """A console on the standard output that can print any text, with colours only on a terminal."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(soft_wrap=True)


def print_figures(console: Console, found: dict[str, Any]) -> None:
    """Print the figures of `figures` for the eye."""
    unit, sides = found["unit"], found["sides"]
    for path, name in found["formats"].items():
        console.print(Text(f"{printable(path)}: rows of {name}, read for {found['for']}"))
    _print_rows(console, sides, unit, "answers used" if found["for"] == "rm scores" else "used")
    for name, side in sides.items():
        if side["used"]:
            of = f" of {name}" if len(sides) > 1 else ""
            _print_lengths(console, f"Lengths{of} in {unit}", side["lengths"])
            if "length_bias" in side:
                _print_length_bias(console, f"Length bias{of}", side, unit)
            if "scores" in side:
                _print_scores(console, f"Scores{of}", side["scores"])
    for side, key in (("test", "leaks"), ("validation", "validation_leaks")):
        if (leaks := found.get(key)) is None:
            continue
        text = f"{leaks['prompts']:,}, in {leaks['rows']:,} {side} rows" if leaks["rows"] else "none"
        title = "Prompts on both sides" if side == "test" else "Prompts of training and validation"
        console.print(Text.assemble((f"\n{title}: ", "bold"), (text, "yellow" if leaks["rows"] else "")))
        if leaks["rows"]:
            console.print(Text(f"    {_examples(leaks['first'], leaks['rows'])}"))
    for line in found["warnings"]:
        text = textwrap.fill(f"Warning: {printable(line)}", WIDTH, break_long_words=False, break_on_hyphens=False)
        console.print(Text(f"\n{text}", "yellow"))
    print_bad_rows(console, found["bad_rows"]["first"], found["bad_rows"]["number"])


def _print_rows(console: Console, sides: dict[str, Any], unit: str, used: str) -> None:
    """A table of counts with a column for each side."""
    several = len(sides) > 1
    header = "".join(f"{name:>12}" for name in sides) if several else ""
    console.print(Text(f"\n{'Rows':38}{header}".rstrip(), "bold"))

    def line(label: str, numbers: Sequence[int], style: str = "", note: str = "") -> None:
        text = "".join(f"{number:>12,}" for number in numbers)
        console.print(Text.assemble(f"  {label:36}", (text, style if any(numbers) else ""), note))

    each = list(sides.values())
    line("read", [side["read"] for side in each])
    line("bad", [side["bad"] for side in each], "red")
    for reason in dict.fromkeys(reason for side in each for reason in side["skipped"]):
        line(f"skipped: {reason}"[:36], [side["skipped"].get(reason, 0) for side in each], "yellow")
    line(used, [side["used"] for side in each])
    line("exact duplicates", [side["duplicates"]["rows"] for side in each], "yellow")
    _print_places(console, {name: side["duplicates"] for name, side in sides.items()})
    line("prompts with several different rows", [side["prompts_of_several_rows"]["prompts"] for side in each])
    line("  rows of these", [side["prompts_of_several_rows"]["rows"] for side in each])
    line("empty prompts", [side["empty_prompts"] for side in each], "yellow")
    for label, key in (
        ("special tokens in the text", "special_tokens"),
        ("answer meets prompt without space", "glued"),
    ):
        if any(side[key]["rows"] for side in each):
            line(label, [side[key]["rows"] for side in each], "yellow")
            _print_places(console, {name: side[key] for name, side in sides.items()})
    lengths = {side["max_length"] for side in each} - {None}
    for length in sorted(lengths):
        line(f"longer than {length:,} {unit}", [s["too_long"] * (s["max_length"] == length) for s in each], "yellow")
    for length in sorted({side["min_response_length"] for side in each} - {0}):
        shorter = [s["too_short"] * (s["min_response_length"] == length) for s in each]
        line(f"answers shorter than {length:,} {unit}", shorter, "yellow")
    if lengths and unit == "words":
        console.print(Text("    a word is one token or more: pass --tokenizer to count tokens"))


def _print_places(console: Console, by_side: dict[str, dict[str, Any]]) -> None:
    """The first places of each side that has some, with an example."""
    for name, found in by_side.items():
        if found["rows"]:
            of = f"{name}: " if len(by_side) > 1 else ""
            example = f" ({printable(found['example'])})" if "example" in found else ""
            console.print(Text(f"    {of}{_examples(found['first'], found['rows'])}{example}"))


def _examples(first: Sequence[str], number: int) -> str:
    """The first places. Further ones of the same file are only a number: `a.jsonl:3, 7, ...`."""
    shown, last = [], ""
    for place in first:
        file = place.rstrip("0123456789")
        shown.append(place[len(file) :] if file == last else printable(place))
        last = file
    return ", ".join([*shown, *(["..."] if number > len(first) else [])])


def _print_lengths(console: Console, title: str, lengths: dict[str, Any]) -> None:
    """Percentiles as numbers and as bars, all on one scale from 0 to the largest p99."""
    columns = [*(f"p{p}" for p in PERCENTILES), "max"]
    # If no row has a prompt, "whole" is the same as the answer.
    shown = {name: values for name, values in lengths.items() if name != "whole" or lengths["prompt"]["max"]}
    shown = {name: values for name, values in shown.items() if values["max"] or name != "prompt"}
    scale = max(1, max(values["p99"] for values in shown.values())) if shown else 1
    room = WIDTH - 11 - 7 * len(columns) - 3
    thin, thick, middle = ("─", "━", "┃") if has_unicode(console) else ("-", "=", "|")
    legend = f"({thin} p1 to p99, {thick} p10 to p90, {middle} p50; 0 to {scale:,})"
    console.print(Text.assemble(("\n" + title, "bold"), (f"  {legend}", "dim")))
    console.print(Text(f"{'':11}" + "".join(f"{name:>7}" for name in columns), "dim"))
    for name, values in shown.items():
        numbers = "".join(f"{values[column]:>7}" for column in columns)
        at = {p: round(values[f"p{p}"] / scale * (room - 1)) for p in PERCENTILES}
        drawn = [" "] * room
        for start, end, sign in ((1, 99, thin), (10, 90, thick), (50, 50, middle)):
            drawn[at[start] : at[end] + 1] = sign * (at[end] - at[start] + 1)
        name = "together" if name == "whole" else name
        console.print(Text.assemble(f"  {name:9}{numbers}   ", ("".join(drawn).rstrip(), "cyan")))


def _print_length_bias(console: Console, title: str, side: dict[str, Any], unit: str) -> None:
    bias = side["length_bias"]
    n = sum(side["answers_of_a_row"].values())
    kinds = [f"{number:,} of {size} answers" for size, number in side["answers_of_a_row"].items()]
    console.print(Text(f"\n{title}", "bold"))
    if list(side["answers_of_a_row"]) != ["2"]:
        console.print(f"  rankings: {', '.join(kinds)}; chosen is the best, rejected the worst answer")
    console.print(
        f"  chosen is longer in {percent(bias['chosen_longer'])} of {n:,}, equally long in {percent(bias['as_long'])}"
    )
    console.print(f"  mean length: chosen {bias['mean_chosen']:.1f}, rejected {bias['mean_rejected']:.1f} {unit}")
    console.print(
        f"  choosing the longer answer would be right in {percent(bias['longer_is_right'])} of pairs\n"
        f"  (95 % interval: {percent(bias['low95'])} to {percent(bias['high95'])})"
    )


def _print_scores(console: Console, title: str, scores: dict[str, Any]) -> None:
    number = scores["number"]
    text = f"\n{title}: {number:,}, mean {scores['mean']:.4g}, standard deviation {scores['std']:.4g}"
    console.print(Text(text, "bold"))
    if "counts" not in scores:
        console.print(f"  smallest {scores['min']:g}, median {scores['median']:g}, largest {scores['max']:g}")
        return
    block = "█" if has_unicode(console) else "#"
    for score, times in scores["counts"].items():
        bar = block * round(30 * times / number)
        console.print(Text.assemble(f"  {score:>12}{times:>12,}{percent(times / number):>9}   ", (bar, "cyan")))


def print_bad_rows(console: Console, first: Sequence[str], number: int) -> None:
    if not number:
        return
    shown = f", the first {len(first)}" if number > len(first) else ""
    console.print(Text(f"\nBad rows: {number:,}{shown}", "bold red"))
    for line in first:
        console.print(Text(f"  {printable(line)}"))


def percent(share: float) -> str:
    """A share with one digit after the point.

    >>> percent(0.5396)
    '54.0 %'
    """
    return f"{100 * share:.1f} %"


def has_unicode(console: Console) -> bool:
    """Whether the output can hold more than ASCII."""
    return console.encoding.lower().startswith("utf")
