"""The batch lane: files of batches, and the workers that run their rows, each result stored once.

Decides: which batch is validated, run, finalized, cancelled or expired now; what becomes of a row's answer.
In: files, batches and rows of the store, figures of the queues, answers. Out: results, output and error files.
Never: grants a slot; a row waits in its model's queue like any request of class `low`.
"""

from serve_app.batch.files import FileStorage, storage_at

__all__ = ["FileStorage", "storage_at"]
