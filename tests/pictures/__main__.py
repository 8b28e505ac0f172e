"""Writes all pictures."""

from tests.pictures.files import PICTURES

for file, draw in PICTURES.items():
    file.write_text(draw())
