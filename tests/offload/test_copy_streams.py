"""Copies are ordered against compute, and waiting is timed; on the fake device and on the CPU."""

import contextlib

import pytest
import torch

from sppo_hf.offload.copy_streams import CudaRuntime, HostCopier, StreamCopier, wait_for_all
from tests.fakes.device import FakeDevice, FakeEvent, FakeStream, RaceError

SECONDS = 10.0


def _bytes(num_bytes: int = 64) -> torch.Tensor:
    return torch.arange(num_bytes, dtype=torch.uint8)


def _host(num_bytes: int = 64) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice(lambda stream, num_bytes: SECONDS)


def test_a_round_trip_is_ordered_without_the_host(device: FakeDevice) -> None:
    copier = StreamCopier(device)
    source, host = device.tensor(_bytes(), seconds=3.0), _host()
    out = copier.start_d2h(source, host)
    assert not out.ordered
    back, into = copier.start_h2d(host, out)
    into.wait()
    device.kernel(reads=[back])
    assert torch.equal(back, _bytes())
    assert device.now == 0.0
    # 3 s until the source is written, then one copy behind the other.
    assert device.compute.ready_at == 3.0 + 2 * SECONDS


def test_copies_overlap_with_compute(device: FakeDevice) -> None:
    copier = StreamCopier(device)
    source = device.tensor(_bytes())
    ticket = copier.start_d2h(source, _host())
    device.kernel(seconds=SECONDS)
    assert device.compute.ready_at == SECONDS
    ticket.wait()
    device.kernel()
    assert device.compute.ready_at == SECONDS


def test_a_source_may_be_freed_once_its_ticket_is_ordered_and_not_before(
    device: FakeDevice,
) -> None:
    copier = StreamCopier(device)
    source = device.tensor(_bytes())
    ticket = copier.start_d2h(source, _host())
    ticket.wait()
    assert ticket.ordered
    assert not ticket.done()
    del source
    device.look_for_freed()

    source = device.tensor(_bytes())
    ticket = copier.start_d2h(source, _host())
    device.advance(3 * SECONDS)
    assert ticket.done()
    del source
    device.look_for_freed()

    source = device.tensor(_bytes())
    copier.start_d2h(source, _host())
    del source
    with pytest.raises(RaceError, match="freed under a copy's read on lane 1"):
        device.look_for_freed()


def test_stall_seconds_are_what_compute_waited(device: FakeDevice) -> None:
    copier = StreamCopier(device)
    source = device.tensor(_bytes())
    ticket = copier.start_d2h(source, _host())
    device.kernel(seconds=4.0)
    ticket.wait()
    assert copier.stall_seconds() == 0.0  # not passed yet, and the host does not wait for it
    device.finish()
    assert copier.stall_seconds() == pytest.approx(SECONDS - 4.0)
    assert copier.stall_seconds() == pytest.approx(SECONDS - 4.0)


def test_waiting_for_a_copy_that_is_over_costs_nothing(device: FakeDevice) -> None:
    copier = StreamCopier(device)
    source = device.tensor(_bytes())
    ticket = copier.start_d2h(source, _host())
    device.finish()
    ticket.wait()
    device.finish()
    assert copier.stall_seconds() == 0.0


def test_finishing_blocks_the_host_until_the_copy_has_ended(device: FakeDevice) -> None:
    copier = StreamCopier(device)
    source = device.tensor(_bytes(), seconds=3.0)
    ticket = copier.start_d2h(source, _host())
    assert not ticket.done()
    ticket.finish()
    assert device.now == 3.0 + SECONDS
    assert device.host_waits == 1
    assert ticket.done()
    ticket.finish()
    assert device.host_waits == 1
    assert copier.stall_seconds() == 0.0, "compute did not wait"


def test_without_own_streams_everything_is_ordered_by_the_compute_stream(
    device: FakeDevice,
) -> None:
    copier = StreamCopier(device, own_streams=False)
    source, host = device.tensor(_bytes()), _host()
    out = copier.start_d2h(source, host)
    assert out.ordered
    assert not out.done()
    del source
    back, into = copier.start_h2d(host, out)
    assert into.ordered
    device.kernel(reads=[back])
    assert torch.equal(back, _bytes())
    assert device.compute.ready_at == 2 * SECONDS


