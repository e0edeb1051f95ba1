"""A complete training run: estimate, texts, training, validation, and the finished directory."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..atomic_files import explain_unwritable, lock_file
from ..checkpoints import (
    WEIGHTS,
    find_not_finite,
    format_dtype,
    is_quantized,
    list_weights,
    load_drafter,
    load_target,
    read_object,
    save_drafter,
    strip_folders,
)
from ..demo.sources import make_training_prompts
from ..drafters import TRAINABLE, is_converted
from ..drafters.config import DrafterArgs
from ..drafters.trainable import TrainableArgs, TrainableDrafter
from ..engine.model_checks import check_draftable
from ..engine.model_parts import find_compute_dtype, find_model_sizes
from ..engine.stats import Stats
from ..errors import RedrafterError, join_lines
from ..options import Options
from ..planning.sizing import choose_size, count_weights
from .data import (
    AnswerFile,
    Prompt,
    Text,
    check_data,
    digest,
    encode_prompts,
    find_most_frequent,
    join_text,
    list_ids,
    load_texts,
    make_batches,
    read_prompts,
    select_prompts,
    split_texts,
)
from .estimate import Estimate, check_disk, estimate_run
from .evaluation import (
    add_results,
    compare_shapes,
    count_texts,
    find_standard_error,
    format_error,
    format_table,
    make_prompts,
    measure_guesses,
)
from .hidden_states import add_hidden_states
from .record import Files, Record
from .report import describe, make_command, write_report
from .settings import TrainingArgs
from .targets import Teacher, initialize_drafter
from .trainer import load_checkpoint, train_drafter

INTERRUPTED, REFUSED = 130, 3
"""Exit statuses: after Ctrl-C, and if no drafter was written because it is not better than the initial one."""

MIN_IMPROVEMENT = 1.01
"""A retrained drafter is written if its tokens per round are at least this many times the initial drafter's."""

RETRAINING_RATE_FACTOR = 0.05
"""The learning rate for a trained drafter, relative to that for a new one."""

DEMO_PROMPTS = 1024
"""Pieces of the standard library that the demo's target continues."""

CHANGEABLE_SETTINGS = {"dtype", "steps_per_report", "save_every", "output", "trust_remote_code"}
"""Settings that may change on resume, as they do not affect what is learned."""

Say = Callable[[str], None]


@dataclass
class Run:
    """The objects that a run works with.

    Attributes:
        say: prints a message for the user.
        eos_token_ids: end-of-text tokens.
        training, validation: texts with hidden states.
        deadline: the `time.perf_counter()` at which training stops.
    """

    args: TrainingArgs
    files: Files
    record: Record
    say: Say
    teacher: Teacher
    eos_token_ids: set[int]
    drafter: TrainableDrafter
    training: list[Text]
    validation: list[Text]
    deadline: float


