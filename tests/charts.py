"""Reads a chart's text, so that a drawn chart is compared with the committed one."""

import re
from pathlib import Path


def words(place: Path) -> list[str]:
    """The texts of an SVG, in order. Fonts differ between machines, so positions are not compared."""
    return re.findall(r"<text[^>]*>([^<]*)<", place.read_text(encoding="utf-8"))
