"""Every number that is shown of a run is what plain loops over its events and segments count."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import anyio
import pytest
from starlette.testclient import TestClient
from typing_extensions import override

from tests.cli.calling import Cli
from tests.cli.conftest import cli as cli
from tests.inspect.numbers_run import MIXED, PENALIZED, Reports, made
from tests.inspect.plain_log import Log, Row, Step, Trainer, log_of
from tests.web.conftest import BASE
from tests.web.test_report import Page
from trinity_buffer import open_store
from trinity_buffer.inspector.table import to_arrow
from trinity_buffer.inspector.tracking import Tracker, track
from trinity_buffer.web.app import inspector, metrics
from trinity_buffer.web.report import report

pytestmark = pytest.mark.long

Shown = Iterator[tuple[str, Any, Any]]
"""What is shown where, and what it should be."""
LAST_STEPS = 20
EARLIER = ("TrainerRewound", "StepDealt", "RanksAssembled")
"""As the run was after these events, too."""


def same(one: Any, other: Any) -> bool:
    """Return whether two numbers, or all numbers of two containers, are equal but for rounding."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-7)
    return bool(one == other)


def at_once(rows: Sequence[Row], groups: Sequence[int]) -> dict[tuple[int, int], float]:
    """Return (group, run) -> reward, of the runs that have one."""
    runs: dict[tuple[int, int], list[Row]] = {}
    for row, group in zip(rows, groups, strict=True):
        runs.setdefault((group, row.run), []).append(row)
    found = {}
    for key, some in runs.items():
        last = max(some, key=lambda row: row.step).reward
        rewards = [last if row.reward is None else row.reward for row in some]
        known = [reward for reward in rewards if reward is not None]
        if known:
            found[key] = fmean(known)
    return found


def own_rows(log: Log, step: Step) -> list[Row]:
    return [log.rows[row.experience] for row in step.rows if not row.source]


def rewards_of(log: Log, step: Step) -> dict[tuple[int, int], float]:
    return at_once(own_rows(log, step), [row.group for row in step.rows if not row.source])


def lags_of(log: Log, step: Step) -> list[int]:
    versions = [row.version for row in own_rows(log, step)]
    return [step.number - 1 - version for version in versions if version is not None]


def mean(numbers: Sequence[float]) -> float | None:
    return fmean(numbers) if numbers else None


def line_of(log: Log, name: str, step: Step) -> dict[str, Any]:
    """Return what `steps` should say."""
    own, lags, commit = own_rows(log, step), lags_of(log, step), step.commit
    return {
        "trainer": name,
        "step": step.number,
        "state": "leased" if commit is None else "committed",
        "leased_at": step.leased_at,
        "committed_at": None if commit is None else commit.position,
        "recorded_at": step.recorded_at,
        "seconds": None
        if commit is None
        else commit.recorded_at - max(step.rewound_at, step.recorded_at),
        "rows": len(step.rows),
        "groups": step.groups,
        "microbatches": step.microbatches,
        "tokens": sum(row.length for row in own),
        "trained_tokens": sum(row.trained_tokens for row in own),
        "reward": mean([*rewards_of(log, step).values()]),
        "staleness": mean(lags),
        "oldest": max(lags, default=None),
        "checkpoint": None if commit is None else commit.body["checkpoint"],
        "metrics": step.metrics,
    }


def rows_of(logs: Mapping[str, Log], log: Log, step: Step, annotation_set: str) -> list[Any]:
    """Return what `blame` should say of each row."""
    rewards, found = rewards_of(log, step), []
    for slot, eaten in enumerate(step.rows):
        own = not eaten.source
        row = logs[eaten.source or "run"].rows[eaten.experience]
        measured = {name: float(values[slot]) for name, values in step.measured.items()}
        found.append(
            {
                "slot": slot,
                "uid": row.uid,
                "experiment": eaten.source,
                "microbatch": eaten.microbatch,
                "rank": eaten.rank,
                "group": eaten.group,
                "run": row.run,
                "reward": row.reward,
                "run_reward": rewards.get((eaten.group, row.run)) if own else None,
                "advantage": row.advantages.get(annotation_set) if own else None,
                "policy_version": row.version,
                "staleness": None if row.version is None else step.number - 1 - row.version,
                "length": row.length,
                "trained_tokens": row.trained_tokens,
                "actor": row.actor if own else "",
                "annotation": f"{eaten.note >> 20}:{eaten.note % 2**20}",
                "address": f"{eaten.experience >> 20}:{eaten.experience % 2**20}",
                "measured": {n: v for n, v in measured.items() if not math.isnan(v)},
            }
        )
    return found


