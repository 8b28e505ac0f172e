"""The batch lane: files of batches, and the workers that run their rows, each result written once.

Decides: which batch is validated, run, finalized, cancelled or expired now; what becomes of a row's answer.
In: batches and rows of the store, input files, figures of the queues, answers. Out: results, output and error files.
Never: grants a slot; a row waits in its model's queue like any request of class `low`.

`deployment` is exported unloaded: a router needs the files only.
"""

from serve_app.batch.files import FileStorage, storage_at

__all__ = ["FileStorage", "deployment", "storage_at"]
