"""The heat map of a record as a PNG."""

from __future__ import annotations

from pathlib import Path

from vllm_kvplug.view.record import Record


def save_plot(record: Record, folder: Path) -> Path:
    """Write kept.png and return its path. Raises ImportError if matplotlib, an optional dependency, is missing."""
    from matplotlib.figure import Figure

    layers, heads = len(record.kept), len(record.kept[0])
    shares = [[record.counts()[layer][head] / record.tokens for layer in range(layers)] for head in range(heads)]
    figure = Figure(figsize=(2.5 + 0.22 * layers, 1.5 + 0.25 * heads), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    figure.colorbar(image, ax=axes, label="share of the prompt kept")
    title = f"{record.policy} on {Path(record.model).name}: {record.share():.1%} of {record.tokens:,} tokens"
    axes.set(title=title, xlabel="layer", ylabel="KV head", yticks=range(heads))
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "kept.png", dpi=120)
    return folder / "kept.png"
