"""`kvplug train-gate` and `kvplug import-gate`, from files to files."""

import json
import sys

import pytest
import torch
from gates.gate_tools import HEADS, LAYERS, VOCAB, tiny_config, tiny_llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from vllm_kvplug import cli
from vllm_kvplug.calibrate.profile import ProfiledModel, weights_hash
from vllm_kvplug.gates import training
from vllm_kvplug.gates.backbone import cut_texts
from vllm_kvplug.gates.files import load_gate


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny-model"
    tokenizer.save_pretrained(path)
    tiny_llama().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """One plain file of 900 tokens, and one of 20 lines of 40 tokens."""
    path = tmp_path_factory.mktemp("texts")
    numbers = torch.randint(VOCAB, (1700,), generator=torch.Generator().manual_seed(0)).tolist()
    words = [f"w{number}" for number in numbers]
    (path / "long.txt").write_text(" ".join(words[:900]))
    lines = [" ".join(words[start : start + 40]) for start in range(900, 1700, 40)]
    (path / "short.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return [str(path / "long.txt"), str(path / "short.jsonl")]


def kvplug(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["kvplug", *map(str, arguments)])
    cli.main()


WGKV = ["--window", 8, "--length", 50, "--steps", 6, "--hidden", 16, "--lambda", 0.5]
FASTKVZIP = ["--length", 300, "--steps", 8, "--batch", 100, "--chunk", 200, "--dim", 4]


def test_train_gate_wgkv(folder, texts, tmp_path, monkeypatch, capsys):
    out = tmp_path / "gates" / "write.safetensors"
    kvplug(monkeypatch, "train-gate", "wgkv", folder, "--texts", *texts, *WGKV, "--out", out)
    gate, metadata = load_gate("wgkv", out, ProfiledModel.of(tiny_config(), "tiny"))
    assert gate.w1.shape == (LAYERS, HEADS, 16, 16)
    shape = metadata.gate
    assert (shape.hidden, shape.window, shape.tau, shape.sparsity_weight) == (16, 8, 0.1, 0.5)
    assert metadata.weights_hash == weights_hash(folder) and metadata.model.name == "tiny-model"
    assert [file.name for file in metadata.files] == ["long.txt", "short.jsonl"]
    assert metadata.training["steps"] == 6 and metadata.training["sparsity"] == "remaining"
    assert metadata.tokens == 900 + 19 * 40  # 38 sequences, of which the last is held out
    assert metadata.results.keys() == {"distance", "admitted"}
    assert {"dtype", "torch", "transformers"} <= metadata.versions.keys()
    files = sorted(file.name for file in out.parent.iterdir())
    pytest.importorskip("matplotlib")
    assert files == ["write.png", "write.safetensors"]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "wgkv gate of tiny-model" in shown and "admitted" in shown


def test_train_gate_fastkvzip(folder, texts, tmp_path, monkeypatch, capsys):
    out = tmp_path / "sink.safetensors"
    kvplug(monkeypatch, "train-gate", "fastkvzip", folder, "--texts", *texts, *FASTKVZIP, "--int8", "--out", out)
    gate, metadata = load_gate("fastkvzip", out, ProfiledModel.of(tiny_config(), "tiny"))
    assert (metadata.gate.dim, metadata.gate.sinks, metadata.tokens) == (4, 16, 900)
    assert gate.bias.abs().max() > 0  # started at 0
    assert len(metadata.results["rank_correlation_of_layers"]) == LAYERS
    assert "recall30" in capsys.readouterr().out
    assert not out.with_suffix(".training").exists()


@pytest.mark.parametrize("kind, options", [("wgkv", WGKV), ("fastkvzip", FASTKVZIP)])
def test_an_interrupted_command_goes_on(folder, texts, tmp_path, monkeypatch, kind, options):
    def gate_of(out):
        kvplug(monkeypatch, "train-gate", kind, folder, "--texts", *texts, *options, "--out", out)
        return load_gate(kind, out, ProfiledModel.of(tiny_config(), "tiny"))

    whole, metadata = gate_of(tmp_path / "whole.safetensors")
    monkeypatch.setattr(training.Checkpoint.__init__, "__defaults__", (2,))  # steps from one save to the next
    out, save = tmp_path / "cut.safetensors", training.Checkpoint.save

    def stopping(self, gate, optimizer, step, history):
        save(self, gate, optimizer, step, history)
        if step == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(training.Checkpoint, "save", stopping)
    with pytest.raises(KeyboardInterrupt):
        gate_of(out)
    assert not out.exists() and out.with_suffix(".training").is_dir()
    changed = ["train-gate", kind, folder, "--texts", *texts, *options, "--out", out, "--learning-rate", 0.5]
    with pytest.raises(SystemExit, match="is from a run with other settings"):
        kvplug(monkeypatch, *changed)
    resumed, again = gate_of(out)
    assert again.results == metadata.results
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "kind, options, message",
    [
        ("wgkv", ["--steps", 0], "train-gate: steps: "),
        ("wgkv", ["--texts", "missing.txt"], "missing.txt"),
        ("wgkv", ["--window", 1000, "--length", 1000], "no text has 1001 tokens or more"),
        ("fastkvzip", ["--chunk", 0], "train-gate: chunk: "),
        ("fastkvzip", ["--length", 90], "train-gate: length: "),
    ],
)
def test_what_cannot_be_trained_is_refused(folder, texts, tmp_path, monkeypatch, kind, options, message):
    arguments = ["train-gate", kind, folder, "--texts", *texts, "--out", tmp_path / "gate.safetensors", *options]
    with pytest.raises(SystemExit, match=f"kvplug: .*{message}"):
        kvplug(monkeypatch, *arguments)
    assert not list(tmp_path.iterdir())


