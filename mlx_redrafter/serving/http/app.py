"""The HTTP application: access checks, routes, request bodies, and errors in each API's format."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import partial
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import RedrafterError
from ..api_errors import CONTEXT_EXCEEDED, ApiError, GenerationFailed, Json
from ..formats.anthropic_messages import CountTokens, Messages
from ..formats.completion import Completion, Service, SubmittedAnswer, make_prompt
from ..formats.openai_completions import ChatCompletions, Completions
from ..formats.openai_responses import Responses
from ..formats.schemas import parse_body
from ..server_args import ServerArgs

APIS: dict[str, type[Completion[Any]]] = {
    "/v1/chat/completions": ChatCompletions,
    "/v1/completions": Completions,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
    "/v1/messages/count_tokens": CountTokens,
}
"""Path -> API class; each path is also served without /v1."""

PATHS = (*APIS, "/v1/models", "/health", "/metrics")

LOOPBACK_HOST = re.compile(
    r"(localhost|127\.0\.0\.1|\[::1\]|host\.(docker|containers)\.internal)(:\d*)?", re.IGNORECASE
)
"""Host headers that always mean this machine, seen from itself or from a container: no one can
register a name under .internal. starlette's `TrustedHostMiddleware` answers others in plain text,
which the APIs' clients cannot parse."""

LOCAL_ORIGIN = re.compile(
    r"https?://(localhost|127\.0\.0\.1|\[::1\]|0\.0\.0\.0)(:\d+)?"
    r"|(app|file|tauri|vscode-file|vscode-webview)://.*"
)
"""Origins of pages of this machine and of apps, as in Ollama. "null" is not one: any site can open
such a frame.
"""

BODY_SECONDS = 60.0
"""How long to wait for the next part of a request's body."""

MAX_BODY_BYTES = 1 << 26
"""Bytes of a body, decompressed: a few could otherwise fill the memory."""

PROGRESS_SECONDS = 3.0
"""Interval of keep-alives in a silent stream. Clients and proxies abort silent streams: some after
60 seconds, and some even if they receive comments."""


def make_app(
    service: Service, page: Callable[[HttpRequest], Awaitable[Response]] | None = None
) -> Starlette:
    """The application; `page` handles GET / if it is given."""
    routes = [
        Route(path.removeprefix(prefix), partial(answer_request, service, api), methods=["POST"])
        for path, api in APIS.items()
        for prefix in ("", "/v1")
    ]
    routes += [
        Route(f"{prefix}/models{name}", partial(list_models, service))
        for prefix in ("/v1", "")
        for name in ("", "/{name:path}")
    ]
    routes.append(Route("/health", partial(show_health, service)))
    routes.append(Route("/metrics", partial(show_metrics, service)))
    if page is not None:
        routes.append(Route("/", page))
    origins = service.args.allowed_origins
    if "*" in origins:
        logging.warning(
            "Any web page that is open on this machine may use the server: --allowed-origins is *"
        )
    middleware = [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_origin_regex=None if origins else LOCAL_ORIGIN.pattern,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,
        ),
        Middleware(guard, service=service, known_paths={route.path for route in routes}),
        # The application's own handler of Exception would run outside the middleware above.
        Middleware(ExceptionMiddleware, handlers={Exception: handle_error}),
    ]
    handlers: Any = {HTTPException: handle_error}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


async def show_health(service: Service, request: HttpRequest) -> Response:
    """Whether the worker lives, and what it does."""
    worker = service.worker
    health = {
        "status": "ok" if worker.is_alive else "unavailable",
        "model": service.model_name,
        "drafter": service.drafter_name,
        "running": len(worker.scheduler.running),
        "queue": worker.n_queued,
        "mode": worker.scheduler.mode,
    }
    return JSONResponse(health, 200 if worker.is_alive else 503)