def by_actor(log: Log, trainer: Trainer) -> list[dict[str, Any]]:
    """Return what `staleness` should say."""
    found = []
    for step in trainer.steps.values():
        lags: dict[str, list[int]] = {}
        for row in own_rows(log, step):
            if row.version is not None:
                lags.setdefault(row.actor, []).append(step.number - 1 - row.version)
        state = "leased" if step.commit is None else "committed"
        found += [
            {
                "step": step.number,
                "actor": actor,
                "rows": len(some),
                "mean": fmean(some),
                "greatest": max(some),
                "state": state,
            }
            for actor, some in sorted(lags.items())
        ]
    return found


def measured(log: Log, logs: Mapping[str, Log]) -> Shown:
    """Yield the metrics that are means over the rows of a step that have the number."""
    names = {"kl": "kl", "clipped": "clipped", "entropy": "entropy"}
    names |= {"ratio": "ratio_mean", "gap": "gap_mean"}
    for name, trainer in log.trainers.items():
        for step in trainer.committed:
            rows = [logs[row.source or "run"].rows[row.experience] for row in step.rows]
            for metric, column in names.items():
                values = zip(step.measured[column].tolist(), rows, strict=True)
                known = [(v, row.trained_tokens) for v, row in values if not math.isnan(v)]
                wanted = sum(v * n for v, n in known) / sum(n for _, n in known)
                yield f"{metric} of {name} {step.number}", step.metrics.get(metric), wanted


def strategy_of(log: Log, name: str) -> dict[str, Any]:
    """Return what `stats` should say of a set."""
    rows, seen = log.rows.values(), log.sets[name]["seen"]
    reasons = Counter(row.refused or row.rejected.get(name) for row in rows)
    del reasons[None]
    undecided = [
        row for row in rows if not (row.refused or name in row.rejected or name in row.notes)
    ]
    unseen = sum(row.at >= (seen + 1) << 20 for row in undecided)
    return {
        "consumer": name,
        "recorded": len(log.rows),
        "unseen": unseen,
        "waiting": len(undecided) - unseen,
        "annotated": sum(name in row.notes for row in rows),
        "rejected": dict(sorted(reasons.items())),
        "rows": log.sets[name]["rows"],
    }


def trainer_of(log: Log, name: str) -> dict[str, Any]:
    """Return what `stats` should say of a trainer."""
    trainer = log.trainers[name]
    steps, committed = list(trainer.steps.values()), trainer.committed
    annotated = log.sets.get(trainer.annotation_set, {"rows": 0, "planned": 0})
    rows = annotated["rows"]
    handed = [row.note for step in steps for row in step.rows if not row.source]
    done = [row.note for step in committed for row in step.rows if not row.source]
    groups = sum(len(tasks) for tasks, _ in log.plans.values())
    groups -= annotated["planned"]
    last = steps[-LAST_STEPS:]
    return {
        "name": name,
        "leased": len(steps),
        "committed": len(committed),
        "staleness": mean([lag for step in last for lag in lags_of(log, step)]),
        "undelivered": groups - sum(step.planned_groups for step in steps),
        "uncommitted": groups - sum(step.planned_groups for step in committed),
        "counts": {
            "consumer": name,
            "annotation_set": trainer.annotation_set,
            "rows": rows,
            "ready": rows - len(handed) - len(trainer.rejected),
            "leased": len(handed) - len(done),
            "committed": len(done),
            "rejected": dict(sorted(Counter(trainer.rejected.values()).items())),
        },
    }


