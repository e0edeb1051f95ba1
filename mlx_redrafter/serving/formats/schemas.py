"""Request bodies: a pydantic model for each API."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)

from ...files import parse_object
from ..api_errors import ApiError, Json, log_once

DEFAULT_MODEL = "default_model"
"""mlx-lm's name for the model of the command line; also accepted for its drafter."""

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
MAX_TOP_LOGPROBS = 20  # as in OpenAI's API


ANY_OBJECT: Json = {"type": "object"}

REFUSED_FIELDS = (
    "adapters",
    "ebnf",
    "grammar",
    "guided_choice",
    "guided_grammar",
    "guided_regex",
    "nvext",
    "regex",
    "structural_tag",
)
"""Fields of any API that would change the answer."""


def wrap_prompt(given: Any) -> Any:
    """A single prompt, a text or token ids, in a list, and anything else as it is."""
    is_list = isinstance(given, list) and any(isinstance(each, str | list) for each in given)
    return given if is_list else [given]


def wrap_stop(given: Any) -> Any:
    """A single stop string in a list, and anything else as it is."""
    return [given] if given and isinstance(given, str) else given or []


def wrap_input(given: Any) -> Any:
    """A text as the user's message, and anything else as it is."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def parse_schema(given: Any) -> Any:
    """A JSON schema, which some clients send as a string; "json" is any object."""
    if given == "json":
        return ANY_OBJECT
    return parse_object(given, "the schema") if isinstance(given, str) else given


Integer = Annotated[int, Field(strict=False)]  # some clients send 100.0
Seed = Annotated[Integer | None, BeforeValidator(lambda given: None if given == -1 else given)]
TopK = Annotated[Integer, BeforeValidator(lambda given: 0 if given == -1 else given)]
StopField = Annotated[list[str], BeforeValidator(wrap_stop)]
JsonSchema = Annotated[Json, BeforeValidator(parse_schema)]
Objects = Annotated[list[Json], Field(min_length=1)]
ToolList = list[dict[str, JsonValue]]
ToolChoice = str | dict[str, JsonValue]


class Part(BaseModel):
    """A body, or an object in one. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class AnswerFormat(Part):
    """The format of an answer. Chat completions nest the schema in `json_schema`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    content: JsonSchema | None = Field(
        None, validation_alias=AliasChoices(AliasPath("json_schema", "schema"), "schema")
    )

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuses a schema that is missing: any object would pass."""
        if self.type == "json_schema" and self.schema_to_follow is None:
            raise ValueError("json_schema needs a schema")
        return self

    @property
    def schema_to_follow(self) -> Json | None:
        """The JSON schema; None for plain text."""
        if self.type == "text":
            return None
        return ANY_OBJECT if self.type == "json_object" and not self.content else self.content


class StructuredOutputs(Part):
    """vLLM's `structured_outputs`, of which only JSON is followed."""

    model_config = ConfigDict(extra="forbid", strict=True)
    content: JsonSchema | None = Field(None, alias="json")
    json_object: bool = False

    @model_validator(mode="before")
    @classmethod
    def drop_empty(cls, given: Any) -> Any:
        """Drops what is not set: vLLM's own client sends every field."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value not in (None, False)}

    @property
    def schema_to_follow(self) -> Json | None:
        """The JSON schema; None for plain text."""
        return ANY_OBJECT if self.json_object else self.content


class FormatAndEffort(Part):
    """`text` of responses, `output_config` of messages."""

    format: AnswerFormat | None = None
    effort: str | None = None


class Reasoning(Part):
    """`reasoning` and `thinking`, in the forms of several APIs."""

    type: str | None = None
    enabled: bool | None = None
    effort: str | None = None
    display: str | None = None
    max_tokens: Integer | None = None
    budget_tokens: Integer | None = None

    @model_validator(mode="before")
    @classmethod
    def wrap(cls, given: Any) -> Any:
        """A plain switch or effort as an object, and anything else as it is."""
        if isinstance(given, bool):
            return {"enabled": given}
        return {"effort": given} if isinstance(given, str) else given

    @property
    def is_on(self) -> bool | None:
        """Whether to reason; None if it is not said."""
        is_empty = 0 in (self.max_tokens, self.budget_tokens)
        if self.enabled is False or self.type == "disabled" or is_empty:
            return False
        return True if self.enabled or self.type else None


class Body(Part):
    """The fields that all APIs share, named as in mlx-lm; None if not given.

    `Options` checks their ranges.

    Attributes:
        refused: fields that would change the answer and are not supported; they must be empty.
    """

    refused: ClassVar[tuple[str, ...]] = REFUSED_FIELDS
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
    seed: Seed = None
    chat_template_kwargs: Json = {}
    reasoning_effort: str | None = None
    reasoning: Reasoning = Reasoning()
    thinking: Reasoning = Reasoning()
    enable_thinking: bool | None = None
    think: bool | str | None = None
    text: FormatAndEffort = FormatAndEffort()
    output_config: FormatAndEffort = FormatAndEffort()
    output_format: AnswerFormat | None = None
    response_format: AnswerFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    format: JsonSchema | None = None
    guided_json: JsonSchema | None = None
    json_schema: JsonSchema | None = None

    @property
    def schema_to_follow(self) -> Json | None:
        """The JSON schema that the answer must follow, wherever it is given; None for any text."""
        formats = [
            self.response_format,
            self.output_format,
            self.text.format,
            self.output_config.format,
            self.structured_outputs,
        ]
        schemas = [self.format, self.guided_json, self.json_schema]
        schemas += [each.schema_to_follow for each in formats if each is not None]
        given = [schema for schema in schemas if schema is not None]
        if len(given) > 1:
            raise ApiError(f"expected one format of the answer, got {len(given)}")
        return given[0] if given else None

    @property
    def thinks(self) -> bool | None:
        """Whether to reason; None if it is not said."""
        given = [self.enable_thinking, self.think, self.reasoning.is_on, self.thinking.is_on]
        own = self.chat_template_kwargs
        if False in given or False in (own.get("enable_thinking"), own.get("thinking")):
            return False
        return True if True in given else None

    @property
    def effort(self) -> str | None:
        """How much to reason; None if it is not said."""
        if self.thinks is False:
            return "none"
        return self.reasoning_effort or self.reasoning.effort or self.output_config.effort

    def get_sent_name(self, name: str) -> str:
        """The client's name of a field, and any other name as it is."""
        field = type(self).model_fields.get(name)
        return (field and field.alias) or name


