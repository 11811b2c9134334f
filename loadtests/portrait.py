"""`python -m loadtests.portrait`: the live page as an operator sees it, as a PNG, from simulated replicas under load.

Four simulated replicas (A100, 8B model, a little slower than real ones), the gateway with an experiment of two arms,
and applications of three service classes of which some have a leak in their prompts. Traffic rises until some of it is
refused; then the page is photographed in headless Chromium. Nothing here is evidence: it is what the page looks like.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from loadtests import leaks, profiles
from loadtests.engine import EngineConfig
from loadtests.live_replica import ReplicaSettings
from loadtests.playground import Playground

MOST_REQUESTS = 100_000
CLASSES = ("interactive", "interactive", "interactive", "standard", "standard", "batch")
VIEWS: Mapping[str, tuple[int, int, str]] = {
    "light": (1360, 1200, "light"),
    "dark": (1360, 1200, "dark"),
    "phone": (390, 844, "light"),
}
GATEWAY: dict[str, Any] = {
    "policy": {"name": "forebay"},
    "classes": {"interactive": {"ttft_s": 0.6, "ttft_s_per_token": 0.00025, "tpot_s": 0.05}},
    "prefixes": {"cpu_share": 0.05},
    "health": {"slow_start_s": 0.0},
}
EXPERIMENT: dict[str, Any] = {
    "name": "least-work",
    "swing": 0.0,
    "wash_s": 0.0,
    "arms": [{"name": "control"}, {"name": "candidate", "policy": "least_work"}],
}


def replicas() -> ReplicaSettings:
    return ReplicaSettings(EngineConfig(profiles.PROFILES["a100-8b"]), "sim-8b", time_scale=0.8, stream_interval=4)


async def load(url: str, per_s: float, seed: int = 3) -> None:
    """Applications that ask about `per_s` times a second, in bursts, and read what they get; until cancelled."""
    rng = random.Random(seed)
    made = leaks.families(seed, leaky=True)[:16] + [f for f in leaks.families(seed, leaky=True) if f.leak]
    limits = httpx.Limits(max_connections=None)
    begun = time.monotonic()
    asked: set[asyncio.Task[None]] = set()
    async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False, limits=limits) as http:
        for one in leaks.traffic(made, MOST_REQUESTS, seed):
            body = {**one.body, "model": "sim-8b", "stream": True, "max_tokens": rng.randint(20, 300)}
            path = "/v1/messages" if one.api == "messages" else "/v1/chat/completions"
            headers = {"x-service-class": CLASSES[one.family % len(CLASSES)], "x-session-id": f"s{rng.randrange(99)}"}
            task = asyncio.create_task(_ask(http, path, body, headers))
            asked.add(task)
            task.add_done_callback(asked.discard)
            burst = 3.0 if int(time.monotonic() - begun) % 25 >= 18 else 0.75
            await asyncio.sleep(rng.expovariate(burst * per_s))


async def _ask(http: httpx.AsyncClient, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
    try:
        async with http.stream("POST", path, json=body, headers=dict(headers)) as answer:
            async for _ in answer.aiter_raw():
                pass
    except httpx.HTTPError:
        return


async def photograph(url: str, out: Path, chromium: str, look_s: float, per_s: float, views: list[str]) -> None:
    from playwright.async_api import async_playwright

    async with async_playwright() as play:
        browser = await play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        pages = {}
        for name in views:
            width, height, scheme = VIEWS[name]
            phone = name == "phone"
            page = await browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme="dark" if scheme == "dark" else "light",
                device_scale_factor=2 if phone else 1,
            )
            await page.goto(f"{url}/dashboard")
            pages[name] = page
        traffic = asyncio.create_task(load(url, per_s))
        await asyncio.sleep(look_s)
        for name, page in pages.items():
            opener = page.locator("#notable button.open").first
            if await opener.count():
                await opener.click()
            await page.wait_for_timeout(300)
            await page.evaluate("scrollTo(0, 0)")
            await page.screenshot(
                path=out.with_stem(f"{out.stem}-{name}") if len(pages) > 1 else out, full_page=name == "phone"
            )
        traffic.cancel()
        await browser.close()


def portrait(
    out: Annotated[Path, typer.Option(help="The PNG; with several views each gets its name appended.")] = Path(
        "deploy/dashboard.png"
    ),
    chromium: Annotated[str, typer.Option(help="Chromium to use.")] = "/usr/bin/chromium",
    seconds: Annotated[float, typer.Option(help="How long traffic runs before.")] = 80.0,
    per_s: Annotated[float, typer.Option(help="Requests a second.")] = 13.0,
    view: Annotated[list[str] | None, typer.Option(help="light, dark or phone; repeat it for several.")] = None,
) -> None:
    """Photograph the live page under load.

    Example: python -m loadtests.portrait --out deploy/dashboard.png
    """
    with Playground(replicas(), 4, GATEWAY) as ground:
        httpx.post(f"{ground.url}/admin/experiment", json=EXPERIMENT, trust_env=False).raise_for_status()
        asyncio.run(photograph(ground.url, out, chromium, seconds, per_s, view or ["light"]))


if __name__ == "__main__":
    typer.run(portrait)
