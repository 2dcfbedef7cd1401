"""Roles of PostgreSQL that have a schema of their own: they share one store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres import PostgresServer
from tests.sample_run import rollout
from trinity_buffer import open_store
from trinity_buffer.errors import UnknownStoreError

DATABASE = "of_two_roles"


@pytest.fixture
def urls(postgres_server: PostgresServer) -> Iterator[tuple[str, str]]:
    """URLs of one empty database, for its owner and for a role with a schema of its own."""
    url = postgres_server.create_database(DATABASE)
    postgres_server.execute("CREATE ROLE alice SUPERUSER LOGIN")
    postgres_server.execute("CREATE SCHEMA AUTHORIZATION alice", database=DATABASE)
    yield url, url.replace("postgres@", "alice@")
    postgres_server.execute(f'DROP DATABASE "{DATABASE}" WITH (FORCE)')
    postgres_server.execute("DROP ROLE alice")


async def written(url: str, task: int) -> list[str]:
    """Write a rollout, and return the uids of all that the store holds."""
    async with open_store(url) as store:
        experiment = await store.experiment("run", config={})
        await experiment.writer("w").write([rollout("b", task, 0, 1.0)])
        return [one.eid.uid async for one in experiment.read()]


async def test_a_role_does_not_make_a_second_store_beside_one_that_it_cannot_see(
    urls: tuple[str, str], postgres_server: PostgresServer
) -> None:
    owner, alice = urls
    assert len(await written(alice, 0)) == 1  # in her own schema
    told = (
        r"a store in the schema 'alice', not on the search path of the role 'postgres': ALTER ROLE"
    )
    for read_only in (True, False):
        with pytest.raises(UnknownStoreError, match=told):
            async with open_store(owner, read_only=read_only):
                pass
    search_path = f"ALTER ROLE postgres IN DATABASE {DATABASE} SET search_path = "
    postgres_server.execute(f"{search_path} alice")
    assert len(await written(owner, 1)) == 2
    postgres_server.execute(f"{search_path} public")
    assert len(await written(owner, 2)) == 1  # a second one, as was asked for


async def test_a_role_with_a_schema_of_its_own_uses_the_store_that_is_there(
    urls: tuple[str, str],
) -> None:
    owner, alice = urls
    assert len(await written(owner, 0)) == 1
    assert len(await written(alice, 1)) == 2