class OpenAIBody(Body):
    """The fields that OpenAI's chat and text completions share."""

    max_completion_tokens: Integer | None = None
    n: Annotated[Integer, Field(ge=1, le=16)] = 1
    top_logprobs: Annotated[Integer, Field(ge=-1, le=MAX_TOP_LOGPROBS)] = -1
    stream_options: Json = {}

    def get_sent_name(self, name: str) -> str:
        """The client's name of a field, and any other name as it is."""
        is_newer = name == "max_tokens" and self.max_completion_tokens is not None
        return "max_completion_tokens" if is_newer else super().get_sent_name(name)


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    refused = (*REFUSED_FIELDS, "audio", "functions")
    messages: Objects
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    logprobs: bool = False
    tools: ToolList = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True


class CompletionBody(OpenAIBody):
    """POST /v1/completions; `prompt` is a text, token ids, or a list of these."""

    refused = (*REFUSED_FIELDS, "echo", "suffix")
    prompt: Annotated[list[str | list[int]], BeforeValidator(wrap_prompt)]
    logprobs: bool | Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)] = False
    best_of: Literal[1] = 1


class ResponsesBody(Body):
    """POST /v1/responses."""

    refused = (
        *REFUSED_FIELDS,
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
    parallel_tool_calls: bool = True
    metadata: dict[str, JsonValue] = {}
    include: list[str] = []


class CountTokensBody(Body):
    """POST /v1/messages/count_tokens."""

    messages: Objects
    system: str | list[Json] | None = None
    stop: StopField = Field([], alias="stop_sequences")
    tools: ToolList = []
    tool_choice: ToolChoice = "auto"


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    max_tokens: Integer


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """Parses and checks a request's body. Null fields other than `draft_model` count as missing."""
    try:
        text = raw.decode(json.detect_encoding(raw), "surrogatepass")
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8: see byte {error.start}") from None
    body = parse_object(text, "the body")
    # Halves of characters, which clients send if they cut a text.
    if SURROGATE.search(text):
        text = json.dumps(body, ensure_ascii=False)
        body = parse_object(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    for name in kind.refused:
        if body.get(name):
            raise ApiError(f"{name} is not supported, got {body[name]!r:.100}")
    known = {field.alias or name for name, field in kind.model_fields.items()}
    for name in body.keys() - known:
        log_once(f"{kind.__name__.removesuffix('Body')}: the field {name!r:.60} is ignored")
    body = {
        name: value for name, value in body.items() if value is not None or name == "draft_model"
    }
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise ApiError(describe_invalid(error, body)) from None


def describe_invalid(error: ValidationError, body: Json) -> str:
    """The last error on one line: of a union's types, the last one holds the most."""
    last = error.errors(include_url=False, include_context=False)[-1]
    is_missing = last["type"] == "missing"
    place = ""
    held: Any = body
    for part in last["loc"]:  # types of a union are parts, too
        if isinstance(held, list) and isinstance(part, int):
            place += f"[{part}]"
            held = held[part]
        elif isinstance(held, dict) and (is_missing or part in held):
            place += f".{part}" if place else str(part)
            held = held.get(part)
    if is_missing:
        return f"{place} is missing"
    message = last["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
    return f"{place:.100} {message[0].lower()}{message[1:]}, got {last['input']!r:.100}"
