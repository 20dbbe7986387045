"""One engine in a process of its own, which gives all its memory back when it ends.

    python -m vllm_kvplug.eval.engine_process JOB OUT     both are JSON files

The job has the engine's arguments, prompts as token ids, their `kvplug.*` options, and limits on answers. The result
has answers as texts and token ids, the share of memory held while requests decode and, if the job asks for them,
log-probabilities.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_kvplug import compat


def work(job: dict[str, Any]) -> dict[str, Any]:
    prompts = job["prompts"]
    options = {"logprobs": job["logprobs"], "ignore_eos": True} if job["logprobs"] else {}
    with compat.llm(**job["engine"]) as llm, tqdm(total=len(prompts), desc=job["label"]) as progress:
        held = compat.HeldMemory(llm)

        def after_step(finished: int) -> None:
            held.look()
            if finished:
                progress.update(finished)

        outputs = compat.generate(llm, prompts, job["max_tokens"], after_step, job["options"], **options)
    result: dict[str, Any] = {"texts": [output.text for output in outputs], "memory": held.share}
    result["tokens"] = [list(output.token_ids) for output in outputs]
    if job["logprobs"]:
        result["steps"] = [[{t: p.logprob for t, p in step.items()} for step in o.logprobs] for o in outputs]
    return result


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(work(json.loads(Path(sys.argv[1]).read_text()))))
