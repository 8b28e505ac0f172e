"""What the environment of an engine keeps vLLM from doing to the process it is imported in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.requires import requires

requires("vllm")

# As Serve sets up the log of a replica. A controller that comes back asks for its file through the handler's target.
REPLICA = """
import logging, logging.handlers, sys
handler = logging.handlers.MemoryHandler(capacity=1, target=logging.FileHandler(sys.argv[1]))
logging.getLogger("ray.serve").addHandler(handler)
from serve_app.engine.start import environment
environment.prepare(1, 8, 1_000_000, 60.0)
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
configure_logging(LoggingConfig())  # as an engine does when it starts
logging.getLogger("ray.serve").warning("still here")
assert handler.target is not None, "vLLM has closed Serve's log"
import io
from PIL import Image
from vllm.multimodal.media.image import ImageMediaIO
def png(width, height):
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()
assert ImageMediaIO().load_bytes(png(1000, 1000)).media.size == (1000, 1000)
try:
    ImageMediaIO().load_bytes(png(1000, 1001))
except ValueError as error:
    assert "maximum of 1000000 pixels" in str(error)
else:
    raise AssertionError("vLLM has decoded an image above the bound")
"""
IMPORT_S = 240.0  # importing vLLM takes 10 s, many times that on a loaded machine with a cold disk


def test_starting_vllm_leaves_serves_log_and_with_it_the_replica_alone_and_bounds_images(tmp_path: Path) -> None:
    log = tmp_path / "replica.log"
    done = subprocess.run(
        [sys.executable, "-c", REPLICA, str(log)], capture_output=True, text=True, check=False, timeout=IMPORT_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "still here" in log.read_text()
