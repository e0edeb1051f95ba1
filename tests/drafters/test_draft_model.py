"""Draft models: the text is plain decoding's, and the draft model's cache follows it."""

import functools
import warnings
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from helpers.cost_curves import make_costs
from helpers.families import make_family
from helpers.refusals import refusal
from helpers.sessions import FAMILIES, chat_tokenizer
from helpers.sessions import make_model as make_shared
from helpers.small import save_target, small_llama
from helpers.toys import (
    ScriptedContext,
    assert_same_cache,
    assert_same_steps,
    decode_steps,
    ids,
    make_model,
    make_prompt,
    make_tokenizer,
    run,
)
from mlx_redrafter import (
    CheckpointError,
    Session,
    UnsupportedModelError,
    generate,
    generate_step,
    load_draft_model,
    stream_generate,
)
from mlx_redrafter.decoding import recipe
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.drafters.draft_model import DraftModel
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.measuring import store
from mlx_redrafter.measuring.pair import get_pair

CLASSES = [
    "llama",
    "gemma3_text",
    "llama4_text",
    "deepseek_v32",
    "mamba",
    "qwen3_5",
    "recurrent_gemma",
    "gpt2",
]
"""KV caches, ring buffers, chunks, lists of caches, states, states with KV caches and rings.

Chains over KV caches.
"""

CHAINS = {"mamba", "gpt2"}

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")


class Watched(nn.Module):
    """A draft model that records how many tokens it has read, and fails while `fails` is set."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model.model
        self.layers = model.layers
        self._whole = model
        self.n_read = 0
        self.fails = False

    def __call__(self, tokens: mx.array, cache=None):
        if self.fails:
            raise ValueError("no more")
        self.n_read += tokens.shape[1]
        return self._whole(tokens, cache=cache)


def ban_repeats(history: mx.array, logits: mx.array) -> mx.array:
    """A logits processor that bans the last eight tokens."""
    logits[:, history[-8:]] = -100.0
    return logits


@pytest.mark.parametrize("plan", [(1, 4), (2, 3)], ids=str)
@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_drafts_follow_logits_processors(temp, plan):
    model = make_model(vocab=40)
    prompt = make_prompt(9, vocab=40)
    options = {
        "max_tokens": 30,
        "temp": temp,
        "seed": 1,
        "logits_processors": [ban_repeats],
    }
    steps = run(model, prompt, DraftModel(model), plan=plan, context=False, **options)
    assert_same_steps(steps, run(model, prompt, **options), tolerance=2e-3)
    stats = steps[-1].stats
    # A model guesses its own choices.
    assert stats.tokens_per_round == pytest.approx(plan[1] + 1, abs=0.5)


@pytest.mark.parametrize("name", CLASSES)
def test_a_target_drafting_for_itself_is_nearly_always_right(name):
    """Chunked prompts, shorter and longer than windows and chunks of 8.

    Caches hold exactly the text.
    """
    model = make_family(name)
    vocab = min(64, model(mx.zeros((1, 1), mx.int32)).shape[-1])
    for size, temp, plans in ((3, 0.8, ((1, 3), (2, 3))), (50, 0.0, ((1, 3), (3, 3, 7)))):
        prompt = make_prompt(size, vocab=vocab)
        options = {"temp": temp, "seed": 3, "prefill_step_size": 9}
        plain = run(model, prompt, max_tokens=25, **options)
        expected = make_prompt_cache(model)
        run(model, [*prompt, *ids(plain)], max_tokens=0, prompt_cache=expected)
        for plan in plans:
            cache = make_prompt_cache(model)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                steps = run(
                    model,
                    prompt,
                    DraftModel(model),
                    max_tokens=25,
                    plan=plan,
                    prompt_cache=cache,
                    **options,
                )
            assert_same_steps(steps, plain, tolerance=2e-3)
            # The likeliest path may differ from the path of likeliest tokens.
            assert steps[-1].stats.accepted >= (18 if plan[0] == 1 else 13), (size, plan)
            # Only chains without tree support.
            assert bool(caught) is (name in CHAINS and plan[0] > 1)
            assert_same_cache(cache, expected, tolerance=2e-3)


@functools.cache
def decode_plainly(family: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """Plain decoding's tokens."""
    return ids(run(make_shared(family), prompt, max_tokens=count))


