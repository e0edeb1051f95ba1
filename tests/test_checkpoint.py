"""Drafter checkpoints: what is read, what is written, and what is refused, with one line that says why."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from small import save_target, small_drafter, small_llama
from toys import make_model, make_tokenizer

from mlx_redrafter import checkpoints as checkpoint
from mlx_redrafter.checkpoints import load, load_drafter, save_drafter
from mlx_redrafter.drafters.recurrent import Drafter
from mlx_redrafter.errors import CheckpointError

WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A sound checkpoint directory: D = 32, V = 64, X = 64, one block, rnn."""
    save_drafter(tmp_path, small_drafter())
    return tmp_path


def arrays(drafter: Drafter) -> dict[str, mx.array]:
    return dict(tree_flatten(drafter.parameters()))


def same(one: Drafter, other: Drafter) -> bool:
    """Whether two drafters have the same sizes and weights, to the bit."""
    a, b = arrays(one), arrays(other)
    return one.args == other.args and a.keys() == b.keys() and all(mx.array_equal(a[k], b[k]) for k in a)


def with_config(**changes: Any) -> Callable[[Path], None]:
    """Changes keys of the config; None as a value removes the key."""

    def change(directory: Path) -> None:
        config = json.loads((directory / CONFIG).read_text()) | changes
        (directory / CONFIG).write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return change


def with_weights(change: Callable[[dict[str, mx.array]], dict[str, mx.array]]) -> Callable[[Path], None]:
    """Changes the stored tensors."""

    def rewrite(directory: Path) -> None:
        changed = change(dict(mx.load(str(directory / WEIGHTS))))
        mx.eval(changed)
        mx.save_safetensors(str(directory / WEIGHTS), changed)

    return rewrite


def with_file(name: str, content: bytes | None) -> Callable[[Path], None]:
    """Writes a file, or removes it."""

    def write(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        if content is not None:
            (directory / name).write_bytes(content)

    return write


def cut(size: int) -> Callable[[Path], None]:
    """Cuts the weights off behind so many bytes."""
    return lambda directory: (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:size]) and None


def changed(name: str, array: mx.array) -> Callable[[Path], None]:
    return with_weights(lambda weights: weights | {name: array})


def without(*names: str) -> Callable[[Path], None]:
    return with_weights(lambda weights: {k: w for k, w in weights.items() if k not in names})


def as_dtype(dtype: mx.Dtype, *names: str) -> Callable[[Path], None]:
    return with_weights(lambda weights: {k: w.astype(dtype) if k in names else w for k, w in weights.items()})


