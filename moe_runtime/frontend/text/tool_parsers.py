"""Which format of tool calls a model writes, as its chat template shows."""

from collections.abc import Callable

from moe_runtime.frontend.text.tool_calls import ToolParser
from moe_runtime.frontend.text.tools_deepseek import CALLS_BEGIN, DeepSeekParser
from moe_runtime.frontend.text.tools_hermes import OPEN, HermesParser


def parser_for(template: str) -> Callable[[], ToolParser] | None:
    """The parser of the format in which a chat template shows earlier calls; None for an unknown one."""
    if CALLS_BEGIN in template:
        fenced = "```json" in template  # V3 and R1; V3.1 writes the bare arguments
        return lambda: DeepSeekParser(fenced=fenced)
    if OPEN in template and "<function=" not in template:
        return HermesParser
    return None
