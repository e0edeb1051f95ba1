"""The HTTP application: routes, bodies, replies, and errors in the shape that each client expects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..errors import RedrafterError
from .answer import Answer, Service, choose_status
from .anthropic_messages import CountTokens, Messages
from .guard import Guard
from .interface import Interface, to_event
from .openai_completions import ChatCompletions, Completions
from .openai_responses import Responses
from .schemas import ApiError, parse_body
from .types import GenerationFailed

INTERFACES: dict[str, type[Interface[Any]]] = {
    "/v1/chat/completions": ChatCompletions,
    "/chat/completions": ChatCompletions,
    "/v1/completions": Completions,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
    "/v1/messages/count_tokens": CountTokens,
}
SILENCE_SECONDS = 60.0  # for a body to come
LINGER_SECONDS = 2.0  # for a client to finish sending what is not read, or it might not see the reply
CLIENT_GONE = 499  # nginx's word; nobody sees it but the metrics


def make_app(service: Service, page: Callable[[Request], Awaitable[Response]] | None = None) -> Starlette:
    """The application.

    Args:
        page: answers GET /, the page of a race.
    """
    args = service.args
    routes = [Route(path, make_endpoint(service, kind), methods=["POST"]) for path, kind in INTERFACES.items()]

    async def show_health(request: Request) -> Response:
        """What runs, what waits, which drafter there is; 503 where nothing would be answered."""
        engine = service.engine
        status = "ok" if engine.alive else "unavailable"
        counts = {"running": engine.running, "queue": engine.queued, "mode": engine.mode}
        names = {"model": service.model_names[0], "drafters": service.drafter_names[:1]}
        return JSONResponse({"status": status} | names | counts, 200 if engine.alive else 503)

    async def show_metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type=service.metrics.content_type)

    async def list_models(request: Request) -> Response:
        name = request.path_params.get("name")
        known = service.model_names[0]
        model = {"id": known, "object": "model", "created": service.created, "owned_by": "mlx_redrafter"}
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        if name not in service.model_names:
            raise ApiError(f"there is no model {name!r:.100} here, expected {known}", 404)
        return JSONResponse(model)

    for path, endpoint in (
        ("/health", show_health),
        ("/metrics", show_metrics),
        ("/v1/models", list_models),
        ("/v1/models/{name:path}", list_models),
        *([("/", page)] if page else []),
    ):
        routes.append(Route(path, endpoint, methods=["GET"]))
    cors = Middleware(CORSMiddleware, allow_origins=args.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    guard = Middleware(
        Guard,
        metrics=service.metrics,
        key=args.api_key,
        allowed_origins=args.allowed_origins,
        open_paths={"/health", *(["/"] if page else [])},
        known_paths={route.path for route in routes},
        refuse=make_error,
    )
    handled: list[Any] = [ApiError, RedrafterError, HTTPException, Exception]
    handlers = dict.fromkeys(handled, handle_error) | {ClientDisconnect: handle_disconnect}
    return Starlette(routes=routes, middleware=[cors, guard], exception_handlers=handlers)


def make_endpoint(service: Service, kind: type[Interface[Any]]) -> Callable[[Request], Awaitable[Response]]:
    """What answers the requests of an interface."""

    async def answer_request(request: Request) -> Response:
        body = parse_body(kind.body_type, await read_body(request, service.args.max_request_bytes))
        service.check_names(body)
        interface = kind(service, body)
        loop = asyncio.get_running_loop()
        prompt = await loop.run_in_executor(service.prompt_thread, interface.prepare)
        if kind is CountTokens:
            return JSONResponse({"input_tokens": len(prompt.ids)})
        client = "" if request.client is None else request.client.host
        answer = Answer(service, body, prompt, client, **interface.options)
        if body.stream:
            return EventStream(interface, answer)
        try:
            return JSONResponse(await while_connected(request, interface.collect(answer)))
        finally:
            answer.close()

    return answer_request


async def read_body(request: Request, most: int) -> bytes:
    """The request's body.

    Raises:
        ApiError: it has more than `most` bytes, or does not come.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(SILENCE_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    break
            else:
                return bytes(body)
    except TimeoutError as error:
        raise ApiError(f"the body did not come in {SILENCE_SECONDS:.0f} s", 408) from error
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            async for _ in request.stream():
                pass
    raise ApiError(f"the body must have at most {most} bytes", 413)


async def while_connected(request: Request, work: Awaitable[Any]) -> Any:
    """What `work` gives; it is cancelled when the client goes.

    Raises:
        ClientDisconnect: the client is gone.
    """

    async def wait_until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(wait_until_gone())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


class EventStream(StreamingResponse):
    """A reply as server-sent events; the answer is closed however it ends."""

    def __init__(self, interface: Interface[Any], answer: Answer) -> None:
        self._interface, self._answer = interface, answer
        super().__init__(self._events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until the last one, or until the client goes."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()

    async def _events(self) -> AsyncIterator[str]:
        try:
            async for event in self._interface.stream(self._answer):
                yield event
        except GenerationFailed as error:
            described = self._interface.describe_error(choose_status(error), str(error))
            yield to_event(described, described.get("type"))


async def handle_error(request: Request, error: Exception) -> Response:
    """The reply to a request that failed with this error."""
    if isinstance(error, HTTPException):
        expected = f"expected one of {', '.join(INTERFACES)}" if error.status_code == 404 else error.detail
        error = ApiError(expected, error.status_code)
    elif not isinstance(error, ApiError):
        message = str(error) if isinstance(error, RedrafterError) else "the server failed; see its log"
        error = ApiError(message, choose_status(error))
    return make_error(request.url.path, error)


async def handle_disconnect(request: Request, error: Exception) -> Response:
    """What nobody reads."""
    return Response(status_code=CLIENT_GONE)


def make_error(path: str, error: ApiError) -> Response:
    """The reply that tells the client of an error, in the shape of the interface that it asked."""
    kind = INTERFACES.get(path, ChatCompletions)
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(kind.describe_error(error.status, str(error)), error.status, headers)
