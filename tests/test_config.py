"""What a user may get wrong, and what they are told: one PolicyError before weights load, naming the flag."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kvplug import compat
from vllm_kvplug.calibrate.profile import HeadProfile, ProfiledModel, Provenance
from vllm_kvplug.config import BudgetConfig, parse_knobs, share_of, split_request
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.features import check_config
from vllm_kvplug.plugin import install_policy, lower
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.shape import ModelShape

SHAPE = ModelShape(layers=3, kv_heads=2, query_heads=4, head_dim=32, name="tiny-llama", rotary=(1.0,) * 16)

Arguments = Callable[..., Any]


@pytest.fixture(scope="module")
def engine_args(tiny_model_dir: Path) -> Arguments:
    """EngineArgs of the tiny model. Making a config of them takes milliseconds and loads no weights."""
    from vllm import EngineArgs

    def make(**changes: Any) -> Any:
        base = {"model": str(tiny_model_dir), "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 256}
        return EngineArgs(**{**base, **changes})

    return make


def error_of(action: Callable[[], Any]) -> str:
    """The message of the PolicyError that `action` raises: one line, no pydantic preamble."""
    with pytest.raises(PolicyError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message and "validation error" not in message
    return message


def save_profile(path: Path, full_heads: int = 2, shape: ModelShape = SHAPE) -> Path:
    """A head profile whose first `full_heads` heads keep everything."""
    flat = ["volatile"] * full_heads + ["anchor"] * (shape.heads - full_heads)
    roles = [flat[i : i + shape.kv_heads] for i in range(0, shape.heads, shape.kv_heads)]
    profile = HeadProfile(
        model=ProfiledModel(
            name="some-model",
            fingerprint="",
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            query_heads=shape.query_heads,
            head_dim=shape.head_dim,
        ),
        roles=roles,
        weights=[[-1.0 if role == "volatile" else 1.0 for role in row] for row in roles],
        clusters=[{}] * shape.layers,
        provenance=Provenance(source="made by hand for a test", date="2026-01-01"),
    )
    profile.save(path)
    return path


# --------------------------------------------------------------------------------------------- wrong knobs


@pytest.mark.parametrize(
    "policy, knobs, words",
    [
        ("snapkv", {"sinks": 4}, ["sinks", "kernel, max_request_budget, protect_system, ratio, window"]),
        ("streaming", {"ratio": 0.5}, ["ratio", "sinks, window"]),
        ("snapkv", {"Ratio": 0.5, "windw": 3}, ["Ratio", "windw"]),
        ("snapkv", {"ratio": "half"}, ["ratio", "number"]),
        ("snapkv", {"ratio": None, "window": [64]}, ["window", "integer"]),
        ("snapkv", {"budget_tokens": 12.5}, ["budget_tokens", "integer"]),
        ("heterocache", {"profile": 3}, ["profile", "string"]),
        ("snapkv", {"ratio": 0.5, "budget_tokens": 100}, ["ratio or budget_tokens, not both"]),
        ("snapkv", {"ratio": 0}, ["ratio", "greater than 0"]),
        ("snapkv", {"ratio": 1.01}, ["ratio", "less than or equal to 1"]),
        ("snapkv", {"ratio": float("nan")}, ["ratio"]),
        ("random", {"budget_tokens": 0}, ["budget_tokens", "greater than or equal to 1"]),
        ("random", {"seed": -1}, ["seed"]),
        ("streaming", {"window": 0}, ["window", "greater than or equal to 1"]),
        ("streaming", {"sinks": -1}, ["sinks"]),
        ("heterocache", {"rho": 0}, ["rho", "greater than 0"]),
        ("heterocache", {"rho": 1.5}, ["rho", "less than or equal to 1"]),
        ("snapkv", {"kernel": 4}, ["kernel", "odd"]),
        ("knorm", {"allocation": "head"}, ["allocation", "'joint', 'layer' or 'uniform'"]),
        ("heterocache", {"kernel": 0}, ["kernel"]),
        ("snapkv", {"arena_gib": 0}, ["arena_gib"]),
        ("snapkv", {"host_gib": -1}, ["host_gib"]),
    ],
    ids=str,
)
def test_wrong_knobs(policy: str, knobs: dict[str, Any], words: list[str]):
    message = error_of(lambda: make_policy(policy, knobs, SHAPE))
    assert f"--kv-policy-config for policy '{policy}'" in message
    for word in words:
        assert word in message


def test_every_wrong_knob_is_named_at_once():
    message = error_of(lambda: make_policy("snapkv", {"ratio": 2, "kernel": 2, "nope": 1}, SHAPE))
    assert all(knob in message for knob in ("ratio", "kernel", "nope"))


@pytest.mark.parametrize("policy", ["random", "snapkv", "streaming"])
def test_host_gib_needs_a_host_tier(policy: str):
    message = error_of(lambda: make_policy(policy, {"host_gib": 1.5}, SHAPE))
    assert policy in message and "remove host_gib from --kv-policy-config" in message
    make_policy(policy, {"host_gib": 0}, SHAPE)


def test_knobs_are_frozen():
    policy = make_policy("snapkv", {"ratio": 0.25}, SHAPE)
    with pytest.raises(ValueError):
        policy.config.ratio = 0.5


@pytest.mark.parametrize(
    "ratio, tokens, share", [(0.29, 100, 29), (0.5, 7, 3), (1, 9, 9), (0.1, 30, 3), (1e-5, 10, 0), (0.07, 100, 7)]
)
def test_a_share_is_of_the_ratio_as_written(ratio: float, tokens: int, share: int):
    assert share_of(ratio, tokens) == share


@pytest.mark.parametrize(
    "knobs, prompt, kept",
    [({}, 9, 4), ({}, 1, 1), ({"ratio": 0.01}, 9, 1), ({"ratio": 1}, 9, 9), ({"budget_tokens": 5}, 9, 5)]
    + [({"budget_tokens": 50}, 9, 9), ({"ratio": 0.29}, 100, 29)],
    ids=str,
)
def test_budgets_lie_between_one_token_and_the_prompt(knobs: dict[str, Any], prompt: int, kept: int):
    assert BudgetConfig(**knobs).tokens(prompt) == kept


@pytest.mark.parametrize("value", [None, 3, [], {}, {"ratio": 0.5}, {"name": 3}], ids=str)
def test_additional_config_must_name_a_policy(value: Any):
    assert "additional_config['kv_policy']" in error_of(lambda: split_request(value))


def test_split_request():
    request = {"name": "snapkv", "ratio": 0.5}
    assert split_request(request) == ("snapkv", {"ratio": 0.5})
    assert request == {"name": "snapkv", "ratio": 0.5}
    assert split_request("random") == ("random", {})


# ------------------------------------------------------------------------------------------------ profiles


def heterocache(tmp_path: Path, full_heads: int, **knobs: Any) -> Any:
    path = save_profile(tmp_path / "profile.json", full_heads)
    return make_policy("heterocache", {"profile": str(path), **knobs}, SHAPE)


@pytest.mark.parametrize("full_heads, rho", [(3, 0.5), (1, 0.2), (4, 0.3), (5, 0.83), (2, 0.1)])
def test_rho_that_cannot_pay_for_full_heads(tmp_path: Path, full_heads: int, rho: float):
    message = error_of(lambda: heterocache(tmp_path, full_heads, rho=rho))
    assert f"rho={rho}" in message and f"{full_heads} heads" in message
    for word in ("--kv-policy-config", "--tau-stable", "--tau-sim"):
        assert word in message


@pytest.mark.parametrize("full_heads", [1, 2, 3, 4, 5])
def test_the_rho_that_is_advised_works(tmp_path: Path, full_heads: int):
    message = error_of(lambda: heterocache(tmp_path, full_heads, rho=0.01))
    (advised,) = re.findall(r"Set rho \D*(\d\.\d+)", message)
    policy = heterocache(tmp_path, full_heads, rho=float(advised))
    assert min(min(layer) for layer in policy.kept(1000)) >= 16


@pytest.mark.parametrize("full_heads, rho", [(6, 0.1), (5, 1), (2, 0.5), (0, 0.17)])
def test_rho_that_can_pay(tmp_path: Path, full_heads: int, rho: float):
    heterocache(tmp_path, full_heads, rho=rho)


def test_profile_of_another_shape(tmp_path: Path):
    other = ModelShape(layers=3, kv_heads=4, query_heads=4, head_dim=32)
    path = save_profile(tmp_path / "other.json", shape=other)
    message = error_of(lambda: make_policy("heterocache", {"profile": str(path)}, SHAPE))
    for word in (str(path), "some-model", "tiny-llama", "(3, 4, 4, 32)", "(3, 2, 4, 32)", "--kv-policy-config"):
        assert word in message


def test_profile_that_is_not_there(tmp_path: Path):
    message = error_of(lambda: make_policy("heterocache", {"profile": str(tmp_path / "none.json")}, SHAPE))
    assert "none.json" in message and "--kv-policy-config" in message
    message = error_of(lambda: make_policy("heterocache", {"profile": str(tmp_path)}, SHAPE))
    assert "--kv-policy-config" in message


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 1}', b"\xff\xfe\x00"], ids=str)
def test_profile_that_is_corrupt(tmp_path: Path, content: bytes):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    message = error_of(lambda: make_policy("heterocache", {"profile": str(path)}, SHAPE))
    assert str(path) in message and "--kv-policy-config" in message


def test_no_shipped_profile():
    message = error_of(lambda: make_policy("heterocache", {}, SHAPE))
    for word in ("tiny-llama", "kvplug profile", "--kv-policy-config"):
        assert word in message


# ------------------------------------------------------------------------------------- from the arguments on


def test_without_a_policy_nothing_changes(engine_args: Arguments):
    args = engine_args()
    config = args.create_engine_config()
    assert config.scheduler_config.scheduler_cls is None
    assert config.parallel_config.worker_cls.startswith("vllm.")
    assert config.attention_config.backend is None
    assert config.cache_config.enable_prefix_caching
    assert not config.additional_config and not args.additional_config


def test_a_policy_is_lowered_to_stock_fields(engine_args: Arguments):
    args = engine_args(kv_policy="snapkv", kv_policy_config={"ratio": 0.25}, additional_config={"other": 1})
    config = args.create_engine_config()
    request = {"name": "snapkv", "ratio": 0.25}
    assert config.additional_config == {"other": 1, "kv_policy": request} == args.additional_config
    assert config.attention_config.backend.name == "CUSTOM"
    assert config.cache_config.block_size == 16 and not config.cache_config.enable_prefix_caching
    assert config.parallel_config.worker_cls in compat.WORKERS.values()
    again = args.create_engine_config()  # lowering what is lowered already changes nothing
    assert again.additional_config == config.additional_config


@pytest.mark.parametrize("is_async, scheduler", [(True, "AsyncPolicyScheduler"), (False, "PolicyScheduler")])
@pytest.mark.parametrize("worker", compat.WORKERS)
def test_scheduler_and_worker_follow_the_platform(engine_args: Arguments, is_async: bool, scheduler: str, worker: str):
    config = engine_args(kv_policy="snapkv").create_engine_config()
    config.scheduler_config.async_scheduling, config.parallel_config.worker_cls = is_async, worker
    install_policy(config)
    assert config.scheduler_config.get_scheduler_cls().__name__ == scheduler
    assert config.parallel_config.worker_cls == compat.WORKERS[worker]


def test_other_platforms_are_refused(engine_args: Arguments):
    config = engine_args(kv_policy="snapkv").create_engine_config()
    config.parallel_config.worker_cls = "vllm.v1.worker.tpu_worker.TPUWorker"
    message = error_of(lambda: install_policy(config))
    assert "--kv-policy" in message and "TPUWorker" in message and "CUDA or CPU" in message


FIRST_IMPORTS = {
    "vllm.EngineArgs": "from vllm import EngineArgs",
    "vllm.LLM": "from vllm import LLM, EngineArgs",
    "arg_utils": "from vllm.engine.arg_utils import AsyncEngineArgs as EngineArgs",
}


@pytest.mark.parametrize("line", FIRST_IMPORTS.values(), ids=FIRST_IMPORTS.keys())
def test_keywords_whatever_is_imported_first(line: str, tiny_model_dir: Path):
    """A new process: its very first EngineArgs takes our keywords."""
    code = f"""
{line}
arguments = dict(model={str(tiny_model_dir)!r}, skip_tokenizer_init=True, dtype="float32")
config = EngineArgs(kv_policy="snapkv", kv_policy_config={{"ratio": 0.25}}, **arguments).create_engine_config()
print(config.additional_config["kv_policy"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "{'name': 'snapkv', 'ratio': 0.25}" in done.stdout


@pytest.mark.parametrize("request_", ["streaming", {"name": "streaming", "window": 32}], ids=str)
def test_a_policy_in_additional_config(engine_args: Arguments, request_: Any):
    config = engine_args(additional_config={"kv_policy": request_}).create_engine_config()
    knobs = {} if isinstance(request_, str) else {"window": 32}
    assert config.additional_config == {"kv_policy": {"name": "streaming", **knobs}}
    assert config.attention_config.backend.name == "CUSTOM"


def test_knobs_as_json(engine_args: Arguments):
    config = engine_args(kv_policy="snapkv", kv_policy_config='{"ratio": 0.25}').create_engine_config()
    assert config.additional_config["kv_policy"] == {"name": "snapkv", "ratio": 0.25}


def test_a_config_that_vllm_only_hashes_is_left_alone(engine_args: Arguments):
    class Hashed:
        def compute_hash(self) -> str:
            return ""

    args = engine_args()
    args.additional_config = Hashed()
    assert lower(args) is False and isinstance(args.additional_config, Hashed)
    args.kv_policy = "snapkv"
    assert "additional_config" in error_of(lambda: lower(args))


def parse_flags(model_dir: Path, *flags: str) -> Any:
    """EngineArgs from a command line."""
    from vllm import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    base = ["--model", str(model_dir), "--skip-tokenizer-init", "--dtype", "float32", "--max-model-len", "256"]
    return AsyncEngineArgs.from_cli_args(parser.parse_args([*base, *flags]))


@pytest.mark.parametrize(
    "flags, request_",
    [
        (["--kv-policy", "random"], {"name": "random"}),
        (["--kv_policy=snapkv", '--kv-policy-config={"ratio": 0.25}'], {"name": "snapkv", "ratio": 0.25}),
        (
            ["--kv-policy", "snapkv", "--kv-policy-config.ratio", "0.25", "--kv-policy-config.window", "16"],
            {"name": "snapkv", "ratio": 0.25, "window": 16},
        ),
        (["--additional-config", '{"kv_policy": "random"}'], {"name": "random"}),
    ],
    ids=str,
)
def test_flags(tiny_model_dir: Path, flags: list[str], request_: dict[str, Any]):
    config = parse_flags(tiny_model_dir, *flags).create_engine_config()
    assert config.additional_config == {"kv_policy": request_}
    assert config.attention_config.backend.name == "CUSTOM"


def test_no_flags(tiny_model_dir: Path):
    args = parse_flags(tiny_model_dir)
    assert args.kv_policy is None and args.kv_policy_config is None
    assert args.create_engine_config().attention_config.backend is None


@pytest.mark.parametrize("value", ['{"ratio":', "ratio=0.5", "[1]", "5", '{"name": "random"}'])
def test_a_flag_that_is_no_json_object(tiny_model_dir: Path, value: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        parse_flags(tiny_model_dir, "--kv-policy", "snapkv", "--kv-policy-config", value)
    assert caught.value.code == 2
    assert "argument --kv-policy-config: --kv-policy-config" in capsys.readouterr().err.splitlines()[-1]


ARGUMENT_ERRORS = {
    "unknown policy": ({"kv_policy": "nope"}, ["--kv-policy nope", "snapkv, streaming"]),
    "unknown policy in additional_config": ({"additional_config": {"kv_policy": "nope"}}, ["--kv-policy nope"]),
    "unknown knob": ({"kv_policy": "snapkv", "kv_policy_config": {"sinks": 4}}, ["--kv-policy-config", "sinks"]),
    "knobs without a policy": ({"kv_policy_config": {"ratio": 0.5}}, ["--kv-policy-config needs --kv-policy"]),
    "no JSON": ({"kv_policy": "snapkv", "kv_policy_config": '{"ratio":'}, ["--kv-policy-config", "JSON"]),
    "JSON list": ({"kv_policy": "snapkv", "kv_policy_config": "[1]"}, ["--kv-policy-config", "object", "[1]"]),
    "JSON null": ({"kv_policy": "snapkv", "kv_policy_config": "null"}, ["--kv-policy-config", "object"]),
    "number": ({"kv_policy": "snapkv", "kv_policy_config": 5}, ["--kv-policy-config", "object"]),
    "empty text": ({"kv_policy": "snapkv", "kv_policy_config": ""}, ["--kv-policy-config"]),
    "keys that are no names": ({"kv_policy": "snapkv", "kv_policy_config": {1: 2}}, ["--kv-policy-config"]),
    "another policy among the knobs": (
        {"kv_policy": "snapkv", "kv_policy_config": {"name": "random"}},
        ["--kv-policy-config", "name", "--kv-policy"],
    ),
    "policy twice": (
        {"kv_policy": "snapkv", "additional_config": {"kv_policy": "random"}},
        ["once", "--kv-policy", "additional_config['kv_policy']"],
    ),
    "no name": ({"additional_config": {"kv_policy": {"ratio": 0.5}}}, ["additional_config['kv_policy']"]),
    "no profile": ({"kv_policy": "heterocache"}, ["--kv-policy-config", "kvplug profile"]),
    "host tier": ({"kv_policy": "snapkv", "kv_policy_config": {"host_gib": 1}}, ["host_gib", "--kv-policy-config"]),
}


@pytest.mark.parametrize("arguments, words", ARGUMENT_ERRORS.values(), ids=ARGUMENT_ERRORS.keys())
def test_wrong_arguments(engine_args: Arguments, arguments: dict[str, Any], words: list[str]):
    args = engine_args(**arguments)
    message = error_of(args.create_engine_config)
    for word in words:
        assert word in message


REFUSED = {
    "prefix caching": ({"enable_prefix_caching": True}, "--enable-prefix-caching"),
    "blocks of 32": ({"block_size": 32}, "--block-size 32"),
    "attention backend": ({"attention_backend": "TRITON_ATTN"}, "--attention-backend"),
    "scheduler": ({"scheduler_cls": "some.Scheduler"}, "--scheduler-cls"),
    "worker": ({"worker_cls": "some.Worker"}, "--worker-cls"),
    "LoRA": ({"enable_lora": True, "max_lora_rank": 8}, "--enable-lora"),
    "speculative decoding": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        "--speculative-config",
    ),
    "KV connector": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "--kv-transfer-config",
    ),
    "KV offloading": ({"kv_offloading_size": 1.0}, "--kv-offloading-size"),
    "KV of five exponent bits": ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2"),
    "KV of another type than the model": ({"kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype bfloat16"),
    "pipeline parallel": ({"pipeline_parallel_size": 3}, "--pipeline-parallel-size"),
    "data parallel": ({"data_parallel_size": 2}, "--data-parallel-size"),
    "context parallel": (
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
        "--decode-context-parallel-size",
    ),
    "microbatches": (  # by their number, since the CPU platform clears --enable-dbo by itself
        {"ubatch_size": 2, "all2all_backend": "deepep_low_latency"},
        "--ubatch-size",
    ),
    "pooling": ({"runner": "pooling"}, "--kv-policy"),
}


@pytest.mark.parametrize("arguments, flag", REFUSED.values(), ids=REFUSED.keys())
def test_refused_features(engine_args: Arguments, arguments: dict[str, Any], flag: str):
    """Each of them is fine for vLLM, or fails there later; with a policy it is refused here, by its flag."""
    message = error_of(engine_args(kv_policy="snapkv", **arguments).create_engine_config)
    assert message.startswith("--kv-policy") and flag in message


@pytest.mark.parametrize(
    "arguments",
    [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}, {"block_size": 16}, {"enable_prefix_caching": False}]
    + [{"attention_backend": "CUSTOM"}, {"enable_chunked_prefill": True}, {"kv_cache_dtype": "auto"}],
    ids=str,
)
def test_features_that_work(engine_args: Arguments, arguments: dict[str, Any]):
    config = engine_args(kv_policy="snapkv", **arguments).create_engine_config()
    assert config.attention_config.backend.name == "CUSTOM"


# ------------------------------------------------------------------ features that the tiny model cannot show


def finished_config(**changes: Any) -> SimpleNamespace:
    """What `check_config` reads of a VllmConfig that it accepts; changes as part__field=value."""
    model = SimpleNamespace(
        runner_type="generate",
        is_encoder_decoder=False,
        use_mla=False,
        is_hybrid=False,
        is_attention_free=False,
        is_multimodal_model=False,
        enable_sleep_mode=False,
        dtype=torch.bfloat16,
        hf_text_config=SimpleNamespace(),
        get_sliding_window=lambda: None,
        get_total_num_kv_heads=lambda: 8,
    )
    cache = SimpleNamespace(enable_prefix_caching=False, cache_dtype="auto")
    parallel = SimpleNamespace(
        pipeline_parallel_size=1,
        data_parallel_size=1,
        decode_context_parallel_size=1,
        tensor_parallel_size=1,
        use_ubatching=False,
    )
    parts = {"model": model, "cache": cache, "parallel": parallel, "text": model.hf_text_config}
    config = SimpleNamespace(
        model_config=model,
        cache_config=cache,
        parallel_config=parallel,
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=None,
    )
    for key, value in changes.items():
        part, field = key.split("__")
        setattr(parts.get(part, config), field, value)
    return config


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model__is_encoder_decoder": True}, ["encoder-decoder"]),
        ({"model__use_mla": True}, ["latent attention"]),
        ({"model__is_hybrid": True}, ["state-space"]),
        ({"model__is_attention_free": True}, ["state-space"]),
        ({"text__sliding_window": 512, "model__get_sliding_window": lambda: 512}, ["sliding-window"]),
        ({"text__num_kv_shared_layers": 4}, ["KV sharing"]),
        ({"model__is_multimodal_model": True}, ["multimodal"]),
        ({"cache__enable_prefix_caching": True}, ["--enable-prefix-caching"]),
        ({"cache__cache_dtype": "fp8_e5m2"}, ["--kv-cache-dtype fp8_e5m2"]),
        ({"cache__cache_dtype": "float16"}, ["--kv-cache-dtype float16"]),
        ({"model__enable_sleep_mode": True}, ["--enable-sleep-mode"]),
        ({"parallel__use_ubatching": True}, ["dual-batch overlap", "--enable-dbo", "--ubatch-size"]),
        ({"parallel__tensor_parallel_size": 3}, ["--tensor-parallel-size"]),
        ({"parallel__tensor_parallel_size": 12}, ["--tensor-parallel-size"]),
        ({"config__speculative_config": object()}, ["--speculative-config"]),
    ],
    ids=lambda value: "-".join(value),
)
def test_refused_configs(changes: dict[str, Any], words: list[str]):
    message = error_of(lambda: check_config(finished_config(**changes)))
    assert message.startswith("--kv-policy does not work with")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cache__cache_dtype": "bfloat16"},
        {"text__sliding_window": 512},  # in the model's config, but not used
        {"text__num_kv_shared_layers": 0},
        *({"parallel__tensor_parallel_size": ranks} for ranks in (2, 4, 8, 16)),
    ],
    ids=str,
)
def test_accepted_configs(changes: dict[str, Any]):
    check_config(finished_config(**changes))


