"""Commands about servers: show a store, record what passes, bring weights to inference servers."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Annotated, Any, Literal, get_args

import typer

from trinity_buffer.cli import options
from trinity_buffer.cli.escaping import escaped
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.lazy import extra
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.recorder.guard import LOCAL

Dialect = Literal["vllm", "sglang"]

GOODBYE_S = 2
"""How long `serve` waits for open pages when it ends."""

Port = Annotated[int, typer.Option(min=0, max=65535)]
Token = Annotated[str | None, typer.Option(envvar="TRINITY_BUFFER_TOKEN")]


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at ``port`` of ``host``; clients may connect at once.

    Raises:
        OSError: it cannot listen there; the message says what to do.
    """
    door = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted sockets inherit it: without it Nagle delays an answer's second part by 40 ms.
    door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        door.bind((host, port))
        door.listen()
    except (OSError, UnicodeError) as error:
        door.close()
        is_host = isinstance(error, UnicodeError | socket.gaierror)
        option, why = "--host" if is_host else "--port", getattr(error, "strerror", None) or error
        raise OSError(f"port {port} of {host}: {why}: choose another with {option}") from error
    return door


async def _serve(
    door: socket.socket, host: str, app: Any, line: Callable[[str], str], **options: Any
) -> None:
    """Serve ``app`` at ``door`` until Ctrl-C; print a line with its URL."""
    uvicorn = extra("uvicorn", "web")
    config = uvicorn.Config(app, log_level="warning", access_log=False, **options)
    gc.collect()
    gc.freeze()  # else a collection scans all imported modules: 0.2 s without an answer
    typer.echo(escaped(line(f"http://{host}:{door.getsockname()[1]}")))
    await uvicorn.Server(config).serve([door])


def _require_token(token: str | None, host: str, risk: str) -> None:
    """Raise InvalidArgumentError unless there is a token where other machines can connect."""
    if token is None and host not in LOCAL:
        raise InvalidArgumentError(f"--host {host} lets others {risk}")
    if token == "":
        raise InvalidArgumentError("--token is empty: any client would pass")


@options.command()
async def serve(
    store: str | None = None, host: str = "127.0.0.1", port: Port = 8500, token: Token = None
) -> None:
    """Show a store in the browser: red flags, steps, groups, rollouts, events; and /metrics.

    Example: trinity-buffer serve --store runs/demo.db

    Args:
        token: Token that every visitor must give: /?token=TOKEN.
    """
    _require_token(token, host, "read the store: give --token, which they must bring")
    extra("uvicorn", "web")
    extra("starlette.applications", "web")
    from trinity_buffer.web.app import inspector  # noqa: PLC0415 - an extra

    url = options.chosen_store(store)
    async with open_store(url, read_only=True) as opened:  # before anything listens
        shown = opened.url
    app, ending = inspector(url, token=token), {"timeout_graceful_shutdown": GOODBYE_S}
    with listening(host, port) as door:
        await _serve(door, host, app, lambda at: f"shows {shown}: {at}/", lifespan="on", **ending)


@options.command(resumable=True)
async def sync_weights(
    place: options.Place,
    server: list[str] | None = None,
    dialect: Dialect | None = None,
    mode: Literal["wait", "keep", "abort"] = "wait",
    follow: bool = False,
) -> None:
    """Load the newest published weights into inference servers: pause, load, resume.

    A server must see the checkpoints at the same path, and offer its control endpoints (vLLM:
    VLLM_SERVER_DEV_MODE=1).

    Example: trinity-buffer sync-weights --server http://127.0.0.1:8000/v1 --follow

    Args:
        server: URL of an inference server; repeatable. By default the run's.
        dialect: vllm or sglang. By default the run's.
        mode: Requests in flight: wait for them, abort them, or keep them, whose answers then mix
            old and new weights.
    """
    from trinity_buffer.cli.roles import plain  # noqa: PLC0415 - torch
    from trinity_buffer.explorer import server as inference  # noqa: PLC0415 - torch, likewise

    def report(push: inference.PushReport) -> None:
        plain(f"{push.url}: policy {push.version}, checksum {push.checksum or 'not told'}")

    async with open_store(place.url, read_only=True) as opened, AsyncExitStack() as stack:
        name = await options.experiment_in(opened, place.experiment)
        run_ = await opened.experiment(name)
        urls = server or [own for own in (run_.config.get("server"),) if own]
        if not urls:
            raise InvalidArgumentError(f"experiment {name!r} names no server: say --server URL")
        known, of_run = get_args(Dialect), run_.config.get("server_type", "vllm")
        chosen = dialect or of_run
        if chosen not in known or not all(isinstance(own, str) for own in urls):
            raise InvalidArgumentError(
                f"experiment {name!r}: server={urls[0]!r}, server_type={chosen!r}: the first "
                f"must be a URL, the second one of {', '.join(known)}"
            )
        plain(f"syncs the weights of {name} to {', '.join(urls)}")
        servers = [await stack.enter_async_context(inference.Server(own)) for own in urls]
        if not await inference.sync_weights(
            run_, servers, mode=mode, follow=follow, dialect=chosen, report=report
        ):
            plain("no policy is published yet: nothing was pushed")