@pytest.mark.parametrize("taken", [1, 3, 10])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_continues_a_text_that_was_closed_early(family, taken):
    """Closed early or late in a round, and with a fork that continues differently."""
    model = make_shared(family)
    prompt = make_prompt(11, vocab=50)
    text = [*prompt, *decode_plainly(family, tuple(prompt), 34)]
    cache = make_prompt_cache(model)
    drafter = DraftModel(model)
    source = drafter.open(model)
    steps = decode_steps(
        prompt, model, source, Options(prompt_cache=cache, plan=(1, 3), max_tokens=40)
    )
    assert [next(steps).token for _ in range(taken)] == text[11 : 11 + taken]
    steps.close()
    left = text[: 11 + taken]
    fork = source.fork()
    other_prompt = [*left, 7, 9, 11]
    other = run(model, other_prompt, fork, max_tokens=20, plan=(1, 3))
    assert ids(other) == ids(run(model, other_prompt, max_tokens=20))
    assert other[-1].stats.accepted >= 14
    rest = run(
        model,
        text[len(left) : len(left) + 2],
        source,
        max_tokens=20,
        plan=(1, 3),
        prompt_cache=cache,
        history=left,
    )
    assert ids(rest) == text[len(left) + 2 : len(left) + 22]
    assert rest[-1].stats.accepted >= 14
    # A text that shares no prefix with the last one.
    fresh = run(model, prompt[::-1], source, max_tokens=20, plan=(1, 3))
    assert ids(fresh) == decode_plainly(family, tuple(prompt[::-1]), 20)
    assert fresh[-1].stats.accepted >= 14


@pytest.mark.parametrize("family", FAMILIES)
def test_sessions_keep_its_cache(family):
    model = make_shared(family)
    turns = ("abc", "de", "fghij")
    plain = Session(model, chat_tokenizer(), plan="off", max_tokens=12)
    session = Session(
        model, chat_tokenizer(), DraftModel(model), plan=(1, 3), max_tokens=12, prefill_step_size=3
    )
    for turn in turns:
        plain.send(turn)
        fork = session.fork()
        answers = [each.send(turn) for each in (session, fork)]
        assert session.tokens == fork.tokens == plain.tokens
        for answer in answers:
            assert answer.last.accepted >= (answer.last.generation_tokens - 1) / 2


def test_it_reads_only_when_it_drafts_and_recovers_after_a_failure():
    model = make_model()
    prompt = make_prompt(90)
    errors = []
    watched = Watched(model)
    plain = run(model, prompt, max_tokens=20)
    source = DraftModel(watched).open(model)
    run(model, prompt, source, max_tokens=0)
    watched.n_read = 0  # some are read while its vocabulary is looked up
    run(model, prompt, source, max_tokens=1, plan=(1, 3))
    assert watched.n_read == 0
    run(model, prompt, source, max_tokens=10, plan=(1, 3))
    assert 90 < watched.n_read < 150, "each token once, and its guesses"
    watched.fails = True
    steps = run(model, prompt, source, max_tokens=20, plan=(1, 3), on_drafter_failure=errors.append)
    assert ids(steps) == ids(plain)
    assert [str(each) for each in errors] == ["no more"]
    watched.fails = False
    source = DraftModel(watched).open(model)
    steps = run(model, prompt, source, max_tokens=20, plan=(1, 3))
    assert ids(steps) == ids(plain)
    assert steps[-1].stats.accepted > 12


@pytest.mark.parametrize("width", [1, 2])
def test_the_context_drafts_alongside(width, monkeypatch):
    model = make_model()
    other = make_model(seed=2)
    prompt = make_prompt(9)
    plain = run(model, prompt, max_tokens=60)
    monkeypatch.setattr(recipe, "ContextSource", partial(ScriptedContext, [*prompt, *ids(plain)]))
    for draft in (model, other):
        steps = run(model, prompt, DraftModel(draft), max_tokens=50, plan=(width, 3), context=True)
        assert_same_steps(steps, plain[:50])
        stats = steps[-1].stats
        assert stats.context_accepted
        assert (stats.accepted > stats.context_accepted) is (draft is model)


@pytest.mark.parametrize("vocab", [32, 48])
def test_vocabularies_of_another_width_are_cut_or_padded(vocab):
    """Includes tokens that the draft model has no embedding for."""
    model = make_model()
    draft = make_model(vocab=vocab)
    prompt = make_prompt(30)
    assert vocab > 40 or max(prompt) >= vocab
    for options in ({}, {"temp": 0.8, "top_p": 0.9, "min_p": 0.01, "top_k": 20, "seed": 2}):
        plain = run(model, prompt, max_tokens=30, **options)
        for plan in ((1, 3), (2, 3)):
            steps = run(model, prompt, DraftModel(draft), max_tokens=30, plan=plan, **options)
            assert_same_steps(steps, plain)
    source = DraftModel(draft).open(model)
    source.read(prompt)
    found = []
    source.propose(
        mx.array(prompt[-1]), Plan(2, 2, 5), lambda x, *_: found.append(x) or x, in_level_order=True
    )
    own = draft(mx.minimum(mx.array(prompt), vocab - 1)[None])[0, -1:]
    assert [row.shape[-1] for row in found] == [40, 40]
    assert mx.allclose(found[0][:, : min(vocab, 40)], own[:, :40], rtol=1e-3, atol=1e-3)
    assert (found[0][:, vocab:] == -mx.inf).all()


def test_max_kv_size_bounds_its_cache():
    model = make_model("qwen3")
    prompt = make_prompt(60)
    source = DraftModel(model).open(model)
    plain = run(model, prompt, max_tokens=40, max_kv_size=16)
    steps = run(model, prompt, source, max_tokens=40, max_kv_size=16, plan=(1, 3))
    assert ids(steps) == ids(plain)
    assert steps[-1].stats.accepted > 15
    assert all(cache["keys"].shape[2] <= 16 + 8 for cache in source.arrays)


