"""Stateless heads in their authors' layouts: logits match what the original code computed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import base, command, prefixed, refused, save
from heads import draft_logits, make_head
from mlx.utils import tree_flatten
from published import Arrays, list_golden, publish, read_golden
from small import save_target, small_llama
from toys import make_model, make_tokenizer

from mlx_redrafter.checkpoints import load_drafter
from mlx_redrafter.convert.conversion import convert
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.errors import CheckpointError, RedrafterError

NAMES = list_golden("heads/*")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with the output matrix of the golden Medusa v2 heads."""
    model = small_llama(hidden=48, vocab=97, tie_word_embeddings=False)
    model.lm_head.weight = read_golden("medusa_v2")[1]["target.lm_head.weight"]
    directory = tmp_path_factory.mktemp("target")
    save_target(directory, model, make_tokenizer()._tokenizer)
    return directory


def compute_logits(drafter: Drafter, golden: Arrays) -> np.ndarray:
    """(N, 2, P, V) the drafter's logits, arranged as in the golden file."""
    hidden, expected = golden["hidden_states"], golden["logits"]
    stages, texts, places = expected.shape[:3]
    tokens = golden.get("tokens", mx.zeros((texts, places + stages), mx.int32))
    read = mx.stack([tokens[:, i : i + places].reshape(-1) for i in range(stages)], axis=1)
    return np.array(draft_logits(drafter, hidden.reshape(texts * places, -1), read).reshape(expected.shape))


def assert_golden(path: Path, name: str) -> None:
    """Asserts that the loaded drafter reproduces the golden logits."""
    golden = read_golden(name)[1]
    np.testing.assert_allclose(compute_logits(load_drafter(path), golden), golden["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_logits_match_the_original(name: str, target: Path, tmp_path: Path) -> None:
    base_model = str(target) if name == "medusa_v2" else None
    done = convert(publish(name, tmp_path / "in"), tmp_path / "out", base_model=base_model)
    assert_golden(done.path, name)
    assert done.args.hidden_state == "after_norm" and done.difference[0] == 0
    # Negative controls: tokens of another text, and states of another text.
    golden = read_golden(name)[1]
    if "tokens" in golden:
        assert not np.allclose(
            compute_logits(load_drafter(done.path), golden | {"tokens": golden["tokens"][::-1]}),
            golden["logits"],
            atol=1e-2,
        )
    other = golden | {"hidden_states": golden["hidden_states"][::-1]}
    assert not np.allclose(compute_logits(load_drafter(done.path), other), golden["logits"], atol=1e-2)


def test_a_published_head_loads_without_conversion(tmp_path: Path) -> None:
    loaded = load_drafter(publish("mlp_speculator", tmp_path / "in"))
    converted = load_drafter(convert(tmp_path / "in", tmp_path / "out").path)
    assert tree_flatten(loaded.parameters())[0][1].tolist() == tree_flatten(converted.parameters())[0][1].tolist()
    with pytest.raises(CheckpointError, match="expects hidden size"):
        load_drafter(tmp_path / "in", make_model())


def test_an_excessive_draft_depth_is_refused(tmp_path: Path) -> None:
    pattern = r"draft_depth must be from 1 to \d with this drafter, got 9"
    refused(publish("medusa", tmp_path / "in"), pattern, tmp_path / "out", "--draft-depth", "9")


@pytest.mark.parametrize("name", [name for name in NAMES if "medusa" not in name])
def test_greedy_drafts_match_the_original(name: str, tmp_path: Path) -> None:
    drafter, golden = load_drafter(convert(publish(name, tmp_path / "in"), tmp_path / "out").path), read_golden(name)[1]
    places = golden["hidden_states"].shape[1]
    advance, state = drafter.begin(golden["hidden_states"][:, -1], lambda tokens: tokens), None
    token = golden["tokens"][:, places - 1]
    for expected in golden["greedy_tokens"].T:
        logits, state = advance(token, state)
        token = mx.argmax(logits, axis=-1)
        assert token.tolist() == expected.tolist()


def test_the_hidden_state_is_recorded(tmp_path: Path) -> None:
    source = publish("medusa", tmp_path / "in")
    status, out, _ = command("--hf-path", source, "--mlx-path", tmp_path / "out", "--hidden-state", "before_norm")
    assert status == 0 and "medusa, hidden size 48, vocabulary 97, heads 3, blocks 1; reads" in out
    assert "reads the hidden state before the final norm" in out
    assert load_drafter(tmp_path / "out").args.reads_before_norm


def vllm(arrays: Arrays) -> Arrays:
    renamed = {re.sub(r"^(\d)\.(\d)\.linear\.", r"blocks.\1.layers.\2.", name): x for name, x in arrays.items()}
    return {re.sub(r"^(\d)\.\d\.weight", r"lm_heads.\1.weight", name): x for name, x in renamed.items()}


VLLM = {
    "architectures": ["MedusaModel"],
    "hidden_size": 48,
    "model_type": "medusa",
    "num_heads": 5,
    "num_hidden_layers": 1,
    "truncated_vocab_size": None,
    "vocab_size": 97,
    **dict.fromkeys(("medusa_num_heads", "medusa_num_layers", "base_model_name_or_path")),
}
"""vLLM's config of Medusa heads; None removes the authors' keys."""


def all_names(arrays: Arrays) -> Arrays:
    """Tied tensors under all of their published names."""
    copies = {}
    for name, array in arrays.items():
        for stage in range(1, 4):
            if re.search(r"(?<!_)\b(emb|ln|head)\.0\b", name):
                copies[re.sub(r"\b(emb|ln|head)\.0\b", rf"\1.{stage}", name)] = array
            elif stage > 1 and "proj.1" in name and "_proj" not in name:
                copies[name.replace("proj.1", f"proj.{stage}")] = array
    copies |= {f"{gate}_emb.0.weight": arrays["forget_emb.0.weight"] for gate in ("input", "cell", "output")
               if "forget_emb.0.weight" in arrays}  # fmt: skip
    return arrays | copies


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("medusa", lambda arrays: prefixed("medusa_head.", arrays) | base()),
        ("medusa_2layers", lambda arrays: prefixed("module.medusa_head.", arrays)),
        ("medusa_2layers", vllm),
        ("mlp_speculator", lambda arrays: {k.removeprefix("speculator."): v for k, v in arrays.items()}),
        ("mlp_speculator_tied", all_names),
        ("arctic_sum_rnn", all_names),
        ("arctic_lstm", lambda arrays: prefixed("speculator.", all_names(arrays))),
    ],
)
def test_alternative_tensor_names_are_read(name: str, change: Any, tmp_path: Path) -> None:
    directory = publish(name, tmp_path / "in", arrays=change(read_golden(name)[0]))
    assert_golden(convert(directory, tmp_path / "out").path, name)


