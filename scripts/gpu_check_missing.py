"""Lets the GPU check run where torch is there and packages are missing that only other ways through our code need."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

# Guides, frames between processes, checkpoints in files, and the look-up of network interfaces: the check has none.
NOT_NEEDED = ("llguidance", "msgpack", "safetensors", "psutil")


class Absent(ModuleType):
    """A package that is not installed. Its names can be imported, and say so when they are used."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        package = self.__name__

        def use(*_: object, **__: object) -> None:
            raise ModuleNotFoundError(f"{package}.{name} was used, but {package} is not installed", name=package)

        return type(name, (Exception,), {"__new__": use, "__call__": use})


def do_without() -> list[str]:
    """Puts an Absent in the place of each such package. Returns their names."""
    missing = []
    for name in NOT_NEEDED:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            sys.modules[name] = Absent(name)
            missing.append(name)
    return missing
