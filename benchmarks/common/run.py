"""What all runs against a served model share: the width of tables, the limit of foreign load."""

from __future__ import annotations

FOREIGN_LIMIT_CORES = 0.2  # a tenth of a two-core machine: more moves a ratio by more than its bar
CONSOLE_WIDTH = 150  # of tables when the output is not a terminal
