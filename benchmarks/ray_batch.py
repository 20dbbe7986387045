"""Answers prompts from a file under a policy, as a batch job on a Ray cluster.

    python -m benchmarks.ray_batch MODEL PROMPTS.jsonl OUT [--policy snapkv@0.3] [--engines 1] [--engine JSON]

Every line of PROMPTS has a `prompt`; OUT becomes a folder of JSON lines with an `answer` beside it. Ray Data reads and
writes in blocks, and each engine, on a GPU of its own where there are any, takes the next batch when it is free.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import ray

from vllm_kvplug.policies.argument import read_policy


class Engine:
    """One vLLM engine with a policy, which lives as long as the job."""

    def __init__(self, arguments: dict[str, Any], tokens: int):
        from vllm import LLM, SamplingParams

        self.llm = LLM(**arguments)
        self.sampling = SamplingParams(temperature=0, max_tokens=tokens)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        outputs = self.llm.generate(list(batch["prompt"]), self.sampling, use_tqdm=False)
        return {**batch, "answer": [output.outputs[0].text for output in outputs]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("out")
    parser.add_argument("--policy", default="snapkv@0.3", help="NAME, NAME@X or NAME:JSON (default %(default)s)")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of vllm.LLM")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most (default %(default)s)")
    args = parser.parse_args()
    name, knobs = read_policy(args.policy)
    policy = {"kv_policy": name, "kv_policy_config": knobs, "enable_prefix_caching": False}
    ray.init()
    device = {"num_gpus": 1} if ray.cluster_resources().get("GPU") else {"num_cpus": 1}
    prompts = ray.data.read_json(args.prompts)
    answers = prompts.repartition(args.engines * 4).map_batches(
        Engine,
        fn_constructor_args=[{"model": args.model, **policy, **args.engine}, args.tokens],
        batch_size=64,
        compute=ray.data.ActorPoolStrategy(size=args.engines),
        **device,
    )
    answers.write_json(args.out)


if __name__ == "__main__":
    main()
