"""The chat in a terminal and in a pipe says what a session says, and Ctrl-C costs an answer, not the conversation."""

from __future__ import annotations

import argparse
import functools
import io
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Self

import pytest
from mlx_lm.chat import setup_arg_parser
from sessions import make_session as toy_session

from mlx_redrafter import Session, load_demo
from mlx_redrafter.cli import chat as talk
from mlx_redrafter.cli.main import run_module
from mlx_redrafter.cli.screen import TINT, UNTINT, Screen
from mlx_redrafter.engine import decode as loop
from mlx_redrafter.generate import GenerationResponse

FIXED = ["--draft-depth", "3"]
"""A plan that is not measured first."""

PROMPT = "\u203a"
BAR = r"\rprompt:[^\r\n]*\r *\r"
"""Of a prompt that took more than a second, which it may on a busy machine."""

SECONDS = 60.0
CTRL_C, CTRL_D = "\x03", "\x04"

# A process is interrupted by a terminal only if that one controls it.
IN_TERMINAL = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); "  # ignored where the tests run in the background
    "os.execv(sys.executable, [sys.executable, '-m', 'mlx_redrafter.chat', *sys.argv[1:]])"
)


class Terminal:
    """A chat in a terminal of its own.

    Args:
        flags: of the chat.
        environment: more variables, or None for those to be left out.
    """

    def __init__(self, *flags: str, **environment: str | None) -> None:
        self._master, slave = os.openpty()
        wanted = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": None, "FORCE_COLOR": None, **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, *flags],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={name: value for name, value in wanted.items() if value is not None},
        )
        os.close(slave)
        self._seen = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def until(self, pattern: str) -> str:
        """What is shown up to and with the first match of a pattern, newlines as a program writes them."""
        end = time.monotonic() + SECONDS
        while (found := re.search(pattern, self._seen)) is None:
            assert self._more(end), f"waited for {pattern!r} behind {self._seen[-500:]!r}"
        text, self._seen = self._seen[: found.end()], self._seen[found.end() :]
        return text

    def press_until(self, key: str, pattern: str) -> str:
        """What is shown up to a match, for a key that is pressed again while it is not heard.

        readline hears of a signal that came between the prompt and the wait for a key at the next key only.
        """
        end = time.monotonic() + SECONDS
        while (found := re.search(pattern, self._seen)) is None:
            assert time.monotonic() < end, f"waited for {pattern!r} behind {self._seen[-500:]!r}"
            self.type(key)
            again = time.monotonic() + 2.0
            while re.search(pattern, self._seen) is None and self._more(again):
                pass
        text, self._seen = self._seen[: found.end()], self._seen[found.end() :]
        return text

    def type(self, text: str) -> None:
        """Presses keys."""
        os.write(self._master, text.encode())

    def ask(self, text: str) -> str:
        """Types a line at the prompt; what stands between it and the counts: an answer."""
        self.until(PROMPT)
        self.type(text + "\n")
        self.until(re.escape(text) + "\n\n")
        return self.answer()

    def answer(self) -> str:
        """What is shown up to the line of counts."""
        return re.sub(COUNTS + "$", "", self.until(COUNTS))

    def ended(self) -> tuple[int, str]:
        """(exit status, what was shown last)."""
        end = time.monotonic() + SECONDS
        while self._more(end):
            pass
        return self.process.wait(SECONDS), self._seen

    def _more(self, end: float) -> bool:
        """Reads on; False where there is no more, or not in time."""
        if not select.select([self._master], [], [], max(0.0, end - time.monotonic()))[0]:
            return False
        try:
            piece = os.read(self._master, 4096).decode(errors="replace")
        except OSError:  # how Linux says that the other side is closed
            return False
        self._seen = re.sub(BAR, "", self._seen + piece.replace("\r\n", "\n"))
        return bool(piece)


COUNTS = r"\n  (\x1b\[[0-9;]*m)*(?P<count>\d+) tokens · "


@functools.cache
def demo() -> tuple[Any, Any, Any]:
    """The packaged pair."""
    return load_demo()


def demo_session(**options: Any) -> Session:
    """What the chat holds, by default."""
    return Session(*demo(), **({"seed": 0, "draft_depth": 3} | options))


def tinted(responses: list[GenerationResponse]) -> str:
    """As a terminal shows them."""
    return "".join(f"{TINT}{each.text}{UNTINT}" if each.from_draft and each.text else each.text for each in responses)


