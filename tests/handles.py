"""What the public functions return, and what a function of the store is called with.

Tests name these types in annotations. They import them from here, so that a class which moves
within the package moves in one line of the tests.
"""

from trinity_buffer.pipeline.annotate.consumer import ConsumerReport
from trinity_buffer.pipeline.handle import Event
from trinity_buffer.pipeline.store import Experiment, Store
from trinity_buffer.pipeline.sync_stream import SyncTrainStream
from trinity_buffer.pipeline.train.microbatch import MicroBatch
from trinity_buffer.pipeline.train.step import StepMeasures, TrainStep
from trinity_buffer.pipeline.train.stream import TrainStream
from trinity_buffer.pipeline.verify.verify import VerifyReport
from trinity_buffer.store.connection import Database
from trinity_buffer.store.transaction import ReadSession, Session, Transaction

__all__ = [
    "ConsumerReport",
    "Database",
    "Event",
    "Experiment",
    "MicroBatch",
    "ReadSession",
    "Session",
    "StepMeasures",
    "Store",
    "SyncTrainStream",
    "TrainStep",
    "TrainStream",
    "Transaction",
    "VerifyReport",
]
