"""Where `convert` writes: what is replaced, what never is, and what is left when writing fails."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import CONFIG, INDEX, WEIGHTS, apple, came_through, command, make, same, tensors, trainer

from mlx_redrafter.checkpoints import load_drafter, save_drafter
from mlx_redrafter.convert import conversion, writing
from mlx_redrafter.convert.conversion import convert
from mlx_redrafter.errors import RedrafterError

SHARD = "model-00001-of-00002.safetensors"


def contents(directory: Path) -> dict[str, bytes | str]:
    """Every file and link below a directory."""
    return {
        str(path.relative_to(directory)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def refused(pattern: str, root: Path, *arguments: str | Path) -> None:
    """Asserts exit code 1, one line and not a byte changed below `root`."""
    was = contents(root)
    status, out, said = command(*arguments)
    assert (status, out) == (1, "") and re.fullmatch(f"error: {pattern}\n", said), said
    assert contents(root) == was


def filled(directory: Path, name: str) -> Path:
    """A drafter's directory with one more file."""
    save_drafter(directory, make(seed=1))
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_text("mine")
    return directory


def foreign(directory: Path) -> Path:
    directory.mkdir()
    (directory / "thesis.tex").write_text("mine")
    return directory


def file(directory: Path) -> Path:
    directory.write_text("mine")
    return directory


def link(directory: Path) -> Path:
    save_drafter(directory.with_name("real"), make(seed=1))
    directory.symlink_to("real")
    return directory


def dangling(directory: Path) -> Path:
    directory.symlink_to("nowhere")
    return directory


def llama(directory: Path) -> Path:
    return apple(directory, tensors(make()), model_type="llama")


def damaged(directory: Path) -> Path:
    directory.mkdir()
    (directory / CONFIG).write_text("{")
    return directory


def training(directory: Path) -> Path:
    (directory / "training").mkdir(parents=True)
    (directory / "training" / "checkpoint.safetensors").write_text("mine")
    return directory


