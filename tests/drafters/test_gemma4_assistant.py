"""Gemma 4's assistants: the original's drafts, the rows they read, and which targets they fit."""

import copy
import json
from collections.abc import Sequence
from functools import partial
from itertools import product

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

from helpers.assistants import (
    ASSISTANT_KINDS,
    TARGETS,
    load_golden_target,
    make_assistant,
    make_gemma4,
    publish_assistant,
)
from helpers.checkpoints import load_golden, same, tensors
from helpers.published import Arrays, list_golden, read_golden
from helpers.sessions import chat_tokenizer
from helpers.small import small_llama
from helpers.toys import assert_same_steps, ids, make_prompt, run
from helpers.workers import ask, assert_plain, count_tokens, running
from mlx_redrafter import Session, generate_step, load_drafter
from mlx_redrafter.convert.conversion import convert
from mlx_redrafter.drafters.checkpoint import MODES
from mlx_redrafter.drafters.gemma4_assistant import (
    MODEL_TYPES,
    AssistantSource,
    Drafter,
)
from mlx_redrafter.drafters.protocol import StepwiseSource
from mlx_redrafter.engine.beam_search import Adjust
from mlx_redrafter.engine.plan import Plan, chain_plan
from mlx_redrafter.engine.source import Source
from mlx_redrafter.engine.tree import chain
from mlx_redrafter.engine.types import Kept, Tree
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.measuring.pair import Pair
from mlx_redrafter.target.target import Target

PAIRS = ("gemma4_assistant",)
"""Golden files with a target."""

ALONE = tuple(name for name in list_golden("shared_cache/*") if name not in PAIRS)
"""Golden files with given rows."""
PROMPTS = ("short", "long")


class Text:
    """A text that a target reads, with an assistant's source."""

    def __init__(self, model: nn.Module, drafter):
        self.source = drafter.open(model)
        self.target = Target(model, capture=self.source.capture)
        self.source.read_rows = self.target.read_rows

    def read(self, tokens: mx.array) -> mx.array:
        """Reads tokens that stay; returns their states."""
        position = self.target.length
        hidden = self.target.forward(tokens).hidden
        self.source.keep(Kept(tokens, hidden, None, len(tokens), position))
        return hidden["after_norm"]

    def verify(self, tokens: mx.array, n_accepted: int) -> mx.array:
        """Verifies a chain, of which some tokens after the root stay; returns the last state."""
        position = self.target.length
        path = mx.minimum(mx.arange(len(tokens)), n_accepted)
        hidden = self.target.verify(chain(tokens[0], tokens[1:]), is_tree=False).hidden
        kept = Kept(tokens, hidden, path, mx.array(n_accepted + 1), position)
        self.source.keep(kept)
        accepted = tokens[: n_accepted + 1].tolist()
        self.target.keep_path([*range(n_accepted + 1)], accepted)
        return kept.last_hidden("after_norm")

    def compute_logits(self, root: mx.array, path: mx.array) -> mx.array:
        """(K, V) the logits of a draft along a path of K tokens."""
        advance = self.source.begin(root)
        state = None
        found = []
        for token in [root, *path][:-1]:
            logits, state = advance(token.reshape(1), state)
            found.append(logits)
        return mx.concatenate(found)


def draft(source: Source, root: mx.array, plan: Plan) -> list[int]:
    """The tokens of a draft without its root."""
    tree = source.propose(root, plan, None, in_level_order=False)
    return tree.tokens.tolist()[1:]


def assert_near(got: mx.array, expected: mx.array):
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)


@pytest.fixture(scope="module", params=PAIRS)
def golden(request, tmp_path_factory) -> tuple[nn.Module, Drafter, Arrays]:
    """(the target, the assistant, the original's results)."""
    drafter = load_golden(request.param, tmp_path_factory.mktemp("golden"))
    return load_golden_target(request.param), drafter, read_golden(request.param)[1]


def select(arrays: Arrays, prefix: str) -> Arrays:
    return {
        key.removeprefix(prefix): each for key, each in arrays.items() if key.startswith(prefix)
    }