def overview_of(log: Log, name: str) -> dict[str, Any]:
    """Return what `stats` should say of an experiment."""
    versions = [row.version for row in log.rows.values() if row.version is not None]
    stored = {(row.batch, row.task, row.run) for row in log.rows.values()}
    planned = {
        (batch, task, run)
        for batch, (tasks, runs) in log.plans.items()
        for task in tasks
        for run in range(runs)
    }
    refused = Counter(row.refused for row in log.rows.values() if row.refused is not None)
    return {
        "name": name,
        "finished": False,
        "head": len(log.events),
        "events": dict(sorted(log.kinds.items())),
        "first_at": log.events[0].recorded_at,
        "last_at": log.events[-1].recorded_at,
        "experiences": len(log.rows),
        "batches": len(log.plans),
        "sealed": len(log.sealed),
        "plans": {"planned": len(planned), "stored": len(planned & stored)},
        "strategies": [strategy_of(log, one) for one in sorted(log.sets)],
        "trainers": [trainer_of(log, one) for one in sorted(log.trainers)],
        "versions": [min(versions, default=None), max(versions, default=None)],
        "published": log.published[-1] if log.published else None,
        "policies": len(log.published),
        "refused": dict(sorted(refused.items())),
        "guests": {name: dict(reasons) for name, reasons in log.guests.items()},
    }


def groups_of(log: Log, name: str) -> dict[str, dict[str, Any]]:
    """Return batch and task -> what `groups` should say of them."""
    members: dict[tuple[Any, Any], list[Row]] = {}
    for row in log.rows.values():
        members.setdefault((row.batch, row.task), []).append(row)
    found = {}
    for (batch, task), rows in members.items():
        taken = [row for row in rows if row.refused is None]
        runs: dict[int, list[Row]] = {}
        for row in taken:
            runs.setdefault(row.run, []).append(row)
        center = mean([*at_once(taken, [0] * len(taken)).values()])
        squares = 0.0
        for some in runs.values():
            last = max(some, key=lambda row: row.step).reward
            rewards = [last if row.reward is None else row.reward for row in some]
            squares += fmean([((r or 0.0) - (center or 0.0)) ** 2 for r in rewards])
        planned = log.plans[batch][1]
        found[f"{batch}/{task}"] = {
            "rollouts": planned,
            "mean": center,
            "deviation": math.sqrt(squares / (len(runs) - 1)) if len(runs) > 1 else None,
            "missing": planned - len({row.run for row in rows}),
            "newest": max(row.at for row in rows),
            "runs": [
                {
                    "uid": row.uid,
                    "reward": row.reward,
                    "advantage": row.advantages.get(name),
                    "policy_version": row.version,
                    "length": row.length,
                }
                for row in sorted(rows, key=lambda row: row.uid)
            ],
        }
    return found


