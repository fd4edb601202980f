"""Blocks of a page that a script writes, between two comments that say which one."""

from __future__ import annotations

from collections.abc import Mapping


def with_blocks(page: str, script: str, blocks: Mapping[str, str]) -> str:
    """``page`` with what lies between each pair of markers of ``script`` replaced by the block of its name."""
    for name, text in blocks.items():
        begin, end = f"<!-- {name}: written by tools/{script} -->\n", f"<!-- {name}: end -->\n"
        assert page.count(begin) == page.count(end) == 1, f"the page has lost its markers of {name!r} for {script}"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}{text}{end}{after}"
    return page