@pytest.mark.parametrize("prompt", PROMPTS)
def test_drafts_match_the_original(prompt, golden):
    """After a prompt, and after rounds of which two, no and all drafted tokens are accepted."""
    model, drafter, arrays = golden
    expected = select(arrays, f"{prompt}.")
    text = Text(model, drafter)
    assert_near(text.read(expected["tokens"]), expected["target_hidden"])
    root = expected["root"]

    def check(part, root):
        drafted = expected[f"{part}last.draft_tokens"]
        assert draft(text.source, root, chain_plan(len(drafted))) == drafted.tolist()
        assert_near(text.compute_logits(root, drafted), expected[f"{part}last.logits"])

    check("", root)
    forced = expected["forced_tokens"]
    assert_near(text.compute_logits(root, forced), expected["last.forced_logits"])
    for part in ("second.", "third.", "fourth."):
        n_accepted = expected[f"{part}accepted"].item()
        state = text.verify(expected[f"{part}verified_tokens"], n_accepted)
        assert text.target.length == expected[f"{part}length"].item()
        assert_near(state, expected[f"{part}hidden"])
        check(part, expected[f"{part}root"])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_rounds_match_the_original(prompt, golden):
    model, drafter, arrays = golden
    expected = select(arrays, f"{prompt}.last.rounds.")
    drafts = []
    accepted = []

    def note(tree, path, chosen):
        drafts.append(tree.tokens.tolist())
        accepted.append(len(path) - 1)

    steps = generate_step(
        arrays[f"{prompt}.tokens"], model, drafter, plan=(1, 4), context=False, on_round=note,
        max_tokens=len(expected["text"]),
    )  # fmt: skip
    assert [token for token, _, _ in steps] == expected["text"].tolist()
    assert [root for root, *_ in drafts] == expected["roots"].tolist()
    assert [rest for _, *rest in drafts] == expected["drafts"].tolist()
    assert accepted == expected["accepted"].tolist()


@pytest.mark.parametrize("name", ALONE)
def test_logits_match_the_original(name, tmp_path):
    """The tokens of clusters that are not chosen have the original's lowest logit."""
    drafter = load_golden(name, tmp_path)
    arrays = read_golden(name)[1]
    rows = {
        f"{kind}_attention": (arrays[f"{kind}_keys"][None], arrays[f"{kind}_values"][None])
        for kind in ("sliding", "full")
    }
    fewer = {kind: (keys[..., 1:, :], values[..., 1:, :]) for kind, (keys, values) in rows.items()}
    state = arrays["hidden"]
    for step, expected in enumerate(arrays["logits"]):
        read = partial(drafter.read_tokens, arrays["embedded"][step : step + 1], state)
        normed = read(rows, arrays["position"])
        logits = drafter.guess(normed)[0]
        is_chosen = expected > expected.min()
        assert is_chosen.sum().item() == 36
        assert mx.array_equal(mx.isfinite(logits), is_chosen)
        assert_near(mx.where(is_chosen, logits, expected), expected)
        # Negative controls.
        assert not mx.allclose(read(fewer, arrays["position"]), normed, atol=1e-2)
        assert not mx.allclose(read(rows, arrays["position"] + 1), normed, atol=1e-2)
        state = drafter.post_projection(normed)
        assert_near(state[0], arrays["fed_back"][step])


FEW = 8
"""Small enough that random drafters are often right."""

PLANS = chain_plan(4), Plan(3, 3, 7)


def draft_afresh(model: nn.Module, drafter: Drafter, tokens: list[int], plan: Plan) -> list[int]:
    """A draft after the target has read all tokens but the last one at once."""
    text = Text(model, drafter)
    text.read(mx.array(tokens[:-1]))
    return draft(text.source, mx.array(tokens[-1]), plan)


class Watched(Drafter):
    """An assistant whose drafts are noted, and replaced by partly right chains.

    Args:
        text: a prompt and its plain continuation, longer than the decoded text.
    """

    def __init__(self, drafter: Drafter, text: list[int]):
        super().__init__(drafter.args)
        self.update(drafter.parameters())
        self.text = text
        self.drafts = []

    def open(self, model: nn.Module) -> AssistantSource:
        return WatchedSource(self, model)


