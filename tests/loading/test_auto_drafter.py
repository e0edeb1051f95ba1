"""`--drafter auto` with the real client and a small hub: what is taken, downloaded, and said."""

import json
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.nn as nn
import pytest
from huggingface_hub import constants

from helpers.cached import name_as_published, save_tensors
from helpers.checkpoints import configure
from helpers.families import make_family
from helpers.published import publish
from helpers.small import make_byte_tokenizer, randomised, save_target, small_llama
from mlx_redrafter import load, load_drafter
from mlx_redrafter.drafters import mtp
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.loading import auto_drafter
from mlx_redrafter.loading.checkpoints import load_auto_drafter
from mlx_redrafter.loading.published import list_published

MODEL = "mlx-community/Qwen3-8B-4bit"
DSPARK = "deepseek-ai/dspark_qwen3_8b_block7"
DFLASH2 = "RedHatAI/Qwen3-8B-speculator.dflash2"
DFLASH = "z-lab/Qwen3-8B-DFlash-b16"
EAGLE = "RedHatAI/Qwen3-8B-speculator.eagle3"
"""A model, and the first of its drafters in the table."""

FIRST_NOTE = f"drafter: {DFLASH}, dflash, 0.2 MB to download"


@pytest.fixture
def notes(caplog) -> list[str]:
    """What was logged, without "note: "."""
    caplog.set_level(logging.INFO, "mlx_redrafter")
    found = []

    def keep(record):
        if record.name.startswith("mlx_redrafter"):
            found.append(record.getMessage().removeprefix("note: "))
        return True

    caplog.handler.addFilter(keep)
    return found


def make_small_target(layers: int = 12):
    """A target that the golden DFlash head fits."""
    return small_llama(hidden=48, vocab=101, layers=layers, kv_heads=2)


def save_model(folder: Path, card: dict[str, Any] | None = None) -> Path:
    """Saves a target.

    Args:
        card: the header of its model card.
    """
    save_target(folder, make_small_target(), make_byte_tokenizer(), eos_token_id=0)
    if card is not None:
        (folder / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n# A model\n")
    return folder


def load_auto(name: str | Path):
    """The config of the drafter that `auto` finds; None if it finds none."""
    drafter = load(name, drafter="auto")[2]
    return None if drafter is None else drafter.args


def test_the_first_that_fits_is_taken(hub, notes):
    """Of one that does not fit, only the config is downloaded; of later ones, nothing."""
    save_model(hub.root / MODEL)
    publish("dspark_plain", hub.root / DSPARK)
    publish("dflash", hub.root / DFLASH)
    publish("eagle3", hub.root / EAGLE)
    load(MODEL)
    hub.requests.clear()
    assert load_auto(MODEL).model_type == "dflash"
    assert notes == [
        f"skipped {DSPARK}: it expects hidden size 36, the target has 48",
        f"skipped {DFLASH2}: the hub has no such repository: it was moved or is private",
        FIRST_NOTE,
    ]
    files = [f"{DSPARK}/config.json", f"{DFLASH}/config.json", f"{DFLASH}/model.safetensors"]
    assert hub.list_downloads() == files
    assert not any(EAGLE in request for request in hub.requests)


@pytest.mark.parametrize("number", ["hidden size", "vocabulary size", "number of layers"])
def test_numbers_decide(number, hub, notes, tmp_path):
    sizes = {"hidden size": {"hidden": 64}, "vocabulary size": {"vocab": 99}}
    expected = {"hidden size": 48, "vocabulary size": 101, "number of layers": 12}[number]
    small = {"hidden": 48, "vocab": 101, "layers": 12}
    small |= sizes.get(number, {"layers": 8})
    model = small_llama(kv_heads=2, **small)
    save_target(tmp_path / "Qwen3-8B", model, make_byte_tokenizer())
    publish("dflash", hub.root / DFLASH)
    assert load_auto_drafter(str(tmp_path / "Qwen3-8B"), model) == (None, None)
    assert f"skipped {DFLASH}: it expects {number} {expected}" in " ".join(notes)
    assert hub.list_downloads() == [f"{DFLASH}/config.json"]


def test_a_gated_and_a_damaged_one_are_skipped(hub, notes):
    save_model(hub.root / MODEL)
    publish("dspark", hub.root / DSPARK, hidden_size=48, vocab_size=101)
    hub.gated.add(DSPARK)
    publish("dflash", hub.root / DFLASH2)
    (hub.root / DFLASH2 / "model.safetensors").write_bytes(b"cut")
    publish("dflash", hub.root / DFLASH)
    assert load_auto(MODEL).model_type == "dflash"
    gated, _, damaged, taken = notes
    assert gated == (
        f"skipped {DSPARK}: accept its terms on https://hf.co/{DSPARK}, then run 'hf auth login'"
    )
    assert damaged.startswith(f"skipped {DFLASH2}: cannot read ")
    assert taken == FIRST_NOTE


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (b"<html>", "cannot read {}: it is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b'{"eagle_config": {"eagle_aux_hidden_state_layer_ids": {"a": 1}}}', ""),
        (b'{"hidden_size": "x"}', "it expects hidden size x, the target has 48"),
        (None, "404 Client Error. Entry Not Found for url: {}"),
    ],
)
def test_a_nonsensical_config_is_skipped(config, problem, hub, notes, tmp_path):
    folder = save_model(tmp_path / "Qwen3-8B")
    file = publish("dflash", hub.root / DSPARK) / "config.json"
    file.unlink()
    if config is not None:
        file.write_bytes(config)
    publish("dflash", hub.root / DFLASH)
    assert load_auto(folder).model_type == "dflash"
    before, _, after = f"skipped {DSPARK}: {problem}".partition("{}")
    assert notes[0].startswith(before)
    assert after in notes[0]


