"""What is built and installed is what lies in the tree."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import krylov

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {"krylov": "krylov", "operators": "krylov/operators"}


def installed_paths(pattern: str) -> set[str]:
    """Where the files of both folders that match a pattern are installed."""
    return {
        f"{target}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for path in (ROOT / folder).rglob(pattern)
    }


def test_every_package_is_listed() -> None:
    listed = set(PYPROJECT["tool"]["setuptools"]["packages"])
    there = {path.rpartition("/")[0].replace("/", ".") for path in installed_paths("*.py")}
    assert listed == there, "correct tool.setuptools.packages in pyproject.toml"


def test_version_is_the_projects() -> None:
    assert krylov.__version__ == PYPROJECT["project"]["version"]


@pytest.mark.parametrize("path", sorted((ROOT / "operators").rglob("*.py")), ids=lambda path: path.stem)
def test_operators_know_nothing_of_solvers(path: Path) -> None:
    depth = len(path.relative_to(ROOT / "operators").parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= depth, f"line {node.lineno} imports from outside krylov.operators"
            names = [node.module or ""]
        else:
            continue
        assert not any(name.split(".")[0] == "krylov" for name in names), f"line {node.lineno} imports krylov"


@pytest.mark.slow
@pytest.mark.x64_only
def test_wheel_installs_into_an_empty_environment(tmp_path: Path) -> None:
    source, wheels, elsewhere = tmp_path / "source", tmp_path / "wheels", tmp_path / "elsewhere"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in "pyproject.toml", "README.md", "LICENSE":
        shutil.copy(ROOT / name, source)
    pip = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, *pip, "wheel", "--no-deps", "--wheel-dir", wheels, source], check=True)
    (wheel,) = wheels.iterdir()

    contents = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert contents == installed_paths("*.py") | installed_paths("py.typed")
    assert {"krylov/py.typed", "krylov/operators/py.typed"} <= contents

    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    subprocess.run([python, *pip, "install", wheel], check=True)
    elsewhere.mkdir()
    (elsewhere / "operators.py").write_text("MINE = True\n")
    check = (
        "import krylov, krylov.operators, operators; assert operators.MINE; print(krylov.__version__, krylov.__file__)"
    )
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run([python, "-c", check], cwd=elsewhere, env=clean, check=True, capture_output=True, text=True)
    version, file = result.stdout.split()
    assert version == PYPROJECT["project"]["version"]
    assert Path(file).is_relative_to(environment)