def test_mlx_lms_keywords():
    model = make_model()
    tokenizer = make_tokenizer()
    prompt = make_prompt(9)
    expected = [
        (step.token, step.from_draft)
        for step in run(model, prompt, DraftModel(model), max_tokens=20, plan=(1, 3))
    ]
    options = {"draft_model": model, "num_draft_tokens": 3, "max_tokens": 20}
    found = list(stream_generate(model, tokenizer, prompt, **options))
    assert [(each.token, each.from_draft) for each in found] == expected
    assert [
        (token, drafted) for token, _, drafted in generate_step(prompt, model, **options)
    ] == expected
    assert generate(model, tokenizer, prompt, **options) == "".join(each.text for each in found)
    assert {each.draft_source for each in found} == {None, "drafter"}
    options["draft_model"] = DraftModel(model)
    assert [each.token for each in stream_generate(model, tokenizer, prompt, **options)] == [
        t for t, _ in expected
    ]
    without = stream_generate(
        model, tokenizer, prompt, num_draft_tokens=3, max_tokens=20, context=False
    )
    # Nothing is drafted, as in mlx-lm.
    assert [each.token for each in without] == [t for t, _ in expected]
    for wrong, message in (
        ({"drafter": DraftModel(model)}, "drafter or draft_model"),
        ({"draft_depth": 3}, "num_draft_tokens or draft_depth"),
        ({"draft_model": "small"}, "got str"),
        ({"num_draft_tokens": 0}, "got 0"),
    ):
        with refusal(message):
            next(generate_step(prompt, model, **options | wrong))


def test_draft_models_are_loaded_and_compared(tmp_path):
    target = small_llama(vocab=53, hidden=64)
    save_target(tmp_path / "same", small_llama(vocab=53), make_tokenizer(vocab=53)._tokenizer)
    found = load_draft_model(tmp_path / "same", target, make_tokenizer(vocab=53))
    assert found.args.vocab_size == 53
    assert found.args.hidden_size == 32
    assert ids(run(target, [1, 2], found, max_tokens=9, plan=(1, 2))) == ids(
        run(target, [1, 2], max_tokens=9)
    )
    with pytest.raises(CheckpointError, match="vocabulary of 53 tokens, the target of 2000"):
        load_draft_model(tmp_path / "same", small_llama(vocab=2000))


@pytest.mark.parametrize("name", ["mamba", "gemma3_text"])
def test_auto_drafts_with_it(name, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no costs of other tests
    target = make_model()
    drafter = DraftModel(make_family(name))
    reads = []
    flat = make_costs()
    monkeypatch.setattr(
        store,
        "measure_costs",
        lambda *pair, trees, **how: (
            reads.append(trees) or (flat if trees else flat.restrict_to_chains())
        ),
    )
    prompt = make_prompt(12)
    plain = run(target, prompt, max_tokens=120)
    for draft in (drafter, DraftModel(target)):
        steps = run(target, prompt, draft, max_tokens=120, context=False)
        assert_same_steps(steps, plain)
        assert steps[-1].stats.drafter_rounds
    assert reads[0] is (name != "mamba"), "trees only if both models support them"
    first, second = (get_pair(target, DraftModel(drafter.model))[0] for _ in range(2))
    assert second.findings is first.findings, "shared by wrappers of one model"


def test_unusable_draft_models_are_refused():
    with refusal("2000 tokens, the target of 40"):
        run(make_model(), [1, 2], DraftModel(make_model(vocab=2000)), max_tokens=2)
    with refusal("draft_model"):
        run(make_model(), [1, 2], make_model(), max_tokens=2)
    with pytest.raises(UnsupportedModelError, match="olmo"):
        DraftModel(type("Model", (nn.Module,), {"__module__": "mlx_lm.models.olmo"})())


def test_mlx_lms_joint_prompt_cache_is_accepted():
    """The draft model prefills its own cache: the target's layers come first in the joint cache."""
    model = make_model()
    draft = make_model(seed=2)
    prompt = make_prompt(30)
    joint = make_prompt_cache(model) + make_prompt_cache(draft)
    own = make_prompt_cache(model)
    for cache in (joint[: len(own)], own):
        run(model, prompt[:20], max_tokens=0, prompt_cache=cache)
    given = {"max_tokens": 12, "plan": (1, 3), "history": prompt[:20]}
    steps = run(model, prompt[20:], DraftModel(draft), prompt_cache=joint, **given)
    assert ids(steps) == ids(run(model, prompt, max_tokens=12))
    assert steps[-1].stats.drafted
    run(model, prompt[20:], DraftModel(draft), prompt_cache=own, **given)
    assert_same_cache(joint[: len(own)], own)
    with refusal(f"got {len(joint)}"):
        run(model, prompt, max_tokens=1, prompt_cache=joint)
