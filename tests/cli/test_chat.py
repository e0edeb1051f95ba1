"""Chat in a terminal and in a pipe prints the session's answers.

Ctrl-C stops the answer, not the chat.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import subprocess
import sys
from codecs import getincrementaldecoder
from typing import Any
from unittest.mock import Mock

import pytest
from mlx_lm.chat import setup_arg_parser

from helpers.sessions import make_session
from mlx_redrafter import Session, load_demo
from mlx_redrafter.cli import chat
from mlx_redrafter.cli.chat import COLORS, DEFAULT_COLOR, Screen
from mlx_redrafter.engine.decode import Decoder
from mlx_redrafter.generation import GenerationResponse

FIXED = ["--draft-depth", "3"]
"""A plan that needs no measurement."""

PROMPT = "\u203a"
BAR = r"\rprompt:[^\r\n]*\r *\r"
"""The progress bar of a prompt that takes more than a second, as on a busy machine."""

COUNTS = r"\n  (\x1b\[[0-9;]*m)*\d+ tokens · "

Run = Any


class Terminal:
    """A chat process in a pseudo-terminal."""

    def __init__(self, *flags: str) -> None:
        self.master, slave = os.openpty()
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("NO_COLOR", "FORCE_COLOR")
        }
        command = [sys.executable, "-m", "mlx_redrafter.chat", *flags]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        self.process = subprocess.Popen(
            command, **streams, env=environment | {"TERM": "xterm-256color"}
        )
        os.close(slave)
        self._seen = ""
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")

    def read_until(self, pattern: str) -> str:
        """Reads up to the end of the first match, with newlines as the program wrote them."""
        while (found := re.search(pattern, self._seen)) is None:
            ready, _, _ = select.select([self.master], [], [], 60)
            assert ready, f"waited for {pattern!r} after {self._seen[-500:]!r}"
            # The bytes may end within a character.
            piece = self._decoder.decode(os.read(self.master, 4096))
            self._seen = re.sub(BAR, "", self._seen + piece.replace("\r\n", "\n"))
        text = self._seen[: found.end()]
        self._seen = self._seen[found.end() :]
        return text

    def ask(self, text: str) -> str:
        """Types a line at the prompt.

        Returns the answer: the text between that line and the token counts.
        """
        self.read_until(PROMPT)
        os.write(self.master, f"{text}\n".encode())
        self.read_until(re.escape(text) + "\n\n")
        return re.sub(COUNTS + "$", "", self.read_until(COUNTS))


def demo_session(**options: Any) -> Session:
    """The session that chat opens by default."""
    return Session(*load_demo(), **({"seed": 0, "draft_depth": 3} | options))


def tint(each: GenerationResponse) -> str:
    if each.draft_source is None or not each.text:
        return each.text
    return COLORS[each.draft_source] + each.text + DEFAULT_COLOR


def test_a_terminal_tints_accepted_tokens() -> None:
    terminal = Terminal(*FIXED, "-m", "30", "--show-accepted")
    try:
        shown = [terminal.ask("def main("), terminal.ask("class Stack:")]
        rounds = terminal.read_until(PROMPT)
        os.write(terminal.master, b"\x04")
        terminal.read_until(r"\n(\x1b\[[0-9;]*m)*bye")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.process.kill()
        os.close(terminal.master)
    expected = demo_session(max_tokens=30)
    for text, prompt in zip(shown, ("def main(", "class Stack:"), strict=True):
        responses = list(expected.stream(prompt))
        assert text == "".join(map(tint, responses))
        assert 0 < sum(each.from_draft for each in responses) < len(responses)
    assert f"{responses[-1].tokens_per_round:.2f} tokens per round" in rounds
    assert "tok/s" in rounds


def make_screen(args: argparse.Namespace | None = None, *, interactive: bool = False) -> Screen:
    screen = Screen(args or argparse.Namespace(show_accepted=False))
    screen.is_interactive = interactive
    return screen


def test_ctrl_c_stops_an_answer_then_the_chat(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = make_session(max_tokens=-1)
    screen = make_screen()
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(screen, "show_token", lambda *shown: os.kill(os.getpid(), signal.SIGINT))
    chat.answer(session, screen, "hello")
    assert "the conversation continues" in capsys.readouterr().out
    assert len(session.messages) == 2
    # The answer continues until the second Ctrl-C.
    monkeypatch.setattr(session, "cancel", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        chat.answer(session, screen, "hello")
    assert signal.getsignal(signal.SIGINT) is before
    assert len(session.messages) == 4, "Ctrl-C has its previous handler"
    monkeypatch.setattr(Screen, "prompt", Mock(side_effect=KeyboardInterrupt))
    status, out, err = run("chat", *FIXED)
    assert status == 130
    assert out.endswith("bye\n")
    assert "Traceback" not in err


@pytest.mark.parametrize("leave", ["/quit", "/exit", "/bye", "q"])
def test_ctrl_c_at_the_prompt_says_how_to_leave(
    leave: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = Mock(side_effect=[KeyboardInterrupt, KeyboardInterrupt, "/help", "/reste", leave])
    monkeypatch.setattr(Screen, "prompt", typed)
    monkeypatch.setattr(chat, "Screen", lambda args: make_screen(args, interactive=True))
    monkeypatch.setattr("sys.argv", ["chat", *FIXED])
    assert chat.run() == 0
    assert typed.call_count == 5
    shown = capsys.readouterr().out
    assert shown.count("type /quit or press Ctrl-D") == 2
    assert shown.endswith("bye\n")
    assert shown.count("q /quit /exit /bye Ctrl-D") == 2, "in the header and after /help"
    assert "unknown command /reste" in shown
    assert " tokens" not in shown.split("/reste")[1]


def test_commands_work_in_a_pipe(run: Run) -> None:
    stdin = b"def main(\n\nclass Stack:\n/reset\nh\ndef main(\n/quit \nclass Stack:"
    status, out, _ = run("chat", *FIXED, "-m", "9", "--show-accepted", stdin=stdin)
    session = demo_session(max_tokens=9)
    texts = [session.send(text).text for text in ("def main(", "class Stack:")]
    assert status == 0
    assert "\x1b" not in out
    assert out.endswith("bye\n")
    assert out.startswith(texts[0] + "\n  9 tokens · ")
    assert f"\n{texts[1]}\n  9 tokens · " in out
    assert out.count(f"{texts[0]}\n  9 tokens") == 2
    assert out.count("9 tokens ·") == 3
    assert "reset context cleared" in out
    assert "q /quit /exit /bye" in out


def test_an_error_ends_the_turn_or_the_pipe(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("[malloc] Unable to allocate 8 bytes.")

    session = make_session()
    screen = make_screen(interactive=True)
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "decode", fail)
        chat.answer(session, screen, "hello")
        assert "error [malloc] Unable to allocate 8 bytes." in capsys.readouterr().out
        assert session.messages == []
        status, _, err = run("chat", *FIXED, stdin=b"def main(\n")
        assert status == 1
        assert err.splitlines()[-1] == "error: [malloc] Unable to allocate 8 bytes."
    for text in ("hello", "why"):
        chat.answer(session, screen, text, "be brief")
    assert capsys.readouterr().out.count("tokens · ") == 2
    assert [each["role"] for each in session.messages] == ["system", *["user", "assistant"] * 2]


def test_flags_match_mlx_lms_chat() -> None:
    ours = vars(chat.make_parser().parse_args([]))
    theirs = vars(setup_arg_parser().parse_args([]))
    assert {name: ours[name] for name in theirs} == theirs | {"model": None}
