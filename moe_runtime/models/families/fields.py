"""ConfigFields: typed access to a config.json, with errors that name file and field.

Owns the checks of types and ranges; knows no family's field names.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_runtime.errors import CheckpointError

LARGEST = 2**31 - 1  # of any size
_REQUIRED: Any = object()


class ConfigFields:
    """A JSON object of a checkpoint. Every getter takes the names a field goes by, best first.

    A field that is absent or null takes `default`; without a default that is a CheckpointError,
    as is a value of the wrong type or out of range.
    """

    def __init__(self, path: Path, data: Mapping[str, Any], *, family: str = "", section: str = "") -> None:
        self.path, self._data, self._family, self._section = path, data, family, section

    def error(self, field: str, problem: str) -> CheckpointError:
        """The error to raise about a field of this file."""
        family = f" (family {self._family})" if self._family else ""
        return CheckpointError(f"{self.path}: field {self._section + field!r} {problem}{family}")

    def has(self, name: str) -> bool:
        return self._data.get(name) is not None

    def _get(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for name in names:
            if self.has(name):
                return name, self._data[name]
        if default is _REQUIRED:
            raise self.error(names[0], "is missing")
        return names[0], default

    def integer(self, *names: str, default: int = _REQUIRED, minimum: int = 1, maximum: int = LARGEST) -> int:
        name, value = self._get(names, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"must be an integer, found {value!r}")
        if value < minimum:
            raise self.error(name, f"must be at least {minimum}, found {value}")
        if value > maximum:
            raise self.error(name, f"must be at most {maximum}, found {value:.6g}")
        return value

    def number(self, *names: str, default: float = _REQUIRED, minimum: float = 0.0) -> float:
        name, value = self._get(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"must be a number, found {value!r}")
        if not minimum <= value < float("inf"):
            raise self.error(name, f"must be a finite number of at least {minimum}, found {value}")
        return float(value)

    def flag(self, *names: str, default: bool = _REQUIRED) -> bool:
        name, value = self._get(names, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, found {value!r}")
        return value

    def text(self, *names: str, default: str = _REQUIRED) -> str:
        name, value = self._get(names, default)
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, found {value!r}")
        return value

    def integers(self, name: str, *, minimum: int = 0) -> tuple[int, ...]:
        """One integer, a list of them, or nothing (absent or null): always as a tuple."""
        _, value = self._get((name,), [])
        values = value if isinstance(value, list) else [value]
        for v in values:
            if isinstance(v, bool) or not isinstance(v, int) or v < minimum:
                raise self.error(name, f"must be integers of at least {minimum}, found {value!r}")
        return tuple(values)

    def object(self, name: str) -> "ConfigFields | None":
        """A nested JSON object; None where it is absent, null or empty."""
        value = self._data.get(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, found {value!r}")
        return ConfigFields(self.path, value, family=self._family, section=f"{self._section}{name}.")

    def only(self, name: str, allowed: tuple[Any, ...], *, default: Any) -> None:
        """Refuse a value that would need code which does not exist; never ignore it."""
        _, value = self._get((name,), default)
        if value not in allowed:
            shown = " or ".join(repr(a) for a in allowed)
            raise self.error(name, f"= {value!r} is not supported, only {shown}")


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint. CheckpointError if it is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: file not found") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:  # not JSON, or a number of thousands of digits
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, found {type(data).__name__}")
    return data
