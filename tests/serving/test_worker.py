"""The worker: texts of single and concurrent requests, mode changes between them, and recovery
after errors.
"""

import asyncio
from collections.abc import Callable

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors

from helpers.cached import make_cached
from helpers.families import make_family
from helpers.grammars import ToyGrammar, mask_history
from helpers.grids import pairs
from helpers.sessions import make_drafter
from helpers.toys import VOCAB, fail_at, ids, make_model, make_prompt, run, with_plain
from helpers.workers import (
    FAMILIES,
    SHARING,
    TURNS,
    Asked,
    ask,
    assert_plain,
    collect,
    count,
    count_switches,
    count_tokens,
    finish,
    generate,
    make_named,
    plain,
    running,
    tokens_of,
)
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.drafters.draft_model import DraftModel
from mlx_redrafter.serving.api_errors import ApiError, GenerationFailed
from mlx_redrafter.serving.scheduling import batches, scheduler
from mlx_redrafter.serving.scheduling.request import Request, TokenEvent
from mlx_redrafter.serving.scheduling.structured_output import GrammarCompiler
from mlx_redrafter.serving.scheduling.worker import Worker
from mlx_redrafter.target.model_parts import get_context_length

SAMPLED = {
    "temp": 0.9,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.01,
    "seed": 7,
}
PENALTIES = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.5,
    "logit_bias": {3: 2.0, 5: -50.0},
}
PROMPTS = [make_prompt(length) for length in (9, 14, 5, 30, 1)]


async def wait_until(condition: Callable[[], bool]):
    while not condition():
        await asyncio.sleep(0.002)


greedy_and_sampled = pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
alone_and_together = pytest.mark.parametrize("together", [1, 3])


@greedy_and_sampled
def test_a_single_request_matches_the_command_line(sampling):
    prompt = PROMPTS[0]
    length = 60
    _, drafter = with_plain(make_model(), prompt, length, "mixed", width=3, **sampling)
    own = {"beam_width": 3, "draft_depth": 3, "context": True}
    request = ask(prompt, length, top_logprobs=0, **sampling)
    with running(drafter=drafter, options=own) as worker:
        (events,) = generate(worker, request)
        steps = run(make_model(), prompt, drafter, max_tokens=length, **sampling, **own)
        assert tokens_of(events) == ids(steps)
        assert [event.draft_source for event in events] == [step.draft_source for step in steps]
        for event, step in zip(events, steps, strict=True):
            assert event.logprob == pytest.approx(step.logprobs[event.token].item(), abs=1e-5)
        accepted = count_tokens(worker, "accepted")
        expected = steps[-1].stats
        assert count_tokens(worker, "generated") == length
        assert accepted > 0
        assert (
            accepted - count_tokens(worker, "context_accepted")
            == expected.accepted - expected.context_accepted
        )
        assert count_tokens(worker, "read") == len(prompt)
        assert count(worker, "generations", end="length") == 1


@pytest.mark.parametrize("name", ["llama", "mamba2", "gemma3_text", "qwen3_next", "mamba"])
def test_batched_requests_match_plain_decoding(name):
    model = make_named(name)
    requests = [ask(prompt, 12 + 3 * i) for i, prompt in enumerate(PROMPTS)]
    with running(model) as worker:
        for events in assert_plain(worker, model, *requests):
            *before, end = [event.finish_reason for event in events]
            assert end == "length"
            assert not any(before)
        assert count(worker, "batch_steps") > 0
        assert count_tokens(worker, "read") == sum(map(len, PROMPTS))


def test_each_request_has_its_own_seed():
    requests = [ask(PROMPTS[1], **(SAMPLED | {"seed": seed})) for seed in (1, 2, 1)]
    requests += [ask(PROMPTS[1]), ask(PROMPTS[1], temp=1.3, seed=5, xtc_probability=0.4)]
    with running() as worker:
        together = [tokens_of(events) for events in generate(worker, *requests)]
        alone = [tokens_of(generate(worker, request)[0]) for request in requests]
    assert together == alone
    assert together[0] == together[2] != together[1]


