"""What `convert` writes: quantized as asked, loadable, decoding as before, whole or not at all; and what it reports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from checkpoints import CONFIG, FORMS, WEIGHTS, apple, came_through, command, make, ranks, refused, same, save, tensors

from mlx_redrafter import generate_step, load_demo, load_drafter
from mlx_redrafter.convert.conversion import convert
from mlx_redrafter.convert.pack import MODES
from mlx_redrafter.convert.report import difference, outputs
from mlx_redrafter.demo import DIRECTORY, demo_prompts
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.generate import encode

ROOT = Path(__file__).parent.parent
TARGET, DRAFTER = DIRECTORY / "target", DIRECTORY / "drafter"
WIDE: dict[str, Any] = {"hidden": 64, "vocab": 96, "exit_dim": 64}
"""Sizes that every group size divides when it is at most 64; `input_proj` has 128 inputs."""

WAYS = [(mode, bits, group) for mode, (groups, widths) in MODES.items() for bits in widths for group in groups]


def quantized_layers(path: Path) -> dict[str, int]:
    """layer -> bits of what is loaded."""
    return {name: module.bits for name, module in load_drafter(path).named_modules() if hasattr(module, "bits")}


@pytest.mark.parametrize(("mode", "bits", "group"), WAYS)
def test_every_quantization_of_mlx_is_written_as_mlx_makes_it(mode: str, bits: int, group: int, tmp_path: Path) -> None:
    sizes = WIDE | {"hidden": 128, "exit_dim": 128}
    drafter = make(**sizes)
    source = apple(tmp_path / "in", tensors(drafter))
    done = convert(source, tmp_path / "out", True, group, bits, mode)
    nn.quantize(drafter, group, bits, mode=mode, class_predicate=lambda _, module: isinstance(module, nn.Linear))
    assert same(tensors(load_drafter(tmp_path / "out")), tensors(drafter))
    assert done.difference == difference(outputs(make(**sizes)), outputs(drafter))
    assert 0 < done.difference.largest < done.difference.scale
    assert done.bytes_after == sum(array.nbytes for array in tensors(drafter).values())
    assert done.bytes_before == sum(array.nbytes for array in tensors(make(**sizes)).values())
    weights = sum(array.size for array in tensors(make(**sizes)).values())
    assert done.bits_per_weight == pytest.approx(8 * done.bytes_after / weights)
    assert bits < done.bits_per_weight < bits + 3


def test_the_defaults_are_those_of_mlx_lm(tmp_path: Path) -> None:
    source = apple(tmp_path / "in", tensors(make(**WIDE)))
    for mode, (group, bits) in {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}.items():
        convert(source, tmp_path / mode, True, q_mode=mode)
        said = json.loads((tmp_path / mode / CONFIG).read_text())["quantization"]
        assert said == {"group_size": group, "bits": bits, "mode": mode}


def test_each_part_may_have_its_own_bits(tmp_path: Path) -> None:
    source = apple(tmp_path / "in", tensors(make("input projection", **(WIDE | {"exit_dim": 64}))))
    convert(source, tmp_path / "out", True, q_bits=4, head_bits=6, rnn_bits=8, blocks_bits=0)
    assert quantized_layers(tmp_path / "out") == {"lm_head.1": 6, "rnn_u": 8, "rnn_w": 8}
    convert(source, tmp_path / "out2", True, q_bits=4, head_bits=0)
    parts = {"input_proj": 4, "lm_head.0.linear": 4, "rnn_u": 4, "rnn_w": 4}
    assert quantized_layers(tmp_path / "out2") == parts


def test_a_layer_that_the_group_size_does_not_divide_is_named(tmp_path: Path) -> None:
    source = apple(tmp_path / "in", tensors(make(**(WIDE | {"exit_dim": 96}))))
    status, _, said = command("--hf-path", source, "--mlx-path", tmp_path / "out", "-q")
    assert status == 0
    assert said.splitlines() == [
        f"note: {layer} is not quantized: its 96 inputs are no multiple of the group size 64"
        for layer in ("lm_head.0.linear", "lm_head.1")
    ]
    assert quantized_layers(tmp_path / "out").keys() == {"input_proj", "rnn_u", "rnn_w"}
    assert command("--hf-path", source, "--mlx-path", tmp_path / "out2", "-q", "--q-group-size", "32")[2] == ""


def test_round_trips_are_equal_to_the_bit(tmp_path: Path) -> None:
    """Plain and quantized again; quantized and dequantized; through another dtype and back."""
    drafter = make(**WIDE)
    drafter.set_dtype(mx.bfloat16)
    source = apple(tmp_path / "in", tensors(drafter))
    convert(source, tmp_path / "plain")
    convert(source, tmp_path / "direct", True, q_bits=5)
    convert(tmp_path / "plain", tmp_path / "later", True, q_bits=5)
    direct = tensors(load_drafter(tmp_path / "direct"))
    assert same(direct, tensors(load_drafter(tmp_path / "later")))

    done = convert(tmp_path / "direct", tmp_path / "back", dequantize=True)
    back = tensors(load_drafter(tmp_path / "back"))
    assert same(
        back,
        {
            name: mx.dequantize(direct[name], direct[f"{layer}.scales"], direct[f"{layer}.biases"], 64, 5)
            if (layer := name.rpartition(".")[0]) + ".scales" in direct and name.endswith("weight")
            else direct[name]
            for name in back
        },
    )
    assert not same(back, tensors(drafter)), "negative control: bits were lost"
    assert done.args == drafter.args and "quantization" not in json.loads((tmp_path / "back" / CONFIG).read_text())

    convert(tmp_path / "plain", tmp_path / "wide", dtype="float32")
    convert(tmp_path / "wide", tmp_path / "narrow", dtype="bfloat16")
    assert same(tensors(load_drafter(tmp_path / "narrow")), tensors(drafter))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_dequantized_has_the_dtype_it_had(mode: str, dtype: str, tmp_path: Path) -> None:
    for variant in ("input projection", "three blocks, no rnn", "no blocks"):
        drafter = make(variant, **(WIDE | {"exit_dim": 64 if "projection" in variant else 128}))
        drafter.set_dtype(getattr(mx, dtype))
        source, place = apple(tmp_path / variant / "in", tensors(drafter)), tmp_path / variant / "out"
        convert(source, tmp_path / variant / "packed", True, q_mode=mode)
        convert(tmp_path / variant / "packed", place, dequantize=True)
        back = tensors(load_drafter(place))
        assert {str(array.dtype).removeprefix("mlx.core.") for array in back.values()} == {dtype}
        assert all(mx.allclose(back[name], array, atol=0.3) for name, array in tensors(drafter).items())


def test_the_file_of_a_quantized_directory_is_dequantized_as_the_directory_is(tmp_path: Path) -> None:
    convert(apple(tmp_path / "in", tensors(make(**WIDE))), tmp_path / "packed", True)
    convert(tmp_path / "packed", tmp_path / "out", dequantize=True)
    convert(tmp_path / "packed" / WEIGHTS, tmp_path / "out2", dequantize=True)
    assert same(tensors(load_drafter(tmp_path / "out")), tensors(load_drafter(tmp_path / "out2")))
    refused(tmp_path / "packed" / WEIGHTS, ".* is converted and quantized already: .*", tmp_path / "result")


def test_what_no_bits_have_quantized_is_not_called_quantized(tmp_path: Path) -> None:
    source = apple(tmp_path / "in", tensors(make(**WIDE)))
    done = convert(source, tmp_path / "out", True, head_bits=0, blocks_bits=0, rnn_bits=0)
    assert "quantization" not in json.loads((done.path / CONFIG).read_text())
    assert came_through(done, make(**WIDE))
    convert(done.path, tmp_path / "later", True)
    assert quantized_layers(tmp_path / "later")


def test_depth_and_base_model_may_be_recorded_later(tmp_path: Path) -> None:
    convert(apple(tmp_path / "in", tensors(make())), tmp_path / "out")
    done = convert(tmp_path / "out", tmp_path / "again", draft_depth=3)
    assert done.args.draft_depth == 3 and same(tensors(load_drafter(done.path)), tensors(make()))


@pytest.mark.parametrize("base_model", ["@foo: [bar", "some/base", "'", '"', "# x", "größe"])
def test_a_model_card_names_any_base_model(base_model: str, tmp_path: Path) -> None:
    done = convert(apple(tmp_path / "in", tensors(make()), base_model=base_model), tmp_path / "out")
    header = (done.path / "README.md").read_text(encoding="utf-8").split("---\n")[1]
    said = [line.removeprefix("base_model: ") for line in header.splitlines() if line.startswith("base_model: ")]
    assert [json.loads(value) for value in said] == [base_model]  # JSON's strings are YAML's


def test_outputs_that_are_not_finite_are_no_result(tmp_path: Path) -> None:
    arrays = {name: array.astype(mx.float16) for name, array in tensors(make(**WIDE)).items()}
    loud = apple(tmp_path / "loud", arrays | {"lm_head.1.weight": mx.full((96, 64), 60000, mx.float16)})
    pattern = "in float16 its outputs on random inputs are not finite: give --dtype bfloat16"
    refused(loud, pattern, tmp_path / "result")
    refused(loud, pattern, tmp_path / "result", "-q")
    status, out, _ = command("--hf-path", loud, "--mlx-path", tmp_path / "out", "--dtype", "bfloat16")
    assert status == 0 and "\noutputs: not compared, for those of the source are not finite" in out


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_dtype_asked_for_is_the_one_that_is_written(dtype: str, tmp_path: Path) -> None:
    drafter = make("input projection")
    source = apple(tmp_path / "in", tensors(drafter))
    convert(source, tmp_path / "out", dtype=dtype)
    drafter.set_dtype(getattr(mx, dtype))
    assert same(tensors(load_drafter(tmp_path / "out")), tensors(drafter))
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["dtype"] == dtype


def test_the_config_is_one_that_apples_own_code_reads(tmp_path: Path) -> None:
    convert(apple(tmp_path / "in", tensors(make("input projection"))), tmp_path / "out")
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config == {
        "model_type": "recurrent_drafting_drafter",
        "hidden_size": 24,
        "vocab_size": 60,
        "exit_dim": 36,
        "num_draft_layers": 1,
        "rnn": True,
        "dtype": "float32",
    }
    assert {path.name for path in (tmp_path / "out").iterdir()} == {CONFIG, WEIGHTS, "README.md"}


@pytest.mark.usefixtures("short")
def test_base_model_and_depth_are_recorded_and_the_card_names_them(tmp_path: Path) -> None:
    convert(DRAFTER, tmp_path / "out", dtype="float32", base_model=str(TARGET), draft_depth=5)
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert (config["base_model"], config["draft_depth"]) == (str(TARGET), 5)
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: mlx\n") and f"--model {TARGET} --drafter THIS" in card
    assert "base_model:" not in card.split("---")[1], "a path means nothing on the hub"
    # What was recorded stays when it is converted again, and the flags overrule it.
    args = convert(tmp_path / "out", tmp_path / "again", dtype="float16", draft_depth=2).args
    assert (args.base_model, args.draft_depth) == (str(TARGET), 2)


@pytest.mark.usefixtures("short")
def test_the_report_tells_what_the_bits_cost(tmp_path: Path) -> None:
    flags = ("--hf-path", DRAFTER, "-q", "--q-group-size", "32", "--base-model", TARGET)
    said = {}
    for bits in (2, 8):
        status, out, notes = command(*flags, "--q-bits", str(bits), "--mlx-path", tmp_path / f"out{bits}")
        assert (status, notes) == (0, "")
        pattern = (
            r"\S+: hidden size 384, vocabulary 2048, exit_dim \d+, 1 block, rnn\n"
            r"size: \d+\.\d\d MB before, (\d+\.\d\d) MB after, (\d+\.\d+) bits per weight\n"
            r"outputs: differ by at most (\S+) \(largest logit \S+\) on random inputs, the same first choice on \d+%\n"
            rf"tokens per round: (\d\.\d\d) before, (\d\.\d\d) after, greedy, {re.escape(str(TARGET))}\n"
        )
        found = re.fullmatch(pattern, out)
        assert found, out
        said[bits] = [float(number) for number in found.groups()]
    megabytes, bits_per_weight, off, before, after = range(5)
    assert said[2][megabytes] < said[8][megabytes] and said[2][off] > said[8][off]
    assert 3 < said[2][bits_per_weight] < 3.5 and 9 < said[8][bits_per_weight] < 9.5
    assert said[2][before] == said[8][before] > 1.2 and said[2][after] < said[8][after]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens for each of the report's prompts."""
    monkeypatch.setattr("mlx_redrafter.convert.report.NEW_TOKENS", 10)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("depth", [1, 3])