def test_turns_in_a_terminal_are_those_of_a_session_and_accepted_tokens_are_tinted() -> None:
    with Terminal(*FIXED, "-m", "30", "--show-accepted") as terminal:
        shown = [terminal.ask("def main("), terminal.ask("class Stack:")]
        rounds = terminal.until(PROMPT)
        terminal.type(CTRL_D)
        status, last = terminal.ended()
    expected = demo_session(max_tokens=30)
    for text, prompt in zip(shown, ("def main(", "class Stack:"), strict=True):
        responses = list(expected.stream(prompt))
        assert text == tinted(responses)
        assert 0 < sum(each.from_draft for each in responses) < len(responses), "both kinds were there to be told apart"
    assert f"{responses[-1].tokens_per_round:.2f} tokens per round" in rounds and "tok/s" in rounds
    assert status == 0 and "bye" in last


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation_and_ends_it_at_the_prompt() -> None:
    with Terminal(*FIXED, "-m", "-1", "--show-accepted", NO_COLOR="1") as terminal:
        terminal.until(PROMPT)
        terminal.type("def main(\n")
        terminal.until(r"def main\(\n\n")
        first = terminal.until(r"(?s).{20}")
        terminal.type(CTRL_C)
        first += terminal.until(COUNTS)
        terminal.until("stopped.*the conversation goes on")
        terminal.until(PROMPT)
        terminal.type("class Stack:\n")
        terminal.until("class Stack:\n\n")
        second = terminal.until(r"(?s).{60}")
        terminal.type(CTRL_C)
        terminal.until(COUNTS)
        terminal.until(PROMPT)
        last = terminal.press_until(CTRL_C, "bye")
        status, rest = terminal.ended()
    found = re.search(COUNTS, first)
    assert found is not None and TINT not in first + second
    count = int(found["count"])
    talk = demo_session(max_tokens=-1)
    answer = talk.send("def main(", on_token=lambda response: response.generation_tokens == count and talk.cancel())
    assert len(answer.tokens) == count and re.sub(r"\^C", "", first[: found.start()]) == answer.text
    text = ""
    for response in talk.stream("class Stack:"):
        text += response.text
        if len(text) >= 60:
            break
    assert text.startswith(second[:60])
    assert status == 130 and "Traceback" not in last + rest


def test_ctrl_c_twice_in_an_answer_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    session, before = toy_session(max_tokens=-1), signal.getsignal(signal.SIGINT)
    screen = Screen(argparse.Namespace(show_accepted=False), [])
    with pytest.raises(KeyboardInterrupt):
        monkeypatch.setattr(session, "cancel", lambda: True)  # so that it is still at it when the second one comes
        monkeypatch.setattr(screen, "stream_token", lambda *shown: os.kill(os.getpid(), signal.SIGINT))
        talk.answer(session, screen, [{"role": "user", "content": "hello"}])
    assert signal.getsignal(signal.SIGINT) is before and session.messages


def test_ctrl_c_before_the_turn_has_begun_does_not_count_as_the_first_of_two() -> None:
    session, said = toy_session(max_tokens=40), 0
    with talk.stoppable(session):
        os.kill(os.getpid(), signal.SIGINT)
        for said, _ in enumerate(session.stream("hello"), 1):
            if said == 3:
                os.kill(os.getpid(), signal.SIGINT)
    assert said == 3 and session.messages


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """(standard input, flags) -> (exit status, stdout, stderr), without a terminal."""

    def call(stdin: bytes | None, *flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["chat", *flags])
        monkeypatch.setattr(sys, "stdin", None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        with pytest.raises(SystemExit) as ended:
            run_module("mlx_redrafter.cli.chat")
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    handler = signal.getsignal(signal.SIGINT)
    yield call
    assert signal.getsignal(signal.SIGINT) is handler, "Ctrl-C means what it meant"


def test_in_a_pipe_it_reads_to_the_end_and_writes_no_escapes(chat: Any) -> None:
    status, out, _ = chat(b"def main(\n\nclass Stack:", *FIXED, "-m", "9", "--show-accepted")
    talk = demo_session(max_tokens=9)
    texts = [talk.send(text).text for text in ("def main(", "class Stack:")]
    assert status == 0 and "\x1b" not in out and out.endswith("bye\n")
    assert out.startswith(texts[0] + "\n  9 tokens · ") and f"\n{texts[1]}\n  9 tokens · " in out


def test_r_forgets_and_h_helps_and_q_ends(chat: Any) -> None:
    _, out, _ = chat(b"def main(\nr\ndef main(\nh\nq\nclass Stack:", *FIXED, "-m", "9")
    text = demo_session(max_tokens=9).send("def main(").text
    assert out.count(f"{text}\n  9 tokens") == 2 and out.count("9 tokens ·") == 2
    assert "reset context cleared" in out and "commands    q exit" in out and out.endswith("bye\n")


def test_with_and_without_the_drafter_it_says_the_same(chat: Any) -> None:
    sampled = ("-m", "12", "--temp", "0.8", "--seed", "4")
    outs = [chat(b"def main(\nclass A:\n", *sampled, *more)[1] for more in (FIXED, ["--no-drafter"])]
    told = [re.sub(r"\n  .* (tok/s|drafted).*", "", out) for out in outs]
    assert told[0] == told[1] and "tokens per round" in outs[0] and "tokens per round" not in outs[1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--temp", "-1"], "temp must be at least 0, got -1.0"),
        (["--max-tokens", "0"], "max_tokens must not be 0"),
        (["--adapter-path", "x"], "--adapter-path needs --model"),
        (["--model", "/nowhere/at/all"], "no such directory"),
        (["--draft-depth", "0"], "draft_depth must be from 1 to 256, got 0"),
        (["--max-kv-size", "3", "--model", "/nowhere/at/all"], "max_kv_size must be at least 8, got 3"),
        (["--kv-bits", "5.5"], "argument --kv-bits: invalid int value: '5.5'"),
        (["--plan", "maybe"], "argument --plan: invalid choice: 'maybe'"),
    ],
)
def test_flags_that_cannot_be_are_said_in_a_line(chat: Any, flags: list[str], said: str) -> None:
    status, out, err = chat(b"", *flags)
    errors = [line for line in err.splitlines() if "error: " in line]
    assert status in (1, 2) and out == "" and len(errors) == 1 and said in errors[0]


