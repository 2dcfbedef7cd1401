"""Every error that Trinity Buffer raises on purpose.

TrinityBufferError
├── InvalidArgumentError (ValueError)
│   ├── InvalidExperienceError          an experience was refused at the door
│   └── UnknownNameError (LookupError)  a strategy, loss, algorithm ... that is not registered
├── ConflictError (ValueError)
│   ├── ConflictingExperienceError      one EID, two contents
│   ├── ConflictingPlanError            one batch, two plans
│   │   └── BatchTakenError             another actor planned the same batch
│   ├── ConflictingSealError            one batch, two counts
│   └── ConflictingStrategyError        one annotation set, two configurations
├── TrainingError (RuntimeError)        a run that cannot go on: more of the same would not mend it
│   ├── NonFiniteError                  a loss, gradient or weight that is NaN or infinite
│   └── RunStalledError                 nothing has moved in a run for long
├── InferenceServerError (ConnectionError)  no answer of a server, or one that cannot be trained
│   └── RefusedRequestError             an answer that would be the same if it was asked again
├── CodecError (ValueError)             bytes that are not ours, or damaged
│   └── CodecVersionError               bytes of a newer version
└── StoreError (RuntimeError)
    ├── UnknownStoreError               not there, or not ours
    ├── UnknownExperimentError (LookupError)
    ├── SchemaOutdatedError             an older store: migrate it
    ├── SchemaTooNewError               a newer store: upgrade the package
    ├── ReadOnlyStoreError
    ├── UnsafeStoreError                a file system or SQLite library that would lose data
    ├── StoreUseError                   used after its end, or by another process or event loop
    ├── StoreReplacedError              its file was removed or replaced under us
    ├── StoreUnavailableError           its server is not there, and may be again soon
    ├── StoreBusyError (TimeoutError)
    ├── DamagedSegmentError             a checksum that does not hold
    ├── ArchivedSegmentError            tensors that retention has taken out of the store
    ├── CursorConflictError             another process decided these experiences first
    ├── LeaseHeldError                  another trainer holds this consumer
    ├── LeaseLostError                  a newer token fences this trainer
    └── CheckpointError                 a checkpoint that is missing or does not match its digest

To add one: put it in the picture, inherit the builtin that a caller would have guessed, let the
message name the thing, the place and the remedy, and keep it picklable (one positional argument:
the message).
"""


class TrinityBufferError(Exception):
    """Base of every error of this package."""


class InvalidArgumentError(TrinityBufferError, ValueError):
    """An argument that cannot be right; the message names it and what is accepted."""


class InvalidExperienceError(InvalidArgumentError):
    """An experience was refused at the door; nothing of that call was written.

    Attributes:
        field: what is wrong with it, by its name; "" where that is not known.
    """

    field: str = ""


class UnknownNameError(InvalidArgumentError, LookupError):
    """A name that is not registered; the message says what is, and what was probably meant."""

    # LookupError would not change it, KeyError-like quoting must not creep in
    __str__ = Exception.__str__


class ConflictError(TrinityBufferError, ValueError):
    """What is asked for contradicts what is recorded."""


class ConflictingExperienceError(ConflictError):
    """An EID is already stored with other content.

    Attributes:
        uid: the EID as a text; "" where that is not known.
    """

    uid: str = ""


class ConflictingPlanError(ConflictError):
    """A batch is already planned with other tasks, or by another actor."""


class BatchTakenError(ConflictingPlanError):
    """Another actor has planned the same batch; it generates it."""


class ConflictingSealError(ConflictError):
    """A batch holds, or was sealed with, another number of experiences."""


class ConflictingStrategyError(ConflictError):
    """An annotation set of this name has another configuration; choose another ``name=``."""


class TrainingError(TrinityBufferError, RuntimeError):
    """A run cannot go on, and a restart would not mend it; the message says what to look at."""


class NonFiniteError(TrainingError):
    """A loss, a gradient or weights that are NaN or infinite; none of it was kept."""


class RunStalledError(TrainingError):
    """A run has not moved for ``stalled_after_s``: no process brings what it waits for."""


class InferenceServerError(TrinityBufferError, ConnectionError):
    """An inference server gave no answer, or one that cannot be used; trying again may mend it."""

    __str__ = Exception.__str__


class RefusedRequestError(InferenceServerError):
    """An inference server refused a request, with a status 4xx; the same again will be refused.

    Attributes:
        status: the server's answer.
    """

    status: int = 400


class CodecError(TrinityBufferError, ValueError):
    """Bytes that this package did not write, or that were damaged since."""


class CodecVersionError(CodecError):
    """Bytes written by a newer version of this package."""


class StoreError(TrinityBufferError, RuntimeError):
    """The store refuses, or cannot do, what was asked."""


class UnknownStoreError(StoreError):
    """There is no store at this URL, or the database there is not one of ours."""


class UnknownExperimentError(StoreError, LookupError):
    """The store holds no experiment of this name."""


class SchemaOutdatedError(StoreError):
    """The store was written by an older version: run ``trinity-buffer migrate``."""


class SchemaTooNewError(StoreError):
    """The store was written by a newer version: upgrade trinity-buffer."""


class ReadOnlyStoreError(StoreError):
    """The store was opened read-only, or its file cannot be written."""


class UnsafeStoreError(StoreError):
    """The file system or the SQLite library would lose data here."""


class StoreUseError(StoreError):
    """The store is closed, or was opened by another process or in another event loop."""


class StoreReplacedError(StoreError):
    """The database's file was removed or replaced while it was open; nothing is acknowledged.

    Of a server: it lacks events that this process has seen, as after a failover that lost them.
    """


class StoreUnavailableError(StoreError):
    """The server of the store is not there, or ended the connection; it may be there again soon.

    Reads and commits were tried again for ``reconnect_s`` before this is raised.
    """


class StoreBusyError(StoreError, TimeoutError):
    """Another process held the database for longer than the busy timeout."""


class DamagedSegmentError(StoreError):
    """A segment's checksum does not hold."""


class ArchivedSegmentError(StoreError):
    """``compact`` deleted the tensors, or archived them to a file that cannot be read now."""


class CursorConflictError(StoreError):
    """Another process with the same consumer name decided these experiences first."""


class LeaseHeldError(StoreError):
    """Another live process holds the lease of this consumer."""


class LeaseLostError(StoreError):
    """A newer holder took the lease; what this process trained since is not committed."""


class CheckpointError(StoreError):
    """A checkpoint is missing, or is not the one that was committed."""
