"""`--drafter auto` of the commands, and the hint without it."""

import json
import os
import subprocess
import sys

import pytest
from huggingface_hub import snapshot_download

from helpers.cost_curves import make_costs
from helpers.hub import Hub
from helpers.published import publish
from helpers.servers import read_metrics, start_demo
from helpers.small import make_byte_tokenizer, save_target, small_llama
from mlx_redrafter.cli import doctor
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.loading import fit
from mlx_redrafter.loading.auto_drafter import format_bytes
from mlx_redrafter.loading.published import list_published
from mlx_redrafter.measuring import store

MODEL = "mlx-community/Qwen3-8B-4bit"
DRAFTER = "z-lab/Qwen3-8B-DFlash-b16"
FLAGS = f"--model {MODEL} --prompt abc -m 24 --draft-depth 3".split()


@pytest.fixture
def hub(hub) -> Hub:
    """A hub with a target of the byte vocabulary and a drafter for it."""
    tokenizer = make_byte_tokenizer()
    vocab = len(tokenizer)
    model = small_llama(hidden=48, vocab=vocab, layers=12, kv_heads=2)
    save_target(hub.root / MODEL, model, tokenizer, eos_token_id=0)
    publish("dflash", hub.root / DRAFTER, vocab_size=vocab)
    return hub


def test_generate_drafts_with_what_it_finds(hub, run, caplog):
    status, out, err = run("generate", *FLAGS, "--drafter", "auto", "--json")
    assert status == 0, err
    record = json.loads(out)
    assert record["settings"]["drafter"] == DRAFTER
    assert record["drafted"] > 0
    assert f"note: drafter: {DRAFTER}, dflash, 0.2 MB to download\n" in caplog.text
    plain = json.loads(run("generate", *FLAGS[:6], "--plan", "off", "--json")[1])
    assert plain["tokens"] == record["tokens"]


def test_one_hint_without_the_flag(hub, run):
    """None in quiet modes, none if the flag or another drafter is given."""
    hint = f"a published drafter: --drafter auto takes {DRAFTER}, 0.2 MB\n"
    _, _, err = run("generate", *FLAGS[:6])
    assert err.count(hint) == 1
    assert not any("z-lab" in file or "deepseek" in file for file in hub.list_downloads())
    for more in (("--verbose", "F"), ("--no-drafter",), ("--drafter", "auto"), ("--plan", "off")):
        assert hint not in run("generate", *FLAGS[:6], *more)[2], more


@pytest.mark.parametrize("flags", [(), ("--drafter", "auto"), ("--drafter", DRAFTER)])
@pytest.mark.parametrize("is_here", [False, True])
def test_doctor_says_from_the_hubs_sizes_whether_both_fit(flags, is_here, hub, run, monkeypatch):
    """Before a download. What does not fit is downloaded only if no flag asks for it."""

    def stop(*_):
        raise RedrafterError("stopped")

    monkeypatch.setattr(doctor, "load_models", stop)
    if is_here:
        snapshot_download(MODEL)
        snapshot_download(DRAFTER)
    hub.requests.clear()
    (model,) = (hub.root / MODEL).glob("*.safetensors")
    (drafter,) = (hub.root / DRAFTER).glob("*.safetensors")
    both = model.stat().st_size + drafter.stat().st_size
    for usable, fits in ((both, True), (both - 1, False)):
        monkeypatch.setattr(fit, "get_usable_bytes", lambda usable=usable: usable)
        status, _, err = run("doctor", "--model", MODEL, *flags)
        assert status != 0
        assert ("stopped" in err) is (fits or is_here or not flags)
        assert ("Nothing was downloaded" in err) is not ("stopped" in err)
        place = "on this machine" if is_here else "to download"
        assert f"weights: {MODEL}, {format_bytes(model.stat().st_size)} {place}" in err
        assert f"together {format_bytes(both)}: {'fits' if fits else 'does not fit'} into" in err
    assert hub.list_downloads() == []


