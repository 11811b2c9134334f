"""The bytes of the simulated replica's answers, as vLLM 0.32 sends them (tests/captures/sse-*.txt).

Every event is one HTTP chunk, `<hex length>CRLF data: {json} LF LF CRLF`. What stays the same for a whole stream is
made once: a token then costs one concatenation. Chat sends its role event together with the first token; responses
and messages send their own envelopes and end without `[DONE]`.
"""

from __future__ import annotations

import os
import time
from typing import Any

import orjson

from loadtests import tokens
from loadtests.replica_api import Call

FINGERPRINT = f"vllm-0.32.0-{os.urandom(4).hex()}"
END = b"0\r\n\r\n"
DONE = b"e\r\ndata: [DONE]\n\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(data: dict[str, Any]) -> bytes:
    return chunk(b"data: " + orjson.dumps(data) + b"\n\n")


def named(data: dict[str, Any]) -> bytes:
    return chunk(b"event: " + data["type"].encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n")


def error_event(message: str, kind: str, code: int) -> bytes:
    """vLLM writes errors inside a stream with Python's own JSON, spaces and all."""
    body = f'data: {{"error": {{"message": "{message}", "type": "{kind}", "param": null, "code": {code}}}}}\n\n'
    return chunk(body.encode())


class Usage:
    """Prompt, cached and completion tokens of a call, over all its choices."""

    __slots__ = ("cached", "completion", "prompt")

    def __init__(self, prompt: int = 0, cached: int = 0, completion: int = 0) -> None:
        self.prompt, self.cached, self.completion = prompt, cached, completion

    def running(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "completion_tokens_details": None,
        }

    def last(self, api: str) -> dict[str, Any]:
        details: dict[str, Any] = {"cached_tokens": self.cached}
        if api == "chat":
            details["created_cache_tokens"] = 0
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "prompt_tokens_details": details,
        }

    def whole(self, api: str) -> dict[str, Any]:
        usage = self.last(api)
        usage["prompt_tokens_details"] = {
            "cached_tokens": self.cached,
            "created_cache_tokens": 0 if api == "chat" else None,
            "multimodal_tokens": None,
        }
        usage["completion_tokens_details"] = None
        return usage


