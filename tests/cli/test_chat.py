"""The chat in a terminal and in a pipe shows what a session answers; Ctrl-C stops an answer, not the conversation."""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import subprocess
import sys
import time
from typing import Any, Self

import pytest
from mlx_lm.chat import setup_arg_parser
from sessions import make_session

from mlx_redrafter import Session, load_demo
from mlx_redrafter.cli import chat
from mlx_redrafter.cli.chat import TINTS, UNTINT, Screen
from mlx_redrafter.generate import GenerationResponse

FIXED = ["--draft-depth", "3"]
"""A plan that needs no measurement."""

PROMPT = "\u203a"
BAR = r"\rprompt:[^\r\n]*\r *\r"
"""Of a prompt that took more than a second, which it may on a busy machine."""

COUNTS = r"\n  (\x1b\[[0-9;]*m)*(?P<count>\d+) tokens · "
SECONDS = 60.0
CTRL_C, CTRL_D = "\x03", "\x04"

# A process is interrupted by a terminal only if that one controls it.
IN_TERMINAL = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); "  # ignored where the tests run in the background
    "os.execv(sys.executable, [sys.executable, '-m', 'mlx_redrafter.chat', *sys.argv[1:]])"
)

Run = Any


class Terminal:
    """A chat with these flags in a terminal of its own, and more variables in its environment."""

    def __init__(self, *flags: str, **environment: str) -> None:
        self._master, slave = os.openpty()
        inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, *flags],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=inherited | {"TERM": "xterm-256color"} | environment,
        )
        os.close(slave)
        self._seen = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def read_until(self, pattern: str, key: str = "") -> str:
        """What is shown up to the end of the first match, newlines as a program writes them.

        A key is pressed, and again every two seconds: readline handles a signal that came just before it waits for a
        key only at the next key.
        """
        end, again = time.monotonic() + SECONDS, 0.0
        while (found := re.search(pattern, self._seen)) is None:
            assert time.monotonic() < end, f"waited for {pattern!r} after {self._seen[-500:]!r}"
            if key and time.monotonic() >= again:
                self.type(key)
                again = time.monotonic() + 2.0
            self._read_more(min(end, again) if key else end)
        text, self._seen = self._seen[: found.end()], self._seen[found.end() :]
        return text

    def type(self, text: str) -> None:
        """Presses keys."""
        os.write(self._master, text.encode())

    def ask(self, text: str) -> str:
        """Types a line at the prompt; what is shown between it and the counts: an answer."""
        self.read_until(PROMPT)
        self.type(text + "\n")
        self.read_until(re.escape(text) + "\n\n")
        return re.sub(COUNTS + "$", "", self.read_until(COUNTS))

    def wait(self) -> tuple[int, str]:
        """(exit status, what was shown last)."""
        end = time.monotonic() + SECONDS
        while self._read_more(end):
            pass
        return self.process.wait(SECONDS), self._seen

    def _read_more(self, end: float) -> bool:
        if not select.select([self._master], [], [], max(0.0, end - time.monotonic()))[0]:
            return False
        try:
            piece = os.read(self._master, 4096).decode(errors="replace")
        except OSError:  # how Linux says that the other side is closed
            return False
        self._seen = re.sub(BAR, "", self._seen + piece.replace("\r\n", "\n"))
        return bool(piece)


def demo_session(**options: Any) -> Session:
    """The chat's, by default."""
    return Session(*load_demo(), **({"seed": 0, "draft_depth": 3} | options))


def tint(each: GenerationResponse) -> str:
    return f"{TINTS[each.draft_source]}{each.text}{UNTINT}" if each.draft_source and each.text else each.text


def test_a_terminal_tints_accepted_tokens() -> None:
    with Terminal(*FIXED, "-m", "30", "--show-accepted") as terminal:
        shown = [terminal.ask("def main("), terminal.ask("class Stack:")]
        rounds = terminal.read_until(PROMPT)
        terminal.type(CTRL_D)
        status, last = terminal.wait()
    expected = demo_session(max_tokens=30)
    for text, prompt in zip(shown, ("def main(", "class Stack:"), strict=True):
        responses = list(expected.stream(prompt))
        assert text == "".join(map(tint, responses))
        assert 0 < sum(each.from_draft for each in responses) < len(responses)
    assert f"{responses[-1].tokens_per_round:.2f} tokens per round" in rounds and "tok/s" in rounds
    assert status == 0 and re.search(r"\n(\x1b\[[0-9;]*m)*bye(\x1b\[[0-9;]*m)*\n$", last), "on a line of its own"


