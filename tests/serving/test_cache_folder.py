"""Prompt caches on disk: found after a restart, only by the same model, and never half written."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from helpers.families import make_family
from helpers.refusals import refusal
from helpers.servers import until
from helpers.toys import make_model, make_prompt
from helpers.workers import (
    FAMILIES,
    SHARING,
    ask,
    collect,
    count_tokens,
    generate,
    plain,
    running,
    tokens_of,
)
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.files import replace_file
from mlx_redrafter.serving.scheduling import cache_folder, worker
from mlx_redrafter.serving.scheduling.cache_folder import CacheFolder
from mlx_redrafter.serving.scheduling.prompt_cache import PromptCache

PROMPT = make_prompt(60)


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("[!.]*"))


def answer(model, folder: Path, prompt: list[int], **more) -> int:
    """Number of tokens that a new server finds cached. Asserts plain decoding's text."""
    request = ask(prompt, 8)
    options = more.pop("options", {})
    with running(model, prompt_cache_dir=folder, options=options, **more) as server:
        (events,) = generate(server, request)
        assert tokens_of(events) == plain(request, model, **options)
        return count_tokens(server, "cached")


@pytest.mark.parametrize(("kind", "options"), SHARING.values(), ids=SHARING)
def test_a_conversation_is_found_after_a_restart(kind, options, tmp_path):
    model = make_family(kind) if kind in FAMILIES else make_model(kind)
    folder = tmp_path / "caches"

    def follow(server, turn):
        before = count_tokens(server, "cached")
        (events,) = generate(server, ask([*PROMPT, *turn * [1, 2, 3]], 8))
        return tokens_of(events), count_tokens(server, "cached") - before

    with running(model, options=options) as server:
        expected = [follow(server, turn) for turn in range(3)]
    assert [cached > 0 for _, cached in expected] == [False, True, True]
    for turn in range(3):
        with running(model, prompt_cache_dir=folder, options=options) as server:
            assert follow(server, turn) == expected[turn]


@pytest.mark.parametrize(("existing", "mode"), [(None, 0o700), (0o755, 0o755)])
def test_only_a_new_folder_is_made_private(existing, mode, tmp_path):
    folder = tmp_path / "caches"
    if existing is not None:
        folder.mkdir()
        folder.chmod(existing)
    answer(make_model(), folder, PROMPT)
    assert folder.stat().st_mode & 0o777 == mode
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("changed", ["weights", "quantization", "version"])
def test_files_of_other_models_are_ignored(changed, tmp_path, monkeypatch):
    answer(make_model(), tmp_path, PROMPT)
    model = make_model(seed=changed == "weights")
    options = {}
    if changed == "quantization":
        options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 12}
    if changed == "version":
        monkeypatch.setattr(cache_folder, "version", lambda name: "9.9")
    assert answer(model, tmp_path, PROMPT, options=options) == 0
    assert len(files_of(tmp_path)) == 2
    monkeypatch.undo()
    assert answer(make_model(), tmp_path, PROMPT) == 59


def test_a_damaged_file_causes_a_new_prefill(tmp_path, caplog):
    for damage in (lambda data: data[:-400], lambda data: data[:9], lambda data: b"\0" * len(data)):
        answer(make_model(), tmp_path, PROMPT)
        (file,) = files_of(tmp_path)
        file.write_bytes(damage(file.read_bytes()))
        caplog.clear()
        assert answer(make_model(), tmp_path, PROMPT) == 0
        assert [line.split(": ")[0] for line in caplog.messages] == [
            f"Removing the damaged prompt cache {file}"
        ]
        assert answer(make_model(), tmp_path, PROMPT) == 59


def test_what_a_killed_process_left_is_removed(tmp_path):
    answer(make_model(), tmp_path, PROMPT)
    (file,) = files_of(tmp_path)
    with suppress(KeyboardInterrupt), replace_file(file) as partial:
        raise KeyboardInterrupt
    partial.write_bytes(b"half")
    assert answer(make_model(), tmp_path, PROMPT) == 59
    assert not partial.exists()


