"""`generate`: flags, text and JSON output, and what `--compare` finds and says."""

import json
from shlex import split
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import setup_arg_parser
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

from helpers.small import make_byte_tokenizer, save_target, small_llama
from mlx_redrafter import generate_step, load
from mlx_redrafter.cli import generate as command
from mlx_redrafter.cli.generate import make_parser
from mlx_redrafter.decoding.options import OPTION_FLAGS
from mlx_redrafter.decoding.trials import check_speedup
from mlx_redrafter.demo import DIRECTORY
from mlx_redrafter.target.few_rows import FewRows, Matmul

FOREIGN = str(DIRECTORY / "drafter" / "model.safetensors")
"""Tensors that are no prompt cache."""

PLAN = "--draft-depth 3"
"""A plan that needs no measurement."""


def as_flags(pair, kind: str = "--drafter") -> str:
    """Flags of the model, its drafter (or the model as its own draft model) and a prompt."""
    drafter = pair[1] if kind == "--drafter" else pair[0]
    return f"--model {pair[0]} {kind} {drafter} --prompt abc"


def run_json(run, *flags: str) -> dict[str, Any]:
    status, out, _ = run("generate", *flags, "--json")
    assert status == 0
    return json.loads(out)


def test_flags_have_mlx_lms_names_and_defaults():
    ours = vars(make_parser().parse_args([]))
    theirs = vars(setup_arg_parser().parse_args([]))
    missing = {"num_draft_tokens", "image"}  # num_draft_tokens sets draft_depth
    assert missing == set(theirs) - set(ours)
    assert {name: ours[name] for name in ours if name in theirs} == {
        name: theirs[name] for name in theirs if name in ours
    } | {"prompt": None}  # the demo has its own prompt
    assert {flag.name for flag in OPTION_FLAGS if ours[flag.name] != flag.default} == {"max_tokens"}


def test_plain_and_drafted_text_are_equal(pair, run):
    common = split(f"generate --model {pair[0]} --prompt abc -m 24 --temp 0.9 --seed 4")
    status, alone, err = run(*common)
    assert status == 0
    assert "no --drafter given: drafting from the context alone" in err
    status, plain, err = run(*common, "--no-context")
    assert status == 0
    assert "Rounds" not in err
    assert plain == alone
    assert len(plain) > 1
    status, drafted, err = run(*common, "--drafter", pair[1], "--beam-width", "3")
    assert status == 0
    assert "tokens per round" in err
    assert plain == drafted
    assert run(*common, "--verbose", "F") == (0, plain, "")
    common = split(f"generate --model {pair[0]} -m 5 --verbose F --prompt")
    assert run(*common, "-", stdin=b"a\nb") == run(*common, "a\\nb"), (
        "the prompt may come from stdin"
    )


def test_json_has_counts_that_add_up(pair, run):
    flags = split(f"{as_flags(pair)} -m 16 --temp 1 {PLAN}")
    # A random seed may end the text early.
    records = [run_json(run, *flags) for _ in range(6)]
    record = next(each for each in records if each["finish_reason"] == "length")
    assert (
        record["accepted"] + record["rounds"] + 1
        == record["generation_tokens"]
        == len(record["tokens"])
        == 16
    )
    assert record["drafted"] == 3 * (record["rounds"] - record["plain_steps"])
    assert {"text", "prompt_tps", "generation_tps", "peak_memory", "device", "versions"} <= set(
        record
    )
    assert record["settings"]["draft_depth"] == 3
    assert record["settings"]["model"] == pair[0]
    again = run_json(run, *flags, "--seed", str(record["seed"]))
    assert again["tokens"] == record["tokens"], "the random seed is reported"


def test_a_draft_model_drafts(pair, run):
    flags = split(f"{as_flags(pair, '--draft-model')} -m 14 --temp 1 --seed 2")
    record = run_json(run, *flags, "--num-draft-tokens", "3", "--compare")
    assert record["compare"]["identical"]
    assert record["settings"]["drafter"] == pair[0]
    assert record["accepted"] >= 9
    assert record["drafted"] == 3 * record["rounds"], "three per round"
    assert run_json(run, *flags, "--draft-depth", "3")["tokens"] == record["tokens"]
    assert run_json(run, *flags)["tokens"] == record["tokens"], "auto"
    for more in (("--no-drafter",), ("--drafter", pair[1])):
        assert run("generate", *flags, *more)[0]
    status, _, err = run("generate", "--draft-model", pair[0], "--prompt", "abc")
    assert status == 1
    assert "cannot be the draft model: it has a tokenizer of 257 tokens, the target's has " in err


