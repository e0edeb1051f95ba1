"""Training on past answers: what is held back, what is learned, and whether the new drafter may replace the old one."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from tqdm import tqdm

from ..answer_folder import find_folder, number_request, read_texts
from ..checkpoints import dtype_name, is_quantized, load_drafter, load_target
from ..drafters import TRAINABLE
from ..drafters.trainable import TrainableArgs, TrainableDrafter
from ..engine.model_checks import check_draftable
from ..errors import RedrafterError
from ..planning.sizing import n_weights, plain_milliseconds
from .data import AT_ONCE, Text, cut_texts, generate_answers, join_text, make_batches
from .estimate import check_disk, disk_bytes, estimate_run, time_iteration
from .evaluation import count_tokens_per_round
from .hidden_states import add_hidden_states
from .run import Files, Record, Run, Say, choose_sizes, describe, finish, make_new_drafter, open_record, validate
from .settings import TrainingArgs
from .targets import Teacher
from .trainer import train_drafter

REFUSED = 3
"""The exit status where the new drafter is not good enough, or nothing can tell whether it is."""

HELD_BACK = 10
"""One request in this many is held back."""

BETTER, WORSE = 1.01, 0.98
"""The least tokens per round of the new drafter over those before, on recent answers and on older ones."""

ENOUGH = 128
"""Answers to learn from: where fewer are kept, the target writes more."""

GO_ON_RATE = 0.1
"""The learning rate of a drafter that has learned already, over that of a new one."""

AVERAGED, GO_ON_AVERAGED = 0.25, 0.5
"""Over how large a part of the iterations the weights of a new drafter, and of one that has learned already, are
averaged, exponentially."""


def train_from_answers(args: TrainingArgs, *, dry_run: bool = False, say: Say = lambda text: None) -> int:
    """Trains a drafter on past answers, and writes it if it is better on those that were held back.

    Args:
        args: `answers` is their folder, `drafter` the drafter to go on from, `minutes` the limit of time.
        dry_run, say: see `train`.

    Returns:
        The exit status: 0, 1 if a token differs from plain decoding, or `REFUSED`, where nothing was written.

    Raises:
        RedrafterError: with the reason; nothing was written.
        OSError: a file cannot be written.
    """
    end = time.perf_counter() + (math.inf if args.minutes is None else 60 * args.minutes)
    args.check_run()
    assert args.answers is not None
    folder = find_folder(args.answers)
    files = Files(args.output)
    record = open_record(args, files, resume=False)
    model, tokenizer = load_target(args, args.model)
    check_draftable(model, tree=False)
    start = None if args.drafter is None else load_start(args.drafter, model)
    if start is not None:
        depth = min(args.draft_depth, start.args.max_depth or args.draft_depth)
        dtype, rate = args.dtype or dtype_name(start.dtype), GO_ON_RATE * args.learning_rate
        args = replace(args, draft_depth=depth, dtype=dtype, learning_rate=rate)
        start.set_dtype(mx.float32)
        start.share(model)
    texts = read_texts(folder, tokenizer)
    held_back, training = (
        cut_texts(args, [shorten(text, args.max_seq_length) for text in texts if is_held_back(text) is held], name, say)
        for held, name in ((True, "held-back"), (False, "kept"))
    )
    if len(held_back) < 2 or not training:
        say(
            f"not written: expected 2 answers that are held back and one to learn, got {len(held_back)} and "
            f"{len(training)}: every {HELD_BACK}th request is held back"
        )
        return REFUSED
    held_back, teacher = add_hidden_states(model, held_back), Teacher(model, reads=False)
    parts = held_back[len(held_back) // 2 :], held_back[: len(held_back) // 2]

    def count_tokens(drafter: TrainableDrafter | None) -> list[float]:
        """Tokens per round on the recent half of what was held back, and on the older one."""
        return [count_tokens_per_round(teacher, drafter, part, args, context=start is None) for part in parts]

    started = time.perf_counter()
    before = count_tokens(start)
    if args.minutes is not None:  # the same again, a validation and a comparison come after training
        decoding = min(args.val_prompts, len(held_back)) * args.val_tokens * plain_milliseconds(model) / 1e3
        end -= 2 * (time.perf_counter() - started) + (args.draft_depth + 3) * decoding
    sizes = start.args if start is not None else choose_sizes(args, model, say)
    missing = max(0, ENOUGH - len(training))
    say(f"drafter: {describe(sizes)}, {n_weights(sizes) / 1e6:.2f} M parameters")
    lengths = [len(text.ids) for text in training]
    counts = {"val_texts": len(held_back), "answers": missing, "unread": len(lengths)}
    say(estimate_run(model, sizes, args, lengths, args.iters, **counts))
    check_disk(files.place, disk_bytes(sizes, args))
    if args.minutes is not None:
        say(f"--minutes {args.minutes:g} may end it sooner")
    if dry_run:
        return 0
    if missing:
        third = time.perf_counter() + (end - time.perf_counter()) / 3
        written = write_answers(model, tokenizer, training, missing, args, third)
        training = [*cut_texts(args, written, "new", say), *training]
    training = add_hidden_states(model, training, top_k=args.teacher_top_k)
    if args.minutes is not None:
        iteration = time_iteration(model, sizes, args, round(sum(len(text.ids) for text in training) / len(training)))
        fitting = min(args.iters, int((end - time.perf_counter()) / iteration))
        if fitting < 1:
            raise RedrafterError(
                f"expected more --minutes: nothing is left of {args.minutes:g} to train in, as what comes before and "
                "after takes them; a smaller --val-prompts or --val-tokens takes less"
            )
        if fitting < args.iters:
            say(f"{fitting} iterations fit into {args.minutes:g} minutes")
        args = replace(args, iters=fitting)
    drafter = start if start is not None else make_new_drafter(args, model, sizes, training, say)
    record.settings, record.args = args.to_json(), sizes.to_dict()
    del model
    mx.clear_cache()
    done = fit_average(teacher, drafter, training, args, record, end)
    after = count_tokens(drafter)
    least = [BETTER * before[0], *(WORSE * tokens for tokens in before[1:])]
    numbers = "; ".join(
        f"{new:.3f} tokens per round on {len(part)} {name} held-back answers, {old:.3f} before, {wanted:.3f} needed"
        for name, part, new, old, wanted in zip(("recent", "older"), parts, after, before, least, strict=False)
    )
    if not all(new >= wanted for new, wanted in zip(after, least, strict=True)):
        say(f"not written: the new drafter makes {numbers}")
        return REFUSED
    say(f"the new drafter makes {numbers}")
    run = Run(args, files, record, say, teacher, set(tokenizer.eos_token_ids), drafter, training, held_back)
    record.validations.append(validate(run, done))
    return 0 if finish(run) else 1


def fit_average(
    teacher: Teacher, drafter: TrainableDrafter, texts: Sequence[Text], args: TrainingArgs, record: Record, end: float
) -> int:
    """Trains a drafter and gives it the average of its weights over the last updates; the iterations done.

    Args:
        record: takes reports of the loss.
        end: of `time.perf_counter()`, when it stops.
    """
    average = drafter.trainable_parameters()
    window = max(1, round((AVERAGED if args.drafter is None else GO_ON_AVERAGED) * args.iters))

    def on_iteration(done: int, shown: dict[str, float]) -> bool:
        nonlocal average
        weight = 1 / min(done, window)
        average = tree_map(lambda mean, array: mean + weight * (array - mean), average, drafter.trainable_parameters())
        mx.eval(average)
        if done % args.steps_per_report == 0:
            record.reports.append({"iteration": done, **shown})
        return time.perf_counter() > end

    batches = make_batches(weigh(texts, args.batch_size), args.batch_size, args.seed)
    done = train_drafter(teacher, drafter, batches, args, on_iteration=on_iteration)
    drafter.update(average)
    return done


def load_start(name: str, model: nn.Module) -> TrainableDrafter:
    """The drafter to go on from.

    Raises:
        RedrafterError: it is of a kind or in a form that cannot be trained.
        CheckpointError: see `load_drafter`.
    """
    drafter = load_drafter(name, model)
    if not (isinstance(drafter, TrainableDrafter) and isinstance(drafter.args, TrainableArgs)):
        why: str | None = f"expected one of {', '.join(TRAINABLE)}, got {drafter.args.model_type}"
    else:
        why = "expected weights that are not quantized" if is_quantized(drafter) else drafter.args.explain_fixed()
    if why is not None:
        raise RedrafterError(f"cannot go on training {name}: {why}")
    return cast(TrainableDrafter, drafter)


def is_held_back(text: Text) -> bool:
    """Whether a text's request is held back, which its number says: the same in every run."""
    request = number_request(text.ids[: text.offset]) if text.request is None else text.request
    return request % HELD_BACK == 0


