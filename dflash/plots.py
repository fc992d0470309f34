"""Pictures of what was measured, as PNG files; no display and no global state of matplotlib."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's palette without its yellow, which is too faint for a line: told apart by every kind of colour vision
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--")  # the first drafter, the second
DOTS_PER_INCH = 150


def histogram(path: str | Path, values: Sequence[float], *, title: str, xlabel: str) -> None:
    """A PNG with how often which value occurs, its median and its 90th percentile marked. `xlabel` names the unit."""
    figure, (axes,) = _figure(width_inches=7.0, panels=1)
    ordered = sorted(values)
    axes.hist(ordered, bins=min(50, len(set(ordered))), color=COLOURS[0], edgecolor="white", linewidth=0.4)
    for share, name, line in ((0.5, "median", "--"), (0.9, "90 % are at most", ":")):
        value = ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        axes.axvline(value, color=COLOURS[1], linestyle=line, label=f"{name} {value:,.4g}")
    axes.set(title=title, xlabel=xlabel, ylabel=f"how many of {len(ordered):,}")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    figure.savefig(path, format="png")


def acceptance(path: str | Path, measured: Mapping[str, Mapping[str, Mapping[str, Any]]], *, title: str) -> None:
    """A PNG of {drafter: {prompt set: {"tau", "tau_interval", "acceptance"}}}, of one or two drafters on the same sets.

    Left: the share of steps that accept each drafted slot. Right: tau of every set with its interval, where it has one.
    """
    sets = list(next(iter(measured.values())))
    figure, (slots, taus) = _figure(width_inches=6.0 + 1.2 * max(4, len(sets)), panels=2)
    for (drafter, results), line in zip(measured.items(), LINES, strict=False):
        for at, name in enumerate(sets):
            shares = results[name]["acceptance"]
            slots.plot(
                range(1, len(shares) + 1),
                [100 * share for share in shares],
                line,
                color=COLOURS[at % len(COLOURS)],
                marker=MARKERS[at % len(MARKERS)],
                markersize=5,
                label=name if len(measured) == 1 else f"{name}, {drafter}",
            )
    slots.set(
        title="Accepted drafts",
        xlabel="slot of the block (1 = first drafted token)",
        ylabel="accepted in % of the steps",
        xlim=(
            0.5,
            0.5 + max(len(values["acceptance"]) for results in measured.values() for values in results.values()),
        ),
        ylim=(0, 102),
    )
    slots.xaxis.set_major_locator(MaxNLocator(integer=True))
    slots.legend(frameon=False, fontsize="small")
    _bars(taus, measured, sets)
    figure.suptitle(title)
    figure.savefig(path, format="png")


def training(
    path: str | Path,
    rows: Sequence[Mapping[str, Any]],
    heldout: Sequence[Mapping[str, Any]],
    evaluation: Sequence[Mapping[str, Any]],
    *,
    edges: Sequence[int],
    depth: int,
    title: str,
) -> None:
    """A PNG of a run so far, from the rows of its files: loss, tau, queue fill and length mix over its steps.

    `edges` are the upper bounds of the length buckets in tokens, `depth` is what the queue holds at most.
    """
    figure, (losses, taus, fill, mix) = _figure(width_inches=20.0, panels=4)
    steps = [row["step"] for row in rows]
    for axes, name in ((losses, "loss"), (taus, "tau")):
        values = [row[name] for row in rows]
        axes.plot(steps, values, color=COLOURS[0], alpha=0.25, linewidth=0.8)
        axes.plot(steps, _smooth(values), color=COLOURS[0], label="training")
        if heldout:
            axes.plot(
                [row["step"] for row in heldout],
                [row[name] for row in heldout],
                "o-",
                color=COLOURS[1],
                label="held-out",
            )
        axes.set(title=name, xlabel="step")
    if decoded := [(row["step"], row["eval/tau"]) for row in evaluation if row["eval/tau"] is not None]:
        taus.plot(*zip(*decoded, strict=True), "D", color=COLOURS[2], label="real decoding")
    taus.set(ylabel="tokens per target forward")
    fill.plot(steps, [row["hs_samples"] for row in rows], color=COLOURS[0], linewidth=0.8)
    fill.axhline(depth, color="grey", linestyle=":", linewidth=1)
    fill.set(title=f"queue: samples of {depth}", xlabel="step", ylim=(0, 1.05 * depth))
    names = [f"{low + 1}-{high}" for low, high in zip((0, *edges), edges, strict=False)] + [f"> {edges[-1]}"]
    shares = [_smooth([row["hs_mix"][bucket] for row in rows]) for bucket in range(len(names))]
    mix.stackplot(
        steps, shares, labels=names, colors=[COLOURS[at % len(COLOURS)] for at in range(len(names))], alpha=0.8
    )
    mix.set(title="length mix of the steps (tokens)", xlabel="step", ylim=(0, 1))
    for axes in (losses, taus, mix):
        axes.legend(frameon=False, fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, format="png")


def _smooth(values: Sequence[float | None]) -> list[float]:
    """Means over the last twentieth of all values; one that is missing is left out."""
    width = max(1, len(values) // 20)
    kept = [
        [value for value in values[max(0, at - width + 1) : at + 1] if value is not None] for at in range(len(values))
    ]
    return [sum(some) / len(some) if some else math.nan for some in kept]


def _bars(axes: Axes, measured: Mapping[str, Mapping[str, Mapping[str, Any]]], sets: list[str]) -> None:
    width = 0.8 / len(measured)
    for number, (drafter, results) in enumerate(measured.items()):
        centres = [at + (number - (len(measured) - 1) / 2) * width for at in range(len(sets))]
        heights = [results[name]["tau"] for name in sets]
        axes.bar(
            centres,
            heights,
            0.92 * width,
            color=[COLOURS[at % len(COLOURS)] for at in range(len(sets))],
            alpha=1.0 if number == 0 else 0.45,
            hatch=None if number == 0 else "//",
            edgecolor="white",
            label=drafter,
        )
        for centre, height, name in zip(centres, heights, sets, strict=True):
            low, high = results[name]["tau_interval"] or (height, height)
            if high > low:
                axes.errorbar(
                    centre, height, [[height - low], [high - height]], color="black", capsize=4, linewidth=1.2
                )
            axes.annotate(f"{height:.2f}", (centre, high), (0, 3), textcoords="offset points", ha="center")
    axes.axhline(1, color="grey", linestyle=":", linewidth=1)  # what decoding without a drafter gives
    axes.set(title="tau, with its 95 % interval", ylabel="tokens per target forward")
    axes.set_xticks(range(len(sets)), sets)
    axes.margins(y=0.12)
    if len(measured) > 1:
        axes.legend(frameon=False, fontsize="small")


def _figure(*, width_inches: float, panels: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(width_inches, 4.2), dpi=DOTS_PER_INCH, layout="constrained")
    axes = [figure.add_subplot(1, panels, panel + 1) for panel in range(panels)]
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
    return figure, axes