def train(args: TrainingArgs, *, resume: bool = False, dry_run: bool = False, say: Say = lambda text: None) -> int:
    """Trains a drafter into the directory `args.output`.

    Args:
        resume: continue from the last checkpoint in that directory; the result is bit-identical.
        dry_run: only estimate the run; write nothing.
        say: called with messages for the user.

    Returns:
        The exit status: 0; 1 if a token differs from plain decoding; `INTERRUPTED` after Ctrl-C, when the run can be
        resumed; `REFUSED` if no drafter was written.

    Raises:
        RedrafterError: settings or texts are invalid, or training failed; the last checkpoint is complete.
        OSError: a file cannot be written.
    """
    end = time.perf_counter() + (math.inf if args.minutes is None else 60 * args.minutes)
    args.check_run()
    files = Files(args.output)
    record = open_record(args, files, resume=resume)
    prompts = read_source(args)
    model, tokenizer = load_target(args, args.model)
    check_draftable(model, tree=False)
    start = None if args.drafter is None else load_start(args.drafter, model)
    if start is not None:
        depth = min(args.draft_depth, start.args.max_depth or args.draft_depth)
        dtype, rate = args.dtype or format_dtype(start.dtype), RETRAINING_RATE_FACTOR * args.learning_rate
        args = replace(args, draft_depth=depth, dtype=dtype, learning_rate=rate)
        start.set_dtype(mx.float32)
        start.share(model)
    training, validation, answers = find_texts(args, files, prompts, tokenizer, say)
    source = digest(list_ids([*training, *validation]))
    if record.texts not in (None, source):
        where = args.data or args.prompts or "the demo"
        raise RedrafterError(f"cannot resume the run in {files.directory}: the texts of {where} have changed")
    if start is not None:
        sizes: DrafterArgs = start.args
    else:
        sizes = args.kind.from_dict(record.args) if record.args else choose_sizes(args, model, say)
    record.texts, record.args = source, sizes.to_dict()
    done = record.ended or (load_checkpoint(files.checkpoint) if resume else 0)
    is_done = record.ended is not None or (record.iters is not None and done >= record.iters)
    say(f"drafter: {describe(sizes)}, {count_weights(sizes) / 1e6:.2f} M parameters")
    missing = 0 if answers is None else answers.count_missing()
    is_read = is_done or files.states.exists()
    estimate = estimate_run(model, sizes, args, training, len(validation), missing=missing, is_read=is_read)
    if record.iters is None:
        record.iters = plan_iters(args, estimate, end - time.perf_counter(), say)
    args = replace(args, iters=record.iters)
    say(estimate.describe(0 if is_done else args.iters - done, args.steps_per_eval))
    check_disk(files.directory, estimate.disk)
    if dry_run:
        return 0
    with lock_file(files.lock):
        try:
            if not resume:
                files.restart()
            record.save(files.record)
            if answers is not None:
                training, validation = split_texts(args, answers.complete(model, tokenizer), [], say)
            if start is not None or not is_done:
                read_by = {"model": args.model, "adapter_path": args.adapter_path}
                read = add_hidden_states(model, [*training, *validation], files.states, read_by, args.teacher_top_k)
                training, validation = read[: len(training)], read[len(training) :]
            drafter = start if start is not None else make_new_drafter(args, model, sizes, training, say)
            teacher = Teacher(model, reads=False)
            del model  # not needed until the end
            mx.clear_cache()
            eos_token_ids, deadline = set(tokenizer.eos_token_ids), end - estimate.comparing - estimate.validation
            run = Run(args, files, record, say, teacher, eos_token_ids, drafter, training, validation, deadline)
            if start is not None and record.before is None:
                record.before = count_all(run)
                record.save(files.record)
            if record.ended is None:
                with catch_interrupt() as interrupted:
                    done = fit_drafter(run, interrupted)
                if record.ended is None and done < record.iters:
                    say(f"stopped at iteration {done} of {args.iters}; the same command with --resume continues")
                    return INTERRUPTED
            return finish(run)
        except KeyboardInterrupt:
            say("stopped; the same command with --resume continues")
            return INTERRUPTED


def plan_iters(args: TrainingArgs, estimate: Estimate, seconds: float, say: Say) -> int:
    """The number of iterations to train for in the remaining time.

    Raises:
        RedrafterError: there is no time for a single iteration.
    """
    if args.minutes is None:
        return args.iters
    fitting = min(args.iters, estimate.count_fitting(seconds, args.steps_per_eval))
    if fitting < 1:
        raise RedrafterError(
            f"expected more --minutes: of {args.minutes:g} no time is left to train, after reading texts and the final "
            "comparison; a smaller --val-prompts or --val-tokens takes less time"
        )
    if fitting < args.iters:
        say(f"{fitting} iterations fit into {args.minutes:g} minutes")
    return fitting