def shorten(text: Text, max_seq_length: int) -> Text:
    """The end of a text, where its answer is."""
    cut = max(0, len(text.ids) - max_seq_length - 1)
    return text._replace(ids=text.ids[cut:], offset=max(0, text.offset - cut))


def weigh(texts: Sequence[Text], batch_size: int) -> list[Text]:
    """The texts, the recent half once more and the last quarter twice more; all of them often enough for a batch."""
    often = [*texts, *texts[len(texts) // 2 :], *texts[3 * len(texts) // 4 :]]
    return often * math.ceil(batch_size / len(often))


def write_answers(
    model: nn.Module, tokenizer: Any, texts: Sequence[Text], missing: int, args: TrainingArgs, end: float
) -> list[Text]:
    """More answers to the prompts that these texts have whole, the latest `max_prompts` of them in turns.

    Args:
        missing: how many.
        end: of `time.perf_counter()`, when it stops.
    """
    whole = [text for text in texts if text.offset and number_request(text.ids[: text.offset]) == text.request]
    unique = dict.fromkeys(tuple(text.ids[: text.offset].tolist()) for text in reversed(whole))
    room = args.max_seq_length - args.draft_depth
    prompts, found = [each for each in unique if len(each) < room][: args.max_prompts], list[Text]()
    mx.random.seed(args.seed)
    with tqdm(total=missing, desc="answers") as bar:
        for number in count() if prompts else ():
            group = [prompts[(len(found) + at) % len(prompts)] for at in range(min(AT_ONCE, missing - len(found)))]
            if not group or time.perf_counter() > end:
                return found
            temp = args.temp[number % len(args.temp)]
            answers = generate_answers(model, tokenizer, group, temp, args.max_tokens, end=end)
            found += [join_text(prompt, answer) for prompt, answer in zip(group, answers, strict=True)]
            bar.update(len(group))
    return found