def test_a_change_of_the_compute_stream_keeps_the_order(device: FakeDevice) -> None:
    copier = StreamCopier(device)
    source, host = device.tensor(_bytes(), seconds=1.0), _host()
    with device.use_stream(device.new_stream()):
        out = copier.start_d2h(source, host)
        back, into = copier.start_h2d(host, out)
        into.wait()
        device.kernel(reads=[back])  # raises RaceError where one of them did not wait
    assert torch.equal(back, _bytes())


@pytest.mark.parametrize("own_streams", [True, False])
def test_what_one_compute_stream_allocated_is_freed_while_another_is_current(
    device: FakeDevice, own_streams: bool
) -> None:
    copier = StreamCopier(device, own_streams=own_streams)
    source, host = device.tensor(_bytes()), _host()
    if own_streams:
        out = copier.start_d2h(source, host)
    back, into = copier.start_h2d(torch.ones(64, dtype=torch.uint8))
    with device.use_stream(device.new_stream()):
        if not own_streams:
            out = copier.start_d2h(source, host)
        wait_for_all([out, into])
        assert out.ordered
        assert into.ordered
        del source, back  # to the first stream, which may write there at once
        device.look_for_freed()  # raises RaceError where it did not wait


def test_a_wait_for_one_copy_orders_all_before_it_and_none_after(device: FakeDevice) -> None:
    copier = StreamCopier(device)
    hosts = [_host() for _ in range(4)]
    sources = [device.tensor(_bytes()) for _ in hosts]
    tickets = [copier.start_d2h(*pair) for pair in zip(sources, hosts, strict=True)]
    _, back = copier.start_h2d(hosts[0], tickets[0])
    tickets[2].wait()
    assert [ticket.ordered for ticket in tickets] == [True, True, True, False]
    assert not back.ordered, "the other lane is a queue of its own"
    assert not any(ticket.done() for ticket in tickets), "compute is told to wait, the host is not"
    tickets[1].wait()
    assert device.compute.waits == 1
    del sources[:3]
    device.look_for_freed()
    wait_for_all([*tickets, back])
    assert device.compute.waits == 3, "one for each lane"
    assert back.ordered
    device.finish()
    assert tickets[3].done()
    assert copier.stall_seconds() == pytest.approx(4 * SECONDS)


def test_a_copy_seen_done_implies_all_earlier_ones_of_its_stream(device: FakeDevice) -> None:
    copier = StreamCopier(device)
    hosts = [_host() for _ in range(3)]
    sources = [device.tensor(_bytes()) for _ in hosts]
    tickets = [copier.start_d2h(*pair) for pair in zip(sources, hosts, strict=True)]
    tickets[1].finish()
    assert device.now == 2 * SECONDS
    assert [ticket.done() for ticket in tickets] == [True, True, False]
    del sources[:2]
    device.look_for_freed()


@pytest.mark.parametrize("own_streams", [True, False])
def test_a_copy_that_another_stream_waited_for_is_ordered_for_the_new_one(
    device: FakeDevice, own_streams: bool
) -> None:
    copier = StreamCopier(device, own_streams=own_streams)
    back, into = copier.start_h2d(torch.ones(64, dtype=torch.uint8))
    into.wait()
    with device.use_stream(device.new_stream()):
        with pytest.raises(RaceError):
            device.kernel(reads=[back])
        into.wait()
        assert device.kernel(reads=[back]) is None  # now it raises nothing


