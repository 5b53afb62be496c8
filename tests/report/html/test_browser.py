"""The report in a real browser: what a person clicks, types and hears does what it says, quietly and offline."""

import math
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from playwright.sync_api import Page, expect

from attnorm.report.views import verdict_word
from attnorm.report_data import ReportData
from attnorm.text import format_number
from tests.analysis.synthetic import synthetic_manifest, synthetic_tables
from tests.report.html.conftest import Open
from tests.report.html.sample import (
    CAST,
    HOSTILE,
    core_only,
    empty,
    gpt2_size,
    hostile,
    judged,
    sample,
    with_gaps,
    with_tables,
)


def head_rows(analysis: ReportData, **choice: Any) -> list[dict[str, Any]]:
    wanted = {"text": "prose", "length": 160, "normalizer": "model", **choice}
    table = analysis.tables["heads"]
    for name, value in wanted.items():
        table = table.filter(pc.equal(table[name], value))
    return table.to_pylist()


def cell(page: Page, layer: int, head: int) -> Any:
    return page.locator(f'.cell[aria-label^="Layer {layer}, head {head}:"]')


def lines(page: Page) -> list[str]:
    return page.locator("#heads-table tbody th").all_inner_texts()


def test_the_map_shows_marks_numbers_gaps_and_its_scale(open_report: Open) -> None:
    page = open_report(sample())
    for row in head_rows(sample()):
        expect(cell(page, row["layer"], row["head"])).to_have_text(verdict_word(row["verdict"]).mark)
    assert page.locator(".cell").count() == len(CAST) * len(CAST[0])
    page.select_option("#choose-metric", "max_weight")
    expect(cell(page, 2, 3)).to_have_class("cell missing")
    expect(cell(page, 2, 3)).to_have_text("–")
    page.select_option("#choose-metric", "effective_keys")
    expect(page.locator("#legend .scale")).to_contain_text("Effective keys (keys, logarithmic)")
    page.select_option("#choose-metric", "horizon")
    cell(page, 0, 0).click()
    first = next(row for row in head_rows(sample()) if (row["layer"], row["head"]) == (0, 0))
    assert close((cell(page, 0, 0).get_attribute("aria-label") or "").split()[-2], first["horizon_q50"])
    expect(page.locator(".chart", has_text="Entropy against length")).to_contain_text("horizon")


def test_a_click_opens_the_head_with_its_evidence_and_marks_it_everywhere(open_report: Open) -> None:
    page = open_report(sample())
    cell(page, 1, 2).click()
    expect(page.locator("#panel-title")).to_contain_text("Layer 1, head 2")
    row = next(row for row in head_rows(sample()) if (row["layer"], row["head"]) == (1, 2))
    expect(page.locator("#panel .evidence")).to_have_text(row["evidence"])
    expect(cell(page, 1, 2)).to_have_attribute("aria-selected", "true")
    assert page.locator('.cell[aria-selected="true"]').count() == 1
    expect(page.locator("#heads-table tr.here th")).to_have_text("L1 H2")
    expect(page.locator("#announce")).to_contain_text("Layer 1, head 2")


def test_every_selector_changes_map_table_and_coverage(open_report: Open) -> None:
    page = open_report(sample())
    drawing = page.locator("#coverage-chart svg[role=img]")
    page.select_option("#coverage-n", "5")
    row = next(
        row for row in sample().tables["coverage"].to_pylist()
        if (row["text"], row["length"], row["normalizer"], row["layer"], row["top_n"]) == ("prose", 160, "model", 1, 5)
    )  # fmt: skip
    assert f"layer 1: one head {100 * row['per_head']:.1f} %" in (drawing.get_attribute("aria-label") or "")
    page.select_option("#choose-metric", "entropy_nats")
    choices: dict[str, Any] = {}
    for selector, label, choice in (
        ("#choose-length", "64 tokens", {"length": 64}),
        ("#choose-text", "code", {"text": "code"}),
        ("#choose-normalizer", "entmax15", {"normalizer": "entmax15"}),
    ):
        page.select_option(selector, label=label)
        choices |= choice
        for row in head_rows(sample(), **choices):
            shown = cell(page, row["layer"], row["head"]).get_attribute("aria-label")
            if math.isfinite(row["entropy_nats"]):
                assert close(shown.rpartition("Entropy ")[2].split()[0], row["entropy_nats"])
            else:
                assert shown.endswith("missing")
        expect(page.locator("#table-note")).to_contain_text(label)