class Shape:
    """Chat and completions; the subclasses change the words. One per call."""

    done = DONE

    def __init__(self, call: Call) -> None:
        self.call = call
        self.created = int(time.time())
        self.id = ("chatcmpl-" if call.api == "chat" else "cmpl-") + call.request_id
        self._fixed: dict[int, tuple[bytes, bytes]] = {}

    def accepted(self) -> bytes:
        """Sent with the response headers."""
        return b""

    def first(self, index: int, packed: bytes, usage: Usage) -> bytes:
        """Sent together with the first token of a choice."""
        if self.call.api != "chat":
            return b""
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        shown = tokens.ids_of(packed) if self.call.return_token_ids else None
        running = {"usage": usage.running()} if self.call.continuous_usage else {}
        return event(self._head("chat.completion.chunk") | {"choices": [choice]} | running | {
            "prompt_token_ids": shown, "prompt_text": None,
        })  # fmt: skip

    def token(self, index: int, text: bytes, usage: Usage, packed: bytes | None = None) -> bytes:
        """`packed` is the prompt with the first token, for those who ask for token ids."""
        if self.call.continuous_usage or self.call.return_token_ids:
            return self._event(index, text, None, usage, packed)
        fixed = self._fixed.get(index)
        if fixed is None:
            whole = self._event(index, b"@@@@", None, usage, None)
            body = whole[whole.index(b"\r\n") + 2 : -2]
            before, after = body.split(b"@@@@")
            fixed = self._fixed[index] = (before, after + b"\r\n")
        before, after = fixed
        return b"%x\r\n%b%b%b" % (len(before) + len(text) + len(after) - 2, before, text, after)

    def finish(self, index: int, text: bytes, reason: str, usage: Usage, packed: bytes | None = None) -> bytes:
        return self._event(index, text, reason, usage, packed)

    def closing(self, usage: Usage, text: str, reason: str) -> bytes:
        """After the last choice: usage if asked, and the terminal event."""
        out = b""
        if self.call.include_usage:
            kind = "chat.completion.chunk" if self.call.api == "chat" else "text_completion"
            out = event(
                self._head(kind)
                | {"choices": [], "usage": usage.last(self.call.api), "system_fingerprint": FINGERPRINT}
            )
        return out + DONE

    def whole(self, choices: list[tuple[bytes, str]], prompts: list[bytes], usage: Usage) -> dict[str, Any]:
        """The answer that is not streamed; choices are (text, reason) in order of index."""
        shown: list[dict[str, Any]] = []
        for index, (text, reason) in enumerate(choices):
            ids = tokens.ids_of(text) if self.call.return_token_ids else None
            common = {"logprobs": None, "finish_reason": reason, "stop_reason": None, "token_ids": ids}
            if self.call.api == "chat":
                message = {
                    "role": "assistant", "content": text.decode(), "refusal": None, "annotations": None, "audio": None,
                    "function_call": None, "reasoning": None,
                }  # fmt: skip
                shown.append({"index": index, "message": message} | common | {"routed_experts": None})
            else:
                packed = prompts[index // self.call.n]
                before = packed.decode("utf-8", "replace") if self.call.echo else ""
                ids_in = tokens.ids_of(packed) if self.call.return_token_ids else None
                more = {"prompt_logprobs": None, "prompt_token_ids": ids_in, "routed_experts": None}
                shown.append({"index": index, "text": before + text.decode()} | common | more)
        chat = self.call.api == "chat"
        answer = self._head("chat.completion" if chat else "text_completion") | {
            "choices": shown, "service_tier": None, "system_fingerprint": FINGERPRINT,
            "usage": usage.whole(self.call.api),
        }  # fmt: skip
        if chat:
            answer |= {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
        return answer | {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.call.model}

    def _event(self, index: int, text: bytes, reason: str | None, usage: Usage, packed: bytes | None) -> bytes:
        asked = self.call.return_token_ids
        ids = tokens.ids_of(text) if asked else None
        choice: dict[str, Any]
        if self.call.api == "chat":
            choice = {"index": index, "delta": {"content": text.decode()}, "logprobs": None, "finish_reason": reason}
            if reason is not None:
                choice["stop_reason"] = None
            choice["token_ids"] = ids
        else:
            choice = {
                "index": index, "text": text.decode(), "logprobs": None, "finish_reason": reason, "stop_reason": None,
                "prompt_token_ids": tokens.ids_of(packed) if asked and packed is not None else None, "token_ids": ids,
            }  # fmt: skip
        data = self._head("chat.completion.chunk" if self.call.api == "chat" else "text_completion") | {
            "choices": [choice]
        }
        if self.call.continuous_usage:
            data["usage"] = usage.running()
        if reason is not None and not self.call.include_usage:
            data["system_fingerprint"] = FINGERPRINT
        return event(data)


class Responses(Shape):
    """OpenAI's /v1/responses: named, numbered events; ends after response.completed."""

    done = b""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.id = "resp_" + call.request_id
        self.item = "msg_" + call.request_id
        self._number = 0

    def _next(self, kind: str, **fields: object) -> bytes:
        data = dict(sorted((fields | {"sequence_number": self._number, "type": kind}).items()))
        self._number += 1
        return named(data)

    def response(self, status: str, output: list[object], usage: Usage | None) -> dict[str, Any]:
        asked = self.call.body
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        counted = None
        if usage is not None:
            counted = {
                "input_tokens": usage.prompt,
                "input_tokens_details": {
                    "cached_tokens": usage.cached, "cache_write_tokens": 0, "input_tokens_per_turn": [],
                    "cached_tokens_per_turn": [],
                },
                "output_tokens": usage.completion,
                "output_tokens_details": {
                    "reasoning_tokens": 0, "tool_output_tokens": 0, "output_tokens_per_turn": [],
                    "tool_output_tokens_per_turn": [],
                },
                "total_tokens": usage.prompt + usage.completion,
            }  # fmt: skip
        return {
            "id": self.id, "created_at": self.created, "incomplete_details": reason,
            "instructions": asked.get("instructions"), "metadata": asked.get("metadata"), "model": self.call.model,
            "object": "response", "output": output, "parallel_tool_calls": True, "temperature": 1.0,
            "tool_choice": "none", "tools": [], "top_p": 1.0, "background": False,
            "max_output_tokens": self.call.max_tokens, "max_tool_calls": None, "previous_response_id": None,
            "prompt": None, "reasoning": None, "service_tier": "auto", "status": status, "text": None,
            "top_logprobs": None, "truncation": "disabled", "usage": counted, "user": None, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "kv_transfer_params": None, "ec_transfer_params": None, "input_messages": None,
            "output_messages": None,
        }  # fmt: skip

    def accepted(self) -> bytes:
        response = self.response("in_progress", [], None)
        return self._next("response.created", response=response) + self._next("response.in_progress", response=response)

    def first(self, index: int, packed: bytes, usage: Usage) -> bytes:
        item: dict[str, Any] = {
            "id": self.item, "content": [], "role": "assistant", "status": "in_progress", "type": "message",
            "phase": None,
        }  # fmt: skip
        part: dict[str, Any] = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        return self._next("response.output_item.added", item=item, output_index=0) + self._next(
            "response.content_part.added", content_index=0, item_id=self.item, output_index=0, part=part
        )

    def token(self, index: int, text: bytes, usage: Usage, packed: bytes | None = None) -> bytes:
        return self._next(
            "response.output_text.delta",
            content_index=0,
            delta=text.decode(),
            item_id=self.item,
            logprobs=[],
            output_index=0,
        )

    def finish(self, index: int, text: bytes, reason: str, usage: Usage, packed: bytes | None = None) -> bytes:
        return self.token(index, text, usage)

    def _output(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
        return {
            "id": self.item, "content": [part], "role": "assistant", "status": "completed", "type": "message",
            "phase": None,
        }  # fmt: skip

    def closing(self, usage: Usage, text: str, reason: str) -> bytes:
        at = {"content_index": 0, "item_id": self.item, "output_index": 0}
        item = self._output(text)
        status = "incomplete" if reason == "length" else "completed"
        return (
            self._next(
                "response.output_text.done", content_index=0, item_id=self.item, logprobs=[], output_index=0, text=text
            )
            + self._next("response.content_part.done", **at, part=item["content"][0])
            + self._next("response.output_item.done", item=item, output_index=0)
            + self._next("response.completed", response=self.response(status, [item], usage))
        )

    def whole(self, choices: list[tuple[bytes, str]], prompts: list[bytes], usage: Usage) -> dict[str, Any]:
        text, reason = choices[0]
        return self.response("incomplete" if reason == "length" else "completed", [self._output(text.decode())], usage)


_STOPS = {"length": "max_tokens", "stop": "end_turn"}


class Messages(Shape):
    """Anthropic's /v1/messages: ends after message_stop; usage is split over its first and last events."""

    done = b""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.id = "chatcmpl-" + call.request_id

    def first(self, index: int, packed: bytes, usage: Usage) -> bytes:
        message: dict[str, Any] = {
            "id": self.id, "type": "message", "role": "assistant", "content": [], "model": self.call.model,
            "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": usage.prompt, "output_tokens": 0},
        }  # fmt: skip
        block = {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0}
        return named({"type": "message_start", "message": message}) + named(block)

    def _event(self, index: int, text: bytes, reason: str | None, usage: Usage, packed: bytes | None) -> bytes:
        return named(
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text.decode()}, "index": 0}
        )

    def closing(self, usage: Usage, text: str, reason: str) -> bytes:
        counted = {
            "input_tokens": usage.prompt, "output_tokens": usage.completion, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
        }  # fmt: skip
        delta = {"stop_reason": _STOPS.get(reason, reason), "stop_sequence": None}
        return (
            named({"type": "content_block_stop", "index": 0})
            + named({"type": "message_delta", "delta": delta, "usage": counted})
            + named({"type": "message_stop"})
        )

    def whole(self, choices: list[tuple[bytes, str]], prompts: list[bytes], usage: Usage) -> dict[str, Any]:
        text, reason = choices[0]
        return {
            "id": self.id, "type": "message", "role": "assistant",
            "content": [{"type": "text", "text": text.decode()}], "model": self.call.model,
            "stop_reason": _STOPS.get(reason, reason), "stop_sequence": None,
            "usage": {
                "input_tokens": usage.prompt, "output_tokens": usage.completion, "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": usage.cached,
            },
        }  # fmt: skip


def shape(call: Call) -> Shape:
    return {"responses": Responses, "messages": Messages}.get(call.api, Shape)(call)
