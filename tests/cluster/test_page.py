"""The built-in page in a real browser, in front of a real cluster of fake stages."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from fastserve import Client, FastServeError

from .system import PATIENCE_S, System, wait_until
from .words import write_words

pytestmark = pytest.mark.cluster

KEY = "a-key"
#: As root, without the network, and without what a browser asks its maker for.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = PATIENCE_S * 1000
#: Where to leave pictures for people to look at.
PICTURES_ENV = "FASTSERVE_PICTURES"
VIEWS = {"light": (1440, 1060), "dark": (1440, 1060), "phone": (390, 844)}


@pytest.fixture(scope="module")
def browser(skip_or_fail: Callable[[str], None]) -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        skip_or_fail("chromium is not installed")
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def markup(tmp_path: Path) -> Path:
    """A tokenizer whose words would be markup, if anybody took them for it."""
    return write_words(tmp_path / "markup", '<img src="/x{}" onerror="document.title=1">')


@pytest.fixture
def system(markup: Path, fake_args: list[str], tmp_path: Path) -> Iterator[System]:
    """With little memory, so that there is something to swap."""
    little = ["--fake-iteration-ms=6", "--kv-memory=2MiB", "--max-model-len=2048", f"--api-key={KEY}"]
    running = System(tmp_path / "system", str(markup), *fake_args[1:], *little)
    yield running
    running.destroy()


class Load:
    """So many callers at once, each asking for long answers until the block is left."""

    def __init__(self, system: System, callers: int) -> None:
        self._system = system
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(callers)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _run(self, caller: int) -> None:
        with Client(self._system.grpc, api_key=KEY, timeout_s=PATIENCE_S) as client:
            while not self._over.is_set():
                try:
                    prompt = [1 + caller] * (5 + 30 * (caller % 5))
                    for _ in client.stream(prompt, max_tokens=40 << (caller % 6), temperature=0, ignore_eos=True):
                        if self._over.is_set():
                            break
                except FastServeError:
                    self._over.wait(0.5)  # its scheduler was taken away


class Watched:
    """A page, and everything that went wrong on it."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith(f"{origin}/") else self.elsewhere.append(r.url))

    def shows(self, selector: str, text: str) -> None:
        expect(self.page.locator(selector)).to_contain_text(text, timeout=PATIENCE_MS)

    def number(self, selector: str) -> float:
        text = self.page.locator(selector).inner_text().replace(",", "")
        return float(text) if text.replace(".", "").isdigit() else 0.0

    def ask(self, tokens: int) -> str:
        """The answer's text, when it is whole."""
        self.page.fill("#max-tokens", str(tokens))
        self.page.fill("#prompt", "hello")
        self.page.press("#prompt", "Enter")
        answer = self.page.locator(".message.assistant").last
        expect(answer.locator("small")).to_contain_text("tokens", timeout=PATIENCE_MS)
        expect(self.page.locator("#chat-send")).to_be_visible(timeout=PATIENCE_MS)
        return answer.locator("span").inner_text()


def has_bar(page: Page, kind: str) -> bool:
    script = "(kind) => [...document.querySelectorAll(`#levels .${kind}`)].some((bar) => bar.offsetWidth > 0)"
    return bool(page.evaluate(script, kind))


def show_pictures(browser: Browser, url: str, folder: Path) -> None:
    """One of each view, taken when it has something to show."""
    for name, (width, height) in VIEWS.items():
        scheme: Literal["dark", "light"] = "dark" if name == "dark" else "light"
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        context.add_init_script(f"sessionStorage.setItem('fastserve-api-key', '{KEY}')")
        page = context.new_page()
        page.goto(url)
        wait_until(partial(has_bar, page, "waiting"), "a queue has a bar")
        page.fill("#prompt", "What is a queue?")
        page.fill("#max-tokens", "24")
        page.press("#prompt", "Enter")
        expect(page.locator(".message.assistant small")).to_contain_text("tokens", timeout=PATIENCE_MS)
        page.screenshot(path=folder / f"page-{name}.png", full_page=name == "phone")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing hangs over"
        context.close()


def test_the_page_shows_the_cluster_and_talks_to_it(browser: Browser, system: System, tmp_path: Path) -> None:
    system.wait_ready()
    origin = f"http://{system.http}"
    watched = Watched(browser.new_page(), origin)
    page = watched.page
    page.goto(origin)

    watched.shows("#status", "Key wanted")
    for key, then in (("wrong", "Key not valid"), (KEY, "Serving")):
        page.fill("#key", key)
        page.press("#key", "Enter")
        watched.shows("#status", then)
    refused = [error for error in watched.errors if "401" in error]
    assert watched.errors == refused
    watched.errors.clear()

    answer = watched.ask(5)
    assert answer.count("<img src=") == 5, "text, to the letter"
    assert page.locator(".message img").count() == 0
    assert page.title() == "FastServe"

    with Load(system, 24):
        wait_until(lambda: watched.number("#waiting") > 0, "somebody waits", system)
        wait_until(lambda: has_bar(page, "waiting"), "a queue has a bar", system)
        wait_until(lambda: has_bar(page, "running"), "a queue has a bar", system)
        wait_until(lambda: watched.number("#swap-count") > 0, "KV is swapped", system)
        watched.shows("#device-text", "of 128 blocks")
        watched.shows("#stages", "Stage 1 up")
        watched.shows("#latency", "ms")
        assert watched.number("#iterations") > 0
        folder = Path(os.environ.get(PICTURES_ENV, tmp_path))
        show_pictures(browser, origin, folder)

        system.service("fastserve_scheduler").kill()
        watched.shows("#status", "Scheduler away")
        watched.shows("#notice", "The scheduler is away")
        watched.shows("#status", "Serving")
        expect(page.locator("#notice")).to_be_hidden(timeout=PATIENCE_MS)
    assert watched.ask(3).count("<img src=") == 3
    assert watched.errors == []
    assert watched.elsewhere == []
    page.close()
