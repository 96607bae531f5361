"""Every example in a docstring runs, and every public function of the mathematics has one."""

import doctest
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import rlhf_cli
import rlhf_cli.algorithms

MODULES = ["rlhf_cli.tensor_ops"] + [
    f"rlhf_cli.algorithms.{module.name}" for module in pkgutil.iter_modules(rlhf_cli.algorithms.__path__)
]


def test_every_example_runs():
    package = Path(rlhf_cli.__file__).parent
    with_examples = [file for file in package.rglob("*.py") if ">>> " in file.read_text(encoding="utf-8")]
    assert len(with_examples) > 50
    runner, report = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE), []
    for file in with_examples:
        name = ".".join(file.relative_to(package.parent).with_suffix("").parts)
        for test in doctest.DocTestFinder().find(importlib.import_module(name)):
            runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


@pytest.mark.parametrize("name", MODULES)
def test_every_public_function_has_an_example(name):
    module = importlib.import_module(name)
    functions = {
        f"{name}.{key}"
        for key, value in vars(module).items()
        if inspect.isfunction(value) and inspect.unwrap(value).__module__ == name and not key.startswith("_")
    }
    tests = {test.name: test for test in doctest.DocTestFinder().find(module) if test.examples}
    assert functions, f"{name} has no public function: is the module name right?"
    assert functions <= set(tests), f"functions without an example: {sorted(functions - set(tests))}"
