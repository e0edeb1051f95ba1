"""`--drafter auto`: the drafters that a model's folder and name suggest, in order.

First drafting layers in the model's own folder, then an `assistant/` folder beside its `target/`,
then published drafters, see `loading/published.py`. Of a published one, `config.json` is fetched
first and compared with the target: numbers decide, not names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.nn as nn
from huggingface_hub import HfApi, constants, hf_hub_download, metadata_load, snapshot_download
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    RepositoryNotFoundError,
)

from ..drafters.checkpoint import Config
from ..errors import CheckpointError, join_lines
from ..files import expand_path
from ..machine.memory import get_free_bytes
from .drafter_files import (
    ASSISTANT,
    PACKAGED,
    SIDECAR,
    TARGET,
    CheckpointFiles,
    choose_files,
    explain_hub,
    get_cached_folder,
    has_layer,
    is_bundle,
    list_files,
    list_folder,
    locate_files,
    read_config,
    read_object,
)
from .published import (
    QAT,
    Published,
    explain_misfit,
    list_published,
    normalize_name,
    read_target_sizes,
)

NOT_CACHED = "it is not in the cache"

OF_REPOSITORY = (CheckpointError, DisabledRepoError, EntryNotFoundError, RepositoryNotFoundError)
"""Errors after which the hub is asked about other repositories."""

MAX_BASES = 3
"""How many models are followed from a model card to the card of its base."""

HINT_SECONDS = 3.0
"""How long the hub may take to describe a repository that is only named."""

_log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """A drafter to try.

    Attributes:
        name: a hub id, a path, or what else to call it.
        about: what to say before it is loaded.
        locate: finds its files, and downloads them.
    """

    name: str
    about: str
    locate: Callable[[], CheckpointFiles]


class Stored(NamedTuple):
    """The files of a published drafter, of which only the config is needed.

    Attributes:
        config: its `config.json`.
        n_bytes: the size of config and tensors.
        folder: where they are; None if they have to be downloaded.
    """

    config: Config
    n_bytes: int
    folder: Path | None

    def format_size(self) -> str:
        """Its size, and whether it has to be downloaded."""
        return format_size(self.n_bytes, self.folder is not None)


class Examined(NamedTuple):
    """A published drafter that was compared with a target.

    Attributes:
        published: its line in the table.
        stored: its files; None if they are not known.
        problem: why it cannot be used; None if it fits.
        base: the target's base, if it was trained for that.
    """

    published: Published
    stored: Stored | None
    problem: str | None
    base: str | None


def list_choices(name: str, model: nn.Module, revision: str | None = None) -> Iterator[Choice]:
    """The drafters to try for a target, the best first; logs why others are left out.

    Args:
        name: the target's, a directory or a hub id; it was loaded before.
    """
    yield from list_own(name, get_target_folder(name, revision), revision)
    for published, stored, problem, base in examine_published(name, model, revision):
        repo = published.repo
        if stored is not None and problem is None:
            about = f"{repo}, {published.kind}, {stored.format_size()}"
            about += f"; it was trained for {base}" if base else ""
            yield Choice(repo, about, partial(locate_files, stored.folder or repo))
        elif problem != NOT_CACHED:
            _log.info("note: skipped %s: %s", repo, problem)


def examine_published(
    name: str, model: nn.Module, revision: str | None = None
) -> Iterator[Examined]:
    """Compares the published drafters for a target with it, one after another.

    Downloads their `config.json`. If the hub cannot be reached, those in the cache are compared.

    Args:
        name: see `list_choices`.
    """
    folder = get_target_folder(name, revision)
    drafters, base = find_published(name, folder)
    sizes = read_target_sizes(model)
    read = fetch_stored
    for published in drafters:
        stored = None
        problem: str | None = NOT_CACHED
        try:
            stored = read(published.repo)
        except OF_REPOSITORY as error:
            problem = explain_hub(published.repo, error)
        except Exception as error:  # of the network, or of another server
            why = explain_hub(published.repo, error)
            _log.info("note: only drafters in the cache are tried: %s", why)
            read = read_stored
            stored = read(published.repo)

        if stored is not None:
            try:
                problem = explain_misfit(stored.config, sizes) or explain_memory(stored)
            except Exception as error:  # nonsense may raise any type
                problem = f"its config.json cannot be read: {join_lines(error)}"
        yield Examined(published, stored, problem, base)


def make_hint(name: str) -> str | None:
    """A line on the drafter that `--drafter auto` would try first; None if none is published.

    Nothing is downloaded. Only for a target from the hub, the hub is asked for the drafter's size.
    """
    folder = get_target_folder(name)
    published, _ = find_published(name, folder, may_download=False)
    if not published:
        return None
    if any(True for _ in list_own(name, folder, may_ask=False)):
        return "a drafter in the model's own folder: --drafter auto takes it"
    for repo, *_ in published:
        hint = f"a published drafter: --drafter auto takes {repo}"
        try:
            stored = read_stored(repo)
            if stored is not None:
                return f"{hint}, {stored.format_size()}"
            if is_local(name):
                return hint
            n_bytes = sum(fetch_sizes(repo, HINT_SECONDS).values())
        except OF_REPOSITORY:
            continue
        except Exception:  # of the network
            return hint
        return f"{hint}, {format_bytes(n_bytes)}"
    return None


def is_local(name: str) -> bool:
    """Whether a target's name is a directory, not a hub id."""
    return expand_path(name).is_dir()