def close(text: str, value: float) -> bool:
    """The page keeps three digits, and half precision may move the last one."""
    return math.isclose(float(text.replace("−", "-").replace(",", "")), value, rel_tol=0.006, abs_tol=1e-9)


def test_a_curve_is_read_with_the_pointer_and_in_its_table(open_report: Open) -> None:
    page = open_report(sample(), address="#head=0.1")
    figure = page.locator(".chart", has_text="Entropy against length")
    figure.locator("summary").click()
    by_length = sample().tables["by_length"]
    for name, value in {"text": "prose", "length": 160, "normalizer": "model", "layer": 0, "head": 1}.items():
        by_length = by_length.filter(pc.equal(by_length[name], value))
    expected = sorted((row["n"], row["entropy_nats"], row["entropy_floor"]) for row in by_length.to_pylist())
    expect(figure.locator("tbody tr")).to_have_count(len(expected))  # written once it is opened
    shown = figure.locator("tbody tr").all()
    for line, (n, entropy, floor) in zip(shown, expected, strict=True):
        cells = line.locator("th, td").all_inner_texts()
        assert cells[0] == format_number(n)
        assert close(cells[1], entropy)
        assert close(cells[2], math.log(n))
        assert cells[3] == format_number(floor) or close(cells[3], floor)
    expect(figure.locator(".readout")).to_contain_text("n = 160")
    box = figure.locator("svg").bounding_box()
    figure.locator("svg").hover(position={"x": 0.14 * box["width"], "y": 0.5 * box["height"]})
    expect(figure.locator(".readout")).to_contain_text("n = 10 ")


def test_every_other_normalizer_is_compared_on_the_same_head(open_report: Open) -> None:
    page = open_report(sample(), address="#head=0.0")
    names = page.locator(".whatif tbody th").all_inner_texts()
    assert names == ["model", "entmax15"]
    row = next(r for r in head_rows(sample(), normalizer="entmax15") if (r["layer"], r["head"]) == (0, 0))
    assert close(page.locator(".whatif tbody tr").nth(1).locator("td").nth(1).inner_text(), row["entropy_ratio"])


