"""The attention of a head over an image, in a browser."""

import pytest
import torch
from playwright.sync_api import expect

import attnorm
from attnorm.analysis.result import Analysis
from tests.analysis.tiny_models import vit
from tests.report.html.conftest import Open


@pytest.fixture(scope="module")
def image() -> Analysis:
    pixels = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return attnorm.analyze(vit(), {"pixel_values": pixels}, metrics="core")


def test_the_heaviest_patch_is_the_brightest_and_the_query_patch_is_framed(image: Analysis, open_report: Open) -> None:
    page = open_report(image.report_data)
    patches = page.locator(".reads .picture .patch")
    expect(patches).to_have_count(16)
    brightness = [float(one.get_attribute("fill-opacity") or "nan") for one in patches.all()]
    titles = page.locator(".reads .picture .patch title").all_text_contents()
    assert max(brightness) == pytest.approx(0.85)
    weights = [float(title.rpartition(" ")[2]) for title in titles]
    assert weights[brightness.index(max(brightness))] == max(weights)
    assert titles[5].startswith("patch in row 2, column 2")
    frame = page.locator(".reads .query-patch")
    expect(frame).to_have_attribute("visibility", "hidden")  # the class token is not in the picture
    page.locator(".read-rows .chip").nth(1).click()
    expect(frame).to_have_attribute("visibility", "visible")
    assert [float(frame.get_attribute(name) or "nan") for name in ("x", "y")] == [144, 144]