def get_target_folder(name: str, revision: str | None = None) -> Path:
    """The folder of a target that was loaded."""
    folder = expand_path(name)
    if not folder.is_dir():
        folder = get_cached_folder(name, revision) or folder
    return folder / TARGET if is_bundle(folder) else folder


def list_own(
    name: str, folder: Path, revision: str | None = None, *, may_ask: bool = True
) -> Iterator[Choice]:
    """The drafters in a target's own folder or repository.

    Args:
        may_ask: ask the hub for files that loading the target did not download.
    """
    origin: str | Path | None = None
    if (folder / SIDECAR).is_file() or has_layer(folder):
        origin = folder
    elif may_ask and not is_local(name):
        try:
            origin = name if SIDECAR in list_files(name, revision) else None
        except Exception as error:  # of the network or the hub
            _log.debug("cannot list the files of %s: %s", name, error)
    if origin is not None:
        locate = partial(locate_files, origin, revision, is_base=True)
        yield Choice(f"{name} (its own layer)", "the model's own drafting layer", locate)

    path = (folder.parent if folder.name == TARGET else folder) / ASSISTANT
    if (path / "config.json").is_file():
        label = str(path) if is_local(name) else f"{name}/{ASSISTANT}"
        locate = partial(locate_assistant, name, path, revision)
        yield Choice(label, "the assistant beside the model", locate)


def locate_assistant(name: str, path: Path, revision: str | None) -> CheckpointFiles:
    """The files of the assistant in a bundle, which are downloaded if its name is a hub id."""
    if not is_local(name):
        try:
            snapshot_download(name, revision=revision, allow_patterns=[f"{ASSISTANT}/*"])
        except Exception as error:  # of the network or the hub
            raise CheckpointError(join_lines(error)) from error
    return locate_files(path)


def find_published(
    name: str, folder: Path, *, may_download: bool = True
) -> tuple[list[Published], str | None]:
    """(the published drafters for a target, its base if they were trained for that).

    A local folder goes by the base in its model card, else by its own name; a model of the hub by
    its name, else by its base. If the target is quantized, smaller files of a kind come first.

    Args:
        may_download: model cards.
    """
    own = get_own_name(name, folder)
    config = read_config(folder)
    is_small = not config or "quantization" in config or "quantization_config" in config
    drafters = list_published(own, smallest_first=is_small)
    if drafters and (not is_local(name) or QAT in normalize_name(own)):
        return drafters, None
    for base, is_same in list_bases(name, folder, may_download=may_download):
        found = list_published(base, smallest_first=is_small)
        if found:
            is_same = is_same or normalize_name(base) == normalize_name(own)
            return found, None if is_same else base
    return drafters, None


