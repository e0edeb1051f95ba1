"""The public generation functions: responses, where a text ends, and reported rounds."""

import inspect
import warnings
from functools import cache
from itertools import product
from unittest.mock import Mock

import mlx.core as mx
import pytest
from mlx_lm import generate as mlx_lm_generate
from mlx_lm import load as mlx_lm_load
from mlx_lm.generate import generate_step as mlx_lm_generate_step
from mlx_lm.generate import speculative_generate_step
from mlx_lm.generate import stream_generate as mlx_lm_stream_generate
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from helpers.refusals import refusal
from helpers.small import save_target, small_drafter
from helpers.toys import (
    BEAMS,
    SCRIPTS,
    VOCAB,
    Scripted,
    ids,
    make_model,
    make_prompt,
    make_tokenizer,
    run,
    with_plain,
)
from mlx_redrafter import (
    GenerationResponse,
    RedrafterError,
    Session,
    generate,
    generate_step,
    load,
    load_drafter,
    stream_generate,
    train,
)
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.decoding.responses import format_summary
from mlx_redrafter.decoding.trials import decode_prompts
from mlx_redrafter.demo import DIRECTORY as DEMO
from mlx_redrafter.engine.types import Tree
from mlx_redrafter.measuring.pair import Pair

PROMPT = make_prompt(7, seed=4)
COUNT = 16
CHOICES = {
    "greedy": {},
    "sampled": {"temp": 1.0, "top_p": 0.9, "seed": 8},
}
pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")


@cache
def drafter_of(choice: str, width: int, script: str, script_seed: int) -> Scripted:
    """A drafter that follows `script` on plain decoding's text."""
    options = {"width": width, "script_seed": script_seed, **CHOICES[choice]}
    _, drafter = with_plain(make_model(), PROMPT, COUNT, script, **options)
    return drafter


def stream(eos: int | None = None, **options) -> list[GenerationResponse]:
    tokenizer = make_tokenizer(() if eos is None else (eos,))
    return list(stream_generate(make_model(), tokenizer, PROMPT, **{"max_tokens": COUNT} | options))


@cache
def stream_plainly(
    choice: str, eos: int | None = None, stop: str | None = None, max_tokens: int = COUNT
) -> list[GenerationResponse]:
    """Plain decoding's stream up to one of two stop strings, the other of which never comes."""
    return stream(
        eos,
        plan="off",
        stop=[] if stop is None else [stop, "never said"],
        max_tokens=max_tokens,
        **CHOICES[choice],
    )


# Responses.


@pytest.mark.parametrize("drafted", [False, True])
def test_responses_extend_mlx_lms(drafted):
    drafting = {"drafter": small_drafter(hidden=64, vocab=VOCAB), "plan": (2, 3)}
    options = drafting if drafted else {"context": False}
    theirs = list(mlx_lm_stream_generate(make_model(), make_tokenizer(), PROMPT, max_tokens=40))
    ours = stream(max_tokens=40, **options)
    for name in ("text", "token", "prompt_tokens", "generation_tokens", "finish_reason"):
        assert [getattr(r, name) for r in ours] == [getattr(r, name) for r in theirs], name
    assert all(
        mx.allclose(a.logprobs, b.logprobs, atol=1e-4) for a, b in zip(ours, theirs, strict=True)
    )
    last = ours[-1]
    assert vars(theirs[-1]).keys() < vars(last).keys()
    assert last.generation_tokens == 40 == 1 + last.rounds + last.accepted
    assert last.tokens_per_round == pytest.approx(1 + last.accepted / last.rounds)
    assert sum(last.acceptance_per_depth) * last.rounds == pytest.approx(last.accepted)
    assert last.drafted == 6 * last.rounds * drafted
    assert last.rows_per_round == (7 if drafted else 1)
    assert last.plain_steps == (0 if drafted else 39)
    assert ("Rounds: " in format_summary(last)) is drafted


# Calls as of mlx-lm.

OWN = {
    generate: (mlx_lm_generate, mlx_lm_stream_generate, mlx_lm_generate_step),
    stream_generate: (mlx_lm_stream_generate, mlx_lm_generate_step, speculative_generate_step),
    generate_step: (mlx_lm_generate_step,),
    load: (mlx_lm_load,),
}
"""Our functions -> mlx-lm's of that name, and those that take its other keywords."""


