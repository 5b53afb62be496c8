"""A real browser for the report, one for all tests; a page that complains or fetches anything fails its test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from attnorm.report import page as report
from attnorm.report_data import ReportData

Open = Callable[..., Page]
PATIENCE = 20_000  # milliseconds: a busy machine is no failure
expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ReportData], Path]:
    """The saved page of an analysis, written once."""
    folder = tmp_path_factory.mktemp("pages")
    written = dict[int, tuple[ReportData, Path]]()  # with the analysis, or another one could get its id

    def path_of(analysis: ReportData) -> Path:
        if id(analysis) not in written:
            written[id(analysis)] = analysis, report.save(analysis, folder / f"{len(written)}.html")
        return written[id(analysis)][1]

    return path_of


@pytest.fixture(scope="session")
def tabs(browser: Browser) -> Iterator[dict[bool, "Tab"]]:
    """The page with scripts and the one without that all tests use: a new page each would double their time."""
    made = {script: Tab(browser, script=script) for script in (True, False)}
    yield made
    for tab in made.values():
        tab.page.context.close()


class Tab:
    """A browser page and its complaints."""

    def __init__(self, browser: Browser, *, script: bool) -> None:
        self.complaints = list[str]()
        self.address = ""
        self.page = browser.new_context(java_script_enabled=script).new_page()
        self.page.set_default_timeout(PATIENCE)
        note = self.complaints.append
        self.page.on("console", lambda message: note(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: note(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (note(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self._note_request(request.url))

    def open(self, path: Path, address: str, *, width: int, dark: bool) -> Page:
        self.page.goto("about:blank")  # another address of the same file would not load it again
        self.page.mouse.move(0, 0)
        # To scroll smoothly means to draw sixty times a second: half a second of work for each far element.
        self.page.emulate_media(media="screen", color_scheme="dark" if dark else "light", reduced_motion="reduce")
        self.page.set_viewport_size({"width": width, "height": 900})
        self.address = path.as_uri()
        self.page.goto(f"{self.address}{address}")
        return self.page

    def _note_request(self, address: str) -> None:
        if not address.startswith((self.address, "data:", "about:blank")):
            self.complaints.append(f"request: {address}")


@pytest.fixture
def empty_page(tabs: dict[bool, Tab]) -> Page:
    """For scripts alone: it does not show a report."""
    tabs[True].page.goto("about:blank")
    return tabs[True].page


@pytest.fixture
def open_report(tabs: dict[bool, Tab], pages: Callable[[ReportData], Path]) -> Iterator[Open]:
    """open_report(analysis, width=..., dark=..., address=..., script=...) -> Page, all quiet until the test is over."""
    for tab in tabs.values():
        tab.complaints.clear()

    def open_it(
        analysis: ReportData, *, width: int = 1400, dark: bool = False, address: str = "", script: bool = True
    ) -> Page:
        return tabs[script].open(pages(analysis), address, width=width, dark=dark)

    open_it.complaints = tabs[True].complaints  # type: ignore[attr-defined]
    yield open_it
    assert not [complaint for tab in tabs.values() for complaint in tab.complaints]
