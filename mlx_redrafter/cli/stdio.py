"""Sessions over lines of JSON: a program holds this one as a child process, and needs no Python of its own.

Requests come on stdin, events go to stdout, an object a line; docs/stdio.schema.json has every one of them. The main
thread loads, reads prompts and decodes, in the order of the requests; another one reads stdin, so that a request can be
cancelled while it is answered. When stdin ends, what was asked is finished; when the parent is gone, nothing is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from queue import SimpleQueue
from typing import IO, Any

from .. import __version__
from ..checkpoints import load_pair
from ..errors import RedrafterError, one_line
from ..flags import OPTIONS, add_options, add_pair, add_template, template_config
from ..session.session import Session
from . import parent
from .protocol import PROTOCOL, USAGE, Refused, Request, requests

WATCHED, PATIENCE = 0.5, 3.0
"""Seconds between two looks at the parent, and from its end to ours."""

MAIN = "main"
"""The session that is there from the beginning."""


class Events:
    """Where events go, whole lines from any thread.

    Args:
        stream: binary.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._lock = stream, threading.Lock()

    def tell(self, kind: str, name: str | None, **fields: Any) -> None:
        """One event.

        Raises:
            OSError: nobody reads any more.
        """
        line = json.dumps({"type": kind, "id": name, **fields}).encode() + b"\n"
        with self._lock:
            self._stream.write(line)
            self._stream.flush()


class Desk:
    """Takes requests and answers them.

    Args:
        events: where answers go.
        make: makes a session; given a path, one that was saved.
        gone: set once nobody wants answers any more.
    """

    def __init__(self, events: Events, make: Callable[[str | None], Session], gone: threading.Event) -> None:
        self._events, self._make = events, make
        self._queue: SimpleQueue[Request | None] = SimpleQueue()
        self._waiting: set[str] = set()
        self._cancelled: set[str] = set()
        self._lock = threading.Lock()
        self.gone = gone
        self.sessions: dict[str, Session] = {}

    def listen(self, stream: IO[bytes]) -> None:
        """Reads requests until there are no more; in a thread of its own."""
        try:
            for request in requests(stream):
                self.take(request)
        except OSError:
            self.gone.set()
        finally:
            self._queue.put(None)

    def take(self, request: Request | Refused) -> None:
        """Puts a request in the queue, or does at once what cannot wait.

        Raises:
            OSError: nobody reads any more.
        """
        if isinstance(request, Refused):
            self._events.tell("error", request.id, message=str(request))
            return
        name, kind = request["id"], request["type"]
        with self._lock:
            known = name in self._waiting
            if kind == "cancel" and known:
                self._cancelled.add(name)
            elif not known and kind not in ("cancel", "ping"):
                self._waiting.add(name)
        if kind == "ping":
            self._events.tell("ok", name)
        elif kind == "cancel":
            if not known:
                self._events.tell("error", name, message="nothing of this id is waiting or being answered")
        elif known:
            self._events.tell("error", name, message="a request of this id is waiting or being answered")
        else:
            self._queue.put(request)

    def work(self) -> None:
        """Answers requests in their order until there are no more."""
        while (request := self._queue.get()) is not None and not self.gone.is_set():
            name = request["id"]
            try:
                last = self.answer(request)
            except (RedrafterError, ValueError, TypeError) as error:
                last = {"kind": "error", "message": one_line(error)}
            except OSError:
                raise  # nobody reads any more
            except Exception as error:  # as when memory runs out: the conversation is what it was
                last = {"kind": "error", "message": f"{type(error).__name__}: {one_line(error)}"}
            with self._lock:  # whoever has read the last event may use its id again
                self._waiting.discard(name)
                self._cancelled.discard(name)
            self._events.tell(name=name, **last)

    def answer(self, request: Request) -> dict[str, Any]:
        """Does what one request asks for; its last event.

        Raises:
            RedrafterError: it cannot be done.
            OSError: nobody reads any more.
        """
        kind, place = request["type"], request.get("session", MAIN)
        new = place if kind in ("open", "load") else request.get("as")
        if new in self.sessions and kind != "load":
            raise RedrafterError(f"there is a session {new!r} already")
        if kind in ("open", "load"):
            self.sessions[place] = self._make(request.get("path"))
        elif place not in self.sessions:
            raise RedrafterError(f"there is no session {place!r}, only {', '.join(map(repr, self.sessions)) or 'none'}")
        elif kind == "send":
            return self.say(self.sessions[place], request)
        elif kind == "reset":
            self.sessions[place].reset()
        elif kind == "fork":
            self.sessions[request["as"]] = self.sessions[place].fork()
        elif kind == "save":
            self.sessions[place].save(request["path"])
        elif kind == "close":
            del self.sessions[place]
        return {"kind": "ok"}

    def say(self, session: Session, request: Request) -> dict[str, Any]:
        """A turn, token by token; its last event.

        Raises:
            RedrafterError: see `Session.stream`.
            OSError: nobody reads any more.
        """
        name, text, last = request["id"], "", None

        def look(done: int = 0, total: int = 0) -> None:
            """Passes on that an answer is no longer wanted."""
            if self.gone.is_set() or name in self._cancelled:
                session.cancel()

        if name in self._cancelled:
            return {"kind": "done", "text": "", "finish_reason": "cancelled", "usage": {}}
        turn = request.get("options", {}) | {"prompt_progress_callback": look}
        with closing(
            session.stream(request["text"] if "text" in request else request["messages"], **turn)
        ) as responses:
            for last in responses:
                text += last.text
                self._events.tell("token", name, text=last.text, token=last.token, from_draft=last.from_draft)
                look()
        reason = None if last is None else last.finish_reason
        fields = {} if last is None else {field: getattr(last, field) for field in USAGE}
        return {"kind": "done", "text": text, "finish_reason": reason or "cancelled", "usage": fields}


