"""Whether a simulated and a measured report of the same steps have the same figures."""

import msgspec
import pytest

# What the two kinds of run know differently.
KINDS = ("simulated", "simulation", "missing")
SECTIONS = ("balancedness", "exchange", "phases", "attribution", "rank_loads", "balancing")


def figures(report):
    """Every value by its path, but those that the kinds of run know differently."""
    data = msgspec.to_builtins(report)
    for name in KINDS:
        del data[name]
    for section in data["deployments"]:
        for name in SECTIONS:
            del section[name]
        del section["timeline"]["balancedness"]
    return dict(leaves(data, ""))


def leaves(value, path):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}.{index}")
    else:
        yield path, value


def differences(simulated, measured):
    """Figures of the two kinds of run that are not the same, by path."""
    ours, theirs = figures(simulated), figures(measured)
    assert ours.keys() == theirs.keys()
    # Blocks of a run of steps grow evenly here, and in whole blocks there.
    loose = {".kv.mean_fraction": 0.02, ".timeline.kv_fraction": 0.1}
    found = {}
    for path, value in ours.items():
        other = theirs[path]
        slack = next((s for name, s in loose.items() if name in path), 1e-9)
        if isinstance(value, float):
            if other is None or value != pytest.approx(other, rel=slack, abs=1e-9):
                found[path] = (value, other)
        elif value != other:
            found[path] = (value, other)
    return found
