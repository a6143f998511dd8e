"""Every rank of a pipeline does what its program lists, copies included, in that order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sppo_hf.schedule.actions import COMPUTE_KINDS, Action
from sppo_hf.schedule.generate import MSP, Size, generate
from sppo_hf.schedule.lower import KVCopy, lower
from sppo_hf.schedule.validate import validate
from tests.integrations.launch import ROOT, run_ranks
from tests.sweeps import ALL, sample

pytestmark = pytest.mark.process

ROWS, CHUNKS = 2, 4


def _launch(runs: list[dict[str, Any]], ranks: int, folder: Path) -> dict[str, list[list[str]]]:
    """Return what each rank wrote, by run."""
    job = {"runs": runs, "pp_size": ranks, "out": str(folder)}
    run_ranks("tests.pipeline.action_ranks", job, ranks, folder / "ranks")
    return {
        one["name"]: [
            (folder / one["name"] / f"rank{rank}.actions").read_text().split()
            for rank in range(ranks)
        ]
        for one in runs
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_executed_is_planned_with_offload(ranks: int, tmp_path: Path) -> None:
    away = {"num_chunks": CHUNKS, "offload": "full"}
    names = ["gpipe", "seq1f1b", "zb_seq1f1b", "interleaved_seq1f1b"]
    runs: list[dict[str, Any]] = [
        {"name": name, "settings": {**away, "pp_schedule": name, "recompute": recompute}}
        for name, recompute in zip(names, ["none", "full", "none", "full"], strict=True)
    ]
    runs[-1]["settings"]["pp_virtual_stages"] = 2
    runs[1]["evaluate"] = True
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    shared = {**away, "pp_msp": "on", "recompute": "full"}
    runs.append({"name": MSP, "settings": shared, "overrides": heads})
    if not ALL:  # units that two ranks share go to a disk, below
        runs = runs[:2] if ranks == 2 else runs[2:]
    found = _launch(runs, ranks, tmp_path)
    for one in runs:
        name, virtual = one["name"], one["settings"].get("pp_virtual_stages", 1)
        compute = generate(name, Size(ranks, ROWS, CHUNKS, virtual))
        planned = lower(compute, offloaded=lambda stage, unit: True)
        assert found[name] == planned.texts(), name
        kinds = [Action.parse(text).kind for rank in found[name] for text in rank]
        assert kinds.count("D") == kinds.count("H") > ranks * CHUNKS
        assert (kinds.count("SEND_KV") == kinds.count("RECV_DKV") > 0) == (name == MSP)
        for rank in range(ranks):
            text = (tmp_path / name / f"rank{rank}.trace.json").read_text()
            events = json.loads(text)["traceEvents"]
            spans = [event["name"] for event in events if event["ph"] == "X"]
            assert sorted(spans) == sorted(found[name][rank])
            assert {event["pid"] for event in events} == {rank}


@pytest.mark.slow
def test_five_ranks_that_share_units_come_to_their_end(tmp_path: Path) -> None:
    """The fewest of whom one could wait for sums behind a unit that waits for it."""
    sizes = {"num_hidden_layers": 5, "num_attention_heads": 10, "num_key_value_heads": 10}
    settings = {"num_chunks": 5, "pp_msp": "on", "offload": "none", "recompute": "full"}
    run = {"name": MSP, "settings": settings, "overrides": {**sizes, "hidden_size": 80}, "rows": 1}
    found = _launch([run], 5, tmp_path)
    assert found[MSP] == lower(generate(MSP, Size(5, 1, 5))).texts()


def test_keys_and_values_and_a_disk_are_in_the_program(tmp_path: Path) -> None:
    """Keys and values on the host beside every unit; activations, and both, behind the host."""
    keys = {"num_chunks": CHUNKS, "offload": "none", "offload_kv": "full"}
    disk = {"num_chunks": CHUNKS, "offload": "full", "offload_dir": str(tmp_path / "disk")}
    both = {**disk, "offload_kv": "full", "recompute": "full", "pp_schedule": "zb_seq1f1b"}
    runs: list[dict[str, Any]] = [
        {"name": "keys", "settings": keys, "evaluate": True},
        {"name": "disk", "settings": disk},
        {"name": "both", "settings": both},
        {"name": "shared", "settings": {**both, "pp_schedule": "auto", "pp_msp": "on"}},
    ]
    found = _launch(runs, 2, tmp_path)

    def kv_copies(*kinds: tuple[str, int]) -> set[KVCopy]:
        # The first chunk has nothing before it.
        return {
            (kind, stage, chunk, part)  # type: ignore[misc]
            for kind, part in kinds
            for stage in range(2)
            for chunk in range(CHUNKS)
            if chunk or (kind, part) not in {("K", 0), ("L", 1), ("O", 1), ("S", 2)}
        }

    on_host = kv_copies(("K", 0), ("O", 0), ("K", 1), ("O", 1))
    on_disk = on_host | kv_copies(("L", 1), ("S", 1), ("L", 2), ("S", 2))
    size = Size(2, ROWS, CHUNKS)
    every = lambda stage, unit: True  # noqa: E731
    planned = {
        "keys": lower(generate("seq1f1b", size), kv_copies=on_host),
        "disk": lower(generate("seq1f1b", size), offloaded=every, stored=every),
        "both": lower(
            generate("zb_seq1f1b", size), offloaded=every, stored=every, kv_copies=on_disk
        ),
        # Each rank brings and sends the heads that it has in a shared unit.
        "shared": lower(generate(MSP, size), offloaded=every, stored=every, kv_copies=on_disk),
    }
    for name, schedule in planned.items():
        validate(schedule)
        assert found[name] == schedule.texts(), name
    assert "0K0#3" not in found["shared"][1]
    assert {"1K3#1", "1O3#1", "1L3#2"} <= {*found["shared"][0]}
    assert {"1K3#4", "1O3#4", "1L3#5"} <= {*found["shared"][1]}
    for name, written in (("keys", False), ("disk", True), ("both", True), ("shared", True)):
        for rank in range(2):
            events = json.loads((tmp_path / name / f"events{rank}.json").read_text())
            assert (events["written"][0] > 0) is written, name
            times = json.loads((tmp_path / name / f"rank{rank}.trace.json").read_text())
            rows = (e["args"]["name"] for e in times["traceEvents"] if e["name"] == "thread_name")
            copies = {row for row in rows if row.endswith((" write", " read"))}
            assert copies == ({"disk write", "disk read"} if written else set()), name
    # A frame is read a unit before its copy back, and never before it is written.
    (rank, _) = found["disk"]
    assert rank.index("0F0") < rank.index("0D0") < rank.index("0S0") < rank.index("0L0")
    between = rank[rank.index("0L0") : rank.index("0H0")]
    assert sum(Action.parse(text).kind in COMPUTE_KINDS for text in between) == 1


@pytest.mark.parametrize("ranks", sample([3, 2], 2))
def test_keys_and_values_of_shared_units_are_as_many_as_planned(ranks: int, tmp_path: Path) -> None:
    """Counted in every store of every run, and on the device on their way there or back."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}
    budgets = {"device_memory": "1GiB", "host_memory": "1GiB"}
    settings = {"pp_msp": "on", "recompute": "full", "chunk_lengths": [7, 2, 6, 3, 5], **budgets}
    runs: list[dict[str, Any]] = [
        {
            **{"name": tier, "overrides": heads, "rows": 2, "held": True},
            "settings": {**settings, "offload_kv": kv},
        }
        for tier, kv in (("device", "none"), ("host", "full"))
    ]
    _launch(runs, ranks, tmp_path)
    for one in runs:
        for rank in range(ranks):
            events = json.loads((tmp_path / one["name"] / f"events{rank}.json").read_text())
            assert len(events["measured"]) == len(events["expected"]) > 20
            for measured, expected in zip(events["measured"], events["expected"], strict=True):
                assert measured == expected, (one["name"], rank)
            # Where keys wait on the host sums do, and the last rank helps with first units alone.
            (_, held), *_ = events["measured"]
            most = {key: max(held[key] for _, held in events["measured"]) for key in held}
            none = {"device dkv"} if one["name"] == "host" else set[str]()
            none |= {"device kv"} if none and rank == ranks - 1 else set()
            assert {key for key, size in most.items() if not size} == none, (one["name"], rank)
            # The plan of the rank's own stage leaves room for that, and for what is being sent.
            for tier, (slices, own, left) in events["left"].items():
                held = [h[f"{tier} kv"] + h[f"{tier} dkv"] for _, h in events["measured"]]
                assert max(held) <= slices + own <= 2.5 * max(max(held), own), (one["name"], rank)
                assert slices <= left
            assert rank or events["left"]["device"][0] > 0


