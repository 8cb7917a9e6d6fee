"""What the attention and cache launchers ask Triton for is what is compiled ahead of time."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("attention_launches.py")


def test_every_launch_is_a_case():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert (done.stdout, done.returncode) == ("68 launches\n", 0), done.stderr
