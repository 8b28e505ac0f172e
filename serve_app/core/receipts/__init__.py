"""What became of a request, and what its service level makes of that.

Decides: which receipts are kept, whether a service level was met, and how a receipt is explained.
In: times and counts of a request. Out: receipts, verdicts, explanations.
Never: keeps content of requests.
"""

from serve_app.core.receipts.explanation import explain
from serve_app.core.receipts.receipts import Receipt, Receipts
from serve_app.core.receipts.slo import Pace, Served, ServiceLevel, Verdict, judge

__all__ = ["Pace", "Receipt", "Receipts", "Served", "ServiceLevel", "Verdict", "explain", "judge"]
