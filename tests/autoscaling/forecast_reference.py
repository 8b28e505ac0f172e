"""Makes forecast_reference.json: what statsmodels' exponential smoothing answers, for `test_forecast.py`.

It stays out of the lock file, for it brings pandas and scipy. In an environment of its own:

    python3 -m venv /tmp/statsmodels && /tmp/statsmodels/bin/pip install statsmodels==0.15.0
    /tmp/statsmodels/bin/python tests/autoscaling/forecast_reference.py
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
CASES = ((4, 0.1, 0.3, 0.0), (24, 0.1, 0.3, 1.0), (24, 0.5, 0.05, 4.0), (7, 0.9, 0.9, 2.0))
SEASONS = 5


def reference(period: int, level_part: float, season_part: float, noise: float) -> dict[str, Any]:
    """A series with a daily curve and a step, and what the library makes of it."""
    import statsmodels
    from statsmodels.tsa.holtwinters import ExponentialSmoothing

    draw = random.Random(period * noise + level_part)
    values = [
        10.0
        + 5.0 * math.sin(2 * math.pi * place / period)
        + draw.gauss(0.0, noise)
        + (3.0 if place > 3 * period else 0)
        for place in range(SEASONS * period)
    ]
    first = values[:period]
    level = math.fsum(first) / period
    model = ExponentialSmoothing(
        values[period:],
        seasonal="add",
        seasonal_periods=period,
        initialization_method="known",
        initial_level=level,
        initial_seasonal=[value - level for value in first],
    )
    fit = model.fit(smoothing_level=level_part, smoothing_seasonal=season_part, optimized=False)
    return {
        "statsmodels": statsmodels.__version__,
        "period": period,
        "level_part": level_part,
        "season_part": season_part,
        "values": values,
        "one_ahead": list(fit.fittedvalues),
        "ahead": list(fit.forecast(period)),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps([reference(*case) for case in CASES]) + "\n")
