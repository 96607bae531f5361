"""Every public function of the mathematics has a docstring example, and the examples run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

import rlhf_cli.algorithms

MODULES = ["rlhf_cli.tensor_ops"] + [
    f"rlhf_cli.algorithms.{module.name}" for module in pkgutil.iter_modules(rlhf_cli.algorithms.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_every_public_function_has_an_example_that_runs(name):
    module = importlib.import_module(name)
    functions = {
        f"{name}.{key}"
        for key, value in vars(module).items()
        if inspect.isfunction(value) and inspect.unwrap(value).__module__ == name and not key.startswith("_")
    }
    tests = {test.name: test for test in doctest.DocTestFinder().find(module) if test.examples}
    assert functions, f"{name} has no public function: is the module name right?"
    assert functions <= set(tests), f"functions without an example: {sorted(functions - set(tests))}"
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for test in tests.values():
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)