# ------------------------------------------------------------------------------------------------ versions


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.33.0", "0.32.0+cpu", "0.33.0rc1+cu129"])
def test_supported_versions(version: str):
    compat.check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.3.2", "0.320.1", "1.32.0", "dev"])
def test_unsupported_versions(version: str):
    message = error_of(lambda: compat.check_version(version))
    assert version in message and "0.32 and 0.33" in message and "--kv-policy" in message


def test_an_unsupported_version_matters_only_to_a_policy(engine_args: Arguments, monkeypatch: pytest.MonkeyPatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.40.0")
    engine_args().create_engine_config()
    assert "0.40.0" in error_of(engine_args(kv_policy="snapkv").create_engine_config)


# --------------------------------------------------------------------------------------- layers and policies


@pytest.mark.parametrize(
    "arguments, word",
    [
        (([0.5], None, None, "decoder", None), "ALiBi"),
        ((None, 128, None, "decoder", None), "sliding-window"),
        ((None, None, 30.0, "decoder", None), "soft-capping"),
        ((None, None, None, "encoder", None), "encoder attention"),
        ((None, None, None, "decoder", "model.layers.0"), "KV sharing"),
    ],
)
def test_refused_layers(arguments: tuple[Any, ...], word: str):
    message = error_of(lambda: compat.check_layer(*arguments))
    assert word in message and "--kv-policy" in message
    compat.check_layer(None, None, None, "decoder", None)


def test_the_backend_alone_is_no_policy():
    """attention_backend='CUSTOM' without a policy: the layers find no runtime."""
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    assert "--kv-policy" in error_of(lambda: compat.runtime_of(config))


def test_parse_knobs_returns_the_config():
    config = parse_knobs(BudgetConfig, "any", {"ratio": 0.25})
    assert config == BudgetConfig(ratio=0.25)
