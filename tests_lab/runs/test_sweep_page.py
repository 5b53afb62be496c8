"""The page of a sweep in a real browser: a chart, a table that sorts, and names that stay text."""

from pathlib import Path

from playwright.sync_api import Browser, expect

from attnorm_lab.runs.folder import ItemState, write_page
from attnorm_lab.runs.plan import Item

HOSTILE = "</script><script>alert(1)</script>"


def test_it_compares_items_and_sorts_them(browser: Browser, tmp_path: Path) -> None:
    items = [
        Item(f"{number:016x}", "train lm", {}, {"normalizer": name, "learning_rate": rate})
        for number, (name, rate) in enumerate((name, rate) for name in ("softmax", HOSTILE) for rate in (0.01, 0.1))
    ]
    states = [
        *(ItemState(item, "finished", 2.0, "here") for item in items[:3]),
        ItemState(items[3], "failed", error=HOSTILE),
    ]
    rows = [{"item": item.id, **item.varied, "loss": 3.0 - number} for number, item in enumerate(items[:3])]
    write_page(tmp_path / "index.html", states, rows)
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    page.goto((tmp_path / "index.html").as_uri())
    expect(page.locator("#chart")).to_be_visible()
    assert page.locator(".plot path").count() == 2  # one line per normalizer
    assert page.locator('.plot text[text-anchor="end"]').all_text_contents() == ["1", "2", "3"]  # not 0.88, 1.44, ...
    near = [{**row, "loss": 5.233 + row["loss"] / 1e6} for row in rows]
    write_page(tmp_path / "near.html", states, near)
    page.goto((tmp_path / "near.html").as_uri())
    assert len({*page.locator('.plot text[text-anchor="end"]').all_text_contents()}) == 3  # not 5.233 three times
    page.goto((tmp_path / "index.html").as_uri())
    assert page.locator(".counts").inner_text().startswith("3 finished")
    assert page.locator("td", has_text=HOSTILE).count() >= 2
    page.locator("#rows th", has_text="loss").get_by_role("button").click()
    losses = page.locator("#rows tbody tr td:last-child").all_inner_texts()
    assert losses == ["1", "2", "3"]
    page.locator("#axis").select_option("normalizer")
    assert page.locator(".plot svg").get_attribute("aria-label") == "loss against normalizer"
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    assert complaints == []
    page.context.close()
