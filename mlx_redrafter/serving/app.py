"""The HTTP application: who may ask, routes, bodies, and errors in the shape that each client expects."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import RedrafterError
from .answer import Answer, Service, choose_status
from .anthropic_messages import CountTokens, Messages
from .command import LOOPBACK
from .openai_completions import ChatCompletions, Completions
from .openai_responses import Responses
from .schemas import ApiError, parse_body

INTERFACES: dict[str, type[Answer[Any]]] = {
    "/v1/chat/completions": ChatCompletions,
    "/chat/completions": ChatCompletions,
    "/v1/completions": Completions,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
    "/v1/messages/count_tokens": CountTokens,
}
PING_SECONDS = 10.0
"""How often a stream has a comment, for clients and proxies that do not wait forever for a first token."""


def make_app(service: Service, page: Callable[[Request], Awaitable[Response]] | None = None) -> Starlette:
    """The application.

    Args:
        page: answers GET /, the page of a race.
    """

    async def show_health(request: Request) -> Response:
        """What runs, what waits, which drafter there is; 503 where nothing would be answered."""
        engine = service.engine
        status = "ok" if engine.alive else "unavailable"
        counts = {"running": engine.running, "queue": engine.queued, "mode": engine.mode}
        names = {"model": service.model_name, "drafter": service.drafter_name}
        return JSONResponse({"status": status} | names | counts, 200 if engine.alive else 503)

    async def show_metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type=service.metrics.content_type)

    async def list_models(request: Request) -> Response:
        name = service.model_name
        model = {"id": name, "object": "model", "created": service.created, "owned_by": "mlx_redrafter"}
        if "name" not in request.path_params:
            return JSONResponse({"object": "list", "data": [model]})
        service.check_model(request.path_params["name"])
        return JSONResponse(model)

    routes = [Route(path, make_endpoint(service, kind), methods=["POST"]) for path, kind in INTERFACES.items()]
    routes += [
        Route("/health", show_health),
        Route("/metrics", show_metrics),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", list_models),
        *([Route("/", page)] if page else []),
    ]
    open_paths = {"/health", *(["/"] if page else [])}
    origins = service.args.allowed_origins
    middleware = [
        Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]),
        Middleware(Guard, service=service, open_paths=open_paths, known_paths={route.path for route in routes}),
        # As an `exception_handlers` of the application that of Exception would be outside of the middleware above.
        Middleware(ExceptionMiddleware, handlers={Exception: handle_error}),
    ]
    return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: handle_error})


def make_endpoint(service: Service, kind: type[Answer[Any]]) -> Callable[[Request], Awaitable[Response]]:
    """What answers the requests of an interface."""

    async def answer_request(request: Request) -> Response:
        body = parse_body(kind.body_type, await read_body(request, service.args.max_request_bytes))
        service.check_model(body.model)
        answer = kind(service, body)
        await asyncio.get_running_loop().run_in_executor(service.prompt_thread, answer.prepare)
        if kind is CountTokens:
            return JSONResponse({"input_tokens": len(answer.prompt)})
        answer.submit("" if request.client is None else request.client.host)
        if body.stream:
            return EventStream(answer)
        watching = asyncio.create_task(close_when_gone(request, answer))
        try:
            return JSONResponse(await answer.collect())
        finally:
            watching.cancel()
            answer.close()

    return answer_request


async def read_body(request: Request, most: int) -> bytes:
    """The request's body. One that is too long is read to its end, or the client might not see the reply.

    Raises:
        ApiError: it has more than `most` bytes.
    """
    body, size = bytearray(), 0
    async for piece in request.stream():
        size += len(piece)
        if size <= most:
            body += piece
    if size > most:
        raise ApiError(f"the body must have at most {most} bytes, got {size}", 413)
    return bytes(body)


async def close_when_gone(request: Request, answer: Answer[Any]) -> None:
    """Ends an answer when its client goes."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    answer.close()


class EventStream(StreamingResponse):
    """A reply as server-sent events; the answer is closed however it ends."""

    def __init__(self, answer: Answer[Any]) -> None:
        self._answer = answer
        super().__init__(answer.stream(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until the last one, or until the client goes."""
        pinging = asyncio.create_task(self._ping(send))
        try:
            await super().__call__(scope, receive, send)
        finally:
            pinging.cancel()
            self._answer.close()

    async def _ping(self, send: Send) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            await send({"type": "http.response.body", "body": b": keepalive\n\n", "more_body": True})


async def handle_error(request: Request, error: Exception) -> Response:
    """The reply to a request that failed with this error."""
    headers = getattr(error, "headers", None) or {}
    if isinstance(error, HTTPException):
        expected = f"expected one of {', '.join(INTERFACES)}" if error.status_code == 404 else error.detail
        error = ApiError(expected, error.status_code)
    elif isinstance(error, ClientDisconnect):
        error = ApiError("the body is not complete")  # nobody reads it
    elif not isinstance(error, ApiError):
        message = str(error)
        if not isinstance(error, RedrafterError):
            logging.error("A request has failed", exc_info=error)
            message = "the server failed; see its log"
        error = ApiError(message, choose_status(error))
    reply = make_error(request.url.path, error)
    reply.headers.update(headers)
    return reply


def make_error(path: str, error: ApiError) -> Response:
    """The reply that tells the client of an error, in the shape of the interface that it asked."""
    kind = INTERFACES.get(path, ChatCompletions)
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(kind.describe_error(error.status, str(error)), error.status, headers)


class Guard:
    """Middleware that refuses requests before they are read, and counts all replies.

    Args:
        app: what answers the others.
        open_paths: need no key.
        known_paths: have a label of their own in the metrics, which is never taken from what a client sends.
    """

    def __init__(self, app: ASGIApp, service: Service, open_paths: set[str], known_paths: set[str]) -> None:
        self._app, self._service, self._open_paths, self._known_paths = app, service, open_paths, known_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or passes it on."""
        path, app = scope["path"], self._app

        async def count_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                label = path if path in self._known_paths else "other"
                self._service.metrics.requests.labels(label, str(message["status"])).inc()
            await send(message)

        try:
            self._check(Headers(scope=scope), path)
        except ApiError as error:
            app = make_error(path, error)
        await app(scope, receive, count_and_send)

    def _check(self, headers: Headers, path: str) -> None:
        args, host, origin = self._service.args, headers.get("host", ""), headers.get("origin")
        is_own_page = origin in (f"http://{host}", f"https://{host}")  # a proxy may add TLS
        if not (origin is None or is_own_page or {"*", origin} & set(args.allowed_origins)):
            raise ApiError(f"pages of the Origin {origin!r:.100} are not among --allowed-origins", 403)
        if args.api_key is None:
            if not is_loopback(host):  # a web page may have pointed its own name at this machine
                expected = "without --api-key the Host must be localhost, 127.0.0.1 or [::1]"
                raise ApiError(f"{expected}, got {host!r:.100}", 403)
        elif path not in self._open_paths:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            given = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
            # Headers are read as Latin-1, and compare_digest takes no other strings than ASCII.
            if not hmac.compare_digest(given.encode("latin-1", "replace"), args.api_key.encode()):
                raise ApiError("expected the header Authorization: Bearer KEY with this server's key", 401)


def is_loopback(host: str) -> bool:
    """Whether a Host header names this machine as no other can.

    Not starlette's `TrustedHostMiddleware`: it refuses with 400 and plain text, which clients of the APIs cannot read.
    """
    try:
        return urlsplit(f"//{host}").hostname in LOOPBACK
    except ValueError:
        return False
