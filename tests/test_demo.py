"""The packaged demo: real text, offline, the same with and without the drafter; and the README's Python."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter import generate_step, load_demo, stream_generate
from mlx_redrafter.demo import DIRECTORY, demo_prompts
from mlx_redrafter.generation import encode

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")
README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any, Any]:
    return load_demo()


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("beam", [(1, 4, None), (4, 5, None), (4, 4, 8)])
def test_the_demo_says_the_same_with_and_without_its_drafter(
    demo: tuple[Any, Any, Any], temp: float, beam: tuple[int, int, int | None]
) -> None:
    model, tokenizer, drafter = demo
    width, depth, size = beam
    rounds = accepted = 0
    for seed, prompt in enumerate(demo_prompts()[::4]):
        ids = encode(tokenizer, prompt)
        common = {"max_tokens": 64, "temp": temp, "seed": seed}
        plain = [token for token, _, _ in generate_step(ids, model, **common)]
        other = [token for token, _, _ in generate_step(ids, model, seed=seed + 1, max_tokens=64, temp=temp)]
        assert (plain == other) is (temp == 0.0), "another seed is another text"
        responses = list(
            stream_generate(
                model,
                tokenizer,
                ids,
                drafter=drafter,
                beam_width=width,
                draft_depth=depth,
                tree_size=size,
                **common,
            )
        )
        made = [response.token for response in responses]
        assert made == plain[: len(made)] and (len(made) == 64 or responses[-1].finish_reason == "stop")
        rounds, accepted = rounds + responses[-1].rounds, accepted + responses[-1].accepted
    assert accepted > 0.2 * rounds, "the packaged drafter is trained for the packaged target"


def test_the_demo_is_small_and_in_sixteen_bits() -> None:
    files = [file for file in DIRECTORY.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 20_000_000
    for name in ("target", "drafter"):
        weights = mx.load(str(DIRECTORY / name / "model.safetensors"))
        assert isinstance(weights, dict)
        assert {weight.dtype for weight in weights.values()} == {mx.float16}


def test_the_demo_knows_files_it_was_not_trained_on(demo: tuple[Any, Any, Any]) -> None:
    model, tokenizer, _ = demo
    nats = tokens = characters = 0.0
    for prompt in demo_prompts():
        ids = mx.array(encode(tokenizer, prompt))[None]
        logits = model(ids[:, :-1])
        right = mx.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
        nats += float((mx.logsumexp(logits, axis=-1) - right).sum())
        tokens, characters = tokens + ids.size - 1, characters + len(prompt)
    # A uniform guess over the vocabulary would need log2(2048) = 11 bits a token.
    assert nats / tokens < 4.5 and tokens < characters / 2


def test_the_readmes_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})
    assert "tokens per round" in capsys.readouterr().out
