"""The micro-benchmark of attention backends as it is started from a shell, with tiny sizes."""

import argparse
import json

import pytest

from recipes.benchmarks.attention_kernels import heads_of, main
from sppo_hf.profiling.calibrate import Heads


def test_table_json_and_picture(tmp_path, capsys):
    numbers, figure = tmp_path / "kernels.json", tmp_path / "kernels.png"
    sizes = ["--chunks", "16", "32", "--prefixes", "0", "16", "--heads", "4/2/8"]
    files = ["--json", str(numbers), "--figure", str(figure)]
    assert main(["--device", "cpu", "--most-seconds", "5", *sizes, *files]) == 0
    said = capsys.readouterr().out
    assert "float32, 4/2 heads of 8: TFLOPS forward / backward" in said
    assert '"auto" takes cpu_flash' in said
    found = json.loads(numbers.read_text())
    (group,) = found["groups"]
    # Two chunks, two prefixes, the fused kernel and the reference.
    assert len(group["points"]) == 8
    assert {point["backend"] for point in group["points"]} == {"cpu_flash", "reference"}
    assert all(point["flops_per_second"] > 0 for point in group["points"])
    assert group["heads"] == {"query": 4, "key_value": 2, "size": 8}
    assert "flash_attention_3" in group["left_out"]
    assert found["versions"]["torch"]
    assert str(tmp_path) not in numbers.read_text(), "no paths of the machine in what is committed"
    assert figure.stat().st_size > 1000


def test_heads():
    assert heads_of("32/8/128") == Heads(32, 8, 128)
    with pytest.raises(argparse.ArgumentTypeError, match="3 query heads over 2"):
        heads_of("3/2/8")
