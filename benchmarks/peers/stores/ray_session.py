"""A Ray of this machine for one measurement, for the stores that live in its actors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import ray

NAMESPACE = "peers"


@contextmanager
def started() -> Iterator[str]:
    """Start Ray; yield its address."""
    logging.disable(logging.WARNING)
    try:
        context = ray.init(
            namespace=NAMESPACE,
            num_cpus=8,
            object_store_memory=1 << 30,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
        yield context.address_info["address"]
    finally:
        ray.shutdown()


def join(address: str) -> None:
    """Connect this process to it."""
    logging.disable(logging.WARNING)
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
