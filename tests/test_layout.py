"""Allowed imports between modules, the cost of importing the package, and any import order."""

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import mlx_redrafter
from mlx_redrafter.drafters import TRAINABLE

ROOT = Path(__file__).parent.parent
ROOMS = (
    "errors",
    "files",
    "demo",
    "machine",
    "engine",
    "target",
    "drafters",
    "loading",
    "planning",
    "measuring",
    "text",
    "decoding",
    "session",
    "training",
    "serving",
    "convert",
    "cli",
)
"""A file or folder of the package imports those before it only."""

PRIVATE = {
    "loading.checkpoints": {"_download"},
    "serving.scheduling.batches": {
        "_generation_batch",
        "_next_logprobs",
        "_next_tokens",
        "_prompt_batch",
    },
    "target.kv_cache": {"_idx", "_temporal_order", "_trim"},
}
"""The modules that use names of mlx-lm that begin with an underscore."""

Imports = dict[str, set[str]]


@cache
def read_imports() -> Imports:
    """Module of the package -> names of the modules that it imports, or of something in them.

    Includes imports in functions and those for types, but not the block that runs a module as a
    command.
    """
    found = Imports()
    for file in sorted([*(ROOT / "mlx_redrafter").rglob("*.py"), *(ROOT / "convert").glob("*.py")]):
        parts = file.relative_to(ROOT).with_suffix("").parts
        parts = parts if parts[0] == "mlx_redrafter" else ("mlx_redrafter", *parts)
        names = found[".".join(parts).removesuffix(".__init__")] = set()
        tree = ast.parse(file.read_text(encoding="utf-8"))
        tree.body = [
            node for node in tree.body if not ast.unparse(node).startswith("if __name__ == ")
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = [*parts[: len(parts) - node.level]] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                names |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def importers(folder: str, *modules: str) -> set[str]:
    """Modules of a folder that import one of these modules, or something in them."""
    below = tuple(f"{name}." for name in modules)
    inside = [module for module in read_imports() if f"{module}.".startswith(f"{folder}.")]
    assert inside, folder
    return {
        module
        for module in inside
        if any(f"{name}.".startswith(below) for name in read_imports()[module])
    }


def test_no_room_imports_a_later_one():
    package = "mlx_redrafter"
    for at, room in enumerate(ROOMS):
        later = [f"{package}.{name}" for name in ROOMS[at + 1 :]]
        found = importers(f"{package}.{room}", *later)
        assert found <= {f"{package}.convert.__main__"}, room
    assert not importers(f"{package}.serving", f"{package}.training", f"{package}.session")
    rooms = [f"{package}.serving.{name}" for name in ("scheduling", "formats", "http")]
    assert not importers(rooms[0], *rooms[1:])
    assert not importers(rooms[1], rooms[2])
    assert importers(rooms[1], rooms[0]) and importers(rooms[2], rooms[1]), "negative control"
    assert not importers(package, "benchmarks", "tests", "examples")
    assert not importers(f"{package}.planning", "mlx", "mlx_lm", "numpy")
    assert all(name.startswith(f"{package}.cli.") for name in importers(package, "argparse"))
    ranked = importers(package, f"{package}.machine.ranks")
    assert len(ranked) <= 10, ranked
    # Negative control: imports are found.
    assert f"{package}.engine.round" in importers(f"{package}.engine", f"{package}.engine.accept")


def test_only_two_rooms_know_kinds_of_drafters():
    package = "mlx_redrafter"
    kinds = [f"{package}.drafters.{name}" for name in TRAINABLE]
    known = importers(package, *kinds)
    assert {name.split(".")[1] for name in known} == {"drafters", "loading"}


def test_the_engine_knows_no_class_of_mlx_lm():
    names = set()
    for module, imported in read_imports().items():
        if module.startswith(("mlx_redrafter.engine.", "mlx_redrafter.planning.")):
            names |= {name for name in imported if name.startswith("mlx_lm.")}
    assert "mlx_lm.generate.generation_stream" in names
    assert not [name for name in names if name.rpartition(".")[2][0].isupper()]


def test_private_names_of_mlx_lm_are_used_in_known_places():
    """A new release of mlx-lm may change them."""
    private = set()
    for name in ("generate", "models.cache", "utils"):
        source = inspect.getsource(import_module(f"mlx_lm.{name}"))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute | ast.FunctionDef):
                private.add(node.attr if isinstance(node, ast.Attribute) else node.name)
    found = {}
    for file in sorted((ROOT / "mlx_redrafter").rglob("*.py")):
        module = ".".join(file.relative_to(ROOT / "mlx_redrafter").with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            is_other = isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self"
            if is_other and node.attr in private and re.match("_[a-z]", node.attr):
                found.setdefault(module, set()).add(node.attr)
    assert found == PRIVATE


def find_circle(imports: Imports) -> list[str]:
    """Modules each of which imports the next, from one module back to it.

    Empty if there is no circle.
    """
    done = set()

    def follow(path: list[str]) -> list[str]:
        for name in sorted(imports[path[-1]]):
            if name in path:
                return [*path[path.index(name) :], name]
            if name not in done and (found := follow([*path, name])):
                return found
        done.add(path[-1])
        return []

    return next(filter(None, (follow([module]) for module in imports if module not in done)), [])


def test_no_modules_import_each_other():
    """Neither directly nor through others, nor for types, nor in functions."""
    modules = read_imports()
    inside = Imports()
    for module, names in modules.items():
        files = {name if name in modules else name.rpartition(".")[0] for name in names}
        inside[module] = files & modules.keys()
    assert find_circle(inside) == []
    # Negative control.
    assert find_circle(inside | {"mlx_redrafter.engine.accept": {"mlx_redrafter.engine.round"}})


def python(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a fresh interpreter at the project's root, with `path` first in its import path."""
    places = [str(place) for place in (path, os.environ.get("PYTHONPATH")) if place]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_importing_the_package_imports_no_libraries():
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
    assert "mlx_redrafter" in alone
    assert not libraries & set(alone)
    # Negative control: using the package imports these.
    assert libraries <= set(used)


def test_progress_bars_of_commands_start_no_process():
    """If processes are spawned, as on macOS, tqdm's default lock starts one."""
    spawn = "import multiprocessing as mp; mp.set_start_method('spawn'); from tqdm import tqdm; "
    tracker = "from multiprocessing.resource_tracker import _resource_tracker"
    bar = f"list(tqdm([1])); {tracker}; print(_resource_tracker._pid)"
    command = """
import sys, types
from mlx_redrafter.cli.main import run_module
sys.modules["empty"] = types.SimpleNamespace(run=lambda: 0)
try:
    run_module("empty")
except SystemExit:
    """
    assert python("-c", f"{spawn}{command}{bar}").stdout == "None\n"
    assert python("-c", f"{spawn}{bar}").stdout != "None\n", "negative control"


def test_functions_stay_functions():
    """Importing the command of the same name, which would replace it, fails with advice."""
    script = """
for name in ("generate", "train"):
    try:
        __import__(f"mlx_redrafter.{name}")
    except ImportError as error:
        print(error)
from mlx_redrafter import generate, train
try:
    generate()
except TypeError as error:
    print(error)
print(train.__name__)"""
    result = python("-W", "error", "-c", script)
    advice, also, missing, name = result.stdout.splitlines()
    assert "from mlx_redrafter import generate" in advice, result.stderr
    assert "from mlx_redrafter import train" in also
    assert name == "train"
    assert missing.startswith("generate() missing 3 required positional arguments: 'model'")


WITHOUT_BACKEND = """import sys
class No:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx.core":
            raise ImportError("libmlx.so: cannot open shared object file")
sys.meta_path.insert(0, No())
"""


def test_the_api_without_a_backend_ends_in_one_line():
    result = python("-c", f"{WITHOUT_BACKEND}\nfrom mlx_redrafter import load_demo")
    *_, last = result.stderr.splitlines()
    assert result.returncode == 1
    assert last.startswith("ImportError: MLX cannot run here: libmlx.so")
    assert "pip install 'mlx[cpu]'" in last
    assert "During handling" not in result.stderr


def copy_sources(folder: Path) -> Path:
    """What an install needs, with the link to `convert` as in a clone."""
    copy = folder / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy)
    for name in ("mlx_redrafter", "convert"):
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=skipped)
    return copy


