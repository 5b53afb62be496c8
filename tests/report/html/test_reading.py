"""The report for every reader: names for a screen reader, contrast, print, and color that never stands alone."""

import re
from itertools import pairwise, product

import pytest
from playwright.sync_api import Page, expect

from attnorm.report import page as report
from attnorm.report.views import SCALE, VERDICT_COLORS, VERDICTS
from tests.report.html.conftest import Open
from tests.report.html.sample import sample

NAMED = {
    "button", "combobox", "searchbox", "textbox", "gridcell", "columnheader", "rowheader", "link", "image", "grid",
    "region", "table",
}  # fmt: skip
STYLE = report.HERE / "style"
CONTRAST = """(pairs) => {
    const box = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const light = (color) => {
        box.fillStyle = color;
        box.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...box.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => {
            const c = value / 255;
            return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    return pairs.map((pair) => {
        const [low, high] = pair.map(light).sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    });
}"""


def resolved(page: Page, *names: str, of: str = "body") -> list[str]:
    """The colors behind the page's variables, under its present theme."""
    script = """([of, names]) => {
        const probe = document.createElement("i");
        document.querySelector(of).append(probe);
        const colors = names.map((name) => {
            probe.style.color = `var(${name})`;
            return getComputedStyle(probe).color;
        });
        probe.remove();
        return colors;
    }"""
    return page.evaluate(script, [of, list(names)])


def contrasts(page: Page, pairs: list[list[str]]) -> list[float]:
    return page.evaluate(CONTRAST, pairs)


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_its_ground(open_report: Open, dark: bool) -> None:
    page = open_report(sample(), dark=dark)
    inks = ("--ink", "--soft", "--accent", "--second", "--third", "--fourth", "--fifth")
    names = (*inks, "--paper", "--raised", "--accent-wash")
    color = dict(zip(names, resolved(page, *names), strict=True))
    pairs = [*product(inks, ("--paper", "--raised")), ("--ink", "--accent-wash")]
    found = dict(zip(pairs, contrasts(page, [[color[ink], color[ground]] for ink, ground in pairs]), strict=True))
    assert {pair: contrast for pair, contrast in found.items() if contrast < 4.5} == {}
    verdicts = contrasts(page, [resolved(page, "--v-ink", "--v", of=f"dl .{word.style}") for word in VERDICTS])
    assert [word.name for word, contrast in zip(VERDICTS, verdicts, strict=True) if contrast < 4.5] == []
    page.select_option("#choose-metric", "entropy_ratio")
    style = "getComputedStyle(cell)"
    cells = page.locator(".cell:not(.missing)").evaluate_all(
        f"all => all.map((cell) => [{style}.color, {style}.backgroundColor])"
    )
    assert len(cells) == 11
    assert min(contrasts(page, cells)) >= 4.5


def test_the_theme_follows_the_system_until_the_reader_chooses(open_report: Open) -> None:
    page = open_report(sample(), dark=True)
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    button = page.locator("#theme")
    expect(button).to_have_attribute("aria-label", "Switch to light colors")
    button.click()
    light = page.evaluate(ground)
    assert light != dark
    page.emulate_media(color_scheme="light")
    assert page.evaluate(ground) == light
    button.click()
    assert page.evaluate(ground) == dark


def test_everything_that_can_be_used_has_a_name_and_headings_descend(open_report: Open) -> None:
    page = open_report(sample())
    page.locator(".chart summary").first.click()
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node["ignored"]]
    seen = {role for role, _ in roles}
    assert {"button", "combobox", "searchbox", "gridcell", "image", "link", "grid"} <= seen
    corner = ("columnheader", "")  # the empty corner of the map
    assert [one for one in roles if one[0] in NAMED and not one[1].strip() and one != corner] == []
    assert page.evaluate("new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size") == page.evaluate(
        "document.querySelectorAll('[id]').length"
    )
    named_by = "[...document.querySelectorAll('[aria-labelledby]')].map(e => e.getAttribute('aria-labelledby'))"
    assert [name for name in page.evaluate(named_by) if page.locator(f"#{name}").count() != 1] == []
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map(h => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_paper_is_white_and_nothing_is_cut_off(open_report: Open) -> None:
    page = open_report(sample(), dark=True, width=720)
    page.locator("#theme").click()
    page.locator("#theme").click()
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert contrasts(page, [resolved(page, "--ink", "--paper")])[0] >= 7
    for gone in ("#theme", ".topline nav", ".filters"):
        expect(page.locator(gone)).to_be_hidden()
    cut = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollHeight > e.clientHeight + 1).length"
    assert page.evaluate(cut) == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 720
    assert len(page.pdf(format="A4")) > 20_000


def test_every_verdict_has_a_mark_of_its_own_and_colors_that_page_and_figures_share() -> None:
    assert len({word.mark for word in VERDICTS}) == len(VERDICTS)
    style = (STYLE / "colors.css").read_text(encoding="utf-8")
    for word in VERDICTS:
        rule = re.search(rf"\.{word.style} \{{(.*)\}}", style)
        assert rule is not None
        first = [
            value.split(",")[0].removeprefix("light-dark(") for value in re.findall(r"--v(?:-ink)?: ([^;]+);", rule[1])
        ]
        assert tuple(first) == VERDICT_COLORS[word.name]
    script = (STYLE.parent / "script" / "color.js").read_text(encoding="utf-8")
    assert tuple(re.findall(r'"(#[0-9a-f]{6})"', script.split("\n")[1])) == SCALE
