"""A skip that nobody allowed fails a run, however well the rest went."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SKIPS = Path(__file__).parents[1] / "skips.py"
CONFTEST = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("skips", {str(SKIPS)!r})
sys.modules["skips"] = skips = importlib.util.module_from_spec(spec)
spec.loader.exec_module(skips)
def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.pluginmanager.register(skips.SkipReport())
"""


def run(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_planted.py").write_text(f"import pytest\n{tests}\ndef test_passes(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"]
    command += ["--rootdir", str(folder), str(folder)]
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


def test_a_gpu_test_may_skip_and_is_printed(tmp_path: Path) -> None:
    marks = "@pytest.mark.gpu\n@pytest.mark.skip(reason='needs a CUDA device')\n"
    result = run(tmp_path, f"{marks}def test_on_gpu(): pass")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped: test_planted.py::test_on_gpu: needs a CUDA device" in result.stdout


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("def test_a(): pytest.skip('not today')", "not today"),
        ("@pytest.mark.skipif(True, reason='needs a CUDA device')\ndef test_a(): pass", "needs a"),
        ("@pytest.mark.gpu\ndef test_a(): pytest.skip('flaky')", "flaky"),
        ("@pytest.mark.xfail(reason='known')\ndef test_a(): assert 0", "expected to fail: known"),
        ("pytest.skip('all of it', allow_module_level=True)", "all of it"),
        ("pytest.importorskip('no_such_module_here')", "no_such_module_here"),
    ],
    ids=["in-test", "unmarked", "other-reason", "xfail", "module", "importorskip"],
)
def test_any_other_skip_is_printed_and_fails_the_run(
    tmp_path: Path, tests: str, reason: str
) -> None:
    result = run(tmp_path, tests)
    assert result.returncode != 0
    assert "skips.py does not allow: test_planted.py" in result.stdout
    assert reason in result.stdout.partition("does not allow")[2]