def build(kind: str, copy: Path) -> list[str]:
    """Builds a wheel of a kind; returns the names of its files."""
    script = f"from setuptools import build_meta; build_meta.build_{kind}({str(copy.parent)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=copy, check=True, capture_output=True)
    (wheel,) = copy.parent.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_an_install_without_a_clone_has_convert_and_all_data(tmp_path):
    """As pip makes it of a repository's URL."""
    names = build("wheel", copy_sources(tmp_path))
    files = [*(ROOT / "mlx_redrafter").rglob("*"), *(ROOT / "mlx_redrafter/convert").glob("*")]
    wanted = {
        file.relative_to(ROOT).as_posix()
        for file in files
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert wanted <= {*names}


def test_an_editable_install_is_a_path(tmp_path):
    """Type checkers and editors do not follow import hooks."""
    script = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    copy = copy_sources(tmp_path)
    subprocess.run([sys.executable, "-c", script], cwd=copy, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (file,) = [name for name in archive.namelist() if "dist-info" not in name]
        assert archive.read(file).decode().split() == [str(copy)]
    assert (copy / "mlx_redrafter" / "py.typed").is_file()
    assert (copy / "mlx_redrafter" / "convert" / "conversion.py").is_file()


def test_a_missing_backend_is_named(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_BACKEND)
    result = python("-m", "mlx_redrafter.generate", "--prompt", "the", path=tmp_path)
    assert result.returncode != 0
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert "[cpu]" in result.stderr
    assert "[cuda]" in result.stderr


def test_help_needs_no_extra():
    """Neither help nor wrong flags need an extra; a run without one names it."""
    script = """import sys
from contextlib import redirect_stdout
from io import StringIO

sys.modules |= dict.fromkeys(("uvicorn", "starlette", "pydantic", "prometheus_client"))
sys.modules |= dict.fromkeys(("llguidance",))
sys.modules |= dict.fromkeys(("matplotlib", "datasets", "jsonschema", "referencing", "torch"))
from mlx_redrafter.cli.main import COMMANDS, main, run_module
from benchmarks.command import BENCHMARKS as BENCHMARKS

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
    assert all(
        " is not installed, " in line and 'pip install -e ".[server]"' in line for line in missing
    )
