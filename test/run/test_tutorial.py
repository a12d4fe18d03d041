"""The tutorial: its page shows its script, which the long form runs on real ranks."""

import re
import subprocess
import sys
from pathlib import Path

from extent import LONG

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "examples" / "train_gpt2.py"


def test_the_page_is_that_of_the_script() -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text()
    excerpt, *_ = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert excerpt in SCRIPT.read_text()
    if LONG:
        run = subprocess.run(
            [sys.executable, SCRIPT, "--steps", "60"],
            capture_output=True, text=True, timeout=600, check=True,
        )  # fmt: skip
        plan, _, rest = run.stdout.partition("\n\n")
        assert f"```\n{plan}\n```" in page
        first, last = map(float, re.findall(r"loss (\S+) -> (\S+) in 60 steps on 4 ranks", rest)[0])
        assert last < 0.65 * first
