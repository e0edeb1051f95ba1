"""What every test starts from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import pytest

from mlx_redrafter.planning import costs

if TYPE_CHECKING:
    import openai
    from service import Reference

    from mlx_redrafter.serving.command import Server


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The global random state, which only a caller's own sampler uses."""
    mx.random.seed(0)


@pytest.fixture(autouse=True, scope="session")
def own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured of this machine goes to a folder of the tests, and is measured no longer than need be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "SECONDS", 0.3)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield


# Of the tests of the server. Their imports take a while, and no other test shall wait for them.


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `save_toys` has saved; nobody changes it."""
    from service import save_toys

    return save_toys(tmp_path_factory.mktemp("toys"))


@pytest.fixture(scope="module")
def server(root: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of the toys with the `FLAGS` of the test's module."""
    from service import server_of, with_toys

    with server_of(*with_toys(root), *request.module.FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of that server."""
    from service import client_of

    with client_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def reference(root: Path) -> Reference:
    """What the library says over the same toys."""
    from service import Reference

    return Reference(root)
