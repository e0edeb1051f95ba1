"""Allowed imports between modules, the cost of importing the package, and any import order."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import mlx_redrafter
from mlx_redrafter.drafters import TRAINABLE

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mlx_redrafter"
COMMANDS = {"cli", "serving", "training", "convert"}
ABOVE = {"planning", "session", "generate", "options", "checkpoints", "arguments", *COMMANDS}


@cache
def imports(folder: str) -> frozenset[tuple[str, str]]:
    """(file, imported module) pairs of a package folder, including imports in functions but not those for types."""
    files, found = sorted((PACKAGE / folder).glob("*.py")), set[tuple[str, str]]()
    assert files, folder
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        tree = ast.parse(file.read_text(encoding="utf-8"))
        tree.body = [node for node in tree.body if "TYPE_CHECKING" not in ast.unparse(node).split("\n")[0]]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {(file.name, alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = [*parts[: len(parts) - node.level]] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                found |= {(file.name, f"{module}.{alias.name}") for alias in node.names}
    return frozenset(found)


def importers(folder: str, *modules: str) -> set[str]:
    """Files of a folder that import one of these modules, or something in them."""
    below = tuple(f"{name}." for name in modules)
    return {file for file, module in imports(folder) if f"{module}.".startswith(below)}


def test_no_module_imports_a_layer_above() -> None:
    kinds = [f"mlx_redrafter.drafters.{name}" for name in TRAINABLE]
    above = [f"mlx_redrafter.{name}" for name in ABOVE]
    assert not importers("engine", *above) and not importers("drafters", *above)
    for folder in ("cli", "serving", "training"):
        assert not importers(folder, *(f"mlx_redrafter.{other}" for other in COMMANDS - {folder})), folder
    for folder in {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}:
        assert not importers(folder, "benchmarks", "mlx_redrafter.benchmarks", "tests"), folder
        assert folder == "drafters" or not importers(folder, *kinds), folder
    # Two measure, one identifies a model by its tensors, one asks for the device.
    assert importers("planning", "mlx", "mlx_lm", "numpy") == {"measure.py", "store.py", "sizing.py", "machine.py"}
    # Negative control: imports are found.
    assert "arctic_lstm.py" in importers("drafters", *kinds)
    assert "round.py" in importers("engine", "mlx_redrafter.engine.accept") & importers("engine", "mlx.core")


def python(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a fresh interpreter at the project's root, with `path` first in its import path."""
    places = [str(place) for place in (path, os.environ.get("PYTHONPATH")) if place]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )


def test_importing_the_package_imports_no_libraries() -> None:
    script = """import json, sys
import mlx_redrafter
def show():
    print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))
show()
for name in mlx_redrafter.__all__:
    assert callable(getattr(mlx_redrafter, name)), name
show()"""
    result = python("-c", script)
    assert result.returncode == 0, result.stderr
    alone, used = (json.loads(line) for line in result.stdout.splitlines())
    libraries = {"transformers", "mlx_lm", "mlx", "numpy"}
    with pytest.raises(AttributeError, match="module 'mlx_redrafter' has no attribute 'generat'"):
        mlx_redrafter.generat  # noqa: B018
    assert "mlx_redrafter" in alone and not libraries & set(alone)
    # Negative control: using the package imports these.
    assert libraries <= set(used)


def test_progress_bars_start_no_process() -> None:
    """If processes are spawned, as on macOS, tqdm's default lock starts one. An app's own lock is kept."""
    spawn = "import multiprocessing as mp; mp.set_start_method('spawn'); from tqdm import tqdm; "
    bar = "list(tqdm([1])); from multiprocessing.resource_tracker import _resource_tracker as t; print(t._pid)"
    assert python("-c", f"{spawn}import mlx_redrafter; {bar}").stdout == "None\n"
    assert python("-c", f"{spawn}{bar}").stdout != "None\n", "negative control"
    keep = "lock = mp.RLock(); tqdm.set_lock(lock); import mlx_redrafter; print(tqdm.get_lock() is lock)"
    assert python("-c", f"{spawn}{keep}").stdout == "True\n"


