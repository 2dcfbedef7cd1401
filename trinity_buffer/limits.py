"""How much is read, written, compared or kept at once, in one place.

None of these numbers changes a result: they trade memory and the length of transactions for speed.
They are read when they are needed, never copied, so that another size reaches every loop.
"""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1024 * 1024


@dataclass(slots=True)
class Sizes:
    """The size of every page, block, span and batch.

    Attributes:
        events_per_page: of the log, of one read transaction.
        experiences_per_page: that are decoded together; a scoring makes an event of them.
        rows_per_page: rows of projections, without tensors, of one query.
        groups_per_page: that are looked at together where their order is not that of the log.
        rows_looked_up: up to so many rows of a batch that is read are looked up by their addresses;
            for a larger batch all rows are walked.
        waiting_rows_per_page: of what a strategy has seen and not decided.
        tail_events: that `rebuild` and `verify` may fold inside a transaction: some milliseconds.
        rows_per_transaction: a group of writes stops growing here, so that no transaction holds
            the database for long.
        rows_per_event: a larger write becomes several events of one transaction, so that one row
            is read by decoding no more.
        rows_per_trip: up to here a group is encoded where it is committed, which saves a change of
            threads; this process's other writers wait for the few milliseconds that it takes.
        rows_prepared_ahead: from which on a group is encoded beside the commit of the one before;
            of fewer, to take turns with the interpreter's lock costs more than that saves.
        rows_per_statement: of an insert on SQLite: each statement releases the interpreter's lock,
            and to get it back from a thread that computes takes longer than the insert.
        rows_to_copy: from which on PostgreSQL's COPY is quicker than its prepared INSERT.
        bytes_per_part: of a segment: what one row of the table holds.
        experiences_per_commit: units that are ready together share a commit of a strategy.
        experiences_per_live_commit: the same where it follows and is not behind: what is committed
            can be trained while the rest is decided.
        experiences_per_load: units whose tokens or pixels are loaded together for a strategy.
        bytes_read_at_once: of a long blob, on SQLite, which would make a copy of a whole one first.
        segments_per_load: segments of one read transaction: some 32 MB, well below a second.
        rows_kept: rows whose events a stream keeps decoded, beside those in use: some 10 MB.
        bytes_kept: segments that a stream keeps because rows of theirs were not asked for yet,
            beside those in use.
        bytes_made_ahead: columns of a step that are made before the trainer asks for it; of larger
            ones each is made when it is first read, which takes less than half the memory
            and some milliseconds of the trainer's time.
        pieces_kept: memory of steps: one in the trainer's hands, one ready, one being filled, one
            to spare.
        segments_per_audit, bytes_per_audit: segments that `verify` reads at once.
        rows_per_span: rows of a projection that are compared at once.
        rows_per_file: rows that `compact` looks at together; their segments go into one file.
        bytes_per_file: of segments in such a file, which is in memory as a whole.
        segments_per_page: that `compact` and `restore` ask for at once.
        bytes_per_row_group: of such a file; a reader of a few segments reads only their groups.
        wal_pages_per_checkpoint: pages of SQLite's log that are worth a checkpoint: 32 MB, an
            eighth of the writers' own limit.
        wal_pages_limit: at which a writer makes the checkpoint itself, where the process never
            gets to one beside it. Read when a store is opened.
        bytes_per_hash: of a checkpoint file, read and hashed at once; each time the thread waits
            for the interpreter's lock, which may take 5 ms beside a trainer.
    """

    events_per_page: int = 256
    experiences_per_page: int = 512
    rows_per_page: int = 1024
    groups_per_page: int = 256
    rows_looked_up: int = 1 << 20
    waiting_rows_per_page: int = 4096
    tail_events: int = 64
    rows_per_transaction: int = 4096
    rows_per_event: int = 1024
    rows_per_trip: int = 256
    rows_prepared_ahead: int = 512
    rows_per_statement: int = 64
    rows_to_copy: int = 8
    bytes_per_part: int = 64 * _MIB
    experiences_per_commit: int = 2048
    experiences_per_live_commit: int = 512
    experiences_per_load: int = 256
    bytes_read_at_once: int = _MIB
    segments_per_load: int = 32
    rows_kept: int = 32_768
    bytes_kept: int = 16 * _MIB
    bytes_made_ahead: int = 32 * _MIB
    pieces_kept: int = 4
    segments_per_audit: int = 64
    bytes_per_audit: int = 32 * _MIB
    rows_per_span: int = 4096
    rows_per_file: int = 16_384
    bytes_per_file: int = 64 * _MIB
    segments_per_page: int = 4096
    bytes_per_row_group: int = 16 * _MIB
    wal_pages_per_checkpoint: int = 2_048
    wal_pages_limit: int = 16_384
    bytes_per_hash: int = 16 * _MIB


sizes = Sizes()
"""The sizes that hold now. Read them when they are needed: tests let others hold for a while."""