async def show_metrics(service: Service, request: HttpRequest) -> Response:
    """The metrics in Prometheus' text format."""
    metrics = generate_latest(service.worker.metrics.registry)
    return Response(metrics, media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def list_models(service: Service, request: HttpRequest) -> Response:
    """The names of the model, or one of them."""
    name = request.path_params.get("name")
    if name:
        service.check_model(name)
        return JSONResponse(describe_served_name(service, name))
    names = service.names
    models = {
        "object": "list",
        "data": [describe_served_name(service, name) for name in names],
        "first_id": names[0],
        "last_id": names[-1],
        "has_more": False,
    }
    return JSONResponse(models)


def describe_served_name(service: Service, name: str) -> Json:
    """A model with the fields of both OpenAI and Anthropic."""
    length = service.worker.context_length
    limit = service.args.options.max_tokens
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "mlx_redrafter",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "lifecycle": "active",
        "capabilities": None,
        "max_tokens": length if limit == -1 else limit,
        **dict.fromkeys(("context_length", "max_model_len", "max_input_tokens"), length),
    }


async def answer_request(
    service: Service, api: type[Completion[Any]], request: HttpRequest
) -> Response:
    """The reply to a request of an API."""
    body = parse_body(api.body_type, await read_body(request))
    service.check_model(body.model)
    completion = api(service, body)
    loop = asyncio.get_running_loop()
    try:
        prompt = await loop.run_in_executor(service.prompt_thread, make_prompt, completion)
        if api is CountTokens:
            return JSONResponse({"input_tokens": len(prompt.tokens)})
        answer = SubmittedAnswer(completion, prompt)
    except RedrafterError as error:
        is_full = isinstance(error, ApiError) and error.code == CONTEXT_EXCEEDED
        if is_full and body.stream and isinstance(completion, Responses):
            # As OpenAI's API: Codex compacts after this event, not after a 400.
            events = map(format_event, completion.refuse_in_stream(error))
            return StreamingResponse(events, media_type="text/event-stream")
        name, space, rest = str(error).partition(" ")
        error.args = (body.get_sent_name(name) + space + rest,)
        raise
    if body.stream:
        return EventStream(completion, answer)
    with run_task(cancel_on_disconnect(request, answer)), closing(answer):
        async for _ in completion.render_events(answer):
            pass
        return JSONResponse(completion.reply)


async def read_body(request: HttpRequest) -> bytes:
    """The body of a request; ends the connection of a client that stops sending it.

    What is beyond `MAX_BODY_BYTES` is read, so that the client sees the reply, but not kept.
    """
    body = bytearray()
    size = 0
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", "gzip", "x-gzip", "deflate"):
        message = f"the Content-Encoding must be gzip, deflate or identity, got {coding:.50}"
        raise ApiError(message, 415, headers={"Accept-Encoding": "gzip, deflate"})
    stream = request.stream()
    try:
        while part := await asyncio.wait_for(anext(stream), BODY_SECONDS):
            size += len(part)
            if size <= MAX_BODY_BYTES:
                body += part
    except TimeoutError:
        raise ApiError(
            f"expected the whole body, got {size} bytes", 408, headers={"Connection": "close"}
        ) from None

    if size > MAX_BODY_BYTES:
        raise ApiError(f"the body has more than {MAX_BODY_BYTES} bytes", 413, "request_too_large")
    return bytes(body) if coding == "identity" else decompress(bytes(body), coding)


def decompress(data: bytes, coding: str) -> bytes:
    """A compressed body, up to `MAX_BODY_BYTES`."""
    decoder = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # gzip or zlib, as the data begins
    try:
        body = decoder.decompress(data, MAX_BODY_BYTES)
    except zlib.error:
        raise ApiError(f"the body is not compressed with {coding}") from None
    if decoder.unconsumed_tail:
        raise ApiError(f"the body has more than {MAX_BODY_BYTES} bytes", 413, "request_too_large")
    if not decoder.eof:
        raise ApiError(f"the body's {coding} data is incomplete")
    return body


@contextmanager
def run_task(coroutine: Coroutine[Any, Any, None]) -> Iterator[None]:
    """Runs a coroutine as a task, and cancels it after the block."""
    task = asyncio.create_task(coroutine)
    try:
        yield
    finally:
        task.cancel()


async def cancel_on_disconnect(request: HttpRequest, answer: SubmittedAnswer) -> None:
    """Cancels an answer when the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    answer.close()


def format_event(data: Json) -> str:
    """Formats a server-sent event, named after the data's `type` if it has one."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n"


