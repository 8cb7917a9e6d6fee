"""What compiled code says about itself: matrix instructions, and the loads of its main loops.

Owns the reading of PTX, SASS and AMD assembly as text; runs nothing. Names of instructions are
counted, never compared as text: they differ between compiler versions.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Instruction of a matrix unit in PTX or AMD assembly -> the kind it is reported as.
_MATRIX = (
    (re.compile(r"\bwgmma\.mma_async\S*\.(\w+)\.\w+\s"), "wgmma {}"),
    (re.compile(r"\btcgen05\.mma\.\S*kind::(\w+)"), "tcgen05 {}"),
    (re.compile(r"\bmma\.sync\.\S*\.(\w+)\.\w+\.\w+\s"), "mma.sync {}"),
    (re.compile(r"\bv_mfma(?:_scale)?_\w+?x\d+_?(bf16|bf8|fp8|f16|f32|f64|i8|f8f6f4)\w*"), "mfma {}"),
)
_SASS_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_SASS_MATRIX = re.compile(r"(HG|QG|IG|BG|H|Q|I|UTCH|UTCQ|UTCI|UTCO)MMA")
_SASS_WIDTH = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_AMD_BLOCK = re.compile(r"^(?:\.L(BB\d+_\d+)|; %bb\.\d+):")
_AMD_IN_LOOP = re.compile(r"in Loop: Header=(BB\d+_\d+)")
_AMD_PARENT = re.compile(r"Parent Loop (BB\d+_\d+)")
_AMD_LOAD = re.compile(r"(?:global|buffer|flat)_load_(lds_)?(\w+)")
_AMD_WIDTH = (
    (re.compile(r"[us]byte"), 1),
    (re.compile(r"ushort|sshort|short"), 2),
    (re.compile(r"dwordx2|b64"), 8),
    (re.compile(r"dwordx3|b96"), 12),
    (re.compile(r"dwordx4|b128"), 16),
    (re.compile(r"dword|b32"), 4),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One innermost loop that loads or multiplies.

    loads   bytes per load and thread -> number of such global loads (asynchronous copies included)
    bulk    tensor-memory-accelerator copies
    """

    instructions: int
    matrix: int
    loads: Mapping[int, int]
    bulk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What a case became.

    registers       per thread (AMD: vector registers)
    stack_bytes     of a thread
    spills          accesses to local memory (AMD: spilled vector registers)
    shared_bytes    of a program, dynamic part included
    tensor_memory   columns, sm_100 only
    warps           per program; more than asked for if warps were specialised
    matrix          kind of matrix instruction -> count in the code
    loops           the innermost loops that load or multiply
    whole           the whole kernel, as if it were one
    """

    registers: int
    stack_bytes: int
    spills: int
    shared_bytes: int
    tensor_memory: int
    warps: int
    matrix: Mapping[str, int]
    loops: tuple[Loop, ...]
    whole: Loop


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    address: str
    target: str  # the address it jumps to, if it does


def matrix_instructions(text: str) -> Mapping[str, int]:
    """Kind ("wgmma e4m3", "tcgen05 f16", "mma.sync f16", "mfma fp8") -> count in PTX or AMD assembly."""
    found: Counter[str] = Counter()
    for pattern, kind in _MATRIX:
        found.update(kind.format(match.group(1)) for match in pattern.finditer(text))
    return dict(found)


def local_memory_accesses(sass: str) -> int:
    """Loads from and stores to a thread's local memory: what spilling and indexed arrays become."""
    return sum(m.group(2).startswith(("LDL", "STL")) for m in _SASS_LINE.finditer(sass))


def nvidia_loops(sass: str) -> tuple[tuple[Loop, ...], Loop]:
    """Main loops, and the whole, of a kernel in the text of `cuobjdump -sass`."""
    code = []
    for match in _SASS_LINE.finditer(sass):
        address, name, operands = match.groups()
        jump = re.search(r"0x([0-9a-f]+)", operands) if name.startswith("BRA") else None
        code.append(_Instruction(name, _address(address), _address(jump.group(1)) if jump else ""))
    return _main_loops(code), _measure(instruction.name for instruction in code)


def amd_loops(assembly: str) -> tuple[tuple[Loop, ...], Loop]:
    """Main loops, and the whole, of a kernel in AMD assembly, by the compiler's own remarks on its blocks."""
    whole: list[str] = []
    bodies: dict[str, list[str]] = {}
    parents: dict[str, str] = {}
    block = header = ""
    for line in assembly.splitlines():
        if start := _AMD_BLOCK.match(line):
            block, header = start.group(1) or "", ""
        if "Loop Header" in line:
            header = block
        elif inside := _AMD_IN_LOOP.search(line):
            header = inside.group(1)
        elif (outside := _AMD_PARENT.search(line)) and block:
            parents[block] = outside.group(1)  # the last one named is the nearest
        text = line.split(";")[0].strip()
        if not text or text.endswith(":") or text.startswith("."):
            continue
        whole.append(text.split()[0])
        if header:
            bodies.setdefault(header, []).append(text.split()[0])
    busy = {name: loop for name, body in bodies.items() if _works(loop := _measure(body))}
    around = {parents.get(name) for name in busy}
    while wider := {parents[name] for name in around if name in parents} - around:
        around |= wider
    return tuple(loop for name, loop in busy.items() if name not in around), _measure(whole)


def _address(digits: str) -> str:
    return f"{int(digits, 16):x}"


def _main_loops(code: list[_Instruction]) -> tuple[Loop, ...]:
    """Bodies that a jump backwards closes, that load or multiply, and hold no smaller such body."""
    at = {instruction.address: i for i, instruction in enumerate(code)}
    spans = []
    for end, instruction in enumerate(code):
        start = at.get(instruction.target, end)
        if start < end:
            loop = _measure(i.name for i in code[start : end + 1])
            if _works(loop):
                spans.append((start, end, loop))
    inner = []
    for start, end, loop in spans:
        smaller = [s for s in spans if start <= s[0] and s[1] <= end and s[:2] != (start, end)]
        if not smaller:
            inner.append(loop)
    return tuple(inner)


def _works(loop: Loop) -> bool:
    return bool(loop.loads or loop.bulk or loop.matrix)


def _measure(names: Iterable[str]) -> Loop:
    loads: Counter[int] = Counter()
    count = matrix = bulk = 0
    for name in names:
        count += 1
        matrix += bool(_SASS_MATRIX.match(name)) or name.startswith("v_mfma")
        bulk += name.startswith(("UTMALDG", "UBLKCP"))
        if name.startswith("LDG") and not name.startswith("LDGDEPBAR"):
            loads[next((_SASS_WIDTH[p] for p in name.split(".") if p in _SASS_WIDTH), 4)] += 1
        elif amd := _AMD_LOAD.match(name):
            loads[next(width for pattern, width in _AMD_WIDTH if pattern.search(amd.group(2)))] += 1
    return Loop(instructions=count, matrix=matrix, loads=dict(loads), bulk=bulk)
