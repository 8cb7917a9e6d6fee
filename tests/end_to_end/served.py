"""A running server, for tests that are its clients. Always reaped."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests.end_to_end.commands import ROOT, left_running, write_plan

T = TypeVar("T")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def wait_for(condition: Callable[[], T], seconds: float, what: str) -> T:
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.05)
    return result


def chat_checkpoint(source: Path, folder: Path) -> Path:
    """A checkpoint whose chat template knows tools, its weights shared with `source`."""
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file)
        else:
            shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Served:
    """`moe-runtime serve` in the background; `folder` is a path that only this server mentions."""

    def __init__(
        self,
        folder: Path,
        checkpoint: Path,
        deployments: dict[str, Any],
        *,
        port: int,
        options: Sequence[str] = (),
        **server: Any,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        section = {"port": port, "served_name": "m", **server}
        patient = {"ttft_ms": 1e6}  # a slow machine must not turn requests away
        plan = write_plan(folder / "plan.yaml", checkpoint, deployments, server=section, slo=patient)
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "stderr"
        with self.log.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "moe_runtime", "serve", str(plan), *options],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                env={**os.environ, "MOE_RUNTIME_POISON_KV": "1", "MOE_RUNTIME_ADMIN_KEYS": "root"},
                start_new_session=True,
            )

    def __enter__(self) -> "Served":
        wait_for(self._answers, 120, f"server; it said: {self.log.read_text()[-2000:]}")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        wait_for(lambda: not left_running(self.folder), 15, "end of all processes")

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = httpx.get(f"{self.url}/metrics").text
        lines = [
            line
            for line in text.splitlines()
            if line.startswith((f"moe_runtime_{name}{{", f"moe_runtime_{name} "))
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