def test_tokens_per_round_are_compared_at_the_depth_of_the_result(depth: int, tmp_path: Path) -> None:
    done = convert(DRAFTER, tmp_path / "out", dtype="float32", base_model=str(TARGET), draft_depth=depth)
    assert done.tokens_per_round is not None
    before, after = done.tokens_per_round
    assert before == after and 1 < before <= 1 + depth


DIVISIBLE = [form for form in FORMS if "3 ranks" not in form]  # the demo's sizes are no multiples of 3


def eight_bits(source: Path, place: Path) -> Path:
    """Where a checkpoint is, converted to 8 bits."""
    assert command("--model", source, "--mlx-path", place, "-q", "--q-bits", "8", "--q-group-size", "32")[0] == 0
    return place


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's drafter in 8 bits."""
    return eight_bits(DRAFTER, tmp_path_factory.mktemp("packed") / "out")


def test_a_drafter_in_eight_bits_decodes_what_the_target_says(packed: Path) -> None:
    model, tokenizer, _ = load_demo()
    ids = encode(tokenizer, demo_prompts()[0])
    made = list(generate_step(ids, model, load_drafter(packed, model), max_tokens=24, beam_width=2, draft_depth=3))
    assert [token for token, _, _ in made] == [token for token, _, _ in generate_step(ids, model, max_tokens=24)]
    assert any(drafted for _, _, drafted in made), "negative control: it guesses"