def of_groups(shown: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what `groups` says, as `groups_of`."""
    names = ("rollouts", "mean", "deviation", "missing", "newest")
    of_run = ("uid", "reward", "advantage", "policy_version", "length")
    return {
        f"{one['batch']}/{one['task']}": {
            **{name: one[name] for name in names},
            "runs": sorted(
                ({name: run[name] for name in of_run} for run in one["runs"]),
                key=lambda run: str(run["uid"]),
            ),
        }
        for one in shown
    }


def commands(url: str, cli: Cli, logs: Mapping[str, Log]) -> Shown:
    """Yield what the commands say."""
    (stats,) = cli("stats", "--store", url, "--json").json
    for one in stats["experiments"]:
        wanted = overview_of(logs[one["name"]], one["name"])
        yield from ((f"stats {key}", one[key], wanted[key]) for key in wanted)
    yield from questions(url, cli, logs)
    yield from _top(cli("top", "--once", "--store", url, "--experiment=run").out, logs["run"])


def earlier(url: str, cli: Cli, logs: Mapping[str, Log]) -> Shown:
    """Yield what the commands say of the run as it was."""
    log, at = logs["run"], f"--as-of={len(logs['run'].events)}"
    (one,) = cli("stats", "--store", url, "--experiment=run", "--json", at).json
    (one,) = one.get("experiments", [one])
    wanted = overview_of(log, "run")
    yield from ((f"{at}: stats {key}", one[key], wanted[key]) for key in wanted)
    yield from ((f"{at}: {what}", *pair) for what, *pair in questions(url, cli, logs, at))


def just_before(url: str, cli: Cli, log: Log, position: int) -> Shown:
    """Yield which later events `why` names of the rows that the next event takes out of a step."""
    for note, reason in log.trainers[MIXED].rejected.items():
        if reason == "dropped":
            uid, at = log.rows[log.notes[note]].uid, f"--as-of={position}"
            (shown,) = cli("why", uid, "--store", url, "--experiment=run", "--json", at).json
            places = [because["position"] or 0 for because in shown["reasons"]]
            yield f"{at}: why {uid}", [place for place in places if place > position], []


def questions(url: str, cli: Cli, logs: Mapping[str, Log], *at: str) -> Shown:
    """Yield what the commands that know ``--as-of`` say."""
    log = logs["run"]

    def asked(*args: object) -> list[Any]:
        ended = cli(*args, *at, "--store", url, "--json")
        assert ended.code == 0, ended.err
        return ended.json

    yield "rejected", *_rejected(asked("rejected", "--experiment=run", "--limit=999"), log)
    for name in log.sets:
        shown = of_groups(asked("groups", "--experiment=run", f"--set={name}", "--limit=99"))
        wanted = groups_of(log, name)
        yield f"groups {name}", shown.keys(), wanted.keys()
        yield from ((f"group {key} of {name}", shown[key], wanted[key]) for key in wanted)
    for name, trainer in log.trainers.items():
        of = ("--experiment=run", f"--trainer={name}")
        lines = [line_of(log, name, step) for step in trainer.steps.values()]
        yield f"steps {name}", asked("steps", *of), lines
        yield f"staleness {name}", asked("staleness", *of), by_actor(log, trainer)
        for step, line in zip(trainer.steps.values(), lines, strict=True):
            (blamed,) = asked("blame", step.number, *of)
            rows = rows_of(logs, log, step, trainer.annotation_set)
            yield f"blame {name} {step.number}", blamed["line"], line
            yield f"digest {name} {step.number}", blamed["digest"], step.digest.hex()
            yield f"rows of {name} {step.number}", blamed["rows"], rows


def _rejected(shown: Sequence[Mapping[str, Any]], log: Log) -> tuple[Any, Any]:
    wanted: Counter[tuple[str, str, str]] = Counter()
    for row in log.rows.values():
        wanted.update((by, why, row.uid) for by, why in row.rejected.items())
        if row.refused is not None:
            wanted["door", row.refused, row.uid] += 1
    for name, trainer in log.trainers.items():
        for note, why in trainer.rejected.items():
            wanted[name, why, log.rows[log.notes[note]].uid] += 1
    return Counter((one["by"], one["reason"], one["uid"]) for one in shown), wanted


def _top(text: str, log: Log) -> Shown:
    cells = [line.replace("│", " ").replace("|", " ").split() for line in text.splitlines()]
    for name, trainer in log.trainers.items():
        shown = next(cell[2:4] for cell in cells if cell[:1] == [name])
        yield f"top {name}", shown, [str(len(trainer.steps)), str(len(trainer.committed))]
    for name, one in log.sets.items():
        shown = next(cell[1:3] for cell in cells if cell[:1] == [name])
        yield f"top {name}", shown, [str(one["seen"]), str(one["calls"])]
    for step in log.trainers[MIXED].steps.values():
        state = "leased" if step.commit is None else "committed"
        shown = next(cell[2:5] for cell in cells if cell[:2] == [str(step.number), state])
        line = line_of(log, MIXED, step)
        wanted = [str(line["rows"]), *(short(line[name]) for name in ("reward", "staleness"))]
        yield f"top step {step.number}", shown, wanted


def short(value: float | None) -> str:
    """Return a number as tables show it."""
    return "-" if value is None else f"{value:.4g}"


class Kept(Tracker):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    @override
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.steps.append({"step": step, **metrics})

    @override
    def close(self) -> None:
        pass


def tracked_of(log: Log, name: str) -> list[dict[str, float]]:
    """Return what a tracker should be given."""
    known = ("reward", "staleness", "oldest", "rows", "groups", "tokens", "trained_tokens")
    found = []
    for step in log.trainers[name].committed:
        line = line_of(log, name, step)
        numbers = {f"batch/{one}": line[one] for one in (*known, "seconds")}
        numbers = {one: value for one, value in numbers.items() if value is not None}
        found.append({"step": step.number, **step.metrics, **numbers})
    return found


async def asked_in_python(url: str, logs: Mapping[str, Log]) -> list[tuple[str, Any, Any]]:
    """Return what trackers are given, and what `/metrics` and the report say."""
    found: list[tuple[str, Any, Any]] = []
    async with open_store(url, read_only=True) as store:
        experiment = await store.experiment("run")
        for name in logs["run"].trainers:
            kept = Kept()
            await track(experiment, kept, trainer=name)
            found.append((f"tracker {name}", kept.steps, tracked_of(logs["run"], name)))
        samples = _samples(await metrics(store))
        found.append(("metrics", samples, _metrics_of(logs)))
        page = await report(store, "run")
    return [*found, *_report(page, logs["run"])]


def _samples(text: str) -> dict[str, float]:
    pairs = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    of_now = ("trinity_buffer_store_bytes", "trinity_buffer_stuck", "trinity_buffer_here")
    return {name: float(value) for name, value in pairs if not name.startswith(of_now)}


def _metrics_of(logs: Mapping[str, Log]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, log in logs.items():
        for metric, labels, value in _samples_of(overview_of(log, name)):
            if value is not None:
                of = {"experiment": name, **labels}
                told = ",".join(f'{key}="{one}"' for key, one in of.items())
                found[f"trinity_buffer_{metric}{{{told}}}"] = float(value)
    return found


def _samples_of(one: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str], float | None]]:
    plans = one["plans"]
    yield "experiences_total", {}, one["experiences"]
    yield "planned_rollouts_total", {}, plans["planned"]
    yield "missing_rollouts", {}, plans["planned"] - plans["stored"]
    yield "policy_version", {}, one["published"]
    for kind, count in one["events"].items():
        yield "events_total", {"kind": kind}, count
    for reason, count in one["refused"].items():
        yield "refused_experiences_total", {"reason": reason}, count
    for row in one["strategies"]:
        for state in ("annotated", "unseen", "waiting"):
            ending = "_total" if state == "annotated" else ""
            yield f"{state}_experiences{ending}", {"set": row["consumer"]}, row[state]
    for row in one["trainers"]:
        labels = {"trainer": row["name"]}
        yield "leased_step", labels, row["leased"]
        yield "committed_step", labels, row["committed"]
        yield "staleness_mean", labels, row["staleness"]
        for state in ("ready", "leased", "committed"):
            yield f"{state}_rows", labels, row["counts"][state]
    yield from _rejected_of(one)


def _rejected_of(one: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str], float | None]]:
    left = [(row["consumer"], row["rejected"]) for row in one["strategies"]]
    left += [(row["name"], row["counts"]["rejected"]) for row in one["trainers"]]
    for by, reasons in [*left, *one["guests"].items()]:
        for reason, count in reasons.items():
            yield "rejected_experiences_total", {"by": by, "reason": reason}, count


def cells_of(page: str) -> list[list[str]]:
    """Return the texts of the cells of all rows of tables."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", page, re.DOTALL)
    return [[Page(cell).text.strip() for cell in re.split(r"</t[dh]>", row)][:-1] for row in rows]