@pytest.mark.parametrize("ours", OWN)
def test_every_argument_of_mlx_lm_is_taken(ours, tmp_path):
    """By position and by name."""
    save_target(tmp_path)
    given = {"model": make_model(), "tokenizer": make_tokenizer(), "prompt": mx.array(PROMPT)}
    given |= {"path_or_hf_repo": tmp_path, "max_tokens": 3, "num_draft_tokens": 2}
    given |= {"draft_model": make_model(seed=1)}
    theirs = OWN[ours]
    found = [each for their in theirs for each in inspect.signature(their).parameters.values()]
    named = [each for each in found if each.kind != each.VAR_KEYWORD]
    values = {each.name: given.get(each.name, each.default) for each in named}
    parameters = inspect.signature(theirs[0]).parameters.values()
    placed = [each for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD]
    needed = {each.name: values[each.name] for each in placed if each.default is each.empty}

    for count in range(len(needed), 1 + len(placed)):
        assert list(ours(*(values[each.name] for each in placed[:count])))
    for name in values:
        assert list(ours(**needed | {name: values[name]}))


def test_calls_with_positions_do_what_mlx_lms_do(tmp_path):
    save_target(tmp_path)
    *_, config = load(tmp_path, return_config=True)
    assert config == mlx_lm_load(str(tmp_path), return_config=True)[-1]
    args = (make_model(), make_tokenizer(), PROMPT, 5)
    assert [r.token for r in stream_generate(*args)] == [
        r.token for r in mlx_lm_stream_generate(*args)
    ]
    with refusal("input_embeddings must be None"):
        next(stream_generate(*args, input_embeddings=mx.zeros((1, 64))))


def test_an_unknown_keyword_names_the_function_that_was_called():
    args = (make_model(), make_tokenizer())
    calls = {
        "generate": lambda: generate(*args, PROMPT, temperature=1),
        "stream_generate": lambda: next(stream_generate(*args, PROMPT, temperature=1)),
        "generate_step": lambda: next(generate_step(PROMPT, args[0], temperature=1)),
        "Session": lambda: Session(*args, temperature=1),
        "Session.stream": lambda: Session(*args).send("a", temperature=1),
        "train": lambda: train(temperature=1),
        "load": lambda: load("x", temperature=1),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError) as raised:
            call()
        said = f"{name}() got an unexpected keyword argument 'temperature'"
        assert str(raised.value) == said


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("path_or_hf_repo", lambda model, tokenizer: load(None)),  # type: ignore[arg-type]
        ("path_or_hf_repo", lambda model, tokenizer: load_drafter(5)),  # type: ignore[arg-type]
        ("drafter", lambda model, tokenizer: load(DEMO / "target", drafter=5)),  # type: ignore
        ("tokenizer", lambda model, tokenizer: generate(tokenizer, model, PROMPT)),
        ("tokenizer", lambda model, tokenizer: Session(tokenizer, model)),
        ("model", lambda model, tokenizer: Session(None, tokenizer)),
        ("history", lambda model, tokenizer: generate(model, tokenizer, PROMPT, history=[1.5])),
        ("memory_budget", lambda model, tokenizer: Session(model, tokenizer, memory_budget=True)),
        ("model", lambda model, tokenizer: train(model=None)),
        ("minutes", lambda model, tokenizer: train(model="x", minutes="x")),
        ("batch_size", lambda model, tokenizer: train(model="x", batch_size=2.5)),
        ("drafter_type", lambda model, tokenizer: train(model="x", drafter_type="x")),
        ("output", lambda model, tokenizer: train(model="x", output=None)),
    ],
)
def test_a_wrong_type_is_refused_by_name(name, call):
    with pytest.raises(RedrafterError, match=f"^{name} must be ") as raised:
        call(make_model(), make_tokenizer())
    assert "\n" not in str(raised.value)


def test_prompts_may_be_text_ids_or_arrays():
    tokenizer = make_tokenizer()
    text = tokenizer.decode(PROMPT)
    expected = "".join(
        each.text for each in stream_generate(make_model(), tokenizer, PROMPT, max_tokens=12)
    )
    for prompt in (text, tokenizer.encode(text), mx.array(tokenizer.encode(text))):
        assert generate(make_model(), tokenizer, prompt, max_tokens=12) == expected


def test_a_random_seed_is_reported():
    first = stream(temp=1.0)
    other = stream(temp=1.0)
    again = stream(
        temp=1.0, seed=first[0].seed, drafter=small_drafter(hidden=64, vocab=VOCAB), plan=(2, 3)
    )
    assert [r.token for r in first] == [r.token for r in again] != [r.token for r in other]
    assert first[0].seed == again[-1].seed != other[0].seed