@pytest.mark.parametrize("form", DIVISIBLE)
def test_the_demos_drafter_is_the_same_in_eight_bits_from_any_form(form: str, packed: Path, tmp_path: Path) -> None:
    source = FORMS[form](tmp_path / "in", tensors(load_drafter(DRAFTER)))
    made, expected = load_drafter(eight_bits(source, tmp_path / "out")), load_drafter(packed)
    assert same(tensors(made), tensors(expected))
    for size in ("hidden_size", "vocab_size", "exit_dim", "num_draft_layers", "rnn"):
        assert getattr(made.args, size) == getattr(expected.args, size)


def test_an_existing_result_is_replaced_only_by_force(tmp_path: Path) -> None:
    source = apple(tmp_path / "in", tensors(make()))
    convert(source, tmp_path / "out")
    other = apple(tmp_path / "other", tensors(make(seed=1)))
    status, _, said = command("--hf-path", other, "--mlx-path", tmp_path / "out")
    assert (
        status == 1
        and said == f"error: {tmp_path / 'out'} exists already: give another --mlx-path, or --force to replace it\n"
    )
    assert same(tensors(load_drafter(tmp_path / "out")), tensors(make()))
    assert command("--hf-path", other, "--mlx-path", tmp_path / "out", "--force")[0] == 0
    assert same(tensors(load_drafter(tmp_path / "out")), tensors(make(seed=1)))
    # A failure leaves even what may be replaced.
    (other / WEIGHTS).write_bytes(b"")
    assert command("--hf-path", other, "--mlx-path", tmp_path / "out", "--force")[0] == 1
    assert same(tensors(load_drafter(tmp_path / "out")), tensors(make(seed=1)))
    assert {path.name for path in tmp_path.iterdir()} == {"in", "other", "out"}


