"""What a failed start and a later death are told as: the cause that vLLM's own process logged, what helps, the log."""

from __future__ import annotations

from pathlib import Path

import pydantic
import pytest

from serve_app.engine.engine_failure import CAUSE_LENGTH, death, how_ended, logged_cause, remedy, start_failure
from serve_app.errors import ConfigError, EngineFailed

FAILED = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
LOG = """\
INFO 2026-11-25 loading
(EngineCore pid=12) ERROR 11-25 01:27:57 [core.py:937] EngineCore failed to start.
(EngineCore pid=12) Traceback (most recent call last):
(EngineCore pid=12)   File "core.py", line 1, in run
(EngineCore pid=12) ValueError: To serve at least one request, 1.5 GiB KV cache is needed, larger than 0.1 GiB
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_the_cause_is_taken_from_the_log_where_vllm_only_says_that_it_failed(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_text(LOG)
    assert start_failure("m", FAILED, log).message == (
        "m did not start: ValueError: To serve at least one request, 1.5 GiB KV cache is needed, larger than 0.1 GiB; "
        f"raise kv_cache_gb, or lower max_model_len; log: {log}"
    )


def test_an_error_of_this_process_is_its_own_cause(tmp_path: Path) -> None:
    reported = start_failure(
        "m", OSError("org/x is not a local folder and is not a valid model identifier\nmore"), tmp_path
    )
    assert reported.message == (
        "m did not start: OSError: org/x is not a local folder and is not a valid model identifier; "
        f"check models[].path: an id at the hub or a folder; log: {tmp_path}"
    )


def test_of_vllm_s_own_checks_the_cause_is_reported_and_not_their_number(tmp_path: Path) -> None:
    class Config(pydantic.BaseModel):
        ranks: int

        @pydantic.field_validator("ranks")
        @classmethod
        def _divide(cls, ranks: int) -> int:
            raise ValueError(
                f"Total number of attention heads (8) must be divisible by tensor parallel size ({ranks})."
            )

    with pytest.raises(pydantic.ValidationError, match="1 validation error for Config") as failed:
        Config(ranks=3)
    assert start_failure("m", failed.value, tmp_path).message == (
        "m did not start: ValidationError: Total number of attention heads (8) must be divisible by tensor parallel "
        f"size (3).; log: {tmp_path}"
    )
    assert start_failure("m", ValueError(), tmp_path).message == f"m did not start: ValueError: ; log: {tmp_path}"


def test_our_own_errors_stay_as_they_are() -> None:
    ours = ConfigError("max_model_len is above ...", param="max_model_len")
    assert start_failure("m", ours) is ours


def test_a_log_that_cannot_be_read_or_has_no_cause_leaves_vllms_words(tmp_path: Path) -> None:
    assert "Engine core initialization failed" in start_failure("m", FAILED, tmp_path / "absent").message
    (tmp_path / "log").write_text("nothing\n")
    assert "Engine core initialization failed" in start_failure("m", FAILED, tmp_path / "log").message


def test_a_long_cause_is_shortened(tmp_path: Path) -> None:
    assert len(start_failure("m", ValueError("x" * 10_000), tmp_path / "log").message) < 2 * CAUSE_LENGTH


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("(Worker_TP0 pid=3) torch.OutOfMemoryError: CUDA out of memory. Tried", "torch.OutOfMemoryError: CUDA out of"),
        ("huggingface_hub.errors.GatedRepoError: 401 Client Error.", "huggingface_hub.errors.GatedRepoError: 401"),
        ("ERROR 11-25 [core.py:1] something failed", ""),
        ("a sentence about an Error: no", ""),
    ],
)
def test_a_cause_is_a_line_that_ends_a_traceback(line: str, cause: str) -> None:
    found = logged_cause(f"before\n{line}\nafter")
    assert found.startswith(cause)
    assert bool(found) == bool(cause)


@pytest.mark.parametrize(
    ("reported", "helps"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory.", "lower kv_cache_gb"),
        ("GatedRepoError: 401 Client Error. Cannot access gated repo", "accept the model's licence"),
        ("OSError: [Errno 28] No space left on device", "HF_HOME"),
        ("ValueError: nobody knows this", ""),
    ],
)
def test_what_helps_is_named_where_it_is_known(reported: str, helps: str) -> None:
    assert remedy(reported).startswith(helps) or helps in remedy(reported)
    assert bool(remedy(reported)) == bool(helps)


SEEN = EngineFailed("the engine died: EngineCore has ended")
REQUESTS = "ERROR 11-25 01:00:00 [serving.py:1] a request failed\nValueError: of one request: no\n"
OUT_OF_MEMORY = """\
(EngineCore pid=12) ERROR 11-25 01:27:57 [core.py:1512] EngineCore encountered a fatal error.
(EngineCore pid=12) ERROR 11-25 01:27:57 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-25 01:27:57 [core.py:1512] torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB.
"""
WORKER = """\
(EngineCore pid=12) ERROR 11-25 01:27:56 [multiproc_executor.py:316] Worker proc VllmWorker-1 died unexpectedly \
(exit code: -9), shutting down executor.
(EngineCore pid=12) ERROR 11-25 01:27:57 [core.py:1512] EngineCore encountered a fatal error.
(EngineCore pid=12) RuntimeError: Executor failed: it is gone
"""


@pytest.mark.parametrize(
    ("logged", "reported"),
    [
        (
            REQUESTS + OUT_OF_MEMORY,
            "the engine died: torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB.; lower kv_cache_gb, max_num_seqs"
            " or max_model_len, or use more devices",
        ),
        (
            REQUESTS + WORKER,
            "the engine died: Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.",
        ),
        (REQUESTS, SEEN.message),
    ],
)
def test_a_later_death_is_reported_by_what_the_engine_logged_of_it_and_by_no_request_s_error(
    logged: str, reported: str, tmp_path: Path
) -> None:
    log = tmp_path / "worker.err"
    log.write_text(logged)
    assert death(SEEN, log) == f"{reported}; log: {log}"


def test_a_signal_that_ended_an_engine_is_named() -> None:
    assert how_ended([-9, -9, 0]) == "its process was ended by SIGKILL, which the kernel sends where memory is short"
    assert how_ended([-15]) == "its process was ended by SIGTERM"
    assert how_ended([1, 0]) == how_ended([]) == ""
