"""The page in a real browser, driven by its keyboard and mouse while decisions come in.

    python -m tests.isolated.page_in_browser [--shots FOLDER] [--browser chromium]

A refresh must take nothing away from whoever uses the page: the focus, the selected text, an open row, the place on the
screen. Needs Chromium; exit code 0 or 1. ``--shots``: pictures at desktop and phone width, light and dark, to look at.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from tests.ledger.entries import entry
from whetherman_edge import daemon
from whetherman_edge.config import Config, Loaded
from whetherman_edge.gate.verdict import LABELS
from whetherman_edge.ledger import live, records, replay
from whetherman_edge.ledger.counters import Counters

PATIENCE_S = 30.0
DESKTOP, PHONE = (1280, 900, False), (390, 844, True)
_REASONS = ("scored", "below_tau", "no_profile", "forced", "loop", "gate_late")
_AGENTS = ("qwen2.5:7b", "llama3.2:3b", "a-model-with-a-rather-long-name-that-somebody-chose:latest")

# What somebody at the page would lose.
_HELD = """(() => {
  const chosen = getSelection(), focused = document.activeElement;
  return {focus: focused.dataset.key || focused.id || focused.tagName, selected: chosen.toString(),
    open: document.querySelectorAll("tr.more:not([hidden])").length,
    top: Math.round(focused.getBoundingClientRect().top), first: document.querySelector("tr.row").dataset.key};
})()"""


class Browser:
    """One tab, by the DevTools protocol. ``complaints``: what the console and the page's policy objected to."""

    def __init__(self, channel: aiohttp.ClientWebSocketResponse) -> None:
        self._channel = channel
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []

    async def do(self, method: str, **params: object) -> dict:
        """One command, and what came of it."""
        number = next(self._numbers)
        await self._channel.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self._channel.receive_json()
                if message.get("id") == number:
                    if "error" in message:
                        raise RuntimeError(f"{method}: {message['error']}")
                    return message["result"]
                if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                    self.complaints.append(str(message["params"])[:300])

    async def value(self, expression: str):
        """What an expression of JavaScript gives."""
        result = await self.do("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression[:60]}: {result['exceptionDetails']}")
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until it is true."""
        async with asyncio.timeout(PATIENCE_S):
            while not await self.value(expression):  # noqa: ASYNC110 - the page has no event for us
                await asyncio.sleep(0.05)

    async def open(self, url: str, size: tuple[int, int, bool] = DESKTOP, scheme: str = "light") -> None:
        """A page, once it shows a row."""
        width, height, mobile = size
        await self.do(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=mobile, deviceScaleFactor=1
        )
        await self.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await self.do("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && !!document.querySelector('tr.row')")

    async def press(self, key: str) -> None:
        """A key, as a keyboard does it."""
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.do("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        await self.do("Input.dispatchKeyEvent", type="keyUp", **event)

    async def double_click(self, expression: str) -> None:
        """Selects a word, as a mouse does it."""
        await self.value(f"({expression}).scrollIntoView({{block: 'center'}})")
        box = await self.value(f"(() => {{ const r = ({expression}).getBoundingClientRect(); return [r.x, r.y]; }})()")
        for count in (1, 2):
            for kind in ("mousePressed", "mouseReleased"):
                at = {"x": box[0] + 30, "y": box[1] + 14, "button": "left", "clickCount": count}
                await self.do("Input.dispatchMouseEvent", type=kind, **at)


@contextlib.asynccontextmanager
async def browser(program: str, folder: Path) -> AsyncIterator[Browser]:
    """A browser without a window, in a profile of its own."""
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run"]
    process = await asyncio.create_subprocess_exec(
        program, *options, f"--user-data-dir={folder}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port_file = folder / "DevToolsActivePort"
        async with asyncio.timeout(PATIENCE_S):
            while not (port_file.exists() and port_file.read_text().count("\n")):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            tabs = await (await session.get(f"http://127.0.0.1:{port}/json/list")).json()
            address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as channel:
                tab = Browser(channel)
                for domain in ("Page", "Runtime", "Log"):
                    await tab.do(f"{domain}.enable")
                yield tab
    finally:
        process.terminate()
        await process.wait()


class Run:
    """The checks. ``faults``: those that did not hold."""

    def __init__(self, tab: Browser, url: str, path: Path) -> None:
        self._tab, self._url = tab, url
        self._ledger = live.LiveLedger(True, Counters(), path)
        self._n = 0
        self.faults = 0

    def say(self, what: str, holds: bool, shown: object) -> None:
        """One line of the report."""
        self.faults += not holds
        print(f"{what:<58} {'yes' if holds else 'NO'}: {shown}")

    async def decide(self, n: int) -> None:
        """More decisions, and the refresh that shows them."""
        self.record(n)
        await self._tab.until(f"document.getElementById('state').textContent.startsWith('{self._n} ')")

    def record(self, n: int) -> None:
        """More decisions of several agents."""
        for i in range(self._n, self._n + n):
            label = LABELS[i % len(LABELS)]
            self._ledger.record(
                entry(
                    at_s=time.time() - 86_400.0 * (i % 5) * (i < 150),
                    session=i,
                    agent=_AGENTS[i % len(_AGENTS)],
                    decision=label,
                    verdict=label,
                    reason=_REASONS[i % len(_REASONS)],
                    applied=i % 7 == 0,
                    plan="note" if i % 7 == 0 else "",
                    status=200 if i % 11 else 502,
                    calls=i % 3,
                )
            )
        self._n += n

    def close(self) -> None:
        """The last ones are on disk."""
        self._ledger.close()

    async def keeps(self) -> None:
        """A refresh takes neither focus nor selection nor an open row, and a row that goes hands its focus on."""
        tab = self._tab
        await self.decide(1)
        await tab.value("document.getElementById('f-live').focus()")
        for _ in range(5):
            await tab.press("Tab")
        await tab.press("Enter")
        before = await tab.value(_HELD)
        self.say(
            "Tab and Enter reach and open a row", before["focus"].startswith("row") and before["open"] == 1, before
        )
        await self.decide(2)
        after = await tab.value(_HELD)
        self.say("a refresh came", after["first"] != before["first"], after["first"])
        self.say("the row has the focus still", after["focus"] == before["focus"], after["focus"])
        self.say("and is open", after["open"] == 1, after["open"])
        self.say("and stays where it is on the screen", abs(after["top"] - before["top"]) <= 1, after["top"])
        await tab.press("Tab")
        following = await tab.value(_HELD)
        number = int(before["focus"].removeprefix("row"))
        self.say("Tab goes on from it", following["focus"] == f"row{number - 1}", following["focus"])
        await tab.press("Enter")
        await tab.double_click("document.querySelectorAll('tr.row')[9].cells[5]")
        before = await tab.value(_HELD)
        await self.decide(2)
        after = await tab.value(_HELD)
        self.say("selected text stays selected", before["selected"] == after["selected"] != "", after["selected"])
        await tab.double_click("document.querySelectorAll('#agents tr')[1].cells[0]")
        before = await tab.value(_HELD)
        await self.decide(2)
        after = await tab.value(_HELD)
        self.say("in the table of agents too", before["selected"] == after["selected"] != "", after["selected"])
        await tab.value("document.activeElement.blur(); getSelection().removeAllRanges()")
        await tab.value("document.querySelectorAll('tr.row')[40].scrollIntoView()")
        row = "document.querySelector('[data-key=' + JSON.stringify('row%d') + ']').getBoundingClientRect().top"
        number = self._n - 40
        before = await tab.value(row % number)
        await self.decide(2)
        after = await tab.value(row % number)
        self.say("what is being read stays on the screen", abs(after - before) <= 1, f"{before:.0f}, {after:.0f}")
        await tab.value("scrollTo(0, 0)")
        for control in ("f-reason", "f-live", "more"):
            await tab.value(f"document.getElementById('{control}').focus()")
            await self.decide(1)
            focus = (await tab.value(_HELD))["focus"]
            self.say(f"the focus of a control stays: {control}", focus == control, focus)
        await tab.value("[...document.querySelectorAll('tr.row')].at(-1).focus()")
        before = await tab.value(_HELD)
        await self.decide(1)
        after = await tab.value(_HELD)
        last = await tab.value("[...document.querySelectorAll('tr.row')].at(-1).dataset.key")
        holds = after["focus"] == last != before["focus"]
        self.say("the oldest row goes: the last has its focus", holds, f"{before['focus']} -> {after['focus']}")

    async def chooses(self) -> None:
        """A choice among what was seen stays chosen when there is more to choose from."""
        tab = self._tab
        await tab.value("const f = document.getElementById('f-agent'); f.value = f.options[2].value; "
                        "f.dispatchEvent(new Event('change'))")  # fmt: skip
        chosen = await tab.value("document.getElementById('f-agent').value")
        self._ledger.record(entry(agent="a-new-agent"))
        self._n += 1
        await tab.until("[...document.getElementById('f-agent').options].some((one) => one.value === 'a-new-agent')")
        kept = await tab.value("document.getElementById('f-agent').value")
        self.say("a choice stays when others are added", chosen == kept != "", kept)
        agents = await tab.value(
            "[...new Set([...document.querySelectorAll('tr.row')].map((r) => r.cells[5].textContent))]"
        )
        self.say("and only its rows are shown", agents == [chosen], agents)


async def pictures(run: Run, tab: Browser, urls: dict[str, str], shots: Path | None) -> None:
    """Each width and each scheme: nothing wider than the window, and a picture."""
    for (page, url), (width, size), scheme in itertools.product(
        urls.items(), (("desktop", DESKTOP), ("phone", PHONE)), ("light", "dark")
    ):
        await tab.open(url, size, scheme)
        await tab.value("document.querySelectorAll('tr.row')[2].click()")
        await tab.value("document.querySelectorAll('tr.row')[2].focus({preventScroll: true})")
        wide = await tab.value("document.documentElement.scrollWidth")
        run.say(f"{page}, {width}, {scheme}: fits the window", wide <= size[0], f"{wide} of {size[0]} pixels")
        right = await tab.value("document.querySelector('tr.more:not([hidden]) div').getBoundingClientRect().right")
        run.say(f"{page}, {width}, {scheme}: and an open row", right <= size[0], f"{right:.0f} of {size[0]} pixels")
        if width == "desktop":
            tables = await tab.value(
                "[...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth).length"
            )
            run.say(f"{page}, {width}, {scheme}: and so does every table", not tables, f"{tables} are wider")
        if shots:
            for part, place in (("top", "document.body"), ("rows", "document.getElementById('h-rows')")):
                await tab.value(f"{place}.scrollIntoView()")
                picture = await tab.do("Page.captureScreenshot")
                (shots / f"{page}-{width}-{scheme}-{part}.png").write_bytes(base64.b64decode(picture["data"]))


async def main(program: str, shots: Path | None) -> int:
    """All of it, in folders of its own."""
    with tempfile.TemporaryDirectory(prefix="page-in-browser-") as name:
        folder = Path(name)
        os.environ["STATE_DIRECTORY"] = name
        records.FLUSH_EVERY_S = 0.0  # type: ignore[misc]
        live.SHARE_MAX = 1.0  # type: ignore[misc]
        path = folder / records.NAME
        config = Config(port=0, engine="static", upstream="http://127.0.0.1:9", ledger="off")
        async with (
            daemon.running(Loaded(config, {"port": "flag"})) as urls,
            browser(program, folder / "profile") as tab,
        ):
            url = urls[0] + "/whetherman/"
            run = Run(tab, url, path)
            run.record(160)
            await tab.open(url)
            await run.keeps()
            await run.chooses()
            run.close()
            recorded = folder / "replay.html"
            recorded.write_bytes(replay.render(path))
            await pictures(run, tab, {"live": url, "replay": recorded.as_uri()}, shots)
            run.say("nothing for the console to complain of", not tab.complaints, tab.complaints)
    return 1 if run.faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The page in a real browser while decisions come in.")
    parser.add_argument("--browser", default=shutil.which("chromium") or "chromium", metavar="PROGRAM")
    parser.add_argument("--shots", type=Path, metavar="FOLDER")
    parsed = parser.parse_args()
    sys.exit(asyncio.run(main(parsed.browser, parsed.shots)))
