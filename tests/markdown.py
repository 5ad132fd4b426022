"""Headings, links and names of files in the pages."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = "core|models|envs|utils|docs|bench|tests|configs|imgs|runs|extras|recipes"
HEADING = re.compile(r"^#+ (.*)", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)")  # local ones: file, heading
FILE = re.compile(rf"\b(?:{FOLDERS})/[\w/+.-]+\.(?:py|md|sh|png|svg|txt)\b")


def anchors(page: Path) -> set[str]:
    """Returns the names by which a page's headings are linked: lower case, hyphens for spaces, no punctuation."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