SLOW = """import signal, sys, time
from mlx_redrafter.convert import conversion
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may ignore it
name = sys.argv[3]
real = getattr(conversion, name)
def slow(*args):
    made = real(*args)
    print("slow", flush=True)
    time.sleep(60)
    return made
setattr(conversion, name, slow)
conversion.convert(sys.argv[1], sys.argv[2])
"""


@pytest.mark.parametrize(
    ("how", "during"),
    [
        (signal.SIGKILL, "write"),
        (signal.SIGTERM, "write"),
        (signal.SIGINT, "write"),
        (signal.SIGKILL, "measured_result"),
    ],
)
def test_a_killed_run_leaves_nothing_that_loads(how: signal.Signals, during: str, tmp_path: Path) -> None:
    source, into = apple(tmp_path / "in", tensors(make())), tmp_path / "result"
    into.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, str(source), str(into / "out"), during],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"slow\n"
        process.send_signal(how)
    assert process.returncode != 0
    assert not (into / "out").exists() and not [
        path for path in into.iterdir() if not path.name.startswith(".convert-unfinished-")
    ]
    for left in into.glob("*/new"):
        assert (left / WEIGHTS).exists() and how != signal.SIGINT
        with pytest.raises(CheckpointError, match="got model_type 'unfinished'"):
            load_drafter(left)
    # What it was writing does not stand in the way of the next run.
    assert came_through(convert(source, into / "out"), make())


