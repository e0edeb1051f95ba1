"""Request bodies: a pydantic model for each API."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError

from ...json_objects import parse_object
from ...options import OPTION_NAMES
from ..errors import ApiError, Json, log_once
from ..scheduling.request import PENALTIES

DEFAULT_MODEL = "default_model"
"""mlx-lm's name for the model of the command line; also accepted for its drafter."""

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
MAX_TOP_LOGPROBS = 20  # as in OpenAI's API


def unwrap_prompt(given: Any) -> Any:
    """The prompt in a list of one prompt, and anything else as it is."""
    is_alone = isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list)
    return given[0] if is_alone else given


def wrap_stop(given: Any) -> Any:
    """A single stop string in a list, and anything else as it is."""
    return [given] if given and isinstance(given, str) else given or []


def wrap_input(given: Any) -> Any:
    """A text as the user's message, and anything else as it is."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


Integer = Annotated[int, Field(strict=False)]  # some clients send 100.0
TopK = Annotated[Integer, BeforeValidator(lambda given: 0 if given == -1 else given)]
StopField = Annotated[list[str], BeforeValidator(wrap_stop)]
Objects = Annotated[list[Json], Field(min_length=1)]
ToolList = list[dict[str, JsonValue]]
ToolChoice = str | dict[str, JsonValue]


class Part(BaseModel):
    """A body, or an object in one. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class Schema(Part):
    """A JSON schema; by default any object."""

    content: Json = Field({"type": "object"}, alias="schema")


class AnswerFormat(Schema):
    """The format of an answer. Chat completions nest the schema in `json_schema`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: Schema | None = None

    @property
    def schema_to_follow(self) -> Json | None:
        """The JSON schema; None for plain text."""
        return None if self.type == "text" else (self.json_schema or self).content


class FormatAndEffort(Part):
    """`text` and `reasoning` of responses, `output_config` of messages."""

    format: AnswerFormat | None = None
    effort: str | None = None


class Body(Part):
    """The fields that all APIs share, named as in mlx-lm; None if not given. `Options` checks their
    ranges.

    Attributes:
        refused: fields that would change the answer and are not supported; they must be empty.
    """

    refused: ClassVar[tuple[str, ...]] = ("adapters",)
    model: str = DEFAULT_MODEL
    draft_model: str | None = DEFAULT_MODEL
    stream: bool = False
    stop: StopField = []
    max_tokens: Integer | None = None
    temp: float | None = Field(None, alias="temperature")
    top_p: float | None = None
    top_k: TopK | None = None
    min_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repetition_penalty: float | None = Field(None, ge=0)
    repetition_context_size: Integer | None = None
    presence_penalty: float | None = None
    presence_context_size: Integer | None = None
    frequency_penalty: float | None = None
    frequency_context_size: Integer | None = None
    logit_bias: dict[Integer, float] | None = None
    seed: Integer | None = None
    chat_template_kwargs: Json = {}

    def get_sampling_options(self) -> Json:
        """The given options and penalties, as keywords of `Worker.submit`."""
        names = Body.model_fields.keys() & (OPTION_NAMES | PENALTIES)
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class OpenAIBody(Body):
    """The fields that OpenAI's chat and text completions share."""

    max_completion_tokens: Integer | None = None
    n: Annotated[Integer, Field(ge=1, le=16)] = 1
    top_logprobs: Annotated[Integer, Field(ge=-1, le=MAX_TOP_LOGPROBS)] = -1
    stream_options: Json = {}
    response_format: AnswerFormat | None = None


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    refused = ("adapters", "audio", "functions")
    messages: Objects
    logprobs: bool = False
    tools: ToolList = []
    tool_choice: ToolChoice = "auto"
    reasoning_effort: str | None = None


class CompletionBody(OpenAIBody):
    """POST /v1/completions; `prompt` is a text, token ids, or a list of one of these."""

    refused = ("adapters", "echo", "suffix")
    prompt: Annotated[str | list[int], BeforeValidator(unwrap_prompt)]
    logprobs: bool | Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)] = False
    best_of: Literal[1] = 1


class ResponsesBody(Body):
    """POST /v1/responses."""

    refused = (
        "adapters",
        "background",
        "conversation",
        "previous_response_id",
        "prompt",
        "top_logprobs",
    )
    input: Annotated[Objects, BeforeValidator(wrap_input)]
    instructions: str | None = None
    max_tokens: Integer | None = Field(None, alias="max_output_tokens")
    tools: ToolList = []
    tool_choice: ToolChoice = "auto"
    reasoning: FormatAndEffort = FormatAndEffort()
    text: FormatAndEffort = FormatAndEffort()
    metadata: dict[str, JsonValue] = {}


class CountTokensBody(Body):
    """POST /v1/messages/count_tokens."""

    messages: Objects
    system: str | list[Json] | None = None
    stop: StopField = Field([], alias="stop_sequences")
    tools: ToolList = []
    tool_choice: ToolChoice = "auto"
    thinking: Json = {}
    output_config: FormatAndEffort = FormatAndEffort()
    output_format: AnswerFormat | None = None


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    max_tokens: Integer


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """Parses and checks a request's body. Null fields other than `draft_model` count as missing."""
    body = parse_object(raw, "the body")
    # Halves of characters, which JavaScript clients send if they cut a text.
    if SURROGATE.search(raw):
        text = json.dumps(body, ensure_ascii=False)
        body = parse_object(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    for name in kind.refused:
        if body.get(name):
            raise ApiError(f"{name} is not supported, got {body[name]!r:.100}")
    known = {field.alias or name for name, field in kind.model_fields.items()}
    for name in body.keys() - known:
        log_once(f"{kind.__name__.removesuffix('Body')}: the field {name!r:.60} is ignored")
    missing = [name for name, value in body.items() if value is None and name != "draft_model"]
    for name in missing:
        del body[name]
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise ApiError(describe(error)) from None


def describe(error: ValidationError) -> str:
    """The first error on one line."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{place} is missing"
    message = first["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
    return f"{place:.100} {message[0].lower()}{message[1:]}, got {first['input']!r:.100}"