def test_a_message_that_is_no_text_ends_a_pipe_and_nothing_ends_without_input(chat: Any) -> None:
    status, out, err = chat(b"\xff\n", *FIXED)
    assert (status, out) == (1, "") and err.endswith("error: the message is not UTF-8\n")
    assert chat(None, *FIXED)[:2] == (0, "bye\n")


def test_in_a_terminal_a_refused_turn_leaves_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(argparse.Namespace(show_accepted=False), [])
    screen.interactive = True
    session = toy_session()
    talk.answer(session, screen, [{"role": "user", "content": "\ud800"}])
    assert "error the message is not UTF-8" in capsys.readouterr().out and session.messages == []
    talk.answer(session, screen, [{"role": "user", "content": "hello"}])
    assert "tokens · " in capsys.readouterr().out and len(session.messages) == 2


def test_the_system_prompt_is_said_once() -> None:
    session, args = toy_session(), argparse.Namespace(system_prompt="be brief")
    for text in ("hello", "why"):
        session.send(talk.asked(args, session, text))
    assert [each["role"] for each in session.messages] == ["system", *["user", "assistant"] * 2]


def test_arguments_of_the_template_come_from_a_flag(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def made(*pair: Any, **options: Any) -> Session:
        seen.append(options["chat_template_config"])
        return Session(*pair, **options)

    monkeypatch.setattr(talk, "Session", made)
    assert chat(b"", "--chat-template-config", '{"enable_thinking": false}')[0] == 0
    assert seen == [{"enable_thinking": False}]
    status, _, err = chat(b"", "--chat-template-config", "[]")
    assert status == 1 and "--chat-template-config must be a JSON object, got []" in err


def test_every_flag_of_mlx_lms_chat_is_there_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["chat"])
    args, theirs = vars(talk.read_flags()), vars(setup_arg_parser().parse_args([]))
    assert {name: args[name] for name in theirs} == theirs | {"model": None}


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["chat"])
    monkeypatch.setattr(talk.mx.distributed, "init", lambda: SimpleNamespace(size=lambda: 2))
    with pytest.raises(talk.RedrafterError, match="chat runs in one process, got 2"):
        talk.read_flags()


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_want_of_memory_ends_a_turn_in_a_terminal_and_the_chat_in_a_pipe(
    chat: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session, real, fails = toy_session(), loop.prefill, [True]

    def prefill(*of: Any, **more: Any) -> Any:
        if fails[0]:
            raise error("[malloc] Unable to allocate 8 bytes.")
        return real(*of, **more)

    monkeypatch.setattr(loop, "prefill", prefill)
    screen = Screen(argparse.Namespace(show_accepted=False), [])
    screen.interactive = True
    talk.answer(session, screen, [{"role": "user", "content": "hello"}])
    assert "error [malloc] Unable to allocate 8 bytes." in capsys.readouterr().out and session.messages == []
    fails[0] = False
    talk.answer(session, screen, [{"role": "user", "content": "hello"}])
    assert "tokens · " in capsys.readouterr().out and len(session.messages) == 2
    fails[0] = True
    status, _, err = chat(b"def main(\n", *FIXED)
    assert status == 1 and err.splitlines()[-1] == "error: [malloc] Unable to allocate 8 bytes."