def test_caches_are_saved_when_idle(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "SAVE_DELAY_SECONDS", 0.01)

    async def main(server):
        for prompt in (PROMPT, PROMPT + plain(ask(PROMPT, 8)) + [1]):
            await collect(server.submit(**ask(prompt, 8)))
            await asyncio.to_thread(
                until, lambda: len(found := files_of(tmp_path)) == 1 and found != seen
            )
            seen[:] = files_of(tmp_path)  # the longer text has replaced its prefix

    seen = []
    with running(prompt_cache_dir=tmp_path) as server:
        asyncio.run(main(server))


def make_text(model, token: int, size: int = 20) -> tuple[list[int], Any]:
    """A text of equal tokens, and the cache that holds them."""
    tokens = [token] * size
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([tokens]), cache=cache))
    return tokens, cache


def open_folder(path: Path, max_bytes: int = 1 << 30, model=None) -> PromptCache:
    """A prompt cache over a folder, as a new server has it."""
    cache = PromptCache(max_bytes, CacheFolder(path, model or make_model(), Options()))
    cache.read_folder()
    return cache


def find(cache: PromptCache, *tokens: int) -> list[int]:
    """How many of 20 equal tokens are found, for each token; closes the cache."""
    found = [cache.fetch([token] * 21)[1] for token in tokens]
    cache.close()
    return found


@pytest.mark.parametrize("saves", [False, True], ids=["saved at shutdown", "saved when idle"])
def test_a_restart_keeps_the_order_of_use(saves, tmp_path):
    first = open_folder(tmp_path)
    size = sum(c.nbytes for c in make_text(make_model(), 1)[1])
    for token in (1, 2, 3, 4):
        first.store(*make_text(make_model(), token))
        if saves:
            first.save_next()
    assert find(first, 1) == [20]
    assert find(open_folder(tmp_path, 2 * size), 1, 2, 3, 4) == [20, 0, 0, 20]


def test_a_longer_text_replaces_only_its_own_file(tmp_path):
    kept = open_folder(tmp_path)
    for token, size in ((1, 20), (2, 10), (2, 20)):
        kept.store(*make_text(make_model(), token, size))
        kept.save_next()
    kept.close()
    assert len(files_of(tmp_path)) == 2
    assert find(open_folder(tmp_path), 1, 2) == [20, 20]


def test_disk_usage_is_bounded(tmp_path, monkeypatch):
    own = make_model()
    other = make_model(seed=1)
    most = 3 * sum(c.nbytes for c in make_text(own, 1)[1]) + 20_000
    for model, tokens in ((other, [1]), (own, [1, 2, 3, 4])):
        kept = open_folder(tmp_path, most, model)
        for token in tokens:
            kept.store(*make_text(model, token))
            kept.save_next()
            assert sum(path.stat().st_size for path in files_of(tmp_path)) <= most
        # Used now, before the next one needs room.
        assert model is other or kept.fetch([2] * 21)[1] == 20
        kept.store(*make_text(model, 5))
        kept.close()
    assert find(open_folder(tmp_path, most), 1, 2, 3, 4, 5) == [0, 20, 0, 20, 20]
    assert find(open_folder(tmp_path, 0), 5) == [0]
    monkeypatch.setattr(cache_folder, "MAX_FILES", 2)
    kept = open_folder(tmp_path)
    kept.store(*make_text(own, 6))
    kept.close()
    assert len(files_of(tmp_path)) == 2


def test_a_folder_belongs_to_one_process_and_holds_only_caches(tmp_path):
    folder = CacheFolder(tmp_path / "caches", make_model(), Options())
    with refusal("another process keeps its prompt caches in"):
        CacheFolder(tmp_path / "caches", make_model(), Options())
    folder.close()
    CacheFolder(tmp_path / "caches", make_model(), Options()).close()
