"""The packaged demo: real text, identical with and without the drafter."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_redrafter import generate_step, load, load_demo, stream_generate
from mlx_redrafter.demo import DIRECTORY, demo_prompts
from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.loading.checkpoints import save_drafter
from mlx_redrafter.target.model_parts import get_compute_dtype, get_model_sizes
from mlx_redrafter.text.encoding import encode

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")
ROOT = Path(__file__).parent.parent
PROMPT = 48
TOKENS = 24
"""Tokens of each prompt, and generated tokens."""


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any, Any]:
    return load_demo()


def test_another_drafter_gets_the_demos_dtype(demo, tmp_path):
    other = Drafter(DrafterArgs(*get_model_sizes(demo[0]), exit_dim=32, num_draft_layers=0))
    save_drafter(tmp_path, other, dtype=mx.bfloat16)
    model, _, drafter = load_demo(tmp_path)
    assert drafter.args.exit_dim == 32
    assert drafter.dtype == get_compute_dtype(model) == mx.float32


@pytest.mark.parametrize(
    ("plan", "temp"), [((1, 4), 0.0), ((4, 5), 0.8), ((4, 4, 8), 0.8)], ids=str
)
def test_drafted_text_is_the_plain_text(demo, plan, temp):
    model, tokenizer, drafter = demo
    rounds = accepted = 0
    for seed, text in enumerate(demo_prompts()[::16]):
        options = {"max_tokens": TOKENS, "temp": temp, "seed": seed}
        prompt = encode(tokenizer, text)[:PROMPT]
        plain = [token for token, _, _ in generate_step(prompt, model, context=False, **options)]
        responses = list(
            stream_generate(model, tokenizer, prompt, drafter=drafter, plan=plan, **options)
        )
        made = [response.token for response in responses]
        assert made == plain[: len(made)]
        assert len(made) == TOKENS or responses[-1].finish_reason == "stop"
        rounds = rounds + responses[-1].rounds
        accepted = accepted + responses[-1].accepted
    assert accepted > 0.2 * rounds, "the packaged drafter is trained for the packaged target"


def test_the_demo_edit_is_done(demo):
    model, tokenizer, drafter = demo
    shown = json.loads((DIRECTORY / "edits.json").read_text(encoding="utf-8"))[0]
    assert shown["text"] == demo_prompts("edits")[0] == demo_prompts()[0]
    # A fixed plan, because auto drafts less on a busy machine.
    options = {"max_tokens": 400, "plan": (1, 3), "context": True}
    responses = list(stream_generate(model, tokenizer, shown["text"], drafter=drafter, **options))
    assert "".join(each.text for each in responses) == shown["answer"]
    assert responses[-1].finish_reason == "stop"
    assert responses[-1].tokens_per_round > 4, "most of it is copied"


def test_the_demo_is_small_and_in_eight_bits():
    files = [file for file in DIRECTORY.rglob("*") if file.is_file()]
    sizes = {
        own: sum(x.stat().st_size for x in files if (x.parent.name == "smollm2") is own)
        for own in (False, True)
    }
    assert sizes[False] < 34_000_000
    assert sizes[True] < 8_000_000
    stored = load(DIRECTORY / "target")[0]
    assert {module.bits for _, module in stored.named_modules() if hasattr(module, "bits")} == {8}
    model, _, drafter = load_demo()
    for module in (model, drafter):
        assert {weight.dtype for _, weight in tree_flatten(module.parameters())} == {mx.float32}
    ids = mx.array([[5, 6, 7]])
    assert mx.allclose(stored(ids), model(ids), atol=0.5), "the weights are the stored ones"


def test_notice_names_every_package_of_the_recipe():
    packages = (
        (ROOT / "examples" / "demo" / "packages.txt").read_text(encoding="utf-8").splitlines()
    )
    notice = " ".join((DIRECTORY / "NOTICE").read_text(encoding="utf-8").split())
    assert len(packages) > 100
    for line in packages:
        requirement, licence = line.split("  # ")
        assert requirement.replace("==", " ") in notice
        assert licence in notice
