"""`stdio`: sessions for another program, over lines of JSON; docs/stdio.schema.json has every request and event.

Requests come from stdin, events go to stdout. The main thread loads and answers in the order of the requests; another
one reads stdin, so that a request can be cancelled while it is answered. When stdin ends, the remaining requests are
finished; when the parent process ends, this one does.
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
from ..answer_folder import open_answers
from ..checkpoints import find_drafter_name
from ..engine.stats import USAGE_FIELDS
from ..errors import RedrafterError, one_line
from ..generate import GenerationResponse
from ..session.session import Session
from .arguments import load_models, make_text_parser, read_options

PROTOCOL = 1
"""The version of the schema."""

FIELDS: dict[str, set[str]] = {
    "send": {"session", "text", "messages", "options"},
    "fork": {"session", "as"},
    **{kind: {"session", "path"} for kind in ("save", "load")},
    **{kind: {"session"} for kind in ("open", "reset", "close")},
    **{kind: set() for kind in ("cancel", "ping")},
}
"""The fields of each type of request besides type and id; "as" and "path" are required."""

USAGE = (
    "prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps", *USAGE_FIELDS, "peak_memory", "seed",
)  # fmt: skip
"""The fields of the last response that are copied into `done`."""

Request = dict[str, Any]


def run() -> int:
    """Loads the models in `sys.argv`, and answers until stdin ends; returns the exit status."""
    parser = make_text_parser("stdio", "Sessions for another program: lines of JSON on stdin and stdout.")
    add = parser.add_argument
    add("--stop", nargs="+", default=(), help="strings that end an answer")
    add("--memory-budget", type=int, help="bytes that a session's cache may take; the free memory if not given")
    add("--when-full", choices=("refuse", "trim"), default="refuse", help="a turn without room (default: %(default)s)")
    args = parser.parse_args()
    settings = read_options(args) | {"stop": args.stop, "chat_template_config": args.chat_template_config}
    settings |= {"memory_budget": args.memory_budget, "when_full": args.when_full}
    threading.Thread(target=exit_with_parent, args=(os.getppid(),), daemon=True).start()
    stdout = sys.stdout.buffer
    with redirect_stdout(sys.stderr):  # other prints are no events
        models = load_models(args, verbose=False)
        settings["answers"] = open_answers(args.answers, models[1])

        def make_session(path: str | None) -> Session:
            return Session(*models, **settings) if path is None else Session.load(path, *models, **settings)

        server = SessionServer(stdout, make_session)
        drafter = None if models[2] is None else find_drafter_name(args) or "demo"
        model = args.model or "demo"
        server.write("ready", None, protocol=PROTOCOL, version=__version__, model=model, drafter=drafter)
        # Not sys.stdin, as Python cannot exit while a thread reads from it.
        stdin = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
        threading.Thread(target=server.read_requests, args=(stdin,), daemon=True).start()
        server.answer_requests()
    return 0


def exit_with_parent(parent: int) -> None:
    """Ends the process when its parent has ended; runs in its own thread."""
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
        self._events, self._make_session = events, make_session
        self._queue: SimpleQueue[Request | None] = SimpleQueue()
        self._pending: dict[str, bool] = {}  # ids of unfinished requests, and whether each was cancelled
        self._lock = threading.Lock()
        self._sessions = {"main": make_session(None)}

    def write(self, kind: str, name: str | None, **fields: Any) -> None:
        """Writes an event, from any thread.

        Raises:
            OSError: the reader is gone.
        """
        line = json.dumps({"type": kind, "id": name, **fields}).encode() + b"\n"
        with self._lock:
            self._events.write(line)
            self._events.flush()

    def read_requests(self, stream: IO[bytes]) -> None:
        """Queues requests until the stream ends; cancellations and pings are handled at once."""
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
            pass  # the reader is gone, which the next event will find as well
        finally:
            self._queue.put(None)

    def _take(self, request: Request) -> None:
        name, kind = request["id"], request["type"]
        if kind == "ping":
            self.write("ok", name)
            return
        with self._lock:
            if (kind == "cancel") is not (name in self._pending):
                found = "nothing" if kind == "cancel" else "a request"
                raise RedrafterError(f"{found} of this id is waiting or being answered")
            self._pending[name] = kind == "cancel"
        if kind != "cancel":
            self._queue.put(request)

    def answer_requests(self) -> None:
        """Answers requests in order until there are no more.

        Raises:
            BrokenPipeError: the reader is gone.
        """
        while (request := self._queue.get()) is not None:
            try:
                kind, fields = self._answer(request)
            except BrokenPipeError:
                raise
            except Exception as error:  # for instance out of memory: the conversation is unchanged
                kind, fields = "error", {"message": one_line(error)}
            with self._lock:  # after the last event the client may reuse its id
                del self._pending[request["id"]]
            self.write(kind, request["id"], **fields)

    def _answer(self, request: Request) -> tuple[str, dict[str, Any]]:
        """Answers a request; returns type and fields of its last event."""
        kind, name, sessions = request["type"], request.get("session", "main"), self._sessions
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
        else:
            del sessions[name]
        return "ok", {}

    def _send(self, session: Session, request: Request) -> dict[str, Any]:
        """Runs a turn with an event for every token; returns the fields of `done`."""
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
        answer = session.send(given, on_token=on_token, prompt_progress_callback=cancel_if_asked, **options)
        usage = {} if answer.last is None else {field: getattr(answer.last, field) for field in USAGE}
        return {"text": answer.text, "finish_reason": answer.finish_reason, "usage": usage}


def parse_line(line: bytes) -> Request:
    """The request in a line.

    Raises:
        RedrafterError: it is no JSON object with an id.
    """
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RedrafterError(f"not JSON: {one_line(error)}") from error
    if not isinstance(request, dict) or not isinstance(request.get("id"), str):
        raise RedrafterError(f"expected an object whose id is a string, got {request!r:.100}")
    return request


def check_request(request: Request) -> None:
    """Checks type and field names of a request; the session checks the values.

    Raises:
        RedrafterError: they are not in the schema.
    """
    kind, names = request.get("type"), request.keys() - {"type", "id"}
    if not isinstance(kind, str) or kind not in FIELDS:
        raise RedrafterError(f"type must be one of {', '.join(FIELDS)}, got {kind!r:.100}")
    if unknown := names - FIELDS[kind]:
        raise RedrafterError(f"{kind} has no {unknown.pop()!r:.100}")
    if missing := FIELDS[kind] & {"as", "path"} - names:
        raise RedrafterError(f"{kind} needs {missing.pop()!r}")
    if kind == "send" and ("text" in request) is ("messages" in request):
        raise RedrafterError("send has either a text or messages")
