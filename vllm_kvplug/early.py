"""Makes `LLM(kv_policy=...)` work: vLLM loads general plugins only after that call has begun.

vLLM asks every entry point of the group `vllm.platform_plugins` for a platform while `import vllm` runs,
before its argument module executes. Ours has none to offer, and leaves a one-shot import hook that adds the
policy arguments as soon as that module has been executed. vLLM swallows exceptions here, so this stays tiny.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

TARGET = "vllm.engine.arg_utils"


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


def _patch(module: ModuleType) -> None:
    from vllm_kvplug.plugin import add_policy_arguments

    add_policy_arguments(module)


def install() -> None:
    """Entry point `vllm.platform_plugins`: no platform, only the hook."""
    module = sys.modules.get(TARGET)
    if module is not None and hasattr(module, "EngineArgs"):
        _patch(module)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