def test_uploading_makes_the_repository_and_puts_the_directory_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    class Api:
        def create_repo(self, **options: Any) -> None:
            calls.append(("create_repo", options))

        def upload_folder(self, **options: Any) -> None:
            calls.append(("upload_folder", options))
            assert load_drafter(options["folder_path"]).args == make().args
            if options["repo_id"] == "some/closed":
                raise OSError("403\nForbidden")

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    source = apple(tmp_path / "in", tensors(make()))
    assert command("--hf-path", source, "--mlx-path", tmp_path / "out", "--upload-repo", "some/one")[0] == 0
    assert [name for name, _ in calls] == ["create_repo", "upload_folder"]
    assert {options["repo_id"] for _, options in calls} == {"some/one"}
    status, _, said = command("--hf-path", source, "--mlx-path", tmp_path / "out2", "--upload-repo", "some/closed")
    assert (
        status == 1
        and said == f"error: {tmp_path / 'out2'} is written, but not uploaded to some/closed: 403 Forbidden\n"
    )
    assert (tmp_path / "out2").exists()


MEASURED = """import resource, sys
scale = 1 if sys.platform == "darwin" else 1024
if sys.argv[4] == "pickle":
    import torch
from mlx_redrafter.convert.conversion import convert
before = scale * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[1], sys.argv[2], **eval(sys.argv[3]))
print(scale * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def large(dtype: str) -> dict[str, mx.array]:
    """Tensors of a drafter of 190 MB, most of them in the head: a smaller one is lost in what any run takes."""
    rows = 18_000 * 4 // getattr(mx, dtype).size
    shapes = {
        "rnn_u.weight": (1024, 1024),
        "rnn_u.bias": (1024,),
        "rnn_w.weight": (1024, 1024),
        **{f"lm_head.{n}.linear.weight": (2048, 2048) for n in range(2)},
        **{f"lm_head.{n}.linear.bias": (2048,) for n in range(2)},
        "lm_head.2.weight": (rows, 2048),
    }
    return {name: (0.01 * mx.random.normal(shape)).astype(getattr(mx, dtype)) for name, shape in shapes.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "dtype", "how"),
    [
        *(("file", "float32", how) for how in ({}, {"quantize": True})),
        *(("file", "float16", how) for how in ({"quantize": True, "head_bits": 0}, {"dtype": "float32"})),
        ("ranks", "float32", {"quantize": True}),
        *(
            pytest.param("pickle", dtype, {"quantize": True}, marks=pytest.mark.torch)
            for dtype in ("float32", "float16")
        ),
    ],
    ids=str,
)
def test_memory_stays_within_one_and_a_half_times_the_drafter(
    form: str, dtype: str, how: dict[str, Any], tmp_path: Path
) -> None:
    arrays = large(dtype)
    size = sum(array.nbytes for array in arrays.values())
    if form == "ranks":
        ranks(tmp_path / "in", arrays, 2)
    elif form == "pickle":
        torch = pytest.importorskip("torch", reason="torch is not installed")
        (tmp_path / "in").mkdir()
        values = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        torch.save(values, tmp_path / "in" / "drafter.pt")
        del values
    else:
        save(tmp_path / "in" / WEIGHTS, arrays)
    arguments = [str(tmp_path / "in"), str(tmp_path / "out"), repr(how), form]
    said = subprocess.run(
        # A child begins with its parent's peak as its own: a shell stands between.
        ["/bin/sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", MEASURED, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0.05 * size < int(said.stdout) < 1.5 * size