def read_source(args: TrainingArgs) -> list[Prompt]:
    """The prompts to answer, empty if texts are given. Checks the texts as far as possible without a model.

    Raises:
        RedrafterError: see `check_data` and `read_prompts`.
    """
    if args.data:
        check_data(args.data)
    elif args.prompts:
        return read_prompts(args.prompts)
    else:
        return list(make_training_prompts(DEMO_PROMPTS, args.seed))
    return []


def find_texts(
    args: TrainingArgs, files: Files, prompts: list[Prompt], tokenizer: Any, say: Say
) -> tuple[list[Text], list[Text], AnswerFile | None]:
    """(training texts, validation texts, file of answers to generate or None).

    Texts whose answer is not generated yet have a placeholder of the maximum length.

    Args:
        prompts: from `read_source`.

    Raises:
        RedrafterError: texts cannot be read, or there are too few.
    """
    if args.data:
        texts, answers = load_texts(args.data, tokenizer, mask_prompt=args.mask_prompt), None
    else:
        ids = select_prompts(args, encode_prompts(prompts, tokenizer), say)
        texts, answers = (
            ([join_text(prompt, [0] * args.max_tokens) for prompt in ids], []),
            AnswerFile(files.answers, args, ids),
        )
    return *split_texts(args, *texts, say), answers


def load_start(name: str, model: nn.Module) -> TrainableDrafter:
    """Loads the drafter to continue training.

    Raises:
        RedrafterError: the drafter is quantized, or its kind or form cannot be trained.
        CheckpointError: see `load_drafter`.
    """
    drafter = load_drafter(name, model)
    if not (isinstance(drafter, TrainableDrafter) and isinstance(drafter.args, TrainableArgs)):
        why: str | None = f"expected one of {', '.join(TRAINABLE)}, got {drafter.args.model_type}"
    else:
        why = "expected weights that are not quantized" if is_quantized(drafter) else drafter.args.explain_fixed()
    if why is not None:
        raise RedrafterError(f"cannot continue training {name}: {why}")
    return cast(TrainableDrafter, drafter)


def open_record(args: TrainingArgs, files: Files, *, resume: bool) -> Record:
    """The record of a new run, or of the run to resume.

    Raises:
        RedrafterError: the output exists or cannot be written, there is no run to resume, settings have changed, or
            `--output` is the initial drafter and not in the format of `train` and `convert`.
    """
    if why := explain_unwritable(files.directory / "config.json"):  # one of the files to write
        raise RedrafterError(f"--output cannot be {files.directory}: {why}")
    settings = args.to_json()
    in_place = args.drafter and os.path.exists(args.drafter) and files.directory.exists()
    if in_place := bool(in_place and files.directory.samefile(cast(str, args.drafter))):
        weights = [path.name for path in files.directory.glob(WEIGHTS)]
        if weights != ["model.safetensors"] or not is_converted(read_object(files.directory / "config.json")):
            raise RedrafterError(f"expected --output to be a drafter written by train or convert, got {args.drafter}")
    if not resume:
        found = {path.name for path in files.directory.iterdir()} if files.directory.is_dir() else set()
        if not in_place and (found - {files.work.name} or files.checkpoint.exists()):  # answers alone are not a run
            is_finished = (files.directory / "config.json").exists()
            hint = f"--drafter {args.output} to train it further" if is_finished else "--resume to continue its run"
            raise RedrafterError(f"{files.directory} exists already: give another --output, or {hint}")
        return Record(settings)
    if not files.record.exists():
        raise RedrafterError(f"there is no run to resume in {files.directory}: leave out --resume")
    try:
        record = Record(**read_object(files.record))
    except TypeError as error:
        raise RedrafterError(f"{files.record} is not the record of a run: {join_lines(error)}") from error
    for name, value in settings.items():
        if name not in CHANGEABLE_SETTINGS and (before := record.settings.get(name)) != value:
            raise RedrafterError(f"cannot resume with other settings: {name} was {before}, got {value}")
    return record