def test_a_useless_drafter_warns_once():
    right = {r.token for r in stream(max_tokens=100)}
    wrong = next(token for token in range(VOCAB) if token not in right)
    never = small_drafter(hidden=64, vocab=VOCAB)
    only = mx.where(mx.arange(VOCAB) == wrong, 0.0, -1e9)
    never.logits = lambda hidden, state, depth: mx.broadcast_to(only, (*state.shape[:-1], VOCAB))
    with pytest.warns(UserWarning, match="guessed no token right in 16 rounds") as caught:
        stream(drafter=never, max_tokens=60, plan=(1, 3))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream(drafter=never, max_tokens=14, plan=(1, 3))


def test_a_custom_sampler_has_its_own_randomness():
    shapes = set()

    def sampler(logprobs):
        shapes.add(logprobs.shape)
        return make_sampler(temp=1.0)(logprobs)

    texts = {
        generate(make_model(), make_tokenizer(), PROMPT, sampler=sampler, max_tokens=40)
        for _ in range(2)
    }
    assert len(texts) == 2
    assert shapes == {(1, VOCAB)}


@pytest.mark.parametrize(("name", "value"), [("max_tokens", 0), ("model", "x"), ("drafter", "x")])
def test_bad_options_are_refused_on_the_first_next(name, value):
    options = {
        "model": make_model(),
        "tokenizer": make_tokenizer(),
        "prompt": PROMPT,
    }
    steps = stream_generate(**options | {name: value})
    with refusal(f"^{name} must be "):
        next(steps)


WRONG = {
    "a shape": lambda logprobs: mx.array([1, 2]),
    "a dtype": lambda logprobs: mx.array([1.0]),
    "an int": lambda logprobs: 5,
    "nothing": lambda logprobs: None,
}
BEYOND = (-1, VOCAB, 10**6, 2**32 + 5)


@pytest.mark.parametrize("plan", ["off", (1, 3), (2, 3)])
@pytest.mark.parametrize("wrong", [*WRONG, *BEYOND])
def test_a_sampler_must_return_a_token(wrong, plan):
    """It could end the process. So that other tokens come first, the sampler fails later."""
    calls = 0

    def sampler(logprobs):
        nonlocal calls
        calls += 1
        if calls < 5:
            return mx.argmax(logprobs, axis=-1)
        return mx.array([wrong]) if wrong in BEYOND else WRONG[wrong](logprobs)

    drafter = None if plan == "off" else small_drafter(hidden=64, vocab=VOCAB)
    with refusal(r"^the sampler must return "):
        stream(sampler=sampler, drafter=drafter, plan=plan)


@pytest.mark.parametrize("plan", ["off", (2, 3)])
@pytest.mark.parametrize("change", [lambda logits: logits[:, :-1], lambda logits: logits[0]])
def test_a_processor_that_changes_the_shape_is_refused(change, plan):
    drafter = None if plan == "off" else small_drafter(hidden=64, vocab=VOCAB)
    processors = [lambda history, logits: change(logits)]
    with refusal(r"^a logits processor must return logits of shape"):
        stream(logits_processors=processors, drafter=drafter, plan=plan)


def test_several_prompts_are_counted_together():
    prompts = [PROMPT, PROMPT[:4]]
    found = decode_prompts(Pair(make_model()), prompts, Options(max_tokens=6))
    assert found.tokens == tuple(
        tuple(ids(run(make_model(), prompt, max_tokens=6))) for prompt in prompts
    )
    assert found.stats.rounds == 10
    assert found.tokens_per_second > 0
    eos = found.tokens[0][2]
    assert (
        decode_prompts(Pair(make_model()), prompts[:1], Options(max_tokens=6), [eos]).tokens[0][-1]
        == eos
    )


# Where a text ends.


def place(last: GenerationResponse) -> str:
    if last.rounds == 0:
        return "first"
    return "accepted" if last.from_draft else "own"