def shards(missing: str) -> bytes:
    return json.dumps({"weight_map": {"rnn_u.bias": WEIGHTS, "rnn_u.weight": missing}}).encode()


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (with_file(CONFIG, None), "no config.json in DIR"),
    "empty config": (with_file(CONFIG, b""), "DIR/config.json is not JSON: Expecting value.*"),
    "config cut off": (with_file(CONFIG, b'{"hidden_size": '), "DIR/config.json is not JSON: Expecting value.*"),
    "config of other bytes": (with_file(CONFIG, b"\xff\xfe"), "DIR/config.json is not JSON: 'utf-8' codec can't.*"),
    "config a list": (with_file(CONFIG, b"[1]"), "DIR/config.json must hold an object, got list"),
    "config null": (with_file(CONFIG, b"null"), "DIR/config.json must hold an object, got NoneType"),
    "another model's config": (
        with_config(model_type="llama"),
        r"expected a drafter \(model_type 'recurrent_drafting_drafter'\) in DIR, got model_type 'llama'",
    ),
    "no weights": (with_file(WEIGHTS, None), r"no model\*.safetensors in DIR"),
    "empty weights": (cut(0), "cannot read DIR/model.safetensors: .*"),
    "header cut off": (cut(100), "cannot read DIR/model.safetensors: .* 100 bytes.*"),
    "last byte cut off": (cut(-1), "cannot read DIR/model.safetensors: .*exceeding the size of the file.*"),
    "weights of text": (with_file(WEIGHTS, b"not weights"), "cannot read DIR/model.safetensors: .*"),
    "shard missing": (
        with_file(INDEX, shards("model-00002-of-00002.safetensors")),
        "half a checkpoint: model.safetensors.index.json names model-00002-of-00002.safetensors, which is not in DIR",
    ),
    "shard outside the directory": (
        with_file(INDEX, shards("../model.safetensors")),
        "half a checkpoint: model.safetensors.index.json names ../model.safetensors, which is not in DIR",
    ),
    "index cut off": (with_file(INDEX, b"{"), "DIR/model.safetensors.index.json is not JSON: .*"),
    "index a list": (with_file(INDEX, b"[]"), "DIR/model.safetensors.index.json must hold an object, got list"),
    "index null": (with_file(INDEX, b"null"), "DIR/model.safetensors.index.json must hold an object, got NoneType"),
    "index without a map": (
        with_file(INDEX, b'{"weight_map": 3}'),
        "DIR/model.safetensors.index.json: weight_map must give each tensor a file name, got 3",
    ),
    "index with nested names": (
        with_file(INDEX, b'{"weight_map": {"a": ["b"]}}'),
        r"DIR/model.safetensors.index.json: weight_map must give each tensor a file name, got \{'a': \['b'\]\}",
    ),
    "extra tensor": (changed("emb_norm.weight", mx.ones((32,))), "cannot load the drafter in DIR: .*emb_norm.weight.*"),
    "no head": (without("lm_head.1.weight"), "not a drafter: DIR has no lm_head.N.weight; its tensors begin .*"),
    "no recurrence": (without("rnn_w.weight"), "DIR/config.json says rnn True, its tensors say False"),
    **{
        f"no {name}": (without(name), f"cannot load the drafter in DIR: .*{name}.*")
        for name in ("rnn_u.weight", "rnn_u.bias", "lm_head.0.linear.weight", "lm_head.0.linear.bias")
    },
    "NaN": (changed("rnn_u.bias", mx.full((32,), mx.nan)), "DIR: rnn_u.bias holds NaN or infinity"),
    "one NaN": (
        with_weights(
            lambda w: w | {"rnn_w.weight": mx.where(mx.eye(32) * mx.arange(32) == 7, mx.nan, w["rnn_w.weight"])}
        ),
        "DIR: rnn_w.weight holds NaN or infinity",
    ),
    "infinity": (
        changed("lm_head.1.weight", mx.full((64, 64), -mx.inf)),
        "DIR: lm_head.1.weight holds NaN or infinity",
    ),
    **{
        f"{dtype} weights": (
            as_dtype(dtype, "rnn_w.weight"),
            f"DIR: expected rnn_w.weight in floating point, got {dtype}",
        )
        for dtype in (mx.int8, mx.int32, mx.uint8, mx.uint32, mx.bool_)
    },
    "integers throughout": (
        with_weights(lambda weights: {k: w.astype(mx.int8) for k, w in weights.items()}),
        "DIR: expected .* in floating point, got mlx.core.int8",
    ),
    "misshapen tensor": (
        changed("rnn_u.weight", mx.ones((32, 31))),
        "cannot load the drafter in DIR: .*rnn_u.weight.*",
    ),
    "a number for the head": (
        changed("lm_head.1.weight", mx.array(3.0)),
        "DIR: expected lm_head.1.weight to be an array, got a single number",
    ),
    "a number for the recurrence": (
        changed("rnn_w.weight", mx.array(3.0)),
        "DIR: expected rnn_w.weight to be an array, got a single number",
    ),
    "quantization no object": (
        with_config(quantization=3),
        "DIR/config.json: quantization must be an object, got 3",
    ),
    "a number of 5000 digits": (
        with_file(CONFIG, b'{"hidden_size": ' + 5000 * b"7" + b"}"),
        "DIR/config.json is not JSON: Exceeds the limit .*",
    ),
    **{
        f"base model {said!r}": (
            with_config(base_model=said),
            r"DIR/config.json: base_model must be a name, got .*",
        )
        for said in (3, ["a"], "a\nb: c\n---\n", "\ud800", "a\x00b")
    },
    **{
        f"config says another {key}": (
            with_config(**{key: said}),
            f"DIR/config.json says {key} {said}, its tensors say {is_}",
        )
        for key, said, is_ in (
            ("hidden_size", 33, 32),
            ("vocab_size", 65, 64),
            ("exit_dim", 48, 64),
            ("num_draft_layers", 2, 1),
            ("rnn", False, True),
        )
    },
}


