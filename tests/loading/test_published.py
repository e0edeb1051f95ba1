"""The table of published drafters: its names and kinds, and which configs fit a target."""

import json
import re
from collections import Counter

import mlx.nn as nn
import pytest
from drafter_table import PAGE, insert_table

from helpers.assistants import TARGETS, make_assistant, make_gemma4, publish_assistant
from helpers.checkpoints import load_golden
from helpers.published import list_golden, read_golden
from mlx_redrafter.drafters import KINDS
from mlx_redrafter.loading.drafter_files import PACKAGED
from mlx_redrafter.loading.published import (
    TargetSizes,
    explain_misfit,
    list_published,
    normalize_name,
    read_table,
    read_target_sizes,
)

OTHER_NAMES = {"dflash2": "dflash", "eagle3": "eagle", "recurrent": "recurrent_drafting_drafter"}
"""Kinds in the table -> their `model_type`, if it is another."""


def test_the_table_can_be_used():
    """Each name is found, each kind loads, and nothing is named twice."""
    table = read_table()
    names = Counter(map(normalize_name, table))
    assert [name for name, count in names.items() if count > 1] == []
    for name, drafters in table.items():
        assert normalize_name(name) == name.lower(), f"{name} has an owner or a format"
        assert len({each.repo.lower() for each in drafters}) == len(drafters) > 0, name
        for each in drafters:
            is_packaged = each.repo in PACKAGED
            assert is_packaged or re.fullmatch(r"[\w.-]+/[\w.-]+", each.repo), each.repo
            assert OTHER_NAMES.get(each.kind, each.kind) in KINDS, each.repo
            assert each.source, each.repo


def test_the_page_shows_the_table():
    text = PAGE.read_text(encoding="utf-8")
    assert insert_table(text) == text, "run 'python tests/drafter_table.py'"