async def decode_around_a_batch(
    worker: Worker, long: Asked, short: Asked, length: int
) -> tuple[list[TokenEvent], Request]:
    """Runs `long`; after `length` tokens `short` joins and ends.

    Returns (events of `long`, its request).
    """
    first = worker.submit(**long)
    stream = first.read_events()
    head = [await anext(stream) for _ in range(length)]
    await collect(worker.submit(**short))
    return head + [event async for event in stream], first


@pytest.mark.parametrize(
    ("name", "kind", "sampling"),
    [
        ("llama", "context", SAMPLED),
        ("mamba2", "context", {}),
        ("gemma3_text", "context", SAMPLED),
        ("llama", "draft model", {}),
        ("mamba2", "draft model", {}),
        ("llama", "eagle 3", {}),
        ("llama", "dspark", {}),
    ],
)
def test_a_request_continues_after_a_batch(name, kind, sampling):
    """A draft model reads the batch's tokens; in the cache of a head their positions are a gap."""
    model = make_named(name)
    drafter = None
    options = {"plan": (1, 3)}
    if kind == "context":
        options = {"context": True}
    else:
        drafter = DraftModel(model) if kind == "draft model" else make_cached(kind)
    long = ask(PROMPTS[0], 150, **sampling)
    short = ask(PROMPTS[1], 20, **sampling)
    with running(model, drafter, options=options) as worker:
        events, first = finish(decode_around_a_batch(worker, long, short, 10))
        assert tokens_of(events) == plain(long, model)
        assert count_switches(worker) == {"batch": 1, "single": 1}
        assert worker.scheduler.mode == "idle"
        assert count_tokens(worker, "read") == len(long["prompt"]) + len(short["prompt"])
        assert count_tokens(worker, "generated") == 150 + 20
        made = first.output.stats
        assert made.drafter_rounds > 10 or kind == "context"
        if kind == "draft model":  # the target itself, so it is right before and after
            assert made.accepted > 60
            assert made.accepted > 2 * made.drafter_rounds


def test_a_drafter_that_failed_is_not_used_after_a_batch():
    """The context continues drafting."""
    drafter = fail_at(make_drafter(model := make_model()), 20)
    long = ask(PROMPTS[0], 150)
    short = ask(PROMPTS[1], 20)
    with running(model, drafter, options={"plan": (1, 3), "context": True}) as worker:
        events, _ = finish(decode_around_a_batch(worker, long, short, 40))
        assert tokens_of(events) == plain(long, model)
        assert count_switches(worker) == {"batch": 1, "single": 1}
        assert count(worker, "drafter_failures") == 1
        assert "context" in {event.draft_source for event in events[-30:]}


@pytest.fixture(autouse=True)
def batches_of_two(monkeypatch):
    """Two requests are already more than a joint round takes."""
    monkeypatch.setattr(scheduler, "MAX_JOINT", 1)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
@greedy_and_sampled
def test_joint_rounds_and_batches_give_the_same_texts(name, sampling, monkeypatch):
    """However often requests change modes, with the drafter and the context."""
    monkeypatch.setattr(scheduler, "MAX_JOINT", 2)
    monkeypatch.setattr(scheduler, "STEPS_BEFORE_LEAVING", 3)
    model = make_named(name)
    requests = [ask(PROMPTS[at], 20 + 17 * at, **sampling) for at in range(4)]
    options = {"draft_depth": 2, "context": True}
    with running(model, make_drafter(model), options=options) as worker:
        assert_plain(worker, model, *requests)
        assert count_switches(worker)["joint"] > 0 < count(worker, "batch_steps")
        assert count(worker, "round_requests") > count(worker, "rounds") > 0


