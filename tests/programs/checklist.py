"""Runs the `check_*` functions of a program and reports each one: None, or its traceback."""

from __future__ import annotations

import json
import traceback
from typing import Any


def main(namespace: dict[str, Any]) -> None:
    results: dict[str, str | None] = {}
    for name, check in namespace.items():
        if name.startswith("check_"):
            try:
                check()
                results[name] = None
            except Exception:
                results[name] = traceback.format_exc()
    print(json.dumps(results))