def test_blocks_without_biases_have_none(tmp_path: Path) -> None:
    arrays = {k: x for k, x in vllm(read_golden("medusa")[0]).items() if not k.endswith(".bias")}
    drafter = load_drafter(convert(publish("medusa", tmp_path / "in", arrays=arrays), tmp_path / "out").path)
    biases = [x for name, x in tree_flatten(drafter.parameters()) if name.endswith(".bias")]
    assert len(biases) == 3 and not any(x.any().item() for x in biases)


def test_vllms_config_of_medusa_heads_is_read(tmp_path: Path) -> None:
    arrays = vllm(read_golden("medusa")[0])
    directory = publish("medusa", tmp_path / "in", arrays=arrays, **VLLM)
    (directory / "medusa_lm_head.safetensors").rename(directory / "model.safetensors")
    assert_golden(directory, "medusa")
    assert_golden(convert(directory, tmp_path / "out").path, "medusa")
    shared = {k: x for k, x in arrays.items() if not re.fullmatch(r"lm_heads\.[1-9]\.weight", k)}
    directory = publish("medusa", tmp_path / "shared", arrays=shared, **VLLM, original_lm_head=True)
    golden = read_golden("medusa")[1]
    found = compute_logits(load_drafter(convert(directory, tmp_path / "out2").path), golden)
    np.testing.assert_allclose(found[0], golden["logits"][0], atol=1e-4, rtol=0)
    assert not np.allclose(found[1], golden["logits"][1], atol=1e-2), "its own matrix was dropped"