KEPT: dict[str, tuple[Callable[[Path], Path], str]] = {
    "other files": (foreign, "it holds no drafter, but thesis.tex"),
    "a drafter and another file": (lambda place: filled(place, "optimizer.pt"), "it holds more .*: optimizer.pt"),
    "a drafter and a folder": (lambda place: filled(place, "notes/a.txt"), "it holds more than a drafter: notes"),
    "a drafter and other weights": (
        lambda place: filled(place, "lora.safetensors"),
        "it holds more than a drafter: lora.safetensors",
    ),
    "a drafter and weights like its own": (
        lambda place: filled(place, "model-old.safetensors"),
        "it holds more than a drafter: model-old.safetensors",
    ),
    "a drafter and its training": (
        lambda place: filled(place, "training/checkpoint.safetensors"),
        "it holds a training run, finished or not: training",
    ),
    "a training run without a drafter": (training, "it holds a training run, finished or not: training"),
    "a base model": (llama, "it holds no drafter, but config.json"),
    "a trainer's checkpoint": (lambda place: trainer(place, tensors(make())), "it holds no drafter, but .*"),
    "a file": (file, "it is no directory"),
    "a link": (link, "it is a symbolic link"),
    "a link to nowhere": (dangling, "it is a symbolic link"),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_is_no_drafter_is_not_replaced_even_by_force(case: str, tmp_path: Path) -> None:
    write, reason = KEPT[case]
    source, place = apple(tmp_path / "in", tensors(make())), write(tmp_path / "out")
    arguments = ("--hf-path", source, "--mlx-path", place)
    refused(f"{place} is not replaced, even with --force: {reason}; .*", tmp_path, *arguments, "--force")
    refused(f"{place} exists already: .*", tmp_path, *arguments)


@pytest.mark.parametrize("place", [".", "..", "/", "../in", "../cwd", "/proc", "../mine/inner/.."])
def test_no_directory_that_is_in_use_is_replaced(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = apple(filled(tmp_path / "in", WEIGHTS) / "deep", tensors(make()))
    save_drafter(tmp_path / "cwd", make())
    (tmp_path / "mine" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "cwd")
    refused(
        f"{re.escape(place)} is not replaced, even with --force: .*",
        tmp_path,
        *("--hf-path", source, "--mlx-path", place, "--force"),
    )


@pytest.mark.parametrize("name", ["README.md", "training.json", INDEX, SHARD, None])
def test_a_drafter_and_an_empty_directory_are_replaced_by_force(name: str | None, tmp_path: Path) -> None:
    """Negative control."""
    place = tmp_path / "out"
    filled(place, name) if name else place.mkdir()
    assert came_through(convert(apple(tmp_path / "in", tensors(make())), place, force=True), make())
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


def test_what_is_refused_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_redrafter.convert.conversion.find_source", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(RedrafterError, match="is not replaced, even with --force"):
        convert(tmp_path / "in", foreign(tmp_path / "out"), force=True)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_rename_that_fails_leaves_what_was_there(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, place = apple(tmp_path / "in", tensors(make())), tmp_path / "out"
    save_drafter(place, make(seed=1))
    real, calls = os.replace, 0

    def replace(one: Any, other: Any) -> None:
        nonlocal calls
        if tmp_path in Path(other).parents:
            calls += 1
            if calls == failing:
                raise OSError(errno.EXDEV, "Invalid cross-device link")
        real(one, other)

    monkeypatch.setattr(os, "replace", replace)
    arguments = ("--hf-path", source, "--mlx-path", place, "--force")
    refused(f"cannot write {place}: Invalid cross-device link", tmp_path, *arguments)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}
    assert same(tensors(load_drafter(place)), tensors(make(seed=1)))
    assert command(*arguments)[0] == 0, "negative control: nothing else stood in the way"
    assert same(tensors(load_drafter(place)), tensors(make()))


@pytest.mark.parametrize("failing", [2, 3])
def test_what_cannot_be_put_back_is_named(failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, place = apple(tmp_path / "in", tensors(make())), tmp_path / "out"
    save_drafter(place, make(seed=1))
    real, calls = os.replace, 0

    def replace(one: Any, other: Any) -> None:
        nonlocal calls
        calls += tmp_path in Path(other).parents
        if failing <= calls <= 3:
            raise OSError(errno.EIO, "Input/output error")
        real(one, other)
        if calls == 1 and failing == 3:
            foreign(place)  # what stands in the way of the result, and of what was there

    monkeypatch.setattr(os, "replace", replace)
    status, out, said = command("--hf-path", source, "--mlx-path", place, "--force")
    assert (status, out) == (1, "")
    match = re.fullmatch(rf"error: cannot write {place}: .*; what was there lies in (\S+)\n", said)
    assert match, said
    assert same(tensors(load_drafter(match[1])), tensors(make(seed=1)))
    assert Path(match[1]).parent.name.startswith(".convert-replaced-")


APPEARING: dict[str, tuple[Callable[[Path], Path], str]] = {
    **{case: KEPT[case] for case in ("other files", "a file", "a link", "a drafter and its training")},
    "a damaged config": (damaged, "OUT/config.json is not JSON: .*"),
    "the source": (lambda place: place.with_name("in").rename(place), "what is converted is in it"),
}


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("case", APPEARING)
def test_what_appears_meanwhile_is_not_replaced(
    case: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, reason = APPEARING[case]
    source, place = apple(tmp_path / "in", tensors(make())), tmp_path / "out"
    if there:
        save_drafter(place, make(seed=1))
    real = conversion.measured_result
    was: dict[str, bytes | str] = {}

    def appearing(stage: Path, *rest: Any) -> Any:
        measured = real(stage, *rest)
        if there:
            place.rename(tmp_path / "was")
        write(place)
        was.update({name: held for name, held in contents(tmp_path).items() if not name.startswith(".convert-")})
        return measured

    monkeypatch.setattr(conversion, "measured_result", appearing)
    status, out, said = command("--hf-path", source, "--mlx-path", place, "--force")
    pattern = f"error: {place} has appeared meanwhile, and is not replaced: {reason.replace('OUT', str(place))}\n"
    assert (status, out) == (1, "") and re.fullmatch(pattern, said), said
    assert contents(tmp_path) == was


def test_a_drafter_that_appears_meanwhile_is_replaced_by_force_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    source, place = apple(tmp_path / "in", tensors(make())), tmp_path / "out"
    real = conversion.measured_result

    def appearing(stage: Path, *rest: Any) -> Any:
        save_drafter(place, make(seed=1))
        return real(stage, *rest)

    monkeypatch.setattr(conversion, "measured_result", appearing)
    with pytest.raises(RedrafterError, match=f"^{place} has appeared meanwhile: give another"):
        convert(source, place)
    assert same(tensors(load_drafter(place)), tensors(make(seed=1)))
    assert came_through(convert(source, place, force=True), make())


def in_place(place: Path) -> Path:
    return place


def by_file(place: Path) -> Path:
    return place / WEIGHTS


def by_link(place: Path) -> Path:
    place.with_name("link").symlink_to(place)
    return place.with_name("link")


def linked_weights(place: Path) -> Path:
    source = apple(place.with_name("in"), {})
    (source / WEIGHTS).unlink()
    (source / WEIGHTS).symlink_to(place / WEIGHTS)
    return source


def link_in_place(place: Path) -> Path:
    (place / WEIGHTS).rename(place.with_name("weights"))
    (place / WEIGHTS).symlink_to("../weights")
    return place / WEIGHTS


@pytest.mark.parametrize("given", [in_place, by_file, by_link, linked_weights, link_in_place])
def test_what_is_converted_is_not_replaced_by_its_result(given: Callable[[Path], Path], tmp_path: Path) -> None:
    place = apple(tmp_path / "out", tensors(make()))
    refused(
        f"{place} is not replaced, even with --force: what is converted is in it; .*",
        tmp_path,
        *("--hf-path", given(place), "--mlx-path", place, "--force"),
    )


@pytest.mark.parametrize("at", [0, 3])
def test_a_full_disk_is_one_line_and_leaves_nothing(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open

    class Full:
        def __init__(self, file: Any) -> None:
            self.file, self.writes = file, 0

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def seek(self, place: int) -> None:
            self.file.seek(place)

        def write(self, content: bytes) -> None:
            if self.writes == at:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.writes += 1
            self.file.write(content)

    def opened(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        file = real(path, mode, *args, **options)
        return Full(file) if mode == "wb" and path.suffix == ".safetensors" else file

    source = apple(tmp_path / "in", tensors(make()))
    monkeypatch.setattr(writing.Path, "open", opened)
    refused(
        f"cannot write {tmp_path / 'out'}: No space left on device",
        tmp_path,
        *("--hf-path", source, "--mlx-path", tmp_path / "out"),
    )
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


@pytest.mark.parametrize("name", [b"nonutf\xff", b"two\nlines", b"a\x00b"])
@pytest.mark.parametrize("flag", ["--hf-path", "--mlx-path"])
def test_a_name_that_cannot_be_printed_is_refused(name: bytes, flag: str, tmp_path: Path) -> None:
    source = apple(tmp_path / "in", tensors(make()))
    paths = {"--hf-path": str(source), "--mlx-path": str(tmp_path / "out"), flag: f"{tmp_path}/{os.fsdecode(name)}"}
    arguments = [part for pair in paths.items() for part in pair]
    refused("expected a path of printable characters, got .*", tmp_path, *arguments)


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    assert came_through(convert(apple(tmp_path / "in", tensors(make())), tmp_path / (255 * "x")), make())


def test_a_relative_place_is_where_it_was_when_the_work_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = apple(tmp_path / "in", tensors(make()))
    monkeypatch.chdir(tmp_path)
    done = convert(source, "a/../out")
    assert came_through(done._replace(path=tmp_path / "out"), make())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {CONFIG, WEIGHTS, "README.md"}
