"""Builds the compiled ops and maps the top-level folders into the package; metadata is in pyproject.toml."""

import os
import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
import csrc  # noqa: E402

# Folders that stand beside the package in the repository and inside it once installed.
MAPPED = {f"vllm_kvplug.{n}": n.replace(".", "/") for n in ("csrc", "csrc.cpu", "csrc.cuda", "kernels", "profiles")}


def extension() -> dict:
    """The compiled ops if torch is here to build against (--no-build-isolation).

    Without torch nothing is compiled: vllm_kvplug.ops then builds the shipped sources at first use.
    """
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension
    except ImportError:
        return {}
    cuda = csrc.has_cuda()
    kind = CUDAExtension if cuda else CppExtension
    paths = [os.path.relpath(path, ROOT) for path in csrc.sources(cuda)]
    flags = {"extra_compile_args": csrc.compile_flags(), "extra_link_args": csrc.LINK_FLAGS}
    return {
        "ext_modules": [kind("vllm_kvplug._C", paths, **flags)],
        "cmdclass": {"build_ext": BuildExtension},
    }


setup(
    packages=find_packages(include=["vllm_kvplug", "vllm_kvplug.*"]) + list(MAPPED),
    package_dir=MAPPED,
    package_data={
        "vllm_kvplug.csrc": ["*.h", "*.cpp"],
        "vllm_kvplug.csrc.cpu": ["*.h", "*.cpp"],
        "vllm_kvplug.csrc.cuda": ["*.cu", "*.cuh"],
        "vllm_kvplug.profiles": ["*.json", "*.safetensors"],
        "vllm_kvplug.quant": ["*.safetensors"],
        "vllm_kvplug.view": ["page.*"],
    },
    **extension(),
)