def test_a_single_medusa_head_is_read(tmp_path: Path) -> None:
    arrays, golden, *_ = read_golden("medusa")
    one = publish("medusa", tmp_path / "in", arrays={name: x for name, x in arrays.items() if name.startswith("0.")})
    drafter = load_drafter(convert(one, tmp_path / "out").path)
    assert drafter.args.max_depth == 1
    np.testing.assert_allclose(compute_logits(drafter, golden)[0], golden["logits"][0], atol=1e-4, rtol=0)


def test_a_token_map_is_the_draft_vocabulary(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).permutation(97)[:20]
    arrays = vllm(read_golden("medusa")[0])
    whole = convert(publish("medusa", tmp_path / "in", arrays=arrays), tmp_path / "out").path
    arrays = {k: x[mx.array(ids)] if "lm_heads" in k else x for k, x in arrays.items()} | {"token_map": mx.array(ids)}
    some = convert(publish("medusa", tmp_path / "some", arrays=arrays, vocab_size=97), tmp_path / "out2").path
    golden = read_golden("medusa")[1]
    found = compute_logits(load_drafter(some), golden)
    np.testing.assert_allclose(
        found[..., ids], compute_logits(load_drafter(whole), golden)[..., ids], atol=1e-6, rtol=1e-6
    )
    assert np.isinf(np.delete(found, ids, axis=-1)).all()


def changed(name: str, drop: str = "nothing", arrays: Arrays | None = None, **config: Any) -> Any:
    """Writes a published head with some tensors dropped or replaced, and config changes."""
    weights = {key: array for key, array in read_golden(name)[0].items() if drop not in key} | (arrays or {})
    return lambda directory: publish(name, directory, arrays=weights, **config)


ODD: dict[str, Arrays] = {
    "two layers": {"proj.0.1.weight": mx.ones((32, 32))},
    "narrow": {"input_proj.0.weight": mx.ones((40, 47))},
    "NaN": {"head.0.weight": mx.full((97, 40), mx.nan)},
    "unknown": {"x.weight": mx.ones(3)},
}

