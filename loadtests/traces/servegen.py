"""ServeGen clients (Xiang et al. 2025, arXiv 2505.09999; Apache-2.0): arrival parameters of real clients.

Not a request log: per client and 10-minute window a rate, an inter-arrival law (Gamma or Weibull; shape, scale) and
length quantiles. Requests are drawn from them: the shapes, and with them the bursts, stay; the pool's rate is scaled
to BASE_RATE_RPS at load 1. The seed picks the hour of the day. Lengths are log-normal through p50 and p90; where the
file has none, the quantiles of Azure conversations (in 1,020 and 2,735; out 129 and 424). Nothing is shared:
the source has no prefix identity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from loadtests.schedule import Row
from loadtests.seeds import Stream, exp, log
from loadtests.source import Generator
from loadtests.traces.file import Trace, unshared

BASE_RATE_RPS = 4.0
WINDOW_S = 600
BLOCK_TOKENS = 64
LONGEST_PROMPT, LONGEST_OUTPUT = 32_768, 4_096


@dataclass(slots=True, frozen=True)
class Piece:
    """One client in one 10-minute window."""

    client: str
    rate_rps: float
    law: str
    shape: float
    lengths: tuple[float, float, float, float]  # in p50, in p90, out p50, out p90


def recognises(trace: Trace) -> bool:
    return trace.head.startswith("model,client,window_start_s,rate_rps")


def read(trace: Trace) -> Generator:
    pools: dict[str, dict[int, list[Piece]]] = defaultdict(lambda: defaultdict(list))
    for line, f in trace.table():
        law = f.get("dist") or ""
        if law not in ("Gamma", "Weibull"):
            raise trace.wrong(line, f"dist is {law!r}; Gamma or Weibull would be right")
        lengths = _lengths(trace, line, f)
        pool = pools[f.get("model") or "pool"]
        window = int(trace.real(line, "window_start_s", f.get("window_start_s"))) // WINDOW_S
        shape = trace.real(line, "arg1", f.get("arg1"))
        rate = trace.real(line, "rate_rps", f.get("rate_rps"))
        pool[window].append(Piece(f"{f.get('model')}/{f.get('client')}", rate, law, shape, lengths))
    name = max(pools, key=lambda m: sum(1 for window in pools[m].values() for p in window if p.lengths[0] > 0))
    windows = pools[name]
    order = sorted(windows)
    pool_rate = sum(p.rate_rps for w in windows.values() for p in w) / max(1, len(windows))

    def make(seed: int, span_s: float) -> Sequence[Row]:
        rows: list[Row] = []
        first = Stream(seed, "servegen", "hour").below(len(order))
        scale = BASE_RATE_RPS / pool_rate
        at, k = 0.0, 0
        while at < span_s:
            for piece in windows[order[(first + k) % len(order)]]:
                rows += _draw(
                    piece, scale, Stream(seed, "servegen", piece.client, str(k)), at, min(at + WINDOW_S, span_s)
                )
            at, k = at + WINDOW_S, k + 1
        rows.sort(key=lambda r: r.at_s or 0.0)
        return [_unique(row, i) for i, row in enumerate(rows)]

    notes = (f"pool {name}, scaled from {pool_rate:.3g} to {BASE_RATE_RPS:g} requests/s", "no prompt shares anything")
    longest = (("interactive", LONGEST_PROMPT, LONGEST_OUTPUT),)
    return Generator("servegen", make, longest, BLOCK_TOKENS, "", trace.name, trace.sha256, notes)


def _draw(piece: Piece, scale: float, stream: Stream, start: float, end: float) -> list[Row]:
    mean = 1.0 / (piece.rate_rps * scale)
    rows = []
    at = start + stream.uniform() * mean
    unit = 1.0 if piece.law == "Gamma" else _weibull_mean(piece.shape)
    while at < end:
        in50, in90, out50, out90 = piece.lengths
        prompt = min(LONGEST_PROMPT, max(1, round(stream.lognormal(in50, in90))))
        output = min(LONGEST_OUTPUT, max(1, round(stream.lognormal(out50, out90))))
        rows.append(Row(0, at, prompt, output, tenant=piece.client))
        if piece.law == "Gamma":
            at += stream.gamma(piece.shape, mean / piece.shape)
        else:
            at += stream.weibull(piece.shape, mean / unit)
    return rows


def _weibull_mean(shape: float) -> float:
    """Gamma(1 + 1 / shape), by Stirling's series after a shift; portable to the last bit."""
    z, product = 1.0 + 1.0 / shape, 1.0
    while z < 10.0:
        product *= z
        z += 1.0
    series = 1.0 / (12.0 * z) - 1.0 / (360.0 * z * z * z)
    return exp((z - 0.5) * log(z) - z + 0.9189385332046727 + series) / product


def _unique(row: Row, number: int) -> Row:
    return replace(row, blocks=unshared(number, row.prompt_tokens, BLOCK_TOKENS))


def _lengths(trace: Trace, line: int, f: dict[str, str]) -> tuple[float, float, float, float]:
    if not f.get("in_p50") or not f.get("out_p50"):
        return (1020.0, 2735.0, 129.0, 424.0)
    values = [max(1.0, trace.real(line, k, f.get(k))) for k in ("in_p50", "in_p90", "out_p50", "out_p90")]
    return (values[0], max(values[0] * 1.01, values[1]), values[2], max(values[2] * 1.01, values[3]))
