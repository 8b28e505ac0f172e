"""The sizes of `docs/how-to/size-a-deployment.md` are those of the code that grants memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from serve_app.cli.check.models import kv_bytes_per_token
from serve_app.engine.start.memory_size import estimated_need, kv_bytes_of, memory_request
from serve_app.settings import GB, ModelSettings, QuotaSettings

DOCUMENT = Path(__file__).parents[3] / "docs/how-to/size-a-deployment.md"
LENGTH = 4096
PARAMETERS = {"8B": 8_030_261_248, "70B": 70_553_706_496}  # Llama 3.1
CONFIGS = {
    "8B": {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096},
    "70B": {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192},
}
ROWS = re.findall(
    r"^\| (\d+B), (bfloat16|8 bits), (\d) x (\d+) GB \| (.*) \|$", DOCUMENT.read_text(), flags=re.MULTILINE
)


def test_the_table_has_its_rows() -> None:
    assert len(ROWS) == 4


@pytest.mark.parametrize(("name", "kind", "ranks", "size", "reported"), ROWS)
def test_a_row_of_sizes_is_what_an_engine_would_be_granted(
    name: str, kind: str, ranks: str, size: str, reported: str
) -> None:
    weights = PARAMETERS[name] * (2 if kind == "bfloat16" else 1)
    model = ModelSettings(name="m", path="x/y", tensor_parallel_size=int(ranks))
    device = int(size) * GB - round(QuotaSettings().reserved_gb * GB)
    need = estimated_need(model, "gpu", weights, CONFIGS[name])
    wanted, _ = memory_request(model, "gpu", need, device)
    kv = kv_bytes_of(model, need, wanted)
    each = kv_bytes_per_token(model, CONFIGS[name])
    assert each is not None
    assert need.fixed_bytes + kv == wanted
    tokens = int(kv / each)
    figures = [f"{weights / int(ranks) / GB:.2f}", f"{kv / GB:.2f}", f"{each / 1000:.0f}", str(tokens)]
    assert reported.split(" | ") == [*figures, str(tokens // LENGTH)]