@pytest.mark.parametrize(("kind", "options"), TURNS.values(), ids=TURNS)
def test_caches_that_cannot_be_batched_alternate(kind, options):
    model = make_model(kind)
    requests = [ask(PROMPTS[at], 40, **sampling) for at, sampling in enumerate([{}, SAMPLED, {}])]
    with running(model, options=options) as worker:
        assert_plain(worker, model, *requests, **options)
        assert count(worker, "batch_steps") == 0
        assert count(worker, "rounds") >= 3


@alone_and_together
def test_end_token_is_the_last_one(together):
    requests = [ask(prompt, 40) for prompt in PROMPTS[:together]]
    texts = [plain(request) for request in requests]
    end = texts[0][5]
    with running(eos=(end,)) as worker:
        for text, events in zip(texts, generate(worker, *requests), strict=True):
            if end in text:
                assert tokens_of(events) == text[: text.index(end) + 1]
                assert events[-1].finish_reason == "stop"
            else:
                assert tokens_of(events) == text
                assert events[-1].finish_reason == "length"


@alone_and_together
def test_penalties_and_biases_apply_per_request(together):
    requests = [ask(prompt, **PENALTIES, **SAMPLED) for prompt in PROMPTS[:together]]
    processors = make_logits_processors(**PENALTIES)
    with running(options={"context": True}) as worker:
        for events in assert_plain(worker, None, *requests, logits_processors=processors):
            assert 5 not in tokens_of(events)


def follow_grammar(request: Asked, model=None, vocab: int = VOCAB) -> list[int]:
    """Plain decoding's tokens with the grammar."""
    return plain(request, model, logits_processors=[mask_history(len(request["prompt"]), vocab)])


@greedy_and_sampled
@alone_and_together
def test_a_grammar_is_followed_with_and_without_drafts(together, sampling):
    requests = [ask(prompt, grammar=ToyGrammar, **sampling) for prompt in PROMPTS[:together]]
    texts = [follow_grammar(request) for request in requests]
    with running(options={"context": True}) as worker:
        assert [tokens_of(events) for events in generate(worker, *requests)] == texts
        assert (count_tokens(worker, "context_accepted") > 0) is (together == 1)
        undrafted = [request | {"draft": False} for request in requests]
        drafted = count_tokens(worker, "drafted")
        assert [tokens_of(events) for events in generate(worker, *undrafted)] == texts
        assert count_tokens(worker, "drafted") == drafted


@greedy_and_sampled
@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_a_grammar_continues_across_a_batch(name, sampling):
    model = make_named(name)
    vocab = model(mx.array([[0]])).shape[-1]
    long = ask(PROMPTS[0], 150, grammar=lambda: ToyGrammar(vocab), **sampling)
    short = ask(PROMPTS[1], 20, grammar=lambda: ToyGrammar(vocab), **sampling)
    texts = [follow_grammar(request, model, vocab) for request in (long, short)]
    for head in (1, 8, 13):
        with running(model, options={"context": True, "draft_depth": 3}) as worker:
            events, first = finish(decode_around_a_batch(worker, long, short, head))
            assert tokens_of(events) == texts[0]
            assert count_switches(worker) == {"batch": 1, "single": 1}
            assert first.output.stats.context_accepted > 30


@greedy_and_sampled
def test_a_schema_on_the_demo_matches_plain_decoding(demo_models, sampling):
    """Drafted, plainly, and before and after a batch."""
    model, tokenizer, drafter = demo_models
    item = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "amount": {"type": "integer"}},
    }
    schema = {"type": "array", "items": item | {"required": ["name", "amount"]}, "minItems": 9}
    # What `auto` drafts depends on times.
    worker = Worker(model, tokenizer, drafter, options=Options(draft_depth=3))
    worker.start()
    grammar = GrammarCompiler(tokenizer, worker.vocab_size).compile(schema)
    long = ask(tokenizer.encode("items = "), 80, grammar=grammar, **sampling)
    ((drafted,), (plainly,)) = (generate(worker, each) for each in (long, long | {"draft": False}))
    assert tokens_of(drafted) == tokens_of(plainly)
    assert count_tokens(worker, "context_accepted") > 0
    short = ask(tokenizer.encode("# and"), 12, grammar=grammar)
    moved, _ = finish(decode_around_a_batch(worker, long, short, 10))
    assert tokens_of(moved) == tokens_of(plainly)
    assert count_switches(worker)["single"] == 1
    worker.close(20)


