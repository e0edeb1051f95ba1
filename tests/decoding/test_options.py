"""Decoding options: ranges, types, and what is derived from them."""

import argparse
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from helpers.refusals import refusal
from helpers.small import small_drafter
from mlx_redrafter.cli.arguments import add_options
from mlx_redrafter.decoding.options import OPTION_FLAGS, Options
from mlx_redrafter.engine.plan import AUTO, Plan, chain_plan


def pick(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


WRONG = [
    {"max_tokens": -2},
    {"seed": 1.5},
    {"temp": float("nan")},
    {"temp": 1e-31},
    {"top_k": 2.0},
    {"top_k": True},
    {"kv_bits": 7},
    {"plan": "fast"},
    {"beam_width": -1},
    {"draft_depth": 300},
    {"sampler": 1},
    {"on_round": 1},
    {"on_drafter_failure": "warn"},
    {"prompt_progress_callback": 5},
    {"logits_processors": pick},
    {"logits_processors": [None]},
    {"history": 5},
    {"history": "abc"},
    {"prompt_cache": 5},
    {"xtc_special_tokens": 5},
]


@pytest.mark.parametrize("options", WRONG, ids=" ".join)
def test_a_wrong_value_is_refused_by_name(options):
    with refusal(f"^{next(iter(options))} must be "):
        Options(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": (0, 1)}, "beam_width must be "),
        ({"beam_width": 3000}, r"beam_width \* draft_depth must be "),
        ({"plan": (1, 0)}, "draft_depth must be "),
        ({"plan": (2, 2, 6)}, "tree_size .* must be "),
        ({"plan": "off", "beam_width": 2}, "give either plan or beam_width, got "),
        ({"plan": "off", "context": True}, "give either plan 'off' or context, got "),
        ({"sampler": pick, "top_k": 3}, "give either a sampler or top_k, got "),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with refusal(f"^{message}"):
        Options(**options)


@pytest.mark.parametrize("flag", OPTION_FLAGS, ids=lambda flag: flag.name)
def test_both_ends_of_every_range_are_accepted(flag):
    assert getattr(Options(), flag.name) == flag.default
    for value in {flag.minimum, flag.maximum, *(flag.choices or ())} - {None}:
        assert getattr(Options(**{flag.name: value}), flag.name) == value
    beyond = [
        None if flag.minimum is None else flag.minimum - 1,
        None if flag.maximum is None else flag.maximum + 1,
    ]
    for value in set(beyond) - {None}:
        with refusal(f"^{flag.name} must be "):
            Options(**{flag.name: value})


def test_changed_options_are_checked_and_become_python_numbers():
    options = Options(top_k=np.int64(3), temp=np.float32(0.5), seed=np.int32(7))
    assert [type(x) for x in (options.top_k, options.temp, options.seed)] == [int, float, int]
    with refusal("top_k"):
        replace(options, top_k=-1)


def test_flags_derive_from_the_options():
    parser = argparse.ArgumentParser()
    flags = [flag for flag in OPTION_FLAGS if flag.name != "seed"]
    add_options(parser, without={"seed"})
    defaults = vars(parser.parse_args([]))
    assert defaults == {flag.name: flag.default for flag in flags}
    assert Options(**defaults) == Options()
    parsed = parser.parse_args(["-m", "5", "--top-p", "0.5", "--kv-bits", "4", "--plan", "off"])
    assert (parsed.max_tokens, parsed.top_p, parsed.kv_bits, parsed.plan) == (5, 0.5, 4, "off")
    text = " ".join(parser.format_help().split())
    assert all(flag.help in text for flag in flags)


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ({}, AUTO),
        ({"plan": "off"}, None),
        ({"plan": (1, 4)}, chain_plan(4)),
        ({"plan": (2, 3)}, Plan(2, 3, 7)),
        ({"plan": [2, 3, 5]}, Plan(2, 3, 5)),
        ({"beam_width": 2}, Plan(2, 3, 7)),
        ({"tree_size": 3}, chain_plan(2)),
        ({"beam_width": 2, "draft_depth": 2, "tree_size": 4}, Plan(2, 2, 4)),
        ({"plan": (2, 3, 5), "logits_processors": [pick]}, Plan(2, 3, 7)),
    ],
)
def test_plan_follows_from_the_options(options, plan):
    assert Options(**options).resolve_plan(small_drafter()) == plan
    assert Options(**options).resolve_plan(None) is None


@pytest.mark.parametrize(
    "options", [{"beam_width": 65}, {"tree_size": 257}, {"tree_size": 5}], ids=str
)
def test_a_drafter_limits_the_plan(options):
    assert Options(**options).resolve_plan(None) is None, "some drafter could complete it"
    with refusal(f"^{next(iter(options))} .*must be "):
        Options(**options).resolve_plan(small_drafter())
