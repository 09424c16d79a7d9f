"""The documentation is true: the Python blocks of the pages and the examples of the docstrings run.

Both run as a reader would run them, in an empty folder and with JAX as it comes: x64 is off until a block or an example
turns it on. The blocks of a page share one namespace. Examples may use `krylov`, `jax`, `jnp` and `np` without
importing them.
"""

import doctest
import importlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.x64_only


def modules_with_examples() -> dict[str, int]:
    """The number of doctest examples in each module's source."""
    examples = {}
    for folder, package in ("krylov", "krylov"), ("operators", "krylov.operators"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            count = len(re.findall(r"^\s*>>> ", path.read_text(), re.MULTILINE))
            if count:
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                examples[".".join([package, *parts]).removesuffix(".__init__")] = count
    return examples


EXAMPLES = modules_with_examples()


@pytest.fixture(autouse=True)
def as_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_blocks_run(page: Path) -> None:
    text = page.read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python"), "a block is indented or not closed"
    namespace = {"__name__": "__main__"}
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], page, "exec"), namespace)


def test_there_are_blocks_and_examples_to_run() -> None:
    assert BLOCK.search(README.read_text())
    assert EXAMPLES


@pytest.mark.parametrize("module_name", EXAMPLES)
def test_docstring_examples_run(module_name: str) -> None:
    module = importlib.import_module(module_name)
    krylov = importlib.import_module("krylov")
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report = io.StringIO()
    names = {"jax": jax, "jnp": jnp, "krylov": krylov, "np": np}
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs=names):
        runner.run(test, out=report.write)
    assert runner.failures == 0, report.getvalue()
    assert runner.tries == EXAMPLES[module_name], "doctest finds only some of the examples in this file"
