"""`stdio`: sessions for another program, over lines of JSON; docs/stdio.schema.json has every request and event.

Requests come on stdin, events go to stdout. The main thread loads and answers in the order of the requests; another one
reads stdin, so that a request can be cancelled while it is answered. When stdin ends, the requests before are finished;
when the parent process is gone, this one ends.
"""

from __future__ import annotations

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
from ..errors import RedrafterError, one_line
from ..options import CACHE_OPTIONS, OPTION_FLAGS, add_options
from ..session.session import Session
from .arguments import Parser, add_model_flags, add_template_flag, load_models, read_options, read_template_config
from .main import PARENT

PROTOCOL = 1
"""Of the schema; another number means other lines."""

MAIN = "main"
"""The session that is open from the beginning."""

FIELDS: dict[str, tuple[str, ...]] = {
    "send": ("session", "text", "messages", "options"),
    "cancel": (),
    "open": ("session",),
    "reset": ("session",),
    "fork": ("session", "as"),
    "save": ("session", "path"),
    "load": ("session", "path"),
    "close": ("session",),
    "ping": (),
}
"""What a request of each type may have besides its type and its id; "as" and "path" it must have."""

OPTIONS = {flag.name: flag.kind for flag in OPTION_FLAGS if flag.name not in CACHE_OPTIONS} | {
    "stop": list, "tools": list, "chat_template_config": dict,
}  # fmt: skip
"""The options of a turn; the session refuses values that do not fit."""

USAGE = (
    "prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps", "rounds", "drafted", "accepted",
    "tokens_per_round", "peak_memory", "seed",
)  # fmt: skip
"""The fields of the last response that `done` has."""

Request = dict[str, Any]


class RequestError(Exception):
    """A line is not a request; `id` is the request's, if it has one."""

    def __init__(self, message: str, name: str | None = None) -> None:
        super().__init__(message)
        self.id = name


def run() -> int:
    """Loads as `sys.argv` says, and answers until stdin ends."""
    args = make_parser().parse_args()
    settings = read_options(args) | {"chat_template_config": read_template_config(args), "stop": list(args.stop)}
    settings |= {"memory_budget": args.memory_budget, "when_full": args.when_full}
    threading.Thread(target=exit_with_parent, daemon=True).start()
    stdout = take_stdout()
    models = load_models(args, verbose=False)

    def make_session(path: str | None) -> Session:
        return Session(*models, **settings) if path is None else Session.load(path, *models, **settings)

    server, status = SessionServer(stdout, make_session), 0
    names = {"model": args.model or "demo", "drafter": None if models[2] is None else args.drafter or "demo"}
    try:
        server.write("ready", None, protocol=PROTOCOL, version=__version__, **names)
        threading.Thread(target=server.read_requests, args=(sys.stdin.buffer,), daemon=True).start()
        server.answer_requests()
    except OSError:
        pass  # nobody reads any more
    except KeyboardInterrupt:
        status = 130
    sys.stderr.flush()
    os._exit(status)  # Python's own exit would wait for the thread that reads, and abort


def make_parser() -> Parser:
    """The parser."""
    description = "Sessions for another program: lines of JSON on stdin and stdout."
    parser = Parser(prog="mlx_redrafter.stdio", description=description)
    add_model_flags(parser, "the packaged one with the packaged demo, or plain decoding")
    add_template_flag(parser)
    add = parser.add_argument
    add("--stop", nargs="+", default=(), help="strings that end an answer")
    add("--memory-budget", type=int, help="bytes that a session's cache may take; the free memory if not given")
    add("--when-full", choices=("refuse", "trim"), default="refuse", help="a turn without room (default: %(default)s)")
    add_options(parser)
    return parser


def exit_with_parent() -> None:
    """Ends the process when its parent is gone; in a thread of its own."""
    while os.getppid() == PARENT:
        time.sleep(0.5)
    os._exit(0)


def take_stdout() -> IO[bytes]:
    """The real stdout, for events alone; what anything else prints goes to stderr from now on."""
    sys.stdout.flush()
    for number in (0, 1):
        os.set_blocking(number, True)  # else "nothing yet" and "no room yet" would be taken for the end
    events = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return events


