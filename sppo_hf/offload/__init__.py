"""Offloads tensors to host memory and tiers behind it; knows no schedule and no model.

The files, lowest first: `slabs` sub-allocates slabs; `host_memory` makes them of memory,
page-locked if asked for. `copy_streams` starts copies and orders the compute stream behind them.
`store` keeps the bytes of a tier behind the host and runs its transfers in threads; `disk` is such
a tier, with its files in `disk_files`. `storage` has the state of an offloaded storage and the
handles that stand for tensors. `tiers` has the host's side of all tiers. `engine` is what others
call. `weights` keeps parameters on the host, in memory of their own, with copies of its own.
`layer_offload` hooks the engine to what autograd saves, and prefetches in the planned order.

[Note: offload lifetimes]

Three queues run at once: the compute stream, the D2H stream and the H2D stream. The host enqueues
work far ahead of the device and never waits for any of them. With tiers behind the host, threads
write and read host bytes as well. This is safe because of seven rules; each names the one place
that keeps it, and `tests/fakes` checks all of them with vector clocks.

1. *A source is complete before it is read.* `StreamCopier.start_d2h` makes the D2H stream wait for
   an event recorded on the compute stream at that moment, so it reads what the layer wrote.
2. *A source outlives its copy.* The caching allocator reuses a freed block on the compute stream at
   once, so the source stays referenced (`OffloadedStorage.source`) until its ticket is *ordered*:
   either the host has seen the copy done (polled, `Ticket.done`), or the compute stream has been
   made to wait for it (`Ticket.wait`). In both cases whatever the compute stream writes into that
   block later comes after the copy. No `record_stream` is needed, so memory is freed at a point
   that the program fixes and not at one that timing decides. A copy stream is first in, first out:
   who is ordered behind a copy, or has seen it done, is so for all copies before it in its stream.
   So one wait, for the last of them, covers many; nobody waits for a later copy than the one that
   is needed.
3. *Few sources are pending at a time.* The host may enqueue a whole forward before the first copy
   ends; polling alone would then keep every source alive. So at the end of each layer the compute
   stream waits for the oldest copies until at most `max_pending_d2h_bytes` are pending, and those
   sources are freed (`PendingCopies.close_group`). In backward the prefetch order prefetches what
   the step's program lists with the layer that is entered, and before bytes come back, the compute
   stream waits for copies whose tensors nobody wants any more. So the device holds the activations
   in use and those that were planned to be ahead of their use, no more, however far ahead the host
   is. A slow bus shows as stall seconds. Which copies compute waits for depends on sizes alone.
4. *A destination is free before it is written.* `StreamCopier.start_h2d` allocates it on the
   compute stream and makes the H2D stream wait for an event recorded there after the allocation, so
   earlier users of the block are through. It also waits for the D2H copy that filled the host
   bytes. `OffloadEngine.wait_for` makes the compute stream wait for the H2D copy before anyone
   sees the tensor, hence its block can be freed like any other afterwards. `evict` frees it while
   the host bytes stay, and makes the compute stream wait first if nobody did.
5. *Host bytes are reused only after their last copy.* A region returns to the pool when all its
   tickets are ordered. A later D2H copy into it waits for the compute stream (rule 1), which stands
   behind those copies, or is enqueued by a host that saw them end. What is dropped in between (a
   graph freed without backward, an unused prefetch) waits to be freed until then; if the pool would
   have to grow meanwhile, the compute stream is made to wait for it, never the host.
6. *Owners are counted by Python, not by us.* Autograd's graph holds the handles, handles share one
   `StorageRef` per storage, and everything else has weak references. When the last handle goes, by
   release, by backward, by an exception or by a dropped graph, a finalizer appends the storage to a
   deque. It does nothing more, because a garbage collection can start inside any statement, the
   pool's own included; the next call of the engine, which holds the lock, empties the deque.
7. *Threads know no streams.* What orders the compute stream says nothing to a thread of a store.
   So bytes are handed to a write when the host has *seen* their copy end (`Staging`), a read fills
   only staging regions, and these are reused when the host has seen the end of every copy and
   transfer that touches them (`ReclaimQueue`); a copy that the host enqueues after that needs no
   further order. Each tier behind the host has a staging slab of its own, so the weaker rule 5
   holds for all other host bytes. Here, and only here, the host waits: for a read that is needed
   now, and for free staging memory if a tier is slower than what goes to it. Why it never waits
   for ever: [Note: staging never deadlocks].

The host's side has one lock, held by every public method of the engine, because autograd unpacks
in its own thread on CUDA. Work of one engine is assumed to be on one compute stream; if the current
stream changes, the new one first waits for the old one, which from then on waits for copies like
the new one, since what it allocated is freed to it; so the rules hold for both.
"""