def watch(gone: threading.Event) -> None:
    """Ends the process when its parent is gone; in a thread of its own."""
    while os.getppid() == parent.noted():
        time.sleep(WATCHED)
    gone.set()
    time.sleep(PATIENCE)
    os._exit(0)  # what is still at work would speak to nobody


def own_stdout() -> IO[bytes]:
    """The real stdout for events alone; what anything else prints goes to stderr from now on."""
    sys.stdout.flush()
    for number in (0, 1):
        os.set_blocking(number, True)  # else "nothing yet" and "no room yet" would be taken for the end
    events = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return events


def make_parser() -> argparse.ArgumentParser:
    """The parser of `python -m mlx_redrafter.stdio`."""
    parser = argparse.ArgumentParser(
        prog="mlx_redrafter.stdio", description="Sessions for another program: lines of JSON on stdin and stdout."
    )
    add_pair(parser, "the packaged one with the packaged demo, or plain decoding")
    parser.add_argument("--stop", nargs="+", default=(), help="strings that end an answer")
    parser.add_argument("--memory-budget", type=int, help="bytes a session's cache may take; then what the machine has")
    parser.add_argument("--when-full", choices=("refuse", "trim"), default="refuse", help="a turn without room")
    add_template(parser)
    add_options(parser)
    return parser


def run() -> int:
    """Reads the flags, loads, and answers until stdin ends."""
    args = make_parser().parse_args()
    gone = threading.Event()
    threading.Thread(target=watch, args=(gone,), daemon=True).start()
    events = Events(own_stdout())
    model, tokenizer, drafter = load_pair(args, args.model, args.drafter)
    settings: dict[str, Any] = {option: getattr(args, option) for option, _, _ in OPTIONS}
    settings |= {"stop": list(args.stop), "memory_budget": args.memory_budget, "when_full": args.when_full}
    settings["chat_template_config"] = template_config(args)

    def make(path: str | None) -> Session:
        """A session of these flags."""
        if path is None:
            return Session(model, tokenizer, drafter, **settings)
        return Session.load(path, model, tokenizer, drafter, **settings)

    desk = Desk(events, make, gone)
    desk.sessions[MAIN] = make(None)
    told = None if drafter is None else args.drafter or "demo"
    try:
        events.tell("ready", None, protocol=PROTOCOL, version=__version__, model=args.model or "demo", drafter=told)
        threading.Thread(target=desk.listen, args=(sys.stdin.buffer,), daemon=True).start()
        desk.work()
        status = 0
    except OSError:
        status = 0  # nobody reads any more
    except KeyboardInterrupt:
        status = 130
    sys.stderr.flush()
    os._exit(status)  # Python's own end would wait for the thread that reads, and abort
