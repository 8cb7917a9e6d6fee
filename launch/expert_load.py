"""--dump-expert-load: the loads of all ranks, written where the command line says."""

from pathlib import Path

from moe_runtime.frontend.experts import Experts, write_loads
from moe_runtime.launch.console import say


async def dump_expert_load(experts: Experts, path: Path) -> None:
    """Ask all ranks for what they have counted since they were ready, write the sums, and say where."""
    for written in write_loads(path, await experts.dump()):
        say(f"wrote {written}")