class WatchedSource(AssistantSource):
    """The source of `Watched`."""

    drafter: Watched

    def read(self, tokens: Sequence[int]):
        self._end = len(tokens)

    def confirm(self, tokens: Sequence[int]):
        self._end += len(tokens)

    def propose(
        self, root: mx.array, plan: Plan, adjust: Adjust | None, *, in_level_order: bool
    ) -> Tree:
        end = self._end
        for own in PLANS:
            tree = super().propose(root, own, None, in_level_order=False)
            drafted = tree.tokens[1:].tolist()
            self.drafter.drafts.append((end, own, drafted))
        tokens = self.drafter.text[end : end + plan.depth]
        wrong_from = end % 5
        tokens[wrong_from:] = [(token + 1) % FEW for token in tokens[wrong_from:]]
        return chain(root, mx.array(tokens))


@pytest.mark.parametrize(("name", "kind"), [*product(TARGETS, ASSISTANT_KINDS)])
def test_drafts_do_not_depend_on_how_the_text_was_read(name, kind):
    """Pieces of the prompt, plain steps and rounds give the drafts of a single read.

    The rings of 8 rows wrap; steps of one row turn them, steps of several make them longer.
    """
    model = make_gemma4(name, FEW)
    drafter = make_assistant(kind, model)
    prompt = make_prompt(6, vocab=FEW)
    options = {"prefill_step_size": 3}
    plain = ids(run(model, prompt, max_tokens=50, **options))
    watched = Watched(drafter, [*prompt, *plain])
    steps = run(model, prompt, watched, plan=(1, 4), max_tokens=40, **options, context=False)
    assert ids(steps) == plain[:40]
    assert 10 < steps[-1].stats.accepted < 30
    assert len(watched.drafts) > 20
    for end, plan, tokens in watched.drafts:
        assert tokens == draft_afresh(model, drafter, watched.text[:end], plan)
    # Negative control: without the first token.
    end, plan, tokens = watched.drafts[0]
    text = watched.text[1:end]
    assert tokens != draft_afresh(model, drafter, text, plan)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_greedy_drafts_compute_no_logits_of_other_clusters(plan, monkeypatch):
    """They are the drafts from the logits of all tokens."""
    model = make_gemma4("gemma4_text")
    drafter = make_assistant("assistant with centroids", model, hidden_size=48)
    tokens = make_prompt(12)
    text = Text(model, drafter)
    text.read(mx.array(tokens))
    full = StepwiseSource.propose(text.source, mx.array(3), plan, None, in_level_order=False)
    with monkeypatch.context() as patch:
        patch.setattr(Drafter, "guess", None)
        few = text.source.propose(mx.array(3), plan, None, in_level_order=False)
    for one, other in zip(full, few, strict=True):
        assert mx.array_equal(one, other)
    levels = text.source.propose(mx.array(3), plan, None, in_level_order=True)
    assert len(levels.tokens) == 1 + plan.width * plan.depth


def test_targets_of_other_sizes_are_refused():
    """Both numbers are named: of mixed pairs, and of each size that the cache must have."""
    model = make_gemma4("gemma4_text")
    for sizes, reason in (
        ({"hidden_size": 96}, "expects hidden size 64, the target has 96"),
        ({"sliding_window": 4}, "expects sliding_window 8, the target has 4"),
        ({"num_key_value_heads": 1}, "n_kv_heads 2 in sliding_attention, the target has 1 in"),
        ({"global_head_dim": 32}, "head_dim 64 in full_attention, the target has 32 in layer 3"),
        ({"layer_types": ["sliding_attention"] * 6}, "a full_attention layer .* has none"),
    ):
        other = make_gemma4("gemma4_text", **sizes)
        with pytest.raises(CheckpointError, match=reason):
            Pair(other, make_assistant("assistant", model))
    with pytest.raises(CheckpointError, match=r"a target of Gemma 4 .*, got llama"):
        llama = small_llama(hidden=64, vocab=64)
        Pair(llama, make_assistant("assistant", model))