def test_ctrl_c_stops_an_answer_or_the_chat() -> None:
    with Terminal(*FIXED, "-m", "-1", "--show-accepted", NO_COLOR="1") as terminal:
        terminal.read_until(PROMPT)
        terminal.type("def main(\n")
        terminal.read_until(r"def main\(\n\n")
        first = terminal.read_until(r"(?s).{20}")
        terminal.type(CTRL_C)
        first += terminal.read_until(COUNTS)
        terminal.read_until("stopped.*the conversation goes on")
        terminal.read_until(PROMPT)
        last = terminal.read_until("bye", CTRL_C)
        status, rest = terminal.wait()
    found = re.search(COUNTS, first)
    assert found is not None and UNTINT not in first
    count = int(found["count"])
    session = demo_session(max_tokens=-1)
    answer = session.send("def main(", on_token=lambda each: each.generation_tokens == count and session.cancel())
    assert len(answer.tokens) == count and re.sub(r"\^C", "", first[: found.start()]) == answer.text
    assert status == 130 and "Traceback" not in last + rest and rest == "\n" and last.endswith("\nbye")


def make_screen(*, interactive: bool = False) -> Screen:
    screen = Screen(argparse.Namespace(show_accepted=False))
    screen.interactive = interactive
    return screen


def test_a_second_ctrl_c_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    session, screen, before = make_session(max_tokens=-1), make_screen(), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(session, "cancel", lambda: True)  # so that the answer goes on until the second one
    monkeypatch.setattr(screen, "show_token", lambda *shown: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        chat.answer(session, screen, "hello")
    assert signal.getsignal(signal.SIGINT) is before and session.messages, "Ctrl-C does what it did before"


def test_a_pipe_gets_text_and_answers_commands(run: Run) -> None:
    stdin = b"def main(\n\nclass Stack:\nr\nh\ndef main(\nq\nclass Stack:"
    status, out, _ = run("chat", *FIXED, "-m", "9", "--show-accepted", stdin=stdin)
    session = demo_session(max_tokens=9)
    texts = [session.send(text).text for text in ("def main(", "class Stack:")]
    assert status == 0 and "\x1b" not in out and out.endswith("bye\n")
    assert out.startswith(texts[0] + "\n  9 tokens · ") and f"\n{texts[1]}\n  9 tokens · " in out
    assert out.count(f"{texts[0]}\n  9 tokens") == 2 and out.count("9 tokens ·") == 3
    assert "reset context cleared" in out and "commands    q exit" in out


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--temp", "-1"], "error: temp must be at least 0, got -1.0"),
        (["--plan", "maybe"], "mlx_redrafter.chat: error: argument --plan: invalid choice: 'maybe'"),
    ],
)
def test_wrong_flags_are_refused_in_a_line(run: Run, flags: list[str], reason: str) -> None:
    status, out, err = run("chat", *flags)
    assert status in (1, 2) and out == "" and err.count("\n") == 1 and err.startswith(reason)


def test_an_error_ends_a_turn_or_a_pipe(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("[malloc] Unable to allocate 8 bytes.")

    session, screen = make_session(), make_screen(interactive=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["mlx_redrafter.generate"], "prefill", fail)
        patch.setattr(sys.modules["mlx_redrafter.generate"], "decode", fail)
        chat.answer(session, screen, "hello")
        assert "error [malloc] Unable to allocate 8 bytes." in capsys.readouterr().out and session.messages == []
        status, _, err = run("chat", *FIXED, stdin=b"def main(\n")
        assert status == 1 and err.splitlines()[-1] == "error: [malloc] Unable to allocate 8 bytes."
    for text in ("hello", "why"):
        chat.answer(session, screen, text, "be brief")
    assert capsys.readouterr().out.count("tokens · ") == 2
    assert [each["role"] for each in session.messages] == ["system", *["user", "assistant"] * 2]


def test_flags_are_those_of_mlx_lms_chat() -> None:
    ours, theirs = vars(chat.make_parser().parse_args([])), vars(setup_arg_parser().parse_args([]))
    assert {name: ours[name] for name in theirs} == theirs | {"model": None}
