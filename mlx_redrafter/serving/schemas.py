"""What the bodies of requests may hold: the fields of all interfaces, those that are ignored, and those refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

DEFAULT_MODEL = "default_model"
"""mlx-lm's word for the model that the command line names; also for its drafter."""

MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
INT32_MAX = 2**31 - 1  # MLX indexes with 32 bits
LARGEST_LOGIT = 1e18  # of biases and penalties: a product of two is still a float32


class ApiError(Exception):
    """A request that is not answered.

    Args:
        message: what was expected, and what was got.
        status: of HTTP.
        retry_after: seconds after which the client may try again; None if that is of no use.
    """

    def __init__(self, message: str, status: int = 400, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
Length = Annotated[int, Field(ge=1, le=INT32_MAX)]
Share = Annotated[float, Field(ge=0, le=1)]
Logit = Annotated[float, Field(ge=-LARGEST_LOGIT, le=LARGEST_LOGIT)]
StopStrings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=256)]],
    Field(max_length=64),
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
]
Objects = list[dict[str, Any]]


def check_prompt(given: Any) -> Any:
    """A text or token ids, which may also stand alone in a list.

    Raises:
        ValueError: neither of them, or several prompts.
    """
    alone = isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list)
    prompt = given[0] if alone else given
    is_ids = isinstance(prompt, list) and all(type(token) is int and 0 <= token <= INT32_MAX for token in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise ValueError("must be one text, or the token ids of one")
    return prompt


class Body(BaseModel):
    """The fields that say how an answer is sampled: the same for every interface, and mlx-lm's names.

    Attributes:
        ignored: fields that clients often send and that change no answer.
        refused: fields that would change the answer and are not supported, with the values that ask for nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset({"metadata", "service_tier", "num_draft_tokens"})
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: str = DEFAULT_MODEL
    draft_model: str | None = DEFAULT_MODEL
    stream: bool = False
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    min_p: Share | None = None
    xtc_probability: Share = 0.0
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    repetition_penalty: Annotated[float, Field(ge=0, le=LARGEST_LOGIT)] = 0.0
    repetition_context_size: Count = 20
    presence_penalty: Logit = 0.0
    presence_context_size: Count = 20
    frequency_penalty: Logit = 0.0
    frequency_context_size: Count = 20
    logit_bias: dict[Annotated[int, Field(ge=0, le=INT32_MAX, strict=False)], Logit] | None = None
    seed: int | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def asked_tokens(self) -> int | None:
        """The most tokens that the client asks for, if it says."""
        return None

    def stop_strings(self) -> list[str]:
        """The strings that end the answer."""
        return []


class StreamOptions(BaseModel):
    """What a stream of chunks has besides the text."""

    model_config = ConfigDict(extra="ignore", strict=True)
    include_usage: bool = False
    include_drafts: bool = False


class OpenAIBody(Body):
    """What OpenAI's chat and text completions have in common."""

    ignored = Body.ignored | {"user", "store", "prediction", "safety_identifier", "prompt_cache_key"}
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    stop: StopStrings = []
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    top_logprobs: Annotated[int, Field(ge=-1, le=MAX_TOP_LOGPROBS)] = -1
    stream_options: StreamOptions = StreamOptions()
    response_format: dict[str, Any] | None = None

    def asked_tokens(self) -> int | None:
        """`max_completion_tokens`, else its older name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def stop_strings(self) -> list[str]:
        """The field `stop`."""
        return self.stop


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    ignored = OpenAIBody.ignored | {"parallel_tool_calls", "verbosity", "prompt_cache_retention"}
    refused: ClassVar = {
        "modalities": (["text"],),
        "audio": (),
        "functions": ([],),
        "function_call": ("none",),
        "web_search_options": (),
        "adapters": (),
    }
    messages: Annotated[Objects, Field(min_length=1)]
    logprobs: bool = False
    tools: Objects = []
    tool_choice: Literal["auto", "none"] = "auto"
    reasoning_effort: str | None = None
    role_mapping: dict[str, str] | None = None


class CompletionBody(OpenAIBody):
    """POST /v1/completions; `prompt` is a text or token ids."""

    refused: ClassVar = {"best_of": (1,), "echo": (False,), "suffix": ("",), "adapters": ()}
    prompt: Annotated[Any, BeforeValidator(check_prompt)]
    logprobs: bool | Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = False


class ResponsesBody(Body):
    """POST /v1/responses."""

    ignored = Body.ignored | {
        "client_metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention",
        "safety_identifier", "store", "stream_options", "truncation", "user",
    }  # fmt: skip
    refused: ClassVar = {
        "previous_response_id": (),
        "conversation": (),
        "include": ([], ["reasoning.encrypted_content"]),
        "background": (False,),
        "prompt": (),
        "max_tool_calls": (),
        "top_logprobs": (0,),
        "context_management": (),
    }
    input: str | Annotated[Objects, Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Length | None = None
    tools: Objects = []
    tool_choice: Literal["auto", "none"] = "auto"
    reasoning: dict[str, Any] = {}
    text: dict[str, Any] = {}

    def asked_tokens(self) -> int | None:
        """The field `max_output_tokens`."""
        return self.max_output_tokens


class CountTokensBody(Body):
    """POST /v1/messages/count_tokens."""

    ignored = Body.ignored | {"context_management", "cache_control", "inference_geo"}
    refused: ClassVar = {"mcp_servers": ([],), "container": ()}
    messages: Annotated[Objects, Field(min_length=1)]
    system: str | Objects | None = None
    tools: Objects = []
    tool_choice: dict[str, Any] = {"type": "auto"}
    thinking: dict[str, Any] = {}
    output_config: dict[str, Any] = {}


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    max_tokens: Length
    stop_sequences: StopStrings = []

    def asked_tokens(self) -> int | None:
        """The field `max_tokens`."""
        return self.max_tokens

    def stop_strings(self) -> list[str]:
        """The field `stop_sequences`."""
        return self.stop_sequences


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """A request's body, checked; a field that is null counts as one that is not there.

    Raises:
        ApiError: it is not a JSON object, or a field is unknown, not supported or out of its range.
    """
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(f"the body must be a JSON object, got {type(body).__name__}")
    given = {}
    for name, value in body.items():
        if name in kind.ignored or (value is None and name != "draft_model"):
            continue
        if name not in kind.refused:
            given[name] = value
        elif value not in kind.refused[name]:
            raise ApiError(f"{name} is not supported, got {value!r:.100}")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise ApiError(describe(error)) from None


def describe(error: ValidationError) -> str:
    """The first thing that is wrong, in one line."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"unknown field: {place:.100}"
    if first["type"] == "missing":
        return f"{place} is missing"
    message = first["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
    return f"{place:.100} {message[0].lower()}{message[1:]}, got {first['input']!r:.100}"