def test_the_readmes_drafters_are_those_that_auto_takes():
    text = (PAGE.parent.parent / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.-]+)` \| `([\w.-]+/[\w.-]+)` \|", text, re.MULTILINE)
    assert len(rows) == 9
    for model, repo in rows:
        first = list_published(f"mlx-community/{model}")[0].repo
        assert repo == first, model


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-8B",
        "qwen3-8b/",
        "/models/Qwen3-8B-bf16",
        "mlx-community/Qwen3-8B-4bit",
        "mlx-community/Qwen3-8B-8-bit",
        "mlx-community/Qwen3-8B-4.5bit",
        "mlx-community/Qwen3-8B-mixed-3-4-bit",
        "mlx-community/Qwen3-8B-mixed_3_6",
        "mlx-community/Qwen3-8B-4bit-DWQ-053125",
        "mlx-community/Qwen3-8B-4bit-g32",
        "mlx-community/Qwen3-8B-mxfp4",
        "mlx-community/Qwen3-8B-MXFP4-Q8",
        "Qwen/Qwen3-8B-MLX-4bit",
        "Qwen/Qwen3-8B-FP8",
        "RedHatAI/Qwen3-8B-quantized.w4a16",
        "unsloth/Qwen3-8B-UD-MLX-4bit",
        "unsloth/Qwen3-8B-unsloth-bnb-4bit",
    ],
)
def test_formats_and_owners_do_not_matter(name):
    assert normalize_name(name) == "qwen3-8b"


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("Qwen3-8B-Base", "Qwen3-8B"),
        ("Qwen3-30B-A3B-Instruct-2507-4bit", "Qwen3-30B-A3B-4bit"),
        ("gemma-4-12B-it-qat-4bit", "gemma-4-12B-it-4bit"),
        ("Qwen3.5-27B", "Qwen3.6-27B"),
        ("Qwen3-30B-A3B-Nex-N1", "Qwen3-30B-A3B"),
    ],
)
def test_other_models_have_other_names(name, other):
    assert normalize_name(name) != normalize_name(other)


def test_drafters_are_found_by_name():
    assert list_published("mlx-community/Meta-Llama-3.1-8B-Instruct-4bit")
    assert list_published("mlx-community/gemma-4-e4b-it-4bit")[0].kind == "gemma4_assistant"
    # Models that were trained to be quantized have their own.
    own = list_published("mlx-community/gemma-4-12b-it-qat-4bit")
    assert own
    assert all("-qat-" in each.repo for each in own)
    assert list_published("google/gemma-4-12B-it-qat-q4_0-unquantized") == own
    assert list_published("nobody/no-such-model-4bit") == []


def test_smaller_files_of_a_kind_come_first_unless_the_target_is_wide():
    """Kinds stay where they are."""
    for name, drafters in read_table().items():
        wide = list_published(name, smallest_first=False)
        assert [each.kind for each in wide] == [each.kind for each in drafters]
        assert sorted(wide) == sorted(drafters)
    for name, smaller, wider in [
        ("Qwen3.6-35B-A3B", "MTP-4bit", "MTP-bf16"),
        ("gemma-4-12B-it", "assistant-mxfp4", "assistant-8bit"),
        ("gemma-4-12B-it", "assistant-8bit", "assistant"),
    ]:
        for smallest_first in (True, False):
            order = [each.repo for each in list_published(name, smallest_first=smallest_first)]
            found = [next(repo for repo in order if repo.endswith(x)) for x in (smaller, wider)]
            assert (order.index(found[0]) < order.index(found[1])) is smallest_first


@pytest.mark.parametrize("key", ["gating", "attention_sink_bias"])
def test_parts_that_are_not_read_are_found_before_a_download(key):
    config = read_golden("dflash")[2]
    sizes = [config[x] for x in ("hidden_size", "vocab_size", "num_target_layers")]
    assert explain_misfit(config, TargetSizes(*sizes, nn.Module())) is None
    said = explain_misfit(config | {key: "per-head"}, TargetSizes(*sizes, nn.Module()))
    assert said == f"{key} 'per-head' is not supported"


@pytest.mark.parametrize("name", list_golden("cached/*"))
def test_each_published_config_shows_whether_it_fits(name, tmp_path):
    """Widths, vocabulary and layers of all packagings, compared with what the tensors show."""
    args = load_golden(name, tmp_path).args
    config = read_golden(name)[2]
    inside = config.get("dflash_config", {}).get("num_target_layers")
    n_layers = (
        config.get("num_target_layers")
        or inside
        or 1 + max(getattr(args, "capture_layers", None) or [0])
    )
    target = TargetSizes(args.hidden_size, args.vocab_size, n_layers, nn.Module())
    assert explain_misfit(config, target) is None

    wider = target._replace(hidden_size=args.hidden_size + 8)
    assert "hidden size" in str(explain_misfit(config, wider))
    if name != "dflash_assistant":  # which names no vocabulary size
        larger = target._replace(vocab_size=args.vocab_size + 1)
        assert "vocabulary size" in str(explain_misfit(config, larger))
    if layers := getattr(args, "capture_layers", None):
        fewer = target._replace(n_layers=max(layers))
        assert str(max(layers)) in str(explain_misfit(config, fewer))


NUMBERS = {
    "head_dim",
    "global_head_dim",
    "num_key_value_heads",
    "num_global_key_value_heads",
    "sliding_window",
}
"""Of an assistant's config, which must be its target's."""


@pytest.mark.parametrize("name", TARGETS)
def test_an_assistant_needs_the_heads_and_window_of_its_target(name, tmp_path):
    model = make_gemma4(name)
    text = vars(model.get("language_model", model).args)
    folder = publish_assistant(make_assistant("assistant", model), tmp_path / "assistant")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    target = read_target_sizes(model)
    assert explain_misfit(config, target) is None
    own = config["text_config"]
    for key in NUMBERS & {name for name, value in own.items() if value is not None}:
        other = config | {"text_config": own | {key: 2 * own[key]}}
        said = explain_misfit(other, target)
        assert said and re.fullmatch(r"it expects .* \d+.*, the target has \d+.*", said), key
    said = explain_misfit(config, target._replace(hidden_size=40))
    assert said == f"it expects hidden size {text['hidden_size']}, the target has 40"
