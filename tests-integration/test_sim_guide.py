"""The examples of the guide to simulated devices, run as they are printed."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import DOCS, split_markdown

pytestmark = pytest.mark.sim(in_process=False)

CHECK = """
x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).npu().requires_grad_()
y, _ = torch.ops.npu.npu_rms_norm(x, torch.full((8,), 2.0, device="npu"))
wide = x.detach().cpu().double()
expected = 2 * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
y.sum().backward()
exact = wide.requires_grad_()
(2 * exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()).sum().backward()
print("gradient", (x.grad.cpu().double() - exact.grad).abs().max().item() < 1e-6)
print("difference", (y.detach().cpu().double() - expected).abs().max().item() < 1e-6)
"""


def test_the_examples(tmp_path: Path) -> None:
    blocks = split_markdown(DOCS / "en/guides/simulated-devices.md")[1]
    python = [content for language, content in blocks if language == "python"]
    (test,) = [content for content in python if "pytest" in content]
    program = "\n".join(content for content in python if content is not test) + CHECK
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (printed,) = [content for language, content in blocks if language == "text"]
    assert done.stdout.splitlines() == [*printed.splitlines(), "gradient True", "difference True"]

    (tmp_path / "test_mine.py").write_text(test)
    line = [sys.executable, "-m", "pytest", "--sim", "-q", "-p", "no:cacheprovider", str(tmp_path / "test_mine.py")]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert "1 passed" in done.stdout, done.stdout
