"""The file: whole, small, closed to everything from outside, and written atomically."""

import base64
import hashlib
import json
import os
import re
import stat
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from attnorm.metrics.catalogue import METRICS
from attnorm.report import page as report
from attnorm.report.page import payload
from attnorm.report.page_text import page_words, plain, table_rows, what_if_table
from attnorm.report.views import default_choice
from attnorm.report_data import Advice, WhatIf
from tests.report.html.sample import HOSTILE, core_only, empty, gpt2_size, hostile, sample, with_tables


class Parsed(HTMLParser):
    """Tags with their attributes, and the text inside script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and data.strip():
            self.raw.append((self.tags[-1][0], data))


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<(script|style).*?</\1>|<[^>]+>", " ", page, flags=re.DOTALL))


def test_a_report_of_gpt2_size_stays_small() -> None:
    analysis = gpt2_size((512,), ("model",))
    assert analysis.tables["heads"].num_rows == 12 * 12
    assert len(report.render(analysis).encode()) < 430_000


def test_a_note_starts_with_a_capital_but_a_file_name_keeps_its_letters() -> None:
    notes = ["distances come from 16 rows", "'/books/book.txt' has 99 tokens"]
    analysis = sample()._replace(manifest={**sample().manifest, "notes": notes})
    assert page_words(analysis)["notes"] == ["Distances come from 16 rows.", "'/books/book.txt' has 99 tokens."]
    styles = [text for tag, text in Parsed(report.render(analysis)).raw if tag == "style"]
    assert "text-transform: uppercase" not in "".join(re.findall(r"\.notes[^}]*}", "".join(styles)))


@pytest.mark.nightly  # 4 s to make the tables
def test_a_report_of_gpt2_size_stays_below_two_megabytes() -> None:
    analysis = gpt2_size()
    assert analysis.tables["heads"].num_rows == 12 * 12 * 3 * 4
    assert len(report.render(analysis).encode()) < 2_000_000


@pytest.mark.parametrize("make", [sample, core_only, hostile, empty])
def test_nothing_points_outside_the_file(make: Any) -> None:
    parsed = Parsed(report.render(make()))
    for tag, attributes in parsed.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base")
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)
        for name in ("src", "href", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,")), (tag, attributes)


def test_the_policy_allows_exactly_the_one_style_and_the_one_script() -> None:
    parsed = Parsed(report.render(hostile()))
    policy = next(one["content"] for tag, one in parsed.tags if one.get("http-equiv") == "Content-Security-Policy")
    style, data, script = parsed.raw
    hashes = {
        kind: f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
        for kind, text in (style, script)
    }
    assert policy is not None
    assert policy.split("; ")[:3] == [
        "default-src 'none'",
        f"style-src '{hashes['style']}'",
        f"script-src '{hashes['script']}'",
    ]
    json.loads(data[1])


def test_infinite_and_missing_numbers_become_null() -> None:
    analysis = sample()
    place = analysis.tables["heads"].column_names.index("max_logit")
    values = [float("inf"), float("-inf"), None] + [1e300] * (analysis.tables["heads"].num_rows - 3)
    spoiled = with_tables(
        analysis, heads=analysis.tables["heads"].set_column(place, "max_logit", pa.array(values, pa.float64()))
    )
    found = payload(spoiled)["heads"]["columns"]["max_logit"]
    assert sorted(found["levels"], key=str) == [1e300, None]
    json.dumps(payload(spoiled), allow_nan=False)


def test_headline_advice_sentences_and_manifest_are_in_words() -> None:
    page = text_of(report.render(sample()))
    for sentence in sample().sentences:
        assert re.sub(r"\s+", " ", sentence).replace("'", "&#39;") in page
    for advice in sample().advice:
        assert advice.title in page
    for metric in METRICS:
        assert metric.label in page
    manifest = sample().manifest
    for value in [*manifest["model"].values(), *manifest["versions"].values(), manifest["texts"][0]["sha256"]]:
        assert plain(value) in page


def test_methods_of_a_run_on_images_speak_of_patches_and_those_of_a_text_of_windows() -> None:
    def methods(analysis: Any) -> set[str]:
        section = report.render(analysis).partition('<section id="methods"')[2].partition("<h3>Manifest")[0]
        return set(re.findall(r"[a-z]+", text_of(section)))

    of_text = sample()
    images = [{**text, "size": "pixel_values (1, 3, 16, 16)"} for text in of_text.manifest["texts"]]
    of_images = of_text._replace(manifest={**of_text.manifest, "texts": images})
    assert {"text", "windows"} <= methods(of_text)
    assert not {"patch", "image"} & methods(of_text)
    assert {"patch", "image", "class", "token"} <= methods(of_images)
    assert not {"text", "windows", "window", "texts"} & methods(of_images)


def test_a_sentence_cannot_end_its_element() -> None:
    page = report.render(hostile())
    assert "<img" not in page
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    data = json.loads(Parsed(page).raw[1][1])
    assert data["choices"]["text"][0].endswith(HOSTILE)


def test_cautions_stand_below_what_to_try() -> None:
    page = report.render(sample())
    tried, expected = page.index(">What to try</h2>"), page.index(">What does not help</h2>")
    assert {one.caution for one in sample().advice} == {True, False}
    for advice in sample().advice:
        place = page.index(f"<h3>{advice.title}")
        assert expected < place if advice.caution else tried < place < expected


def test_what_if_numbers_stand_beside_how_it_is_now() -> None:
    def one(change: str, quantity: str, before: float, after: float) -> WhatIf:
        return WhatIf(change=change, quantity=quantity, before=before, after=after, heads=3)

    table = what_if_table(
        [one("ssmax", "entropy", 0.9, 0.5), one("entmax15", "entropy", 0.9, 0.25), one("entmax15", "norm", 0.1, 0.2)]
    )
    assert table["headings"] == ["", "now", "ssmax", "entmax15"]
    assert table["rows"] == [["entropy", "0.900", "0.500", "0.250"], ["norm", "0.100", "–", "0.200"]]
    differing = what_if_table([one("ssmax", "entropy", 0.9, 0.5), one("entmax15", "entropy", 0.8, 0.25)])
    assert differing["rows"] == [["entropy", "0.900", "0.500", "0.800 → 0.250"]]


def test_advice_that_needs_a_measurement_gives_its_command() -> None:
    advice = Advice(title="More", text="Measure.", heads=1, command="attnorm analyze 'a b' --metrics all")
    page = report.render(sample()._replace(advice=[advice]))
    shown = page.partition('<p class="command">')[2].partition("</p>")[0]
    assert re.sub(r"</?\w[^>]*>", "", shown) == "Measure this with: attnorm analyze &#39;a b&#39; --metrics all"
    assert '<span class="word">--metrics</span>' in shown  # otherwise a line may end behind its hyphens


def test_lengths_that_were_not_asked_for_are_called_whole_input() -> None:
    def whole(table: pa.Table) -> pa.Table:
        place = table.column_names.index("length")
        kept = table.filter(pa.array([length == 64 for length in table["length"].to_pylist()]))
        return kept.set_column(place, "length", pa.nulls(kept.num_rows, pa.int64()))

    analysis = sample()
    names = ("heads", "by_length", "top_n", "sensitivity", "coverage")
    page = report.render(with_tables(analysis, **{name: whole(analysis.tables[name]) for name in names}))
    assert "prose, whole input" in page
    assert page.count('<tr><th scope="row">L') == 12


def test_what_is_shown_first_was_measured_where_texts_have_different_lengths() -> None:
    whole = sample()
    short, long = (pc.equal(whole.tables["heads"]["text"], text) for text in ("prose", "code"))
    uneven = pc.or_(
        pc.and_(short, pc.equal(whole.tables["heads"]["length"], 64)),
        pc.and_(long, pc.equal(whole.tables["heads"]["length"], 160)),
    )
    analysis = with_tables(whole, heads=whole.tables["heads"].filter(uneven))
    choice = default_choice(analysis.tables)
    assert (choice["text"], choice["length"]) == ("code", 160)
    assert len(table_rows(analysis.tables["heads"], choice)) == 12


def test_saving_is_whole_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = report.save(sample(), tmp_path / "deep" / "report.html")
    before = path.read_bytes()
    assert before.decode() == report.render(sample())
    assert stat.S_IMODE(path.stat().st_mode) & 0o044 == 0o044 & ~_umask()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        report.save(core_only(), path)
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == ["report.html"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
