"""What is compiled into `vllm_kvplug._C`, and how.

Read by setup.py, and by vllm_kvplug.ops when no prebuilt library is there; installed as `vllm_kvplug.csrc`.
"""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent

# By file name, because `-lstdc++` may find the static archive alone. The library would then hold a second C++ runtime,
# and writing a number into the message of an exception, a locale's work, ends the process.
LINK_FLAGS = ["-l:libstdc++.so.6"]


def sources(cuda: bool) -> list[str]:
    """Absolute paths of the translation units."""
    patterns = ["ops.cpp", "cpu/*.cpp"] + (["cuda/*.cu"] if cuda else [])
    return [str(path) for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def compile_flags() -> dict[str, list[str]]:
    """Flags by compiler. KVPLUG_PORTABLE=1 gives a library for any CPU of this kind, not just this one."""
    # -fopenmp when compiling only: the symbols then come from the OpenMP runtime that torch has loaded,
    # so that at::parallel_for here and torch's own operators share one pool of threads.
    cxx = ["-O3", "-fopenmp"]
    if os.environ.get("KVPLUG_PORTABLE") != "1":
        cxx.append("-march=native")
    return {"cxx": cxx, "nvcc": ["-O3"]}


def has_cuda() -> bool:
    """Whether this torch is a CUDA build and its compiler is there."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    has_compiler = CUDA_HOME is not None and Path(CUDA_HOME, "bin", "nvcc").exists()
    return torch.version.cuda is not None and has_compiler
