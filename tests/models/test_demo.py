"""`paceline demo` on the built-in models, as a stranger runs it."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_demo_answers_both_questions_with_receipts_and_leaves_no_process(
    smollm2: Path, smollm2_draft: Path
) -> None:
    command = [sys.executable, "-m", "paceline.cluster.cli.main", "demo", "--max-tokens", "24"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    text = done.stdout
    assert done.returncode == 0, text + done.stderr
    for number in (1, 2):
        assert re.search(rf"^\[{number}\] \? \w+", text, re.MULTILINE)
        assert re.search(rf"^\[{number}\]   \S+", text, re.MULTILINE)
        receipt = re.search(
            rf"^receipt \[{number}\]  (\d+) tokens, ([\d.]+) tokens/step, "
            r"(\d+)/(\d+) drafts accepted, "
            r"(?:\d+/\d+ prompt tokens cached, )?first token [\d.]+ s, [\d.]+ tokens/s$",
            text,
            re.MULTILINE,
        )
        assert receipt, text
        num_tokens, tokens_per_step, accepted, proposed = map(float, receipt.groups())
        assert 1 <= num_tokens <= 24
        assert tokens_per_step > 1.0
        assert 0 < accepted <= proposed
    assert re.search(r"^curl http://127\.0\.0\.1:\d+/v1/chat/completions ", text, re.MULTILINE)
    assert "the same as over gRPC" in text
    assert re.search(r"^stopped: all \d+ processes are gone$", text, re.MULTILINE)
    peak = re.search(r"^peak memory of all processes: ([\d.]+) GiB$", text, re.MULTILINE)
    assert peak
    assert float(peak[1]) < 5.0
