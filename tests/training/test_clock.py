"""A run whose time ends in any of its phases leaves a drafter, or says in one line what to do."""

from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlx_lm.utils import load

from helpers.small import CHAT, make_byte_tokenizer, save_target, small_llama
from mlx_redrafter import load_drafter, training
from mlx_redrafter.cli.train import parse_args
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.training import prompts, run, schedule
from mlx_redrafter.training.prompts import PROMPT_KINDS
from mlx_redrafter.training.settings import TrainingArgs

MINUTES = "expected --minutes .* or more for 3 texts here"
UNFINISHED = "of 3 texts were made in time: give the same command more --minutes"

PHASES = [
    ("run.load_target", 1, MINUTES),
    ("run.measure_making", 1, MINUTES),
    ("run.choose_sizes", 1, MINUTES),
    ("run.measure_learning", 1, MINUTES),
    ("run.measure_decoding", 1, MINUTES),
    ("example_makers.measure_batch_size", 1, UNFINISHED),
    *(("answers.run_forward", step, UNFINISHED) for step in (1, 6, 8, 9, 11, 14)),
    ("example_makers.encode_prompts", 1, UNFINISHED),
    ("example_store.ExampleStore.add", 1, None),
    ("example_store.ExampleStore.add", 3, None),
    ("example_store.ExampleStore.add", 6, None),
    ("run.make_learner", 1, None),
    ("trainer.make_targets", 5, None),
    ("run.measure_guesses", 1, None),
    ("run.save_drafter", 1, None),
    ("run.fit_drafter", 1, None),
    ("run.load_target", 2, None),
    ("evaluation.decode_prompts", 1, None),
    ("run.compare_speed", 1, None),
    ("run.write_card", 1, None),
]
"""(function, after which of its calls the time ends, the error; None for a drafter)."""


@pytest.fixture(scope="module")
def chatty(tmp_path_factory) -> str:
    """A target that writes its own prompts."""
    place = tmp_path_factory.mktemp("chatty")
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = CHAT
    model = small_llama(vocab=len(tokenizer), layers=1)
    ends = list(range(0, len(tokenizer), 8))  # most prompts end, so that few have to be written
    save_target(place, model, tokenizer, eos_token_id=ends)
    return str(place)


@pytest.fixture
def pass_time(train, monkeypatch):
    """Lets seconds pass after a call; else a run takes nearly none.

    (function, after which of its calls, seconds) -> the calls so far.
    """
    seconds = [0.0]

    def perf_counter():
        seconds[0] += 1e-5
        return sum(seconds)

    def pass_time(place, count, passed):
        calls = []
        real = attrgetter(place)(training)

        def call(*args, **options):
            result = real(*args, **options)
            calls.append(place)
            if len(calls) == count:
                seconds.append(passed)
            return result

        monkeypatch.setattr(f"mlx_redrafter.training.{place}", call)
        return calls

    for module in (run, schedule):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=perf_counter))
    monkeypatch.setattr(prompts, "is_good", lambda text: True)  # a random target writes noise
    monkeypatch.setattr(prompts, "QUESTION_TOKENS", 4)
    for kind in PROMPT_KINDS.values():
        monkeypatch.setitem(kind, "most", 4)
        monkeypatch.setitem(kind, "least", 1)
    return pass_time


def make_args(model: str, output: Path) -> TrainingArgs:
    words = f"--model {model} --batch-size 2 --max-tokens 8 --draft-depth 3 --exit-dim 16"
    return parse_args([*words.split(), "--output", str(output)])[0]


@pytest.mark.parametrize(("place", "count", "reason"), PHASES)
def test_the_time_may_end_in_any_phase(place, count, reason, chatty, tmp_path, pass_time):
    args = make_args(chatty, tmp_path / "drafter")
    calls = pass_time(place, count, 1e9)
    if reason is None:
        assert run.run_training(args) == 0
        drafter = load_drafter(args.output, load(chatty)[0])
        assert drafter.args.acceptance is not None
    else:
        with pytest.raises(RedrafterError, match=reason) as error:
            run.run_training(args)
        assert "\n" not in str(error.value)
        assert run.run_training(args) == 0, "the same command runs where the time does"
    assert len(calls) >= count


def test_slow_prompts_leave_time_for_answers(chatty, tmp_path, pass_time):
    """Half an hour of one passes while the first prompts are written."""
    calls = pass_time("answers.run_forward", 12, 1800.0)
    assert run.run_training(make_args(chatty, tmp_path / "drafter")) == 0
    assert len(calls) > 12