def test_a_grammar_ends_with_the_answer():
    """At an end token within a round, at `max_tokens`, and when cancelled."""
    request = ask(PROMPTS[0], 60, grammar=ToyGrammar)
    text = follow_grammar(request)
    for end in sorted(set(text))[:6]:
        with running(eos=(end,), options={"context": None}) as worker:
            (events,) = generate(worker, request)
            assert tokens_of(events) == text[: text.index(end) + 1]
            assert events[-1].finish_reason == "stop"
    with running(options={"context": None}) as worker:
        for size in range(1, 12):
            assert tokens_of(generate(worker, request | {"max_tokens": size})[0]) == text[:size]

        async def cancel():
            generation = worker.submit(**request)
            async for _ in generation.read_events():
                generation.cancel()

        finish(cancel())
        assert tokens_of(generate(worker, request)[0]) == text


@alone_and_together
def test_failing_grammar_fails_its_request_only(together):
    bad = ask(PROMPTS[0], 60, grammar=lambda: ToyGrammar(stuck_at=7))
    good = [ask(prompt, grammar=ToyGrammar) for prompt in PROMPTS[1:together]]

    async def main(worker):
        failing = worker.submit(**bad)
        answers = [collect(worker.submit(**request)) for request in good]
        return failing, await asyncio.gather(collect(failing), *answers, return_exceptions=True)

    with running(options={"context": None}) as worker:
        failing, (error, *answers) = finish(main(worker))
        assert isinstance(error, GenerationFailed)
        assert "nothing may follow" in str(error)
        assert len(failing.output.tokens) == 7
        assert [tokens_of(events) for events in answers] == [
            follow_grammar(request) for request in good
        ]
        assert_plain(worker, None, ask(PROMPTS[0]))
        assert count(worker, "generations", end="failed") == 1


def test_an_error_while_sending_ends_its_request_only(monkeypatch):
    monkeypatch.setattr(scheduler, "MAX_JOINT", 8)
    requests = [ask(prompt) for prompt in PROMPTS[:3]]
    send = Request.send_tokens

    def fail(request, made):
        if request.prompt == PROMPTS[1] and len(request.output.tokens) > 5:
            raise RuntimeError("cannot send")
        send(request, made)

    monkeypatch.setattr(Request, "send_tokens", fail)

    async def main(worker):
        answers = [collect(worker.submit(**request)) for request in requests]
        return await asyncio.gather(*answers, return_exceptions=True)

    with running() as worker:
        first, error, third = finish(main(worker))
        assert isinstance(error, GenerationFailed)
        assert [tokens_of(first), tokens_of(third)] == [plain(requests[0]), plain(requests[2])]


def test_the_worker_survives_an_error(monkeypatch):
    step = batches.Batch.step
    fails = iter([False] * 5 + [True])

    def fail_once(batch):
        if next(fails, False):
            raise RuntimeError("[malloc] out of memory")
        return step(batch)

    monkeypatch.setattr(batches.Batch, "step", fail_once)

    async def main(worker):
        answers = [collect(worker.submit(**ask(prompt, 40))) for prompt in PROMPTS]
        return await asyncio.gather(*answers, return_exceptions=True)

    with running() as worker:
        errors = finish(main(worker))
        assert all(
            isinstance(error, GenerationFailed) and "out of memory" in str(error)
            for error in errors
        )
        assert_plain(worker, None, *map(ask, PROMPTS))
        assert worker.is_alive
        assert len(worker.scheduler.running) == 0


