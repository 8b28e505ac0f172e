"""Write the files, or compare them with those that are there."""

from __future__ import annotations

import argparse
import sys

from scripts.dashboards.files import ROOT, RUNBOOKS, files


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a file differs")
    parser.add_argument(
        "--runbooks",
        metavar="URL",
        default=RUNBOOKS,
        help="where you serve the pages of docs/how-to, with a slash at its end",
    )
    given = parser.parse_args()
    differing = [
        path
        for path, text in files(given.runbooks).items()
        if not (ROOT / path).is_file() or (ROOT / path).read_text() != text
    ]
    for path in differing:
        print(f"differs: {path}" if given.check else path)
        if not given.check:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(files(given.runbooks)[path])
    return 1 if given.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
