"""What the simulated replica accepts: bodies of the four generating APIs into one `Call`, with vLLM's own errors.

Messages, types and fields of the errors are those of vLLM 0.32 as recorded in tests/captures/errors.txt. Unknown
fields are ignored, a missing model means the served one, `prompt + max_tokens` beyond the context cuts the answer:
as vLLM does. Not simulated: sampling, log probabilities, tools, structured output; their fields are accepted and
have no effect.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from loadtests import tokens


class ApiError(Exception):
    """A refusal of the replica, with its status and body."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


MOST_ANSWERS = 16_384  # VLLM_MAX_N_SEQUENCES


@dataclass(slots=True)
class Call:
    """One accepted request: packed prompts, lengths, and what the answer must look like."""

    api: str  # chat | completions | responses | messages
    model: str
    adapter: str | None
    prompts: list[bytes]
    stream: bool = False
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    echo: bool = False
    cache_salt: str | None = None
    priority: int = 0
    request_id: str = ""
    body: dict[str, Any] = field(default_factory=dict)

    def output_tokens(self, seed: int, room: int) -> tuple[int, str]:
        """Length of one answer and why it ends, given `room` tokens of context after the prompt."""
        most = min(self.max_tokens if self.max_tokens is not None else room, room)
        if self.ignore_eos:
            return most, "length"
        natural = max(tokens.natural_length(seed), self.min_tokens)
        return (natural, "stop") if natural < most else (most, "length")


def parse(
    api: str, raw: bytes, model: str, adapters: tuple[str, ...], max_model_len: int, priority: str | None
) -> Call:
    """Raises ApiError with vLLM's status and words."""
    body = _object(raw)
    asked = body.get("model") or model
    if asked != model and asked not in adapters:
        raise ApiError(
            404,
            f"The model `{asked}` does not exist. Valid aliases: {', '.join((model, *adapters))}.",
            "NotFoundError",
            "model",
        )
    limit_field = {"responses": "max_output_tokens"}.get(api, "max_tokens")
    limit = _integer(body, limit_field)
    if api == "chat" and body.get("max_completion_tokens") is not None:
        limit = _integer(body, "max_completion_tokens")
    if limit is None and api == "completions":
        limit = 16
    if limit is not None and limit < 1:
        raise _bad(f"{limit_field} must be at least 1, got {limit}.", limit_field, limit)
    temperature = body.get("temperature")
    if isinstance(temperature, (int, float)) and temperature < 0:
        raise _bad(f"temperature must be non-negative, got {float(temperature)}.", "temperature", float(temperature))
    if body.get("cache_salt") == "":
        raise _bad("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt", "")
    stream = bool(body.get("stream"))
    options = body.get("stream_options") or {}
    if options and not stream and api in ("chat", "completions"):
        raise ApiError(
            400,
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
            param="stream_options",
        )
    include = bool(options.get("include_usage"))
    n = _integer(body, "n")
    if n is not None and n > MOST_ANSWERS:
        raise _bad(f"n must be at most {MOST_ANSWERS}, got {n}.", "n", n)
    call = Call(
        api=api,
        model=asked,
        adapter=asked if asked in adapters else None,
        prompts=_prompts(api, body),
        stream=stream,
        n=max(1, n or 1),
        max_tokens=limit,
        min_tokens=_integer(body, "min_tokens") or 0,
        ignore_eos=bool(body.get("ignore_eos")),
        include_usage=include,
        continuous_usage=include and bool(options.get("continuous_usage_stats")),
        return_token_ids=bool(body.get("return_token_ids")),
        echo=bool(body.get("echo")) and api == "completions",
        cache_salt=body.get("cache_salt"),
        priority=_integer(body, "priority") or 0,
        body=body,
    )
    if priority is not None and priority.lstrip("-").isdigit():
        call.priority = int(priority)
    for packed in call.prompts:
        if (length := tokens.count(packed)) >= max_model_len:
            raise ApiError(
                400,
                f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
                f"{length} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
                f"length of the input prompt. (parameter=input_tokens, value={length})",
                param="input_tokens",
            )
    return call


def prompt_of(body: dict[str, Any]) -> bytes:
    """The prompt of a /tokenize or count_tokens body: a chat or a text."""
    return _prompts("chat" if "messages" in body else "completions", body)[0]


def _prompts(api: str, body: dict[str, Any]) -> list[bytes]:
    if api == "completions":
        prompt = body.get("prompt")
        if not prompt:
            raise ApiError(
                400, "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", param="prompt"
            )
        many = prompt if isinstance(prompt, list) and isinstance(prompt[0], (str, list)) else [prompt]
        try:
            return [tokens.from_text(one) if isinstance(one, str) else tokens.from_ids(one) for one in many]
        except ValueError as problem:
            raise ApiError(400, str(problem)) from None
    if api == "responses":
        given = body.get("input")
        if given is None:
            raise missing("input", body)
        messages: list[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        if body.get("instructions"):
            messages.insert(0, {"role": "system", "content": body["instructions"]})
        return [tokens.render_chat(messages, body.get("tools"))]
    chat = body.get("messages")
    if not isinstance(chat, list):
        raise missing("messages", body)
    if api == "messages" and body.get("system"):
        chat = [{"role": "system", "content": body["system"]}, *chat]
    return [tokens.render_chat(chat, body.get("tools"))]


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as problem:
        where = f"body.{problem.pos}"
        raise ApiError(
            400,
            f"1 validation error:\n  {{'type': 'json_invalid', 'loc': '{where}', 'msg': 'JSON decode error', "
            "'input': '<dict of 0 items>', 'ctx': {'error': 'Expecting value'}}",
            "Bad Request",
            where,
        ) from None
    if not isinstance(body, dict):
        raise ApiError(
            400,
            "1 validation error:\n  {'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be a valid "
            "dictionary or object to extract fields from'}",
            "Bad Request",
            "body",
        )
    return body


def _integer(body: dict[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ApiError(
        400,
        f"1 validation error:\n  {{'type': 'int_parsing', 'loc': 'body.{name}', 'msg': 'Input should be a valid "
        f"integer, unable to parse string as an integer', 'input': {value!r}}}",
        "Bad Request",
        f"body.{name}",
    )


def _bad(message: str, name: str, value: object) -> ApiError:
    shown = "" if value == "" else f", value={value}"
    return ApiError(400, f"{message} (parameter={name}{shown})", param=name)


def missing(name: str, body: dict[str, Any]) -> ApiError:
    return ApiError(
        400,
        f"1 validation error:\n  {{'type': 'missing', 'loc': 'body.{name}', 'msg': 'Field required', "
        f"'input': '<dict of {len(body)} items>'}}",
        "Bad Request",
        f"body.{name}",
    )