def test_requests_can_be_cancelled_at_any_stage():
    async def main(worker):
        first = worker.submit(**ask(PROMPTS[0], -1))
        stream = first.read_events()
        await anext(stream)
        waiting = worker.submit(**ask(PROMPTS[1], -1))
        second = waiting.read_events()
        await anext(second)  # both are in the batch now
        third = worker.submit(**ask(make_prompt(400), -1))
        fourth = worker.submit(**ask(PROMPTS[2], 10))
        third.cancel()  # queued or during prefill
        fourth_events = asyncio.create_task(collect(fourth))
        waiting.cancel()
        assert [event async for event in third.read_events()] == []
        assert all(event.finish_reason is None for event in [event async for event in second])
        assert tokens_of(await fourth_events) == plain(ask(PROMPTS[2], 10))
        first.cancel()  # alone or in the batch
        assert len([event async for event in stream]) + 1 == len(first.output.tokens)
        await wait_until(lambda: worker.scheduler.mode == "idle")

    with running(decode_concurrency=2, options={"prefill_step_size": 16}) as worker:
        finish(main(worker))
        assert [
            count(worker, "generations", end=end) for end in ("cancelled", "length", "failed")
        ] == [3, 1, 0]
        # Cached tokens are not prefilled again.
        assert_plain(worker, None, ask(PROMPTS[0], 5))
        assert count_tokens(worker, "cached") == len(PROMPTS[0]) - 1


@pytest.mark.parametrize(("kind", "options"), SHARING.values(), ids=SHARING)
def test_a_prompt_with_several_choices_is_prefilled_once(kind, options):
    model = make_named(kind)
    prompt = make_prompt(200)
    options = options | {"prefill_step_size": 32}
    requests = [ask(prompt, 12, **(SAMPLED | {"seed": seed})) for seed in range(4)]
    with running(model, options=options) as worker:
        assert_plain(worker, model, *requests, **options)
        assert count_tokens(worker, "read") == 200 + 3
        assert count_tokens(worker, "cached") == 3 * 199


@pytest.mark.parametrize("kind", ["quantized", "llama", *FAMILIES])
def test_a_prompt_is_cached_before_its_answer_ends(kind):
    name, options = SHARING[kind]
    model = make_named(name)
    begin = make_prompt(60)
    second = ask([*begin, 5, 6], 8)

    async def main(worker):
        first = worker.submit(**ask([*begin, 9], -1))
        stream = first.read_events()
        await anext(stream)
        following = worker.submit(**second)
        assert tokens_of(await collect(following)) == plain(second, model, **options)
        first.cancel()
        return following

    with running(model, options=options) as worker:
        assert finish(main(worker)).cached_tokens == 60


@pytest.mark.parametrize(
    ("name", "sampling", "together"), pairs(FAMILIES, [{}, SAMPLED], [1, 2]), ids=str
)
def test_states_are_copied_at_shared_prefixes(name, sampling, together):
    model = make_family(name)
    text = make_prompt(150)
    first = ask([*text, 7], 8, piece_ends=(150, 60), **sampling)
    others = [ask(PROMPTS[0], 8)] * (together - 1)
    later = [ask([*text[:shared], 9, 8, 9], 8, **sampling) for shared in (149, 150, 60, 59)]
    with running(model, options={"prefill_step_size": 32}) as worker:
        answers = generate(worker, first, *others)
        assert tokens_of(answers[0]) == plain(first, model)
        found = []
        for request in later:
            before = count_tokens(worker, "cached")
            assert_plain(worker, model, request)
            found.append(count_tokens(worker, "cached") - before)
    assert found == [60, 150, 60, 0]


def test_requests_wait_for_their_longest_shared_prefix():
    model = make_family("mamba2")
    text = make_prompt(400)
    first = ask(text, 4, piece_ends=(100, 200, 399))
    second, third = (ask([*text[:shared], 9, 8, 9], 4) for shared in (210, 120))
    with running(model, options={"prefill_step_size": 16}) as worker:
        assert_plain(worker, model, first, second, third)
        assert count_tokens(worker, "cached") == 200 + 100


