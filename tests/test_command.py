"""The command: flags in, text or JSON out, one line and exit code 1 on bad input."""

from __future__ import annotations

import inspect
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from small import save_target, small_drafter, small_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_redrafter import generate_step, load
from mlx_redrafter.checkpoints import save_drafter
from mlx_redrafter.cli import main as cli
from mlx_redrafter.cli.comparing import Difference, distance
from mlx_redrafter.cli.main import run_module
from mlx_redrafter.engine import wired_limit as wiring
from mlx_redrafter.flags import OPTIONS, make_parser
from mlx_redrafter.planning.autopilot import TIMES

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Directories of a byte-level target and its drafter."""
    root = tmp_path_factory.mktemp("pair")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<end>": 0, **{c: i for i, c in enumerate(alphabet, 1)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    vocab = len(alphabet) + 1
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    save_target(root / "target", small_llama(vocab=vocab), fast, eos_token_id=0)
    save_drafter(root / "drafter", small_drafter(vocab=vocab))
    return str(root / "target"), str(root / "drafter")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """arguments -> (exit status, stdout, stderr)."""

    def call(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["generate", *arguments])
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            run_module("mlx_redrafter.cli.generate")
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def test_every_option_is_a_parameter_of_the_function_with_its_default() -> None:
    parameters = inspect.signature(make_settings).parameters
    parsed = vars(make_parser().parse_args([]))
    for name, _, _ in OPTIONS:
        assert parsed[name] == parameters[name].default, name
    library_only = {
        "drafter",
        "history",
        "sampler",
        "logits_processors",
        "prompt_cache",
        "on_drafter_failure",
        "on_round",
        "prompt_progress_callback",
        "xtc_special_tokens",
    }
    assert set(parameters) - {name for name, _, _ in OPTIONS} == library_only


def test_plain_and_drafted_commands_print_the_same_text_for_a_seed(pair: tuple[str, str], run: Any) -> None:
    target, drafter = pair
    common = ("--model", target, "--prompt", "abc", "-m", "24", "--temp", "0.9", "--seed", "4")
    status, plain, said = run(*common)
    assert status == 0 and "decoding plainly" in said
    status, drafted, summary = run(*common, "--drafter", drafter, "--beam-width", "3")
    assert status == 0 and "tokens per round" in summary
    assert plain == drafted and len(plain) > 1


def test_verbose_off_prints_the_text_alone(pair: tuple[str, str], run: Any) -> None:
    target, drafter = pair
    common = ("--model", target, "--drafter", drafter, "--prompt", "abc", "-m", "9")
    assert run(*common, "--verbose", "F") == (0, run(*common)[1], "")


def test_json_holds_the_fields_and_every_setting(pair: tuple[str, str], run: Any) -> None:
    target, drafter = pair
    arguments = (
        "--model",
        target,
        "--drafter",
        drafter,
        "--prompt",
        "abc",
        "-m",
        "17",
        "--json",
        "--temp",
        "1",
        "--draft-depth",
        "3",
    )
    runs = [run(*arguments) for _ in range(6)]
    assert {status for status, _, _ in runs} == {0}
    # A drawn seed may end the text early.
    record = next(made for made in (json.loads(out) for _, out, _ in runs) if made["finish_reason"] == "length")
    assert record["accepted"] + record["rounds"] + 1 == record["generation_tokens"] == len(record["tokens"])
    assert record["drafted"] == 3 * record["rounds"]
    assert record["tokens_per_round"] == pytest.approx(1 + record["accepted"] / record["rounds"])
    assert len(record["acceptance_per_depth"]) == 3
    assert {"text", "prompt_tps", "generation_tps", "peak_memory", "finish_reason", "device"} <= set(record)
    assert record["settings"]["draft_depth"] == 3 and record["settings"]["model"] == target
    assert set(record["versions"]) == {"python", "mlx", "mlx-lm", "mlx_redrafter"}
    again = json.loads(run(*arguments, "--seed", str(record["seed"]))[1])
    assert again["tokens"] == record["tokens"], "the drawn seed is reported"


def test_the_warning_of_a_large_model_is_not_in_the_json(
    pair: tuple[str, str], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "maybe_set_recommended_wired_limit", lambda: 5)
    monkeypatch.setattr(mx, "set_wired_limit", lambda size: size)
    monkeypatch.setattr(mx, "device_info", lambda *device: {"max_recommended_working_set_size": 10})
    with pytest.warns(UserWarning, match="the model takes 0 MB, close to"):
        _, out, _ = run("--model", pair[0], "--prompt", "abc", "-m", "2", "--json")
    assert len(json.loads(out)["tokens"]) == 2


def test_compare_passes_on_equal_tokens_and_fails_on_a_difference(
    pair: tuple[str, str], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = pair
    # Too few tokens for a word on useless drafters.
    arguments = ("--model", target, "--drafter", drafter, "--prompt", "abc", "-m", "16", "--compare")
    status, _, said = run(*arguments, "--temp", "0.8")
    assert status == 0 and "tokens identical" in said and "times" in said
    verdict = json.loads(run(*arguments, "--json")[1])["compare"]
    assert verdict["identical"] and verdict["ratio"] == verdict["generation_tps"] / verdict["plain_generation_tps"]

    from mlx_redrafter.cli import generate as command

    def corrupt(*args: Any, drafter: Any = None, **options: Any) -> Any:
        for count, response in enumerate(real(*args, drafter=drafter, **options)):
            response.token += drafter is not None and count == 5
            yield response

    real = command.stream_generate
    monkeypatch.setattr(command, "stream_generate", corrupt)
    status, _, said = run(*arguments)
    assert status == 1 and "token 5 differs" in said and "more than rounding explains: please report it" in said


@pytest.mark.parametrize(
    ("dtype", "step", "rounding"),
    [
        (mx.float32, 0.0, False),
        (mx.float32, 1e-4, True),
        (mx.float32, 1e-2, False),
        (mx.bfloat16, 0.125, True),
        (mx.bfloat16, 3.0, False),
    ],
)
def test_a_difference_is_told_from_a_tie_by_how_far_the_rows_are_apart(
    dtype: mx.Dtype, step: float, rounding: bool
) -> None:
    row = mx.array([-0.5, -1.0, -17.0, -60.0])
    other = row + mx.array([0.0, step, 0.0, 30.0])
    found = Difference(4, *distance(row.astype(dtype), other.astype(dtype)))
    assert found.rounding is rounding
    assert ("a tie that rounding decides" in found.told) is rounding and found.told.startswith("token 4 differs: ")


def test_a_warning_is_one_line() -> None:
    script = (
        "import sys, types, warnings; from mlx_redrafter.cli.main import run_module; "
        "sys.modules['warned'] = types.SimpleNamespace(run=lambda: warnings.warn('chains, not trees')); "
        "run_module('warned')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == "warning: chains, not trees\n"


def test_it_says_when_it_measures(pair: tuple[str, str], tmp_path: Path) -> None:
    script = (
        "from mlx_redrafter.planning import meter; from mlx_redrafter.cli.main import run_module; meter.SECONDS = 0.3; "
        "run_module('mlx_redrafter.cli.generate')"
    )
    command = [sys.executable, "-c", script, "--model", pair[0], "--drafter", pair[1], "-m", "4", "-p", "some text"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    said = "measuring this machine for these models: some ten seconds\n"
    times = TIMES + 1  # as often as a table may be measured that contradicts itself, and once more
    runs = [subprocess.run(command, capture_output=True, text=True, check=True, env=environment) for _ in range(times)]
    assert runs[0].stderr.startswith(said) and said not in runs[-1].stderr


def test_the_prompt_comes_from_stdin_and_escapes_are_read(pair: tuple[str, str], run: Any) -> None:
    common = ("--model", pair[0], "-m", "5", "--verbose", "F")
    assert run(*common, "--prompt", "-", stdin="a\nb") == run(*common, "--prompt", "a\\nb")


def test_stop_strings_and_extra_end_tokens_end_the_text(pair: tuple[str, str], run: Any) -> None:
    common = ("--model", pair[0], "--prompt", "abc", "-m", "40", "--verbose", "F", "--temp", "1.5", "--seed", "2")
    whole = json.loads(run(*common, "--json")[1])
    printable = next(c for c in whole["text"] if c.isascii() and c.isprintable() and c != " " and c != "-")
    cut = json.loads(run(*common, "--json", "--stop", printable)[1])
    assert cut["text"] == whole["text"][: whole["text"].index(printable)] and cut["finish_reason"] == "stop"
    ended = json.loads(run(*common, "--json", "--extra-eos-token", printable)[1])
    assert ended["text"] == cut["text"] and ended["tokens"] == cut["tokens"]


def test_the_chat_template_is_used_unless_ignored(pair: tuple[str, str], run: Any, tmp_path: Path) -> None:
    for file in Path(pair[0]).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    common = ("-m", "8", "--verbose", "F", "--prompt")
    chat = run("--model", str(tmp_path), "--system-prompt", "s", *common, "u")
    assert chat == run("--model", pair[0], *common, "<system>s<user>u")
    ignored = run("--model", str(tmp_path), "--ignore-chat-template", *common, "u")
    assert ignored == run("--model", pair[0], *common, "u")
    prefilled = run("--model", str(tmp_path), "--prefill-response", "a", *common, "u")
    assert prefilled == run("--model", pair[0], *common, "<user>u<assistant>a")


def test_a_prompt_cache_file_stands_in_for_the_first_part_of_the_prompt(
    pair: tuple[str, str], run: Any, tmp_path: Path
) -> None:
    model, tokenizer = load(pair[0])
    cache = make_prompt_cache(model)
    next(generate_step(tokenizer.encode("abc"), model, prompt_cache=cache, max_tokens=0), None)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, cache, {"model": pair[0], "tokenizer_config": "{}"})
    whole = run("--model", pair[0], "--prompt", "abcdef", "-m", "12", "--verbose", "F")
    arguments = ("--prompt-cache-file", file, "--prompt", "def", "-m", "12", "--verbose", "F")
    assert run(*arguments) == whole
    assert run(*arguments, "--drafter", pair[1], "--beam-width", "2") == whole
    status, _, said = run("--model", pair[1], *arguments)
    assert status == 1 and "was made with" in said


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--max-kv-size", "7"), "max_kv_size must be at least 8, got 7"),
        (("--compare", "--no-drafter"), "needs a drafter"),
        (("--prompt", ""), "the prompt is empty"),
        (("--temp", "-1"), "temp must be at least 0"),
        (("--stop", ""), "stop string"),
        (("-m", "0"), "max_tokens"),
        (("--drafter", "/no/such"), "no such directory"),
        (("--beam-width", "0"), "beam_width"),
        (("--chat-template-config", "{"), "not JSON"),
        (("--prompt-cache-file", "/no/such"), "prompt cache"),
        (("--kv-bits", "7"), "kv_bits"),
        (("--top-k", "100000"), "top_k"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(
    pair: tuple[str, str], run: Any, arguments: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    target, drafter = pair
    if "--chat-template-config" in arguments:
        for file in Path(target).iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
        target = str(tmp_path)
    base = ("--model", target, "--drafter", drafter, "--prompt", "abc", "--temp", "0.5")
    status, out, said = run(*base, *arguments)
    assert status == 1 and out.strip() == ""
    assert said.startswith("error: ") and said.count("\n") == 1 and reason in said, said


def test_the_console_script_hands_over_and_names_what_it_knows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, code, word in ((["--help"], 0, "generate"), (["--version"], 0, "0."), (["nonsense"], 2, "nonsense")):
        monkeypatch.setattr(sys, "argv", ["mlx_redrafter", *arguments])
        if code:
            with pytest.raises(SystemExit) as ended:
                cli.main()
            assert ended.value.code == code
        else:
            cli.main()
        captured = capsys.readouterr()
        assert word in captured.out + captured.err
    monkeypatch.setattr(sys, "argv", ["mlx_redrafter", "generate", "--help"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0 and "--draft-depth" in capsys.readouterr().out


def test_a_drafter_drafts_as_deep_as_its_config_says(run: Any, pair: tuple[str, str], tmp_path: Path) -> None:
    target, drafter = pair
    copy = tmp_path / "drafter"
    shutil.copytree(drafter, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"draft_depth": 2}))
    arguments = ("--model", target, "--drafter", str(copy), "--prompt", "abc", "--max-tokens", "8", "--json")
    for more, depth in ((("--beam-width", "1"), 2), (("--draft-depth", "4"), 4)):
        _, out, _ = run(*arguments, *more)
        assert len(json.loads(out)["acceptance_per_depth"]) == depth


@pytest.mark.parametrize("own", [True, False])
def test_another_base_than_the_drafters_is_warned_of(
    run: Any, pair: tuple[str, str], tmp_path: Path, own: bool
) -> None:
    target, drafter = pair
    copy = tmp_path / "drafter"
    shutil.copytree(drafter, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"base_model": target if own else "some/other"}))
    status, _, err = run("--model", target, "--drafter", str(copy), "--prompt", "abc", "--max-tokens", "4")
    assert status == 0
    assert (f"was trained for some/other, not for {target}" in err) != own


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--model", "~nosuchuser/foo"), "no such directory: '~nosuchuser/foo'"),
        (("--model", "a" * 5000), "no such directory: 'aaa"),
        (("--adapter-path", "x"), "--adapter-path needs --model"),
        (("-qa",), "--quantize-activations needs --model"),
        (("--system-prompt", "\udcff"), "the system prompt is not UTF-8"),
        (("--prefill-response", "\udcff"), "the prefill response is not UTF-8"),
        (("--prompt", "\udcff"), "the prompt is not UTF-8"),
        (("--chat-template-config", "[" * 100_000), "--chat-template-config is not JSON"),
        (("--draft-depth", "100000"), "draft_depth must be from 1 to 256, got 100000"),
        (
            ("--temp", "0.8", "--xtc-probability", "0.5", "--extra-eos-token", "9" * 20),
            "xtc_special_tokens must be token ids from 0 to 2047, got 9999",
        ),
    ],
)
def test_odd_arguments_are_refused_in_one_line(run: Any, arguments: tuple[str, ...], reason: str) -> None:
    status, out, err = run(*arguments)
    assert status == 1 and out == ""
    assert err.splitlines()[-1].startswith(f"error: {reason}")


def test_a_config_nested_too_deeply_is_refused_in_one_line(run: Any, pair: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    status, _, err = run("--model", pair[0], "--drafter", str(tmp_path))
    assert status == 1 and err.startswith(f"error: {tmp_path / 'config.json'} is not JSON") and err.count("\n") == 1


def test_a_closed_stdout_is_no_reason_for_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["generate", "--max-tokens", "2", "--verbose", "F"])
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as ended:
        run_module("mlx_redrafter.cli.generate")
    assert ended.value.code == 0
