"""Takes the pictures of the console in the documents: `python -m tests.console_pictures docs/images`.

They show the made-up system of `tests.fakes.console_data`, in Debian's Chromium.
"""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path
from typing import Literal, NamedTuple

from PIL import Image
from playwright.sync_api import Browser, expect, sync_playwright

from tests.fakes.console_server import COOKIE, ConsoleServer, console_server
from tests.requires import requires

CHROMIUM = "/usr/bin/chromium"
COLOURS = 256  # of a picture: text stays sharp, and the file is half as large
SETTLED_MS = 1200.0  # until the figures that the page asks for are there


class Picture(NamedTuple):
    """One picture: a page, its theme and size in pixels."""

    name: str
    address: str
    theme: Literal["light", "dark"]
    width: int
    height: int


PICTURES = (
    Picture("console-overview-light.png", "overview", "light", 1280, 972),
    Picture("console-overview-dark.png", "overview", "dark", 1280, 972),
    Picture("console-phone.png", "memory", "light", 390, 844),
)


def take(browser: Browser, endpoint: ConsoleServer, picture: Picture) -> bytes:
    """The picture as a PNG."""
    size = {"width": picture.width, "height": picture.height}
    context = browser.new_context(viewport=size, color_scheme=picture.theme)  # type: ignore[arg-type]
    endpoint.sessions["of-the-picture"] = None
    context.add_cookies([{"name": COOKIE, "value": "of-the-picture", "url": endpoint.url}])
    page = context.new_page()
    page.goto(f"{endpoint.url}/console/#/{picture.address}")
    expect(page.locator(".vitals")).to_be_visible()
    page.wait_for_timeout(SETTLED_MS)
    shot = Image.open(BytesIO(page.screenshot())).convert("RGB")
    context.close()
    small = BytesIO()
    shot.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def main(folder: Path) -> None:
    requires("chromium")
    with console_server() as endpoint, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu"])
        for picture in PICTURES:
            content = take(browser, endpoint, picture)
            (folder / picture.name).write_bytes(content)
            print(f"{folder / picture.name}: {len(content):,} bytes")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
