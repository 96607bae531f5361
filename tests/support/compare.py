"""Compare tensors, gradients and saved weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlhf_cli.models.adapters import merge_in_place
from support.paths import OF_THE_MACHINE
from support.tiny import random_ids, read_jsonl

TOLERANCE = 1e-5
"""The largest difference of a weight or a figure on one process and on several, relative to numbers above 1."""


def weights_of(directory):
    return {
        f"{path.parent.name}/{name}": tensor
        for path in sorted(directory.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def same_weights(one, two, tolerance=TOLERANCE):
    a, b = weights_of(one), weights_of(two)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(b[name], a[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def close(actual, expected, tolerance=TOLERANCE):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def close_in_size(actual, expected, tolerance=TOLERANCE):
    """Assert that tensors agree to within `tolerance` times the largest number, or 1."""
    gap = (actual - expected).abs().max().item()
    assert gap <= tolerance * max(1.0, expected.abs().max().item()), f"difference {gap:.1e}"


@torch.no_grad()
def logits_of(model):
    """The logits of a model, or the scores of a classifier, for one text."""
    return model.eval()(input_ids=torch.tensor(random_ids(11), device=model.device)).logits.float()


def adapt(model, std=0.1):
    """Give the adapters of a model an effect: their second factor is zero when they are new."""
    for number, (name, weight) in enumerate(model.named_parameters()):
        if ".lora_B" in name:
            torch.nn.init.normal_(weight, std=std, generator=torch.Generator().manual_seed(number))


def grads(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_gradients(actual, expected, tolerance):
    """Assert that all gradients agree to within `tolerance` times the largest entry."""
    assert actual.keys() == expected.keys()
    assert actual
    size = max(g.abs().max() for g in expected.values())
    assert size > 0
    gap = max((actual[name] - expected[name]).abs().max() for name in expected)
    assert gap <= tolerance * size, f"relative difference {gap / size:.1e}"


def same_runs(one: Path, two: Path, tolerance: float = TOLERANCE) -> None:
    """Assert that two runs of a stage, given by its directories, have the same weights, figures and sampled texts."""
    same_figures(one, two, tolerance)
    same_weights(one, two)


def same_figures(one: Path, two: Path, tolerance: float = TOLERANCE) -> None:
    """Assert that two runs have the same figures to within the tolerance, and exactly the same texts."""
    a, b = ({path: v for path, v in _leaves(_written(folder)) if not _of_machine(path[-1])} for folder in (one, two))
    assert a.keys() == b.keys()
    assert any(path[0] == "samples" for path in a)
    wrong = [f"{'/'.join(path)}: {a[path]!r} and {b[path]!r}" for path in a if not _same(a[path], b[path], tolerance)]
    assert not wrong, "\n".join(wrong)


def _written(folder: Path) -> dict[str, Any]:
    """What a run writes as JSON about its training and its samples."""
    rows = {path.stem: read_jsonl(path) for path in (folder / "metrics.jsonl", folder / "samples.jsonl")}
    files = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("evaluation.json")}
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return {**rows, **files, "manifest": manifest["metrics"]}


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each number and text of nested mappings and lists, with its path."""
    if not isinstance(tree, dict | list):
        yield path, tree
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _leaves(value, (*path, str(key)))


def _of_machine(key: str) -> bool:
    return key.startswith(OF_THE_MACHINE) or key.endswith("seconds")


def _same(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= tolerance * max(1.0, abs(a))
    return bool(a == b)


def merged_copy(model):
    """A copy with the adapters added to the weights by peft, and without them."""
    plain = copy.deepcopy(model)
    merge_in_place(plain)
    return plain