REFUSED: dict[str, tuple[Any, str]] = {
    "no output matrix": (
        changed("medusa", "1.1.weight"),
        "incomplete drafter: IN .* medusa, and has no output.1.weight",
    ),
    "a block without its bias": (
        changed("medusa", "1.0.linear.bias"),
        "incomplete drafter: IN .* medusa, and has no blocks.1.0.*",
    ),
    "half a block": (changed("medusa", "0.0.linear.weight"), "incomplete drafter: IN holds no blocks.0.0.linear.*"),
    "heads that use the target's matrix": (changed("medusa_v2"), "IN holds Medusa heads that use .*--base-model"),
    "an unknown tensor": (changed("medusa", arrays=ODD["unknown"]), "IN holds a tensor that no medusa has: 'x.weight'"),
    "no number of stages": (changed("mlp_speculator", n_predict=None), "expected n_predict in IN.*, got none"),
    "fewer stages than it says": (
        changed("mlp_speculator", n_predict=4),
        "incomplete drafter: IN .*, and has no emb.3.*",
    ),
    "untied gates": (changed("arctic_lstm", tie_lstm_embs=False), "IN: expected tie_lstm_embs true .*, got False"),
    "several layers a stage": (changed("arctic_sum_rnn", arrays=ODD["two layers"]), "IN holds .*'proj.0.1.weight'"),
    "no cell": (changed("arctic_lstm", "cell_proj.1"), "incomplete drafter: IN holds 3 of the four gates .*"),
    "a narrow gate": (changed("arctic_lstm", arrays=ODD["narrow"]), "IN: expected the matrices of proj.0 to .*"),
    "NaN": (changed("arctic_lstm", arrays=ODD["NaN"]), "IN: head.weight holds NaN or infinity"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_incomplete_heads_are_refused(case: str, tmp_path: Path) -> None:
    write, pattern = REFUSED[case]
    write(tmp_path / "in")
    refused(tmp_path / "in", pattern.replace("IN", re.escape(str(tmp_path / "in"))), tmp_path / "result")


def test_another_base_model_is_refused_with_both_numbers(target: Path, tmp_path: Path) -> None:
    narrow = publish("arctic_sum_rnn", tmp_path / "in")
    trained = "trained for meta-llama/Llama-3.1-8B-Instruct"
    pattern = f"{re.escape(str(narrow))}, {trained}, expects hidden size 44, the target has 48"
    refused(narrow, pattern, tmp_path / "result", "--base-model", str(target))
    arrays = {
        name: array[:40, :40] if array.ndim == 2 else array[:40] for name, array in read_golden("medusa_v2")[0].items()
    }
    with pytest.raises(CheckpointError, match="expects hidden size 40, the target has 48"):
        convert(publish("medusa_v2", tmp_path / "v2", arrays=arrays), tmp_path / "out", base_model=str(target))


def write_counts(file: Path, counts: Any) -> Path:
    file.write_text(json.dumps(counts))
    return file


@pytest.mark.parametrize("name", ["medusa", "mlp_speculator", "mlp_speculator_tied", "arctic_lstm"])
def test_a_vocabulary_is_trimmed_to_frequent_tokens(name: str, tmp_path: Path) -> None:
    ids = np.random.default_rng(1).permutation(97)
    source, golden = publish(name, tmp_path / "in"), read_golden(name)[1]
    as_list = write_counts(tmp_path / "ids.json", ids.tolist())
    as_counts = write_counts(tmp_path / "counts.json", {str(token): 1000 - at for at, token in enumerate(ids.tolist())})
    for at, file in enumerate((as_list, as_counts)):
        done = convert(source, tmp_path / f"out{at}", draft_vocab_size=20, token_counts=file)
        found = compute_logits(load_drafter(done.path), golden)
        np.testing.assert_allclose(found[..., ids[:20]], golden["logits"][..., mx.array(ids[:20])], atol=1e-4)
        assert np.isinf(np.delete(found, ids[:20], axis=-1)).all() and done.difference[0] < 1e-5
        assert done.args.draft_vocab_size == 20
    with pytest.raises(CheckpointError, match="already has a draft vocabulary of 20 tokens"):
        convert(done.path, tmp_path / "again", draft_vocab_size=10, token_counts=as_list)


@pytest.mark.parametrize(
    ("counts", "size", "pattern"),
    [
        ([1, 2, 3], 4, "from 1 to the 3 tokens in .*, got 4"),
        ([1, 2, 97], 2, "expected token ids from 0 to 96, each once"),
        ([1, 2, 1], 2, "expected token ids from 0 to 96, each once"),
        ([1.5, {}], 1, "cannot read token counts from .*"),
    ],
)
def test_wrong_token_counts_are_refused(counts: Any, size: int, pattern: str, tmp_path: Path) -> None:
    source, file = publish("medusa", tmp_path / "in"), write_counts(tmp_path / "counts.json", counts)
    with pytest.raises(RedrafterError, match=pattern):
        convert(source, tmp_path / "out", draft_vocab_size=size, token_counts=file)
    with pytest.raises(RedrafterError, match="needs both"):
        convert(source, tmp_path / "out", draft_vocab_size=2)


@pytest.mark.parametrize("kind", ["medusa", "mlp_speculator", "arctic_lstm"])
def test_heads_are_quantized_and_dequantized(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    drafter = make_head(kind, 64, 96, inner_dim=64)
    save(source / "model.safetensors", dict(tree_flatten(drafter.parameters())))
    (source / "config.json").write_text(json.dumps(drafter.args.to_dict()))
    done = convert(source, tmp_path / "out", True, 32, 8, head_bits=4)
    bits = {name: layer.bits for name, layer in load_drafter(done.path).named_modules() if hasattr(layer, "bits")}
    assert set(bits.values()) == {4, 8} and all(
        (each == 4) == drafter.find_part(name).startswith("head") for name, each in bits.items()
    )
    assert bool([name for name in bits if name.startswith("emb")]) is (kind != "medusa")
    assert 0 < done.difference[0] < done.difference[1]
    back = load_drafter(convert(done.path, tmp_path / "back", dequantize=True).path)
    assert not [layer for _, layer in back.named_modules() if hasattr(layer, "bits")]
    tokens, hidden = mx.array([[1, 2]]), mx.random.normal((1, 64))
    assert mx.allclose(
        draft_logits(back, hidden, tokens), draft_logits(load_drafter(done.path), hidden, tokens), atol=1e-3
    )