def check_same_text(
    choice: str, beam: str, script: str, script_seed: int, **options
) -> GenerationResponse:
    """Asserts plain decoding's stream and consistent counts of rounds.

    Returns the last response.
    """
    drafter = drafter_of(choice, BEAMS[beam]["beam_width"], script, script_seed)
    plain = stream_plainly(choice, **options)
    if "stop" in options:
        options["stop"] = [options["stop"], "never said"]
    options |= CHOICES[choice]
    drafted = stream(drafter=drafter, **BEAMS[beam], **options)
    for one, other in zip(drafted, plain, strict=True):
        assert one.token == other.token
        assert one.text == other.text
        assert one.finish_reason == other.finish_reason
    for each in (*plain, *drafted):  # also if the text ends inside a round
        assert each.generation_tokens == 1 + each.rounds + each.accepted
    return drafted[-1]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("beam", BEAMS)
def test_a_text_ends_anywhere_in_a_round(beam, choice):
    """At an end token, a stop string, or `max_tokens`."""
    tokens = [each.token for each in stream_plainly(choice)]
    whole = make_tokenizer().decode(tokens)
    places = set()
    for turn, eos in enumerate(sorted(set(tokens))):
        last = check_same_text(choice, beam, "mixed", turn, eos=eos)
        assert last.token == eos
        assert last.finish_reason == "stop"
        assert last.generation_tokens == tokens.index(eos) + 1
        places.add((place(last), "eos"))
    for start in range(COUNT):
        stop = whole[start : start + 1 + start % 2 * 2]
        last = check_same_text(choice, beam, "mixed", start, stop=stop)
        assert last.finish_reason == "stop"
        text = "".join(each.text for each in stream_plainly(choice, stop=stop))
        assert text == whole[: whole.index(stop)]
        places.add((place(last), "stop"))
    for count in (1, 2, 4, 5, 6, 9):
        last = check_same_text(choice, beam, SCRIPTS[count % 3], 0, max_tokens=count)
        assert last.generation_tokens == count
        assert last.finish_reason == "length"
        assert 1 + last.rounds + last.accepted == count
    # A round is cut at an end token, which then counts as its own.
    assert places == set(product(("first", "accepted", "own"), ("eos", "stop"))) - {
        ("accepted", "eos")
    }


# Reported rounds.


class Rounds(list[tuple[list[int], list[int], list[int], list[int]]]):
    """Records (tokens, parents, path, chosen) of each round."""

    def __call__(self, tree: Tree, path: list[int], chosen: list[int]):
        self.append((tree.tokens.tolist(), tree.parents.tolist(), path, chosen))

    def check(self, text: list[int]):
        """Asserts that the rounds spell the text after its first token, along their paths."""
        spelled = text[:1]
        for tokens, parents, path, chosen in self:
            assert path[0] == 0
            assert len(path) == len(chosen)
            assert [parents[node] for node in path[1:]] == path[:-1]
            assert [tokens[node] for node in path] == [spelled[-1], *chosen[:-1]]
            # No child of the last node matches the target's choice, unless the text had to end.
            follow = [tokens[node] for node in range(1, len(tokens)) if parents[node] == path[-1]]
            spelled += chosen
            assert chosen[-1] not in follow or spelled == text
        assert spelled == text


@pytest.mark.parametrize("beam", BEAMS)
@pytest.mark.parametrize("choice", [*CHOICES, "processors"])
def test_reported_rounds_spell_the_text(choice, beam):
    options = CHOICES.get(
        choice, {"logits_processors": make_logits_processors(repetition_penalty=1.3)}
    )
    plain, drafter = with_plain(
        make_model(), PROMPT, 24, "mixed", width=BEAMS[beam]["beam_width"], script_seed=1, **options
    )
    rounds = Rounds()
    steps = run(
        make_model(), PROMPT, drafter, max_tokens=24, on_round=rounds, **BEAMS[beam], **options
    )
    assert ids(steps) == ids(plain)
    rounds.check(ids(steps))
    last = steps[-1].stats
    assert len(rounds) == last.rounds
    assert sum(len(path) - 1 for _, _, path, _ in rounds) == last.accepted > 3
    assert sum(len(tokens) - 1 for tokens, _, _, _ in rounds) == last.drafted
    from_draft = [at < len(chosen) - 1 for *_, chosen in rounds for at in range(len(chosen))]
    assert [step.from_draft for step in steps[1:]] == from_draft


@pytest.mark.parametrize("where", ["on_round", "sampler"])
def test_callback_errors_propagate(where):
    with pytest.raises(KeyError, match="enough"):
        drafter = small_drafter(hidden=64, vocab=VOCAB)
        failing = {where: Mock(side_effect=KeyError("enough"))}
        run(make_model(), PROMPT, drafter, plan=(1, 2), **failing)
