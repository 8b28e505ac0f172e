"""The record of what happened to a request, and whether it met its service level.

Decides: which receipts are kept, whether a service level was met, and how a receipt is explained.
In: times and counts of a request. Out: receipts, verdicts, explanations.
Never: keeps text of prompts or answers.
"""

from serve_app.core.receipts.explanation import explain
from serve_app.core.receipts.receipts import OBJECT_PREFIXES, Receipt, Receipts
from serve_app.core.receipts.slo import ServedRequest, ServiceLevel, SloVerdict, TokenPace, judge

__all__ = [
    "OBJECT_PREFIXES",
    "Receipt",
    "Receipts",
    "ServedRequest",
    "ServiceLevel",
    "SloVerdict",
    "TokenPace",
    "explain",
    "judge",
]