@options.command()
async def record(
    upstream: options.Required,
    store: Annotated[str, typer.Option(envvar=options.STORE_VARIABLE)] = "runs/recorded.db",
    experiment: str = "recorded",
    rollouts_per_group: options.OptionalCount = None,
    idle_s: Annotated[float | None, typer.Option(min=0.001)] = None,
    actor: str = "recorder",
    host: str = "127.0.0.1",
    port: Port = 8400,
    token: Token = None,
    upstream_key: Annotated[str | None, typer.Option(envvar="TRINITY_BUFFER_UPSTREAM_KEY")] = None,
    ack: Literal["after", "before"] = "after",
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs",
    max_in_flight: options.Count = 1024,
) -> None:
    """Run an OpenAI-compatible proxy that stores every conversation passing through it.

    A client's base URL is http://HOST:PORT/rollouts/TASK/RUN/v1, or http://HOST:PORT/v1 with the
    header X-Trinity-Rollout: TASK/RUN. POST /v1/rollouts/TASK/RUN/reward {"reward": 1.0} closes it.

    Example: trinity-buffer record --upstream http://127.0.0.1:8000/v1 --store runs/agent.db

    Args:
        upstream: URL of the inference server.
        store: Path or URL of the store.
        experiment: Which experiment; created if it does not exist.
        rollouts_per_group: Rollouts of each task: it is decided when so many are closed. Without
            it, an experiment that exists keeps its number; where there is none, --idle-s decides.
        idle_s: Where the number of rollouts is not known, a task is decided so many seconds after
            the last one was closed; of a new experiment, 60.
        actor: Name of this recorder.
        token: Token that every client must send as its API key.
        upstream_key: API key of the inference server.
        ack: after: send an answer (the end of a stream) once it is durable. before: at once.
        logprobs_mode: As the server was started: raw_logprobs or processed_logprobs.
        max_in_flight: Concurrent requests; more are answered with 429.
    """
    _require_token(token, host, "ask: give --token, which clients bring as their API key")
    from trinity_buffer.explorer.server import Server  # noqa: PLC0415 - an extra

    extra("uvicorn", "record")
    extra("starlette.applications", "record")
    from trinity_buffer.recorder.app import Recorder  # noqa: PLC0415
    from trinity_buffer.recorder.recording import Recording  # noqa: PLC0415

    rules = {"rollouts_per_group": rollouts_per_group, "idle_s": idle_s}
    settings: dict[str, Any] = {"token": token, "ack": ack, "logprobs_mode": logprobs_mode}
    config = {key: value for key, value in rules.items() if value is not None}
    async with Server(upstream, api_key=upstream_key) as behind:
        with listening(host, port) as door:  # before there is a store: a busy port leaves none
            options.make_folder_of(store)
            async with open_store(store) as opened:
                recording = await Recording.begin(opened, experiment, actor=actor, config=config)
                app = Recorder(behind, recording, max_in_flight=max_in_flight, **settings).app()
                what = f"records what {behind.root} answers into {experiment}"
                await _serve(door, host, app, lambda at: f"{what}: {at}/v1")
