"""Commands about inference servers: bring them new weights, record what passes."""

from __future__ import annotations

import gc
from contextlib import AsyncExitStack
from typing import Annotated, Any

import anyio
import typer

from trinity_buffer.cli.listening import listening
from trinity_buffer.cli.options import (
    STORE_VARIABLE,
    ExperimentOption,
    PlaceOption,
    StoreOption,
    chosen_experiment,
    chosen_store,
    made_folder_of,
)
from trinity_buffer.cli.run_file import experiment_in
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.extras import extra
from trinity_buffer.recorder.guard import LOCAL

MODES = ("wait", "keep", "abort")
DIALECTS = ("vllm", "sglang")

TokenOption = Annotated[
    str | None,
    typer.Option(
        envvar="TRINITY_BUFFER_TOKEN", help="Token that every client must send as its API key."
    ),
]
UpstreamKeyOption = Annotated[
    str | None,
    typer.Option(envvar="TRINITY_BUFFER_UPSTREAM_KEY", help="API key of the inference server."),
]
InFlightOption = Annotated[
    int, typer.Option(min=1, help="Concurrent requests; more are answered with 429.")
]
LogprobsOption = Annotated[
    str, typer.Option(help="As the server was started: raw_logprobs or processed_logprobs.")
]
RunsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Rollouts of each task: it is decided when so many are closed. Without it, an "
        "experiment that exists keeps its number; where there is none, --idle-s decides.",
    ),
]
IdleOption = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        help="Where the number of rollouts is not known, a task is decided so many seconds after "
        "the last one was closed; of a new experiment, 60.",
    ),
]


def sync_weights(
    server: Annotated[
        list[str] | None,
        typer.Option(
            "--server", help="URL of an inference server; repeatable. By default the run's."
        ),
    ] = None,
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    config: PlaceOption = None,
    dialect: Annotated[
        str | None, typer.Option(help="vllm or sglang. By default the run's.")
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="Requests in flight: wait for them, abort them, or keep them, whose answers then"
            " mix old and new weights."
        ),
    ] = "wait",
    follow: Annotated[
        bool, typer.Option("--follow", help="Keep running until the experiment is finished.")
    ] = False,
) -> None:
    """Load the newest published weights into inference servers: pause, load, resume.

    A server must see the checkpoints at the same path, and offer its control endpoints (vLLM:
    VLLM_SERVER_DEV_MODE=1).

    Example: trinity-buffer sync-weights --server http://127.0.0.1:8000/v1 --follow
    """
    for option, said, known in (("--mode", mode, MODES), ("--dialect", dialect, DIALECTS)):
        if said is not None and said not in known:
            raise InvalidArgumentError(f"{option} {said}: there are {', '.join(known)}")
    url = chosen_store(store, config)
    named = experiment or (None if config is None else experiment_in(config))
    choices = {"mode": mode, "follow": follow}
    try:
        anyio.run(_sync, url, named, server, dialect, choices)
    except KeyboardInterrupt:
        typer.echo("interrupted; run it again to go on")
        raise typer.Exit(130) from None


async def _sync(
    url: str,
    experiment: str | None,
    server: list[str] | None,
    dialect: str | None,
    choices: dict[str, Any],
) -> None:
    from trinity_buffer.cli.roles import plain  # noqa: PLC0415 - torch
    from trinity_buffer.explorer.server import Server  # noqa: PLC0415 - an extra
    from trinity_buffer.explorer.weights import PushReport, sync_weights  # noqa: PLC0415
    from trinity_buffer.pipeline.store import open_store  # noqa: PLC0415

    def tell(push: PushReport) -> None:
        plain(f"{push.url}: policy {push.version}, checksum {push.checksum or 'not told'}")

    name = await chosen_experiment(url, experiment)
    async with open_store(url, read_only=True) as store, AsyncExitStack() as stack:
        found = await store.experiment(name)
        urls = server or [one for one in (found.config.get("server"),) if one]
        if not urls:
            raise InvalidArgumentError(f"experiment {name!r} names no server: say --server URL")
        spoken = dialect or found.config.get("dialect", DIALECTS[0])
        if spoken not in DIALECTS or not all(isinstance(one, str) for one in urls):
            raise InvalidArgumentError(
                f"experiment {name!r}: server={urls[0]!r}, dialect={spoken!r}: the first must be "
                f"a URL, the second one of {', '.join(DIALECTS)}"
            )
        plain(f"syncs the weights of {name} to {', '.join(urls)}")
        servers = [await stack.enter_async_context(Server(one)) for one in urls]
        choices["dialect"] = spoken
        if not await sync_weights(found, servers, **choices, report=tell):
            plain("no policy is published yet: nothing was pushed")


