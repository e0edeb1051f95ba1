"""Heads as others publish them: Medusa's, IBM's MLP speculators, Snowflake's Arctic speculators.

Nothing is read before all shapes fit. Sizes come from the tensors; of the config is believed what no tensor tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..checkpoints import DRAFT_IDS, check_draft_ids, check_fit, derive_args
from ..drafters import arctic_lstm, medusa, mlp_speculator
from ..drafters.protocol import AFTER_NORM, Drafter
from ..engine.supported_models import capture_output, find_parts, model_name
from ..errors import CheckpointError
from .tensors import Stored, read_tensor

Renames = Sequence[tuple[str, str]]
"""(pattern of a published name, our name); an empty one for a copy of a shared tensor."""

MEDUSA: Renames = (
    (r"(\d{1,3})\.(\d{1,3})\.linear\.(weight|bias)", r"blocks.\1.\2.linear.\3"),
    (r"(\d{1,3})\.\d{1,3}\.weight", r"output.\1.weight"),
)

MEDUSA_VLLM: Renames = (
    (r"blocks\.(\d{1,3})\.layers\.(\d{1,3})\.(weight|bias)", r"blocks.\1.\2.linear.\3"),
    (r"lm_heads\.(\d{1,3})\.weight", r"output.\1.weight"),
    ("token_map", DRAFT_IDS),
)

SPECULATOR: Renames = ((r"(emb|proj|ln|head)\.(\d{1,3})(?:\.0)?\.(weight|bias)", r"\1.\2.\3"),)

TIED_SPECULATOR: Renames = ((r"(?:(?:emb|ln|head)\.(?!0\.)|proj\.(?![01]\.))\d{1,3}\..*", ""), *SPECULATOR)

ARCTIC_LSTM: Renames = (
    (r"forget_emb\.0\.weight", "emb.weight"),
    (r"(?:input|output|cell)_emb\.0\.weight|head\.(?!0\.)\d{1,3}\.weight", ""),
    (r"(forget|input|output|cell)_proj\.([01])\.weight", r"proj.\2.weight \1"),
    (r"(cell_ln|state_ln)\.0\.(weight|bias)", r"\1.\2"),
    (r"head\.0\.weight", "head.weight"),
)


def read_head(
    tensors: Mapping[str, Stored], config: dict[str, Any], where: str, model: nn.Module | None
) -> Drafter | None:
    """The head of one of these kinds; None where the tensors are of none.

    Args:
        tensors: by their names without the wrappers that trainers add.
        config: the checkpoint's.
        where: the checkpoint's name, for errors.
        model: the target, whose output matrix some Medusa heads use.

    Raises:
        CheckpointError: half a head, or of a form that is not supported.
    """
    inside = {name.partition("medusa_head")[2].partition(".")[2]: part for name, part in tensors.items()}
    inside.pop("", None)  # tensors of the base model beside the heads
    says_medusa = "medusa_num_heads" in config
    # Without that, one head alone has the names of an old recurrent drafter.
    numbered = r"\d+\.\d+\.linear\.weight" if says_medusa else r"[1-9]\d*\.\d+\.(linear\.)?weight"
    if inside or any(re.fullmatch(numbered, name) for name in tensors):
        return read_medusa(rename(inside or tensors, MEDUSA, where), config, where, model)
    if any(name.startswith("blocks.0.layers.") for name in tensors):
        return read_medusa(rename(tensors, MEDUSA_VLLM, where), config, where, model)
    bare = {name.removeprefix("speculator."): part for name, part in tensors.items()}
    if "forget_emb.0.weight" in bare:
        return read_arctic_lstm(rename(bare, ARCTIC_LSTM, where), config, where)
    if {"emb.0.weight", "emb.0.0.weight"} & bare.keys():
        renames = TIED_SPECULATOR if config.get("tie_weights") is True else SPECULATOR
        return read_mlp_speculator(rename(bare, renames, where), config, where)
    if says_medusa or config.get("model_type") == mlp_speculator.MODEL_TYPE:
        kind = "Medusa heads" if says_medusa else "a speculator"
        raise CheckpointError(f"{where}/config.json is that of {kind}, its tensors begin {sorted(tensors)[:3]}")
    return None


def rename(tensors: Mapping[str, Stored], renames: Renames, where: str) -> dict[str, Stored]:
    """The tensors by our names, without copies of shared ones.

    Raises:
        CheckpointError: a name that no head of this kind has.
    """
    found = {}
    for name, stored in sorted(tensors.items()):
        pattern, ours = next(((old, new) for old, new in renames if re.fullmatch(old, name)), ("", None))
        if ours is None:
            raise CheckpointError(f"{where}: no head of this kind has a tensor {name}")
        if ours:
            found[re.sub(pattern, ours, name)] = stored
    return found


def read_medusa(
    tensors: Mapping[str, Stored], config: dict[str, Any], where: str, model: nn.Module | None
) -> medusa.Drafter:
    """Medusa heads. Those without output matrices use the target's, of which one copy is made."""
    width = _need(tensors, "blocks.0.0.linear.weight", where).shape[0]
    given: dict[str, mx.array] = {}
    if not any(name.startswith("output.") for name in tensors):
        if model is None:
            raise CheckpointError(f"{where} holds Medusa heads that use the target's output matrix: give --base-model")
        given["output.0.weight"] = find_output_matrix(model)
        rows = given["output.0.weight"].shape[0]
    else:
        rows = _need(tensors, "output.0.weight", where).shape[0]
    sizes = {
        "hidden_size": width,
        "vocab_size": config.get("vocab_size") if DRAFT_IDS in tensors else rows,
        "num_heads": 1 + _last(tensors, r"blocks\.(\d+)\..*"),  # the config's number is often wrong
        "num_layers": 1 + _last(tensors, r"blocks\.0\.(\d+)\..*"),
        "tie_output": bool(given),
    }
    args = derive_args(medusa.DrafterArgs, _shapes(tensors), sizes | _defaults(config), where)
    drafter = medusa.Drafter(args)
    if given and model is not None:
        check_fit(drafter, model, where)
    if not any(name.endswith(".bias") for name in tensors):  # vLLM's layout may have none
        given |= {name: mx.zeros(shape) for name, shape in _expected(drafter).items() if name.endswith(".bias")}
    return fill(drafter, {name: [part] for name, part in tensors.items()}, where, given)


