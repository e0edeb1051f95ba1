"""Chat in a terminal and in a pipe prints the session's answers.

Ctrl-C stops the answer, not the chat.
"""

import argparse
import os
import re
import select
import signal
import subprocess
import sys
from codecs import getincrementaldecoder
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
from mlx_lm.chat import setup_arg_parser

from helpers.sessions import make_session
from mlx_redrafter import Session, load_demo
from mlx_redrafter.cli import chat
from mlx_redrafter.cli.chat import DEFAULT_COLOR, SOURCE_COLORS, Screen
from mlx_redrafter.decoding.responses import GenerationResponse
from mlx_redrafter.engine.decode import Decoder

FIXED = ["--draft-depth", "3"]
"""A plan that needs no measurement."""

PROMPT = "\u203a"
BAR = r"\rprompt:[^\r\n]*\r *\r"
"""The progress bar of a prompt that takes more than a second, as on a busy machine."""

COUNTS = r"\n  (\x1b\[[0-9;]*m)*\d+ tokens · "


class Terminal:
    """A chat process in a pseudo-terminal."""

    def __init__(self, *flags: str, **variables: str):
        self.master, slave = os.openpty()
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("NO_COLOR", "FORCE_COLOR")
        }
        command = [sys.executable, "-m", "mlx_redrafter.chat", *flags]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        environment |= {"TERM": "xterm-256color"} | variables
        self.process = subprocess.Popen(command, **streams, env=environment)
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


@contextmanager
def open_terminal(*flags: str, **variables: str) -> Iterator[Terminal]:
    """A terminal that is closed, with its process, when the context ends."""
    terminal = Terminal(*flags, **variables)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)


def demo_session(**options) -> Session:
    """The session that chat opens by default."""
    return Session(*load_demo(), **({"seed": 0, "draft_depth": 3} | options))


def tint(each: GenerationResponse) -> str:
    if each.draft_source is None or not each.text:
        return each.text
    return SOURCE_COLORS[each.draft_source] + each.text + DEFAULT_COLOR


def test_a_terminal_tints_accepted_tokens():
    with open_terminal(*FIXED, "-m", "30", "--show-accepted") as terminal:
        shown = [terminal.ask("def main("), terminal.ask("class Stack:")]
        rounds = terminal.read_until(PROMPT)
        os.write(terminal.master, b"\x04")
        terminal.read_until(r"\n(\x1b\[[0-9;]*m)*bye")
        assert terminal.process.wait(60) == 0
    expected = demo_session(max_tokens=30)
    for text, prompt in zip(shown, ("def main(", "class Stack:"), strict=True):
        responses = list(expected.stream(prompt))
        assert text == "".join(map(tint, responses))
        assert 0 < sum(each.from_draft for each in responses) < len(responses)
    assert f"{responses[-1].tokens_per_round:.2f} tokens per round" in rounds
    assert "tok/s" in rounds


def test_lines_pasted_together_are_one_turn():
    """An open last line waits for Enter; Ctrl-D typed behind the lines still leaves."""
    answer = demo_session(max_tokens=9).send("class A:\n    x = 1\n    y = 2")
    with open_terminal(*FIXED, "-m", "9", TERM="dumb") as terminal:
        for is_ended in (True, False):
            terminal.read_until("> ")
            os.write(terminal.master, b"class A:\n    x = 1\n    y = 2" + b"\n" * is_ended)
            if not is_ended:
                terminal.read_until("y = 2$")
                os.write(terminal.master, b"\n")
            assert answer.text in terminal.read_until(COUNTS)
            terminal.read_until("\n> ")
            if is_ended:
                os.write(terminal.master, b"/reset\n")
                terminal.read_until("context cleared")

        os.write(terminal.master, b"def f(\n\x04")
        rest = terminal.read_until("\nbye")
    assert rest.count(" tokens · ") == 1, "only the turn after it"