@pytest.mark.parametrize(
    ("kind", "options"), [SHARING["llama"], SHARING["quantized"]], ids=["batch", "turns"]
)
def test_requests_wait_only_for_shared_prefixes(kind, options):
    options = options | {"prefill_step_size": 16}
    begin = make_prompt(300)
    order = []
    requests = [
        ask([*begin, *make_prompt(1200)[::-1]], 4),
        ask([*begin, 1, 2, 3], 4),
        ask(PROMPTS[0], 4),
    ]

    async def follow(worker, at):
        events = await collect(worker.submit(**requests[at]))
        order.append(at)
        return events

    async def main(worker):
        return await asyncio.gather(*[follow(worker, at) for at in range(3)])

    with running(options=options) as worker:
        answers = finish(main(worker))
        assert [tokens_of(events) for events in answers] == [
            plain(each, **options) for each in requests
        ]
        assert order == [2, 1, 0]
        assert count_tokens(worker, "cached") == 300


@pytest.mark.parametrize("most", [1, 2], ids=["turns", "joint"])
@pytest.mark.parametrize("options", [{}, {"exact": True}], ids=["", "exact"])
def test_an_answer_continues_while_a_prompt_is_read(options, most, monkeypatch):
    """A piece of the prompt after each round: `PROMPT_ROWS` tokens, with `exact` whole pieces."""
    monkeypatch.setattr(scheduler, "MAX_JOINT", most)
    options = options | {"prefill_step_size": 128}
    monkeypatch.setitem(scheduler.PROMPT_ROWS, "joint" if most > 1 else "turns", 60)
    running_one = ask(PROMPTS[0], 60)
    long = ask(make_prompt(600), 3)
    n_made = []

    async def follow(worker, running_events):
        events = []
        async for event in worker.submit(**long).read_events():
            n_made.append(len(running_events))
            events.append(event)
        return events

    async def main(worker):
        events = []
        tasks = []
        async for event in worker.submit(**running_one).read_events():
            events.append(event)
            if len(events) == 5:
                tasks.append(asyncio.create_task(follow(worker, events)))
        return [events, await tasks[0]]

    with running(options=options) as worker:
        answers = finish(main(worker))
        assert [tokens_of(events) for events in answers] == [
            plain(each, **options) for each in (running_one, long)
        ]
    pieces = 600 // (128 if "exact" in options else 60)
    assert pieces <= n_made[0] - 5 <= pieces + 4


def test_dynamic_rope_gives_the_same_text_beside_another_request():
    """Its positions depend on how many tokens a forward has, so pieces are not shortened."""
    model = make_model("llama-dynamic")
    long = ask(make_prompt(200), 10)
    with running(model, prompt_cache_bytes=0) as worker:
        beside, _ = generate(worker, long, ask(make_prompt(30), 10))
    assert tokens_of(beside) == plain(long, model)


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "failed"])
@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_others_continue_if_the_prefilling_request_ends(name, is_cancelled, monkeypatch):
    model = make_named(name)
    step = batches.Loops.step
    asked = ask(make_prompt(600), 4)
    first = []

    def end_first(loops, requests):
        made = step(loops, requests)
        if requests == first and first[0].n_prefilled >= 80:
            if not is_cancelled:
                return [RuntimeError("broken")]
            first[0].cancel()
        return made

    monkeypatch.setattr(batches.Loops, "step", end_first)

    async def main(worker):
        generations = [worker.submit(**asked) for _ in range(3)]
        first.append(generations[0])
        return await asyncio.gather(*map(collect, generations), return_exceptions=True)

    with running(model, options={"prefill_step_size": 16}) as worker:
        ended, *answers = finish(main(worker))
        assert ended == [] if is_cancelled else isinstance(ended, GenerationFailed)
        assert [tokens_of(events) for events in answers] == [plain(asked, model)] * 2
        read_twice = 1 if is_cancelled else 81
        assert 600 + 1 <= count_tokens(worker, "read") <= 600 + read_twice + 16