def refused(directory: Path, pattern: str, model: nn.Module | None = None) -> None:
    """Asserts that a drafter is refused with one line, `pattern`, in which DIR stands for its directory."""
    with pytest.raises(CheckpointError) as raised:
        load_drafter(directory, model)
    message = str(raised.value)
    assert "\n" not in message
    assert re.fullmatch(pattern.replace("DIR", re.escape(str(directory))), message), message


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_in_one_line(damage: str, stored: Path) -> None:
    change, pattern = DAMAGE[damage]
    # Negative control: without the damage it loads.
    assert same(load_drafter(stored), small_drafter())
    change(stored)
    refused(stored, pattern)


@pytest.mark.parametrize(
    ("sizes", "pattern"),
    [
        ({"hidden": 48}, "DIR expects hidden size 32, the target has 48"),
        ({"vocab": 65}, "DIR expects vocabulary size 64, the target has 65"),
    ],
)
def test_a_drafter_of_another_target_is_refused_in_one_line(sizes: dict[str, int], pattern: str, stored: Path) -> None:
    assert load_drafter(stored, small_llama()).args == small_drafter().args
    refused(stored, pattern, small_llama(**sizes))


@pytest.mark.parametrize(
    "name", ["/no/such/place", "./no-such-place", "~/no/such/place", "no/such/place", "../no-such-place"]
)
@pytest.mark.parametrize("loader", [load, load_drafter])
def test_a_path_to_nowhere_is_refused_in_one_line(loader: Callable[[str], Any], name: str) -> None:
    with pytest.raises(CheckpointError, match=f"^no such directory: {re.escape(repr(name))}$"):
        loader(name)


def test_an_empty_name_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"^no such directory: ''$"):
        load_drafter("")


@pytest.mark.parametrize("loader", [load, load_drafter])
def test_a_file_in_place_of_a_directory_is_refused_in_one_line(loader: Callable[[Path], Any], stored: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^expected a model directory, got a file: .*model\.safetensors$"):
        loader(stored / WEIGHTS)


def test_a_name_that_the_hub_does_not_give_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str) -> Path:
        raise OSError(f"no\n\n  connection for {name}")

    monkeypatch.setattr(checkpoint, "_download", unreachable)
    expected = "'some/drafter' is no directory here, and the hub has not given it: no connection for some/drafter"
    with pytest.raises(CheckpointError, match=f"^{expected}$"):
        load_drafter("some/drafter")


def test_a_name_that_the_hub_does_give_is_loaded(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_download", lambda name: {"some/drafter": stored}[name])
    assert same(load_drafter("some/drafter"), small_drafter())


@pytest.mark.parametrize(
    "change",
    [
        with_config(hidden_size=-1, vocab_size=-1, exit_dim=-1, num_draft_layers=-1),
        with_config(hidden_size=None, vocab_size=None, exit_dim=None, num_draft_layers=None, rnn=None, model_type=None),
        with_config(transformers_version="4.44.0", auto_map={"a": "b"}),
        with_file(CONFIG, b"{}"),
    ],
    ids=["Apple's defaults of -1", "no sizes", "more keys", "an empty config"],
)
def test_a_config_that_says_nothing_wrong_is_accepted(change: Callable[[Path], None], stored: Path) -> None:
    change(stored)
    assert same(load_drafter(stored), small_drafter())


def test_shards_that_their_index_names_are_read_together(stored: Path) -> None:
    whole = dict(mx.load(str(stored / WEIGHTS)))
    mx.eval(whole)
    (stored / WEIGHTS).unlink()
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    placed = {name: files[at % 2] for at, name in enumerate(sorted(whole))}
    for file in files:
        mx.save_safetensors(str(stored / file), {name: whole[name] for name in whole if placed[name] == file})
    (stored / INDEX).write_text(json.dumps({"weight_map": placed}))
    assert same(load_drafter(stored), small_drafter())
    # Negative control: half of it is none of it.
    (stored / files[1]).unlink()
    refused(stored, f"half a checkpoint: {INDEX} names {files[1]}, which is not in DIR")


@pytest.mark.parametrize("exit_dim", [64, 48])
@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize("rnn", [True, False])
def test_every_variant_comes_back_as_it_was_saved(exit_dim: int, layers: int, rnn: bool, tmp_path: Path) -> None:
    drafter = small_drafter(exit_dim=exit_dim, layers=layers, rnn=rnn)
    save_drafter(tmp_path, drafter)
    assert same(load_drafter(tmp_path), drafter)
    assert not same(load_drafter(tmp_path), small_drafter(exit_dim=exit_dim, layers=layers, rnn=rnn, seed=1))
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["model_type"] == "recurrent_drafting_drafter" and config["dtype"] == "float32"


def test_weights_are_stored_in_the_dtype_asked_for(tmp_path: Path) -> None:
    save_drafter(tmp_path, small_drafter(), dtype=mx.bfloat16, extra={"trained_on": "the cat"})
    assert {str(w.dtype) for w in arrays(load_drafter(tmp_path)).values()} == {"mlx.core.bfloat16"}
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["dtype"], config["trained_on"]) == ("bfloat16", "the cat")