class EventStream(StreamingResponse):
    """A streamed reply.

    It sends and logs prefill progress while no event is sent, and always closes the answer.
    """

    def __init__(self, completion: Completion[Any], answer: SubmittedAnswer) -> None:
        self._completion = completion
        self._answer = answer
        self._is_silent = True
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter for nginx
        super().__init__(self._render(), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends events until the last one, or until the client disconnects."""
        with run_task(self._keep_alive(send)), closing(self._answer):
            await super().__call__(scope, receive, send)

    async def _render(self) -> AsyncIterator[str]:
        try:
            async for event in self._completion.render_events(self._answer):
                self._is_silent = False
                yield format_event(event)
        except GenerationFailed as error:
            yield format_event(self._completion.describe_failure(error))
        if self._completion.last_line:
            yield self._completion.last_line

    async def _keep_alive(self, send: Send) -> None:
        while True:
            self._is_silent = True
            await asyncio.sleep(PROGRESS_SECONDS)
            if not self._is_silent:
                continue
            progress = self._answer.progress
            if not self._answer.n_tokens:
                logging.info("Prompt processing progress: %s", progress)  # as mlx-lm's server
            event = format_event(self._completion.make_empty_event(self._answer))
            text = f": keepalive {progress}\n\n{event}"
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def handle_error(request: HttpRequest, error: Exception) -> Response:
    """The reply to a failed request, in the format of its API."""
    if isinstance(error, HTTPException):
        message = error.detail
        if error.status_code == 404:
            path = request.url.path
            nearest = get_close_matches(path, PATHS, n=1, cutoff=0)[0]
            message = f"{path:.100} is not served here; the nearest path is {nearest}"
        error = ApiError(message, error.status_code, headers=error.headers)
    elif isinstance(error, RecursionError):
        error = ApiError("the body is nested too deeply")
    elif not isinstance(error, RedrafterError | ClientDisconnect):
        logging.error("Request failed", exc_info=error)
        error = ApiError("the server failed; see its log", 500)
    elif not isinstance(error, ApiError):
        error = ApiError(str(error))
    api = APIS.get(f"/v1{request.url.path.removeprefix('/v1')}", ChatCompletions)
    return JSONResponse(api.describe_error(error), error.status, error.headers)


def guard(app: ASGIApp, service: Service, known_paths: set[str]) -> ASGIApp:
    """Middleware that checks headers before the body is read, and counts replies.

    Paths other than `known_paths` share one label in the metrics.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]

        async def count_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                label = path if path in known_paths else "other"
                service.worker.metrics.requests.labels(label, str(message["status"])).inc()
            await send(message)

        reply = app
        try:
            headers = Headers(scope=scope)
            check_headers(headers, service.args, needs_key=path not in ("/health", "/"))
        except ApiError as error:
            reply = await handle_error(HttpRequest(scope), error)
        await reply(scope, receive, count_and_send)

    return answer


def check_headers(headers: Headers, args: ServerArgs, *, needs_key: bool) -> None:
    """Checks Origin, Host and key."""
    host = headers.get("host", "")
    origin = headers.get("origin")
    allowed = args.allowed_origins
    is_own_page = origin in (f"http://{host}", f"https://{host}")  # a proxy may add TLS
    is_local = not allowed and LOCAL_ORIGIN.fullmatch(origin or "")
    # Without CORS headers a page could still send requests.
    if origin is not None and not (is_own_page or is_local or origin in allowed or "*" in allowed):
        expected = "an Origin of this machine or --allowed-origins"
        raise ApiError(f"expected {expected}, got {origin!r:.100}", 403)
    if args.api_key is None:
        if not LOOPBACK_HOST.fullmatch(host):  # DNS rebinding: a page's own name may resolve here
            raise ApiError(
                "without --api-key the Host must be localhost, 127.0.0.1, [::1] or "
                f"host.docker.internal, got {host!r:.100}",
                403,
            )
    elif needs_key:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        # Headers are decoded as Latin-1, and `compare_digest` takes bytes or ASCII strings only.
        if not hmac.compare_digest(key.strip().encode("latin-1", "replace"), args.api_key.encode()):
            raise ApiError(
                "expected the header Authorization: Bearer KEY with this server's key",
                401,
                headers={"WWW-Authenticate": "Bearer"},
            )
