"""Checkpoints of models and drafters: what is loaded, what is saved, and what is refused in one line."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import make_family
from mlx.utils import tree_flatten
from small import save_target, small_drafter, small_llama
from threads import workers
from toys import make_model, make_tokenizer

from mlx_redrafter import checkpoints, generate_step
from mlx_redrafter.checkpoints import load, load_drafter, load_pair, save_drafter
from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.engine.supported_models import model_sizes
from mlx_redrafter.errors import CheckpointError

WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"

Change = Callable[[Path], None]


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


def config(**changes: Any) -> Change:
    """Changes keys of the config; None removes the key."""

    def change(directory: Path) -> None:
        changed = json.loads((directory / CONFIG).read_text()) | changes
        (directory / CONFIG).write_text(json.dumps({k: v for k, v in changed.items() if v is not None}))

    return change


def weights(change: Callable[[dict[str, mx.array]], dict[str, mx.array]]) -> Change:
    """Changes the stored tensors."""

    def rewrite(directory: Path) -> None:
        changed = change(dict(mx.load(str(directory / WEIGHTS))))
        mx.eval(changed)
        mx.save_safetensors(str(directory / WEIGHTS), changed)

    return rewrite


def tensor(name: str, array: mx.array | None) -> Change:
    """Replaces a tensor; None removes it."""
    return weights(lambda found: {k: w for k, w in (found | {name: array}).items() if w is not None})


def file(name: str, content: bytes | None) -> Change:
    """Writes a file; None removes it."""

    def write(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        if content is not None:
            (directory / name).write_bytes(content)

    return write


def cut(size: int) -> Change:
    """Cuts the weights off after so many bytes."""
    return lambda directory: (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:size]) and None


def index(missing: str) -> Change:
    return file(INDEX, json.dumps({"weight_map": {"rnn_u.bias": WEIGHTS, "rnn_u.weight": missing}}).encode())


DAMAGE: dict[str, tuple[Change, str]] = {
    "no config": (file(CONFIG, None), "no config.json in DIR"),
    "config cut off": (file(CONFIG, b'{"hidden_size": '), "DIR/config.json is not JSON: Expecting value.*"),
    "config not UTF-8": (file(CONFIG, b"\xff\xfe"), "DIR/config.json is not JSON: 'utf-8' codec can't.*"),
    "config a list": (file(CONFIG, b"[1]"), "DIR/config.json must hold an object, got list"),
    "another model's config": (
        config(model_type="llama"),
        r"expected a drafter \(model_type 'recurrent_drafting_drafter'\) in DIR, got model_type 'llama'",
    ),
    "no weights": (file(WEIGHTS, None), r"no model\*.safetensors in DIR"),
    "empty weights": (cut(0), "cannot read DIR/model.safetensors: .*"),
    "last byte cut off": (cut(-1), "cannot read DIR/model.safetensors: .*exceeding the size of the file.*"),
    "shard missing": (
        index("model-00002-of-00002.safetensors"),
        "half a checkpoint: model.safetensors.index.json names model-00002-of-00002.safetensors, which is not in DIR",
    ),
    "shard outside the directory": (
        index("../model.safetensors"),
        "half a checkpoint: model.safetensors.index.json names ../model.safetensors, which is not in DIR",
    ),
    "index null": (file(INDEX, b"null"), "DIR/model.safetensors.index.json must hold an object, got NoneType"),
    "index with nested names": (
        file(INDEX, b'{"weight_map": {"a": ["b"]}}'),
        r"DIR/model.safetensors.index.json: weight_map must give each tensor a file name, got \{'a': \['b'\]\}",
    ),
    "extra tensor": (tensor("emb_norm.weight", mx.ones((32,))), "cannot load the drafter in DIR: .*emb_norm.weight.*"),
    "no head": (tensor("lm_head.1.weight", None), "not a drafter: DIR has no lm_head.N.weight; its tensors begin .*"),
    **{
        f"no {name}": (tensor(name, None), f"cannot load the drafter in DIR: .*{name}.*")
        for name in ("rnn_u.weight", "lm_head.0.linear.weight", "lm_head.0.linear.bias")
    },
    "one NaN": (
        weights(lambda w: w | {"rnn_w.weight": mx.where(mx.eye(32) * mx.arange(32) == 7, mx.nan, w["rnn_w.weight"])}),
        "DIR: rnn_w.weight holds NaN or infinity",
    ),
    "infinity": (tensor("lm_head.1.weight", mx.full((64, 64), -mx.inf)), "DIR: lm_head.1.weight holds NaN or infinity"),
    **{
        f"{dtype} weights": (
            tensor("rnn_w.weight", mx.ones((32, 32), dtype)),
            f"DIR: expected rnn_w.weight in floating point, got {dtype}",
        )
        for dtype in (mx.int8, mx.uint32, mx.bool_)
    },
    "misshapen tensor": (tensor("rnn_u.weight", mx.ones((32, 31))), "cannot load the drafter in DIR: .*rnn_u.weight.*"),
    "a number for the head": (
        tensor("lm_head.1.weight", mx.array(3.0)),
        "DIR: expected lm_head.1.weight to be an array, got a single number",
    ),
    "quantization no object": (config(quantization=3), "DIR/config.json: quantization must be an object, got 3"),
    **{
        f"base model {base!r}": (config(base_model=base), r"DIR/config.json: base_model must be a name, got .*")
        for base in (3, "a\nb: c\n---\n", "\ud800")
    },
    **{
        f"draft depth {depth!r}": (config(draft_depth=depth), r"DIR/config.json: draft_depth must be from 1 to .*")
        for depth in (0, True, 2.0)
    },
    **{
        f"acceptance {table!r}": (config(acceptance=table), r"DIR/config.json: acceptance must be a row of shares .*")
        for table in ([], [0.5], [[0.5], [0.5, 0.1]], [[1.5]], [["a"]], "a")
    },
    **{
        f"another {key}": (config(**{key: wrong}), f"DIR/config.json says {key} {wrong}, its tensors say {right}")
        for key, wrong, right in (
            ("hidden_size", 33, 32),
            ("vocab_size", 65, 64),
            ("exit_dim", 48, 64),
            ("num_draft_layers", 2, 1),
            ("rnn", False, True),
        )
    },
}  # fmt: skip


def assert_refused(directory: Path, pattern: str, model: nn.Module | None = None) -> None:
    """Asserts that a drafter is refused with one line, `pattern`, in which DIR stands for its directory."""
    with pytest.raises(CheckpointError) as raised:
        load_drafter(directory, model)
    message = str(raised.value)
    assert "\n" not in message
    assert re.fullmatch(pattern.replace("DIR", re.escape(str(directory))), message), message


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_refused_in_one_line(damage: str, stored: Path) -> None:
    change, pattern = DAMAGE[damage]
    change(stored)
    assert_refused(stored, pattern)


@pytest.mark.parametrize(
    ("size", "pattern"),
    [
        ({"hidden": 48}, "DIR expects hidden size 32, the target has 48"),
        ({"vocab": 65}, "DIR expects vocabulary size 64, the target has 65"),
    ],
)
def test_drafter_of_another_target_is_refused(size: dict[str, int], pattern: str, stored: Path) -> None:
    assert load_drafter(stored, small_llama()).args == small_drafter().args
    assert_refused(stored, pattern, small_llama(**size))


@pytest.mark.parametrize("name", ["/no/such/place", "~/no/such/place", "no/such/place", "../no-such-place", ""])
@pytest.mark.parametrize("loader", [load, load_drafter])
def test_missing_directory_is_refused(loader: Callable[[str], Any], name: str) -> None:
    with pytest.raises(CheckpointError, match=f"^no such directory: {re.escape(repr(name))}$"):
        loader(name)


@pytest.mark.parametrize("loader", [load, load_drafter])
def test_file_instead_of_a_directory_is_refused(loader: Callable[[Path], Any], stored: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^expected a model directory, got a file: .*model\.safetensors$"):
        loader(stored / WEIGHTS)


def test_hub_names_are_downloaded_or_refused(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str) -> Path:
        if name == "some/drafter":
            return stored
        raise OSError(f"no\n\n  connection for {name}")

    monkeypatch.setattr(checkpoints, "_download", download)
    assert same(load_drafter("some/drafter"), small_drafter())
    expected = (
        "'some/other' is not a local directory, and cannot be downloaded from the hub: no connection for some/other"
    )
    with pytest.raises(CheckpointError, match=f"^{expected}$"):
        load_drafter("some/other")


@pytest.mark.parametrize(
    "change",
    [
        config(hidden_size=-1, vocab_size=-1, exit_dim=-1, num_draft_layers=-1),
        config(transformers_version="4.44.0", auto_map={"a": "b"}),
        file(CONFIG, b"{}"),
    ],
    ids=["Apple's defaults of -1", "more keys", "an empty config"],
)
def test_incomplete_config_is_completed_from_the_tensors(change: Change, stored: Path) -> None:
    change(stored)
    assert same(load_drafter(stored), small_drafter())


def test_shards_named_by_the_index_are_read_together(stored: Path) -> None:
    tensors = dict(mx.load(str(stored / WEIGHTS)))
    mx.eval(tensors)
    (stored / WEIGHTS).unlink()
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    placed = {name: files[i % 2] for i, name in enumerate(sorted(tensors))}
    for each in files:
        mx.save_safetensors(str(stored / each), {name: tensors[name] for name in tensors if placed[name] == each})
    (stored / INDEX).write_text(json.dumps({"weight_map": placed}))
    assert same(load_drafter(stored), small_drafter())
    (stored / files[1]).unlink()
    assert_refused(stored, f"half a checkpoint: {INDEX} names {files[1]}, which is not in DIR")


@pytest.mark.parametrize("exit_dim", [64, 48])
@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize("rnn", [True, False])
def test_saved_drafter_loads_unchanged(exit_dim: int, layers: int, rnn: bool, tmp_path: Path) -> None:
    drafter = small_drafter(exit_dim=exit_dim, layers=layers, rnn=rnn)
    save_drafter(tmp_path, drafter)
    assert same(load_drafter(tmp_path), drafter)
    assert not same(load_drafter(tmp_path), small_drafter(exit_dim=exit_dim, layers=layers, rnn=rnn, seed=1))
    saved = json.loads((tmp_path / CONFIG).read_text())
    assert saved["model_type"] == "recurrent_drafting_drafter" and saved["dtype"] == "float32"


def test_weights_are_saved_in_the_dtype_asked_for(tmp_path: Path) -> None:
    save_drafter(tmp_path, small_drafter(), dtype=mx.bfloat16, extra={"trained_on": "the cat"})
    assert {str(w.dtype) for w in arrays(load_drafter(tmp_path)).values()} == {"mlx.core.bfloat16"}
    saved = json.loads((tmp_path / CONFIG).read_text())
    assert (saved["dtype"], saved["trained_on"]) == ("bfloat16", "the cat")


@pytest.mark.parametrize("older", [False, True])
def test_failed_save_leaves_the_directory_as_it_was(
    older: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "new" / "drafter"
    if older:
        save_drafter(directory, small_drafter(seed=1))
    before = {path.name: path.read_bytes() for path in directory.glob("*")}

    def fail(path: str, weights: dict[str, mx.array], *more: Any) -> None:
        Path(path).write_bytes(b"half of it")
        raise RuntimeError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(mx, "save_safetensors", fail)
        with pytest.raises(CheckpointError, match=r"^cannot write the drafter to \S+: no space left on device$"):
            save_drafter(directory, small_drafter())
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    save_drafter(directory, small_drafter())
    assert same(load_drafter(directory), small_drafter())
    assert {path.name for path in directory.iterdir()} == {CONFIG, WEIGHTS}


def test_model_unknown_to_mlx_lm_is_refused(stored: Path) -> None:
    config(model_type="no_such_model")(stored)
    with pytest.raises(CheckpointError, match=r"^cannot load the model in .*no_such_model.*$") as raised:
        load(stored)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["qwen2", "gemma"])
def test_model_without_tokenizer_files_is_refused(kind: str, tmp_path: Path) -> None:
    save_target(tmp_path, make_model(kind), make_tokenizer()._tokenizer)
    assert load(tmp_path)[1].encode("abc") == [1, 2, 3]
    for each in tmp_path.glob("tokenizer*"):
        each.unlink()
    expected = f"no tokenizer in {tmp_path}: expected tokenizer.json, or the files that it is made from"
    with pytest.raises(CheckpointError, match=f"^{re.escape(expected)}$"):
        load(tmp_path)


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("wrong", [None, [1], "x", float("nan"), True, 7, 64.0], ids=repr)
def test_group_size_unknown_to_mlx_is_refused(wrong: Any, layer: bool, tmp_path: Path) -> None:
    drafter = small_drafter(layers=0, rnn=False)
    nn.quantize(drafter, 64, 4)
    sound: dict[str, Any] = {"group_size": 64, "bits": 4}
    save_drafter(tmp_path, drafter, extra={"quantization": sound})
    assert same(load_drafter(tmp_path), drafter)
    config(quantization=sound | ({"lm_head.0": sound | {"group_size": wrong}} if layer else {"group_size": wrong}))(
        tmp_path
    )
    expected = rf"DIR/config.json: group_size must be one of \(16, 32, 64, 128\), got {re.escape(repr(wrong))}"
    assert_refused(tmp_path, expected)


def test_target_of_a_loaded_drafter_decodes_in_any_thread(tmp_path: Path) -> None:
    """gemma3n's forward replaces some of its weights; `load_drafter` builds one to learn the sizes."""

    def load_both() -> tuple[nn.Module, Drafter]:
        model = make_family("gemma3n")
        save_drafter(
            tmp_path, Drafter(DrafterArgs(*model_sizes(make_family("gemma3n")), exit_dim=16, num_draft_layers=1))
        )
        return model, load_drafter(tmp_path, model)

    with workers(2) as (first, second):
        model, drafter = first.submit(load_both).result()
        steps = second.submit(lambda: list(generate_step([1, 2, 3], model, drafter, max_tokens=4, plan=(1, 2))))
        assert len(steps.result()) == 4


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_16_bit_weights_on_a_cpu_are_noted(
    dtype: mx.Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model("qwen2")
    model.set_dtype(dtype)
    save_target(tmp_path, model, make_tokenizer()._tokenizer)
    flags = Namespace(adapter_path=None, trust_remote_code=False)
    note = "note: bfloat16 weights are slow on a CPU; mlx_lm.convert --dtype float32 makes a faster copy\n"
    assert load_pair(flags, str(tmp_path), None)[2] is None
    on_cpu = mx.default_device().type == mx.cpu
    assert capsys.readouterr().err == (note if on_cpu and dtype == mx.bfloat16 else "")