def test_without_a_prompt_cache_everything_is_prefilled():
    with running(prompt_cache_bytes=0) as worker:
        for _ in range(2):
            generate(worker, ask(PROMPTS[0], 3))
        assert count_tokens(worker, "read") == 2 * len(PROMPTS[0])
        assert count_tokens(worker, "cached") == 0
        generate(worker, *[ask(make_prompt(100), 3)] * 2)  # neither waits for the other
        assert count_tokens(worker, "cached") == 0


@pytest.mark.parametrize(
    ("kind", "length"),
    [("llama", 512), ("llama-linear", 1024), ("llama-dynamic", 32), ("llama-yarn", 512)],
)
def test_the_context_length_comes_from_the_config(kind, length):
    assert get_context_length(make_model(kind)) == length
    assert get_context_length(make_family("mamba2")) is None


def test_the_context_length_limits_prompt_and_answer():
    model = make_model()
    with running(model, context_length=None) as worker:
        assert worker.context_length == 512
    with running(make_model("qwen2"), context_length=None, options={"max_kv_size": 16}) as worker:
        assert worker.context_length is None
    with running(model, context_length=20) as worker:
        for max_tokens, made in ((-1, 11), (30, 11), (11, 11), (4, 4)):
            (events,) = generate(worker, ask(PROMPTS[0], max_tokens))
            assert tokens_of(events) == plain(ask(PROMPTS[0], made))
            assert events[-1].finish_reason == "length"
        assert len(generate(worker, ask(make_prompt(19)))[0]) == 1
        for size in (20, 30):
            said = rf"prompt is too long: {size} tokens > 20 maximum.* context length is 20 tokens"
            with pytest.raises(ApiError, match=said):
                generate(worker, ask(make_prompt(size)))


def test_closing_finishes_running_requests():
    async def main(worker):
        runs = worker.submit(**ask(PROMPTS[0], 200))
        await wait_until(lambda: len(worker.scheduler.running) == 1)
        waits = worker.submit(**ask(PROMPTS[1]))
        closing = asyncio.create_task(asyncio.to_thread(worker.close, 60))
        with pytest.raises(GenerationFailed, match="shutting down"):
            await collect(waits)
        with pytest.raises(GenerationFailed, match="shutting down"):
            worker.submit(**ask(PROMPTS[1]))
        assert tokens_of(await collect(runs)) == plain(ask(PROMPTS[0], 200))
        await closing
        assert not worker.is_alive

    with running(decode_concurrency=1) as worker:
        finish(main(worker))


def list_bits(events: list[TokenEvent]) -> list[tuple[int, float | None]]:
    return [(event.token, event.logprob) for event in events]


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafted"])
def test_exact_answers_do_not_depend_on_caches_and_load(drafts):
    """Prompts are read in whole pieces from the start, and only such pieces are kept."""
    exact = {"exact": True, "prefill_step_size": 8}
    first = ask(make_prompt(8) * 5, 60, top_logprobs=0)
    with running(options=exact | {"plan": "off"}, prompt_cache_bytes=0) as worker:
        (events,) = generate(worker, first)
        turn = [*first["prompt"], *tokens_of(events), *make_prompt(5)]
        requests = [first, *(ask([*turn, n], 60, top_logprobs=0) for n in range(3))]
        expected = [list_bits(generate(worker, request)[0]) for request in requests]
    with running(options=exact | {"context": drafts}) as worker:
        for request, bits in zip(requests, expected, strict=True):
            assert list_bits(generate(worker, request)[0]) == bits
        assert count_tokens(worker, "cached") == 32 + 104 + 104
        together = generate(worker, *reversed(requests))
        assert [list_bits(events) for events in reversed(together)] == expected
        assert (count_tokens(worker, "context_accepted") > 0) is drafts
