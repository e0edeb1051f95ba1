"""`stdio`: sessions for another program, over JSON lines.

docs/stdio.schema.json defines all requests and events. Requests are read from stdin, events are
written to stdout. The main thread loads the models and answers requests in order. Another thread
reads stdin, so that a request can be cancelled while it runs. At the end of stdin the remaining
requests are finished. When the parent process ends, this process exits.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from queue import SimpleQueue
from typing import IO, Any

from .. import __version__
from ..decoding.options import OPTION_FLAGS
from ..decoding.responses import GenerationResponse
from ..engine.stats import USAGE_FIELDS
from ..errors import RedrafterError, join_lines
from ..files import parse_object
from ..loading.named_models import load_models
from ..session.session import Session
from .arguments import get_flags, make_text_parser, read_model_args, read_options

PROTOCOL = 1
"""The schema version."""

FIELDS: dict[str, set[str]] = {
    "send": {"session", "text", "messages", "options"},
    "fork": {"session", "as"},
    **{kind: {"session", "path"} for kind in ("save", "load")},
    **{kind: {"session"} for kind in ("open", "reset", "close")},
    **{kind: set() for kind in ("cancel", "ping")},
}
"""Type of a request -> its fields besides type and id; "as" and "path" are required."""

REQUEST_FIELD_TYPES = {"messages": (list, "an array"), "options": (dict, "an object")}
"""Field -> its type, and the type in words; all others are strings."""

OPTIONS = {flag.name for flag in OPTION_FLAGS} | {"stop", "tools", "chat_template_config"}
"""The options of a turn; the session refuses those of the cache."""

USAGE = (
    "prompt_tokens",
    "prompt_tps",
    "generation_tokens",
    "generation_tps",
    *USAGE_FIELDS,
    "peak_memory",
    "seed",
)
"""The fields of the last response that are copied into `done`."""

ClientRequest = dict[str, Any]


def run() -> int:
    """Loads the models given in `sys.argv`, and answers requests until stdin ends."""
    parser = make_text_parser(
        "stdio", "Run sessions for another program, over JSON lines on stdin and stdout."
    )
    add = parser.add_argument
    add("--stop", nargs="+", default=(), help="strings that end an answer")
    add(
        "--memory-budget",
        type=int,
        help="maximum bytes of a session's cache; the free memory if not given",
    )
    add(
        "--when-full",
        choices=("refuse", "trim"),
        default="refuse",
        help="refuse a turn that does not fit, or trim the oldest messages (default: %(default)s)",
    )
    args = parser.parse_args()
    of_sessions = ("stop", "chat_template_config", "memory_budget", "when_full")
    settings = read_options(args) | get_flags(args, of_sessions)
    threading.Thread(target=exit_with_parent, args=(os.getppid(),), daemon=True).start()
    stdout = sys.stdout.buffer
    with redirect_stdout(sys.stderr):  # stdout is for events only
        *models, drafter_name = load_models(read_model_args(args))

        def make_session(path: str | None) -> Session:
            if path is None:
                return Session(*models, **settings)
            return Session.load(path, *models, **settings)

        server = SessionServer(stdout, make_session)
        names = {"model": args.model or "demo", "drafter": drafter_name}
        server.write("ready", None, protocol=PROTOCOL, version=__version__, **names)
        # A copy, as Python cannot exit while a thread reads sys.stdin.
        stdin = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
        threading.Thread(target=server.read_requests, args=(stdin,), daemon=True).start()
        server.answer_requests()
    return 0


def exit_with_parent(parent: int) -> None:
    """Exits when the parent process has ended; runs in its own thread."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