@pytest.mark.parametrize("kind", ASSISTANT_KINDS)
def test_published_assistants_load(kind, tmp_path):
    """Dense ones name centroids that they lack; a copy of the embedding beside `lm_head` is unused.

    The tokens of clusters must be a permutation.
    """
    model = make_gemma4("gemma4")
    drafter = make_assistant(kind, model)
    for model_type in MODEL_TYPES:
        folder = publish_assistant(drafter, tmp_path / model_type, model_type=model_type)
        loaded = load_drafter(folder, model)
        assert loaded.args.model_type == model_type
        assert same(tensors(loaded), tensors(drafter))

    file = folder / "model.safetensors"
    arrays = mx.load(str(file))
    untied = arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"]}
    untied["model.embed_tokens.weight"] = mx.zeros((64, 32))
    mx.save_safetensors(str(file), untied)
    assert same(tensors(load_drafter(folder)), tensors(drafter))

    name = "masked_embedding.token_ordering"
    if name in arrays:
        mx.save_safetensors(str(file), arrays | {name: mx.zeros((64,), mx.int64)})
        with pytest.raises(CheckpointError, match="token_ordering to have each token once"):
            load_drafter(folder)


@pytest.mark.parametrize("key", ["enable_moe_block", "attention_bias"])
def test_configs_that_change_the_computation_are_refused(key, tmp_path):
    drafter = make_assistant("assistant", make_gemma4("gemma4"))
    folder = publish_assistant(drafter, tmp_path / "it")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"][key] = True
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"{key} True is not supported"):
        load_drafter(folder)


@pytest.mark.parametrize("kind", ASSISTANT_KINDS)
@pytest.mark.parametrize(("mode", "bits"), [
    ("affine", 4), ("affine", 5), ("affine", 6), ("affine", 8), ("mxfp4", 4), ("mxfp8", 8),
    ("nvfp4", 4),
])  # fmt: skip
def test_quantized_assistants_draft(mode, bits, kind, tmp_path):
    model = make_gemma4("gemma4_text")
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    drafter = make_assistant(kind, model, **sizes)
    how = {"group_size": MODES[mode][0], "bits": bits, "mode": mode}
    nn.quantize(drafter, **how)
    folder = publish_assistant(drafter, tmp_path / "it", quantization=how)
    loaded = load_drafter(folder, model)
    assert loaded.output.bits == loaded.pre_projection.bits == bits
    assert same(tensors(loaded), tensors(drafter))
    prompt = make_prompt(11)
    settings = [{}, {"temp": 0.9, "seed": 2}]
    for options in settings:
        steps = run(model, prompt, loaded, plan=(1, 3), max_tokens=12, **options)
        assert ids(steps) == ids(run(model, prompt, max_tokens=12, **options))
        assert steps[-1].stats.drafted

    plain = load_drafter(convert(folder, tmp_path / "plain", dequantize=True).path)
    assert mx.allclose(plain.sample_logits(), loaded.sample_logits(), atol=1e-3)


def test_a_trained_pair_keeps_the_text(golden):
    """Sampled, with processors, forks, early ends and further turns; most drafts are right."""
    model, drafter, arrays = golden
    prompt = arrays["long.tokens"].tolist()
    settings = [
        {"temp": 0.8, "seed": 1},
        {"temp": 1.0, "top_p": 0.9, "min_p": 0.05, "seed": 2},
        {"logits_processors": make_logits_processors(repetition_penalty=1.1)},
    ]
    for options in settings:
        for plan in ((1, 4), (3, 3)):
            steps = run(model, prompt, drafter, plan=plan, max_tokens=40, **options)
            assert_same_steps(steps, run(model, prompt, max_tokens=40, **options))
            assert steps[-1].stats.accepted > 5, (options, plan)

    for count in (1, 3, 8, 12):
        cache = make_prompt_cache(model)
        source = drafter.open(model)
        steps = run(model, prompt, source, plan=(1, 4), max_tokens=count, prompt_cache=cache)
        text = [*prompt, *ids(steps)]
        for each, own in ((source.fork(), copy.deepcopy(cache)), (source, cache)):
            turn = [3, 1, 2]
            more = run(model, turn, each, plan=(1, 4), max_tokens=9, prompt_cache=own, history=text)
            assert ids(more) == ids(run(model, [*text, *turn], max_tokens=9))


