"""Write all lists into their pages."""

from __future__ import annotations

from tests.generated.pages import PAGES, ROOT, page

for name in PAGES:
    (ROOT / name).write_text(page(name))
