"""Values of a record as a page shows them: of the right type, and of bounded length."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from holdfast.run_report.curves import number

Record = dict[str, Any]
LONGEST: Final = 8000  # characters of one text


def loader_of(record: Record) -> str:
    return cut(record.get("loader") or "", 200)


def texts(record: Record, names: Iterable[str], longest: int = LONGEST) -> dict[str, Any]:
    """These values: numbers and truth as they are, all others as text of bounded length."""
    return {name: _value(record.get(name), longest) for name in names}


def _value(value: Any, longest: int) -> Any:
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return number(value)
    return cut(value, longest)


def cut(value: Any, longest: int = LONGEST) -> str:
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= longest else f"{text[: longest // 2]} … {text[-longest // 2 :]}"


def list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def flat(values: Any) -> dict[str, str]:
    if not isinstance(values, Mapping):
        return {}
    return {
        cut(name, 100): cut(value if isinstance(value, str) else json.dumps(value), 500)
        for name, value in list(values.items())[:100]
    }