def bars_of(page: str) -> Counter[int]:
    """Return how many bars of the histogram hold how many values."""
    return Counter(map(int, re.findall(r"<title>\S+ to \S+: (\d+)</title>", page)))


def _bars(rewards: Sequence[float], bins: int = 12) -> Counter[int]:
    low, high = min(rewards), max(rewards)
    if low == high:
        return Counter([len(rewards)])
    places = Counter(min(int((r - low) / (high - low) * bins), bins - 1) for r in rewards)
    return Counter(places.values())


def text_of(value: Any) -> str:
    """Return a number as pages show it."""
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _curves(page: str) -> dict[str, list[str]]:
    """Return name of a curve -> its labels."""
    figures = re.findall(r"<figure>(.*?)</figure>", page, re.DOTALL)
    return {
        Page(re.split("</figcaption>", one)[0]).text.strip(): re.findall(
            r"<title>(step \d+: [^<]*)</title>", one
        )
        for one in figures
    }


def _curves_of(log: Log, name: str) -> dict[str, list[str]]:
    lines = [line_of(log, name, step) for step in log.trainers[name].steps.values()]
    own = {"reward": "reward", "staleness": "staleness", "tokens": "tokens"}
    own["seconds to the commit"] = "seconds"
    found = {
        title: {line["step"]: line[key] for line in lines if line[key] is not None}
        for title, key in own.items()
    }
    for key in sorted({key for line in lines for key in line["metrics"]}):
        measured = {x["step"]: x["metrics"][key] for x in lines if key in x["metrics"]}
        found.setdefault(key, measured)  # what the log knows, no measure says otherwise
    return {
        title: [f"step {step}: {value:.4g}" for step, value in points.items()]
        for title, points in found.items()
    }


