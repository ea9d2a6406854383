"""The pages for users and maintainers, and their parts: blocks, links, headings."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.documented import bash_blocks

README = REPOSITORY / "README.md"
CONTRIBUTING = REPOSITORY / "CONTRIBUTING.md"  # its commands need files of the page; test_contributing.py runs them
USER_PAGES = sorted((REPOSITORY / "docs").glob("*.md"))
DOCS = [*USER_PAGES, *sorted((REPOSITORY / "docs" / "research").glob("*.md"))]
PAGES = [
    page
    for page in (
        *(README, CONTRIBUTING, REPOSITORY / "CHANGELOG.md", *DOCS),
        *(REPOSITORY / "research" / "README.md", *sorted(REPOSITORY.glob("examples/*/README.md"))),
    )
    if page.exists()
]


def read(page: str) -> str:
    """The text of a page, by its path in the repository."""
    return (REPOSITORY / page).read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def block_with(page: str, *words: str) -> str:
    """The one bash block of a page that holds all ``words``."""
    (block,) = [block for block in bash_blocks(read(page)) if all(word in block for word in words)]
    return block


def commands_of(text: str) -> list[list[str]]:
    """The words of every command in the bash blocks of a page, without assignments in front of it."""
    lines = "".join(bash_blocks(text)).replace("\\\n", " ").splitlines()
    commands = (re.sub(r"^(?:[A-Z_]+=\S+ +)+", "", part) for line in lines for part in line.split(" && "))
    return [words for command in commands if (words := shlex.split(command, comments=True))]


def links_of(text: str) -> list[str]:
    """The targets of a page's links, without those in code blocks."""
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    return re.findall(r"\]\(([^()\s]+)\)", re.sub(r"`[^`\n]*`", "code", prose))


def anchors_of(text: str) -> set[str]:
    """The anchors of a page's headings."""
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    headings = re.findall(r"^#+ +(.+)$", prose, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
