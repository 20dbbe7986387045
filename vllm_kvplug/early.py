"""Makes `LLM(kv_policy=...)` work: vLLM loads general plugins only after that call has begun.

vLLM asks every entry point of the group `vllm.platform_plugins` for a platform while `import vllm` runs. Ours has
none to offer, and sees to it that the policy arguments are added once the argument module has been executed: by a
one-shot import hook, or, where importing that very module made vLLM ask, when its classes are first read. vLLM
swallows exceptions here, so this stays tiny.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

TARGET = "vllm.engine.arg_utils"
CLASSES = ("EngineArgs", "AsyncEngineArgs")


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds the target the usual way, once, and patches it right after execution."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            _patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


class _PatchedOnRead(ModuleType):
    """The target while it executes: patched, once, when somebody reads one of its finished classes."""

    def __getattribute__(self, name: str) -> Any:
        if name in CLASSES and name in ModuleType.__getattribute__(self, "__dict__"):
            self.__class__ = ModuleType  # type: ignore[assignment]
            _patch(self)
        return ModuleType.__getattribute__(self, name)


def _patch(module: ModuleType) -> None:
    from vllm_kvplug.plugin import add_policy_arguments

    add_policy_arguments(module)


def install() -> None:
    """Entry point `vllm.platform_plugins`: no platform, only the policy arguments."""
    module = sys.modules.get(TARGET)
    if module is not None and hasattr(module, CLASSES[0]):
        _patch(module)
    elif module is not None:
        module.__class__ = _PatchedOnRead
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