def test_a_moved_repository_is_followed(hub, notes):
    save_model(hub.root / MODEL)
    publish("dflash", hub.root / "new-owner" / "new-name")
    hub.moved[DFLASH] = "new-owner/new-name"
    assert load_auto(MODEL).model_type == "dflash"
    assert notes[-1] == FIRST_NOTE


def test_one_too_large_for_memory_is_skipped(hub, notes, monkeypatch):
    save_model(hub.root / MODEL)
    publish("dflash", hub.root / DFLASH)
    monkeypatch.setattr(auto_drafter, "get_free_bytes", lambda: 100_000)
    assert load_auto(MODEL) is None
    assert f"skipped {DFLASH}: it takes 0.2 MB of memory, 0.1 MB are free" in notes
    assert f"{DFLASH}/model.safetensors" not in hub.list_downloads()


def test_a_connection_that_breaks_off_is_resumed(hub, notes):
    save_model(hub.root / MODEL)
    publish("dflash", hub.root / DFLASH)
    hub.cut[DFLASH, "model.safetensors"] = [1000]
    assert load_auto(MODEL).model_type == "dflash"
    assert hub.list_downloads().count(f"{DFLASH}/model.safetensors") == 2


@pytest.mark.slow
def test_a_connection_that_stays_broken(hub, notes):
    """Another drafter is taken; the next start downloads the first again."""
    save_model(hub.root / MODEL)
    publish("dflash", hub.root / DFLASH2)
    publish("dflash", hub.root / DFLASH)
    hub.cut[DFLASH2, "model.safetensors"] = [0] * 6
    assert load_auto(MODEL).model_type == "dflash"
    assert notes[2].startswith(f"skipped {DFLASH2}: ")
    assert notes[3] == FIRST_NOTE
    notes.clear()
    load_auto(MODEL)
    assert notes[-1] == f"drafter: {DFLASH2}, dflash2, 0.2 MB to download"


def test_a_second_start_downloads_nothing(hub, notes):
    save_model(hub.root / MODEL)
    publish("dflash", hub.root / DFLASH)
    load_auto(MODEL)
    hub.requests.clear()
    notes.clear()
    load_auto(MODEL)
    assert hub.list_downloads() == []
    assert notes[-1] == f"drafter: {DFLASH}, dflash, 0.2 MB on this machine"


@pytest.mark.parametrize("failure", ["silent", "error", "page"])
def test_a_hub_that_fails_is_asked_once(failure, hub, notes, tmp_path, monkeypatch):
    """Of its cache, drafters and cards are used without it."""
    publish("dflash", hub.root / DFLASH)
    save_model(hub.root / "someone" / "Story", {"base_model": "Qwen/Qwen3-8B"})
    folder = save_model(tmp_path / "story-4bit", {"base_model": "someone/Story"})
    load_auto(folder)
    notes.clear()
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    hub.failure = failure
    assert load_auto(folder).model_type == "dflash"
    expected = {"silent": "timed out", "error": "Server error", "page": "the hub's answer is not"}
    assert notes[0].startswith(f"only drafters in the cache are tried: {expected[failure]}")
    assert notes[1].startswith(f"drafter: {DFLASH}, dflash, 0.2 MB on this machine; it was trained")
    assert len(notes) == 2
    first = list_published("Qwen3-8B")[0].repo
    assert hub.requests == [f"GET /api/models/{repo}" for repo in ("someone/Story", first)]