def choose_sizes(args: TrainingArgs, model: nn.Module, say: Say) -> DrafterArgs:
    """The drafter's config: sizes from the settings, or chosen by measuring.

    Raises:
        RedrafterError: the draft vocabulary is larger than the target's vocabulary.
    """
    hidden_size, vocab_size = find_model_sizes(model)
    if args.is_measured:
        choice = choose_size(model, find_final_dtype(args, find_compute_dtype(model)), args.kind, args.draft_depth)
        say(f"size: {choice.reason}")
        return choice.args
    count = args.draft_vocab_size
    if count is not None and count > vocab_size:
        raise RedrafterError(f"draft_vocab_size must be at most the target's vocabulary {vocab_size}, got {count}")
    count = None if count == vocab_size else count
    sizes = {name: getattr(args, name) for name in args.kind.SIZES}
    return args.kind.for_training(hidden_size, vocab_size, depth=args.draft_depth, draft_vocab_size=count, **sizes)


def make_new_drafter(
    args: TrainingArgs, model: nn.Module, sizes: DrafterArgs, texts: Sequence[Text], say: Say
) -> TrainableDrafter:
    """An untrained drafter. A draft vocabulary has the most frequent tokens of the texts."""
    mx.random.seed(args.seed)
    count, ids = sizes.draft_vocab_size, None
    if count is not None:
        ids = find_most_frequent(texts, count, sizes.vocab_size)
        learned = np.concatenate([text.ids[text.offset :] for text in texts])
        say(f"draft vocabulary: {count} tokens, which are {np.isin(learned, ids).mean():.2%} of those to learn")
    drafter = initialize_drafter(model, sizes, ids)
    mx.eval(drafter.parameters())
    return drafter


def find_final_dtype(args: TrainingArgs, target: mx.Dtype) -> mx.Dtype:
    """The dtype of the finished drafter; the target's by default."""
    return target if args.dtype is None else cast(mx.Dtype, getattr(mx, args.dtype))


def fit_drafter(run: Run, interrupted: threading.Event) -> int:
    """Trains with reports, validations and early stopping; returns the number of iterations done."""
    args, record, files = run.args, run.record, run.files
    started = time.perf_counter()

    def on_iteration(done: int, shown: dict[str, float]) -> bool:
        nonlocal started
        assert record.iters is not None
        if record.ended is not None or done > record.iters:
            return True  # training stops after the current update
        record.drop_after(done - 1)  # entries after the checkpoint are recorded again
        if is_report := done % args.steps_per_report == 0:
            record.reports.append({"iteration": done, **shown, "seconds": time.perf_counter() - started})
        is_late = time.perf_counter() > run.deadline
        if is_validation := done % args.steps_per_eval == 0 or done == args.iters or is_late:
            record.validations.append(validate(run, done))
            scores = [entry["tokens_per_round"] for entry in record.validations]
            if args.patience and scores[-1] > max(scores[:-1], default=0):
                save_drafter(files.best, run.drafter)
            if len(scores) > args.patience > 0 and max(scores[-args.patience :]) <= max(scores[: -args.patience]):
                run.say(f"stopping early: tokens per round have not improved for {args.patience} validations")
                record.ended = done
            if is_late:
                record.iters = done
        if is_report or is_validation:
            record.save(files.record)
            started = time.perf_counter()
        return interrupted.is_set() or is_late or record.ended is not None

    batches = make_batches(run.training, args.batch_size, args.seed)
    return train_drafter(
        run.teacher, run.drafter, batches, args, checkpoint=files.checkpoint, on_iteration=on_iteration
    )