class SessionServer:
    """Reads requests and answers them.

    Args:
        events: where events are written.
        make_session: makes a session; given a path, one that was saved.
    """

    def __init__(self, events: IO[bytes], make_session: Callable[[str | None], Session]) -> None:
        self._events, self._make_session = events, make_session
        self._queue: SimpleQueue[Request | None] = SimpleQueue()
        self._pending: dict[str, bool] = {}  # ids that wait or are answered, and whether each was cancelled
        self._lock = threading.Lock()
        self._sessions = {MAIN: make_session(None)}

    def write(self, kind: str, name: str | None, **fields: Any) -> None:
        """Writes an event, from any thread.

        Raises:
            OSError: nobody reads any more.
        """
        line = json.dumps({"type": kind, "id": name, **fields}).encode() + b"\n"
        with self._lock:
            self._events.write(line)
            self._events.flush()

    def read_requests(self, stream: IO[bytes]) -> None:
        """Queues requests until there are no more; a cancellation and a ping take effect at once."""
        try:
            for line in stream:
                try:
                    if line.strip():
                        self._take(parse_request(line))
                except RequestError as error:
                    self.write("error", error.id, message=str(error))
        except OSError:
            pass  # nobody reads any more: the next event finds that, too
        finally:
            self._queue.put(None)

    def _take(self, request: Request) -> None:
        name, kind = request["id"], request["type"]
        if kind == "ping":
            self.write("ok", name)
            return
        with self._lock:
            is_pending = name in self._pending
            if kind != "cancel" and is_pending:
                raise RequestError("a request of this id is waiting or being answered", name)
            if kind == "cancel" and not is_pending:
                raise RequestError("nothing of this id is waiting or being answered", name)
            self._pending[name] = kind == "cancel"
        if kind != "cancel":
            self._queue.put(request)

    def answer_requests(self) -> None:
        """Answers requests in their order until there are no more.

        Raises:
            OSError: nobody reads any more.
        """
        while (request := self._queue.get()) is not None:
            try:
                kind, fields = self._answer(request)
            except OSError:
                raise
            except (RedrafterError, ValueError, TypeError) as error:
                kind, fields = "error", {"message": one_line(error)}
            except Exception as error:  # as when memory runs out: the conversation is what it was
                kind, fields = "error", {"message": f"{type(error).__name__}: {one_line(error)}"}
            with self._lock:  # who has read the last event may use its id again
                del self._pending[request["id"]]
            self.write(kind, request["id"], **fields)

    def _answer(self, request: Request) -> tuple[str, dict[str, Any]]:
        """Does what a request asks for; type and fields of its last event."""
        kind, name, sessions = request["type"], request.get("session", MAIN), self._sessions
        new = name if kind == "open" else request.get("as")
        if new in sessions:
            raise RedrafterError(f"there is a session {new!r} already")
        if kind in ("open", "load"):
            sessions[name] = self._make_session(request.get("path"))
        elif name not in sessions:
            raise RedrafterError(f"there is no session {name!r}, only {', '.join(map(repr, sessions)) or 'none'}")
        elif kind == "send":
            return "done", self._send(sessions[name], request)
        elif kind == "reset":
            sessions[name].reset()
        elif kind == "fork":
            sessions[request["as"]] = sessions[name].fork()
        elif kind == "save":
            sessions[name].save(request["path"])
        elif kind == "close":
            del sessions[name]
        return "ok", {}

    def _send(self, session: Session, request: Request) -> dict[str, Any]:
        """A turn, an event for every token; the fields of `done`."""
        name, text, last = request["id"], "", None

        def cancel_if_asked(*progress: int) -> None:
            if self._pending[name]:
                session.cancel()

        if not self._pending[name]:
            options = request.get("options", {}) | {"prompt_progress_callback": cancel_if_asked}
            given = request["text"] if "text" in request else request["messages"]
            with closing(session.stream(given, **options)) as responses:
                for last in responses:
                    text += last.text
                    self.write("token", name, text=last.text, token=last.token, from_draft=last.from_draft)
                    cancel_if_asked()
        usage = {} if last is None else {field: getattr(last, field) for field in USAGE}
        reason = None if last is None else last.finish_reason
        return {"text": text, "finish_reason": reason or "cancelled", "usage": usage}


def parse_request(line: bytes) -> Request:
    """The request of a line.

    Raises:
        RequestError: it is not a request.
    """
    try:
        request = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON: {one_line(error)}") from error
    if not isinstance(request, dict):
        raise RequestError(f"a request must be an object, got {type(request).__name__}")
    name, kind = request.get("id"), request.get("type")
    if not isinstance(name, str) or not name:
        raise RequestError(f"id must be a string that is not empty, got {name!r:.100}")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise RequestError(f"type must be one of {', '.join(FIELDS)}, got {kind!r:.100}", name)
    for field, value in request.items():
        if field not in ("id", "type", *FIELDS[kind]):
            raise RequestError(f"{kind} has no {field!r:.100}", name)
        expected = {"messages": (list, "an array"), "options": (dict, "an object")}.get(field, (str, "a string"))
        if not isinstance(value, expected[0]):
            raise RequestError(f"{field} must be {expected[1]}, got {value!r:.100}", name)
    if kind == "send" and ("text" in request) is ("messages" in request):
        raise RequestError("send has either a text or messages", name)
    for field in ("as", "path"):
        if field in FIELDS[kind] and field not in request:
            raise RequestError(f"{kind} needs {field!r}", name)
    for option, value in request.get("options", {}).items():
        if option not in OPTIONS:
            raise RequestError(f"{option!r:.100} is not an option of a turn: {', '.join(sorted(OPTIONS))}", name)
        if OPTIONS[option] is int and isinstance(value, float) and value.is_integer():
            request["options"][option] = int(value)  # 3.0 is an integer to JSON
    return request