def test_the_map_is_walked_with_the_keyboard(open_report: Open) -> None:
    page = open_report(sample(), address="#head=0.0")
    assert page.locator('.cell[tabindex="0"]').count() == 1  # one stop for the Tab key
    cell(page, 0, 0).focus()
    for key, place in [
        ("ArrowRight", (0, 1)), ("ArrowDown", (1, 1)), ("End", (1, 3)), ("ArrowRight", (1, 3)), ("ArrowUp", (0, 3)),
        ("ArrowUp", (0, 3)), ("Home", (0, 0)), ("PageDown", (2, 0)), ("Control+End", (2, 3)), ("ArrowLeft", (2, 2)),
    ]:  # fmt: skip
        page.keyboard.press(key)
        expect(cell(page, *place)).to_be_focused()
        assert page.locator('.cell[tabindex="0"]').count() == 1
    outline = cell(page, 2, 2).evaluate("cell => getComputedStyle(cell).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    expect(page.locator("#panel-title")).to_contain_text("Layer 2, head 2")
    expect(page.locator("#panel-title")).to_be_focused()
    page.keyboard.press("Escape")
    expect(cell(page, 2, 2)).to_be_focused()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Space")
    expect(page.locator("#panel-title")).to_contain_text("Layer 1, head 2")


def test_the_table_sorts_both_ways_and_its_rows_open_their_heads(open_report: Open) -> None:
    page = open_report(sample())
    measured = [row for row in head_rows(sample()) if math.isfinite(row["entropy_ratio"])]
    ordered = [f"L{r['layer']} H{r['head']}" for r in sorted(measured, key=lambda row: -row["entropy_ratio"])]
    heading = page.locator("#heads-table th[data-by=entropy_ratio]")
    heading.locator("button").click()
    expect(heading).to_have_attribute("aria-sort", "descending")
    assert lines(page) == [*ordered, "L2 H3"]
    expect(heading.locator("button")).to_be_focused()
    page.keyboard.press("Enter")
    expect(heading).to_have_attribute("aria-sort", "ascending")
    assert lines(page) == [*reversed(ordered), "L2 H3"]
    page.get_by_role("button", name="Open Layer 1, head 3").press("Enter")
    expect(page.locator("#panel-title")).to_contain_text("Layer 1, head 3")
    expect(page.locator("#panel-title")).to_be_focused()
    expect(page.locator("#panel-title")).to_be_in_viewport()


def test_the_table_is_filtered_by_words_and_verdicts(open_report: Open) -> None:
    page = open_report(sample())
    for typed, found in [
        ("layer 1", ["L1 H0", "L1 H1", "L1 H2", "L1 H3"]),
        ("L0 H2", ["L0 H2"]),
        ("l1h3", ["L1 H3"]),
        ("head 0, layer 2", ["L2 H0"]),
        ("frozen", ["L1 H1"]),
        ("no such thing", []),
        ("<b>", []),
    ]:
        page.fill("#search", typed)
        assert lines(page) == found, typed
        expect(page.locator("#table-count")).to_have_text(f"{len(found)} of 12 heads")
        assert page.locator(".cell:not(.dim)").count() == len(found)
    page.fill("#search", "")
    expect(page.locator("#table-count")).to_have_text("12 heads")
    wanted = [row for row in head_rows(sample()) if row["verdict"] in ("frozen", "broken")]
    for name in ("frozen", "broken"):
        page.locator(f'#verdict-filter [data-verdict="{name}"]').click()
    assert lines(page) == [f"L{row['layer']} H{row['head']}" for row in wanted]
    chip = page.locator('#verdict-filter [data-verdict="broken"]')
    expect(chip).to_have_attribute("aria-pressed", "true")
    chip.click()
    expect(chip).to_have_attribute("aria-pressed", "false")
    assert len(lines(page)) == 1


def test_the_address_keeps_the_view(open_report: Open) -> None:
    page = open_report(sample())
    page.select_option("#choose-metric", "sink_mass")
    page.select_option("#choose-length", label="64 tokens")
    cell(page, 1, 0).click()
    address = page.evaluate("location.hash")
    again = open_report(sample(), address=address)
    expect(again.locator("#choose-metric")).to_have_value("sink_mass")
    expect(again.locator("#panel-title")).to_contain_text("Layer 1, head 0")
    expect(again.locator("#table-note")).to_contain_text("64 tokens")


def test_an_address_that_means_nothing_is_ignored(open_report: Open) -> None:
    page = open_report(sample(), address="#metric=__proto__&head=9.9")
    for address in ("", "#text=-1&length=1e9&kind=0.5", "#head=<img onerror=1>", "#heads", "#metric=%E0%A4"):
        page.evaluate("address => { location.hash = address; }", address)
        expect(page.locator("#choose-metric")).to_have_value("verdict")
        assert page.locator(".cell").count() == 12


def test_a_text_without_the_chosen_length_moves_to_one_it_has(open_report: Open) -> None:
    page = open_report(with_gaps())
    page.select_option("#choose-text", label="code")
    expect(page.locator("#table-note")).to_contain_text("code, 64 tokens")
    expect(page.locator("#table-note")).to_contain_text("dispersion is judged among the other keys")
    expect(page.locator("#choose-length")).to_have_value("0")
    assert len(lines(page)) == 12


def assert_every_evidence_ends(page: Page) -> None:
    shown = page.locator("#heads-table tbody td:last-child").all_inner_texts()
    assert [text[-1] for text in shown] == ["."] * 12


def test_no_width_needs_sideways_scrolling_or_cuts_evidence(open_report: Open) -> None:
    page = open_report(sample(), width=1280)
    assert_every_evidence_ends(page)
    cells = page.locator("#heads-table tbody td:last-child")
    assert cells.evaluate_all("all => all.every(one => one.scrollWidth <= one.clientWidth)")
    page.select_option("#choose-metric", "entropy_ratio")
    for width in (360, 800, 1400, 2200):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_names_without_a_space_need_no_sideways_scrolling(open_report: Open) -> None:
    name = "text_without_any_space_or_hyphen_" * 12
    options: dict[str, Any] = {"cast": CAST, "texts": (name,), "lengths": (64,), "normalizers": ("model",)}
    page = open_report(judged(synthetic_tables(**options), synthetic_manifest(**options, name=name)))
    for width in (360, 1400):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_report_of_gpt2_size_opens(whole: bool, open_report: Open) -> None:
    page = open_report(gpt2_size() if whole else gpt2_size((512,), ("model",)), width=360)
    assert page.locator(".cell").count() == 144
    page.select_option("#choose-metric", "horizon")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator("#heads-table tbody tr").count() == 144


def test_hostile_names_and_tokens_are_only_text(open_report: Open) -> None:
    page = open_report(hostile(), address="#head=0.0")
    for name in ("choose-text", "choose-normalizer", "coverage-n"):
        for place in range(page.locator(f"#{name} option").count()):
            page.select_option(f"#{name}", index=place)
    page.locator(".chart summary").first.click()
    page.fill("#search", HOSTILE[:20])
    page.fill("#search", "")
    assert page.evaluate("document.querySelector('.subject bdi').textContent") == HOSTILE
    assert "<img src=x" in page.locator("h1").inner_text()
    assert page.evaluate("document.querySelector('#choose-text option').textContent").endswith(HOSTILE)
    assert "{{7*7}}" in page.locator("#panel .evidence").inner_text()
    cell(page, 0, 2).click()
    for button in page.locator(".read-rows button").all():
        button.click()
    page.locator(".token.query").first.hover()
    page.wait_for_timeout(200)
    assert page.evaluate("window.hurt") is None
    assert page.locator("img, iframe, object").count() == 0
    assert page.locator("script").count() == 2
    shown = page.locator(".reads").inner_text()
    assert "</script><img src=x" in shown
    assert "\u202e" not in shown
    assert "\u2028" not in shown
    assert page.locator(".reads [onerror]").count() == 0
    assert page.locator(".reads").evaluate("one => one.scrollWidth <= one.clientWidth")


def test_nothing_that_is_put_into_the_page_can_run(open_report: Open) -> None:
    page = open_report(sample())
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.hurt = 1";
        document.head.append(script);
        document.body.insertAdjacentHTML("beforeend", '<img src="http://127.0.0.1:9/x.png" onerror="window.hurt = 1">');
    }""")
    page.wait_for_timeout(200)
    assert page.evaluate("window.hurt") is None
    complaints = open_report.complaints  # type: ignore[attr-defined]
    assert complaints
    assert all("Content Security Policy" in complaint or "127.0.0.1" in complaint for complaint in complaints)
    complaints.clear()


def test_the_core_group_alone_makes_a_whole_page(open_report: Open) -> None:
    page = open_report(core_only(), address="#head=0.1")
    assert page.locator(".chart .empty").count() == 4  # mass, separability, distance, sensitivity
    expect(page.locator("#coverage-chart code")).to_have_text("--metrics coverage")
    assert "jacobian_norm" not in page.locator("#choose-metric option").evaluate_all("all => all.map(o => o.value)")
    expect(page.locator(".chart", has_text="Entropy against length").locator("svg")).to_be_visible()
    expect(page.locator(".reads")).to_contain_text("--tokens 8")


def test_a_broken_head_opens_without_curves_and_keys(open_report: Open) -> None:
    page = open_report(sample(), address="#head=2.3")
    expect(page.locator("#panel-title")).to_contain_text("broken")
    assert page.locator("#panel .chart svg path").count() == 0
    expect(page.locator(".reads")).to_contain_text("no row with finite weights other than 0")


def test_the_head_that_opens_first_is_not_silent_as_its_curves_may_be_empty(open_report: Open) -> None:
    heads = sample().tables["heads"]
    verdicts = ["healthy" if (row["layer"], row["head"]) == (1, 2) else "silent" for row in heads.to_pylist()]
    column = heads.schema.get_field_index("verdict")
    page = open_report(with_tables(sample(), heads=heads.set_column(column, "verdict", pa.array(verdicts))))
    expect(page.locator("#panel-title")).to_contain_text("Layer 1, head 2")
    cell(page, 0, 0).click()
    expect(page.locator("#panel-title")).to_contain_text("silent")


def test_rows_that_see_the_same_keys_show_no_range(open_report: Open) -> None:
    low, high = (head_rows(sample())[1][name] for name in ("n_low", "n_high"))
    assert low < high
    curves = sample().tables["by_length"]
    for mean, shown in ((high, f"with {high} visible keys"), (high - 1, f"with {low} to {high} visible keys")):
        n = pc.min_element_wise(pc.cast(curves["n_high"], pa.float64()), pa.scalar(float(mean)))
        changed = curves.set_column(curves.schema.get_field_index("n"), "n", n)
        page = open_report(with_tables(sample(), by_length=changed), address="#head=0.1")
        expect(page.locator("#panel")).to_contain_text(shown)


def test_an_analysis_without_heads_still_says_so(open_report: Open) -> None:
    page = open_report(empty())
    expect(page.locator("h1")).to_contain_text("No head was measured")
    expect(page.locator("#panel")).to_contain_text("Nothing was measured")


def test_without_javascript_the_words_and_the_table_read(open_report: Open) -> None:
    page = open_report(sample(), width=1280, script=False)
    expect(page.locator("h1")).to_be_visible()
    assert page.locator("h1").inner_text().split(".")[0] in sample().headline.replace("; ", ". ")
    expect(page.locator(".advice li").first).to_be_visible()
    assert_every_evidence_ends(page)
    expect(page.locator("#table-note")).to_contain_text("dispersion is judged among the other keys")
    expect(page.locator("#controls")).to_be_hidden()
    expect(page.locator("noscript").first).to_be_visible()


def test_bounds_of_softmax_are_not_shown_as_those_of_another_normalizer(open_report: Open) -> None:
    """The model as it runs may be patched: the printed bound is of softmax alone, the ceiling of its rescalings too."""
    analysis = sample()
    page = open_report(analysis)
    charts = page.locator("#panel")
    expect(charts).to_contain_text("printed bound")
    expect(charts).not_to_contain_text("is known for")
    expect(charts).to_contain_text("ceiling")
    page.select_option("#choose-normalizer", label="entmax15")
    expect(charts).not_to_contain_text("printed bound")
    expect(charts).to_contain_text("No ceiling is known for entmax15.")
    expect(charts).to_contain_text("No floor is known for entmax15.")
    model = {**analysis.manifest["model"], "runs": "ssmax"}
    page = open_report(analysis._replace(manifest={**analysis.manifest, "model": model}))
    charts = page.locator("#panel")
    expect(charts).not_to_contain_text("printed bound")
    expect(charts).to_contain_text("The floor is for ssmax")


def reads_of(analysis: ReportData, layer: int, head: int, row: int) -> list[dict[str, Any]]:
    wanted = {"text": "prose", "length": 160, "normalizer": "model", "layer": layer, "head": head, "row": row}
    table = analysis.tables["reads"]
    for name, value in wanted.items():
        table = table.filter(pc.equal(table[name], value))
    return sorted(table.to_pylist(), key=lambda one: one["rank"])


def shaded(page: Page) -> set[int]:
    found = page.locator(".read-text .token.read").evaluate_all("all => all.map(one => Number(one.dataset.position))")
    return set(found)


def test_the_keys_of_a_row_are_shaded_in_the_text_and_listed(open_report: Open) -> None:
    page = open_report(sample(), address="#head=0.2")
    last = reads_of(sample(), 0, 2, 159)
    lines = page.locator(".read-keys tbody tr")
    expect(lines).to_have_count(len(last))
    for line, one in zip(lines.all(), last, strict=True):
        _, key, token, weight = line.locator("td").all_inner_texts()
        assert (key, token) == (str(one["key"]), f"‘{one['key_token']}’")
        assert close(weight, one["weight"])
    assert shaded(page) == {one["key"] for one in last}
    expect(page.locator(".read-text")).to_contain_text("prose0 prose1 prose2")


def test_pointing_at_a_row_shows_its_keys_and_a_click_or_the_keyboard_keeps_them(open_report: Open) -> None:
    page = open_report(sample(), address="#head=0.2")
    last, half = ({one["key"] for one in reads_of(sample(), 0, 2, row)} for row in (159, 80))
    query = page.locator('.token.query[data-position="80"]')
    query.hover()
    expect(page.locator(".read-keys caption")).to_contain_text("Row 80")
    assert shaded(page) == half
    page.locator("h1").hover()
    expect(page.locator(".read-keys caption")).to_contain_text("Row 159")
    assert shaded(page) == last
    page.locator('.read-rows [data-position="80"]').click()
    page.locator("h1").hover()
    expect(page.locator(".read-keys caption")).to_contain_text("Row 80")
    cell(page, 1, 0).click()  # the row is kept from head to head
    expect(page.locator(".read-keys caption")).to_contain_text("Row 80")
    cell(page, 0, 2).click()
    page.locator('.read-rows [data-position="159"]').click()
    page.locator('.read-rows [data-position="80"]').focus()
    expect(page.locator('.read-rows [data-position="80"]')).to_have_attribute("aria-pressed", "true")
    assert shaded(page) == {one["key"] for one in reads_of(sample(), 0, 2, 80)}
