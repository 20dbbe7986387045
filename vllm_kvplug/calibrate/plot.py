"""Picture of a head profile: roles, stability and relative budgets, one cell per KV head."""

from pathlib import Path

from vllm_kvplug.calibrate.profile import NO_WEIGHT, HeadProfile, Role

COLOURS: dict[Role, str] = {
    "anchor": "#4c78a8",
    "volatile": "#e45756",
    "pivot": "#f2b701",
    "satellite": "#9fd4c8",
}


def save_plot(profile: HeadProfile, path: str | Path) -> None:
    """Writes a PNG. Raises ImportError if matplotlib, an optional dependency, is missing."""
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("drawing a profile needs matplotlib: pip install matplotlib") from error

    names = list(COLOURS)
    codes = [[names.index(role) for role in row] for row in profile.roles]
    budgets = [[float("nan") if r == NO_WEIGHT else r for r in row] for row in profile.weights]
    panels = [("role", codes), ("budget r", budgets)]
    if profile.stability is not None:
        panels.insert(1, ("stability S", profile.stability))

    # a Figure of its own, not pyplot: nothing global and no display needed
    width = 2.0 + 0.25 * profile.model.kv_heads
    figure = Figure(figsize=(width * len(panels), 1.5 + 0.2 * profile.model.layers), layout="constrained")
    figure.suptitle(profile.model.name)
    for axes, (title, matrix) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        if title == "role":
            axes.imshow(matrix, cmap=ListedColormap(list(COLOURS.values())), vmin=0, vmax=3, aspect="auto")
        else:
            figure.colorbar(axes.imshow(matrix, cmap="viridis", aspect="auto"), ax=axes)
        axes.set(title=title, xlabel="KV head", ylabel="layer", xticks=range(profile.model.kv_heads))
    patches = [Patch(color=COLOURS[name], label=f"{name} ({profile.count(name)})") for name in names]
    figure.legend(handles=patches, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)
