"""The live page in a real browser: it loads alone, follows the gateway, and can be used by keyboard and on a phone."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.async_api import Page, async_playwright, expect

from loadtests.faults import Command
from loadtests.replica import Fleet, ReplicaSettings
from tests.gateway.running import Running, running, until

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
LOADED: dict[str, Any] = {
    "policy": {"name": "forebay", "seed": 1},
    "classes": {"standard": {"ttft_s": "none", "tpot_s": "none"}},  # what is good must not depend on this machine
    "shadow": {"policies": ["least_request"], "share": 1.0},
}
PATIENCE_MS = 60_000  # for a condition, on a machine however busy

expect.set_options(timeout=PATIENCE_MS)


@dataclass
class Seen:
    """A page, and everything it asked for or complained about."""

    page: Page
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def clean(self, url: str) -> bool:
        assert self.complaints == []
        assert [one for one in self.asked if not one.startswith(f"{url}/")] == []
        return len(self.asked) > 4


@pytest.fixture
async def sim() -> AsyncIterator[Fleet]:
    async with Fleet.of(ReplicaSettings(time_scale=20.0), 2) as fleet:
        yield fleet


@asynccontextmanager
async def browsing(**options: Any) -> AsyncIterator[Seen]:
    async with async_playwright() as play:
        browser = await play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE_MS)
        page = await browser.new_page(**options)
        page.set_default_timeout(PATIENCE_MS)
        seen = Seen(page)
        page.on("request", lambda request: seen.asked.append(request.url))
        page.on(
            "console", lambda said: seen.complaints.append(said.text) if said.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        try:
            yield seen
        finally:
            await browser.close()


async def chats(g: Running, count: int, **headers: str) -> list[int]:
    body = {"model": "sim", "messages": [{"role": "user", "content": "river " * 400}], "max_tokens": 4}
    answers = [g.http.post("/v1/chat/completions", json=body, headers=headers) for _ in range(count)]
    return [answer.status_code for answer in await asyncio.gather(*answers)]


async def test_it_follows_the_gateway_and_shows_a_dead_replica(sim: Fleet) -> None:
    async with running(*sim.urls, **LOADED) as g, browsing() as seen:
        page = seen.page
        await page.goto(f"{g.url}/dashboard")
        await expect(page.locator("#connection")).to_have_text("live")
        await expect(page.locator("#replicas tbody tr")).to_have_count(2)
        await expect(page.locator("#notable")).to_contain_text("None so far.")
        assert await chats(g, 12) == [200] * 12
        attainment = page.locator("#classes tbody tr", has_text="standard").locator("td[data-label=attainment]")
        await expect(attainment).to_have_text("100 %")
        await expect(page.locator("#shadows tbody tr")).to_contain_text("least_request12")
        assert await chats(g, 2, **{"x-slo-ttft-ms": "1"}) == [429, 429]
        await expect(attainment).to_have_text("85.7 %")
        await expect(page.locator("#notable tbody tr")).to_have_count(2)
        sim.members[1].order(Command("kill"))
        await expect(page.locator("#wrong")).to_have_text("r1 is out of rotation: refused.")
        await expect(page).to_have_title("(1) Forebay")
        await expect(page.locator("#replicas tr", has_text="r1")).to_contain_text("out: refused")
        assert seen.clean(g.url)


async def test_what_went_wrong_is_opened_by_keyboard_and_stays_open(sim: Fleet) -> None:
    async with running(*sim.urls, **LOADED) as g, browsing() as seen:
        page = seen.page
        assert await chats(g, 1, **{"x-slo-ttft-ms": "1"}) == [429]
        await page.goto(f"{g.url}/dashboard")
        opener = page.locator("#notable button.open")
        await expect(opener).to_have_attribute("aria-expanded", "false")
        reached = []
        for _ in range(12):
            await page.keyboard.press("Tab")
            reached.append(await page.evaluate("document.activeElement.className || document.activeElement.id"))
            if reached[-1] == "open":
                break
        assert reached[0] == "skip"
        assert "pause" in reached
        assert reached[-1] == "open"
        await page.keyboard.press("Enter")
        more = page.locator("#notable tr.more")
        await expect(more).to_contain_text("considered")
        await expect(more.locator("tbody tr")).to_have_count(2)
        drawn = g.gateway.live.computed
        await until(lambda: g.gateway.live.computed >= drawn + 2, 60.0)
        await expect(opener).to_be_focused()
        await expect(more).to_contain_text("considered")
        await page.keyboard.press("Enter")
        await expect(more).to_have_count(0)
        assert seen.clean(g.url)


async def test_the_token_is_asked_for_and_kept_in_the_tab() -> None:
    async with running(environ={"FOREBAY_ADMIN_TOKEN": "s3cret"}) as g, browsing() as seen:
        page = seen.page
        await page.goto(f"{g.url}/dashboard")
        await expect(page.locator("#ask")).to_be_visible()
        await expect(page.locator("#token")).to_be_focused()
        await page.keyboard.type("wrong")
        await page.keyboard.press("Enter")
        await expect(page.locator("#ask-why")).to_have_text("That token was not right.")
        await page.keyboard.type("s3cret")
        await page.keyboard.press("Enter")
        await expect(page.locator("#connection")).to_have_text("live")
        await page.reload()
        await expect(page.locator("#connection")).to_have_text("live")
        assert await page.evaluate("Object.values(sessionStorage)") == ["s3cret"]
        assert await page.evaluate("localStorage.length") == 0
        assert not [url for url in seen.asked if "s3cret" in url]


async def test_a_phone_needs_no_sideways_scrolling_and_dark_is_dark(sim: Fleet) -> None:
    async with running(*sim.urls, **LOADED) as g, browsing(viewport={"width": 360, "height": 740}) as seen:
        page = seen.page
        await chats(g, 6)
        await chats(g, 1, **{"x-slo-ttft-ms": "1"})
        await page.goto(f"{g.url}/dashboard")
        await page.locator("#notable button.open").click()
        await expect(page.locator("#notable tr.more")).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
        for scheme, ground in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(18, 20, 22)")):
            await page.emulate_media(color_scheme=scheme)
            assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
        assert seen.clean(g.url)


async def test_a_gateway_that_went_is_said_to_be_old(sim: Fleet) -> None:
    async with browsing() as seen:
        async with running(*sim.urls) as g:
            await seen.page.goto(f"{g.url}/dashboard")
            await expect(seen.page.locator("#connection")).to_have_text("live")
        await expect(seen.page.locator("#connection")).to_contain_text("no answer for")
        await expect(seen.page.locator("#replicas tbody tr")).to_have_count(2)
