"""The house's floors: a file imports only from lower rows. Read from the sources; nothing is imported."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mlx_redrafter"

# Lowest first. A row is one or more steps: files on one step do not import each other, those on a later step may
# import those on an earlier one.
ROWS: dict[str, list[set[str]]] = {
    "values": [
        {"errors", "cards", "locks", "machine", "parent"},
        {"types", "stats", "plan", "stops", "files", "prompts"},
        {"costs"},
        {"drift"},
        {"account"},
    ],
    "pure": [{"beam", "tree", "accept"}],
    "parts": [
        {"comparing", "drafter", "kv", "planner", "positions", "sampling", "served", "wiring"},
        {"loss", "pilot", "shapes", "seams"},
        {"anatomy", "prognosis"},
        {"picture"},
    ],
    "adapters": [{"target"}, {"checkpoint", "patient"}, {"demo"}, {"pair"}],
    "processes": [
        {"rounds"},
        {"meter"},
        {"autopilot"},
        {"loop"},
        {"generation", "trial"},
        {"turns", "flags", "growth"},  # the server has flags of `generate`, too
        {"saved"},
        {"session"},
        {"serving"},
        {"training"},
        {"advice"},
        {"diagnosis"},
    ],
    "doors": [
        {"page"},
        {"command", "screen", "protocol"},
        {"checkup", "talk", "lines"},
        {"doors"},
        {"generate", "chat", "cli", "convert", "train", "doctor", "server", "race", "stdio"},
        {"__main__"},
    ],
}
FLOOR = {file: at for at, step in enumerate(step for row in ROWS.values() for step in row) for file in step}
PURE = ROWS["pure"][0]
BY_NAME = {"__init__", "cli", "doors"}
"""Files that may import a module by its name in a string, where no reader of sources sees it."""


def sources() -> dict[str, str]:
    """The sources of the package by file, without suffix; a folder's files go under the folder's name."""
    found: dict[str, str] = {}
    # `convert` is a link to a folder at the top.
    for folder, _, files in os.walk(PACKAGE, followlinks=True):
        for file in sorted(files):
            path = Path(folder, file)
            if path.suffix == ".py":
                name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
                found[name] = found.get(name, "") + "\n" + path.read_text(encoding="utf-8")
    return found


def imports(source: str, *, in_folder: bool = False) -> Iterator[str]:
    """Every module that a source names in an import, wherever it stands; this package's own begin with a dot.

    Files in a folder of the package may import each other: those imports are left out.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (own(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not (in_folder and node.level == 1):
            module = own("." + (node.module or "") if node.level else node.module or "")
            # `from . import kv` and `from mlx import core` name modules after `import`.
            yield from (f"{module}{alias.name}" if module == "." else module for alias in node.names)
            if module == "mlx":
                yield from (f"mlx.{alias.name}" for alias in node.names)


def own(name: str) -> str:
    return name.replace("mlx_redrafter", "", 1) or "." if name.split(".")[0] == "mlx_redrafter" else name


def lower_imports(file: str, source: str) -> list[str]:
    """What `file` imports of this package although it may not."""
    in_folder = (PACKAGE / file).is_dir()
    files = {name[1:].split(".")[0] for name in imports(source, in_folder=in_folder) if name.startswith(".")}
    # Names in the package's own namespace, such as __version__, are no files.
    files = {name for name in files if name in FLOOR or (PACKAGE / f"{name}.py").exists()}
    return sorted(name for name in files if name not in FLOOR or FLOOR[name] >= FLOOR[file])


def impure_imports(source: str) -> list[str]:
    """What a pure file imports although it is neither Python's, MLX's arrays nor the types."""
    allowed = {"mlx.core", ".types"}
    return sorted(
        name for name in imports(source) if name not in allowed and name.split(".")[0] not in sys.stdlib_module_names
    )


def imported_by_name(source: str) -> bool:
    """Whether a source imports modules by strings."""
    return bool({"importlib", "importlib.util", "runpy"} & set(imports(source))) or "__import__" in source


FILES = sorted(set(sources()) - {"__init__"})


def test_every_file_stands_in_a_row_and_every_row_exists() -> None:
    assert set(FILES) == set(FLOOR)


@pytest.mark.parametrize("file", FILES)
def test_a_file_imports_only_from_lower_rows(file: str) -> None:
    assert lower_imports(file, sources()[file]) == []


@pytest.mark.parametrize("file", sorted(PURE))
def test_a_pure_file_imports_arrays_types_and_python_only(file: str) -> None:
    assert impure_imports(sources()[file]) == []


def test_the_package_itself_imports_none_of_its_files() -> None:
    tree = ast.parse(sources()["__init__"])
    run = [node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    assert [name for node in run for name in imports(ast.unparse(node)) if name.startswith(".")] == []


@pytest.mark.parametrize("file", sorted(sources()))
def test_nothing_imports_the_door_that_shares_a_name_with_a_function(file: str) -> None:
    assert ".generate" not in set(imports(sources()[file]))


@pytest.mark.parametrize("file", sorted(sources()))
def test_the_package_imports_neither_benchmarks_nor_tests(file: str) -> None:
    assert not {"benchmarks", "tests"} & {name.split(".")[0] for name in imports(sources()[file])}


@pytest.mark.parametrize("file", sorted(set(sources()) - BY_NAME))
def test_nothing_is_imported_behind_the_readers_back(file: str) -> None:
    assert not imported_by_name(sources()[file])


@pytest.mark.parametrize(
    ("file", "source", "found"),
    [
        ("beam", "from .tree import grow", ["tree"]),
        ("kv", "def late():\n    from . import seams", ["seams"]),
        ("types", "import mlx_redrafter.loop", ["loop"]),
        ("loop", "from mlx_redrafter.generation import generate", ["generation"]),
        ("target", "from . import kv, rounds\nfrom .checkpoint import load", ["checkpoint", "rounds"]),
        (
            "demo",
            "from . import loop\nfrom .rounds import a\nfrom ..training import b\nfrom .. import beam",
            ["training"],
        ),
        ("generation", "from . import __version__\nfrom .loop import decode\nimport mlx_lm.generate", []),
    ],
)
def test_an_import_from_a_higher_row_is_found_however_it_is_written(file: str, source: str, found: list[str]) -> None:
    # Negative controls, and one source without fault.
    assert lower_imports(file, source) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import numpy as np\nimport json", ["numpy"]),
        ("from mlx import nn\nimport mlx.core", ["mlx", "mlx.nn"]),
        ("import mlx.nn as nn\nfrom .errors import RedrafterError", [".errors", "mlx.nn"]),
        ("from . import kv\nfrom .types import Tree", [".kv"]),
    ],
)
def test_an_impure_import_is_found_however_it_is_written(source: str, found: list[str]) -> None:
    assert impure_imports(source) == found


def test_an_import_by_string_is_found() -> None:
    assert imported_by_name("from importlib import import_module") and imported_by_name("__import__('os')")
