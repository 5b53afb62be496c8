"""attnorm normalizers: all of them, with what they promise."""

from dataclasses import asdict

from attnorm.cli.output import ByWidth, Json, show, show_json


def normalizers(as_json: Json = False) -> None:
    """List every normalizer with its properties and its paper."""
    from attnorm.report.catalogue import catalogue, catalogue_table

    descriptions = catalogue()
    if as_json:
        show_json([asdict(description) for description in descriptions])
    else:
        show(ByWidth(catalogue_table(descriptions), catalogue_table(descriptions, narrow=True)))