def test_doctor_takes_the_sizes_of_a_folder_and_of_the_cache(hub):
    folder = hub.root / MODEL
    n_bytes = (folder / "model.safetensors").stat().st_size
    (folder / "mtp.safetensors").write_bytes(b"1234")
    found = fit.measure_fit(str(folder), "auto")
    assert found.model == fit.Size(str(folder), n_bytes, True)
    assert found.drafter == fit.Size(f"{folder}/mtp.safetensors", 4, True)
    assert hub.requests == []
    snapshot_download(MODEL)
    hub.failure = "error"
    found = fit.measure_fit(MODEL, str(folder))
    assert found.model == fit.Size(MODEL, n_bytes, True)
    assert found.drafter == fit.Size(str(folder), n_bytes, True)
    assert fit.measure_fit("no/such", None) is None


def test_the_server_hints_too(hub, capsys):
    for flags, count in (((), 1), (("--log-level", "ERROR"), 0)):
        with start_demo("--model", MODEL, *flags) as server:
            assert read_metrics(server)
        hint = f"--drafter auto takes {DRAFTER}, 0.2 MB\n"
        assert capsys.readouterr().err.count(hint) == count


def test_nothing_found_drafts_from_the_context(hub, run, caplog):
    (hub.root / "mlx-community").rename(hub.root / "nobody")
    (hub.root / "nobody" / "Qwen3-8B-4bit").rename(hub.root / "nobody" / "unknown")
    flags = "--model nobody/unknown --drafter auto --prompt abcabc -m 24 --json --verbose F"
    status, out, err = run("generate", *flags.split())
    assert status == 0
    assert json.loads(out)["settings"]["drafter"] is None
    assert err == ""
    assert len(caplog.messages) == 1
    assert "mlx_redrafter.train --model nobody/unknown" in caplog.text


def test_doctor_lists_published_drafters(hub, run, monkeypatch):
    """Those that do not fit too, and what one that was measured should gain."""
    costs = make_costs("flat")
    monkeypatch.setattr(store, "measure_costs", lambda *models, **options: costs)
    publish("dspark_plain", hub.root / "RedHatAI/Qwen3-8B-speculator.eagle3")
    status, out, _ = run("doctor", "--model", MODEL)
    assert status == 0
    listed = [line for line in out.splitlines() if "Qwen3-8B" in line or "qwen3_8b" in line]
    assert len(listed) == len(list_published(MODEL))
    missing = "skipped: the hub has no such repository: it was moved or is private"
    assert listed[0] == f"deepseek-ai/dspark_qwen3_8b_block7: dspark, {missing}"
    assert listed[2] == f"{DRAFTER}: dflash, 0.2 MB to download, fits, not measured"
    assert "it expects hidden size 36, the target has 48" in listed[3]
    weights = [file for file in hub.list_downloads() if file.endswith(".safetensors")]
    assert weights == [f"{MODEL}/model.safetensors"]

    report = json.loads(run("doctor", "--model", MODEL, "--drafter", "auto", "--json")[1])
    assert report["settings"]["drafter"] == DRAFTER
    line = report["published"][2]
    assert line["is_downloaded"]
    assert line["bytes"] > 100_000
    assert line["problem"] is None
    assert line["fastest"]["depth"] > 1
    assert line["fastest"]["speedup"] > 1
    gain = f"{line['fastest']['speedup']:.2f} times plain decoding expected"
    assert f"0.2 MB on this machine, fits, {gain} with 1 x " in run("doctor", "--model", MODEL)[1]


def test_auto_is_the_demos_own_for_the_demo(run):
    status, out, _ = run("generate", *["--drafter", "auto", "-p", "def", "-m", "4", "--json"])
    assert status == 0
    assert json.loads(out)["settings"]["drafter"] == "demo"


def test_the_hub_of_the_environment_is_used(hub, tmp_path):
    """In a process of its own, with the client's progress bars."""
    home = str(tmp_path / "home")
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": home, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "mlx_redrafter.generate", *FLAGS, "--drafter", "auto"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"note: drafter: {DRAFTER}" in done.stderr
    assert "Fetching" in done.stderr
    again = subprocess.run(
        command,
        env=os.environ | variables | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert again.stdout == done.stdout
    assert f"note: drafter: {DRAFTER}, dflash, 0.2 MB on this machine" in again.stderr