class SessionServer:
    """Reads requests and answers them.

    Args:
        events: the stream for events.
        make_session: makes a session, or loads one from a path.
    """

    def __init__(self, events: IO[bytes], make_session: Callable[[str | None], Session]) -> None:
        self._events = events
        self._make_session = make_session
        self._queue: SimpleQueue[ClientRequest | None] = SimpleQueue()
        # id of an unfinished request -> whether it was cancelled
        self._pending: dict[str, bool] = {}
        self._lock = threading.Lock()
        self._sessions = {"main": make_session(None)}

    def write(self, kind: str, name: str | None, **fields: Any) -> None:
        """Writes an event, from any thread."""
        line = json.dumps({"type": kind, "id": name, **fields}).encode() + b"\n"
        with self._lock:
            self._events.write(line)
            self._events.flush()

    def read_requests(self, stream: IO[bytes]) -> None:
        """Queues requests until the stream ends; cancel and ping are handled immediately."""
        try:
            for line in filter(bytes.strip, stream):
                name = None
                try:
                    request = parse_line(line)
                    name = request["id"]
                    check_request(request)
                    self._take(request)
                except RedrafterError as error:
                    self.write("error", name, message=str(error))
        except OSError:
            pass  # the client has closed the stream; the next event raises in the main thread
        finally:
            self._queue.put(None)

    def _take(self, request: ClientRequest) -> None:
        name = request["id"]
        kind = request["type"]
        if kind == "ping":
            self.write("ok", name)
            return
        with self._lock:
            if (kind == "cancel") is not (name in self._pending):
                found = "no request" if kind == "cancel" else "a request"
                raise RedrafterError(f"{found} with this id is waiting or running")
            self._pending[name] = kind == "cancel"
        if kind != "cancel":
            self._queue.put(request)

    def answer_requests(self) -> None:
        """Answers requests in order until stdin has ended."""
        while (request := self._queue.get()) is not None:
            try:
                kind, fields = self._answer(request)
            except BrokenPipeError:
                raise
            except Exception as error:  # for instance out of memory; the conversation is unchanged
                kind = "error"
                fields = {"message": join_lines(error)}
            with self._lock:  # after the last event the client may reuse its id
                del self._pending[request["id"]]
            self.write(kind, request["id"], **fields)

    def _answer(self, request: ClientRequest) -> tuple[str, dict[str, Any]]:
        """Answers a request; returns the type and fields of its last event."""
        kind = request["type"]
        name = request.get("session", "main")
        sessions = self._sessions
        new = name if kind == "open" else request.get("as")
        if new in sessions:
            raise RedrafterError(f"session {_show(new)} already exists")
        if kind in ("open", "load"):
            sessions[name] = self._make_session(request.get("path"))
        elif name not in sessions:
            known = ", ".join(map(_show, sessions)) or "none"
            raise RedrafterError(f"there is no session {_show(name)}, only {known}")
        elif kind == "send":
            return "done", self._send(sessions[name], request)
        elif kind == "reset":
            sessions[name].reset()
        elif kind == "fork":
            sessions[request["as"]] = sessions[name].fork()
        elif kind == "save":
            sessions[name].save(request["path"])
        else:
            del sessions[name]
        return "ok", {}

    def _send(self, session: Session, request: ClientRequest) -> dict[str, Any]:
        """Runs a turn, writing an event for every token; returns the fields of `done`."""
        name = request["id"]

        def cancel_if_asked(*progress: int) -> None:
            if self._pending[name]:
                session.cancel()

        def on_token(response: GenerationResponse) -> None:
            source = {"from_draft": response.from_draft, "draft_source": response.draft_source}
            self.write("token", name, text=response.text, token=response.token, **source)
            cancel_if_asked()

        given = request["text"] if "text" in request else request["messages"]
        options = request.get("options", {})
        answer = session.send(
            given, on_token=on_token, prompt_progress_callback=cancel_if_asked, **options
        )
        usage = {}
        if answer.last is not None:
            usage = {field: getattr(answer.last, field) for field in USAGE}
        return {"text": answer.text, "finish_reason": answer.finish_reason, "usage": usage}


def parse_line(line: bytes) -> ClientRequest:
    """Parses a line as a request."""
    request = parse_object(line, "the request")
    name = request.get("id")
    if not isinstance(name, str) or not name:
        raise RedrafterError(f"id must be a string that is not empty, got {_show(name)}")
    return request


def check_request(request: ClientRequest) -> None:
    """Checks a request's type, the names and types of its fields, and the names of its options.

    The session checks the values.
    """
    kind = request.get("type")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise RedrafterError(f"type must be one of {', '.join(FIELDS)}, got {_show(kind)}")
    names = request.keys() - {"type", "id"}
    for name in names - FIELDS[kind]:
        raise RedrafterError(f"{kind} has no field {_show(name)}")
    for name in FIELDS[kind] & {"as", "path"} - names:
        raise RedrafterError(f"{kind} needs {_show(name)}")
    for name in names:
        expected, words = REQUEST_FIELD_TYPES.get(name, (str, "a string"))
        if not isinstance(request[name], expected):
            raise RedrafterError(f"{name} must be {words}, got {_show(request[name])}")
    for name in request.get("options", {}).keys() - OPTIONS:
        raise RedrafterError(f"options has no field {_show(name)}")
    if kind == "send" and ("text" in request) is ("messages" in request):
        raise RedrafterError("send needs either text or messages")


def _show(value: Any) -> str:
    """A value as JSON, cut if it is long."""
    return f"{json.dumps(value):.100}"
