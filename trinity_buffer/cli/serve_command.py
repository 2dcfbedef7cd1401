"""The command that shows a store in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from trinity_buffer.cli.escaping import escaped
from trinity_buffer.cli.listening import listening
from trinity_buffer.cli.options import StoreOption, chosen_store
from trinity_buffer.cli.running import run
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.extras import extra
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.recorder.guard import LOCAL

GOODBYE_S = 2
"""So long the pages that follow a run may take to end."""


def serve(
    store: StoreOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: any free one.", min=0, max=65535)] = 8500,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="TRINITY_BUFFER_TOKEN", help="Token that every visitor must give: /?token=TOKEN."
        ),
    ] = None,
) -> None:
    """Show a store in the browser: red flags, steps, groups, rollouts, events; and /metrics.

    Example: trinity-buffer serve --store runs/demo.db
    """
    if token is None and host not in LOCAL:
        raise InvalidArgumentError(
            f"--host {host} lets others read the store: give --token, which they must bring"
        )
    if token == "":
        raise InvalidArgumentError("--token is empty: anybody could bring it")
    uvicorn = extra("uvicorn", "web")
    extra("starlette.applications", "web")
    from trinity_buffer.web.app import inspector  # noqa: PLC0415 - an extra

    url = chosen_store(store)

    async def main() -> None:
        async with open_store(url, read_only=True) as opened:
            shown = opened.url  # a store that cannot be opened is told before anything listens
        config = uvicorn.Config(
            inspector(url, token=token),
            host,
            port,
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=GOODBYE_S,
        )
        door = listening(host, port)
        typer.echo(escaped(f"shows {shown}: http://{host}:{door.getsockname()[1]}/"))
        await uvicorn.Server(config).serve([door])

    run(main)
