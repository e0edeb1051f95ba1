"""`convert` reads every known form of a drafter: the same tensors come out of all of them, to the bit."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import (
    FORMS,
    VARIANTS,
    WEIGHTS,
    apple,
    base,
    came_through,
    make,
    modelopt,
    prefixed,
    ranks,
    same,
    shard,
    single,
    tensors,
    trainer,
    trap,
)

from mlx_redrafter.convert.conversion import convert


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("form", FORMS)
def test_a_drafter_in_any_form_comes_through_to_the_bit(form: str, variant: str, tmp_path: Path) -> None:
    drafter = make(variant)
    done = convert(FORMS[form](tmp_path / "in", tensors(drafter)), tmp_path / "out")
    assert came_through(done, drafter)
    assert (done.difference.largest, done.difference.same) == (0, 1)
    # Negative control: another drafter of the same sizes is not this one.
    assert not came_through(done, make(variant, seed=1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_tensors_keep_the_dtype_they_are_stored_in(dtype: str, tmp_path: Path) -> None:
    drafter = make("input projection")
    drafter.set_dtype(getattr(mx, dtype))
    assert came_through(convert(ranks(tmp_path / "in", tensors(drafter), 2), tmp_path / "out"), drafter)


@pytest.mark.parametrize(("size", "padding"), [(1, 1), (2, 2), (3, 2), (4, 1), (4, 63)])
def test_the_padding_of_a_vocabulary_that_ranks_share_is_cut_off(size: int, padding: int, tmp_path: Path) -> None:
    drafter = make(vocab=60 * size - padding, hidden=24)
    done = convert(ranks(tmp_path / "in", tensors(drafter), size, padding=padding), tmp_path / "out")
    assert came_through(done, drafter)
    assert [note for note in done.notes if f"the last {padding} rows" in note]


def test_more_than_ten_ranks_are_put_together_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    drafter = make("input projection")
    assert came_through(convert(ranks(tmp_path / "in", tensors(drafter), 12), tmp_path / "out"), drafter)


def test_the_projection_without_a_number_and_the_norm_that_nothing_uses_are_understood(tmp_path: Path) -> None:
    drafter = make("input projection")
    arrays = {name.replace("input_proj.", "input_projs."): array for name, array in tensors(drafter).items()}
    done = convert(apple(tmp_path / "in", arrays | {"emb_norm.weight": mx.ones((24,))}), tmp_path / "out")
    assert came_through(done, drafter)
    assert done.notes == ("emb_norm.weight is left out: no forward pass uses it",)
    # Negative control: nothing is said where nothing is left out.
    assert convert(apple(tmp_path / "plain", tensors(drafter)), tmp_path / "out2").notes == ()


def test_a_trainers_own_pickles_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it fails
    opened: list[Path] = []
    real = Path.open

    def spy(path: Path, *args: Any, **options: Any) -> Any:
        opened.append(path)
        return real(path, *args, **options)

    directory = trainer(tmp_path / "in", tensors(make()))
    monkeypatch.setattr(Path, "open", spy)
    assert came_through(convert(directory, tmp_path / "out"), make())
    assert directory / WEIGHTS in opened, "negative control: opening shows"
    assert not {"optimizer.pt", "training_args.bin", "scheduler.pt", "rng_state.pth"} & {path.name for path in opened}
    assert not list(directory.glob("*.executed"))


def test_the_trap_would_be_sprung_by_unpickling(tmp_path: Path) -> None:
    mark = trap(tmp_path / "trap.bin")
    assert not mark.exists()
    pickle.loads((tmp_path / "trap.bin").read_bytes())
    assert mark.exists()


def test_safetensors_are_read_before_pickles(tmp_path: Path) -> None:
    directory = apple(tmp_path / "in", tensors(make()))
    mark = trap(directory / "pytorch_model.bin")
    assert came_through(convert(directory, tmp_path / "out"), make())
    assert not mark.exists()


def test_the_tensors_are_believed_and_the_config_is_contradicted_aloud(tmp_path: Path) -> None:
    done = convert(modelopt(tmp_path / "in", tensors(make())), tmp_path / "out")
    assert came_through(done, make())
    assert "config.json says num_draft_layers 7, its tensors say 1; the tensors are believed" in done.notes
    assert json.loads((done.path / "config.json").read_text())["num_draft_layers"] == 1


SAID: tuple[Any, ...] = (-1, None, 0, 10**30, "many", True, 1.5, [1], {"a": 1}, "line\nbreak")


@pytest.mark.parametrize("said", SAID, ids=repr)
@pytest.mark.parametrize("form", ["Apple's directory", "TensorRT-LLM, 2 ranks"])
def test_no_size_in_a_config_changes_what_comes_out(form: str, said: Any, tmp_path: Path) -> None:
    directory = FORMS[form](tmp_path / "in", tensors(make()))
    config = json.loads((directory / "config.json").read_text())
    sizes = {"hidden_size", "vocab_size", "exit_dim", "num_draft_layers", "redrafter_num_layers"}
    if form != "Apple's directory" and said == 10**30:
        sizes.remove("vocab_size")  # ranks that hold fewer rows are refused
    (directory / "config.json").write_text(json.dumps(config | dict.fromkeys(sizes, said)))
    done = convert(directory, tmp_path / "out")
    assert came_through(done, make())
    assert all("\n" not in note for note in done.notes)
    assert bool([note for note in done.notes if "hidden_size" in note]) == (said not in (-1, None))


def test_the_base_model_beside_a_drafter_may_have_any_dtype(tmp_path: Path) -> None:
    foreign = {name: array.astype(mx.int8) for name, array in base().items()}
    shard(tmp_path / "in", prefixed("drafter.", tensors(make())) | foreign, 3, index=True)
    assert came_through(convert(tmp_path / "in", tmp_path / "out"), make())


def test_a_path_may_begin_with_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    single(tmp_path, tensors(make()))
    assert came_through(convert("~/the drafter.safetensors", "~/out")._replace(path=tmp_path / "out"), make())
    assert (tmp_path / "out").is_dir()


def test_what_a_config_says_of_the_target_and_the_depth_is_kept(tmp_path: Path) -> None:
    directory = apple(tmp_path / "in", tensors(make()), base_model="some/base", draft_depth=5)
    args = convert(directory, tmp_path / "out").args
    assert (args.base_model, args.draft_depth) == ("some/base", 5)
    said = {"base_model": "some/base", "draft_depth": 5}
    padded = ranks(tmp_path / "ranks", tensors(make(vocab=59)), 2, padding=1, **said)
    args = convert(padded, tmp_path / "out2").args
    assert (args.base_model, args.draft_depth, args.vocab_size) == ("some/base", 5, 59)


def test_a_config_that_speaks_of_no_missing_part_changes_nothing(tmp_path: Path) -> None:
    """Negative control of half drafters: a drafter without a cell or a projection is whole when none is spoken of."""
    for at, said in enumerate(({}, {"rnn": False, "hidden_size": 24}, {"rnn": None, "hidden_size": -1}, {"rnn": 1})):
        drafter = make("three blocks, no rnn")
        assert came_through(
            convert(apple(tmp_path / f"{at}", tensors(drafter), **said), tmp_path / f"out{at}"), drafter
        )


def write_raw(path: Path, kinds: dict[str, tuple[str, np.ndarray[Any, Any]]]) -> None:
    """A safetensors file of dtypes that MLX does not write."""
    header, content = {}, b""
    for name, (dtype, numbers) in kinds.items():
        begin = len(content)
        content += numbers.tobytes()
        header[name] = {"dtype": dtype, "shape": numbers.shape, "data_offsets": (begin, len(content))}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


def test_doubles_are_read_and_a_base_model_may_have_dtypes_that_mlx_does_not(tmp_path: Path) -> None:
    doubles = {name: ("F64", np.array(array).astype(np.float64)) for name, array in tensors(make()).items()}
    write_raw(tmp_path / "doubles.safetensors", doubles)
    assert came_through(convert(tmp_path / "doubles.safetensors", tmp_path / "out"), make())
    kinds = {f"drafter.{name}": ("F32", np.array(array)) for name, array in tensors(make()).items()}
    foreign = {"model.norm.weight": ("F8_E5M2", np.zeros(8, np.uint8)), "lm_head.weight": ("F64", np.zeros((2, 2)))}
    write_raw(tmp_path / "both.safetensors", foreign | kinds)
    assert came_through(convert(tmp_path / "both.safetensors", tmp_path / "out2"), make())


@pytest.mark.parametrize("rows", [1, 7, 30, 59, 60])
@pytest.mark.parametrize("form", ["Apple's directory", "TensorRT-LLM, 4 ranks"])
def test_how_many_rows_are_read_at_a_time_changes_nothing(
    form: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FORMS[form](tmp_path / "in", tensors(make("input projection")))
    convert(source, tmp_path / "packed", True, 32, 4, rnn_bits=0)
    monkeypatch.setattr("mlx_redrafter.checkpoints.CHUNK", rows * 36)
    assert came_through(convert(source, tmp_path / "out"), make("input projection"))
    convert(source, tmp_path / "packed by rows", True, 32, 4, rnn_bits=0)
    one, other = (dict(mx.load(str(tmp_path / name / WEIGHTS))) for name in ("packed", "packed by rows"))
    assert same(one, other)