def test_a_context_that_the_model_has_no_positions_for_is_refused(texts, tokenizer, tmp_path, monkeypatch):
    model = tmp_path / "short-model"
    tokenizer.save_pretrained(model)
    tiny_llama().save_pretrained(model)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 600}
    (model / "config.json").write_text(json.dumps(config))
    arguments = [
        "train-gate",
        "fastkvzip",
        model,
        "--texts",
        *texts,
        *FASTKVZIP,
        "--chunk",
        100,
        "--out",
        tmp_path / "gate",
    ]
    with pytest.raises(SystemExit, match=r"lower --length to (\d+)") as error:
        kvplug(monkeypatch, *arguments, "--length", 900)
    fits = str(error.value).split()[-1]
    kvplug(monkeypatch, *arguments, "--length", fits)
    with pytest.raises(SystemExit, match="lower --length"):
        kvplug(monkeypatch, *arguments, "--length", int(fits) + 1)


def test_import_gate(folder, tmp_path, monkeypatch, capsys):
    weights = {
        "pre_key_norm.weight": torch.ones(8),
        "post_key_norm.weight": torch.ones(8),
        "conv1.weight": torch.randn(HEADS * 12, 16, 1),
        "conv1.bias": torch.randn(HEADS * 12),
        "conv2.weight": torch.randn(HEADS, 12, 1),
        "conv2.bias": torch.randn(HEADS),
    }
    prefix = "model.layers.{}.self_attn.g_predictors."
    state = {prefix.format(layer) + name: weight for layer in range(LAYERS) for name, weight in weights.items()}
    torch.save(state, tmp_path / "tiny-0.08.pt")
    out = tmp_path / "gate.safetensors"
    kvplug(monkeypatch, "import-gate", "wgkv", folder, tmp_path / "tiny-0.08.pt", "--out", out)
    gate, metadata = load_gate("wgkv", out, ProfiledModel.of(tiny_config(), "tiny"))
    assert torch.equal(gate.b1[1].flatten(), weights["conv1.bias"])
    assert metadata.gate.sparsity_weight == 0.08 and "written to" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--double-bias is for fastkvzip"):
        kvplug(monkeypatch, "import-gate", "wgkv", folder, tmp_path / "tiny-0.08.pt", "--out", out, "--double-bias")


# ---------------------------------------------------------------- texts
def test_texts_are_cut_into_pieces(tokenizer):
    def words(count):
        return " ".join(f"w{i}" for i in range(count))

    def lengths(*counts, **limits):
        pieces = cut_texts(tokenizer, [("name", words(count)) for count in counts], **limits)
        return [len(piece) for piece in pieces]

    assert lengths(25, 9, 3, length=10, shortest=4, tokens=None) == [10, 10, 5, 9]
    assert lengths(25, 9, 3, length=10, shortest=4, tokens=24) == [10, 10, 4]
    assert lengths(25, 9, 3, length=10, shortest=4, tokens=23) == [10, 10]
    pieces = cut_texts(tokenizer, [("name", words(12))], 10, 1, None)
    assert torch.cat(pieces).tolist() == list(range(12))
