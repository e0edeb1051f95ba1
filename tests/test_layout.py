"""Which module may import which, what importing the package costs, and that it works in every order."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mlx_redrafter"
COMMANDS = {"cli", "serving", "training", "convert"}

WITHOUT_BACKEND = """
import sys

class NoBackend:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx.core":
            raise {error}

sys.meta_path.insert(0, NoBackend())
"""


def imports(folder: str) -> Iterator[tuple[Path, str]]:
    """(file, module that it imports, in full) in a folder of the package, imports in functions too, but for types."""
    files = sorted((PACKAGE / folder).glob("*.py"))
    assert files, folder
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        tree = ast.parse(file.read_text(encoding="utf-8"))
        tree.body = [node for node in tree.body if "TYPE_CHECKING" not in ast.unparse(node).split("\n")[0]]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from ((file, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = [*parts[: len(parts) - node.level]] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                yield from ((file, f"{module}.{alias.name}") for alias in node.names)


def check_imports(folders: set[str], forbidden: set[str]) -> None:
    """Asserts that no file of these folders imports one of those modules."""
    for folder in folders:
        for file, module in imports(folder):
            found = [name for name in forbidden if f"{module}.".startswith(f"{name}.")]
            assert not found, f"{file.relative_to(ROOT)} imports {module}"


def test_imports_are_found() -> None:
    found = {(file.name, module) for file, module in imports("engine")}
    assert ("round.py", "mlx_redrafter.engine.beam_search") in found and ("round.py", "mlx.core") in found
    # Negative control.
    with pytest.raises(AssertionError, match=r"mlx_redrafter/cli/.*.py imports mlx.core"):
        check_imports({"cli"}, {"mlx.core"})


def test_engine_and_drafters_import_no_layer_above_them() -> None:
    above = {"planning", "session", "generate", "options", "checkpoints", *COMMANDS}
    check_imports({"engine", "drafters"}, {f"mlx_redrafter.{name}" for name in above})


def test_planning_touches_arrays_only_where_it_measures() -> None:
    libraries = ("mlx.", "mlx_lm.", "numpy.")
    touching = {file.name for file, module in imports("planning") if f"{module}.".startswith(libraries)}
    assert touching == {"costs.py", "sizing.py", "machine.py"}  # the last one asks for the device


def test_commands_do_not_import_each_other() -> None:
    for folder in ("cli", "serving", "training"):
        check_imports({folder}, {f"mlx_redrafter.{other}" for other in COMMANDS - {folder}})


def test_nothing_in_the_package_imports_benchmarks() -> None:
    folders = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    check_imports(folders, {"benchmarks", "mlx_redrafter.benchmarks", "tests"})


def python(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter at the project's root; `path` goes before every other place to import from."""
    places = [str(place) for place in (path, os.environ.get("PYTHONPATH")) if place]
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_importing_the_package_imports_no_library() -> None:
    script = """import json, sys
import mlx_redrafter
def show():
    print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))
show()
for name in mlx_redrafter.__all__:
    assert callable(getattr(mlx_redrafter, name)), name
show()
try:
    mlx_redrafter.generat
except AttributeError as error:
    print(json.dumps(str(error)))"""
    result = python("-c", script)
    assert result.returncode == 0, result.stderr
    alone, used, error = (json.loads(line) for line in result.stdout.splitlines())
    libraries = {"transformers", "mlx_lm", "mlx", "numpy"}
    assert "mlx_redrafter" in alone and not libraries & set(alone)
    # Negative control: these are what it would have imported.
    assert libraries <= set(used)
    assert error == "module 'mlx_redrafter' has no attribute 'generat'"


def test_generate_survives_any_order_of_imports() -> None:
    # Called without arguments: Python's own complaint names the function that was really reached.
    script = """import sys
for order in (
    "from mlx_redrafter import generate; import mlx_redrafter.generate",
    "import mlx_redrafter.generate; from mlx_redrafter import generate",
    "import mlx_redrafter.session; import mlx_redrafter.generate",
    "import mlx_redrafter",
):
    for name in [name for name in sys.modules if name.split(".")[0] == "mlx_redrafter"]:
        del sys.modules[name]
    exec(order)
    import mlx_redrafter
    from mlx_redrafter import generate
    from mlx_redrafter import generate as generation
    assert callable(generate), order
    for function in (generate, mlx_redrafter.generate):
        try:
            function()
        except TypeError as error:
            print("generate() missing 3 required positional arguments" in str(error), order)"""
    result = python("-W", "error", "-c", script)
    said = result.stdout.splitlines()
    assert (len(said), result.returncode) == (8, 0), result.stderr
    assert all(line.startswith("True ") for line in said), result.stdout


@pytest.mark.parametrize("command", [["mlx_redrafter.generate", "--help"], ["mlx_redrafter", "generate", "--help"]])
def test_asking_for_help_prints_no_warning(command: list[str]) -> None:
    result = python("-m", *command)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: ") and "--beam-width" in result.stdout


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (["mlx_redrafter.generate"], "ModuleNotFoundError(\"No module named 'mlx.core'\")"),
        (["mlx_redrafter", "generate"], "ImportError('libmlx.so: cannot open shared object file')"),
    ],
)
def test_a_missing_backend_is_named(command: list[str], error: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_BACKEND.format(error=error))
    result = python("-m", *command, "--prompt", "the", path=tmp_path)
    assert result.returncode != 0 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert "[cpu]" in result.stderr and "[cuda]" in result.stderr