def record(
    upstream: Annotated[str, typer.Option(help="URL of the inference server.")],
    store: Annotated[
        str, typer.Option(envvar=STORE_VARIABLE, help="Path or URL of the store.")
    ] = "runs/recorded.db",
    experiment: Annotated[
        str, typer.Option(help="Which experiment; created if it does not exist.")
    ] = "recorded",
    rollouts_per_group: RunsOption = None,
    idle_s: IdleOption = None,
    actor: Annotated[str, typer.Option(help="Name of this recorder.")] = "recorder",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: any free one.", min=0, max=65535)] = 8400,
    token: TokenOption = None,
    upstream_key: UpstreamKeyOption = None,
    ack: Annotated[
        str,
        typer.Option(
            help="after: send an answer (the end of a stream) once it is durable. before: at once."
        ),
    ] = "after",
    logprobs_mode: LogprobsOption = "raw_logprobs",
    max_in_flight: InFlightOption = 1024,
) -> None:
    """Run an OpenAI-compatible proxy that stores every conversation passing through it.

    A client's base URL is http://HOST:PORT/rollouts/TASK/RUN/v1, or http://HOST:PORT/v1 with the
    header X-Trinity-Rollout: TASK/RUN. POST /v1/rollouts/TASK/RUN/reward {"reward": 1.0} closes it.

    Example: trinity-buffer record --upstream http://127.0.0.1:8000/v1 --store runs/agent.db
    """
    for option, said, known in (
        ("--ack", ack, ("after", "before")),
        ("--logprobs-mode", logprobs_mode, ("raw_logprobs", "processed_logprobs")),
    ):
        if said not in known:
            raise InvalidArgumentError(f"{option} {said}: there are {', '.join(known)}")
    if token is None and host not in LOCAL:
        raise InvalidArgumentError(
            f"--host {host} lets others ask: give --token, which clients bring as their API key"
        )
    if token == "":
        raise InvalidArgumentError("--token is empty: anybody could bring it")
    made_folder_of(store)
    rules = {"rollouts_per_group": rollouts_per_group, "idle_s": idle_s}
    chosen = {key: value for key, value in rules.items() if value is not None}
    settings = {"token": token, "ack": ack, "logprobs_mode": logprobs_mode}
    anyio.run(
        _record,
        (store, experiment, actor, chosen),
        (upstream, upstream_key),
        {**settings, "max_in_flight": max_in_flight},
        (host, port),
    )


async def _record(
    place: tuple[str, str, str, dict[str, Any]],
    upstream: tuple[str, str | None],
    settings: dict[str, Any],
    listens: tuple[str, int],
) -> None:
    from trinity_buffer.cli.escaping import escaped  # noqa: PLC0415
    from trinity_buffer.explorer.server import Server  # noqa: PLC0415 - an extra
    from trinity_buffer.pipeline.store import open_store  # noqa: PLC0415

    uvicorn = extra("uvicorn", "record")
    extra("starlette.applications", "record")
    from trinity_buffer.recorder.app import Recorder, RecorderSettings  # noqa: PLC0415
    from trinity_buffer.recorder.recording import Recording  # noqa: PLC0415

    url, name, actor, chosen = place
    async with Server(upstream[0], api_key=upstream[1]) as behind, open_store(url) as store:
        recording = await Recording.begin(store, name, actor=actor, config=chosen)
        recorder = Recorder(behind, recording, RecorderSettings(**settings))
        host, port = listens
        config = uvicorn.Config(recorder.app(), host, port, log_level="warning", access_log=False)
        door = listening(host, port)
        at = f"http://{host}:{door.getsockname()[1]}/v1"
        gc.collect()
        gc.freeze()  # else all that was imported is walked now and then: 0.2 s without an answer
        typer.echo(escaped(f"records what {behind.root} answers into {name}: {at}"))
        await uvicorn.Server(config).serve([door])
