"""Fixtures for the server's tests: servers, and the official clients of the APIs."""

from collections.abc import Iterator

import anthropic
import openai
import pytest

from helpers.servers import PATIENCE, Running, Scripted, save_tokenizer, start_demo, start_scripted
from mlx_redrafter import load_demo


@pytest.fixture(scope="session")
def demo_models():
    """(model, tokenizer, drafter) of the packaged demo."""
    return load_demo()


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory):
    """See `save_tokenizer`."""
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def demo() -> Iterator[Running]:
    """A server over the packaged demo that drafts in every round."""
    with start_demo("--draft-depth", "3", "--log-level", "WARNING") as server:
        yield server


@pytest.fixture(scope="module")
def scripted_server(chat_tokenizer) -> Iterator[Scripted]:
    """A server over a scripted engine."""
    with start_scripted(chat_tokenizer) as both:
        yield both


@pytest.fixture
def scripted(scripted_server) -> Iterator[Scripted]:
    """The scripted server, reset to its initial state."""
    server, engine = scripted_server
    engine.texts = [["hello"]]
    engine.refusal = None
    engine.requests = []
    engine.gate.set()
    yield server, engine
    engine.gate.set()


@pytest.fixture(scope="module")
def openai_client(demo) -> Iterator[openai.OpenAI]:
    """OpenAI's client for the demo, without retries."""
    with openai.OpenAI(
        base_url=f"{demo.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
    ) as client:
        yield client


@pytest.fixture(scope="module")
def scripted_openai(scripted_server) -> Iterator[openai.OpenAI]:
    """OpenAI's client for the scripted server."""
    url = f"{scripted_server[0].url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(scope="module")
def scripted_anthropic(scripted_server) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client for the scripted server."""
    url = scripted_server[0].url
    with anthropic.Anthropic(
        base_url=url, api_key="none", max_retries=0, timeout=PATIENCE
    ) as client:
        yield client
