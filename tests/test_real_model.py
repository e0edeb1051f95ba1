"""A real chat model, SmolLM2-135M-Instruct, from a package on PyPI."""

from typing import Any

import mlx_lm
import pytest

from benchmarks.smollm2 import make_model, read_package
from mlx_redrafter import load, load_drafter, stream_generate
from mlx_redrafter.errors import RedrafterError

pytestmark = pytest.mark.package_index

QUESTION = "List the days of the week, and write one full sentence about each of them."


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> tuple[Any, Any]:
    place = tmp_path_factory.mktemp("package")
    try:
        file = read_package(place)
    except RedrafterError as error:
        pytest.skip(str(error))
    make_model(file, place / "SmolLM2-135M-Instruct")
    return load(place / "SmolLM2-135M-Instruct")


@pytest.mark.parametrize("temp", [0.0, 0.7])
def test_a_real_answer_is_the_same_with_all_drafters(real, temp):
    model, tokenizer = real
    drafter = load_drafter("smollm2", model)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True
    )
    texts = {}
    rounds = {}
    for name, options in {
        "plain": {"plan": "off"},
        "auto": {"drafter": drafter},
        "chain": {"drafter": drafter, "beam_width": 1, "draft_depth": 3, "context": False},
        "tree": {"drafter": drafter, "beam_width": 4, "draft_depth": 5},
    }.items():
        responses = list(
            stream_generate(model, tokenizer, prompt, max_tokens=64, temp=temp, seed=1, **options)
        )
        texts[name] = "".join(each.text for each in responses)
        rounds[name] = responses[-1].tokens_per_round
    assert len(texts["plain"]) > 100
    assert set(texts.values()) == {texts["plain"]}
    assert rounds["plain"] == 1
    assert rounds["chain"] > 1.2
    assert rounds["tree"] >= rounds["chain"]
    if not temp:
        assert mlx_lm.generate(model, tokenizer, prompt, max_tokens=64) == texts["plain"]