def test_compare_fails_on_a_wrong_token_only(pair, run, monkeypatch):
    flags = split(f"{as_flags(pair)} -m 10 --compare --seed 1 {PLAN}")
    status, out, err = run("generate", *flags)
    assert status == 0
    assert "tokens identical" in err
    assert len(out) > 1
    verdict = run_json(run, *flags)["compare"]
    assert verdict["identical"]
    assert verdict["difference"] is None
    assert verdict["ratio"] == check_speedup(
        verdict["generation_tps"] / verdict["plain_generation_tps"], 1.0
    )

    def corrupt(*args, **options):
        for count, response in enumerate(real(*args, **options)):
            response.token ^= options["plan"] != "off" and count == 5
            yield response

    real = command.stream_generate
    monkeypatch.setattr(command, "stream_generate", corrupt)
    status, out, err = run("generate", *flags)
    assert status == 1
    assert "token 5 differs: " in err
    assert "--exact tells a tie" in err
    status, out, _ = run("generate", *flags, "--json")
    difference = json.loads(out)["compare"]["difference"]
    assert status == 1
    assert difference["token"] == 5
    assert difference["distance"] < 1e-3


def test_compare_fails_where_nothing_was_drafted(pair, run):
    flags = split(f"{as_flags(pair)} --compare {PLAN}")
    status, _, err = run("generate", *flags, "-m", "1")
    assert status == 1
    assert "all 1 tokens identical, but nothing was drafted, so nothing was compared" in err


@pytest.mark.parametrize("busy", [True, False])
def test_compare_gives_no_speedup_from_disturbed_times(busy, pair, run, monkeypatch):
    """Plain decoding makes 10 tokens a second, or 2 on a busy machine.

    Drafting makes 12, up to 4 a round.
    """

    def decode(*args, **options):
        for response in real(*args, **options):
            drafts = options["plan"] != "off"
            response.generation_tps = 12.0 if drafts else 2.0 if busy else 10.0
            yield response

    real = command.stream_generate
    monkeypatch.setattr(command, "stream_generate", decode)
    flags = split(f"{as_flags(pair, '--draft-model')} -m 14 --compare --temp 0 {PLAN}")
    verdict = run_json(run, *flags)["compare"]
    assert verdict["ratio"] == (None if busy else 1.2)
    status, _, err = run("generate", *flags)
    assert status == 0
    assert ("busy, not measured" in err) is busy
    assert ("1.20 times" in err) is not busy
    _, _, err = run("generate", *flags, "-m", "1")
    assert "too short to measure" in err


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (None, "here; ties within rounding are possible"),
        ((1, 2, 3), "exact by construction: 1 to 3 rows are computed alike"),
        ((2, 3, 4), "exact against plain steps padded to 2 rows"),
    ],
    ids=["default", "unpadded", "padded"],
)
def test_compare_says_how_exact_it_is(counts, words, pair, run, monkeypatch):
    monkeypatch.setattr("mlx_redrafter.decoding.recipe.choose_row_counts", lambda *args: counts)
    flags = split(f"{as_flags(pair, '--draft-model')} -m 12 --compare {PLAN}")
    status, _, err = run("generate", *flags)
    assert status == 0
    assert f"all 12 tokens identical{',' * bool(counts)} {words}" in err
    assert run_json(run, *flags)["compare"]["row_counts"] == (counts and list(counts))
    assert ("see --exact" in err) is (counts is None)
    assert "--exact" not in run("generate", *flags, "--no-exact")[2]


def test_compare_says_whether_the_kernel_for_a_few_rows_is_used(pair, run, monkeypatch):
    flags = split(f"{as_flags(pair)} -m 12 --compare {PLAN}")
    said = "computed by the kernel for a few rows"
    assert said not in run("generate", *flags)[2]
    assert run_json(run, *flags)["compare"]["few_rows"] == []
    matmuls = [Matmul(n, 64, 64, 3, 32, mx.float32) for n in (2, 3, 5)]
    few_rows = FewRows(frozenset(matmuls))
    name = "mlx_redrafter.measuring.pair.Pair.get_or_measure_few_rows"
    monkeypatch.setattr(name, lambda pair: few_rows)
    assert f"2 to 3, 5 rows {said}" in run("generate", *flags)[2]
    assert run_json(run, *flags)["compare"]["few_rows"] == [2, 3, 5]


