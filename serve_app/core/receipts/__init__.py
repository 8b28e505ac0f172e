"""What is known of a request: its measure, its trace, its receipt, and whether it met its service level.

Decides: which receipts are kept, whether a service level was met, and how a receipt is explained.
In: times and counts of a request. Out: receipts, verdicts, explanations.
Never: keeps text of prompts or answers.
"""

from serve_app.core.receipts.explanation import explain
from serve_app.core.receipts.receipts import LIMIT_WAIT, MAX_RECEIPTS, OBJECT_PREFIXES, Receipt, Receipts, bare_id
from serve_app.core.receipts.slo import ServiceLevel, SloVerdict, TokenPace, judge
from serve_app.core.receipts.trace import NO_COST, RequestMeasure, RequestTrace

__all__ = [
    "LIMIT_WAIT",
    "MAX_RECEIPTS",
    "NO_COST",
    "OBJECT_PREFIXES",
    "Receipt",
    "Receipts",
    "RequestMeasure",
    "RequestTrace",
    "ServiceLevel",
    "SloVerdict",
    "TokenPace",
    "bare_id",
    "explain",
    "judge",
]
