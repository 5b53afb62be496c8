"""A real browser for the report, one for all tests; a page that complains or fetches anything fails its test."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from attnorm.report.html import page as report
from tests.report.html.sample import Sample

Open = Callable[..., Page]
PATIENCE = 20_000  # milliseconds: a busy machine is no failure
expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no chromium or google-chrome on the path; install one to test the report in a browser")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=flags)
        yield started
        started.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sample], Path]:
    """The saved page of an analysis, written once."""
    folder = tmp_path_factory.mktemp("pages")
    written = dict[int, tuple[Sample, Path]]()  # with the analysis, or another one could get its id

    def path_of(analysis: Sample) -> Path:
        if id(analysis) not in written:
            written[id(analysis)] = analysis, report.save(analysis, folder / f"{len(written)}.html")
        return written[id(analysis)][1]

    return path_of


@pytest.fixture
def open_report(browser: Browser, pages: Callable[[Sample], Path]) -> Iterator[Open]:
    """open_report(analysis, width=..., dark=..., address=..., script=...) -> Page, all quiet until the test is over."""
    contexts, complaints = [], list[str]()

    def open_it(
        analysis: Sample,
        *,
        width: int = 1400,
        dark: bool = False,
        address: str = "",
        script: bool = True,
    ) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            java_script_enabled=script,
        )
        contexts.append(context)
        path = pages(analysis)
        opened = context.new_page()
        opened.set_default_timeout(PATIENCE)
        opened.on("console", lambda message: complaints.append(f"console: {message.text}"))
        opened.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        opened.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        opened.on("request", lambda request: _note_request(request.url, path, complaints))
        opened.goto(f"{path.as_uri()}{address}")
        return opened

    open_it.complaints = complaints  # type: ignore[attr-defined]
    yield open_it
    for context in contexts:
        context.close()
    assert not complaints


def _note_request(address: str, page: Path, complaints: list[str]) -> Any:
    if not address.startswith((page.as_uri(), "data:")):
        complaints.append(f"request: {address}")
