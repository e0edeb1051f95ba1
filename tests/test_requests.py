"""Requests that nobody can serve: refused early, in one line, with nothing left behind; and some odd ones served."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRAEmbedding
from small import small_drafter, small_llama

from mlx_redrafter import RedrafterError, generate_step
from mlx_redrafter.cli.main import run_module

PROMPT = [1, 2, 3]
XTC = {"temp": 0.8, "xtc_probability": 0.5}
pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")


def made(drafted: bool, prompt: Any = PROMPT, **options: Any) -> list[int]:
    drafter = small_drafter() if drafted else None
    return [token for token, _, _ in generate_step(prompt, small_llama(), drafter, max_tokens=6, **options)]


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"temp": 1.0, "top_k": 64}, "top_k must be below the vocabulary's 64, got 64"),
        ({"temp": 1.0, "min_p": 0.1, "min_tokens_to_keep": 65}, "min_tokens_to_keep must be"),
        ({"prompt": [2**32 + 5]}, "token ids, got 4294967301"),
        ({"prompt": mx.array([2**32 - 1], mx.uint32)}, "token ids, got 4294967295"),
        ({"prompt": [-(2**40)]}, "token ids, got -1099511627776"),
        ({"prompt": mx.array([5 - 2**32], mx.int64)}, "token ids, got -4294967291"),
        ({"prompt": [64]}, "token ids must be from 0 to 63, got 64"),
        ({"prompt": [-1]}, "token ids must be from 0 to 63, got -1"),
        ({"prompt": None}, "token ids, got NoneType"),
        ({"prompt": b"abc"}, "token ids, got bytes"),
        ({"temp": float("inf")}, "temp must be 0, or from"),
        ({"temp": 1e-40}, "temp must be 0, or from"),
        ({"temp": None}, "temp must be at least 0, got None"),
        ({"temp": "1"}, "temp must be at least 0, got '1'"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"logits_processors": lambda history, logits: logits}, "logits_processors must be a list"),
        ({"sampler": lambda x: x.argmax(-1), "top_k": 3}, "either a sampler or top_k"),
        ({"sampler": 5}, "sampler must be a function, got int"),
        ({"logits_processors": 5}, "logits_processors must be a list of functions, got 5"),
        ({"logits_processors": [None]}, r"logits_processors must be a list of functions, got \[None\]"),
        ({"prompt_progress_callback": 5}, "prompt_progress_callback must be a function, got 5"),
        ({**XTC, "xtc_special_tokens": "ab"}, "xtc_special_tokens must be token ids, got 'ab'"),
        ({**XTC, "xtc_special_tokens": [64]}, "xtc_special_tokens must be token ids from 0 to 63, got 64"),
        ({**XTC, "xtc_special_tokens": [10**20]}, "xtc_special_tokens must be token ids from 0 to 63, got 1000"),
        ({"kv_bits": 8, "kv_group_size": 64, "quantized_kv_start": 0}, "kv_group_size must divide the head size 16"),
    ],
)
def test_a_request_is_refused_before_the_prompt_is_read(drafted: bool, options: dict[str, Any], reason: str) -> None:
    cache = make_prompt_cache(small_llama())
    with pytest.raises(RedrafterError, match=reason) as raised:
        made(drafted, **options, prompt_cache=cache)
    assert "\n" not in str(raised.value)
    assert cache[0].offset == 0
    assert mx.random.uniform(shape=(2,)).tolist(), "mlx's random state is sound"


@pytest.mark.parametrize("drafted", [False, True])
def test_a_cache_of_another_number_of_layers_is_refused(drafted: bool) -> None:
    cache = make_prompt_cache(small_llama())
    for wrong in (cache[:1], cache * 2):
        with pytest.raises(RedrafterError, match="prompt cache must have 2 layers as the model has, got"):
            made(drafted, prompt_cache=wrong)


def test_a_tree_size_is_checked_although_processors_set_it_aside() -> None:
    with pytest.raises(RedrafterError, match="tree_size"):
        made(True, beam_width=2, tree_size=10**6, logits_processors=[lambda history, logits: logits])


def test_numpy_integers_serve_as_integers() -> None:
    assert made(True, seed=np.int64(3), beam_width=np.int64(2), temp=1.0) == made(False, seed=3, temp=1.0)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"temp": 1.0, "top_k": np.int64(5)}, {"temp": 1.0, "top_k": 5}),
        (
            {"temp": np.float64(1), "min_p": np.float32(0.25), "min_tokens_to_keep": np.int64(2)},
            {"temp": 1.0, "min_p": 0.25, "min_tokens_to_keep": 2},
        ),
        ({"temp": 1.0, "top_p": Fraction(1, 2)}, {"temp": 1.0, "top_p": 0.5}),
        (
            {"temp": 0.8, "xtc_probability": Fraction(1, 2), "xtc_special_tokens": np.array([1, 2])},
            {**XTC, "xtc_special_tokens": [1, 2]},
        ),
        ({**XTC, "xtc_special_tokens": None}, {**XTC, "xtc_special_tokens": []}),
        ({"beam_width": 2, "tree_size": np.int64(4)}, {"beam_width": 2, "tree_size": 4}),
    ],
)
def test_numbers_of_other_kinds_serve_as_plain_ones(
    drafted: bool, given: dict[str, Any], plain: dict[str, Any]
) -> None:
    assert made(drafted, seed=1, **given) == made(drafted, seed=1, **plain)


@pytest.mark.parametrize("top_p", [1e-320, 1e-46, 1e-30])
@pytest.mark.parametrize("drafted", [False, True])
def test_however_small_top_p_is_the_likeliest_token_is_left(drafted: bool, top_p: float) -> None:
    assert made(drafted, seed=1, temp=0.8, top_p=top_p) == made(drafted, seed=1, temp=0.8, top_k=1)


@pytest.mark.parametrize("cache", [(None, None), [None, None], ["a", "b"]], ids=["a tuple", "of nothing", "of strings"])
@pytest.mark.parametrize("drafted", [False, True])
def test_something_else_is_no_prompt_cache(drafted: bool, cache: Any) -> None:
    with pytest.raises(RedrafterError, match=r"prompt[_ ]cache must"):
        made(drafted, prompt_cache=cache)


@pytest.mark.parametrize("drafted", [False, True])
def test_something_else_is_no_model(drafted: bool) -> None:
    drafter = small_drafter() if drafted else None
    with pytest.raises(RedrafterError, match="model must be what load returns, got NoneType"):
        next(generate_step(PROMPT, None, drafter))


def test_a_draft_deeper_than_the_deepest_is_refused() -> None:
    with pytest.raises(RedrafterError, match="draft_depth must be from 1 to 256, got 257"):
        made(True, draft_depth=257)


def test_something_else_is_no_drafter() -> None:
    with pytest.raises(RedrafterError, match="drafter must be what load_drafter returns, got str"):
        next(generate_step(PROMPT, small_llama(), "drafter"))  # type: ignore[arg-type]


@pytest.mark.parametrize("drafted", [False, True])
def test_a_target_with_an_adapted_embedding_is_served(drafted: bool) -> None:
    model = small_llama(tie_word_embeddings=False)
    plain = [token for token, _, _ in generate_step(PROMPT, model, max_tokens=6)]
    model.model.embed_tokens = LoRAEmbedding.from_base(model.model.embed_tokens, r=4)
    drafter = small_drafter() if drafted else None
    # A new adapter changes nothing.
    assert [token for token, _, _ in generate_step(PROMPT, model, drafter, max_tokens=6)] == plain


def test_a_command_that_cannot_write_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full() -> int:
        raise OSError(28, "No space left on device")

    from mlx_redrafter.cli import generate as command

    monkeypatch.setattr(command, "run", full)
    with pytest.raises(SystemExit) as ended:
        run_module("mlx_redrafter.cli.generate")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"