def _slow_profile(path: Path) -> str:
    """A profile on which a tiny model's products take longer than on any busy processor."""
    profile = json.loads((ROOT / "sppo_hf/planning/profiles/h100-80gb.json").read_text())
    for name in [name for name in profile if name.endswith("_flops")]:
        profile[name] = {
            dtype: {tokens: 1e-6 * flops for tokens, flops in curve.items()}
            for dtype, curve in profile[name].items()
        }
    path.write_text(json.dumps(profile))
    return str(path)


def test_what_is_open_is_decided_once_for_all_ranks(tmp_path: Path) -> None:
    """With known speeds the step of all ranks is predicted, measured, and predicted anew.

    One long row is the shared units' case; where other rows fill the idle time, it is not.
    """
    run = {"name": "open", "settings": {"hardware": "h100"}, "rows": 4, "steps": 3}
    slow = _slow_profile(tmp_path / "slow.json")
    long = {"hardware": slow, "num_chunks": CHUNKS}
    sizes = {"rows": 1, "tokens": 256, "steps": 3}
    alone = {"name": "long", "settings": long, **sizes}
    several = {"name": "several", "settings": {**long, "hardware": "h100"}, "rows": 4}
    without = {"name": "no speeds", "settings": {}, "rows": 2}
    found = _launch([run, alone, several, without], 2, tmp_path)
    for name, rows in (("open", 4), ("long", 1)):
        events = [json.loads((tmp_path / name / f"events{r}.json").read_text()) for r in range(2)]
        first = events[0]["plans"][0]
        assert "simulated" in first["reason"]
        assert (first["ranks"], first["micro_batches"]) == (2, rows)
        text = " ".join(first["text"].split())
        assert f"{first['schedule']} over 2 ranks" in text
        shares = [Action.parse(action).part for rank in found[name] for action in rank]
        if name == "open":
            assert first["schedule"] != MSP
            assert f"all stages and {rows} micro-batches" in text
        else:
            assert first["schedule"] == MSP
            assert "(seq1f1b " in first["reason"]
            assert "the fastest of 3 simulated (seq1f1b" in text
        assert any(share is not None for share in shares) == (name == "long")
        for one in events:
            assert all(one["plans"][0][k] == first[k] for k in first if k not in ("name", "text"))
            seconds = one["planned"]
            assert seconds == events[0]["planned"]
            assert seconds[0] == seconds[1] == first["step_seconds"]
            # A processor is slower than the one profile, and faster than the other.
            assert seconds[2] == one["plans"][-1]["step_seconds"]
            faster, slower = sorted((seconds[0], seconds[2]))
            assert slower > 1.5 * faster
            (correction,) = one["corrections"]
            assert correction["after"] == pytest.approx(correction["measured"], rel=0.5)
    chunks = 1 + max(Action.parse(text).unit for text in found["open"][0]) // 4
    assert len(found["open"][0]) > 4 * chunks
    (apart, *_) = json.loads((tmp_path / "several" / "events0.json").read_text())["plans"]
    assert apart["schedule"] != MSP
    assert f", {MSP} 0." in apart["reason"]
    bare = [json.loads((tmp_path / "no speeds" / f"events{r}.json").read_text()) for r in range(2)]
    for one in bare:
        assert one["plans"][0]["schedule"] == "seq1f1b"
        assert "no speeds are known" in one["plans"][0]["reason"]
        assert one["planned"] == [None]