@pytest.mark.parametrize("name", TARGETS[:2])
def test_sessions_continue_after_forks_and_saving(name, tmp_path):
    model = make_gemma4(name)
    drafter = make_assistant("assistant", model)
    options = {"max_tokens": 9, "beam_width": 1, "draft_depth": 3}
    session = Session(model, chat_tokenizer(), drafter, **options)
    plain = Session(model, chat_tokenizer(), plan="off", max_tokens=9)
    for turn in ("abc", "de"):
        assert session.send(turn).tokens == plain.send(turn).tokens
    session.save(tmp_path / "it.safetensors")
    loaded = Session.load(tmp_path / "it.safetensors", model, chat_tokenizer(), drafter, **options)
    fork = session.fork()
    expected = plain.send("fghij").tokens
    for each in (fork, loaded, session):
        answer = each.send("fghij")
        assert answer.tokens == expected
        assert answer.last.drafted


def test_exact_texts_are_the_same_to_the_bit():
    model = make_gemma4("gemma4_unified", sliding_window=512)
    drafter = make_assistant("assistant", model)
    prompt = make_prompt(9)
    plain = run(model, prompt, max_tokens=50, exact=True)
    watched = Watched(drafter, [*prompt, *ids(plain)])
    steps = run(model, prompt, watched, plan=(1, 4), max_tokens=40, context=False, exact=True)
    assert steps[-1].stats.accepted > 5
    for one, other in zip(steps, plain, strict=False):
        assert one.token == other.token
        assert mx.array_equal(one.logprobs, other.logprobs)


@pytest.mark.parametrize("name", TARGETS)
def test_the_server_keeps_the_text(name):
    """Requests draft from a kept prompt, one after the other, at once, and while others decode."""
    model = make_gemma4(name, FEW)
    drafter = make_assistant("assistant", model)
    prompt = make_prompt(20, vocab=FEW)
    with running(model, drafter, options={"plan": (1, 3)}) as worker:
        for rest in ([1], [1, 2, 3], [4]):
            assert_plain(worker, model, ask([*prompt, *rest], 18))
        requests = [ask([*prompt, first], 24, temp=0.9, seed=first) for first in range(3)]
        assert_plain(worker, model, *requests)
        assert count_tokens(worker, "cached") > 0
        assert count_tokens(worker, "drafted") > 20


def test_converting_trims_and_quantizes(tmp_path):
    """Centroids stay as they are, as routers do; chosen clusters are a draft vocabulary already."""
    model = make_gemma4("gemma4_text")
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    dense, small = (make_assistant(kind, model, **sizes) for kind in ASSISTANT_KINDS)
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps([*range(0, 64, 2)]))
    trim = {"draft_vocab_size": 20, "token_counts": counts}
    folder = publish_assistant(dense, tmp_path / "dense")
    trimmed = load_drafter(convert(folder, tmp_path / "trimmed", **trim).path, model)
    normed = mx.random.normal((1, 64), key=mx.random.key(1))
    logits = trimmed.guess(normed)[0]
    assert mx.array_equal(mx.isfinite(logits), mx.array([i < 40 and i % 2 == 0 for i in range(64)]))
    assert mx.allclose(logits[:40:2], dense.guess(normed)[0, :40:2], atol=1e-5)
    prompt = make_prompt(9)
    steps = run(model, prompt, trimmed, plan=(2, 2), max_tokens=9)
    assert ids(steps) == ids(run(model, prompt, max_tokens=9))

    folder = publish_assistant(small, tmp_path / "small")
    with pytest.raises(CheckpointError, match="its vocabulary cannot be trimmed"):
        convert(folder, tmp_path / "no", **trim)
    packed = load_drafter(convert(folder, tmp_path / "packed", quantize=True).path, model)
    assert hasattr(packed.output, "bits")
    assert not hasattr(packed.centroids, "bits")