def _report(page: str, log: Log) -> Shown:
    one, cells = overview_of(log, "run"), cells_of(page)
    yield from _from_plan(cells, one, "report")
    yield "curves of the report", _curves(page) | {}, _curves_of(log, MIXED) | _rewards(page)
    step = log.trainers[MIXED].committed[-1]
    line, rewards = line_of(log, MIXED, step), [*rewards_of(log, step).values()]
    told = f"{line['rows']} rows in {line['groups']} groups, {line['tokens']} tokens"
    yield "last step of the report", told in page, True
    yield "bars of the report", bars_of(page), _bars(rewards)
    left = {(row[0], row[1]): int(row[2]) for row in cells if len(row) == 3 and row[2].isdigit()}
    yield "left out", left, _left_out(log)
    yield "actors of the report", _actors(cells), _growth(by_actor(log, log.trainers[MIXED]))


def _rewards(page: str) -> dict[str, list[str]]:
    return {name: labels for name, labels in _curves(page).items() if name == "rewards of runs"}


def _from_plan(cells: Sequence[Sequence[str]], one: Mapping[str, Any], where: str) -> Shown:
    """Yield the table from the plan to the commit."""
    table = {row[0]: list(row[1:]) for row in cells if len(row) > 2}
    plans = one["plans"]
    missing = f"{plans['planned'] - plans['stored']} of them missing"
    shown = table["planned rollouts"]
    yield f"{where}: planned", [shown[0], shown[1].split(";")[0]], [str(plans["planned"]), missing]
    shown = table["recorded experiences"]
    low, high = one["versions"]
    known = [str(one["experiences"]), f"policy versions {low} to {high}"]
    yield f"{where}: recorded", [shown[0], shown[1].split(";")[0]], known
    for row in one["strategies"]:
        reasons = [f"{count} {reason}" for reason, count in row["rejected"].items()]
        told = ", ".join([f"{row['unseen']} unseen", f"{row['waiting']} waiting", *reasons])
        shown = [
            " ".join(cell.split()).replace(" ,", ",")
            for cell in table[f"annotated by  {row['consumer']}"]
        ]
        yield f"{where}: {row['consumer']}", shown, [str(row["annotated"]), told]
    for row in one["trainers"]:
        shown, counts = table[f"committed by  {row['name']}"], row["counts"]
        told = f"{counts['ready']} ready, {counts['leased']} leased; step {row['committed']}"
        if where != "report":
            told += f" of {row['leased']}; staleness {text_of(row['staleness'])}"
        yield f"{where}: {row['name']}", shown, [str(counts["committed"]), told]


