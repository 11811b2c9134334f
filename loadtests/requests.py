"""A schedule row as HTTP: the bytes that every arm receives alike.

Chat puts the whole prompt into one user message, so that equal block ids are equal bytes at the front of it;
completions send the same text, `ids` sends token ids where the vocabulary is known. Length is forced
(`ignore_eos`, `max_tokens`) because a comparison needs equal work; `natural` leaves the end to the model. A salt
makes a block of runs share nothing with the one before it, where replicas cannot be reset. Objectives go along as
headers, which a gateway may tighten to and any other server ignores.
Trade-off: one user message shows the prefix, not the turns, to a gateway that looks at roles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from loadtests import prompts
from loadtests.drive import WireRequest
from loadtests.schedule import Row, Schedule

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "ids": "/v1/completions"}


class ShapeError(ValueError):
    """A request shape that cannot be made; the text says what would be right."""


@dataclass(frozen=True)
class Shape:
    """How rows are put into requests. `time_scale` shortens the objectives that are sent, as the replicas' time is."""

    model: str
    endpoint: str = "chat"
    stream: bool = True
    natural: bool = False  # leave the end of the answer to the model
    salt: str | None = None
    run_id: str = "run"
    vocabulary: int | None = None
    time_scale: float = 1.0
    send_objectives: bool = True

    def __post_init__(self) -> None:
        if self.endpoint not in PATHS:
            raise ShapeError(f"--endpoint {self.endpoint!r}: one of {', '.join(PATHS)} would be right")
        if self.endpoint == "ids" and self.vocabulary is None:
            raise ShapeError("--endpoint ids needs --vocabulary, the number of tokens that the model knows")

    def build(self, schedule: Schedule, row: Row) -> WireRequest:
        body: dict[str, Any] = {"model": row.adapter or self.model, "max_tokens": row.output_tokens, "temperature": 0.0}
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompts.text(row, schedule.block_tokens)}]
        elif self.endpoint == "completions":
            body["prompt"] = prompts.text(row, schedule.block_tokens)
        else:
            assert self.vocabulary is not None
            body["prompt"] = prompts.token_ids(row, schedule.block_tokens, self.vocabulary)
        if not self.natural:
            body["ignore_eos"] = True
        if self.salt is not None:
            body["cache_salt"] = self.salt
        if self.stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        return WireRequest(
            PATHS[self.endpoint],
            orjson.dumps(body),
            self._headers(schedule, row),
            self.stream,
            None if self.natural else row.output_tokens,
        )

    def _headers(self, schedule: Schedule, row: Row) -> dict[str, str]:
        headers = {"x-request-id": f"{self.run_id}-{row.id}", "x-service-class": row.service_class}
        if row.session is not None:
            headers["x-session-id"] = f"{self.run_id}-{row.session}"
        if self.send_objectives:
            objectives = schedule.objectives(row)
            for name, bound_s in (
                ("x-slo-ttft-ms", objectives.ttft_s),
                ("x-slo-tpot-ms", objectives.tpot_s),
                ("x-deadline-ms", objectives.e2e_s),
            ):
                if bound_s is not None:
                    headers[name] = f"{bound_s * 1e3 / self.time_scale:.3f}"
        return headers
