"""The batch lane: files of batches, and the workers that run their rows.

In come files and rows, out come results, each stored once. It grants nothing: a row waits in its model's queue like any
request of class `low`.
"""

from serve_app.batch.files import FileStorage, storage_at

__all__ = ["FileStorage", "storage_at"]