def test_a_dumb_terminal_gets_no_escape_sequences():
    """Nor is a command joined with what follows."""
    with open_terminal(*FIXED, "-m", "9", "--show-accepted", TERM="dumb") as terminal:
        shown = terminal.read_until("> ")
        os.write(terminal.master, b"def main(\n")
        answer = terminal.read_until(COUNTS)
        shown += answer + terminal.read_until("\n> ")
        os.write(terminal.master, b"/reset\n/quit\n")
        rest = terminal.read_until("\nbye")
    assert demo_session(max_tokens=9).send("def main(").text in answer
    assert "context cleared" in rest
    assert "tok/s" not in rest
    assert "\x1b" not in shown + rest


def test_a_terminal_that_is_not_utf_8_shows_what_it_can():
    with open_terminal(*FIXED, "-m", "9", PYTHONIOENCODING="ascii") as terminal:
        header = terminal.read_until("> ")
        os.write(terminal.master, b"def main(\n")
        shown = terminal.read_until("tok/s")
        os.write(terminal.master, b"/quit\n")
        terminal.read_until("bye")
        assert terminal.process.wait(60) == 0
    assert "note: characters that ascii lacks are printed as ?\n" in header
    assert header.replace("\n", "").isascii()
    assert demo_session(max_tokens=9).send("def main(").text in shown


def make_screen(args: argparse.Namespace | None = None, *, interactive: bool = False) -> Screen:
    args = args or argparse.Namespace(show_accepted=False)
    return Screen(args, is_interactive=interactive)


def test_ctrl_c_stops_an_answer_then_the_chat(run, monkeypatch, capsys):
    session = make_session(max_tokens=-1)
    screen = make_screen()
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(screen, "show_token", lambda *shown: os.kill(os.getpid(), signal.SIGINT))
    chat.answer(session, screen, "hello")
    assert "the conversation continues" in capsys.readouterr().err
    assert len(session.messages) == 2
    # The answer continues until the second Ctrl-C.
    monkeypatch.setattr(session, "cancel", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        chat.answer(session, screen, "hello")
    assert signal.getsignal(signal.SIGINT) is before
    assert len(session.messages) == 4, "Ctrl-C has its previous handler"
    monkeypatch.setattr(Screen, "prompt", Mock(side_effect=KeyboardInterrupt))
    status, out, err = run("chat", *FIXED)
    assert (status, out) == (130, "")
    assert err.endswith("bye\n")
    assert "Traceback" not in err


@pytest.mark.parametrize("leave", ["/quit", "/exit", "/bye", "q"])
def test_ctrl_c_at_the_prompt_says_how_to_leave(leave, monkeypatch, capsys):
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


def test_a_pipe_gets_the_answers_and_stderr_the_rest(run):
    stdin = b"def main(\n\nclass Stack:\n/reset\nh\ndef main(\n/quit \nclass Stack:"
    status, out, err = run("chat", *FIXED, "-m", "9", "--show-accepted", stdin=stdin)
    session = demo_session(max_tokens=9)
    texts = [session.send(text).text for text in ("def main(", "class Stack:")]
    assert status == 0
    assert out == f"{texts[0]}\n{texts[1]}\n{texts[0]}\n"
    assert "\x1b" not in err
    assert err.endswith("bye\n")
    assert err.count("9 tokens ·") == 3
    assert err.count(" of them from the context\n") == 3, "lines are not wrapped"
    assert "reset context cleared" in err
    assert "q /quit /exit /bye" in err


def test_an_error_ends_the_turn_or_the_pipe(run, monkeypatch, capsys):
    def fail(*args, **options):
        raise RuntimeError("[malloc] Unable to allocate 8 bytes.")

    session = make_session()
    screen = make_screen(interactive=True)
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "prepare_piece", fail)
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


def test_flags_match_mlx_lms_chat():
    ours = vars(chat.make_parser().parse_args([]))
    theirs = vars(setup_arg_parser().parse_args([]))
    assert {name: ours[name] for name in theirs} == theirs | {"model": None}
