"""Commands about inference servers: bring them new weights."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Annotated, Any

import anyio
import typer

from trinity_buffer.cli.options import (
    ConfigOption,
    ExperimentOption,
    StoreOption,
    chosen_experiment,
    chosen_store,
)
from trinity_buffer.cli.run_file import experiment_in
from trinity_buffer.errors import InvalidArgumentError

MODES = ("wait", "keep", "abort")
DIALECTS = ("vllm", "sglang")


def sync_weights(
    server: Annotated[
        list[str] | None,
        typer.Option("--server", help="URL of a server; again for each. By default the run's."),
    ] = None,
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    config: ConfigOption = None,
    dialect: Annotated[str, typer.Option(help="vllm, or sglang.")] = "vllm",
    mode: Annotated[
        str, typer.Option(help="Requests under way: wait for them, keep them, or abort them.")
    ] = "wait",
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until the experiment is finished.")
    ] = False,
) -> None:
    """Bring the newest published weights to inference servers: pause, load, resume.

    A server must see the checkpoints at the same path, and offer its control endpoints (vLLM:
    VLLM_SERVER_DEV_MODE=1).

    Example: trinity-buffer sync-weights --server http://127.0.0.1:8000/v1 --follow
    """
    for option, said, known in (("--mode", mode, MODES), ("--dialect", dialect, DIALECTS)):
        if said not in known:
            raise InvalidArgumentError(f"{option} {said}: there are {', '.join(known)}")
    url = chosen_store(store, config)
    named = experiment or (None if config is None else experiment_in(config))
    choices = {"dialect": dialect, "mode": mode, "follow": follow}
    try:
        anyio.run(_sync, url, named, server, choices)
    except KeyboardInterrupt:
        typer.echo("interrupted; run it again to go on")
        raise typer.Exit(130) from None


async def _sync(
    url: str, experiment: str | None, server: list[str] | None, choices: dict[str, Any]
) -> None:
    from trinity_buffer.cli.roles import plain  # noqa: PLC0415 - torch
    from trinity_buffer.explorer.server import Server  # noqa: PLC0415 - an extra
    from trinity_buffer.explorer.weight_sync import PushReport, sync_weights  # noqa: PLC0415
    from trinity_buffer.pipeline.store import open_store  # noqa: PLC0415

    def tell(push: PushReport) -> None:
        plain(f"{push.url}: policy {push.version}, checksum {push.checksum or 'not told'}")

    name = await chosen_experiment(url, experiment)
    async with open_store(url, read_only=True) as store, AsyncExitStack() as stack:
        found = await store.experiment(name)
        urls = server or [one for one in (found.config.get("server"),) if one]
        if not urls:
            raise InvalidArgumentError(f"experiment {name!r} names no server: say --server URL")
        plain(f"syncs the weights of {name} to {', '.join(urls)}")
        servers = [await stack.enter_async_context(Server(one)) for one in urls]
        if not await sync_weights(found, servers, **choices, report=tell):
            plain("no policy is published yet: nothing was pushed")