def validate(run: Run, done: int) -> dict[str, Any]:
    """Runs a validation; returns its entry for the record."""
    args = run.args
    loss, acceptance = measure_guesses(run.teacher, run.drafter, run.validation, args)
    each = count_texts(run.teacher, run.drafter, run.validation[: args.val_prompts], args)
    tokens = sum(each, Stats()).tokens_per_round
    per_round = format_error(tokens, find_standard_error(one.tokens_per_round for one in each))
    first = " ".join(f"{shares[0]:.2f}" for shares in acceptance)
    run.say(
        f"iteration {done}: validation loss {loss:.3f}, right at depth 1, 2, ...: {first}; "
        f"{per_round} tokens per round at 1 x {args.draft_depth} on held-out texts: {len(each)}"
    )
    if tokens == 1 and done >= args.iters // 2:
        run.say("warning: no drafted token was accepted: too few iterations, or a learning rate too low or too high")
    return {"iteration": done, "loss": loss, "acceptance": acceptance, "tokens_per_round": tokens}


def count_all(run: Run) -> float:
    """The drafter's tokens per round on all held-out texts."""
    return sum(count_texts(run.teacher, run.drafter, run.validation, run.args), Stats()).tokens_per_round


def finish(run: Run) -> int:
    """Writes and measures the finished drafter; returns the exit status.

    With `patience` the best validated drafter is written. A retrained one is written only with `MIN_IMPROVEMENT`.

    Raises:
        RedrafterError: a weight does not fit into the dtype.
    """
    args, record, drafter, place = run.args, run.record, run.drafter, run.files.directory
    if args.patience:
        best = max(record.validations, key=lambda entry: entry["tokens_per_round"])
        drafter.update(load_drafter(run.files.best).parameters())
        record.drop_after(best["iteration"])
        run.say(f"using the drafter of iteration {best['iteration']}")
    if record.before is not None:
        after, least = count_all(run), MIN_IMPROVEMENT * record.before
        written = "" if after >= least else "not written: "
        run.say(
            f"{written}the new drafter makes {after:.3f} tokens per round on {len(run.validation)} held-out texts, "
            f"{record.before:.3f} before, {least:.3f} required"
        )
        if written:
            return REFUSED
    model, _ = load_target(args, args.model)
    dtype = find_final_dtype(args, run.teacher.dtype)
    drafter.set_dtype(dtype)
    if (name := find_not_finite(list_weights(drafter))) is not None:
        raise RedrafterError(f"{name} does not fit into {dtype}: give another --dtype")
    save_drafter(place, drafter)  # in case the comparison fails
    run.say("comparing beam shapes with plain decoding on held-out prompts")
    prompts = make_prompts(run.validation, args.val_prompts)
    options = Options(max_tokens=args.val_tokens, temp=args.temp[-1], seed=args.seed)
    shapes = [(1, k) for k in range(1, args.draft_depth + 1)] + [(4, args.draft_depth)]
    try:
        results = compare_shapes(model, drafter, prompts, shapes, options, run.eos_token_ids)
    except KeyboardInterrupt:
        run.say(f"stopped: the drafter is in {place}, but its shapes were not compared")
        raise
    acceptance = record.validations[-1]["acceptance"]
    drafter.args = add_results(drafter.args, args.model and strip_folders(args.model), acceptance, results)
    save_drafter(place, drafter)
    if note := write_report(args, record, drafter.args, place, results):
        run.say(note)
    run.say(f"temperature {options.temp}, {len(prompts)} held-out prompts\n{format_table(results)}")
    if (ratio := max(result.against_plain for result in results)) <= 1:
        run.say(
            f"note: no shape is faster than plain decoding here, the best one has {ratio:.2f} times its speed: "
            "train longer, or train a smaller drafter"
        )
    run.say(f"the drafter is in {place}; to use it:\n{make_command(args, str(place))}")
    if not (same := all(result.same_tokens for result in results)):
        run.say("a token differs from plain decoding: docs/exactness.md explains how to tell a tie from an error")
    return 0 if same else 1


@contextmanager
def catch_interrupt() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into an event for the training loop; the second one raises KeyboardInterrupt."""
    event = threading.Event()

    def on_signal(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        print("\nstopping after this iteration; press Ctrl-C again to stop at once", file=sys.stderr)

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
