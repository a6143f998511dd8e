"""Numbers since an earlier moment: what only grows is counted from there."""

from dataclasses import astuple, fields

from sppo_hf.offload.engine import OffloadStats

AS_NOW = {
    "pinned_bytes",
    "host_bytes",
    "host_used_bytes",
    "live_handles",
    "host_peak_bytes",
    "fragmentation",
}


def test_what_only_grows_is_counted_from_the_earlier_moment() -> None:
    names = [field.name for field in fields(OffloadStats)]
    before = OffloadStats(**{name: number for number, name in enumerate(names)})
    now = OffloadStats(**{name: 100 + 3 * number for number, name in enumerate(names)})
    since = now.since(before)
    for number, name in enumerate(names):
        expected = 100 + 3 * number if name in AS_NOW else 100 + 2 * number
        assert getattr(since, name) == expected, name
    assert (since + before) == now
    assert not any(astuple(OffloadStats())), "nothing has moved yet"
