import matplotlib
import numpy as np
import pytest
from matplotlib.image import imread

from dflash.plots import COLOURS, acceptance, histogram, training

BLOCK_SIZE = 8


def figures(tau: float, interval: list[float] | None) -> dict:
    return {"tau": tau, "tau_interval": interval, "acceptance": [0.9**slot for slot in range(1, BLOCK_SIZE)]}


def colours_in(path, *, dots: int = 12) -> set[str]:
    """The colours of a picture that cover so many of its dots or more, as #RRGGBB."""
    red, green, blue = np.moveaxis((imread(path)[:, :, :3] * 255).round().astype(int), 2, 0)
    colours, counts = np.unique((red * 256 + green) * 256 + blue, return_counts=True)
    return {f"#{colour:06X}" for colour in colours[counts >= dots].tolist()}


def test_a_histogram_is_a_png_of_a_readable_size(tmp_path):
    histogram(tmp_path / "lengths", [3, 5, 5, 8, 400], title="Length of the answers", xlabel="tokens of one answer")
    assert (tmp_path / "lengths").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    height, width, _ = imread(tmp_path / "lengths").shape
    assert 500 <= height <= 800
    assert 900 <= width <= 1800


def test_a_histogram_marks_the_median_and_the_90th_percentile(tmp_path):
    histogram(tmp_path / "a.png", list(range(100)), title="t", xlabel="x")
    dots = (imread(tmp_path / "a.png")[:, :, :3] * 255).round().astype(int)
    vermilion = [int(COLOURS[1][at : at + 2], 16) for at in (1, 3, 5)]
    columns = (dots == vermilion).all(axis=2).sum(axis=0)
    marks = np.flatnonzero(columns > 100)  # dots down the whole height; those of the legend are few
    axes = np.flatnonzero((dots == [int(COLOURS[0][at : at + 2], 16) for at in (1, 3, 5)]).all(axis=2).any(axis=0))
    places = (marks - axes[0]) / (axes[-1] - axes[0])
    assert {round(place, 1) for place in places} == {0.5, 0.9}


@pytest.mark.parametrize("values", [[7], [7, 7, 7], [1.5, 2.5], list(range(5000))], ids=len)
def test_any_values_have_a_histogram(tmp_path, values):
    histogram(tmp_path / "a.png", values, title="t", xlabel="x")
    assert COLOURS[0] in colours_in(tmp_path / "a.png")


def test_every_prompt_set_has_its_own_colour_in_the_acceptance_picture(tmp_path):
    sets = {name: figures(2.0 + at, [1.5 + at, 2.75 + at]) for at, name in enumerate(("chat", "code", "mathematics"))}
    acceptance(tmp_path / "three.png", {"run-0001": sets}, title="run-0001")
    assert set(COLOURS[:3]) <= colours_in(tmp_path / "three.png")
    assert not set(COLOURS[3:6]) & colours_in(tmp_path / "three.png")


def test_the_bars_of_a_second_drafter_are_fainter(tmp_path):
    one = {"A": {"chat": figures(2.0, [1.5, 2.75])}}
    acceptance(tmp_path / "one.png", one, title="A")
    acceptance(tmp_path / "two.png", one | {"B": {"chat": figures(1.5, [1.25, 1.75])}}, title="A against B")
    (faint,) = colours_in(tmp_path / "two.png", dots=20_000) - colours_in(tmp_path / "one.png", dots=12)
    strong = [int(COLOURS[0][at : at + 2], 16) for at in (1, 3, 5)]
    assert all(int(faint[at : at + 2], 16) > value for at, value in zip((1, 3, 5), strong, strict=True))


def test_an_interval_is_drawn_where_there_is_one(tmp_path):
    black_in_bar = []
    for name, interval in (("with", [1.0, 2.1]), ("without", None)):
        acceptance(tmp_path / name, {"A": {"chat": figures(2.0, interval)}}, title="A")
        dots = imread(tmp_path / name)[:, :, :3]
        right = dots[:, dots.shape[1] // 2 :]
        blue = np.flatnonzero((right[:, :, 2] > 0.65) & (right[:, :, 0] < 0.05))
        rows, columns = np.unravel_index(blue, right.shape[:2])
        bar = right[rows.min() : rows.max(), columns.min() : columns.max()]
        black_in_bar.append(int((bar < 0.05).all(axis=2).sum()))
    assert black_in_bar[0] > 100
    assert black_in_bar[1] == 0


def test_more_sets_than_colours_can_be_drawn(tmp_path):
    sets = {f"set {number}": figures(1.0 + number / 10, None) for number in range(len(COLOURS) + 2)}
    acceptance(tmp_path / "many.png", {"A": sets}, title="A")
    assert set(COLOURS) <= colours_in(tmp_path / "many.png")


def test_drawing_changes_nothing_for_others(tmp_path):
    before = dict(matplotlib.rcParams)
    histogram(tmp_path / "a.png", [1, 2], title="t", xlabel="x")
    assert dict(matplotlib.rcParams) == before


def a_run(steps: int) -> list[dict]:
    return [
        {
            "step": step,
            "loss": None if step == 3 else 9 - 0.1 * step,
            "tau": 1 + 0.01 * step,
            "hs_samples": 40,
            "hs_mix": [0.25, 0.5, 0.25],
        }
        for step in range(1, steps + 1)
    ]


@pytest.mark.parametrize("steps", [1, 2, 60])
def test_a_run_is_drawn_from_its_first_step_on_also_where_a_loss_is_missing(tmp_path, steps):
    measured = {"heldout": [{"step": 0, "loss": 9.5, "tau": 1.0}], "evaluation": [{"step": steps, "eval/tau": 1.5}]}
    training(tmp_path / "run.png", a_run(steps), **measured, edges=[64, 128], depth=90, title="run")
    height, width, _ = imread(tmp_path / "run.png").shape
    assert 500 <= height <= 800
    assert 2000 <= width <= 3600
    if steps == 60:
        assert {COLOURS[0], COLOURS[1], COLOURS[2]} <= colours_in(tmp_path / "run.png")


def test_a_run_without_any_real_decoding_is_drawn(tmp_path):
    training(
        tmp_path / "run.png", a_run(5), [], [{"step": 5, "eval/tau": None}], edges=[64, 128], depth=90, title="run"
    )
    assert (tmp_path / "run.png").stat().st_size > 10_000
