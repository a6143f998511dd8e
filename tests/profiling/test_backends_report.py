"""The table and the picture of backends beside each other."""

import io

import pytest
from rich.console import Console

from sppo_hf.errors import ConfigError
from sppo_hf.profiling.backends_report import backends_table, best_of, by_size, draw_backends
from sppo_hf.profiling.measure_backends import Group, LayerHeads, Point


def point(backend, prefix, forward, backward, chunk=4096):
    together = 3.5 / (1 / forward + 2.5 / backward)
    rates = (forward * 1e12, backward * 1e12, together * 1e12)
    return Point(backend, chunk, prefix, 1e-3, 2.5e-3, *rates)


def group(*points):
    return Group(
        dtype="bfloat16",
        heads=LayerHeads(32, 8, 128),
        window_tokens=None,
        left_out={"flash_attention_3": "is not installed"},
        auto="cudnn: 612 TFLOPS",
        points=list(points),
    )


POINTS = (
    point("aten_flash", 0, 400.0, 300.0),
    point("cudnn", 0, 300.0, 250.0),
    point("aten_flash", 32768, 450.0, 400.0),
    point("cudnn", 32768, 700.0, 600.0),
    Point("reference", 4096, 32768, reason="would take about 12.0 s"),
)


def written(group):
    sink = io.StringIO()
    Console(file=sink, width=140, color_system=None).print(backends_table(group))
    return sink.getvalue()


def test_the_table_has_every_size_and_the_gain_over_the_common_kernel():
    text = written(group(*POINTS))
    first, second = (line for line in text.splitlines() if "│" in line)
    cells = [cell.strip() for cell in first.strip("│").split("│")]
    assert cells == ["4K", "0", "400 / 300", "300 / 250", "", "1.00"]
    cells = [cell.strip() for cell in second.strip("│").split("│")]
    assert cells == ["4K", "32K", "450 / 400", "700 / 600", "-", "1.51"]
    assert '"auto" takes cudnn: 612 TFLOPS' in text
    assert "flash_attention_3 is not installed" in text
    assert "reference: would take about 12.0 s" in text


def test_without_the_common_kernel_there_is_no_gain():
    assert "best /" not in written(group(POINTS[1]))


def test_the_best_is_by_forward_and_backward_together():
    row = by_size(group(*POINTS))[4096, 0]
    assert best_of(row) is POINTS[0]
    assert best_of({"reference": POINTS[-1]}) is None


def test_the_picture_has_a_line_for_each_backend(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k))
    )
    path = tmp_path / "kernels.png"
    more = point("cudnn", 32768, 710.0, 650.0, chunk=8192)
    draw_backends([group(*POINTS, more), group()], path, title="NVIDIA H100")
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = drawn
    panels = figure.axes
    assert [axes.get_title().splitlines()[1] for axes in panels] == ["prefix 0", "prefix 32K"]
    lines = {line.get_label(): list(line.get_xdata()) for line in panels[1].get_lines()}
    assert lines == {"aten_flash": [4096], "cudnn": [4096, 8192]}
    assert [label.get_text() for label in panels[1].get_xticklabels()] == ["4K", "8K"]
    low, high = panels[0].get_ylim()
    assert low == 0
    assert high > 600, "the panels of a row share an axis that holds all points"


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ConfigError, match="Nothing was measured"):
        draw_backends([group(POINTS[-1])], tmp_path / "kernels.png", title="")
