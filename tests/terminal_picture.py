"""Draws what a command prints on a terminal: `python -m tests.terminal_picture FILE.svg COMMAND ARGUMENT...`.

The pictures of the README are made with it, of a stack that runs.
"""

from __future__ import annotations

import fcntl
import os
import pty
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

COLUMNS = 104
ROWS = 40
# Like rich's own, without its web font, since GitHub shows no picture that loads one, and without its clip of the
# whole, which cuts the underscores of the last line.
FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; \
font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
# Readable on its own dark ground, so the picture does not depend on the page around it.
THEME = TerminalTheme(
    (22, 27, 34),
    (230, 237, 243),
    [
        (125, 133, 144),
        (255, 123, 114),
        (63, 185, 80),
        (210, 153, 34),
        (88, 166, 255),
        (188, 140, 255),
        (57, 197, 207),
        (177, 186, 196),
    ],
)


def printed(command: list[str]) -> str:
    """What a command writes to a terminal of this width, with its colours."""
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    pieces = []
    try:
        while piece := os.read(ours, 65536):
            pieces.append(piece)
    except OSError:  # how Linux says that the other side is closed
        pass
    finally:
        os.close(ours)
    process.wait()
    return b"".join(pieces).decode().replace("\r\n", "\n")


def picture(shown: str, output: str) -> str:
    """An SVG of a prompt with a command, and its output."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text.assemble(("$ ", "bright_black"), (shown, "bold")))
        console.print(Text.from_ansi(output.rstrip("\n")))
        return console.export_svg(title="", theme=THEME, code_format=FORMAT, unique_id="terminal")


def main(arguments: list[str]) -> None:
    target, *command = arguments
    name = Path(command[0]).name
    Path(target).write_text(picture(shlex.join([name, *command[1:]]), printed(command)))


if __name__ == "__main__":
    main(sys.argv[1:])