def read_mlp_speculator(tensors: Mapping[str, Stored], config: dict[str, Any], where: str) -> mlp_speculator.Drafter:
    """An MLP speculator, IBM's or Snowflake's."""
    sizes = _speculator_sizes(_need(tensors, "proj.0.weight", where), _need(tensors, "emb.0.weight", where), config)
    args = derive_args(mlp_speculator.DrafterArgs, _shapes(tensors), sizes | _defaults(config), where)
    return fill(mlp_speculator.Drafter(args), {name: [part] for name, part in tensors.items()}, where)


def read_arctic_lstm(tensors: Mapping[str, Stored], config: dict[str, Any], where: str) -> arctic_lstm.Drafter:
    """An Arctic LSTM, whose four projections become one."""
    for key in ("tie_weights", "tie_lstm_embs"):
        if config.get(key, True) is not True:
            raise CheckpointError(f"{where}: expected {key} true of an LSTM speculator, got {config[key]!r:.40}")
    parts = {name: [part] for name, part in tensors.items() if " " not in name}
    for step in (0, 1):
        parts[f"proj.{step}.weight"] = [
            _need(tensors, f"proj.{step}.weight {gate}", where) for gate in arctic_lstm.GATES
        ]
    sizes = _speculator_sizes(parts["proj.0.weight"][0], _need(tensors, "emb.weight", where), config)
    sizes["tie_weights"] = True
    args = derive_args(arctic_lstm.DrafterArgs, _shapes(tensors), sizes | _defaults(config), where)
    return fill(arctic_lstm.Drafter(args), parts, where)


def fill(
    drafter: Any,
    parts: Mapping[str, Sequence[Stored]],
    where: str,
    given: Mapping[str, mx.array] | None = None,
) -> Any:
    """The drafter, with its tensors read.

    Args:
        parts: what each is joined of.
        given: arrays that are in no file.

    Raises:
        CheckpointError: tensors are missing, too many, or of other shapes.
    """
    given = dict(given or {})
    expected = {name: shape for name, shape in _expected(drafter).items() if name not in given}
    for name in sorted(expected.keys() | parts.keys()):
        rows = [part.shape for part in parts.get(name, ())]
        got = (sum(shape[0] for shape in rows), *rows[0][1:]) if rows else None
        if got != expected.get(name) or any(shape[1:] != rows[0][1:] for shape in rows):
            raise CheckpointError(f"half a head: {where}: expected {name} of shape {expected.get(name)}, got {got}")
    arrays = {
        name: read_tensor(name, of, where, integers=name == DRAFT_IDS, axes=len(expected[name]))
        for name, of in parts.items()
    }
    if DRAFT_IDS in arrays:
        check_draft_ids(arrays[DRAFT_IDS], drafter.args.vocab_size, where)
    drafter.load_weights(list((arrays | given).items()))
    return drafter


def find_output_matrix(model: nn.Module) -> mx.array:
    """(V, D) the matrix that makes a target's logits of its hidden states, dequantized.

    Raises:
        CheckpointError: it has none of which the logits are the product.
    """
    parts = find_parts(model)
    named = [layer for name, layer in model.named_modules() if name.rpartition(".")[2] == "lm_head"]
    layer: Any = named[0] if named else parts.embedding
    matrix: mx.array = layer.weight
    if "scales" in layer:
        how = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
        matrix = mx.dequantize(matrix, layer.scales, layer.get("biases"), **how)
    logits, hidden = capture_output(parts.final_norm, lambda: model(mx.array([[1, 2, 3]])))
    product = hidden[-1].astype(mx.float32) @ matrix.T.astype(mx.float32)
    if product.shape != logits.shape or not mx.allclose(product, logits, rtol=0.05, atol=0.05).item():
        raise CheckpointError(f"the logits of {model_name(model)} are not its hidden states times one matrix")
    return matrix


def _speculator_sizes(projection: Stored, embedding: Stored, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_size": projection.shape[-1],
        "vocab_size": embedding.shape[0],
        "inner_dim": projection.shape[0],
        "n_predict": config.get("n_predict"),
        "tie_weights": config.get("tie_weights", False),
        "scale_input": config.get("scale_input", False),
    }


def _defaults(config: dict[str, Any]) -> dict[str, Any]:
    return {"base_model": config.get("base_model_name_or_path"), "hidden_state": AFTER_NORM}


def _need(tensors: Mapping[str, Stored], name: str, where: str) -> Stored:
    if name not in tensors or len(tensors[name].shape) != 2:
        raise CheckpointError(f"half a head: {where} holds no matrix {name}; its tensors begin {sorted(tensors)[:3]}")
    return tensors[name]


def _last(names: Iterable[str], pattern: str) -> int:
    return max(int(found[1]) for name in names if (found := re.fullmatch(pattern, name)))


def _shapes(tensors: Mapping[str, Stored]) -> dict[str, tuple[int, ...]]:
    return {name: part.shape for name, part in tensors.items()}


def _expected(drafter: Drafter) -> dict[str, tuple[int, ...]]:
    flat: Any = tree_flatten(drafter.parameters())
    return {name: array.shape for name, array in flat}
