"""Draw docs/picture.png: the waits and one KDA layer of a real run, as the HTML report shows them.

    python tools/picture.py

Runs the default command in an empty folder, keeps two sections of its report, and takes a screenshot of them.
Needs chromium.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURE = Path(__file__).parents[1] / "docs" / "picture.png"
WIDTH = 1180
MAX_BYTES = 300_000

# What a still picture has no use for: charts further down, controls, legends of the whole step.
ONLY_TWO_SECTIONS = """<style>
main { padding: 16px 20px; }
header .answer, header .wide, header .wide ~ .facts, .controls, figcaption span,
main > section:not(:has(#waits)):not(:has([data-timeline])), footer, details,
section:has([data-timeline]) > p,
figure:has([data-timeline=mla]), figure:has([data-timeline=step]) { display: none !important; }
main > section { margin-top: 14px; padding-top: 12px; }
</style>"""

#: Of a browser that draws a page without a network; ``tests/sim/browser.py`` takes them too.
CHROMIUM_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=5000",
)

TELL_HEIGHT = """<script>addEventListener("load", () => setTimeout(
() => { document.body.dataset.height = Math.ceil(document.querySelector("main").getBoundingClientRect().height); },
2000));</script>"""
END_OF_HEAD = "</head>\n<body>"  # the charting library, too, has a "</head>" somewhere


def main() -> int:
    """Write the picture; 1 without chromium or when the picture is too large."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("no chromium on the path; on Debian: apt-get install chromium", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = Path(sys.executable).with_name("k3sim")
        subprocess.run([command, "timeline", "--concurrency", "1"], cwd=folder, check=True, capture_output=True)
        page = folder / "page.html"
        report = (folder / "k3sim-out" / "timeline.html").read_text()
        assert report.count(END_OF_HEAD) == 1
        page.write_text(report.replace(END_OF_HEAD, ONLY_TWO_SECTIONS + TELL_HEIGHT + END_OF_HEAD))

        def browse(*options: str) -> str:
            done = subprocess.run(
                [chromium, *CHROMIUM_OPTIONS, f"--user-data-dir={folder / 'browser'}", *options, page.as_uri()],
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
            return done.stdout

        found = re.search(r'data-height="(\d+)"', browse("--dump-dom", f"--window-size={WIDTH},2000"))
        if found is None:
            print("the report did not draw itself", file=sys.stderr)
            return 1
        shot = folder / "picture.png"
        browse(f"--screenshot={shot}", f"--window-size={WIDTH},{found.group(1)}")
        size = shot.stat().st_size
        if size > MAX_BYTES:
            print(f"the picture has {size} bytes, more than {MAX_BYTES}", file=sys.stderr)
            return 1
        shutil.copyfile(shot, PICTURE)
    print(f"{PICTURE} {size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