@pytest.mark.parametrize("how", ["HF_HUB_OFFLINE", "no network"])
def test_without_the_hub_the_cache_is_used(how, hub, notes, monkeypatch):
    save_model(hub.root / MODEL)
    publish("dspark_plain", hub.root / DSPARK)
    publish("dflash", hub.root / DFLASH)
    load(MODEL)
    if how == "no network":
        monkeypatch.setattr(constants, "ENDPOINT", "http://localhost:9")
        offline = mock.patch.object(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://x:9/{}")
    else:
        offline = mock.patch.object(constants, "HF_HUB_OFFLINE", True)
    with offline:
        assert load_auto(MODEL) is None
    assert [note.partition(":")[0] for note in notes] == [
        "only drafters in the cache are tried",
        f"no drafter was found for {MODEL}",
    ]
    notes.clear()
    with mock.patch.object(constants, "ENDPOINT", hub.url):
        load_auto(MODEL)
    notes.clear()
    with offline:
        assert load_auto(MODEL).model_type == "dflash"
    assert notes[-1] == f"drafter: {DFLASH}, dflash, 0.2 MB on this machine"


def test_an_unknown_name_drafts_from_the_context(hub, notes):
    save_model(hub.root / "nobody" / "Unknown-7B-4bit")
    assert load_auto("nobody/Unknown-7B-4bit") is None
    (note,) = notes
    assert note == (
        "no drafter was found for nobody/Unknown-7B-4bit: python -m mlx_redrafter.train --model "
        "nobody/Unknown-7B-4bit trains one; the context still drafts"
    )


@pytest.mark.parametrize("card", [None, {"base_model": "Qwen/Qwen3-8B"}])
def test_another_format_is_found_by_name(card, hub, notes, tmp_path):
    publish("dflash", hub.root / DFLASH)
    load_auto(save_model(tmp_path / "qwen3-8b-MLX-4bit", card))
    assert notes[-1] == FIRST_NOTE


CHAIN = {"base_model": ["someone/Qwen3-8B-Stories"], "base_model_relation": "quantized"}


@pytest.mark.parametrize(
    "card",
    [
        {"base_model": "Qwen/Qwen3-8B"},
        {"base_model": ["Qwen/Qwen3-8B"], "base_model_relation": "finetune"},
        CHAIN,
    ],
)
def test_a_fine_tune_is_found_by_its_base(card, hub, notes, tmp_path):
    """Also a quantized copy of one; the line says what the drafter was trained for."""
    publish("dflash", hub.root / DFLASH)
    save_model(hub.root / "someone" / "Qwen3-8B-Stories", {"base_model": "Qwen/Qwen3-8B"})
    save_model(hub.root / "me" / "Storyteller-4bit", card)
    load_auto("me/Storyteller-4bit")
    assert notes[-1] == f"{FIRST_NOTE}; it was trained for Qwen/Qwen3-8B"
    load_auto(save_model(tmp_path / "Storyteller-4bit", card))
    assert notes[-1].endswith("on this machine; it was trained for Qwen/Qwen3-8B")


@pytest.mark.parametrize(
    "card", [{}, {"base_model": ["a/b", "c/d"]}, {"base_model": 3}, {"base_model": "../.."}]
)
def test_a_card_without_one_base_is_ignored(card, hub, notes, tmp_path):
    assert load_auto(save_model(tmp_path / "unknown", card)) is None
    assert len(notes) == 1


def test_models_trained_to_be_quantized_have_their_own(hub, notes, tmp_path):
    card = {"base_model": "google/gemma-4-12B-it"}
    assert load_auto(save_model(tmp_path / "gemma-4-12b-it-qat-4bit", card)) is None
    assert all("-qat-" in note for note in notes[:-1])
    assert len(notes) > 1


def save_own(folder: Path, file: str = "model-mtp.safetensors", prefix: str = "") -> nn.Module:
    """Saves a model with a multi-token-prediction layer; returns it.

    Args:
        prefix: of the layer's tensors.
    """
    model = make_family("qwen3_5")
    save_target(folder, model, make_byte_tokenizer())
    config = mtp.select_layer_config(model.args.text_config, "qwen3_5")
    layer = randomised(mtp.Drafter(mtp.DrafterArgs(64, 64, config)), 0)
    arrays = name_as_published(layer)
    save_tensors(folder / file, {prefix + name: array for name, array in arrays.items()})
    return model


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("file", ["model-mtp.safetensors", "mtp.safetensors"])
def test_a_layer_of_the_model_comes_first(file, prefix, hub, notes, tmp_path):
    folder = tmp_path / "Qwen3-8B"
    model = save_own(folder, file, prefix)
    drafter, name = load_auto_drafter(str(folder), model)
    assert drafter.args.model_type == "mtp"
    assert name == f"{folder} (its own layer)"
    assert notes == ["drafter: the model's own drafting layer"]
    assert hub.requests == []


def test_a_layer_beside_a_model_on_the_hub_is_downloaded(hub, notes):
    """mlx-lm leaves that file out."""
    model = save_own(hub.root / MODEL, "mtp.safetensors")
    load(MODEL)
    assert f"{MODEL}/mtp.safetensors" not in hub.list_downloads()
    drafter, _ = load_auto_drafter(MODEL, model)
    assert drafter.args.model_type == "mtp"
    assert f"{MODEL}/mtp.safetensors" in hub.list_downloads()


def test_a_layer_that_does_not_load_is_skipped(hub, notes, tmp_path):
    folder = tmp_path / "unknown"
    model = save_own(folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["model_type"] = config["model_type"] = "other"
    configure(folder, **config)
    assert load_auto_drafter(str(folder), model) == (None, None)
    assert notes[1].startswith(f"skipped {folder} (its own layer): ")
    assert len(notes) == 3


@pytest.mark.parametrize("on_hub", [True, False])
def test_an_assistant_beside_the_target_comes_next(on_hub, hub, notes, tmp_path):
    root = hub.root / MODEL if on_hub else tmp_path / "bundle"
    save_model(root / "target")
    publish("dflash", root / "assistant")
    for name in [MODEL] if on_hub else [root, root / "target"]:
        assert load_auto(name).model_type == "dflash"
        assert notes[-1] == "drafter: the assistant beside the model"
    if not on_hub:
        assert load_drafter(root).args.model_type == "dflash"


def test_a_packaged_drafter_needs_no_hub(hub, tmp_path):
    folder = save_model(tmp_path / "SmolLM2-135M-Instruct")
    model = small_llama(hidden=576, vocab=49152, layers=30)
    (found,) = auto_drafter.examine_published(str(folder), model)
    assert found.problem is None
    assert found.stored.folder is not None
    assert hub.requests == []


def test_a_folder_of_the_hubs_cache_has_its_models_name(tmp_path):
    folder = tmp_path / "models--mlx-community--Qwen3-8B-4bit" / "snapshots" / "0a2da236"
    save_model(folder)
    drafters, base = auto_drafter.find_published(str(folder), folder)
    assert drafters[0].repo == DSPARK
    assert base is None


def test_a_linked_folder_has_its_own_name_or_that_of_its_place(tmp_path):
    linked = tmp_path / "linked"
    linked.symlink_to(save_model(tmp_path / "Qwen3-8B-4bit"))
    assert auto_drafter.find_published(str(linked), linked)[0][0].repo == DSPARK
    named = tmp_path / "Qwen3-8B"
    named.symlink_to(save_model(tmp_path / "a"))
    assert auto_drafter.find_published(str(named), named)[0][0].repo == DSPARK


def test_a_hint_downloads_nothing(hub, tmp_path):
    save_model(hub.root / MODEL)
    publish("dspark_plain", hub.root / DSPARK)
    load(MODEL)
    hub.requests.clear()
    hint = f"a published drafter: --drafter auto takes {DSPARK}"
    assert auto_drafter.make_hint(MODEL) == f"{hint}, 0.1 MB"
    assert hub.requests == [f"GET /api/models/{DSPARK}"]
    # The hub is not asked about a local model.
    local = str(save_model(tmp_path / "Qwen3-8B-4bit"))
    assert auto_drafter.make_hint(local) == hint
    assert len(hub.requests) == 1
    assert auto_drafter.make_hint(str(save_model(tmp_path / "unknown"))) is None


def test_a_model_that_the_hub_does_not_have_is_one_short_line(hub):
    (hub.root / "Qwen" / "Qwen3-8B-GGUF").mkdir(parents=True)
    (hub.root / "Qwen" / "Qwen3-8B-GGUF" / "q4.gguf").write_bytes(b"GGUF")
    save_model(hub.root / MODEL)
    hub.gated.add(MODEL)

    def explain(name):
        with pytest.raises(CheckpointError) as raised:
            load(name)
        found = str(raised.value)
        return found.removeprefix(f"{name!r} is not a directory, and cannot be downloaded from the")

    assert explain("no/such") == " hub: the hub has no such repository: it was moved or is private"
    assert explain(MODEL).startswith(f" hub: accept its terms on https://hf.co/{MODEL}")
    assert explain("Qwen/Qwen3-8B-GGUF").endswith("expected a model for MLX, not GGUF")
    with mock.patch.object(constants, "HF_HUB_OFFLINE", True):
        assert explain("no/such") == " hub: HF_HUB_OFFLINE is set"
    hub.failure = "error"
    assert explain("no/such").startswith(" hub: Server error '503")
    assert len(explain("no/such")) < 150