def test_events_are_reused(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round trip makes one event for each of its two copies; all others are reused."""
    made: list[bool] = []

    def new_event(*, timed: bool) -> FakeEvent:
        made.append(timed)
        return FakeEvent(device)

    monkeypatch.setattr(device, "new_event", new_event)
    copier = StreamCopier(device)
    for _ in range(20):
        source, host = device.tensor(_bytes(), seconds=3.0), _host()
        back, into = copier.start_h2d(host, copier.start_d2h(source, host))
        into.wait()
        device.kernel(reads=[back])
        device.finish()
        device.host_clock.update(device.compute.clock)  # as if the host had waited for the step
    assert made.count(False) == 20 * 2 + 1
    assert made.count(True) == 2
    assert copier.stall_seconds() == 20 * 2 * SECONDS


def test_stalls_are_counted_as_they_pass(device: FakeDevice) -> None:
    """Otherwise the events of a whole step would live until `stall_seconds` is called."""
    copier = StreamCopier(device)
    for _ in range(100):
        back, into = copier.start_h2d(_host())
        into.wait()
        assert len(copier._open_stalls) <= 2
        del back
        device.advance(SECONDS)
    device.finish()
    assert copier.stall_seconds() == pytest.approx(100 * SECONDS)


class _NoWait(FakeStream):
    """A stream that leaves out its `skipped`-th wait."""

    skipped = -1
    calls = 0

    def wait_event(self, event: FakeEvent) -> None:
        self.calls += 1
        if self.calls != self.skipped:
            super().wait_event(event)


@pytest.mark.parametrize(
    ("lane", "skipped"),
    [
        pytest.param("d2h", 1, id="D2H does not wait for the kernel that writes its source"),
        pytest.param("h2d", 1, id="H2D does not wait for the former users of its destination"),
        pytest.param("h2d", 2, id="H2D does not wait for the D2H copy that fills its source"),
        pytest.param("compute", 1, id="compute does not wait for the H2D copy"),
    ],
)
def test_the_fake_device_detects_each_missing_wait(lane: str, skipped: int) -> None:
    device = FakeDevice(lambda stream, num_bytes: SECONDS)
    streams = {name: _NoWait(device, name) for name in ("compute", "d2h", "h2d")}
    streams[lane].skipped = skipped
    device.compute = device._current = streams["compute"]
    device._streams = [streams["compute"]]
    lanes = iter([streams["d2h"], streams["h2d"]])
    device.new_stream = lambda: next(lanes)  # type: ignore[method-assign]
    copier = StreamCopier(device)

    def round_trip() -> None:
        source, host = device.tensor(_bytes(), seconds=1.0), _host()
        out = copier.start_d2h(source, host)
        device.kernel(reads=[source], seconds=1.0)
        back, into = copier.start_h2d(host, out)
        into.wait()
        device.kernel(reads=[back])

    with pytest.raises(RaceError):
        round_trip()


def test_the_host_copier_copies_at_once_and_counts_its_time() -> None:
    copier = HostCopier()
    source, host = torch.arange(2**20, dtype=torch.float32).view(torch.uint8), _host(2**22)
    ticket = copier.start_d2h(source, host)
    assert ticket.done()
    assert ticket.ordered
    after_out = copier.stall_seconds()
    assert after_out > 0.0
    back, into = copier.start_h2d(host, ticket)
    into.wait()
    into.finish()
    assert torch.equal(back, source)
    assert back.data_ptr() != host.data_ptr()
    assert copier.stall_seconds() > after_out


@pytest.mark.gpu
@pytest.mark.parametrize("own_streams", [True, False])
@pytest.mark.parametrize("pin", [True, False])
def test_a_round_trip_on_cuda(own_streams: bool, pin: bool) -> None:
    copier = StreamCopier(CudaRuntime(torch.device("cuda")), own_streams=own_streams)
    host = torch.empty(2**24, dtype=torch.uint8, pin_memory=pin)
    for value in range(20):
        source = torch.full((2**24,), value, dtype=torch.uint8, device="cuda")
        out = copier.start_d2h(source, host)
        back, into = copier.start_h2d(host, out)
        into.wait()
        out.finish()
        assert out.done()
        assert bool((back == value).all())
    assert copier.stall_seconds() >= 0.0


def test_memory_is_unlocked_after_copies_and_compute_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A receive, in a stream of NCCL's, may wait for what this rank has not sent yet."""
    done: list[object] = []

    class OneStream:
        def __init__(self, name: object) -> None:
            self.name = name

        def synchronize(self) -> None:
            done.append(self.name)

    class Runtime:
        def cudaHostUnregister(self, address: int) -> int:
            done.append(address)
            return 0

    def whole_device() -> None:
        raise AssertionError("other streams are waited for")

    current = [OneStream("compute")]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: OneStream("copies"))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: object())
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", whole_device)
    runtime = CudaRuntime(torch.device("cuda", 1))
    StreamCopier(runtime)
    runtime.unlock_pages(4096)
    assert done == ["copies", "copies", "compute", 4096]
    current[0] = OneStream("another stream of compute")
    runtime.current_stream()
    current[0] = OneStream("of the thread that collects garbage")
    done.clear()
    runtime.unlock_pages(8192)
    assert done == ["copies", "copies", "another stream of compute", 8192]