@pytest.mark.parametrize("before", ["nothing", "an older drafter"])
def test_a_save_that_fails_midway_leaves_what_was_there(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "new" / "drafter"
    if before == "an older drafter":
        save_drafter(directory, small_drafter(seed=1))
    was = {path.name: path.read_bytes() for path in directory.glob("*")}

    def full(path: str, weights: dict[str, mx.array], *more: Any) -> None:
        Path(path).write_bytes(b"half of it")
        raise RuntimeError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(mx, "save_safetensors", full)
        with pytest.raises(CheckpointError, match=r"^cannot write the drafter to \S+: no space left on device$"):
            save_drafter(directory, small_drafter(), extra={"new": True})
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == was
    # Negative control: the same save goes through when nothing fails.
    save_drafter(directory, small_drafter(), extra={"new": True})
    assert same(load_drafter(directory), small_drafter()) and json.loads((directory / CONFIG).read_text())["new"]
    assert {path.name for path in directory.iterdir()} == {CONFIG, WEIGHTS}


def test_a_model_that_mlx_lm_cannot_load_is_refused_in_one_line(stored: Path) -> None:
    with_config(model_type="no_such_model")(stored)
    with pytest.raises(CheckpointError, match=r"^cannot load the model in .*no_such_model.*$") as raised:
        load(stored)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["qwen2", "gemma"])
def test_a_model_for_which_transformers_makes_up_an_empty_tokenizer_is_refused(kind: str, tmp_path: Path) -> None:
    save_target(tmp_path, make_model(kind), make_tokenizer()._tokenizer)
    assert load(tmp_path)[1].encode("abc") == [1, 2, 3]
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    expected = f"no tokenizer in {tmp_path}: expected tokenizer.json, or the files that it is made from"
    with pytest.raises(CheckpointError, match=f"^{re.escape(expected)}$"):
        load(tmp_path)


GROUP_SIZES: dict[str, tuple[Any, str]] = {
    "null": (None, "None"),
    "a list": ([1], r"\[1\]"),
    "text": ("x", "'x'"),
    "not a number": (float("nan"), "nan"),
    "infinity": (float("inf"), "inf"),
    "true": (True, "True"),
    "another number": (7, "7"),
    "a fraction": (64.0, "64.0"),
}


@pytest.mark.parametrize("of", ["all", "one layer"])
@pytest.mark.parametrize("case", GROUP_SIZES)
def test_a_group_size_that_mlx_does_not_have_is_refused_in_one_line(case: str, of: str, tmp_path: Path) -> None:
    drafter = small_drafter(layers=0, rnn=False)
    nn.quantize(drafter, 64, 4)
    sound: dict[str, Any] = {"group_size": 64, "bits": 4}
    save_drafter(tmp_path, drafter, extra={"quantization": sound})
    assert same(load_drafter(tmp_path), drafter), "negative control"
    said, shown = GROUP_SIZES[case]
    quantization = sound | ({"group_size": said} if of == "all" else {"lm_head.0": sound | {"group_size": said}})
    with_config(quantization=quantization)(tmp_path)
    refused(tmp_path, rf"DIR/config.json: group_size must be one of \(16, 32, 64, 128\), got {shown}")