def test_compare_says_how_hybrids_are_rolled_back(pair, run, monkeypatch):
    flags = split(f"--model {pair[0]} --drafter {pair[1]} --prompt abc -m 12 --compare {PLAN}")
    assert run_json(run, *flags)["compare"]["rollback"] is None
    how = "rolled back without replay"
    monkeypatch.setattr("mlx_redrafter.measuring.pair.Pair.describe_rollback", lambda pair: how)
    assert f"recurrent layers after a rejection: {how}\n" in run("generate", *flags)[2]


def test_stop_strings_and_end_tokens_end_the_text(pair, run):
    common = split(f"--model {pair[0]} --prompt abc -m 40 --temp 1.5 --seed 2")
    whole = run_json(run, *common)
    printable = next(
        c for c in whole["text"] if c.isascii() and c.isprintable() and c != " " and c != "-"
    )
    cut = run_json(run, *common, "--stop", printable)
    assert cut["text"] == whole["text"][: whole["text"].index(printable)]
    assert cut["finish_reason"] == "stop"
    ended = run_json(run, *common, "--extra-eos-token", printable)
    assert ended["text"] == cut["text"]
    assert ended["tokens"] == cut["tokens"]


def test_the_chat_template_is_used_unless_ignored(pair, chat_target, run):
    common = split("-m 8 --verbose F --prompt")
    plain = ("generate", "--model", pair[0], *common)
    chat = ("generate", "--model", chat_target)
    assert run(*chat, "--system-prompt", "s", *common, "u") == run(*plain, "<system>s<user>u")
    assert run(*chat, "--ignore-chat-template", *common, "u") == run(*plain, "u")
    assert run(*chat, "--prefill-response", "a", *common, "u") == run(*plain, "<user>u<assistant>a")
    assert run(*chat, "--chat-template-config", '{"end": "e"}', *common, "u") == run(
        *plain, "<user>ue"
    )


@pytest.mark.parametrize(
    ("prompt", "is_noted"),
    [("<think>a", True), ("<think>a</think>", False), ("a", False)],
)
def test_a_text_that_ends_inside_its_reasoning_is_noted(prompt, is_noted, run, tmp_path):
    tokenizer = make_byte_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    model = small_llama(vocab=len(tokenizer), kv_heads=2)
    save_target(tmp_path, model, tokenizer, eos_token_id=0)
    flags = split(f"generate --model {tmp_path} -m 8 --plan off --prompt {prompt!r}")
    note = "note: --max-tokens 8 ended the text inside its reasoning: give more"
    assert (note in run(*flags)[2]) is is_noted
    assert note not in run(*flags, "--verbose", "F")[2]


def test_a_prompt_cache_file_replaces_the_start_of_the_prompt(pair, run, tmp_path):
    model, tokenizer = load(pair[0])
    cache = make_prompt_cache(model)
    next(generate_step(tokenizer.encode("abc"), model, prompt_cache=cache, max_tokens=0), None)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, cache, {"model": pair[0], "tokenizer_config": "{}"})
    whole = run(*split(f"generate --model {pair[0]} --prompt abcdef -m 12 --verbose F"))
    flags = split(f"generate --prompt-cache-file {file} --prompt def -m 12 --verbose F")
    assert run(*flags) == whole
    assert run(*flags, "--drafter", pair[1], "--beam-width", "2") == whole
    status, _, err = run(*flags, "--model", pair[1])
    assert status == 1
    assert "was made with" in err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--prompt", "\udcff"), "the prompt is not UTF-8"),
        (("--stop", ""), "stop must be non-empty strings"),
        (("-m", "0"), "max_tokens must be"),
        (("--model", "/no/such"), "no such file or directory"),
        (("--drafter", "/no/such"), "no such file or directory"),
        (("--prompt-cache-file", "/no/such"), "cannot read the prompt cache /no/such"),
        (
            ("--prompt-cache-file", FOREIGN),
            f"cannot read the prompt cache {FOREIGN}: expected a prompt cache of mlx-lm",
        ),
        (("--top-k", "100000"), "top_k must be below"),
    ],
)
def test_bad_input_is_refused_in_one_line(pair, run, flags, reason):
    common = split(f"{as_flags(pair)} --temp 0.5")
    status, out, err = run("generate", *common, *flags)
    assert status == 1
    assert out.strip() == ""
    assert err.startswith(f"error: {reason}")
    assert err.count("\n") == 1, err


@pytest.mark.parametrize(
    "flags",
    ["--adapter-path x", "--compare --no-drafter --no-context", "--no-drafter --draft-depth 3"],
)
def test_flags_the_demo_cannot_take_are_refused(run, flags):
    status, out, err = run("generate", *flags.split())
    assert status == 1
    assert out == ""
    assert err.splitlines()[-1].startswith(f"error: {flags.split()[0]} "), err