def test_bars_of_several_processes_have_a_lock(tmp_path: Path) -> None:
    script = """import multiprocessing as mp
import mlx_redrafter
from tqdm.contrib.concurrent import process_map

if __name__ == "__main__":
    mp.set_start_method("spawn")
    print(process_map(abs, [-1, 2], max_workers=2))
"""
    (tmp_path / "script.py").write_text(script)
    done = python(str(tmp_path / "script.py"), path=ROOT)
    assert done.stdout == "[1, 2]\n", done.stderr


def test_generate_survives_any_order_of_imports() -> None:
    """`generate` is both a function and a module. The package is imported anew in each order."""
    script = """import sys
for order in (
    "from mlx_redrafter import generate; import mlx_redrafter.generate",
    "import mlx_redrafter.generate; from mlx_redrafter import generate",
    "import mlx_redrafter.session; import mlx_redrafter.generate; from mlx_redrafter import generate",
):
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_redrafter"]:
        del sys.modules[name]
    names = {}
    exec(f"{order}; import mlx_redrafter; assert mlx_redrafter.generate is generate", names)
    try:
        names["generate"]()
    except TypeError as error:
        print(error)"""
    result = python("-W", "error", "-c", script)
    missing = "generate() missing 3 required positional arguments: 'model', 'tokenizer', and 'prompt'"
    assert result.stdout.splitlines() == [missing] * 3, result.stderr


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (["mlx_redrafter.generate"], "ModuleNotFoundError(\"No module named 'mlx.core'\")"),
        (["mlx_redrafter", "generate"], "ImportError('libmlx.so: cannot open shared object file')"),
    ],
)
def test_a_missing_backend_is_named(command: list[str], error: str, tmp_path: Path) -> None:
    without_backend = f"""import sys

class NoBackend:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx.core":
            raise {error}

sys.meta_path.insert(0, NoBackend())
"""
    (tmp_path / "sitecustomize.py").write_text(without_backend)
    help_text = python("-m", *command, "--help")
    assert (help_text.returncode, help_text.stderr) == (0, "") and "--beam-width" in help_text.stdout
    result = python("-m", *command, "--prompt", "the", path=tmp_path)
    assert result.returncode != 0 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert "[cpu]" in result.stderr and "[cuda]" in result.stderr


def test_help_needs_no_extra() -> None:
    """Neither help nor wrong flags need an extra; a run without one names it."""
    script = """import sys
from contextlib import redirect_stdout
from io import StringIO

sys.modules |= dict.fromkeys(("uvicorn", "starlette", "pydantic", "prometheus_client", "llguidance"))
sys.modules |= dict.fromkeys(("matplotlib", "datasets", "jsonschema", "referencing", "torch"))
from mlx_redrafter.cli.main import COMMANDS, main, run_module
from benchmarks.command import COMMANDS as BENCHMARKS

def run(*command):
    with redirect_stdout(StringIO()) as out:
        sys.argv = ["", *command[1:]]
        try:
            run_module("benchmarks.command") if command[0] == "benchmarks" else main(command[0])
        except SystemExit as ended:
            return ended.code or 0, out.getvalue()

for command in [*((name,) for name in COMMANDS), *(("benchmarks", name) for name in BENCHMARKS)]:
    status, text = run(*command, "--help")
    assert status == 0 and text.startswith("usage: "), command
for command in (("server", "--max-tokens", "0"), ("server",), ("race",)):
    assert run(*command) == (1, ""), command"""
    result = python("-c", script)
    assert result.returncode == 0, result.stderr
    flag, *missing = result.stderr.splitlines()
    assert flag == "error: max_tokens must be -1 (no limit) or at least 1, got 0"
    assert len(missing) == 2
    assert all(" is not installed, " in line and 'pip install "mlx_redrafter[server]"' in line for line in missing)
