"""vLLM's own benchmark client, unchanged, through the gateway in front of real replicas."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.serving import Gateway, wait_for
from tests.vllm.replicas import Replicas

# what `vllm bench serve` runs; its `vllm` script looks for a distribution of that name, which CPU builds are not
BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def test_vllm_bench_serve_runs_unchanged_through_the_gateway(
    breakable: Replicas, front: Gateway, tmp_path: Path
) -> None:
    python, model = breakable.env["VLLM_PYTHON"], breakable.env["MODEL"]
    done = subprocess.run(
        [
            python, "-c", BENCH_SERVE, "--backend", "openai-chat", "--base-url", front.url, "--endpoint",
            "/v1/chat/completions", "--model", "tiny", "--tokenizer", str(Path(model).resolve()), "--dataset-name",
            "random", "--random-input-len", "200", "--random-output-len", "12", "--num-prompts", "10",
            "--request-rate", "5", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "bench.json",
        ],
        capture_output=True, text=True, timeout=900, check=False, cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "bench.json").read_text())
    assert (result["completed"], result["failed"]) == (10, 0)
    assert result["total_output_tokens"] > 0
    wait_for(lambda: front.metric("forebay_requests_total", outcome="success") >= 10, "all are counted")