def _left_out(log: Log) -> dict[tuple[str, str], int]:
    """Return who left out how many for which reason: each once."""
    found: Counter[tuple[str, str]] = Counter()
    for row in log.rows.values():
        found.update(row.rejected.items())
        if row.refused is not None:
            found["door", row.refused] += 1
    for name, trainer in log.trainers.items():
        found.update((name, reason) for reason in trainer.rejected.values())
    return dict(found)


def _actors(cells: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    start = [row[0] for row in cells].index("actor")
    table = [row for row in cells[start + 1 :] if len(row) == 6]
    return {row[0]: list(row[1:]) for row in table}


def _growth(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return actor -> rows, mean, mean of the first and of the last step, greatest."""
    steps = sorted({line["step"] for line in lines})
    assert len(steps) <= 10  # so that a tenth of them is one
    actors = sorted({line["actor"] for line in lines})
    found = {}
    for actor in actors if len(actors) == 1 else [*actors, "all"]:
        own = [line for line in lines if actor in (line["actor"], "all")]
        ends = [[line for line in own if line["step"] == end] for end in (steps[0], steps[-1])]
        told = [_weighted(some) for some in (own, *ends)]
        greatest = max(line["greatest"] for line in own)
        rows = sum(line["rows"] for line in own)
        found[actor] = [str(rows), *map(text_of, told), str(greatest)]
    return found


def _weighted(lines: Sequence[Mapping[str, Any]]) -> float | None:
    rows = sum(line["rows"] for line in lines)
    return sum(line["rows"] * line["mean"] for line in lines) / rows if rows else None


def pages(client: TestClient, logs: Mapping[str, Log]) -> Shown:
    """Yield what the pages of the inspector say."""
    log = logs["run"]

    def page_of(path: str) -> str:
        answer = client.get(f"/run/{path}")
        text: str = answer.text
        assert answer.status_code == 200, text
        return text

    overview = page_of("")
    yield from _from_plan(cells_of(overview), overview_of(log, "run"), "page")
    told = re.findall(r"reward (\S+) ± (\S+);", page_of("groups"))
    groups = groups_of(log, "varied").values()
    moments = [(text_of(one["mean"]), text_of(one["deviation"])) for one in groups]
    yield "page of groups", Counter(told), Counter(moments)
    for name, trainer in log.trainers.items():
        page = page_of(f"steps?trainer={name}")
        yield f"curves of {name}", _curves(page), _curves_of(log, name)
        lines = {step.number: line_of(log, name, step) for step in trainer.steps.values()}
        names = ("rows", "groups", "tokens", "reward", "staleness", "seconds")
        wanted = {
            str(number): [name, line["state"], *(text_of(line[one]) for one in names)]
            for number, line in lines.items()
        }
        shown = {row[0]: row[1:9] for row in cells_of(page) if row[0].isdigit()}
        yield f"steps page of {name}", shown, wanted
        for step in trainer.steps.values():
            page = page_of(f"steps/{step.number}?trainer={name}")
            yield from _step_page(page, logs, name, step, lines[step.number])
        cells = cells_of(page_of(f"staleness?trainer={name}"))
        ages = by_actor(log, trainer)
        yield f"staleness page of {name}", _actors(cells), _growth(ages)


def _step_page(
    page: str, logs: Mapping[str, Log], name: str, step: Step, line: Mapping[str, Any]
) -> Shown:
    log = logs["run"]
    where, text = f"page of step {step.number} of {name}", " ".join(Page(page).text.split())
    told = (
        f"{line['state']}; {line['rows']} rows in {line['groups']} groups, {line['microbatches']} "
        f"micro-batches, {line['tokens']} tokens, {line['trained_tokens']} trained"
    )
    yield where, told in text, True
    yield f"bars of the {where}", bars_of(page), _bars([*rewards_of(log, step).values()])
    rows = rows_of(logs, log, step, log.trainers[name].annotation_set)
    names = ("group", "microbatch", "reward", "advantage", "policy_version", "staleness", "length")
    wanted = [[text_of(row[one]) for one in names] for row in rows]
    shares = any("loss_share" in row["measured"] for row in rows)
    if shares:
        for row, cells in zip(rows, wanted, strict=True):
            cells.insert(4, text_of(row["measured"].get("loss_share")))
    shown = [row[1 : 8 + shares] for row in cells_of(page) if len(row) > 8 and "/" in row[0]]
    yield f"rows of the {where}", shown, wanted


def table_of(url: str, log: Log, name: str) -> Shown:
    """Yield what the table says of all rows, beside a set."""
    shown = {row["uid"]: row for row in to_arrow(url, "run", set=name).to_pylist()}
    names = ("reward", "policy_version", "length", "trained_tokens", "refused", "advantage")
    wanted = {}
    for row in log.rows.values():
        numbers = (row.reward, row.version, row.length, row.trained_tokens, row.refused)
        held = [
            (step.commit is None, step.number)
            for trainer in log.trainers.values()
            if trainer.annotation_set == name
            for step in trainer.steps.values()
            if row.notes.get(name) in [one.note for one in step.rows]
        ]
        step = min(held)[1] if held else None
        wanted[row.uid] = [*numbers, row.advantages.get(name), step]
    found = {uid: [row[one] for one in (*names, "trained_step")] for uid, row in shown.items()}
    yield f"table {name}", found, wanted


def reported(reports: Mapping[str, Sequence[Reports]], log: Log) -> Shown:
    """Yield what trainers reported of each step, as it was served when they trained it."""
    for name, processes in reports.items():
        for place, some in enumerate(processes):
            last = {one["step"]: one for one in some}
            for step in log.trainers[name].committed:
                one, line = last[step.number], line_of(log, name, step)
                of = ("reward", "staleness", "rows")
                shown, wanted = [one[x] for x in of], [line[x] for x in of]
                yield f"report {place} of {name}, step {step.number}", shown, wanted


def test_every_number_is_that_of_a_plain_count(store_url: str, tmp_path: Path, cli: Cli) -> None:
    reports = made(store_url, tmp_path)

    async def read(up_to: int | None = None) -> dict[str, Log]:
        async with open_store(store_url, read_only=True) as store:
            expert, run = [await store.experiment(name) for name in ("expert", "run")]
            return {"expert": await log_of(expert), "run": await log_of(run, up_to)}

    logs = anyio.run(read)
    log = logs["run"]
    what_is_there(log)
    some = [*commands(store_url, cli, logs), *anyio.run(asked_in_python, store_url, logs)]
    with TestClient(inspector(store_url), base_url=BASE) as client:
        some += pages(client, logs)
    some += [one for name in log.sets for one in table_of(store_url, log, name)]
    some += [*reported(reports, log), *measured(log, logs)]
    for event in log.events:
        if event.kind in EARLIER:
            some += earlier(store_url, cli, anyio.run(read, event.position))
        if event.kind == "StepDealt":
            some += just_before(store_url, cli, log, event.position - 1)
    wrong = [
        f"{what}: {shown}\n  and not {wanted}"
        for what, shown, wanted in some
        if not same(shown, wanted)
    ]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(some)} differ", *wrong])


def what_is_there(log: Log) -> None:
    """Refuse a run that has become too simple to prove anything."""
    mixed, penalized = log.trainers[MIXED], log.trainers[PENALIZED]
    assert {row.source for step in mixed.steps.values() for row in step.rows} == {"", "expert"}
    assert {row.rank for step in penalized.steps.values() for row in step.rows} == {0, 1}
    assert any("penalty/" in name for name in penalized.steps[2].metrics)
    assert {"oversize", "dropped"} == set(mixed.rejected.values())
    assert log.kinds["TrainerRewound"] == log.kinds["StepDealt"] == 1
    assert any(len(rewards_of(log, s)) < len(own_rows(log, s)) for s in mixed.committed)