def get_own_name(name: str, folder: Path) -> str:
    """The name of a target: its hub id, also of a folder in the hub's cache, or its folder's.

    A linked folder has its own name if that is in the table.
    """
    if not is_local(name):
        return name
    if folder.name == TARGET:
        folder = folder.parent
    for path in (folder.absolute(), folder.resolve()):
        found = path.name
        for part in path.parts:
            if part.startswith("models--"):
                found = part.removeprefix("models--").replace("--", "/")
        if list_published(found):
            break
    return found


def list_bases(name: str, folder: Path, *, may_download: bool) -> Iterator[tuple[str, bool]]:
    """(the base of a model, whether the model is only another format of it), then its base's."""
    card = read_card(folder / "README.md")
    if not card and may_download and not is_local(name):
        card = fetch_card(name)
    is_same = True
    for _ in range(MAX_BASES):
        base = card.get("base_model")
        base = base[0] if isinstance(base, list) and len(base) == 1 else base
        if not isinstance(base, str):
            return
        is_same = is_same and card.get("base_model_relation") == "quantized"
        yield base, is_same
        card = fetch_card(base) if may_download else {}


def read_card(file: Path) -> dict[str, Any]:
    """The header of a model card; empty without one."""
    try:
        return metadata_load(file) or {}
    except Exception:  # no file, or one of the many errors of YAML
        return {}


def fetch_card(repo: str) -> dict[str, Any]:
    """The header of a model card on the hub, or in its cache; empty without one."""
    try:
        HfApi().model_info(repo, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        is_reachable = True
    except Exception:  # of the network or the hub, for which a download would wait for minutes
        is_reachable = False
    try:
        file = hf_hub_download(repo, "README.md", local_files_only=not is_reachable)
    except Exception:  # no such file, or no hub id
        return {}
    return read_card(Path(file))


def explain_memory(stored: Stored) -> str | None:
    """Why a drafter does not fit into memory; None if it does."""
    free = get_free_bytes()
    if stored.n_bytes <= free:
        return None
    return f"it takes {format_bytes(stored.n_bytes)} of memory, {format_bytes(free)} are free"


def fetch_stored(repo: str) -> Stored | None:
    """A drafter's config from the hub, and the sizes of its files."""
    if repo in PACKAGED:
        return read_stored(repo)
    sizes = fetch_sizes(repo)
    config = Path(hf_hub_download(repo, "config.json"))
    is_cached = all((config.parent / file).exists() for file in sizes)
    folder = config.parent if is_cached else None
    return Stored(read_object(config), sum(sizes.values()), folder)


def fetch_sizes(repo: str, seconds: float | None = None) -> dict[str, int]:
    """The bytes of a drafter's config and tensors on the hub, by file."""
    sizes = fetch_all_sizes(repo, seconds)
    wanted = ["config.json", *choose_files(sizes, repo)]
    return {file: sizes.get(file, 0) for file in wanted}


def fetch_all_sizes(repo: str, seconds: float | None = None) -> dict[str, int]:
    """The bytes of all files of a repository on the hub, by name."""
    info = HfApi().model_info(
        repo, files_metadata=True, timeout=seconds or constants.HF_HUB_ETAG_TIMEOUT
    )
    return {each.rfilename: each.size or 0 for each in info.siblings or []}


def read_stored(repo: str) -> Stored | None:
    """A drafter in the hub's cache, or a packaged one; None if it was not downloaded."""
    folder = PACKAGED.get(repo) or get_cached_folder(repo)
    if folder is None:
        return None
    try:
        config = read_object(folder / "config.json")
        files = choose_files(list_folder(folder), repo)
    except CheckpointError:  # not all of it was downloaded
        return None
    n_bytes = sum((folder / file).stat().st_size for file in ["config.json", *files])
    return Stored(config, n_bytes, folder)


def format_size(n_bytes: int, is_here: bool) -> str:
    """A size, and whether the files have to be downloaded."""
    return f"{format_bytes(n_bytes)} {'on this machine' if is_here else 'to download'}"


def format_bytes(n_bytes: int) -> str:
    """A size in GB, or in MB if it is less than one."""
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"
